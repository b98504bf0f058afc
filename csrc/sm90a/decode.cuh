// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// MLA decode in e4m3 on Hopper.
//
//   S = Q K^T                    [64 lines, 64 tokens] = [64, 576] x [64, 576]^T      wgmma m64n64k32, both from shared
//   memory P = e4m3(2^(S c - m + 8))    m: running row maximum of S c, c = logit_scale * log2(e) T^T = V^T P^T [512
//   dims, N lines] = [512, 64 tokens] x [N, 64]^T   wgmma m64nNk32, V^T from registers O^T = O^T alpha + T^T alpha =
//   2^(m_old - m) by line: the rescale and the promotion to fp32 are one fma out = O / row sum
//
// A line is one head of one query token; a CTA has N = 16, 32 or 64 of them and walks its list of work (work.cuh).
// fp8 wgmma wants both operands K-major, so PV needs V^T, while V lies [token][dim]. ldmatrix.trans on pairs of dims
// and two byte permutes give exactly the register A fragment of V^T with the tokens of each 16-block in the order 0 1 8
// 9 | 2 3 10 11 | 4 5 12 13 | 6 7 14 15. The sum over tokens does not mind, as long as P is in the same order, and
// packing the accumulator of S two 8-blocks at a time *is* that order. Row g of the A fragment is dim 2g of a 16-block,
// row g + 8 is dim 2g + 1, so a lane ends up with pairs of neighbouring dims.
//
//   role                     waits for                             signals
//   loader (warp 12)         kv_empty[stage]                       kv_full[stage] (TMA, or cp.async for small pages)
//   scores (warps 0-3)       kv_full[stage], kv_empty of tile - 2  p_full[buffer]
//   values (warps 4-7, 8-11) kv_full[stage], p_full[buffer]        kv_empty[stage]
//                            each has 256 of the 512 dims
// kv_empty also says that P of that tile may be overwritten, and it comes after p_full, so it covers K, too.
//
// Where values leave fp32: products of e4m3 in the tensor core (both wgmmas; its accumulator is narrower than fp32: 18
// steps of 32 for S, 2 for T), P to e4m3, the output to bf16. Row sums are fp32, of the rounded P (divides) and of the
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

// Q K^T of one stage, issued and committed, not waited for.
__device__ __forceinline__ void issue_scores(float (&s)[32], const uint8_t* q, const uint8_t* kv) {
  // The low words of the descriptors (addresses) through a shuffle: that tells the compiler that they are the same in
  // all lanes. Else it computes all 36 in vector registers and moves them over one by one between the products.
  const uint64_t q_nope = uniform(matrix_descriptor<Swizzle::k128>(q));
  const uint64_t k_nope = uniform(matrix_descriptor<Swizzle::k128>(kv));
  const uint64_t q_rope = uniform(matrix_descriptor<Swizzle::k64>(q + kNopeTileBytes));
  const uint64_t k_rope = uniform(matrix_descriptor<Swizzle::k64>(kv + kNopeTileBytes));
  fence_registers(s);
  cute::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < kDimNope / 32; ++k) {
    const uint32_t offset = ((k >> 2) * (kBlockN * kChunkBytes) + (k & 3) * 32) >> 4;
    gmma_ss<Gmma<64>::SS>(s, advance(q_nope, offset), advance(k_nope, offset), k == 0 ? ScaleOut::Zero : ScaleOut::One);
  }
#pragma unroll
  for (int k = 0; k < kDimRope / 32; ++k)
    gmma_ss<Gmma<64>::SS>(s, advance(q_rope, k * 32 >> 4), advance(k_rope, k * 32 >> 4), ScaleOut::One);
  cute::warpgroup_commit_batch();
  fence_registers(s);
}

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

