// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
#include "mla.cuh"
#include "mla/facts.h"

namespace mla::sm100a {

template void launch_mla<DType::kE4M3, false>(const KernelCall&, cudaStream_t);
MLA_FACT(fact, "mla e4m3, individual", Kernel<DType::kE4M3, false>::SharedStorageSize);

}  // namespace mla::sm100a
