// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Q K^T, softmax and P: the scores warpgroup of decode.cuh.
#pragma once

#include "roles.cuh"

namespace mla::sm90a {

// Q K^T of one stage in kSteps products. They may be issued a few at a time, with other work in between: a warp that
// issues all 18 in a row stands still until the tensor cores have done most of them.
struct ScoresProduct {
  static constexpr int kSteps = kDim / 32;
  uint64_t q_nope, k_nope, q_rope, k_rope;

  // The low words of the descriptors (addresses) through a shuffle: that tells the compiler that they are the same in
  // all lanes. Else it computes all 36 in vector registers and moves them over one by one between the products.
  __device__ __forceinline__ ScoresProduct(const uint8_t* q, const uint8_t* nope, const uint8_t* rope)
      : q_nope(uniform(matrix_descriptor<Swizzle::k128>(q))),
        k_nope(uniform(matrix_descriptor<Swizzle::k128>(nope))),
        q_rope(uniform(matrix_descriptor<Swizzle::k64>(q + kNopeTileBytes))),
        k_rope(uniform(matrix_descriptor<Swizzle::k64>(rope))) {}

  __device__ __forceinline__ void begin() const { cute::warpgroup_arrive(); }
  __device__ __forceinline__ void step(float (&s)[32], int k) const {
    if (k < kDimNope / 32) {
      const uint32_t offset = ((k >> 2) * (kBlockN * kChunkBytes) + (k & 3) * 32) >> 4;
      if (k == 0)
        gmma_ss_first(s, advance(q_nope, offset), advance(k_nope, offset));
      else
        gmma_ss<Gmma<64>::SS>(s, advance(q_nope, offset), advance(k_nope, offset), ScaleOut::One);
    } else {
      const uint32_t offset = (k - kDimNope / 32) * 32 >> 4;
      gmma_ss<Gmma<64>::SS>(s, advance(q_rope, offset), advance(k_rope, offset), ScaleOut::One);
    }
  }
  __device__ __forceinline__ void end(float (&s)[32]) const {
    cute::warpgroup_commit_batch();
    fence_registers(s);
  }
  __device__ __forceinline__ void all(float (&s)[32]) const {
    begin();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) step(s, k);
    end(s);
  }
};

// Running state of the two lines g, g + 8 of a lane; row sums are of the lane's own columns until quad_sum().
struct LineState {
  float max[2];        // of S c, in powers of two
  float sum[2];        // of rounded P, times 2^8
  float sum_exact[2];  // of unrounded P, times 2^8
};

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Scores that a line may not see. visible_*: how many tokens of this tile lines g and g + 8 may see (may be negative or
// above 64).
__device__ __forceinline__ void mask_scores(float (&s)[32], int visible_g, int visible_g8) {
  const int j = threadIdx.x & 3;
#pragma unroll
  for (int i = 0; i < 32; ++i)
    if ((i >> 2) * 8 + 2 * j + (i & 1) >= ((i & 2) ? visible_g8 : visible_g)) s[i] = -INFINITY;
}

// The largest scores of lines g and g + 8 among this lane's columns. Four chains side by side, in this order (the asm
// statements are volatile): left to itself the compiler makes a tree in few registers and waits at every node.
__device__ __forceinline__ void largest(const float (&s)[2][32], float (&m)[2]) {
  float chain[2][2];
#pragma unroll
  for (int tile = 0; tile < 2; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) chain[tile][half] = max_in_order(s[tile][half * 2], s[tile][half * 2 + 1]);
#pragma unroll
  for (int n = 1; n < 8; ++n)
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          chain[tile][half] = max_in_order(chain[tile][half], s[tile][n * 4 + half * 2 + k]);
  m[0] = max_in_order(chain[0][0], chain[1][0]);
  m[1] = max_in_order(chain[0][1], chain[1][1]);
}

// New maxima and alpha of a step; shift: what is added to S c before exponentiation.
__device__ __forceinline__ void update_maximum(float (&s)[2][32], LineState& st, float scale, float (&alpha)[2],
                                               float (&shift)[2]) {
  float m[2];
  largest(s, m);
  m[0] = fmaxf(m[0], __shfl_xor_sync(~0u, m[0], 1));
  m[1] = fmaxf(m[1], __shfl_xor_sync(~0u, m[1], 1));
  m[0] = fmaxf(m[0], __shfl_xor_sync(~0u, m[0], 2));
  m[1] = fmaxf(m[1], __shfl_xor_sync(~0u, m[1], 2));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float m_new = fmaxf(st.max[half], m[half] * scale);
    const float base = m_new == -INFINITY ? 0.f : m_new;  // a line without a visible token so far: P = 0
    alpha[half] = exp2_approx(st.max[half] - base);
    st.max[half] = m_new;
    shift[half] = static_cast<float>(kLogPScale) - base;
    st.sum[half] *= alpha[half];
    st.sum_exact[half] *= alpha[half];
  }
}

