// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
#include "decode16.cuh"

namespace mla::sm90a {
template void launch_decode16<__nv_bfloat16, true>(const KernelParams&, int, cudaStream_t);
template void launch_decode16<__nv_bfloat16, false>(const KernelParams&, int, cudaStream_t);
}  // namespace mla::sm90a
