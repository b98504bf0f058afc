// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
#include "mla.cuh"

namespace mla::sm100a {

template void launch_mla<DType::kE4M3, true>(const KernelCall&, cudaStream_t);

}  // namespace mla::sm100a
