// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
#include "launch_decode.cuh"

namespace mla::sm90a {
template void launch_decode<32, true>(const KernelParams&, int, cudaStream_t);
template void launch_decode<32, false>(const KernelParams&, int, cudaStream_t);
}  // namespace mla::sm90a
