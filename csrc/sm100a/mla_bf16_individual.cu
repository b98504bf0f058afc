// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
#include "mla.cuh"
#include "mla/facts.h"

namespace mla::sm100a {

template void launch_mla<DType::kBF16, false>(const KernelCall&, cudaStream_t);
MLA_FACT(fact, "mla bf16, individual", Kernel<DType::kBF16, false>::SharedStorageSize);

}  // namespace mla::sm100a