// One tile: mask, maximum, P in e4m3 to shared memory, alpha, row sums. By warps that own real lines.
// visible_*: how many tokens of this tile lines g and g + 8 may see (may be negative or above 64).
// p_address: of the first word of line g; line g + 8 is 512 bytes on. alpha_out: slot of line g; that of g + 8 is 2 on.
__device__ __forceinline__ void softmax_tile(float (&s)[32], LineState& st, float scale, bool masked, int visible_g,
                                             int visible_g8, uint32_t p_address, float* alpha_out) {
  const int j = threadIdx.x & 3;
  if (masked) [[unlikely]] {
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if ((i >> 2) * 8 + 2 * j + (i & 1) >= ((i & 2) ? visible_g8 : visible_g)) s[i] = -INFINITY;
  }
  float m[2], alpha[2], shift[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float a = fmaxf(s[half * 2], s[half * 2 + 1]), b = fmaxf(s[half * 2 + 4], s[half * 2 + 5]);
#pragma unroll
    for (int n = 2; n < 8; n += 2) {
      a = fmaxf(a, fmaxf(s[n * 4 + half * 2], s[n * 4 + half * 2 + 1]));
      b = fmaxf(b, fmaxf(s[n * 4 + half * 2 + 4], s[n * 4 + half * 2 + 5]));
    }
    m[half] = fmaxf(a, b);
  }
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
    if (j == 0) alpha_out[half * 2] = alpha[half];
  }
  // The order is by hand (the asm statements are volatile): exponentials of line g; those of line g + 8 with the
  // packing of line g in between; packing of line g + 8. A conversion right behind its exponential would wait for it
  // each time.
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    s[n * 4] = exp2_approx(fmaf(s[n * 4], scale, shift[0]));
    s[n * 4 + 1] = exp2_approx(fmaf(s[n * 4 + 1], scale, shift[0]));
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
          s[i + 2] = exp2_approx(fmaf(s[i + 2], scale, shift[1]));
          s[i + 3] = exp2_approx(fmaf(s[i + 3], scale, shift[1]));
        }
        packed[k] = to_e4m3x2(s[i + half * 2], s[i + half * 2 + 1]);
        sum_exact[0] += s[i + half * 2];
        sum_exact[1] += s[i + half * 2 + 1];
      }
      store_shared((p_address + half * 8 * kBlockN) ^ (u << 4), packed[0] | static_cast<uint32_t>(packed[1]) << 16);
      const __half2 next = __hadd2(from_e4m3x2(packed[0]), from_e4m3x2(packed[1]));
      if (u % 2 == 0) {
        pair = next;
      } else {
        const float2 f = __half22float2(__hadd2(pair, next));
        sum += f.x + f.y;
      }
    }
    st.sum[half] = fmaf(st.sum[half], alpha[half], sum);
    st.sum_exact[half] = fmaf(st.sum_exact[half], alpha[half], sum_exact[0] + sum_exact[1]);
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
      p.partial_lse[(static_cast<int64_t>(w.row) * p.max_splits + w.split) * p.lines + line] =
          make_float2(lse, lse_exact);
    }
  }
}

template <class T>
__device__ __forceinline__ void scores_role(const KernelParams& p, typename T::SharedStorage& sm) {
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 5), 0);  // uniform, and the compiler knows it
  const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  const bool has_lines = warp * 16 < T::N;
  const float kv_scale = p.kv_scale ? *p.kv_scale : 1.f;
  const float scale =
      p.d.logit_scale * kv_scale * (p.q_scale ? *p.q_scale : 1.f) * 1.44269504088896341f;  // powers of two

  // This lane's words of P: line 16 warp + g, piece 0, word j, swizzled; pieces follow by xor.
  const uint32_t p_address = shared_address(sm.p[0]) + (warp * 16 + g) * kBlockN + (((g >> 1) & 3) << 4) + j * 4;
  const int slot = column_slot(warp * 16 + g);
  uint32_t t = 0;      // tiles so far, over all work
  int stage = 0;       // t % kStages
  uint32_t phase = 0;  // (t / kStages) & 1
  float s[32];
  for (int item = 0;; ++item) {
    const Work w = sm.list.ring[item % kWorkSlots];
    if (w.row < 0) break;
    load_q<T>(p, w, sm);
    copy_async_commit();
    copy_async_wait<0>();
    fence_async_proxy();
    warpgroup_sync(kScoresBarrier);

    LineState st = {{-INFINITY, -INFINITY}, {0.f, 0.f}, {0.f, 0.f}};
    // Tokens that lines g and g + 8 may see, counted from the current tile; all_see: those that every line sees.
    const int line = w.line_tile * T::N + warp * 16 + g;
    int all_see = w.len - p.d.s_q + 1 - w.tile_begin * kBlockN;
    int visible_g = all_see + line / p.d.h_q;
    int visible_g8 = all_see + (line + 8) / p.d.h_q;

    for (int tile = w.tile_begin; tile < w.tile_end; ++tile, ++t) {
      const int buffer = t & 1;
      barrier_wait(&sm.kv_full[stage], phase);
      issue_scores(s, sm.q, sm.kv[stage]);
      // P of tile t - 2 has been read (two stages back, in the round before for the first two stages).
      if (t >= kPBuffers) {
        const bool wrapped = stage < kPBuffers;
        barrier_wait(&sm.kv_empty[wrapped ? stage + kStages - kPBuffers : stage - kPBuffers],
                     phase ^ (wrapped ? 1 : 0));
      }
      cute::warpgroup_wait<0>();
      fence_registers(s);
      if (has_lines) {
        softmax_tile(s, st, scale, all_see < kBlockN, visible_g, visible_g8, p_address + buffer * T::N * kBlockN,
                     sm.alpha[buffer] + slot);
        if (tile + 1 == w.tile_end) [[unlikely]]
          finish_lines<T>(p, w, st, p.d.out_scale * kv_scale, sm.final_scale[buffer] + slot);
      }
      all_see -= kBlockN;
      visible_g -= kBlockN;
      visible_g8 -= kBlockN;
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(&sm.p_full[buffer]);
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    warpgroup_sync(kScoresBarrier);  // all warps have read q before the next one overwrites it
  }
}

