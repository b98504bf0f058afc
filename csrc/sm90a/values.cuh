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

// Those of one tile. address: of the 16-byte piece of the step's token `lane` and this warp's dims.
__device__ __forceinline__ void load_values(ValueFragment& f, int tile, uint32_t address) {
  load_matrix_x4_trans(f.a[2 * tile], address + tile * kBlockN * kChunkBytes);
  load_matrix_x4_trans(f.a[2 * tile + 1], address + (tile * kBlockN + 32) * kChunkBytes);
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

// Tokens past the end of the row or split: whatever lies there (NaN, too) must not meet P = 0. Writes zeros over tokens
// first .. 127 of a slot. (Scores mask what they make of these tokens as keys, old or new.) By one warpgroup.
__device__ __forceinline__ void clear_tokens(uint8_t* slot, int first) {
#pragma unroll 1
  for (int at = first * kChunkBytes + (thread_again() & (kWarpgroup - 1)) * 16; at < kSlotBytes; at += kWarpgroup * 16)
    *reinterpret_cast<uint4*>(slot + at) = make_uint4(0, 0, 0, 0);
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

// O = O alpha for the columns whose scores warp has renewed a base. alpha: this lane's part of the column slots.
template <class T>
__device__ __forceinline__ void rescale(float (&o)[kBlocksM][T::kAccumulators], uint32_t renewed, const float* alpha) {
#pragma unroll
  for (int q = 0; q < T::N / 16; ++q) {
    if ((renewed >> (8 * q) & 0xFF) == 0) continue;
    const float4 a = *reinterpret_cast<const float4*>(alpha + q * 16);
#pragma unroll
    for (int m = 0; m < kBlocksM; ++m)
#pragma unroll
      for (int i = 8 * q; i < 8 * q + 8; ++i) o[m][i] *= (i & 4) ? ((i & 1) ? a.w : a.z) : ((i & 1) ? a.y : a.x);
  }
}

// O += tile: the promotion to fp32.
template <class T>
__device__ __forceinline__ void fold(float (&o)[T::kAccumulators], float (&acc)[T::kAccumulators]) {
  fence_registers(acc);
#pragma unroll
  for (int i = 0; i < T::kAccumulators; ++i) o[i] += acc[i];
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

// Of block m of 64 dims, relative to the first: a warpgroup has one of the first two chunks of 128 dims and one of the
// last two, so that both are done with the first two chunks early.
__device__ __forceinline__ constexpr int block_dim(int m) { return (m >> 1) * 2 * kChunkBytes + (m & 1) * kRowsM; }

// O times the column scales: to out, or as fp32 partial where the row has several splits.
template <class T>
__device__ __forceinline__ void store_output(const KernelParams& p, const Work& w,
                                             float (&o)[kBlocksM][T::kAccumulators], const float (&scale)[T::N / 4]) {
  const int thread = thread_again() - kWarpgroup, j = thread & 3;
  const int dim = (thread >> 7) * kChunkBytes + ((thread >> 5) & 3) * 16 + ((thread & 31) >> 2) * 2;
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
        *reinterpret_cast<__nv_bfloat162*>(out + block_dim(m)) =
            __floats2bfloat162_rn(o[m][i] * scale[c], o[m][i + 2] * scale[c]);
    } else {
      float* out = p.partial_o + (static_cast<int64_t>(w.slot) * p.lines + line) * kDimNope + dim;
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m)
        *reinterpret_cast<float2*>(out + block_dim(m)) = make_float2(o[m][i] * scale[c], o[m][i + 2] * scale[c]);
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

// In each step, the block of 64 dims that waits for the next Q K^T.
inline constexpr int kPhase = 1;

template <class T>
__device__ __forceinline__ void values_role(const KernelParams& p, typename T::SharedStorage& sm) {
  const int thread = threadIdx.x - kWarpgroup;
  const int half = thread >> 7;  // chunks half and 2 + half
  const int warp = (thread >> 5) & 3, lane = thread & 31;
  fill_empty_rows(p, thread);

  // This lane's token of 32 is `lane`; this warp's dims of block m: piece 4 (m & 1) + warp of its chunk.
  const uint32_t piece = static_cast<uint32_t>(warp ^ (lane & 7)) << 4;
  const uint32_t token_address = shared_address(sm.kv_nope[0]) + lane * kChunkBytes + piece;
  const uint64_t p_desc = matrix_descriptor<Swizzle::k128>(sm.p[0]);

  const uint32_t zero = unknown_zero(p);
  uint32_t t = 0;
  SlotRing<T::kSlots> ring;
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
      const int slots[2] = {ring.slot(half), ring.slot(2 + half)};
      const auto address = [&](int m) { return (token_address + slots[m >> 1] * kSlotBytes) ^ ((m & 1) << 6); };
      barrier_wait(&sm.kv_full[slots[0]], ring.phase_of(half));  // the first fragments need not wait for P
      const int tokens = w.len - (w.tile_end - tiles_left) * kBlockN;
      if (tiles_left <= 2 && min(tokens, tiles_left * kBlockN) < kStepTokens) [[unlikely]] {
        barrier_wait(&sm.kv_full[slots[1]], ring.phase_of(2 + half));
        for (const int slot : slots) clear_tokens(sm.kv_nope[slot], min(tokens, tiles_left * kBlockN));
        fence_async_proxy();  // before TMA writes here again
        warpgroup_sync(kValuesBarrier + half);
      }
      load_values(f, 0, address(0));
      load_values(f, 1, address(0));
      barrier_wait(&sm.p_full[buffer], (t >> 1) & 1);
      // One byte for each scores warp that has lines.
      const uint32_t renewed = *reinterpret_cast<const uint32_t*>(sm.renewed[buffer]) & (~0u >> (32 - T::N / 16 * 8));
      const uint64_t desc = p_desc + (buffer * T::N * kStepTokens >> 4);
#pragma unroll
      for (int m = 0; m < kBlocksM; ++m) {
        // The products of blocks kPhase and on beside the exponentials of the next step, not beside its Q K^T: the
        // tensor cores would make both wait.
        if (T::N == kRowsM && m == kPhase) barrier_wait(&sm.multiplied[buffer ^ 1], ((t + 1) >> 1) & 1);
        sort_values(f);
        if (m % 2 == 1) {
          // The fragments of the whole slot are in registers, once those of all four loads are: nothing else waits for
          // them before this arrives, so the address does.
          const uint32_t loaded = (f.a[0][0] ^ f.a[1][0] ^ f.a[2][0] ^ f.a[3][0]) & zero;
          __syncwarp();
          if ((thread_again() & 31) == 0) barrier_arrive(&sm.kv_empty[slots[m / 2] + loaded]);
        }
        issue_values<T>(acc, f, desc);
        if (m == 0 && renewed != 0) [[unlikely]]
          rescale<T>(o, renewed, sm.alpha[buffer] + (thread_again() & 3) * 4);
        cute::warpgroup_wait<1>();
        if (m == 1) barrier_wait(&sm.kv_full[slots[1]], ring.phase_of(2 + half));
        if (m + 1 < kBlocksM) load_values(f, 0, address(m + 1));
        cute::warpgroup_wait<0>();
        if (m + 1 < kBlocksM) load_values(f, 1, address(m + 1));
        fold<T>(o[m], acc);
      }
      ring.advance();
      if (tiles_left > 2) [[likely]] {
        __syncwarp();
        if ((thread_again() & 31) == 0) barrier_arrive(&sm.p_empty[buffer]);
      } else {
        float scale[T::N / 4];
        barrier_wait(&sm.sums_full[item & 1], (item >> 1) & 1);
        read_columns<T>(scale, sm.final_scale[t % kScaleBuffers]);
        __syncwarp();
        if ((thread_again() & 31) == 0) barrier_arrive(&sm.p_empty[buffer]);
        store_output<T>(p, w, o, scale);
      }
    }
  }
}

}  // namespace mla::sm90a
