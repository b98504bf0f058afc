// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Merges the partials of rows with several splits:
//   out = out_scale * sum_i w_i O_i / sum_i w_i,  w_i = exp(lse_i - max lse)   with the log-sum-exps of the rounded P
//   lse = log sum_i exp(lse_i)                                                 with those of the unrounded P
// One CTA a line: kGroups groups of 128 threads share the splits, each thread has 4 dims. The order of the sums is
// fixed. It is launched while the decode kernel still runs and waits for its end before it reads.
#include <cuda_bf16.h>

#include "check_cuda.h"
#include "launch_parts.h"
#include "mla/scheduler.h"

namespace mla::sm90a {
namespace {

constexpr int kGroups = 4;
constexpr int kGroupThreads = kDimNope / 4;

__global__ void __launch_bounds__(kGroups* kGroupThreads) combine_kernel(const __grid_constant__ KernelParams p) {
  __shared__ float weight[kMaxSplits];
  __shared__ float4 partial[kGroups - 1][kGroupThreads];
  __shared__ float inverse;

  const int row = blockIdx.x, line = blockIdx.y;
  const int raw = p.d.seq_lens[row * p.d.seq_lens_stride];  // not written by the decode kernel
  const int len = raw < 0 ? 0 : raw < p.capacity ? raw : p.capacity;
  const int splits = num_splits(len, p.d.num_kv_splits);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (splits <= 1) return;  // the decode kernel has written this row

  const int64_t first = static_cast<int64_t>(row) * p.max_splits * p.lines + line;
  const int token = line / p.d.h_q, head = line - token * p.d.h_q;
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    float2 lse[kMaxSplits / 32];
    float2 top = make_float2(-INFINITY, -INFINITY);
#pragma unroll
    for (int k = 0; k < kMaxSplits / 32; ++k) {
      const int i = k * 32 + lane;
      lse[k] =
          i < splits ? p.partial_lse[first + static_cast<int64_t>(i) * p.lines] : make_float2(-INFINITY, -INFINITY);
      top = make_float2(fmaxf(top.x, lse[k].x), fmaxf(top.y, lse[k].y));
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      top.x = fmaxf(top.x, __shfl_xor_sync(~0u, top.x, d));
      top.y = fmaxf(top.y, __shfl_xor_sync(~0u, top.y, d));
    }
    const float base = top.x == -INFINITY ? 0.f : top.x, base_exact = top.y == -INFINITY ? 0.f : top.y;
    float sum = 0.f, sum_exact = 0.f;
#pragma unroll
    for (int k = 0; k < kMaxSplits / 32; ++k) {
      const float w = expf(lse[k].x - base);
      if (k * 32 + lane < splits) weight[k * 32 + lane] = w;
      sum += w;
      sum_exact += expf(lse[k].y - base_exact);
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      sum += __shfl_xor_sync(~0u, sum, d);
      sum_exact += __shfl_xor_sync(~0u, sum_exact, d);
    }
    if (lane == 0) {
      inverse = sum == 0.f ? 0.f : p.d.out_scale * (p.kv_scale ? *p.kv_scale : 1.f) / sum;
      p.d.lse[row * p.d.lse_stride[0] + token * p.d.lse_stride[1] + head * p.d.lse_stride[2]] =
          sum_exact == 0.f ? -INFINITY : base_exact + logf(sum_exact);
    }
  }
  __syncthreads();

  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  const float4* source = reinterpret_cast<const float4*>(p.partial_o + first * kDimNope) + thread;
  const int64_t step = static_cast<int64_t>(p.lines) * (kDimNope / 4);
  float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
  for (int i = group; i < splits; i += kGroups) {
    const float4 x = source[i * step];
    const float w = weight[i];
    o = make_float4(fmaf(w, x.x, o.x), fmaf(w, x.y, o.y), fmaf(w, x.z, o.z), fmaf(w, x.w, o.w));
  }
  if (group > 0) partial[group - 1][thread] = o;
  __syncthreads();
  if (group > 0) return;
#pragma unroll
  for (int k = 0; k < kGroups - 1; ++k) {
    const float4 x = partial[k][thread];
    o = make_float4(o.x + x.x, o.y + x.y, o.z + x.z, o.w + x.w);
  }
  __nv_bfloat162* out =
      reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.d.out) + row * p.d.out_stride[0] +
                                        token * p.d.out_stride[1] + head * p.d.out_stride[2]) +
      thread * 2;
  out[0] = __floats2bfloat162_rn(o.x * inverse, o.y * inverse);
  out[1] = __floats2bfloat162_rn(o.z * inverse, o.w * inverse);
}

}  // namespace

void launch_combine(const KernelParams& p, cudaStream_t stream) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(p.d.b, p.lines);
  config.blockDim = dim3(kGroups * kGroupThreads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, combine_kernel, p), "launch of the sm90a combine kernel");
}

}  // namespace mla::sm90a
