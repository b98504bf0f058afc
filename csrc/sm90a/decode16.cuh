// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// MLA decode in bf16 and fp16 on Hopper.
//
//   S = Q K^T              [64 lines, 64 tokens] = [64, 576] x [64, 576]^T   m64n64k16, both operands K-major
//
//   P = round(2^(S c - m))   m: running row maximum of S c, c = logit_scale * log2(e)
//
//   O = O alpha + P V      [64 lines, 512 dims] += [64, 64] x [64, 512]      m64n128k16, P in registers, V MN-major
//
//   out = O / row sum        alpha = 2^(m_old - m)
//
// A line is one head of one query token; a CTA has 64 of them and walks its list of work (work.cuh). K and V are the
// same tile in shared memory: nine chunks of [64 tokens][64 dims], 128-byte swizzle, of which V is the first eight. The
// tensor core reads 16-bit operands in either direction, so nothing is transposed, and it adds in fp32, so O is
// accumulated in place. What a lane has of S is what the same lane of a values warp wants of P as operand A: P goes
// through shared memory in the order of registers, 16 bytes a lane and step of 16 tokens.
//
// Who waits for what, and signals what:
//   - loader (warps 12-15) waits for k_empty and v_empty of the stage; signals kv_full in five parts, in the order in
//     which they become free and are wanted: chunk 8, chunks 0 1, 2 3, 4 5, 6 7.
//   - scores (warps 0-3) wait for kv_full part by part; signal k_empty (K is read: chunk 8, which V lacks, is free),
//     then alpha_full (O may be rescaled); wait for both v_empty of the tile before (P has one buffer); signal p_full
//     (P is there; chunks 0-7 belong to values), and scale_full once an item (row sums).
//   - values (warps 4-7 and 8-11, 256 dims each) wait for alpha_full, kv_full, p_full; signal v_empty of their half,
//     chunks 0-3 or 4-7; wait for scale_full at the end of an item.
//
// Where values leave fp32: P to bf16 (fp16), the output. Row sums are fp32, of the rounded P (divides) and of the
// unrounded P (gives lse).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "check_cuda.h"
#include "decode16_load.cuh"

namespace mla::sm90a {
namespace bits16 {

// ----------------------------------------------------------------------------------------------------------------
// scores

// Q K^T of one stage, part by part as it arrives; issued and committed, not waited for.
template <class T>
__device__ __forceinline__ void issue_scores(float (&s)[32], const uint8_t* q, const uint8_t* k_tile, uint64_t* full,
                                             uint32_t phase) {
  // Through a shuffle, each time: the compiler then knows that descriptors are the same in all lanes, and computes them
  // in uniform registers.
  const uint64_t q_desc = uniform(matrix_descriptor<Swizzle::k128>(q));
  const uint64_t k_desc = uniform(matrix_descriptor<Swizzle::k128>(k_tile));
  const auto chunk = [&](int c, bool first) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t offset = (c * T::kChunkTile + k * 32) >> 4;
      gmma_ss<typename T::F::Scores>(s, advance(q_desc, offset), advance(k_desc, offset),
                                     first && k == 0 ? ScaleOut::Zero : ScaleOut::One);
    }
  };
  barrier_wait(&full[T::kParts - 1], phase);
  fence_registers(s);
  cute::warpgroup_arrive();
  chunk(T::kChunks - 1, true);
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    barrier_wait(&full[part], phase);
    cute::warpgroup_arrive();  // the compiler puts one here anyway, after a loop
    chunk(part * 2, false);
    chunk(part * 2 + 1, false);
  }
  cute::warpgroup_commit_batch();
  fence_registers(s);
}

