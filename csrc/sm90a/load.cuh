// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Moves q and tiles of kv_cache to shared memory.
#pragma once

#include <type_traits>

#include "ptx.cuh"
#include "work.cuh"

namespace mla::sm90a {

// Byte of 16-byte piece c (0..7, or 0..3 of a rope row) of row r: 128-byte and 64-byte swizzle.
__device__ __forceinline__ uint32_t nope_offset(int r, int c) { return r * kChunkBytes + ((c ^ (r & 7)) << 4); }
__device__ __forceinline__ uint32_t rope_offset(int r, int c) { return r * kDimRope + ((c ^ ((r >> 1) & 3)) << 4); }

// Byte of 16-byte piece c (0..35) of line r of q: dims 0..511 in four chunks of 64 lines, then dims 512..575.
__device__ __forceinline__ uint32_t q_offset(int r, int c) {
  if (c < kDimNope / 16) return (c >> 3) * (kRowsM * kChunkBytes) + nope_offset(r, c & 7);
  return kNopeTileBytes + rope_offset(r, c & 3);
}

// The ring of slots: chunk c of step t is number 4 t + c.
template <int kSlots>
struct SlotRing {
  int base = 0;        // slot of chunk 0 of the current step
  uint32_t phase = 0;  // of it
  __device__ __forceinline__ int slot(int chunk) const {
    const int at = base + chunk;
    return at < kSlots ? at : at - kSlots;
  }
  __device__ __forceinline__ uint32_t phase_of(int chunk) const { return phase ^ (base + chunk >= kSlots); }
  __device__ __forceinline__ void advance() {
    base += kChunks;
    if (base >= kSlots) {
      base -= kSlots;
      phase ^= 1;
    }
  }
};

__device__ __forceinline__ int lookup_block(const KernelParams& p, int64_t row, int token) {
  return __ldg(p.d.block_table + row * p.d.block_table_stride + (token >> p.d.page_size_log2));
}

// One chunk (kChunks: the rope part) of a step's tiles, from pages of at least 64 tokens. A block id outside the cache
// is outside the tensor map: TMA writes zeros and reads nothing.
__device__ __forceinline__ void load_chunk_tma(const KernelParams& p, uint64_t* full, uint8_t* to, int chunk,
                                               const int (&block)[2], int first_token, bool two) {
  const auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  const bool rope = chunk == kChunks;
  const int bytes = kBlockN * (rope ? kDimRope : kChunkBytes);
  barrier_expect(full, two ? 2 * bytes : bytes);
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    if (tile == 1 && !two) break;
    const int token = (first_token + tile * kBlockN) & ((1 << p.d.page_size_log2) - 1);
    if (rope)
      cute::SM90_TMA_LOAD_3D::copy(&p.kv_rope, full, hint, to + tile * bytes, 0, token, block[tile]);
    else
      cute::SM90_TMA_LOAD_4D::copy(&p.kv_nope, full, hint, to + tile * bytes, 0, token, chunk, block[tile]);
  }
}

// The same from smaller pages, by cp.async of the whole warp. Tokens past the end are not read (their slots of
// block_table may hold anything): the slot keeps stale bytes there, which scores mask and values clear. An id outside
// the cache gives zeros, as with TMA.
__device__ __forceinline__ void gather_chunk(const KernelParams& p, uint8_t* to, int chunk, int64_t row,
                                             int first_token, int tokens) {
  const bool rope = chunk == kChunks;
  const int shift = rope ? 2 : 3;
  for (int i = static_cast<int>(threadIdx.x & 31); i < tokens << shift; i += 32) {
    const int r = i >> shift, c = i & ((1 << shift) - 1);
    const int block = lookup_block(p, row, first_token + r);
    const bool valid = block >= 0 && block < p.d.num_blocks;
    const int64_t offset = (valid ? block : 0) * p.d.kv_page_stride +
                           ((first_token + r) & ((1 << p.d.page_size_log2) - 1)) * p.d.kv_token_stride +
                           chunk * kChunkBytes + c * 16;
    copy_async_16(shared_address(to) + (rope ? rope_offset(r, c) : nope_offset(r, c)),
                  static_cast<const uint8_t*>(p.d.kv_cache) + offset, valid);
  }
}

