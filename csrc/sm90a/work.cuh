// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Which work a CTA does. Without shares (plan.h) the items of a batch are numbered row by row, in a row split by split,
// in a split line tile by line tile (neighbours then read the same tokens at the same time), and CTA c takes items
// c, c + workers, ... With shares, CTA c takes line tile c % line_tiles of share c / line_tiles: an item for each row
// that it touches. The loader warp works the list out from seq_lens and leaves it in a ring in shared memory: nothing
// about lengths is decided on the host. Slot n + 1 is written before the first tile of item n is loaded, so whoever has
// seen that tile sees it.
#pragma once

#include <climits>
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
  return p.m.line_tiles == 1 ? x : p.m.line_tiles == 2 ? x >> 1 : x / p.m.line_tiles;
}

// Lengths of the batch in tiles; all lanes of a warp together.
__device__ __forceinline__ BatchTiles batch_tiles(const KernelParams& p) {
  int64_t total = 0;
  int longest = 0, rows = 0;
  for (int row = static_cast<int>(threadIdx.x & 31); row < p.d.b; row += 32) {
    const int tiles = static_cast<int>(num_tiles(row_length(p, row)));
    total += tiles;
    longest = max(longest, tiles);
    rows += tiles > 0;
  }
  // The sum of 32 lanes, each below kMostTiles, has 31 bits; else the plan looks no further.
  const bool many = __any_sync(~0u, total >= kMostTiles);
  const int sum = __reduce_add_sync(~0u, many ? 0 : static_cast<int>(total));
  return {many ? kMostTiles : sum, __reduce_max_sync(~0u, longest), __reduce_add_sync(~0u, rows)};
}

// Each lane takes one of the 32 rows from list.first_row on; inclusive counts items (tiles where there are shares) up
// to and with it.
__device__ __forceinline__ void load_rows(const KernelParams& p, WorkList& list, int first_row) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int row = first_row + lane;
  // No branch before the shuffles: with one, ptxas takes nothing in the kernel to be uniform any more (descriptors,
  // loop counters), and 800 bytes are spilled.
  const int some = row_length(p, row < p.d.b ? row : p.d.b - 1);
  const int len = row < p.d.b ? some : 0;
  const int tiles = static_cast<int>(num_tiles(len));
  const int most = list.share > 0 ? INT_MAX : p.d.num_kv_splits > 0 ? p.d.num_kv_splits : 1;
  int inclusive = min(tiles, most) * (list.share > 0 ? 1 : p.m.line_tiles);
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
  BatchTiles x{};
  int share = 0;
  // Without workspace no row can have two pieces.
  if (p.d.num_kv_splits == 0 && p.any_split != nullptr) {
    x = batch_tiles(p);
    share = plan_share(x, p.m);
  }
  if ((threadIdx.x & 31) == 0) {
    const int group = by_line_tiles(p, static_cast<int>(blockIdx.x));
    const bool idle = group >= p.m.groups || int64_t{group} * share >= x.total;
    list.share = share;
    list.at = share == 0 ? static_cast<int>(blockIdx.x) : idle ? 0 : group * share;
    list.end = share == 0 ? 0 : idle ? 0 : static_cast<int>(min(x.total, int64_t{list.at} + share));
    list.before = 0;
    list.first_row = 0;
  }
  __syncwarp();
  load_rows(p, list, 0);
}

// Whether this CTA has no list of work.
__device__ __forceinline__ bool rehearsing(const KernelParams& p) {
  return blockIdx.x == static_cast<unsigned>(p.workers);
}

// The list of a CTA that only rehearses: two steps over whatever lies in shared memory, for lines that do not exist, so
// nothing is stored. It is some microseconds ahead of the others, which wait for plan and tokens, and brings the code
// of all roles into L2: a model reads gigabytes of weights between two calls, and each call begins without it.
__device__ __forceinline__ void rehearse(const KernelParams& p, WorkList& list) {
  if ((threadIdx.x & 31) != 0) return;
  Work w{};
  w.line_tile = p.m.line_tiles;
  w.len = kRehearsalSteps * kStepTokens + p.d.s_q;  // all lines see all tokens
  w.tile_end = kRehearsalSteps * kStepTokens / kBlockN;
  list.ring[0] = w;
  list.ring[1].row = -1;
}

