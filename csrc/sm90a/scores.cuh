// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Q K^T, softmax and P: the scores warpgroup of decode.cuh.
#pragma once

#include "roles.cuh"

namespace mla::sm90a {

// Begins Q K^T of a step: [64 lines, 128 tokens].
template <class T>
__device__ __forceinline__ void multiply(typename T::SharedStorage& sm, const SlotRing<T::kSlots>& ring, uint32_t t,
                                         float (&s)[64]) {
  // The low words of the descriptors (addresses) through a shuffle: that tells the compiler that they are the same in
  // all lanes. Else it computes all 36 in vector registers and moves them over one by one between the products.
  const uint64_t q = uniform(matrix_descriptor<Swizzle::k128>(sm.q));
  // Whether a chunk is there is asked before the products of the one before it are issued: the answer takes a while.
  bool there = barrier_try(&sm.kv_full[ring.slot(0)], ring.phase_of(0));
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (!there) barrier_wait(&sm.kv_full[ring.slot(chunk)], ring.phase_of(chunk));
    there = chunk + 1 < kChunks ? barrier_try(&sm.kv_full[ring.slot(chunk + 1)], ring.phase_of(chunk + 1))
                                : barrier_try(&sm.rope_full, t & 1);
    const uint64_t k = uniform(matrix_descriptor<Swizzle::k128>(sm.kv_nope[ring.slot(chunk)]));
    cute::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < kChunkBytes / 32; ++i) {
      const uint64_t a = advance(q, (chunk * kRowsM * kChunkBytes + i * 32) >> 4), b = advance(k, i * 32 >> 4);
      if (chunk == 0 && i == 0)
        gmma_ss_first(s, a, b);
      else
        gmma_ss<Gmma<128>::SS>(s, a, b, ScaleOut::One);
    }
  }
  if (!there) barrier_wait(&sm.rope_full, t & 1);
  const uint64_t q_rope = uniform(matrix_descriptor<Swizzle::k64>(sm.q + kNopeTileBytes));
  const uint64_t k_rope = uniform(matrix_descriptor<Swizzle::k64>(sm.kv_rope));
  cute::warpgroup_arrive();
#pragma unroll
  for (int i = 0; i < kDimRope / 32; ++i)
    gmma_ss<Gmma<128>::SS>(s, advance(q_rope, i * 32 >> 4), advance(k_rope, i * 32 >> 4), ScaleOut::One);
  cute::warpgroup_commit_batch();
}

// Running state of the two lines g, g + 8 of a lane; row sums are of the lane's own columns until quad_sum().
struct LineState {
  float shift[2];  // of S c, in powers of two: P = 2^(S c + shift)
  float sum[2];    // of unrounded P
};

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Scores that a line may not see. all_see: how many tokens of this step every line sees, a line of query token i sees i
// more (it may be negative); of the last `left` tiles of a split the first two are in this step.
template <class T>
__device__ __forceinline__ void mask_scores(const KernelParams& p, const Work& w, int all_see, int left,
                                            float (&s)[64]) {
  const int thread = thread_again(), j = thread & 3;
  const int line = w.line_tile * T::N + (thread >> 5) * 16 + ((thread & 31) >> 2);
  const int most = left == 1 ? kBlockN : kStepTokens;
  const int visible_g = min(all_see + line_place(p, line).token, most) - 2 * j;
  const int visible_g8 = min(all_see + line_place(p, line + 8).token, most) - 2 * j;
#pragma unroll
  for (int i = 0; i < 64; ++i)
    if ((i >> 2) * 8 + (i & 1) >= ((i & 2) ? visible_g8 : visible_g)) s[i] = -INFINITY;
}

// The largest scores of lines g and g + 8. Four chains side by side, in this order (the asm statements are volatile):
// left to itself the compiler makes a tree in few registers and waits at every node.
__device__ __forceinline__ void largest(const float (&s)[64], float (&m)[2]) {
  float chain[2][2];
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) chain[n][half] = max_in_order(s[n * 4 + half * 2], s[n * 4 + half * 2 + 1]);
#pragma unroll
  for (int n = 2; n < 16; n += 2)
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int x = 0; x < 2; ++x)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          chain[x][half] = max_in_order(chain[x][half], s[(n + x) * 4 + half * 2 + k]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    m[half] = max_in_order(chain[0][half], chain[1][half]);
    m[half] = fmaxf(m[half], __shfl_xor_sync(~0u, m[half], 1));
    m[half] = fmaxf(m[half], __shfl_xor_sync(~0u, m[half], 2));
  }
}

