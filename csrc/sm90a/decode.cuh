// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// MLA decode in e4m3 on Hopper.
//
//   S   = Q K^T                 [64 lines, 64 tokens] = [64, 576] x [64, 576]^T: wgmma m64n64k32, both from shared
//   memory P   = e4m3(2^(S c - m + 8))  m: running row maximum of S c, c = logit_scale * log2(e) T^T = V^T P^T [512
//   dims, N lines] = [512, 128 tokens] x [N, 128]^T: wgmma m64nNk32, V^T from registers O^T = O^T alpha + T^T alpha =
//   2^(m_old - m) by line: the rescale and the promotion to fp32 are one fma out = O / row sum
//
// A step is two tiles of 64 tokens: one maximum, one P, one promotion for 128 tokens. The last step of a split may have
// one tile only.
//
// A line is one head of one query token; a CTA has N = 16, 32 or 64 of them and walks its list of work (work.cuh).
// fp8 wgmma wants both operands K-major, so PV needs V^T, while V lies [token][dim]. ldmatrix.trans on pairs of dims
// and two byte permutes give exactly the register A fragment of V^T with the tokens of each 16-block in the order 0 1 8
// 9 | 2 3 10 11 | 4 5 12 13 | 6 7 14 15. The sum over tokens does not mind, as long as P is in the same order, and
// packing the accumulator of S two 8-blocks at a time *is* that order. Row g of the A fragment is dim 2g of a 16-block,
// row g + 8 is dim 2g + 1, so a lane ends up with pairs of neighbouring dims.
//
//   role                     waits for                             signals
//   loader (warp 12)         kv_empty[stage], rope_empty[slot]     kv_full[stage] (TMA, or cp.async for small pages)
//   scores (warps 0-3)       kv_full[stage], p_empty[buffer]       rope_empty[slot], p_full[buffer]
//   values (warps 4-7, 8-11) kv_full[stage], p_full[buffer]        kv_empty[stage], p_empty[buffer]
//                            each has 256 of the 512 dims
// kv_empty comes after p_full, so it covers K, too.
//
// Shared memory is the scarcest: by ncu its pipe is busy three quarters of the time at 64 lines. Q K^T takes 576 of its
// cycles a tile, P 256, the fragments of V 256, TMA 288.
//
// Where values leave fp32: products of e4m3 in the tensor core (both wgmmas; its accumulator is narrower than fp32: 18
// steps of 32 for S, 4 for T), P to e4m3, the output to bf16. Row sums are fp32, of the rounded P (divides) and of the
// unrounded P (gives lse).
#pragma once

#include <cuda_bf16.h>

#include <cutlass/arch/reg_reconfig.h>

#include "load.cuh"

namespace mla::sm90a {

enum NamedBarrier : int { kScoresBarrier = 1 };

// Where column (line) `c` of a tile keeps its alpha: the values warps read four floats at a time, lane j of a quad its
// own columns 8n + 2j, 8n + 2j + 1, and the four lanes neighbouring 16-byte pieces.
__device__ __forceinline__ int column_slot(int c) {
  const int j = (c & 7) >> 1, k = (c >> 3) * 2 + (c & 1);
  return (k >> 2) * 16 + j * 4 + (k & 3);
}

// ----------------------------------------------------------------------------------------------------------------
// scores

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

// After the last tile of a split: what O is multiplied with, and the log-sum-exps.
template <class T>
__device__ __forceinline__ void finish_lines(const KernelParams& p, const Work& w, const LineState& st, float out_scale,
                                             float* scale_out) {
  constexpr float kLn2 = 0.693147180559945309f;
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(st.sum[half]);
    const float sum_exact = quad_sum(st.sum_exact[half]);
    const int column = (threadIdx.x >> 5) * 16 + g + half * 8;
    const int line = w.line_tile * T::N + column;
    if (j != 0) continue;
    const bool empty = sum == 0.f;
    const bool whole = w.splits == 1;
    scale_out[half * 2] = empty ? 0.f : (whole ? out_scale : 1.f) / sum;
    if (line >= p.lines) continue;
    const float shift = (st.max[half] - static_cast<float>(kLogPScale)) * kLn2;
    const float lse = empty ? -INFINITY : shift + logf(sum);
    const float lse_exact = empty ? -INFINITY : shift + logf(sum_exact);
    if (whole) {
      const int token = line / p.d.h_q, head = line - token * p.d.h_q;
      p.d.lse[w.row * p.d.lse_stride[0] + token * p.d.lse_stride[1] + head * p.d.lse_stride[2]] = lse_exact;
    } else {
      p.partial_lse[static_cast<int64_t>(w.slot) * p.lines + line] = make_float2(lse, lse_exact);
    }
  }
}