// Running state of the two lines g, g + 8 of a lane; row sums are of the lane's own columns until quad_sum().
struct LineState {
  float max[2];        // of S c, in powers of two
  float sum[2];        // of rounded P
  float sum_exact[2];  // of unrounded P
};

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Masks S, moves the running maxima on; alpha to shared memory and out; returns what to subtract from S c.
// visible_*: how many tokens of this tile lines g and g + 8 may see (may be negative or above 64).
__device__ __forceinline__ void advance_maxima(float (&s)[32], LineState& st, float scale, bool masked, int visible_g,
                                               int visible_g8, float* alpha_out, float (&alpha)[2], float (&base)[2]) {
  const int j = threadIdx.x & 3;
  if (masked) [[unlikely]] {
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if ((i >> 2) * 8 + 2 * j + (i & 1) >= ((i & 2) ? visible_g8 : visible_g)) s[i] = -INFINITY;
  }
  float m[2];
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
    base[half] = m_new == -INFINITY ? 0.f : m_new;  // a line without a visible token so far: P = 0
    alpha[half] = exp2_approx(st.max[half] - base[half]);
    st.max[half] = m_new;
    if (j == 0) alpha_out[half * 8] = alpha[half];
  }
}

// After the last tile of a split: what O is multiplied with, and the log-sum-exps.
template <class T>
__device__ __forceinline__ void finish_lines(const KernelParams& p, const Work& w, const LineState& st, float out_scale,
                                             int first_line, float* scale_out) {
  constexpr float kLn2 = 0.693147180559945309f;
  const int j = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(st.sum[half]);
    const float sum_exact = quad_sum(st.sum_exact[half]);
    if (j != 0) continue;
    const int line = first_line + half * 8;
    const bool empty = sum == 0.f;
    const bool whole = w.whole;
    scale_out[half * 8] = empty ? 0.f : (whole ? out_scale : 1.f) / sum;
    if (line >= p.lines) continue;
    const float lse = empty ? -INFINITY : st.max[half] * kLn2 + logf(sum);
    const float lse_exact = empty ? -INFINITY : st.max[half] * kLn2 + logf(sum_exact);
    if (whole) {
      *lse_line(p, w.row, line) = lse_exact;
    } else {
      p.partial_lse[static_cast<int64_t>(line) * p.slots + w.slot] = make_float2(lse, lse_exact);
    }
  }
}