// One tile: P in e4m3 to shared memory, row sums.
// p_address: of the first word of line g in this tile's half of P; line g + 8 is 1024 bytes on. write: false for warps
// without lines; they go along because the products in between need the whole warpgroup on one path.
// step(k): called with 0 .. 17 in order, spread over the work: issues one product of the next step's Q K^T.
template <class Step>
__device__ __forceinline__ void exponentiate(const float (&s)[32], LineState& st, float scale, const float (&shift)[2],
                                             bool write, uint32_t p_address, Step step) {
  // The order is by hand (the asm statements are volatile): exponentials of line g; those of line g + 8 with the
  // packing of line g in between; packing of line g + 8. A conversion right behind its exponential would wait for it
  // each time.
  float e[32];
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    e[n * 4] = exp2_approx(fmaf(s[n * 4], scale, shift[0]));
    e[n * 4 + 1] = exp2_approx(fmaf(s[n * 4 + 1], scale, shift[0]));
    step(n);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Row sums of the rounded P: pairs of pairs in fp16 (an e4m3 has 4 bits; fp16 cuts a sum of four at 2^-11), then
    // fp32. Of the unrounded P: fp32.
    float sum = 0.f, sum_exact[2] = {0.f, 0.f};
    __half2 pair{};
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      uint16_t packed[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int i = (2 * u + k) * 4;
        if (half == 0) {
          e[i + 2] = exp2_approx(fmaf(s[i + 2], scale, shift[1]));
          e[i + 3] = exp2_approx(fmaf(s[i + 3], scale, shift[1]));
        }
        packed[k] = to_e4m3x2(e[i + half * 2], e[i + half * 2 + 1]);
        sum_exact[0] += e[i + half * 2];
        sum_exact[1] += e[i + half * 2 + 1];
      }
      store_shared((p_address + half * 8 * kStepTokens) ^ (u << 4), packed[0] | static_cast<uint32_t>(packed[1]) << 16,
                   write);
      const __half2 next = __hadd2(from_e4m3x2(packed[0]), from_e4m3x2(packed[1]));
      if (u % 2 == 0) {
        pair = next;
      } else {
        const float2 f = __half22float2(__hadd2(pair, next));
        sum += f.x + f.y;
      }
      step(8 + half * 5 + u);
    }
    st.sum[half] += sum;
    st.sum_exact[half] += sum_exact[0] + sum_exact[1];
    step(12 + half * 5);
  }
}

// After the last tile of a split: what O is multiplied with. Row sums become those of whole lines.
__device__ __forceinline__ void finish_sums(LineState& st, float out_scale, float* scale_out) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    st.sum[half] = quad_sum(st.sum[half]);
    st.sum_exact[half] = quad_sum(st.sum_exact[half]);
    // At least 2^8 where a token was seen: the fast division has two more bits of error, and no slow path.
    if ((threadIdx.x & 3) == 0) scale_out[half * 2] = st.sum[half] == 0.f ? 0.f : __fdividef(out_scale, st.sum[half]);
  }
}

// The log-sum-exps, after finish_sums().
template <class T>
__device__ __forceinline__ void store_lse(const KernelParams& p, const Work& w, const LineState& st) {
  constexpr float kLn2 = 0.693147180559945309f;
  const int lane = threadIdx.x & 31, g = lane >> 2;
  if ((lane & 3) != 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int line = w.line_tile * T::N + static_cast<int>(threadIdx.x >> 5) * 16 + g + half * 8;
    if (line >= p.lines) continue;
    const bool empty = st.sum[half] == 0.f;
    const float shift = (st.max[half] - static_cast<float>(kLogPScale)) * kLn2;
    const float lse = empty ? -INFINITY : shift + logf(st.sum[half]);
    const float lse_exact = empty ? -INFINITY : shift + logf(st.sum_exact[half]);
    if (w.whole) {
      const LinePlace at = line_place(p, line);
      p.d.lse[w.row * p.d.lse_stride[0] + at.token * p.d.lse_stride[1] + at.head * p.d.lse_stride[2]] = lse_exact;
    } else {
      p.partial_lse[static_cast<int64_t>(line) * p.slots + w.slot] = make_float2(lse, lse_exact);
    }
  }
}