// Where a role is in the ring of stages.
template <int kSize>
struct Ring {
  int at = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++at == kSize) {
      at = 0;
      phase ^= 1;
    }
  }
};

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
    load_q<T>(p, w, sm);
    copy_async_commit();
    copy_async_wait<0>();
    fence_async_proxy();
    warpgroup_sync(kScoresBarrier);

    LineState st = {{-INFINITY, -INFINITY}, {0.f, 0.f}, {0.f, 0.f}};
    // Tokens that lines g and g + 8 may see, counted from the current step; all_see: those that every line sees.
    const int line = w.line_tile * T::N + warp * 16 + g;
    int all_see = w.len - p.d.s_q + 1 - w.tile_begin * kBlockN;
    int visible_g = all_see + line / p.d.h_q;
    int visible_g8 = all_see + (line + 8) / p.d.h_q;
    int left = w.tile_end - w.tile_begin;  // tiles, the current step's included

    // One step. Its products have been issued; those of the next step are issued here.
    const auto one_step = [&](auto has_next) {
      constexpr bool kNext = decltype(has_next)::value;
      const int buffer = t & 1;
      cute::warpgroup_wait<0>();
      fence_registers(s[0]);
      fence_registers(s[1]);
      // K's rope part has been read.
      if (lane == 0) barrier_arrive(&sm.rope_empty[rope_done]);
      if (++rope_done == kRopeStages) rope_done = 0;
      if (kNext || left > 1) {
        if (lane == 0) barrier_arrive(&sm.rope_empty[rope_done]);
        if (++rope_done == kRopeStages) rope_done = 0;
      }
      if (all_see < kStepTokens || (!kNext && left == 1)) [[unlikely]] {
        mask_scores(s[0], visible_g, visible_g8);
        const bool two = kNext || left > 1;  // else what would be the second tile belongs to another split
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
      if constexpr (kNext) {
        barrier_wait(&sm.kv_full[stage.at], stage.phase);
        const ScoresProduct product(sm.q, sm.kv_nope[stage.at], sm.kv_rope[rope.at]);
        product.begin();
        exponentiate(s[1], st, scale, shift, has_lines(), address ^ 64, [&](int k) { product.step(s[0], k); });
        product.end(s[0]);
        stage.advance();
        rope.advance();
      } else {
        exponentiate(s[1], st, scale, shift, has_lines(), address ^ 64, [](int) {});
        if (has_lines()) finish_lines<T>(p, w, st, p.d.out_scale * kv_scale, sm.final_scale[t % kScaleBuffers] + slot);
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(&sm.p_full[buffer]);
      all_see -= kStepTokens;
      visible_g -= kStepTokens;
      visible_g8 -= kStepTokens;
      left -= 2;
      ++t;
      if constexpr (kNext)
        if (left > 1) multiply(s[1]);
    };
    multiply(s[0]);
    if (left > 1) multiply(s[1]);
    while (left > 2) one_step(std::true_type{});
    one_step(std::false_type{});
    warpgroup_sync(kScoresBarrier);  // all warps have read q before the next one overwrites it
  }
}

// ----------------------------------------------------------------------------------------------------------------
// values

// V^T fragments of one step (four wgmma steps of 32 tokens) for the 16 dims of this warp in one block of 64 dims.
struct ValueFragment {
  uint32_t a[4][4];
};

