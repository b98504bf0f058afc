// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
#include "mla.cuh"
#include "mla/facts.h"

namespace mla::sm100a {

template void launch_mla<DType::kE4M3, true>(const KernelCall&, cudaStream_t);
MLA_FACT(fact, "mla e4m3, persistent", Kernel<DType::kE4M3, true>::SharedStorageSize);

}  // namespace mla::sm100a
