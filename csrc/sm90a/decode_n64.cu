// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
#include "launch_decode.cuh"

namespace mla::sm90a {
template void launch_decode<64, true>(const KernelParams&, int, cudaStream_t);
}  // namespace mla::sm90a