template <class T>
__device__ __forceinline__ void scores_role(const KernelParams& p, typename T::SharedStorage& sm) {
  using F = typename T::F;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 5), 0);  // uniform, and the compiler knows it
  const int lane = threadIdx.x & 31, g = lane >> 2;
  const float kv_scale = p.kv_scale ? *p.kv_scale : 1.f;
  const float scale =
      p.d.logit_scale * kv_scale * (p.q_scale ? *p.q_scale : 1.f) * 1.44269504088896341f;  // powers of two

  int stage = 0;
  uint32_t phase = 0;
  float s[32];
  for (int item = 0;; ++item) {
    const Work w = sm.list.ring[item % kWorkSlots];
    if (w.row < 0) break;
    bits16::load_q<T>(p, w, sm);  // qualified: load.cuh has one, too
    finish_copies(kScoresBarrier);

    LineState st = {{-INFINITY, -INFINITY}, {0.f, 0.f}, {0.f, 0.f}};
    const int line = w.line_tile * T::kLines + warp * 16 + g;
    const bool has_lines = w.line_tile * T::kLines + warp * 16 < p.lines;
    // Tokens that lines g and g + 8 may see, counted from the current tile; all_see: those that every line sees.
    int all_see = w.len - p.d.s_q + 1 - w.tile_begin * kBlockN;
    int visible_g = all_see + min(line_place(p, line).token, p.d.s_q - 1);
    int visible_g8 = all_see + min(line_place(p, line + 8).token, p.d.s_q - 1);

    for (int tile = w.tile_begin; tile < w.tile_end; ++tile) {
      issue_scores<T>(s, sm.q, sm.kv[stage], sm.kv_full[stage], phase);
      cute::warpgroup_wait<0>();
      fence_registers(s);
      warp_arrive(&sm.k_empty[stage]);
      uint32_t packed[2][8];
      float alpha[2], base[2];
      if (has_lines)
        advance_maxima(s, st, scale, all_see < kBlockN, visible_g, visible_g8, sm.alpha[stage] + warp * 16 + g, alpha,
                       base);
      warp_arrive(&sm.alpha_full[stage]);
      if (has_lines) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            const int i = n * 4 + half * 2;
            s[i] = exp2_approx(fmaf(s[i], scale, -base[half]));
            s[i + 1] = exp2_approx(fmaf(s[i + 1], scale, -base[half]));
            packed[half][n] = F::pack(s[i], s[i + 1]);
          }
      }
      // P of the tile before has been read. (Before the first tile this is a fresh barrier: it lets pass.)
      const uint32_t before = phase ^ (stage == 0 ? 1 : 0);
      barrier_wait(&sm.v_empty[stage ^ 1][0], before);
      barrier_wait(&sm.v_empty[stage ^ 1][1], before);
      if (has_lines) {
#pragma unroll
        for (int u = 0; u < 4; ++u)
          sm.p[u][threadIdx.x] =
              make_uint4(packed[0][2 * u], packed[1][2 * u], packed[0][2 * u + 1], packed[1][2 * u + 1]);
      }
      warp_arrive(&sm.p_full);
      // Row sums, while values work.
      if (has_lines) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float sum[2] = {0.f, 0.f}, sum_exact[2] = {0.f, 0.f};
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            const float2 rounded = F::unpack(packed[half][n]);
            sum[0] += rounded.x;
            sum[1] += rounded.y;
            sum_exact[0] += s[n * 4 + half * 2];
            sum_exact[1] += s[n * 4 + half * 2 + 1];
          }
          st.sum[half] = fmaf(st.sum[half], alpha[half], sum[0] + sum[1]);
          st.sum_exact[half] = fmaf(st.sum_exact[half], alpha[half], sum_exact[0] + sum_exact[1]);
        }
      }
      all_see -= kBlockN;
      visible_g -= kBlockN;
      visible_g8 -= kBlockN;
      stage ^= 1;
      if (stage == 0) phase ^= 1;
    }
    if (has_lines) finish_lines<T>(p, w, st, p.d.out_scale * kv_scale, line, sm.final_scale[item & 1] + warp * 16 + g);
    warp_arrive(&sm.scale_full[item & 1]);
    warpgroup_sync(kScoresBarrier);  // all warps have read q before the next one overwrites it
  }
}

// ----------------------------------------------------------------------------------------------------------------
// values

// Rows without tokens are in nobody's list: out 0, lse -inf.
template <class T>
__device__ __forceinline__ void fill_empty_rows(const KernelParams& p, int thread) {
  for (int row = blockIdx.x; row < p.d.b; row += gridDim.x) {
    if (row_length(p, row) > 0) continue;
    for (int i = thread; i < p.lines * (kDimNope / 2); i += 2 * kWarpgroup) {
      const int line = i / (kDimNope / 2), dim = (i - line * (kDimNope / 2)) * 2;
      *reinterpret_cast<uint32_t*>(out_line<typename T::Element>(p, row, line) + dim) = 0;
      if (dim == 0) *lse_line(p, row, line) = -INFINITY;
    }
  }
}

// Tokens past the end of the row: whatever lies there (NaN, too) must not meet P = 0. Scores are done with this tile.
template <class T>
__device__ __forceinline__ void clear_tail(uint8_t* v, int valid, int thread) {
#pragma unroll 1
  for (int c = 0; c < 4; ++c)
    for (int i = valid * kChunkBytes + thread * 16; i < T::kChunkTile; i += kWarpgroup * 16)
      *reinterpret_cast<uint4*>(v + c * T::kChunkTile + i) = make_uint4(0, 0, 0, 0);
}

