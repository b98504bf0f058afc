// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Shared memory of each instantiation, for mla_kernels/inspection.py.
#include "mla/facts.h"

#include "decode16_load.cuh"
#include "traits.h"

namespace mla::sm90a {

MLA_FACT(n16_tma, "decode e4m3, 16 lines, TMA", Traits<16, true>::kSharedBytes);
MLA_FACT(n16_gather, "decode e4m3, 16 lines, gather", Traits<16, false>::kSharedBytes);
MLA_FACT(n32_tma, "decode e4m3, 32 lines, TMA", Traits<32, true>::kSharedBytes);
MLA_FACT(n32_gather, "decode e4m3, 32 lines, gather", Traits<32, false>::kSharedBytes);
MLA_FACT(n64_tma, "decode e4m3, 64 lines, TMA", Traits<64, true>::kSharedBytes);
MLA_FACT(bf16_tma, "decode bf16, TMA", bits16::Traits<__nv_bfloat16, true>::kSharedBytes);
MLA_FACT(bf16_gather, "decode bf16, gather", bits16::Traits<__nv_bfloat16, false>::kSharedBytes);
MLA_FACT(fp16_tma, "decode fp16, TMA", bits16::Traits<__half, true>::kSharedBytes);
MLA_FACT(fp16_gather, "decode fp16, gather", bits16::Traits<__half, false>::kSharedBytes);

}  // namespace mla::sm90a
