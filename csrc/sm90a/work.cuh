// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Which work a CTA does. The items of a batch are numbered row by row, in a row split by split, in a split line tile by
// line tile (neighbours then read the same tokens at the same time). CTA c takes items c, c + gridDim.x, ... The loader
// warp works the list out from seq_lens and leaves it in a ring in shared memory: nothing about lengths is decided on
// the host (plan.h). Slot n + 1 is written before the first tile of item n is loaded, so whoever has seen that tile
// sees it.
#pragma once

#include <cstdint>

#include "plan.h"
#include "traits.h"

namespace mla::sm90a {

__device__ __forceinline__ int row_length(const KernelParams& p, int row) {
  const int len = p.d.seq_lens[row * p.d.seq_lens_stride];
  return len < 0 ? 0 : len < p.capacity ? len : p.capacity;
}

// Query token and head of a line. The product is exact: lines are at most 8 * 128 and heads at most 128, so what
// rounding up adds, less than 2^10 / 2^20, is less than 1 / h_q.
struct LinePlace {
  int token, head;
};
__device__ __forceinline__ LinePlace line_place(const KernelParams& p, int line) {
  const int token = static_cast<int>(static_cast<uint32_t>(line) * p.per_head >> 20);
  return {token, line - token * p.d.h_q};
}

// x / line_tiles, which is nearly always 1 or 2. A division takes 130 cycles, and this lies before the first load.
__device__ __forceinline__ int by_line_tiles(const KernelParams& p, int x) {
  return p.line_tiles == 1 ? x : p.line_tiles == 2 ? x >> 1 : x / p.line_tiles;
}

// T of the automatic plan, all lanes of a warp together.
__device__ __forceinline__ int plan_batch(const KernelParams& p) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  int total = 0, longest = 0, rows = 0;
  for (int row = lane; row < p.d.b; row += 32) {
    const int tiles = static_cast<int>(num_tiles(row_length(p, row)));
    total += tiles;
    longest = max(longest, tiles);
    rows += tiles > 0;
  }
  total = __reduce_add_sync(~0u, total);
  longest = __reduce_max_sync(~0u, longest);
  rows = __reduce_add_sync(~0u, rows);
  if (longest == 0) return 1;
  const BatchTiles x = {total, longest, rows};
  const Machine m = {p.ctas, p.line_tiles, p.lines_a_tile, p.d.dtype != DType::kE4M3, p.per_cta};
  const int tiles = lane < kPlanCandidates ? candidate_tiles(x, m, lane) : 0;
  const uint32_t cost = tiles > 0 ? plan_cost(x, m, tiles) : UINT32_MAX;
  const uint32_t least = __reduce_min_sync(~0u, cost);  // the first candidate that has it
  return __shfl_sync(~0u, tiles, __ffs(__ballot_sync(~0u, cost == least)) - 1);
}

// Each lane takes one of the 32 rows from list.first_row on; inclusive counts items up to and with it.
__device__ __forceinline__ void load_rows(const KernelParams& p, WorkList& list, int first_row) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int row = first_row + lane;
  const int some = row_length(p, row < p.d.b ? row : p.d.b - 1);  // no branch: lanes stay together
  const int len = row < p.d.b ? some : 0;
  int inclusive = row_splits(static_cast<int>(num_tiles(len)), p.d.num_kv_splits, list.tiles_per_split) * p.line_tiles;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(~0u, inclusive, d);
    if (lane >= d) inclusive += below;
  }
  list.len[lane] = len;
  list.inclusive[lane] = inclusive;
  __syncwarp();
}

// By the loader warp, before anything else.
__device__ __forceinline__ void start_list(const KernelParams& p, WorkList& list) {
  const int tiles = p.d.num_kv_splits > 0 ? 1 : plan_batch(p);
  if ((threadIdx.x & 31) == 0) {
    list.tiles_per_split = tiles;
    list.item = static_cast<int>(blockIdx.x);
    list.before = 0;
    list.first_row = 0;
  }
  __syncwarp();
  load_rows(p, list, 0);
}

// The plan of all rows for the combine kernel. By one warp of one CTA.
__device__ __forceinline__ void write_plan(const KernelParams& p, int tiles_per_split) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  int before = 0;
  bool any = false;
  for (int first = 0; first < p.d.b; first += 32) {
    const int row = first + lane;
    const int tiles = row < p.d.b ? static_cast<int>(num_tiles(row_length(p, row))) : 0;
    const int splits = row_splits(tiles, p.d.num_kv_splits, tiles_per_split);
    int inclusive = splits;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int below = __shfl_up_sync(~0u, inclusive, d);
      if (lane >= d) inclusive += below;
    }
    if (row < p.d.b) p.row_plan[row] = make_int2(before + inclusive - splits, splits);
    before += __shfl_sync(~0u, inclusive, 31);
    any |= splits > 1;
  }
  any = __any_sync(~0u, any);
  if (lane == 0) *p.any_split = any;
}

// Puts the next item into slot n of the ring, or one with row = -1 after the last. By the loader warp.
__device__ __forceinline__ void publish_next(const KernelParams& p, WorkList& list, int n) {
  const int item = list.item;
  int before = list.before, first_row = list.first_row;
  int total = list.inclusive[31];
  while (__any_sync(~0u, item >= before + total && first_row < p.d.b)) {
    before += total;
    first_row += 32;
    __syncwarp();
    load_rows(p, list, first_row);
    total = list.inclusive[31];
  }
  Work w{};
  w.row = -1;
  if (__any_sync(~0u, first_row < p.d.b)) {
    const int at = item - before;
    const int lane = __ffs(__ballot_sync(~0u, list.inclusive[threadIdx.x & 31] > at)) - 1;
    w.row = first_row + lane;
    w.len = list.len[lane];
    const auto tiles = static_cast<uint32_t>(num_tiles(w.len));
    w.splits = row_splits(static_cast<int>(tiles), p.d.num_kv_splits, list.tiles_per_split);
    const int local = at - (list.inclusive[lane] - w.splits * p.line_tiles);
    w.split = by_line_tiles(p, local);
    w.line_tile = local - w.split * p.line_tiles;
    w.slot = by_line_tiles(p, item);
    // split_begin() of mla/scheduler.h in tiles; 32 bits do: tiles < 2^25, split <= 128
    w.tile_end = static_cast<int>(tiles);
    if (w.splits > 1) {
      w.tile_begin = static_cast<int>(tiles * w.split / static_cast<uint32_t>(w.splits));
      w.tile_end = static_cast<int>(tiles * (w.split + 1) / static_cast<uint32_t>(w.splits));
    }
  }
  __syncwarp();  // all lanes have read the list
  if ((threadIdx.x & 31) == 0) {
    list.item = item + static_cast<int>(gridDim.x);
    list.before = before;
    list.first_row = first_row;
    list.ring[n % kWorkSlots] = w;
  }
  __syncwarp();
}

}  // namespace mla::sm90a
