// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Row sums of the rounded P, by warps beside the loaders: the scores warps are the busiest.
#pragma once

#include "roles.cuh"

namespace mla::sm90a {

// The sum of 16 e4m3 values that are not negative, times 2^-8: an e4m3 seven bits up is the fp16 of 2^-8 its value,
// subnormal ones too. Fours of them in fp16 (an e4m3 has 4 bits; fp16 cuts a sum of four at 2^-11), then fp32.
__device__ __forceinline__ float sum_e4m3(uint4 x) {
  const auto four = [](uint32_t w) {
    const uint32_t even = (w << 7) & 0x7F807F80, odd = (w >> 1) & 0x7F807F80;
    return __hadd2(*reinterpret_cast<const __half2*>(&even), *reinterpret_cast<const __half2*>(&odd));
  };
  const float2 a = __half22float2(__hadd2(four(x.x), four(x.y)));
  const float2 b = __half22float2(__hadd2(four(x.z), four(x.w)));
  return (a.x + a.y) + (b.x + b.y);
}

// A warp's 32 lines from first_line on, one a lane. loads_q: this warp gets q of each item by TMA, too.
template <class T>
__device__ __forceinline__ void sums_role(const KernelParams& p, typename T::SharedStorage& sm, int first_line,
                                          bool loads_q) {
  constexpr float kLn2 = 0.693147180559945309f;
  const float out_scale = p.d.out_scale * (p.kv_scale ? *p.kv_scale : 1.f);
  const int line = min(first_line + static_cast<int>(threadIdx.x & 31), T::N - 1);  // N = 16: lanes do the last twice
  const int slot = column_slot(line);
  const uint32_t zero = unknown_zero(p);
  uint32_t t = 0;
  if (loads_q) load_q_tma<T>(p, sm, 0);
  for (int item = 0;; ++item) {
    // Whoever has seen P of an item's tokens sees the next item.
    const Work& w = sm.list.ring[item % kWorkSlots];
    if (w.row < 0) break;
    float sum = 0.f;
    for (int left = w.tile_end - w.tile_begin; left > 0; left -= 2, ++t) {
      const int buffer = t & 1;
      if (left <= 2 && loads_q) {
        barrier_wait(&sm.q_empty, item & 1);
        load_q_tma<T>(p, sm, item + 1);
      }
      barrier_wait(&sm.p_full[buffer], (t >> 1) & 1);
      if (sm.renewed[buffer][line >> 4]) sum *= sm.alpha[buffer][slot];
      const uint8_t* row = sm.p[buffer] + line * kStepTokens;
#pragma unroll
      for (int piece = 0; piece < kStepTokens / 16; ++piece)
        sum += sum_e4m3(*reinterpret_cast<const uint4*>(row + ((piece ^ (line & 7)) << 4)));
      if (left <= 2) {
        const float total = sum * 256.f;
        float& scale = sm.final_scale[t % kScaleBuffers][slot];
        const float shift = scale;
        const int at = w.line_tile * T::N + line;
        if (!w.whole && at < p.lines)
          p.partial_lse[static_cast<int64_t>(at) * p.slots + w.slot].x =
              total == 0.f ? -INFINITY : logf(total) - shift * kLn2;
        __syncwarp();
        // Not 0 only where a token was seen, and then at least 1: the fast division has two more bits of error, and no
        // slow path.
        scale = total == 0.f ? 0.f : __fdividef(w.whole ? out_scale : 1.f, total);
      }
      __syncwarp();
      if ((threadIdx.x & 31) == 0) {
        // After P is in registers: `sum` is what waits for it.
        barrier_arrive(&sm.p_empty[buffer + (__float_as_uint(sum) & zero)]);
        if (left <= 2) barrier_arrive(&sm.sums_full[item & 1]);
      }
    }
  }
}

}  // namespace mla::sm90a