// ----------------------------------------------------------------------------------------------------------------
// values

// V^T fragments of 64 tokens (two wgmma steps) for the 16 dims of this warp in one block of 64 dims.
struct ValueFragment {
  uint32_t a[2][4];
};

// address: of the 16-byte piece of this lane's token (token = lane) and this warp's dims.
__device__ __forceinline__ void load_values(ValueFragment& f, uint32_t address) {
  load_matrix_x4_trans(f.a[0], address);
  load_matrix_x4_trans(f.a[1], address + 32 * kChunkBytes);
}

// Pairs of dims apart. Register 2h of a step holds tokens 16h + 2j, + 1, register 2h + 1 tokens 16h + 8 + 2j, + 1.
__device__ __forceinline__ void sort_values(ValueFragment& f) {
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t x = f.a[k][2 * h], y = f.a[k][2 * h + 1];
      f.a[k][2 * h] = __byte_perm(x, y, 0x6420);
      f.a[k][2 * h + 1] = __byte_perm(x, y, 0x7531);
    }
}

// Tokens past the end of the row: whatever lies there (NaN, too) must not meet P = 0.
__device__ __forceinline__ void mask_values(ValueFragment& f, int valid) {
  const int j = threadIdx.x & 3;
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = k * 32 + h * 16 + 2 * j;
      uint32_t keep = 0;
      if (token < valid) keep |= 0x000000FF;
      if (token + 1 < valid) keep |= 0x0000FF00;
      if (token + 8 < valid) keep |= 0x00FF0000;
      if (token + 9 < valid) keep |= 0xFF000000;
      f.a[k][2 * h] &= keep;
      f.a[k][2 * h + 1] &= keep;
    }
}

template <class T>
__device__ __forceinline__ void issue_values(float (&acc)[T::kAccumulators], const ValueFragment& f, uint64_t p_desc) {
  using Atom = typename Gmma<T::N>::RS;
  fence_registers(acc);
  cute::warpgroup_arrive();
  gmma_rs<Atom>(acc, f.a[0], p_desc, ScaleOut::Zero);
  gmma_rs<Atom>(acc, f.a[1], p_desc + (32 >> 4), ScaleOut::One);
  cute::warpgroup_commit_batch();
}

