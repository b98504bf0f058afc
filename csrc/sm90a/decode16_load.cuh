// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// The bf16 and fp16 kernel: formats, shared-memory plan, and what moves q and tiles of kv_cache there.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch_parts16.h"
#include "load.cuh"

namespace mla::sm90a::bits16 {

// Rounding of P and out, and the products, of each format.
template <class Element>
struct Format;
template <>
struct Format<__nv_bfloat16> {
  using Scores = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>;
  using Values =
      cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::MN>;
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    const __nv_bfloat162 x = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const uint32_t*>(&x);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u));
  }
};
template <>
struct Format<__half> {
  using Scores = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>;
  using Values = cute::SM90::GMMA::MMA_64x128x16_F32F16F16_RS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::MN>;
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    const __half2 x = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const uint32_t*>(&x);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t x) {
    return __half22float2(*reinterpret_cast<const __half2*>(&x));
  }
};

template <class Element_, bool kTma_>
struct Traits {
  using Element = Element_;
  using F = Format<Element>;
  static constexpr bool kTma = kTma_;      // pages of 64 tokens and more; smaller ones are gathered with cp.async
  static constexpr int kLines = kLines16;  // wgmma M
  static constexpr int kChunks = 9;        // of 64 dims; the last one is the rotary part
  static constexpr int kChunkTile = kBlockN * kChunkBytes;  // 64 tokens (or lines) of one chunk: 8 KB
  static constexpr int kTileBytes = kChunks * kChunkTile;   // 72 KB: q, or a stage
  static constexpr int kStages = 2;
  static constexpr int kParts = 5;          // of a stage: chunk pairs 0-3, and the rotary chunk
  static constexpr int kBlocks = 2;         // of 128 dims, in a values warpgroup (nvcc has no m64n256 at 128 registers)
  static constexpr int kAccumulators = 64;  // a share of [64 lines, 128 dims] of one thread
  static constexpr bool kPrefetch =
      false;  // tiles into L2 one ahead of their load (measured: 2 to 17 % slower with it)
  // A thread has 128 registers at launch; setmaxnreg moves them to where O is.
  static constexpr int kLoaderRegisters = kTma ? 40 : 56;
  static constexpr int kScoresRegisters = kTma ? 120 : 104;
  static constexpr int kValuesRegisters = 176;
  static_assert(kLoaderRegisters + kScoresRegisters + 2 * kValuesRegisters <= 512);
  // Loader warps that fill one stage: TMA is issued by the first warp; a gather has two warps for each of both stages.
  static constexpr int kFillers = kTma ? 1 : 2;

  struct SharedStorage {
    alignas(1024) uint8_t q[kTileBytes];            // [9 chunks][64 lines][128 B], swizzled
    alignas(1024) uint8_t kv[kStages][kTileBytes];  // the same with tokens as lines
    alignas(16) uint4 p[kBlockN / 16][kWarpgroup];  // by lane: operand A of 16 tokens
    float alpha[kStages][kLines];                   // rescale of O for the tile of this stage
    float final_scale[2][kLines];                   // by parity of the item: scale / row sum
    WorkList list;
    alignas(8) uint64_t kv_full[kStages][kParts];
    alignas(8) uint64_t k_empty[kStages];
    alignas(8) uint64_t v_empty[kStages][2];
    alignas(8) uint64_t alpha_full[kStages];
    alignas(8) uint64_t p_full;
    alignas(8) uint64_t scale_full[2];
  };
  static constexpr int kSharedBytes = static_cast<int>(sizeof(SharedStorage));
  static_assert(kSharedBytes <= 232448, "227 KB is what a CTA can have");
};

enum NamedBarrier : int { kScoresBarrier = 1, kValuesBarrier = 2, kLoaderBarrier = 4 };  // values: 2 and 3

// Line of partial_o where this line of this split goes.
__device__ __forceinline__ int64_t partial_index(const KernelParams& p, const Work& w, int line) {
  return static_cast<int64_t>(w.slot) * p.lines + line;
}