// Those of one tile. address: of the 16-byte piece of this lane's token (token = lane) and this warp's dims.
__device__ __forceinline__ void load_values(ValueFragment& f, int tile, uint32_t address) {
  load_matrix_x4_trans(f.a[2 * tile], address);
  load_matrix_x4_trans(f.a[2 * tile + 1], address + 32 * kChunkBytes);
}

// Pairs of dims apart. Register 2h of a step holds tokens 16h + 2j, + 1, register 2h + 1 tokens 16h + 8 + 2j, + 1.
__device__ __forceinline__ void sort_values(ValueFragment& f) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t x = f.a[k][2 * h], y = f.a[k][2 * h + 1];
      f.a[k][2 * h] = __byte_perm(x, y, 0x6420);
      f.a[k][2 * h + 1] = __byte_perm(x, y, 0x7531);
    }
}

// Tokens past the end of the row or split: whatever lies there (NaN, too) must not meet P = 0. valid: tokens of the
// step that are real.
__device__ __forceinline__ void mask_values(ValueFragment& f, int valid) {
  valid -= 2 * (thread_again() & 3);
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = k * 32 + h * 16;
      uint32_t keep = 0;
      if (token < valid) keep |= 0x000000FF;
      if (token + 1 < valid) keep |= 0x0000FF00;
      if (token + 8 < valid) keep |= 0x00FF0000;
      if (token + 9 < valid) keep |= 0xFF000000;
      f.a[k][2 * h] &= keep;
      f.a[k][2 * h + 1] &= keep;
    }
}

// V^T P^T of one step and block: two groups, one a tile, so that the fragments of the first are free before the end.
template <class T>
__device__ __forceinline__ void issue_values(float (&acc)[T::kAccumulators], const ValueFragment& f, uint64_t p_desc) {
  using Atom = typename Gmma<T::N>::RS;
  fence_registers(acc);
  cute::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    gmma_rs<Atom>(acc, f.a[k], p_desc + (k * 32 >> 4), k == 0 ? ScaleOut::Zero : ScaleOut::One);
    if (k % 2 == 1) cute::warpgroup_commit_batch();
  }
}

// O = O alpha + tile. Alpha is in registers for kAlphaKept groups of four columns; with 64 lines there are none left
// for it, and it is read here: from this lane's part of the column slots in shared memory.
template <class T>
__device__ __forceinline__ void fold(float (&o)[T::kAccumulators], float (&acc)[T::kAccumulators],
                                     const float4 (&kept)[T::kAlphaKept + 1], const float* alpha) {
  fence_registers(acc);
#pragma unroll
  for (int q = 0; q < T::N / 16; ++q) {
    const float4 a = q < T::kAlphaKept ? kept[q] : *reinterpret_cast<const float4*>(alpha + q * 16);
#pragma unroll
    for (int i = 8 * q; i < 8 * q + 8; i += 4) {
      const bool odd = i & 4;
      o[i] = fmaf(o[i], odd ? a.z : a.x, acc[i]);
      o[i + 1] = fmaf(o[i + 1], odd ? a.w : a.y, acc[i + 1]);
      o[i + 2] = fmaf(o[i + 2], odd ? a.z : a.x, acc[i + 2]);
      o[i + 3] = fmaf(o[i + 3], odd ? a.w : a.y, acc[i + 3]);
    }
  }
}

template <class T>
__device__ __forceinline__ void read_columns(float (&x)[T::N / 4], const float* from) {
  const int j = threadIdx.x & 3;
#pragma unroll
  for (int q = 0; q < T::N / 16; ++q) {
    const float4 v = *reinterpret_cast<const float4*>(from + q * 16 + j * 4);
    x[4 * q] = v.x;
    x[4 * q + 1] = v.y;
    x[4 * q + 2] = v.z;
    x[4 * q + 3] = v.w;
  }
}

