// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Host side of one instantiation.
#pragma once

#include "check_cuda.h"
#include "decode.cuh"
#include "launch_parts.h"

namespace mla::sm90a {

template <int N, bool kTma>
void launch_decode(const KernelParams& p, int ctas, cudaStream_t stream) {
  using T = Traits<N, kTma>;
  // The limit is a property of each device: set before every launch (it costs well under a microsecond).
  check_cuda(cudaFuncSetAttribute(decode_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSharedBytes),
             "cudaFuncSetAttribute");
  decode_kernel<T><<<ctas, kThreads, T::kSharedBytes, stream>>>(p);
  check_cuda(cudaGetLastError(), "launch of the sm90a decode kernel");
}

}  // namespace mla::sm90a