template <class T>
__device__ __forceinline__ void issue_values(float (&o)[T::kBlocks][T::kAccumulators], const uint32_t (&a)[4][4],
                                             const uint8_t* v) {
  const uint64_t v_desc = uniform(values_descriptor<T>(v));
#pragma unroll
  for (int block = 0; block < T::kBlocks; ++block) fence_registers(o[block]);
  cute::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < 4; ++k)  // 16 tokens: two atoms of V
#pragma unroll
    for (int block = 0; block < T::kBlocks; ++block)
      gmma_rs<typename T::F::Values>(o[block], a[k], advance(v_desc, (k * 2048 + block * 2 * T::kChunkTile) >> 4),
                                     ScaleOut::One);
  cute::warpgroup_commit_batch();
#pragma unroll
  for (int block = 0; block < T::kBlocks; ++block) fence_registers(o[block]);
}

// Lines g and g + 8 of O times their scales: to out, or as fp32 partial where the row has several splits.
template <class T>
__device__ __forceinline__ void store_output(const KernelParams& p, const Work& w,
                                             const float (&o)[T::kBlocks][T::kAccumulators], float scale_g,
                                             float scale_g8, int first_line, int dim) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int line = first_line + half * 8;
    if (line >= p.lines) continue;
    const float scale = half ? scale_g8 : scale_g;
    if (w.whole) {
      uint32_t* out = reinterpret_cast<uint32_t*>(out_line<typename T::Element>(p, w.row, line) + dim);
#pragma unroll
      for (int n = 0; n < 32; ++n) {
        const float* x = o[n >> 4] + (n & 15) * 4 + half * 2;
        out[n * 4] = T::F::pack(x[0] * scale, x[1] * scale);
      }
    } else {
      float2* out = reinterpret_cast<float2*>(p.partial_o + partial_index(p, w, line) * kDimNope + dim);
#pragma unroll
      for (int n = 0; n < 32; ++n) {
        const float* x = o[n >> 4] + (n & 15) * 4 + half * 2;
        out[n * 4] = make_float2(x[0] * scale, x[1] * scale);
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void values_role(const KernelParams& p, typename T::SharedStorage& sm) {
  const int thread = threadIdx.x - kWarpgroup;
  const int half = __shfl_sync(~0u, thread >> 7, 0);  // dims [256 * half, ...): chunks 4 * half on
  const int warp = __shfl_sync(~0u, (thread >> 5) & 3, 0), lane = thread & 31;
  const int at = warp * 16 + (lane >> 2);  // line g of the tile
  fill_empty_rows<T>(p, thread);

  int stage = 0;
  uint32_t phase = 0;
  for (int item = 0;; ++item) {
    // Read again for the output: a register each is dear here.
    const Work& w = sm.list.ring[item % kWorkSlots];
    if (w.row < 0) break;
    int tiles_left = w.tile_end - w.tile_begin;
    int valid = w.len - w.tile_begin * kBlockN;  // tokens of the row from this tile on
    const bool has_lines = w.line_tile * T::kLines + warp * 16 < p.lines;
    float o[T::kBlocks][T::kAccumulators];
#pragma unroll
    for (int block = 0; block < T::kBlocks; ++block)
#pragma unroll
      for (int i = 0; i < T::kAccumulators; ++i) o[block][i] = 0.f;

    for (; tiles_left > 0; --tiles_left, valid -= kBlockN) {
      barrier_wait(&sm.alpha_full[stage], phase);
      if (has_lines) {
        const float alpha_g = sm.alpha[stage][at], alpha_g8 = sm.alpha[stage][at + 8];
        if (__any_sync(~0u, alpha_g != 1.f || alpha_g8 != 1.f)) {
#pragma unroll
          for (int block = 0; block < T::kBlocks; ++block)
#pragma unroll
            for (int i = 0; i < T::kAccumulators; ++i) o[block][i] *= (i & 2) ? alpha_g8 : alpha_g;
        }
      }
      barrier_wait(&sm.kv_full[stage][half * 2], phase);
      barrier_wait(&sm.kv_full[stage][half * 2 + 1], phase);
      barrier_wait(&sm.p_full, stage);  // P has one buffer: its phase is the parity of the tile, as the stage is
      uint32_t a[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint4 x = sm.p[k][thread & (kWarpgroup - 1)];
        a[k][0] = x.x;
        a[k][1] = x.y;
        a[k][2] = x.z;
        a[k][3] = x.w;
      }
      if (valid < kBlockN) [[unlikely]] {
        clear_tail<T>(sm.kv[stage] + half * 4 * T::kChunkTile, valid, thread & (kWarpgroup - 1));
        fence_async_proxy();
        warpgroup_sync(kValuesBarrier + half);
      }
      issue_values<T>(o, a, sm.kv[stage] + half * 4 * T::kChunkTile);
      cute::warpgroup_wait<0>();
#pragma unroll
      for (int block = 0; block < T::kBlocks; ++block) fence_registers(o[block]);
      warp_arrive(&sm.v_empty[stage][half]);
      stage ^= 1;
      if (stage == 0) phase ^= 1;
    }
    barrier_wait(&sm.scale_full[item & 1], (item >> 1) & 1);
    const float* scale = sm.final_scale[item & 1];
    store_output<T>(p, w, o, scale[at], scale[at + 8], w.line_tile * T::kLines + at, half * 256 + (lane & 3) * 2);
  }
}

// ----------------------------------------------------------------------------------------------------------------
// kernel

template <class T>
__global__ void __launch_bounds__(kThreads, 1) decode16_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& sm = *reinterpret_cast<typename T::SharedStorage*>(shared);
  if (threadIdx.x / 32 == 3 * kWarpgroup / 32) {
    start_list(p, sm.list);
    publish_next(p, sm.list, 0);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < T::kStages; ++i) {
      for (int part = 0; part < T::kParts; ++part) barrier_init(&sm.kv_full[i][part], T::kFillers);
      barrier_init(&sm.k_empty[i], 4);                                             // warps of scores
      for (int half = 0; half < 2; ++half) barrier_init(&sm.v_empty[i][half], 4);  // warps of that values warpgroup
      barrier_init(&sm.alpha_full[i], 4);                                          // warps of scores
      barrier_init(&sm.scale_full[i], 4);
    }
    barrier_init(&sm.p_full, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async_proxy();
  }
  __syncthreads();

  if (threadIdx.x < kWarpgroup) {
    cutlass::arch::warpgroup_reg_dealloc<T::kScoresRegisters>();
    scores_role<T>(p, sm);
  } else if (threadIdx.x < 3 * kWarpgroup) {
    cutlass::arch::warpgroup_reg_alloc<T::kValuesRegisters>();
    values_role<T>(p, sm);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<T::kLoaderRegisters>();
    if (threadIdx.x / 32 == 3 * kWarpgroup / 32 + 1 && blockIdx.x == 0 && p.any_split != nullptr)
      write_plan(p, sm.list.share);  // for the combine kernel
    bits16::loader_role<T>(p, sm);   // qualified: load.cuh has one, too
    // The combine kernel may start where there is room; it waits for this grid's end before it reads.
    if (threadIdx.x / 32 == 3 * kWarpgroup / 32) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
}

}  // namespace bits16

template <class Element, bool kTma>
void launch_decode16(const KernelParams& p, int ctas, cudaStream_t stream) {
  using T = bits16::Traits<Element, kTma>;
  // The limit is a property of each device: set before every launch (it costs well under a microsecond).
  check_cuda(
      cudaFuncSetAttribute(bits16::decode16_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSharedBytes),
      "cudaFuncSetAttribute");
  bits16::decode16_kernel<T><<<ctas, kThreads, T::kSharedBytes, stream>>>(p);
  check_cuda(cudaGetLastError(), "launch of the sm90a decode kernel for 16-bit formats");
}

}  // namespace mla::sm90a
