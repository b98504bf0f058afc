// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// The split plan of the Hopper kernel. A pinned num_kv_splits is that of mla/scheduler.h: a function of the row's own
// length. The automatic plan looks at the whole batch: rows are cut into splits of at most T tiles, one T for all rows,
// and T is the one of 28 candidates with the least estimated time. Worked out on the device from seq_lens, so a
// captured graph plans anew at each replay. The host functions give the same numbers, for tests and figures.
#pragma once

#include <cstdint>

#include "mla/scheduler.h"

namespace mla::sm90a {

// Lengths of a batch in tiles of 64 tokens.
struct BatchTiles {
  int64_t total;  // of all rows
  int longest;    // row
  int rows;       // that have tokens
};

// What bounds the plan besides lengths.
struct Machine {
  int ctas;          // that run at once
  int line_tiles;    // of a row
  int lines_a_tile;  // 16, 32 or 64
  bool wide;         // bf16 and fp16
};

// Query lines of a CTA: as few as hold them all; 64 at most, 32 where pages are gathered, always 64 for bf16 and fp16.
MLA_HOST_DEVICE MLA_INLINE constexpr int lines_a_tile(int lines, bool wide, bool gathered) {
  return wide || (lines > 32 && !gathered) ? 64 : lines > 16 ? 32 : 16;
}

inline constexpr int kPlanCandidates = 28;

// Splits that candidate i wants for the longest row: 1 to 16, then 20, 24, 28, 32, 40, ... 128.
MLA_HOST_DEVICE MLA_INLINE constexpr int candidate_splits(int i) {
  return i < 16 ? i + 1 : (5 + (i & 3)) << (2 + (i - 16) / 4);
}

MLA_HOST_DEVICE MLA_INLINE constexpr int splits_of(int tiles, int tiles_per_split) {
  return (tiles + tiles_per_split - 1) / tiles_per_split;
}

// Partials of an automatic plan: splits of all rows together are at most this many (workspace is sized by it).
MLA_HOST_DEVICE MLA_INLINE constexpr int64_t most_slots(int64_t rows, const Machine& m) {
  return rows + 2 * m.ctas / m.line_tiles;
}

// Estimated time of splits of at most T tiles, in nanoseconds on an H200; the constants are measured (DESIGN.md).
MLA_HOST_DEVICE MLA_INLINE constexpr int64_t plan_cost(const BatchTiles& x, const Machine& m, int tiles_per_split) {
  // A tile, and what each piece of work adds.
  const int64_t tile = m.wide ? 2000 : m.lines_a_tile == 64 ? 1250 : 1000, item = m.wide ? 5000 : 3500;
  const int64_t splits = splits_of(x.longest, tiles_per_split);
  const bool even = x.total == static_cast<int64_t>(x.longest) * x.rows;
  const int64_t pieces = m.line_tiles * (even          ? splits * x.rows
                                         : splits == 1 ? x.rows
                                                       : x.total / tiles_per_split + (x.rows + 1) / 2);
  int64_t time = 0;
  if (even) {
    time = ceil_div(pieces, m.ctas) * (tile * tiles_per_split + item);
  } else {
    const int64_t share = (x.total * m.line_tiles * tile + pieces * item) / m.ctas + tile * tiles_per_split / 2;
    const int64_t one = tile * tiles_per_split + item;
    time = share > one ? share : one;
  }
  const int64_t memory = x.total * (m.wide ? 73728 : 36864) / 4200;  // bytes of the cache over the bandwidth
  if (time < memory) time = memory;
  // The combine kernel, and 2 KB a line and piece that go to memory and come back.
  return splits == 1 ? time : time + 3000 + pieces * m.lines_a_tile * 2048 / 1700;
}

// T of candidate i, or 0 where it is none: more splits than tiles, or more than the workspace has room for.
MLA_HOST_DEVICE MLA_INLINE constexpr int candidate_tiles(const BatchTiles& x, const Machine& m, int i) {
  const int splits = candidate_splits(i);
  if (splits == 1) return x.longest;
  if (splits > x.longest) return 0;
  const int tiles = splits_of(x.longest, splits);
  return x.total * m.line_tiles <= static_cast<int64_t>(tiles) * 2 * m.ctas ? tiles : 0;
}

// T of the automatic plan; 1 for a batch without tokens.
inline int tiles_per_split(const BatchTiles& x, const Machine& m) {
  int best = x.longest > 0 ? x.longest : 1;
  int64_t least = INT64_MAX;
  for (int i = 0; i < kPlanCandidates; ++i) {
    const int tiles = candidate_tiles(x, m, i);
    if (tiles == 0) continue;
    const int64_t cost = plan_cost(x, m, tiles);
    if (cost < least) {
      least = cost;
      best = tiles;
    }
  }
  return best;
}

// Splits of a row of `tiles` tiles. pinned 0: automatic.
MLA_HOST_DEVICE MLA_INLINE constexpr int row_splits(int tiles, int pinned, int tiles_per_split) {
  return pinned > 0 ? (pinned < tiles ? pinned : tiles) : splits_of(tiles, tiles_per_split);
}

}  // namespace mla::sm90a
