// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Merges the partials of rows with several splits:
//   out = out_scale * sum_i w_i O_i / sum_i w_i,  w_i = exp(lse_i - max lse)   with the log-sum-exps of the rounded P
//   lse = log sum_i exp(lse_i)                                                 with those of the unrounded P
// A unit of work is 128 dims of one line. 1, 4, 8 or 16 warps share its splits (more where units are few), each lane
// has 4 dims; CTAs of 16 warps walk over the units. The order of the sums is fixed and the same whatever the number of
// warps: sixteen sums of splits g, g + 16, ... each, then those in turn. The kernel is launched while the decode kernel
// still runs and waits for its end before it reads; where no row of the batch has several splits it ends at once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "check_cuda.h"
#include "launch_parts.h"
#include "work.cuh"

namespace mla::sm90a {
namespace {

constexpr int kWarps = 16;
constexpr int kUnitDims = 128;
constexpr int kParts = kDimNope / kUnitDims;
constexpr int kSums = 16;
constexpr int kSplitsASum = kMaxSplits / kSums;
constexpr int kSplitsALane = kMaxSplits / 32;

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

__device__ __forceinline__ float4 add(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ float4 add_scaled(float4 a, float w, float4 b) {
  return make_float4(fmaf(w, b.x, a.x), fmaf(w, b.y, a.y), fmaf(w, b.z, a.z), fmaf(w, b.w, a.w));
}

// A log-sum-exp of several, by a warp that holds them kSplitsALane a lane; the lanes' weights into `weight`, their sum
// is returned and `base` is what they are relative to.
__device__ __forceinline__ float weights(const float (&lse)[kSplitsALane], float (&weight)[kSplitsALane], float& base) {
  float top = -INFINITY, sum = 0.f;
#pragma unroll
  for (int k = 0; k < kSplitsALane; ++k) top = fmaxf(top, lse[k]);
  top = warp_max(top);
  base = top == -INFINITY ? 0.f : top;
#pragma unroll
  for (int k = 0; k < kSplitsALane; ++k) {
    weight[k] = expf(lse[k] - base);
    sum += weight[k];
  }
  return warp_sum(sum);
}

template <int kWarpsAUnit>
__global__ void __launch_bounds__(32 * kWarps, 2) combine_kernel(const __grid_constant__ KernelParams p) {
  constexpr int kUnits = kWarps / kWarpsAUnit;  // of a CTA at a time
  constexpr int kGroups = kSums / kWarpsAUnit;  // sums of one warp
  constexpr int kAhead = kGroups == 1 ? 8 : kGroups == 2 ? 4 : kGroups == 4 ? 2 : 0;
  __shared__ float4 partial[kWarpsAUnit > 1 ? kSums * kUnits : 1][32];
  const int warp = threadIdx.x / 32 % kWarpsAUnit, lane = threadIdx.x % 32, mine = threadIdx.x / 32 / kWarpsAUnit;
  const float4 zero = make_float4(0.f, 0.f, 0.f, 0.f);
  const float out_scale = p.d.out_scale * (p.kv_scale ? *p.kv_scale : 1.f);
  const int units = p.d.b * p.lines * kParts;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (p.d.b > 32 && *p.any_split == 0) return;

  for (int first_unit = blockIdx.x * kUnits; first_unit < units; first_unit += gridDim.x * kUnits) {
    const int unit = first_unit + mine;
    const int part = unit % kParts, row = unit / kParts / p.lines, line = unit / kParts - row * p.lines;
    const int2 plan = unit < units ? p.row_plan[row] : make_int2(0, 0);
    const int splits = plan.y > 1 ? plan.y : 0;  // 1: the decode kernel has written this row
    const float2* line_lse = p.partial_lse + static_cast<int64_t>(line) * p.slots + plan.x;
    const int64_t first = static_cast<int64_t>(plan.x) * p.lines + line;
    const float4* source = reinterpret_cast<const float4*>(p.partial_o + first * kDimNope + part * kUnitDims) + lane;
    const int64_t step = static_cast<int64_t>(p.lines) * (kDimNope / 4);

    float lse[kSplitsALane], lse_exact[kSplitsALane], weight[kSplitsALane], unused[kSplitsALane], base;
#pragma unroll
    for (int k = 0; k < kSplitsALane; ++k) {
      const int i = k * 32 + lane;
      const float2 both = i < splits ? line_lse[i] : make_float2(-INFINITY, -INFINITY);
      lse[k] = both.x;
      lse_exact[k] = both.y;
    }
    // The first kAhead splits of each of this warp's sums are on their way before the weights are known.
    [[maybe_unused]] float4 x[kGroups][kAhead > 0 ? kAhead : 1];
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int i = k * kSums + g * kWarpsAUnit + warp;
        x[g][k] = i < splits ? source[i * step] : zero;
      }
    const float sum = weights(lse, weight, base);
    const LinePlace at = line_place(p, line);
    if (part == 0 && warp == 0 && splits > 0) {
      const float sum_exact = weights(lse_exact, unused, base);
      if (lane == 0)
        p.d.lse[row * p.d.lse_stride[0] + at.token * p.d.lse_stride[1] + at.head * p.d.lse_stride[2]] =
            sum_exact == 0.f ? -INFINITY : base + logf(sum_exact);
    }
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
    if constexpr (kWarpsAUnit > 1) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int first_split = g * kWarpsAUnit + warp;
        float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int k = 0; k < kSplitsASum; ++k) {
          const int i = k * kSums + first_split;
          if (k * kSums >= splits) continue;
          const float w = __shfl_sync(~0u, weight[k / 2], (k % 2) * kSums + first_split);
          o = add_scaled(o, w, k < kAhead ? x[g][k < kAhead ? k : 0] : i < splits ? source[i * step] : zero);
        }
        partial[mine * kSums + first_split][lane] = o;
      }
      __syncthreads();
      if (warp == 0) {
#pragma unroll
        for (int g = 0; g < kSums; ++g) total = add(total, partial[mine * kSums + g][lane]);
      }
      __syncthreads();  // partial is written again
    } else {
      // Four sums at a time: their loads are under way together.
      for (int g = 0; g < kSums && g < splits; g += 4) {
        float4 o[4] = {zero, zero, zero, zero};
#pragma unroll
        for (int k = 0; k < kSplitsASum; ++k) {
          if (k * kSums + g >= splits) continue;
          float4 y[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const int i = k * kSums + g + n;
            y[n] = i < splits ? source[i * step] : zero;
          }
#pragma unroll
          for (int n = 0; n < 4; ++n)
            o[n] = add_scaled(o[n], __shfl_sync(~0u, weight[k / 2], (k % 2) * kSums + g + n), y[n]);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) total = add(total, o[n]);
      }
    }
    if (warp != 0 || splits == 0) continue;
    const float scale = sum == 0.f ? 0.f : out_scale / sum;
    const int64_t offset = row * p.d.out_stride[0] + at.token * p.d.out_stride[1] + at.head * p.d.out_stride[2] +
                           part * kUnitDims + lane * 4;
    if (p.d.dtype == DType::kFP16) {
      auto* out = reinterpret_cast<__half2*>(static_cast<__half*>(p.d.out) + offset);
      out[0] = __floats2half2_rn(total.x * scale, total.y * scale);
      out[1] = __floats2half2_rn(total.z * scale, total.w * scale);
    } else {
      auto* out = reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.d.out) + offset);
      out[0] = __floats2bfloat162_rn(total.x * scale, total.y * scale);
      out[1] = __floats2bfloat162_rn(total.z * scale, total.w * scale);
    }
  }
}

template <int kWarpsAUnit>
void launch_with(const KernelParams& p, int64_t units, cudaStream_t stream) {
  constexpr int kUnits = kWarps / kWarpsAUnit;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  const int64_t ctas = (units + kUnits - 1) / kUnits, most = 4 * kMostCtas;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas < most ? ctas : most));
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, combine_kernel<kWarpsAUnit>, p), "launch of the sm90a combine kernel");
}

}  // namespace

void launch_combine(const KernelParams& p, cudaStream_t stream) {
  const int64_t units = static_cast<int64_t>(p.d.b) * p.lines * kParts;
  if (units <= 2 * p.m.ctas) {  // two CTAs of sixteen warps on each SM
    launch_with<16>(p, units, stream);
  } else if (units <= 4 * p.m.ctas) {
    launch_with<8>(p, units, stream);
  } else if (units <= 8 * p.m.ctas) {
    launch_with<4>(p, units, stream);
  } else {
    launch_with<1>(p, units, stream);
  }
}

}  // namespace mla::sm90a