template <class T>
__device__ __forceinline__ void scores_role(const KernelParams& p, typename T::SharedStorage& sm) {
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 5), 0);  // uniform, and the compiler knows it
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  // Asked anew each time, so that no branch on it is pulled out of the loop: two copies of the loop would be two
  // copies of each wgmma, and the warps of a warpgroup must meet at the same one.
  const auto has_lines = [] { return T::N == kRowsM || (thread_again() >> 5) * 16 < T::N; };
  const float kv_scale = p.kv_scale ? *p.kv_scale : 1.f;
  const float scale =
      p.d.logit_scale * kv_scale * (p.q_scale ? *p.q_scale : 1.f) * 1.44269504088896341f;  // powers of two

  // This lane's words of P: line 16 warp + g, piece 0, word j, swizzled; pieces follow by xor.
  const uint32_t p_address = shared_address(sm.p[0]) + (warp * 16 + g) * kStepTokens + (g << 4) + j * 4;
  const int slot = column_slot(warp * 16 + g);
  uint32_t t = 0;          // steps so far, over all work
  Ring<T::kStages> stage;  // of the next tile to multiply
  Ring<kRopeStages> rope;  // of the next tile to multiply
  int rope_done = 0;       // of the next tile whose products are complete
  float s[2][32];
  const auto multiply = [&](float (&x)[32]) {
    barrier_wait(&sm.kv_full[stage.at], stage.phase);
    ScoresProduct(sm.q, sm.kv_nope[stage.at], sm.kv_rope[rope.at]).all(x);
    stage.advance();
    rope.advance();
  };
  for (int item = 0;; ++item) {
    const Work w = sm.list.ring[item % kWorkSlots];
    if (w.row < 0) break;
    if (T::N == kRowsM && p.q_tma) {
      barrier_wait(&sm.q_full, item & 1);
    } else {
      load_q<T>(p, w, sm);
      finish_copies(kScoresBarrier);
    }

    LineState st = {{-INFINITY, -INFINITY}, {0.f, 0.f}, {0.f, 0.f}};
    // Tokens that lines g and g + 8 may see, counted from the current step; all_see: those that every line sees.
    const int line = w.line_tile * T::N + warp * 16 + g;
    int all_see = w.len - p.d.s_q + 1 - w.tile_begin * kBlockN;
    int visible_g = all_see + line_place(p, line).token;
    int visible_g8 = all_see + line_place(p, line + 8).token;
    int left = w.tile_end - w.tile_begin;  // tiles, the current step's included

    multiply(s[0]);
    if (left > 1) multiply(s[1]);
    for (;;) {
      // One step. Its products have been issued; those of the next step are issued here.
      const int buffer = t & 1;
      const bool two = left > 1;  // else what would be the second tile belongs to another split
      cute::warpgroup_wait<0>();
      fence_registers(s[0]);
      fence_registers(s[1]);
      // K's rope part has been read, with the last step q, too.
      if (left <= 2 && lane == 0) barrier_arrive(&sm.q_empty);
      if (lane == 0) barrier_arrive(&sm.rope_empty[rope_done]);
      if (++rope_done == kRopeStages) rope_done = 0;
      if (two) {
        if (lane == 0) barrier_arrive(&sm.rope_empty[rope_done]);
        if (++rope_done == kRopeStages) rope_done = 0;
      }
      if (all_see < kStepTokens || !two) [[unlikely]] {
        mask_scores(s[0], visible_g, visible_g8);
        mask_scores(s[1], two ? visible_g - kBlockN : 0, two ? visible_g8 - kBlockN : 0);
      }
      float alpha[2], shift[2];
      update_maximum(s, st, scale, alpha, shift);
      barrier_wait(&sm.p_empty[buffer], ((t >> 1) & 1) ^ 1);  // P of two steps ago has been read
      if (j == 0 && has_lines()) {
        sm.alpha[buffer][slot] = alpha[0];
        sm.alpha[buffer][slot + 2] = alpha[1];
      }
      const uint32_t address = p_address + buffer * T::N * kStepTokens;
      exponentiate(s[0], st, scale, shift, has_lines(), address, [](int) {});
      const auto signal = [&] {
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(&sm.p_full[buffer]);
        ++t;
      };
      if (left <= 2) {
        exponentiate(s[1], st, scale, shift, has_lines(), address ^ 64, [](int) {});
        if (has_lines())
          finish_sums(st, w.whole ? p.d.out_scale * kv_scale : 1.f, sm.final_scale[t % kScaleBuffers] + slot);
        signal();
        if (has_lines()) store_lse<T>(p, w, st);
        break;
      }
      barrier_wait(&sm.kv_full[stage.at], stage.phase);
      const ScoresProduct product(sm.q, sm.kv_nope[stage.at], sm.kv_rope[rope.at]);
      product.begin();
      exponentiate(s[1], st, scale, shift, has_lines(), address ^ 64, [&](int k) { product.step(s[0], k); });
      product.end(s[0]);
      stage.advance();
      rope.advance();
      signal();
      all_see -= kStepTokens;
      visible_g -= kStepTokens;
      visible_g8 -= kStepTokens;
      left -= 2;
      if (left > 1) multiply(s[1]);
    }
    warpgroup_sync(kScoresBarrier);  // all warps have read q before the next one overwrites it
  }
}

}  // namespace mla::sm90a
