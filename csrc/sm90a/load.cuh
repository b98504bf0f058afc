// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Moves q and tiles of kv_cache to shared memory.
#pragma once

#include <type_traits>

#include "ptx.cuh"
#include "work.cuh"

namespace mla::sm90a {

// Byte of 16-byte piece c (0..35) of line r in a tile of 64 lines: dims 0..511 in four 128-byte swizzled chunks, then
// dims 512..575 with 64-byte swizzle.
__device__ __forceinline__ uint32_t tile_offset(int r, int c) {
  if (c < kDimNope / 16) return (c >> 3) * (kBlockN * kChunkBytes) + r * kChunkBytes + (((c & 7) ^ (r & 7)) << 4);
  return kNopeTileBytes + r * kDimRope + (((c & 3) ^ ((r >> 1) & 3)) << 4);
}

__device__ __forceinline__ int lookup_block(const KernelParams& p, int64_t row, int token) {
  return __ldg(p.d.block_table + row * p.d.block_table_stride + (token >> p.d.page_size_log2));
}

// A page of at least 64 tokens. A block id outside the cache is outside the tensor map: TMA writes zeros and reads
// nothing.
template <class T>
__device__ __forceinline__ void load_tile_tma(const KernelParams& p, typename T::SharedStorage& s, int stage, int rope,
                                              int block, int first_token) {
  uint64_t* full = &s.kv_full[stage];
  const int token = first_token & ((1 << p.d.page_size_log2) - 1);
  const auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  barrier_expect(full, kTileBytes);
  cute::SM90_TMA_LOAD_4D::copy(&p.kv_nope, full, hint, s.kv_nope[stage], 0, token, 0, block);
  cute::SM90_TMA_LOAD_3D::copy(&p.kv_rope, full, hint, s.kv_rope[rope], 0, token, block);
}

// Smaller pages, by cp.async of the whole warp. Tokens past the end are not read (their slots of block_table may hold
// anything): the stage keeps stale bytes there, which the masks of scores and values neutralise. An id outside the
// cache gives zeros, as with TMA.
template <class T>
__device__ __forceinline__ void gather_tile(const KernelParams& p, typename T::SharedStorage& s, int stage, int rope,
                                            int64_t row, int first_token, int tokens) {
  constexpr int pieces = kDim / 16;
  const uint32_t nope_base = shared_address(s.kv_nope[stage]);
  const uint32_t rope_base = shared_address(s.kv_rope[rope]) - kNopeTileBytes;
  for (int i = static_cast<int>(threadIdx.x & 31); i < tokens * pieces; i += 32) {
    const int r = i / pieces, c = i - r * pieces;
    const int block = lookup_block(p, row, first_token + r);
    const bool valid = block >= 0 && block < p.d.num_blocks;
    const int64_t offset = (valid ? block : 0) * p.d.kv_page_stride +
                           ((first_token + r) & ((1 << p.d.page_size_log2) - 1)) * p.d.kv_token_stride + c * 16;
    copy_async_16((c < kDimNope / 16 ? nope_base : rope_base) + tile_offset(r, c),
                  static_cast<const uint8_t*>(p.d.kv_cache) + offset, valid);
  }
}

// The loader warp: lists the work, loads its tiles.
template <class T>
__device__ __forceinline__ void loader_role(const KernelParams& p, typename T::SharedStorage& s) {
  if (rehearsing(p)) {
    // The rehearsal's tiles: whatever is there.
    if ((threadIdx.x & 31) < kRehearsalTiles) barrier_arrive(&s.kv_full[threadIdx.x & 31]);
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    return;
  }
  int stage = 0, rope = 0, previous = -1;
  uint32_t phase = 1, rope_phase = 1;  // the first round finds all stages empty
  for (int item = 0;; ++item) {
    const Work& w = s.list.ring[item % kWorkSlots];
    const int row = w.row, len = w.len, end = w.tile_end;
    int tile = w.tile_begin;
    if (row < 0) break;
    // Lane i has the page of tile base + i.
    int base = tile, pages = 0;
    const auto pages_from = [&](int first) {
      const int mine = first + static_cast<int>(threadIdx.x & 31);
      return mine < end ? lookup_block(p, row, mine * kBlockN) : 0;
    };
    if constexpr (T::kTma) pages = pages_from(base);
    publish_next(p, s.list, item + 1);  // while the pages are on their way
    for (; tile < end; ++tile) {
      int page = 0;
      if constexpr (T::kTma) {
        if (tile - base == 32) {
          base = tile;
          pages = pages_from(base);
        }
        page = __shfl_sync(~0u, pages, tile - base);
      }
      barrier_wait(&s.kv_empty[stage], phase);
      barrier_wait(&s.rope_empty[rope], rope_phase);
      if constexpr (T::kTma) {
        if (cute::elect_one_sync()) load_tile_tma<T>(p, s, stage, rope, page, tile * kBlockN);
        __syncwarp();
      } else {
        // One group a tile; the one before is complete when at most this one is under way.
        gather_tile<T>(p, s, stage, rope, row, tile * kBlockN, min(kBlockN, len - tile * kBlockN));
        copy_async_commit();
        if (previous >= 0) {
          copy_async_wait<1>();
          fence_async_proxy();
          __syncwarp();
          if ((threadIdx.x & 31) == 0) barrier_arrive(&s.kv_full[previous]);
        }
        previous = stage;
      }
      if (++stage == T::kStages) {
        stage = 0;
        phase ^= 1;
      }
      if (++rope == kRopeStages) {
        rope = 0;
        rope_phase ^= 1;
      }
    }
  }
  // The combine kernel may start where there is room; it waits for this grid's end before it reads.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (!T::kTma && previous >= 0) {
    copy_async_wait<0>();
    fence_async_proxy();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(&s.kv_full[previous]);
  }
}