// A new base for lines that need one in this step; all in a first step. alphas: for each line, by column_slot(), what P
// so far is to be multiplied with; not written in a first step. Whether a line of this warp has got a new base.
__device__ __forceinline__ bool renew_base(const float (&s)[64], LineState& st, float scale, bool first,
                                           float* alphas) {
  float m[2];
  largest(s, m);
  bool renewed = false;
  const int thread = thread_again();
  float* alpha_at = alphas + column_slot((thread >> 5) * 16 + ((thread & 31) >> 2));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float alpha = 1.f;
    if (first || fmaf(m[half], scale, st.shift[half]) > kLogMostP) {
      renewed = true;
      const float base = m[half] == -INFINITY ? 0.f : m[half] * scale;  // a line without a visible token: P = 0
      const float shift = static_cast<float>(kLogLazyScale) - base;
      if (!first) alpha = exp2_approx(shift - st.shift[half]);
      st.shift[half] = shift;
    }
    st.sum[half] *= alpha;
    if (!first && (thread & 3) == 0) alpha_at[half * 2] = alpha;
  }
  return __any_sync(~0u, renewed);
}

// P of a step in e4m3 to shared memory; sum: of the unrounded P; peak: at least the largest P, at most eight of them.
// p_address: of the first word of line g; line g + 8 is 1024 bytes on.
__device__ __forceinline__ void exponentiate(const float (&s)[64], float scale, const float (&shift)[2],
                                             uint32_t p_address, float (&sum)[2], float& peak) {
  // Words of P: the first of line g, of line g + 8, the second, ... The order is by hand (the asm statements are
  // volatile): the exponentials of the next word before the packing of this one, which would else wait for each of
  // them.
  float e[2][4], part[2][2];
  const auto exponential = [&](int word, int k) {
    const int u = word >> 1, half = word & 1;
    e[half][k] = exp2_approx(fmaf(s[(2 * u + (k >> 1)) * 4 + half * 2 + (k & 1)], scale, shift[half]));
  };
#pragma unroll
  for (int k = 0; k < 4; ++k) exponential(0, k);
#pragma unroll
  for (int word = 0; word < 16; ++word) {
    const int u = word >> 1, half = word & 1;
    const float (&x)[4] = e[half];
    const bool fresh = u % 4 == 0;  // sums of eight
    // One of the next word's exponentials, then something else: the unit takes one in eight cycles.
    if (word < 15) exponential(word + 1, 0);
    const uint16_t lo = to_e4m3x2(x[0], x[1]);
    part[half][0] = fresh ? x[0] : part[half][0] + x[0];
    if (word < 15) exponential(word + 1, 1);
    const uint32_t packed = lo | static_cast<uint32_t>(to_e4m3x2(x[2], x[3])) << 16;
    part[half][1] = fresh ? x[1] : part[half][1] + x[1];
    if (word < 15) exponential(word + 1, 2);
    if (half == 0)
      store_shared<0>(p_address ^ (u << 4), packed);
    else
      store_shared<8 * kStepTokens>(p_address ^ (u << 4), packed);
    part[half][0] += x[2];
    if (word < 15) exponential(word + 1, 3);
    part[half][1] += x[3];
    if (u % 4 == 3) {
      const float larger = fmaxf(part[half][0], part[half][1]), both = part[half][0] + part[half][1];
      sum[half] = u == 3 ? both : sum[half] + both;
      peak = word == 6 ? larger : fmaxf(peak, larger);
    }
  }
}

// After the last step of a split: row sums become those of whole lines, and sums_role() gets what it needs.
__device__ __forceinline__ void finish_lines(LineState& st, float* shifts) {
  const int thread = thread_again();
  float* at = shifts + column_slot((thread >> 5) * 16 + ((thread & 31) >> 2));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    st.sum[half] = quad_sum(st.sum[half]);
    if ((thread & 3) == 0) at[half * 2] = st.shift[half];
  }
}