// O times the column scales: to out, or as fp32 partial where the row has several splits.
template <class T>
__device__ __forceinline__ void store_output(const KernelParams& p, const Work& w,
                                             float (&o)[kBlocksM][T::kAccumulators], const float (&scale)[T::N / 4]) {
  const int thread = thread_again() - kWarpgroup, j = thread & 3;
  const int dim = (thread >> 7) * 256 + ((thread >> 5) & 3) * 16 + ((thread & 31) >> 2) * 2;
#pragma unroll
  for (int c = 0; c < T::N / 4; ++c) {
    const int line = w.line_tile * T::N + (c >> 1) * 8 + 2 * j + (c & 1);
    if (line >= p.lines) continue;
    const int i = (c >> 1) * 4 + (c & 1);  // and i + 2: the next dim
    if (w.splits == 1) {
      const int token = line / p.d.h_q, head = line - token * p.d.h_q;
      __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.d.out) + w.row * p.d.out_stride[0] +
                           token * p.d.out_stride[1] + head * p.d.out_stride[2] + dim;
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m)
        *reinterpret_cast<__nv_bfloat162*>(out + m * kRowsM) =
            __floats2bfloat162_rn(o[m][i] * scale[c], o[m][i + 2] * scale[c]);
    } else {
      float* out = p.partial_o + (static_cast<int64_t>(w.slot) * p.lines + line) * kDimNope + dim;
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m)
        *reinterpret_cast<float2*>(out + m * kRowsM) = make_float2(o[m][i] * scale[c], o[m][i + 2] * scale[c]);
    }
  }
}

// Rows without tokens are in nobody's list: out 0, lse -inf.
__device__ __forceinline__ void fill_empty_rows(const KernelParams& p, int thread) {
  for (int row = blockIdx.x; row < p.d.b; row += gridDim.x) {
    if (row_length(p, row) > 0) continue;
    for (int i = thread; i < p.lines * (kDimNope / 2); i += 2 * kWarpgroup) {
      const int line = i / (kDimNope / 2), dim = (i - line * (kDimNope / 2)) * 2;
      const int token = line / p.d.h_q, head = line - token * p.d.h_q;
      __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.d.out) + row * p.d.out_stride[0] + token * p.d.out_stride[1] +
                           head * p.d.out_stride[2];
      *reinterpret_cast<uint32_t*>(out + dim) = 0;
      if (dim == 0) p.d.lse[row * p.d.lse_stride[0] + token * p.d.lse_stride[1] + head * p.d.lse_stride[2]] = -INFINITY;
    }
  }
}