// First element of a line's output, and its lse.
template <class Element>
__device__ __forceinline__ Element* out_line(const KernelParams& p, int row, int line) {
  const LinePlace at = line_place(p, line);
  return static_cast<Element*>(p.d.out) + row * p.d.out_stride[0] + at.token * p.d.out_stride[1] +
         at.head * p.d.out_stride[2];
}
__device__ __forceinline__ float* lse_line(const KernelParams& p, int row, int line) {
  const LinePlace at = line_place(p, line);
  return p.d.lse + row * p.d.lse_stride[0] + at.token * p.d.lse_stride[1] + at.head * p.d.lse_stride[2];
}

// MN-major operand with 128-byte swizzle: rows (tokens, the K of the product) of 64 dims, eight of them an atom of 1024
// bytes, the next eight right behind it, and the next 64 dims one chunk on. Canonical layout ((8,8,m),(8,k)) :
// ((1,8,LBO),(64,SBO)) in elements.
template <class T>
__device__ __forceinline__ uint64_t values_descriptor(const void* v) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{T::kChunkTile >> 4} << 16) |
         static_cast<uint64_t>((shared_address(v) & 0x3FFFF) >> 4);
}

// One arrival for a warp: what its lanes did before is covered.
__device__ __forceinline__ void warp_arrive(uint64_t* bar) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) barrier_arrive(bar);
}

// One stage by TMA, from a page of at least 64 tokens. Chunks go out in the order in which they become free and are
// wanted. A block id outside the cache is outside the tensor map: TMA writes zeros and reads nothing.
template <class T>
__device__ __forceinline__ void load_stage(const KernelParams& p, typename T::SharedStorage& sm, int stage,
                                           uint32_t phase, int block, int first_token) {
  const int token = first_token & ((1 << p.d.page_size_log2) - 1);
  const auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  const auto load_part = [&](int part, int chunk, int chunks) {
    uint64_t* full = &sm.kv_full[stage][part];
    if (cute::elect_one_sync()) {
      barrier_expect(full, chunks * T::kChunkTile);
      for (int c = chunk; c < chunk + chunks; ++c)
        cute::SM90_TMA_LOAD_4D::copy(&p.kv_nope, full, hint, sm.kv[stage] + c * T::kChunkTile, 0, token, c, block);
    }
    __syncwarp();
  };
  barrier_wait(&sm.k_empty[stage], phase);
  load_part(T::kParts - 1, T::kChunks - 1, 1);
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    if (part % 2 == 0) barrier_wait(&sm.v_empty[stage][part / 2], phase);
    load_part(part, part * 2, 2);
  }
}

// The same into L2 only. With two stages a tile is asked for late: it should not have to come from device memory then.
template <class T>
__device__ __forceinline__ void prefetch_tile(const KernelParams& p, int block, int first_token) {
  const int token = first_token & ((1 << p.d.page_size_log2) - 1);
  if (cute::elect_one_sync())
    for (int c = 0; c < T::kChunks; ++c) cute::SM90_TMA_LOAD_4D::PREFETCH::copy(&p.kv_nope, 0, token, c, block);
  __syncwarp();
}

// Half of a stage (32 tokens) by one warp with cp.async, for smaller pages: eight lanes copy the 128 bytes that a token
// has in a chunk. Tokens past the end are not read (their slots of block_table may hold anything): the stage keeps
// stale bytes there, which the masks of scores and values neutralise. An id outside the cache gives zeros, as with TMA.
template <class T>
__device__ __forceinline__ void gather_half_stage(const KernelParams& p, typename T::SharedStorage& sm, int stage,
                                                  int row, int first_token, int tokens, int half) {
  const int lane = threadIdx.x & 31, piece = lane & 7;
#pragma unroll 1
  for (int r = half * 32 + (lane >> 3); r < half * 32 + 32; r += 4) {
    if (r >= tokens) continue;
    const int token = first_token + r;
    const int block = lookup_block(p, row, token);
    const bool valid = block >= 0 && block < p.d.num_blocks;
    const typename T::Element* from = static_cast<const typename T::Element*>(p.d.kv_cache) +
                                      (valid ? block : 0) * p.d.kv_page_stride +
                                      (token & ((1 << p.d.page_size_log2) - 1)) * p.d.kv_token_stride + piece * 8;
    const uint32_t to = shared_address(sm.kv[stage]) + r * kChunkBytes + ((piece ^ (r & 7)) << 4);
#pragma unroll
    for (int c = 0; c < T::kChunks; ++c) copy_async_16(to + c * T::kChunkTile, from + c * 64, valid);
  }
}