// The loader warp: lists the work, loads its tokens.
template <class T>
__device__ __forceinline__ void loader_role(const KernelParams& p, typename T::SharedStorage& s) {
  if (rehearsing(p)) {
    // The tokens of the rehearsal: whatever is there.
    if ((threadIdx.x & 31) < kRehearsalSteps * kChunks) barrier_arrive(&s.kv_full[threadIdx.x & 31]);
    for (int step = 0; step < kRehearsalSteps; ++step) {
      barrier_wait(&s.rope_empty, step & 1 ^ 1);
      if ((threadIdx.x & 31) == 0) barrier_arrive(&s.rope_full);
    }
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    return;
  }
  SlotRing<T::kSlots> ring, gathered;
  uint32_t t = 0;
  // Gathered pages: the step before this one has landed when at most `under_way` groups have not.
  [[maybe_unused]] const auto announce = [&](auto under_way) {
    copy_async_wait<decltype(under_way)::value>();
    fence_async_proxy();
    __syncwarp();
    const int lane = threadIdx.x & 31;
    if (lane < kChunks) barrier_arrive(&s.kv_full[gathered.slot(lane)]);
    if (lane == kChunks) barrier_arrive(&s.rope_full);
  };
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
    for (; tile < end; tile += 2, ++t) {
      const bool two = tile + 1 < end;
      int block[2] = {0, 0};
      if constexpr (T::kTma) {
        if (tile - base == 32) {
          base = tile;
          pages = pages_from(base);
        }
        block[0] = __shfl_sync(~0u, pages, tile - base);
        block[1] = __shfl_sync(~0u, pages, tile - base + 1);
      }
      const int tokens = min(two ? kStepTokens : kBlockN, len - tile * kBlockN);
#pragma unroll
      for (int chunk = 0; chunk <= kChunks; ++chunk) {
        const bool rope = chunk == kChunks;
        uint8_t* to = rope ? s.kv_rope : s.kv_nope[ring.slot(chunk)];
        uint64_t* full = rope ? &s.rope_full : &s.kv_full[ring.slot(chunk)];
        // Scores are done with the last rope part only after all that came with it has been announced.
        if (!T::kTma && rope && t > 0) announce(std::integral_constant<int, 1>{});
        // The first round finds all slots empty.
        if (rope)
          barrier_wait(&s.rope_empty, t & 1 ^ 1);
        else
          barrier_wait(&s.kv_empty[ring.slot(chunk)], ring.phase_of(chunk) ^ 1);
        if constexpr (T::kTma) {
          if (cute::elect_one_sync()) load_chunk_tma(p, full, to, chunk, block, tile * kBlockN, two);
          __syncwarp();
        } else {
          gather_chunk(p, to, chunk, row, tile * kBlockN, tokens);
          if (chunk >= kChunks - 1) copy_async_commit();
        }
      }
      gathered = ring;
      ring.advance();
    }
  }
  // The combine kernel may start where there is room; it waits for this grid's end before it reads.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (!T::kTma && t > 0) announce(std::integral_constant<int, 0>{});
}

// q of a work item by TMA, by one warp. With fewer than 64 lines the copies of the scores warps are faster.
template <class T>
__device__ __forceinline__ void load_q_tma(const KernelParams& p, typename T::SharedStorage& s, int item) {
  const Work& w = s.list.ring[item % kWorkSlots];
  const int row = w.row, line = w.line_tile * T::N;
  if (row < 0) return;
  if (cute::elect_one_sync()) {
    const auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    barrier_expect(&s.q_full, kTileBytes);  // lines past the last one are written, too: as zeros
    cute::SM90_TMA_LOAD_4D::copy(&p.q_nope, &s.q_full, hint, s.q, 0, line, 0, row);
    cute::SM90_TMA_LOAD_3D::copy(&p.q_rope, &s.q_full, hint, s.q + kNopeTileBytes, 0, line, row);
  }
  __syncwarp();
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
      to(source + at.token * stride[1] + at.head * stride[2], s.q + q_offset(r, first_piece + piece), valid);
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