template <class T>
__device__ __forceinline__ void fold(float (&o)[T::kAccumulators], float (&acc)[T::kAccumulators],
                                     const float (&alpha)[T::N / 4]) {
  fence_registers(acc);
#pragma unroll
  for (int i = 0; i < T::kAccumulators; ++i) o[i] = fmaf(o[i], alpha[(i >> 2) * 2 + (i & 1)], acc[i]);
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
                                             float (&o)[kBlocksM][T::kAccumulators], const float (&scale)[T::N / 4],
                                             int dim) {
  const int j = threadIdx.x & 3;
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
      float* out =
          p.partial_o + ((static_cast<int64_t>(w.row) * p.max_splits + w.split) * p.lines + line) * kDimNope + dim;
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

  // This lane's token of a step is `lane`; this warp's dims of block m are 64 m + 16 warp: piece 4 (m & 1) + warp of
  // chunk m / 2.
  const uint32_t piece = static_cast<uint32_t>(warp ^ (lane & 7)) << 4;
  const uint32_t token_address =
      shared_address(sm.kv[0]) + half * 2 * (kBlockN * kChunkBytes) + lane * kChunkBytes + piece;
  const int dim = half * 256 + warp * 16 + (lane >> 2) * 2;
  const uint64_t p_desc = matrix_descriptor<Swizzle::k64>(sm.p[0]);

  uint32_t t = 0;
  int stage = 0;
  uint32_t phase = 0;
  for (int item = 0;; ++item) {
    // Read again for the output: a register each is dear here.
    const Work& w = sm.list.ring[item % kWorkSlots];
    if (w.row < 0) break;
    int tiles_left = w.tile_end - w.tile_begin;
    int valid = w.len - w.tile_begin * kBlockN;  // tokens of the row from this tile on
    float o[kBlocksM][T::kAccumulators];
    float acc[T::kTileBuffers][T::kAccumulators];
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m)
#pragma unroll
      for (int i = 0; i < T::kAccumulators; ++i) o[m][i] = 0.f;

    for (; tiles_left > 0; --tiles_left, valid -= kBlockN, ++t) {
      const int buffer = t & 1;
      const bool masked = valid < kBlockN;
      const uint32_t address = token_address + stage * kStageBytes;
      constexpr int kBuffers = T::kTileBuffers;
      ValueFragment f[kBuffers];
      const auto block_address = [&](int m) { return (address + (m >> 1) * (kBlockN * kChunkBytes)) ^ ((m & 1) << 6); };
      barrier_wait(&sm.kv_full[stage], phase);  // the first fragments need not wait for P
      load_values(f[0], address);
      barrier_wait(&sm.p_full[buffer], (t >> 1) & 1);
      float alpha[T::N / 4];
      read_columns<T>(alpha, sm.alpha[buffer]);
      const uint64_t desc = p_desc + (buffer * T::N * kBlockN >> 4);
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m) {
        const int now = m % kBuffers;
        sort_values(f[now]);
        if (masked) [[unlikely]]
          mask_values(f[now], valid);
        issue_values<T>(acc[now], f[now], desc);
        if (m >=
            kBuffers - 1) {  // fold the block before (or this one), its successor's fragments on their way meanwhile
          const int done = m - (kBuffers - 1);
          cute::warpgroup_wait<kBuffers - 1>();
          if (m + 1 < kBlocksM) load_values(f[(m + 1) % kBuffers], block_address(m + 1));
          fold<T>(o[done], acc[done % kBuffers], alpha);
        } else {
          load_values(f[(m + 1) % kBuffers], block_address(m + 1));
        }
      }
      if constexpr (kBuffers == 2) {
        cute::warpgroup_wait<0>();
        fold<T>(o[kBlocksM - 1], acc[(kBlocksM - 1) % 2], alpha);
      }
      if (tiles_left == 1) read_columns<T>(alpha, sm.final_scale[buffer]);
      __syncwarp();
      if (lane == 0) barrier_arrive(&sm.kv_empty[stage]);
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
      if (tiles_left == 1) [[unlikely]]
        store_output<T>(p, w, o, alpha, dim);
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
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&sm.kv_full[i], 1);   // the loader
      barrier_init(&sm.kv_empty[i], 8);  // warps of values
    }
    for (int i = 0; i < kPBuffers; ++i) barrier_init(&sm.p_full[i], 4);  // warps of scores
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async_proxy();
  }
  __syncthreads();
  // The combine kernel may start now; it waits for this grid's end before it reads.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  if (threadIdx.x < kWarpgroup) {
    cutlass::arch::warpgroup_reg_dealloc<T::kScoresRegisters>();
    scores_role<T>(p, sm);
  } else if (threadIdx.x < 3 * kWarpgroup) {
    cutlass::arch::warpgroup_reg_alloc<T::kValuesRegisters>();
    values_role<T>(p, sm);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<T::kLoaderRegisters>();
    if (threadIdx.x < 3 * kWarpgroup + 32) loader_role<T>(p, sm);
  }
}

}  // namespace mla::sm90a