// q lines of one work item; lines past the last one are zero. By the whole scores warpgroup, eight threads a line.
template <class T>
__device__ __forceinline__ void load_q(const KernelParams& p, const Work& w, typename T::SharedStorage& sm) {
  using Element = typename T::Element;
  const int piece = threadIdx.x & 7;
#pragma unroll 1
  for (int r = threadIdx.x >> 3; r < T::kLines; r += kWarpgroup / 8) {
    const int line = w.line_tile * T::kLines + r;
    const bool valid = line < p.lines;
    const LinePlace at = line_place(p, valid ? line : 0);
    const Element* nope = static_cast<const Element*>(p.d.q_nope) + w.row * p.d.q_nope_stride[0] +
                          at.token * p.d.q_nope_stride[1] + at.head * p.d.q_nope_stride[2] + piece * 8;
    const Element* pe = static_cast<const Element*>(p.d.q_pe) + w.row * p.d.q_pe_stride[0] +
                        at.token * p.d.q_pe_stride[1] + at.head * p.d.q_pe_stride[2] + piece * 8;
    uint8_t* to = sm.q + r * kChunkBytes + ((piece ^ (r & 7)) << 4);
#pragma unroll
    for (int c = 0; c < T::kChunks; ++c) {
      const Element* from = c < T::kChunks - 1 ? nope + c * 64 : pe;
      if (p.q_aligned) {
        copy_async_16(shared_address(to + c * T::kChunkTile), from, valid);
      } else {
        for (int k = 0; k < 8; ++k)
          reinterpret_cast<uint16_t*>(to + c * T::kChunkTile)[k] =
              valid ? reinterpret_cast<const uint16_t*>(from)[k] : uint16_t{0};
      }
    }
  }
}

// The first warp lists the work; it alone loads by TMA. A gather is done by all four, two for each stage.
template <class T>
__device__ __forceinline__ void loader_role(const KernelParams& p, typename T::SharedStorage& sm) {
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 5), 0) - 3 * kWarpgroup / 32;
  const int lane = threadIdx.x & 31;
  if (T::kTma && warp > 0) return;
  int stage = 0;
  uint32_t phase = 1;  // the first round finds both stages empty
  for (int item = 0;; ++item) {
    const Work& w = sm.list.ring[item % kWorkSlots];
    const int row = w.row, len = w.len, end = w.tile_end;
    int tile = w.tile_begin;
    if (row < 0) break;
    if (warp == 0) publish_next(p, sm.list, item + 1);
    if constexpr (!T::kTma) warpgroup_sync(kLoaderBarrier);  // the other warps see the next item
    int block = T::kTma ? lookup_block(p, row, tile * kBlockN) : 0;
    for (; tile < end; ++tile) {
      if constexpr (T::kTma) {
        const int next = tile + 1 < end ? lookup_block(p, row, (tile + 1) * kBlockN) : 0;
        load_stage<T>(p, sm, stage, phase, block, tile * kBlockN);
        if (T::kPrefetch && tile + 1 < end) prefetch_tile<T>(p, next, (tile + 1) * kBlockN);
        block = next;
      } else if (stage == warp >> 1) {
        barrier_wait(&sm.k_empty[stage], phase);
        barrier_wait(&sm.v_empty[stage][0], phase);
        barrier_wait(&sm.v_empty[stage][1], phase);
        gather_half_stage<T>(p, sm, stage, row, tile * kBlockN, len - tile * kBlockN, warp & 1);
        copy_async_commit();
        copy_async_wait<0>();
        fence_async_proxy();
        __syncwarp();
        if (lane < T::kParts) barrier_arrive(&sm.kv_full[stage][lane]);
      }
      stage ^= 1;
      if (stage == 0) phase ^= 1;
    }
  }
}

}  // namespace mla::sm90a::bits16
