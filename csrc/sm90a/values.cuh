// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// V^T P^T, the fold and the output: the values warpgroups of decode.cuh.
#pragma once

#include "roles.cuh"

namespace mla::sm90a {

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
    if (w.whole) {
      const LinePlace at = line_place(p, line);
      __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.d.out) + w.row * p.d.out_stride[0] +
                           at.token * p.d.out_stride[1] + at.head * p.d.out_stride[2] + dim;
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
      const LinePlace at = line_place(p, line);
      __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.d.out) + row * p.d.out_stride[0] +
                           at.token * p.d.out_stride[1] + at.head * p.d.out_stride[2];
      *reinterpret_cast<uint32_t*>(out + dim) = 0;
      if (dim == 0)
        p.d.lse[row * p.d.lse_stride[0] + at.token * p.d.lse_stride[1] + at.head * p.d.lse_stride[2]] = -INFINITY;
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

}  // namespace mla::sm90a