template <class T>
__device__ __forceinline__ void values_role(const KernelParams& p, typename T::SharedStorage& sm) {
  const int thread = threadIdx.x - kWarpgroup;
  const int half = thread >> 7;  // dims [256 * half, ...)
  const int warp = (thread >> 5) & 3, lane = thread & 31;
  fill_empty_rows(p, thread);

  // This lane's token of 32 is `lane`; this warp's dims of block m are 64 m + 16 warp: piece 4 (m & 1) + warp of chunk
  // m / 2.
  const uint32_t piece = static_cast<uint32_t>(warp ^ (lane & 7)) << 4;
  const uint32_t token_address =
      shared_address(sm.kv_nope[0]) + half * 2 * (kBlockN * kChunkBytes) + lane * kChunkBytes + piece;
  const uint64_t p_desc = matrix_descriptor<Swizzle::k128>(sm.p[0]);
  const auto block = [](uint32_t address, int m) {
    return (address + (m >> 1) * (kBlockN * kChunkBytes)) ^ ((m & 1) << 6);
  };

  uint32_t t = 0;
  Ring<T::kStages> stage;
  for (int item = 0;; ++item) {
    // Read again for the output: a register each is dear here.
    const Work& w = sm.list.ring[item % kWorkSlots];
    if (w.row < 0) break;
    int tiles_left = w.tile_end - w.tile_begin;
    float o[kBlocksM][T::kAccumulators];
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m)
#pragma unroll
      for (int i = 0; i < T::kAccumulators; ++i) o[m][i] = 0.f;

    for (; tiles_left > 0; tiles_left -= 2, ++t) {
      const int buffer = t & 1;
      float acc[T::kAccumulators];
      ValueFragment f;
      const int first = stage.at;
      barrier_wait(&sm.kv_full[first], stage.phase);  // the first fragments need not wait for P
      const uint32_t address0 = token_address + first * kNopeTileBytes;
      load_values(f, 0, address0);
      stage.advance();
      const int second = stage.at;
      const uint32_t address1 = token_address + second * kNopeTileBytes;
      if (tiles_left > 1) {
        barrier_wait(&sm.kv_full[second], stage.phase);
        stage.advance();
      }
      load_values(f, 1, address1);  // without a second tile: anything, and masked
      barrier_wait(&sm.p_full[buffer], (t >> 1) & 1);
      const float* alpha = sm.alpha[buffer] + (thread_again() & 3) * 4;
      float4 kept[T::kAlphaKept + 1];  // the last is not used: an array of none is not allowed
#pragma unroll
      for (int q = 0; q < T::kAlphaKept; ++q) kept[q] = *reinterpret_cast<const float4*>(alpha + q * 16);
      const uint64_t desc = p_desc + (buffer * T::N * kStepTokens >> 4);
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m) {
        sort_values(f);
        // Only in the last step of a split can tokens be missing: how many are there is worked out again each time.
        if (tiles_left <= 2) [[unlikely]]
          mask_values(f, min(tiles_left * kBlockN, w.len - (w.tile_end - tiles_left) * kBlockN));
        issue_values<T>(acc, f, desc);
        cute::warpgroup_wait<1>();
        if (m + 1 < kBlocksM) load_values(f, 0, block(address0, m + 1));
        cute::warpgroup_wait<0>();
        if (m + 1 < kBlocksM) load_values(f, 1, block(address1, m + 1));
        fold<T>(o[m], acc, kept, alpha);
      }
      __syncwarp();
      if ((thread_again() & 31) == 0) {
        barrier_arrive(&sm.kv_empty[first]);
        if (tiles_left > 1) barrier_arrive(&sm.kv_empty[second]);
        barrier_arrive(&sm.p_empty[buffer]);
      }
      if (tiles_left <= 2) [[unlikely]] {
        // Scores are at most two steps ahead: they do not write this one of four again before the next step here ends.
        float scale[T::N / 4];
        read_columns<T>(scale, sm.final_scale[t % kScaleBuffers]);
        store_output<T>(p, w, o, scale);
      }
    }
  }
}

// ----------------------------------------------------------------------------------------------------------------
// kernel

template <class T>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& sm = *reinterpret_cast<typename T::SharedStorage*>(shared);
  if (threadIdx.x / 32 == 3 * kWarpgroup / 32) {
    start_list(p, sm.list);
    publish_next(p, sm.list, 0);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < T::kStages; ++i) {
      barrier_init(&sm.kv_full[i], 1);   // the loader
      barrier_init(&sm.kv_empty[i], 8);  // warps of values
    }
    for (int i = 0; i < kRopeStages; ++i) barrier_init(&sm.rope_empty[i], 4);  // warps of scores
    for (int i = 0; i < kPBuffers; ++i) {
      barrier_init(&sm.p_full[i], 4);   // warps of scores
      barrier_init(&sm.p_empty[i], 8);  // warps of values
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async_proxy();
  }
  __syncthreads();
  // The combine kernel may start now; it waits for this grid's end before it reads.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  if (threadIdx.x < kWarpgroup) {
    if constexpr (T::kScoresRegisters > T::kLaunchRegisters) {
      cutlass::arch::warpgroup_reg_alloc<T::kScoresRegisters>();
    } else {
      cutlass::arch::warpgroup_reg_dealloc<T::kScoresRegisters>();
    }
    scores_role<T>(p, sm);
  } else if (threadIdx.x < 3 * kWarpgroup) {
    cutlass::arch::warpgroup_reg_alloc<T::kValuesRegisters>();
    values_role<T>(p, sm);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<T::kLoaderRegisters>();
    if (threadIdx.x < 3 * kWarpgroup + 32) {
      loader_role<T>(p, sm);
    } else if (threadIdx.x < 3 * kWarpgroup + 64 && blockIdx.x == 0 && p.any_split != nullptr) {
      write_plan(p, sm.list.tiles_per_split);
    }
  }
}

}  // namespace mla::sm90a
