// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Which work a CTA does. The items of a batch are numbered row by row, in a row split by split, in a split line tile by
// line tile (neighbours then read the same tokens at the same time). CTA c takes items c, c + gridDim.x, ... Every warp
// works the list out for itself from seq_lens: nothing about lengths is decided on the host.
#pragma once

#include <cstdint>

#include "mla/scheduler.h"
#include "traits.h"

namespace mla::sm90a {

struct Work {
  int row;         // index in the batch
  int split;       // of `splits`
  int splits;      // of this row
  int line_tile;   // lines [line_tile * N, ...)
  int len;         // tokens of the row
  int tile_begin;  // tiles of 64 tokens of this split
  int tile_end;
};

class WorkList {
 public:
  __device__ __forceinline__ explicit WorkList(const KernelParams& p) : item_(static_cast<int>(blockIdx.x)) { load(p); }

  // The next item of this CTA; false when there is none. Called by whole warps.
  __device__ __forceinline__ bool next(const KernelParams& p, Work& w) {
    int total = __shfl_sync(~0u, inclusive_, 31);
    while (item_ >= before_ + total) {
      before_ += total;
      first_row_ += 32;
      if (first_row_ >= p.d.b) return false;
      load(p);
      total = __shfl_sync(~0u, inclusive_, 31);
    }
    const int at = item_ - before_;
    const int lane = __ffs(__ballot_sync(~0u, inclusive_ > at)) - 1;
    w.row = first_row_ + lane;
    w.len = __shfl_sync(~0u, len_, lane);
    w.splits = num_splits(w.len, p.d.num_kv_splits);
    const int local = at - (__shfl_sync(~0u, inclusive_, lane) - w.splits * p.line_tiles);
    w.split = local / p.line_tiles;
    w.line_tile = local - w.split * p.line_tiles;
    // split_begin() of mla/scheduler.h in tiles; 32 bits do: tiles < 2^25, split <= 128
    const uint32_t tiles = static_cast<uint32_t>(num_tiles(w.len));
    w.tile_begin = static_cast<int>(tiles * w.split / static_cast<uint32_t>(w.splits));
    w.tile_end = static_cast<int>(tiles * (w.split + 1) / static_cast<uint32_t>(w.splits));
    item_ += static_cast<int>(gridDim.x);
    return true;
  }

  __device__ __forceinline__ static int row_length(const KernelParams& p, int row) {
    const int len = p.d.seq_lens[row * p.d.seq_lens_stride];
    return len < 0 ? 0 : len < p.capacity ? len : p.capacity;
  }

 private:
  // Each lane takes one of 32 rows; inclusive_ counts items up to and with it.
  __device__ __forceinline__ void load(const KernelParams& p) {
    const int lane = static_cast<int>(threadIdx.x & 31);
    const int row = first_row_ + lane;
    len_ = row < p.d.b ? row_length(p, row) : 0;
    inclusive_ = num_splits(len_, p.d.num_kv_splits) * p.line_tiles;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int below = __shfl_up_sync(~0u, inclusive_, d);
      if (lane >= d) inclusive_ += below;
    }
  }

  int item_;
  int before_ = 0;     // items of the rows below first_row_
  int first_row_ = 0;  // of the 32 rows held by the lanes
  int inclusive_;
  int len_;
};

}  // namespace mla::sm90a