// The log-sum-exps of whole lines. sums_role() adds those of the rounded P.
template <class T>
__device__ __forceinline__ void store_lse(const KernelParams& p, const Work& w, const LineState& st) {
  constexpr float kLn2 = 0.693147180559945309f;
  const int lane = threadIdx.x & 31, g = lane >> 2;
  if ((lane & 3) != 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int line = w.line_tile * T::N + static_cast<int>(threadIdx.x >> 5) * 16 + g + half * 8;
    if (line >= p.lines) continue;
    const float lse = st.sum[half] == 0.f ? -INFINITY : logf(st.sum[half]) - st.shift[half] * kLn2;
    if (w.whole) {
      const LinePlace at = line_place(p, line);
      p.d.lse[w.row * p.d.lse_stride[0] + at.token * p.d.lse_stride[1] + at.head * p.d.lse_stride[2]] = lse;
    } else {
      p.partial_lse[static_cast<int64_t>(line) * p.slots + w.slot].y = lse;
    }
  }
}

template <class T>
__device__ __forceinline__ void scores_role(const KernelParams& p, typename T::SharedStorage& sm) {
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 5), 0);  // uniform, and the compiler knows it
  const int lane = threadIdx.x & 31;
  const bool has_lines = T::N == kRowsM || warp * 16 < T::N;  // else a warp only multiplies
  const float kv_scale = p.kv_scale ? *p.kv_scale : 1.f;
  const float scale =
      p.d.logit_scale * kv_scale * (p.q_scale ? *p.q_scale : 1.f) * 1.44269504088896341f;  // powers of two

  // This lane's words of P: line 16 warp + g, piece 0, word j, swizzled; pieces follow by xor.
  const uint32_t p_address =
      kept(shared_address(sm.p[0]) + (warp * 16 + (lane >> 2)) * kStepTokens + (lane >> 2 << 4) + (lane & 3) * 4);
  const int leader = kept(lane);  // 0 for the first
  uint32_t t = 0;                 // steps so far, over all work
  SlotRing<T::kSlots> ring;
  float s[64];
  // Nobody waits for the Q K^T of a first step: it may have to wait for its q.
  if (leader == 0) barrier_arrive(&sm.multiplied[0]);
  for (int item = 0;; ++item) {
    const Work w = sm.list.ring[item % kWorkSlots];
    if (w.row < 0) break;
    if (T::N == kRowsM && p.q_tma) {
      barrier_wait(&sm.q_full, item & 1);
    } else {
      load_q<T>(p, w, sm);
      finish_copies(kScoresBarrier);
    }

    LineState st = {{0.f, 0.f}, {0.f, 0.f}};
    int left = w.tile_end - w.tile_begin;                        // tiles, the current step's included
    int all_see = w.len - p.d.s_q + 1 - w.tile_begin * kBlockN;  // tokens that every line sees, from this step on
    for (bool first = true; left > 0; left -= 2, ++t, first = false) {
      const int buffer = t & 1;
      multiply<T>(sm, ring, t, s);
      ring.advance();
      barrier_wait(&sm.p_empty[buffer], ((t >> 1) & 1) ^ 1);  // P of two steps ago has been read
      cute::warpgroup_wait<0>();
      fence_registers(s);
      if (leader == 0) {
        if (!first) barrier_arrive(&sm.multiplied[buffer]);
        barrier_arrive(&sm.rope_empty);
        if (left <= 2) barrier_arrive(&sm.q_empty);
      }
      if (has_lines) {
        if (all_see < kStepTokens || left == 1) [[unlikely]]
          mask_scores<T>(p, w, all_see, left, s);
        // While the base holds, nothing waits for a maximum.
        float sum[2], peak;
        bool renewed = false, exact = first;
        if (first) renew_base(s, st, scale, true, nullptr);
        for (;;) {
          exponentiate(s, scale, st.shift, p_address + buffer * T::N * kStepTokens, sum, peak);
          if (__all_sync(~0u, !(peak > kMostP)) || exact) [[likely]]
            break;
          exact = true;
          // In the first step there is nothing to rescale, but then `exact` was set.
          renewed = renew_base(s, st, scale, false, sm.alpha[buffer]);
          if (!renewed) break;
        }
        st.sum[0] += sum[0];
        st.sum[1] += sum[1];
        if (leader == 0) sm.renewed[buffer][warp] = renewed;
        if (left <= 2) finish_lines(st, sm.final_scale[t % kScaleBuffers]);
      }
      fence_async_proxy();
      __syncwarp();
      if (leader == 0) {
        barrier_arrive(&sm.p_full[buffer]);
        if (left <= 2) barrier_arrive(&sm.multiplied[buffer ^ 1]);
      }
      all_see -= kStepTokens;
    }
    if (has_lines) store_lse<T>(p, w, st);
    warpgroup_sync(kScoresBarrier);  // all warps have read q before the next one overwrites it
  }
}

}  // namespace mla::sm90a
