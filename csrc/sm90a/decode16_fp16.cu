// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
#include "decode16.cuh"

namespace mla::sm90a {
template void launch_decode16<__half, true>(const KernelParams&, int, cudaStream_t);
template void launch_decode16<__half, false>(const KernelParams&, int, cudaStream_t);
}  // namespace mla::sm90a
