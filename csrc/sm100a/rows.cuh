// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Before and after CUTLASS's kernel: rows without tokens, the split count of each row, and the merge. No tensor cores
// and nothing of one architecture here; tests/test_sm100a_rows.py runs these kernels on the host.
//
//   prepare_kernel, a CTA a row: len = bounded(seq_lens[row]), splits = row_splits(len); no tokens: out 0, lse -inf.
//   finish_kernel, a CTA a row and head: 0 splits: nothing. 1: copies out of the padded buffers, unless the kernel has
//   stored directly. 2 and more: merge.h.
//
// A value leaves fp32 once, where splits are merged: to bf16 or fp16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "launch_parts.h"
#include "merge.h"

namespace mla::sm100a {

inline constexpr int kThreads = 128;
inline constexpr int kDimsPerThread = kDimNope / kThreads;
static_assert(kMaxSplits <= kThreads);

static __global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ KernelCall c) {
  const int64_t row = blockIdx.x;
  const int32_t len = bounded_length(c.d.seq_lens[row * c.d.seq_lens_stride], c.plan.capacity);
  if (threadIdx.x == 0) {
    c.seq_lens[row] = len;
    c.splits[row] = row_splits(len, c.plan.most);
  }
  if (len > 0) return;
  auto* out = static_cast<uint16_t*>(c.d.out) + row * c.d.out_stride[0];  // 0 has the same bits in bf16 and fp16
  for (int head = 0; head < c.d.h_q; ++head) {
    for (int i = threadIdx.x; i < kDimNope; i += kThreads) out[head * c.d.out_stride[2] + i] = 0;
    if (threadIdx.x == 0) c.d.lse[row * c.d.lse_stride[0] + head * c.d.lse_stride[2]] = -INFINITY;
  }
}

template <class Out>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ KernelCall c) {
  __shared__ float weight[kMaxSplits];
  const int64_t row = blockIdx.x;
  const int head = blockIdx.y, splits = c.splits[row];
  if (splits == 0 || (splits == 1 && c.direct)) return;
  auto* out = static_cast<Out*>(c.d.out) + row * c.d.out_stride[0] + head * c.d.out_stride[2];
  float* lse = c.d.lse + row * c.d.lse_stride[0] + head * c.d.lse_stride[2];
  if (splits == 1) {
    const auto* from = static_cast<const Out*>(c.out) + row * c.out_stride[0] + head * c.out_stride[1];
    for (int i = threadIdx.x; i < kDimNope; i += kThreads) out[i] = from[i];
    if (threadIdx.x == 0) *lse = c.lse[row * c.lse_stride + head];
    return;
  }
  const int64_t most = c.plan.most, all_rows = c.plan.b;
  const float* partial_lse = c.partial + all_rows * kPaddedHeads * most * kDimNope + row * most * kPaddedHeads + head;
  const float all = merged_lse(partial_lse, splits, kPaddedHeads);
  if (threadIdx.x < splits) weight[threadIdx.x] = merge_weight(partial_lse[threadIdx.x * kPaddedHeads], all);
  if (threadIdx.x == 0) *lse = all;
  __syncthreads();
  const float* o = c.partial + (row * kPaddedHeads + head) * most * kDimNope;
  float sum[kDimsPerThread] = {};
  for (int i = 0; i < splits; ++i)
#pragma unroll
    for (int k = 0; k < kDimsPerThread; ++k)
      sum[k] = fmaf(weight[i], o[i * kDimNope + k * kThreads + threadIdx.x], sum[k]);
#pragma unroll
  for (int k = 0; k < kDimsPerThread; ++k) {
    if constexpr (std::is_same_v<Out, __half>)
      out[k * kThreads + threadIdx.x] = __float2half_rn(sum[k]);
    else
      out[k * kThreads + threadIdx.x] = __float2bfloat16_rn(sum[k]);
  }
}

}  // namespace mla::sm100a