// q of each work item by TMA, by one warp. With fewer than 64 lines the copies of the scores warps are faster.
template <class T>
__device__ __forceinline__ void q_role(const KernelParams& p, typename T::SharedStorage& s) {
  const auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  for (int item = 0;; ++item) {
    // Scores that are done with item - 1 have seen its first tile, and this slot was written before that.
    if (item > 0) barrier_wait(&s.q_empty, (item - 1) & 1);
    const Work& w = s.list.ring[item % kWorkSlots];
    const int row = w.row, line = w.line_tile * T::N;
    if (row < 0) break;
    if (cute::elect_one_sync()) {
      barrier_expect(&s.q_full, kTileBytes);  // lines past the last one are written, too: as zeros
      cute::SM90_TMA_LOAD_4D::copy(&p.q_nope, &s.q_full, hint, s.q, 0, line, 0, row);
      cute::SM90_TMA_LOAD_3D::copy(&p.q_rope, &s.q_full, hint, s.q + kNopeTileBytes, 0, line, row);
    }
    __syncwarp();
  }
}

// q lines of one work item; lines past the last one are zero. By the whole scores warpgroup.
template <class T>
__device__ __forceinline__ void load_q(const KernelParams& p, const Work& w, typename T::SharedStorage& s) {
  // kLanes lanes a line, 16 bytes each. The thread is read anew: what hangs on it is not to live through the main loop.
  const auto part = [&](auto lanes, const void* from, const int64_t (&stride)[3], int first_piece) {
    constexpr int kLanes = decltype(lanes)::value, kLines = kWarpgroup / kLanes;
    const int thread = thread_again(), piece = thread % kLanes, first = thread / kLanes;
    const uint8_t* source = static_cast<const uint8_t*>(from) + w.row * stride[0] + piece * 16;
    const auto copy = [&](int r, auto&& to) {
      const int line = w.line_tile * T::N + r;
      const bool valid = line < p.lines;
      const LinePlace at = line_place(p, valid ? line : 0);
      to(source + at.token * stride[1] + at.head * stride[2], s.q + tile_offset(r, first_piece + piece), valid);
    };
    if (p.q_aligned) {
#pragma unroll 4
      for (int r = first; r < T::N; r += kLines)
        copy(r, [](const uint8_t* src, uint8_t* dst, bool valid) { copy_async_16(shared_address(dst), src, valid); });
    } else {
#pragma unroll 1
      for (int r = first; r < T::N; r += kLines)
        copy(r, [](const uint8_t* src, uint8_t* dst, bool valid) {
#pragma unroll 1
          for (int k = 0; k < 16; ++k) dst[k] = valid ? src[k] : 0;
        });
    }
  };
  part(std::integral_constant<int, kDimNope / 16>{}, p.d.q_nope, p.d.q_nope_stride, 0);
  part(std::integral_constant<int, kDimRope / 16>{}, p.d.q_pe, p.d.q_pe_stride, kDimNope / 16);
}

}  // namespace mla::sm90a
