// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Moves q and tiles of kv_cache to shared memory.
#pragma once

#include "ptx.cuh"
#include "work.cuh"

namespace mla::sm90a {

// Byte of 16-byte piece c (0..35) of line r in a tile of 64 lines: dims 0..511 in four 128-byte swizzled chunks, then
// dims 512..575 with 64-byte swizzle.
__device__ __forceinline__ uint32_t tile_offset(int r, int c) {
  if (c < kDimNope / 16) return (c >> 3) * (kBlockN * kChunkBytes) + r * kChunkBytes + (((c & 7) ^ (r & 7)) << 4);
  return kNopeTileBytes + r * kDimRope + (((c & 3) ^ ((r >> 1) & 3)) << 4);
}

// Runs ahead of the scores warpgroup over the list of work. With TMA the first warp does it alone; pages of fewer than 64
// tokens are gathered by all four warps, one cp.async group a tile (an empty one past the end).
template <class T>
class TileLoader {
 public:
  __device__ __forceinline__ TileLoader(const KernelParams& p, const WorkList& list) { take(p, list); }

  __device__ __forceinline__ void issue(const KernelParams& p, typename T::SharedStorage& s) {
    if (row_ >= 0) {
      if constexpr (T::kTma)
        issue_tma(p, s);
      else
        gather(p, s);
      stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
      if (++tile_ == tile_end_) {
        ++item_;
        take(p, s.list);
      } else if (T::kTma) {
        block_ = lookup(p, tile_);
      }
    }
    if constexpr (!T::kTma) copy_async_commit();
  }

 private:
  __device__ __forceinline__ int lookup(const KernelParams& p, int tile) const {
    const int64_t page = (static_cast<int64_t>(tile) * kBlockN) >> p.d.page_size_log2;
    return __ldg(p.d.block_table + row_ * p.d.block_table_stride + page);
  }

  __device__ __forceinline__ void take(const KernelParams& p, const WorkList& list) {
    const Work w = list.ring[item_ % kWorkSlots];
    row_ = w.row;
    len_ = w.len;
    tile_ = w.tile_begin;
    tile_end_ = w.tile_end;
    if (T::kTma && row_ >= 0) block_ = lookup(p, tile_);
  }

  // A block id outside the cache is outside the tensor map: TMA writes zeros for it and reads nothing.
  __device__ __forceinline__ void issue_tma(const KernelParams& p, typename T::SharedStorage& s) {
    if (cute::elect_one_sync()) {
      uint64_t* full = &s.kv_full[stage_];
      const int token = (tile_ * kBlockN) & ((1 << p.d.page_size_log2) - 1);
      const auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
      barrier_expect(full, kStageBytes);
      cute::SM90_TMA_LOAD_4D::copy(&p.kv_nope, full, hint, s.kv[stage_], 0, token, 0, block_);
      cute::SM90_TMA_LOAD_3D::copy(&p.kv_rope, full, hint, s.kv[stage_] + kNopeTileBytes, 0, token, block_);
    }
    __syncwarp();
  }

  // Tokens past the end are not read (their slots of block_table may hold anything): the stage keeps stale bytes there,
  // which the masks of scores and values neutralise. An id outside the cache gives zeros, as with TMA.
  __device__ __forceinline__ void gather(const KernelParams& p, typename T::SharedStorage& s) {
    constexpr int pieces = kDim / 16;
    const uint32_t base = shared_address(s.kv[stage_]);
    const int first = tile_ * kBlockN;
    const int tokens = min(kBlockN, len_ - first);
    for (int i = threadIdx.x; i < tokens * pieces; i += kWarpgroup) {
      const int r = i / pieces, c = i - r * pieces;
      const int block = __ldg(p.d.block_table + row_ * p.d.block_table_stride + ((first + r) >> p.d.page_size_log2));
      const bool valid = block >= 0 && block < p.d.num_blocks;
      const int64_t offset = (valid ? block : 0) * p.d.kv_page_stride +
                             ((first + r) & ((1 << p.d.page_size_log2) - 1)) * p.d.kv_token_stride + c * 16;
      copy_async_16(base + tile_offset(r, c), static_cast<const uint8_t*>(p.d.kv_cache) + offset, valid);
    }
  }

  int item_ = 0;  // number in this CTA's list
  int row_, len_, tile_, tile_end_;
  int block_;  // of tile_, fetched one tile ahead
  int stage_ = 0;
};

// q lines of one work item; lines past the last one are zero. By the whole scores warpgroup.
template <class T>
__device__ __forceinline__ void load_q(const KernelParams& p, const Work& w, typename T::SharedStorage& s) {
  constexpr int pieces = kDim / 16;
  for (int i = threadIdx.x; i < T::N * pieces; i += kWarpgroup) {
    const int r = i / pieces, c = i - r * pieces;
    const int line = w.line_tile * T::N + r;
    const bool valid = line < p.lines;
    const int token = valid ? line / p.d.h_q : 0;
    const int head = valid ? line - token * p.d.h_q : 0;
    const bool nope = c < kDimNope / 16;
    const int64_t* stride = nope ? p.d.q_nope_stride : p.d.q_pe_stride;
    const uint8_t* src = static_cast<const uint8_t*>(nope ? p.d.q_nope : p.d.q_pe) + w.row * stride[0] +
                         token * stride[1] + head * stride[2] + (nope ? c : c - kDimNope / 16) * 16;
    uint8_t* dst = s.q + tile_offset(r, c);
    if (p.q_aligned) {
      copy_async_16(shared_address(dst), src, valid);
    } else {
      for (int k = 0; k < 16; ++k) dst[k] = valid ? src[k] : 0;
    }
  }
}

}  // namespace mla::sm90a
