// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
#include "rows.cuh"

#include "../sm90a/check_cuda.h"

namespace mla::sm100a {

void prepare_rows(const KernelCall& call, cudaStream_t stream) {
  prepare_kernel<<<call.plan.b, kThreads, 0, stream>>>(call);
  sm90a::check_cuda(cudaGetLastError(), "launch of the sm100a prepare kernel");
}

void finish_rows(const KernelCall& call, cudaStream_t stream) {
  const dim3 grid(call.plan.b, call.d.h_q);
  if (call.d.dtype == DType::kFP16)
    finish_kernel<__half><<<grid, kThreads, 0, stream>>>(call);
  else
    finish_kernel<__nv_bfloat16><<<grid, kThreads, 0, stream>>>(call);
  sm90a::check_cuda(cudaGetLastError(), "launch of the sm100a finish kernel");
}

}  // namespace mla::sm100a