// The plan of all rows for the combine kernel. By one warp of one CTA.
__device__ __forceinline__ void write_plan(const KernelParams& p, int share) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  int before = 0;
  bool any = false;
  for (int first = 0; first < p.d.b; first += 32) {
    const int row = first + lane;
    const int tiles = row < p.d.b ? static_cast<int>(num_tiles(row_length(p, row))) : 0;
    const int mine = share > 0 ? tiles : row_splits(tiles, p.d.num_kv_splits);
    int inclusive = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int below = __shfl_up_sync(~0u, inclusive, d);
      if (lane >= d) inclusive += below;
    }
    const int begin = before + inclusive - mine;
    int2 plan = make_int2(begin, mine);
    if (share > 0 && tiles > 0) {
      const int first_share = begin / share, last_share = (begin + tiles - 1) / share;
      plan = make_int2(row + first_share, last_share - first_share + 1);
    }
    if (row < p.d.b) p.row_plan[row] = plan;
    before += __shfl_sync(~0u, inclusive, 31);
    any |= plan.y > 1;
  }
  any = __any_sync(~0u, any);
  if (lane == 0) *p.any_split = any;
}

// Puts the next item into slot n of the ring, or one with row = -1 after the last. By the loader warp.
__device__ __forceinline__ void publish_next(const KernelParams& p, WorkList& list, int n) {
  const int at = list.at, share = list.share;
  int before = list.before, first_row = list.first_row;
  int total = list.inclusive[31];
  while (__any_sync(~0u, at >= before + total && first_row < p.d.b)) {
    before += total;
    first_row += 32;
    __syncwarp();
    load_rows(p, list, first_row);
    total = list.inclusive[31];
  }
  Work w{};
  w.row = -1;
  int next = at;
  if (__any_sync(~0u, first_row < p.d.b && (share == 0 || at < list.end))) {
    const int lane = __ffs(__ballot_sync(~0u, list.inclusive[threadIdx.x & 31] > at - before)) - 1;
    w.row = first_row + lane;
    w.len = list.len[lane];
    const int tiles = static_cast<int>(num_tiles(w.len)), in_rows = at - before - list.inclusive[lane];
    if (share > 0) {
      w.tile_begin = in_rows + tiles;
      w.tile_end = min(tiles, w.tile_begin + list.end - at);
      next = at + w.tile_end - w.tile_begin;
      const int group = by_line_tiles(p, static_cast<int>(blockIdx.x));
      w.line_tile = static_cast<int>(blockIdx.x) - group * p.m.line_tiles;
      w.whole = w.tile_end - w.tile_begin == tiles;
      w.slot = w.row + group;
    } else {
      const int splits = row_splits(tiles, p.d.num_kv_splits);
      const int local = in_rows + splits * p.m.line_tiles, split = by_line_tiles(p, local);
      w.line_tile = local - split * p.m.line_tiles;
      w.whole = splits == 1;
      w.slot = by_line_tiles(p, at);
      w.tile_end = tiles;
      if (splits > 1) {  // split_begin() of mla/scheduler.h in tiles; 32 bits do: tiles < 2^25, split <= 128
        w.tile_begin = static_cast<int>(static_cast<uint32_t>(tiles) * split / static_cast<uint32_t>(splits));
        w.tile_end = static_cast<int>(static_cast<uint32_t>(tiles) * (split + 1) / static_cast<uint32_t>(splits));
      }
      next = at + p.workers;
    }
  }
  __syncwarp();  // all lanes have read the list
  if ((threadIdx.x & 31) == 0) {
    list.at = next;
    list.before = before;
    list.first_row = first_row;
    list.ring[n % kWorkSlots] = w;
  }
  __syncwarp();
}

}  // namespace mla::sm90a
