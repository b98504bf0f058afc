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

// ceil(2^32 / ctas), at most 2^32 - 1
MLA_HOST_DEVICE MLA_INLINE constexpr uint32_t per_cta_of(int ctas) {
  return ctas > 1 ? static_cast<uint32_t>(((uint64_t{1} << 32) + static_cast<uint32_t>(ctas) - 1) /
                                          static_cast<uint32_t>(ctas))
                  : UINT32_MAX;
}

// What bounds the plan besides lengths.
struct Machine {
  int ctas;          // that run at once
  int line_tiles;    // of a row
  int lines_a_tile;  // 16, 32 or 64
  bool wide;         // bf16 and fp16
  uint32_t per_cta;  // per_cta_of(ctas)
};

// x / ctas for an estimate: exact below 2^18 for 132 CTAs, and no division.
MLA_HOST_DEVICE MLA_INLINE constexpr uint32_t shared_out(uint32_t x, const Machine& m) {
  return static_cast<uint32_t>(static_cast<uint64_t>(x) * m.per_cta >> 32);
}

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

// Estimated time of splits of at most T tiles, in units of 16 ns on an H200; the constants are measured (DESIGN.md). In
// 32 bits, which a lane divides ten times faster than 64; a batch counts as 2^20 tiles at the most, whose plan is
// clear.
MLA_HOST_DEVICE MLA_INLINE constexpr uint32_t plan_cost(const BatchTiles& x, const Machine& m, int tiles_per_split) {
  // A tile, and what each piece of work adds; the merge of splits; its traffic, 2 KB a line there and back.
  const uint32_t tile = m.wide ? 2000 / 16 : m.lines_a_tile == 64 ? 1400 / 16 : 900 / 16;
  const uint32_t item = m.wide ? 5000 / 16 : 3500 / 16, merge = 3000 / 16;
  const uint32_t piece = static_cast<uint32_t>(m.lines_a_tile) * 2048 / 2200 / 16 + 1;
  const uint32_t splits = static_cast<uint32_t>(splits_of(x.longest, tiles_per_split));
  const uint32_t ctas = static_cast<uint32_t>(m.ctas), line_tiles = static_cast<uint32_t>(m.line_tiles);
  const uint32_t rows = static_cast<uint32_t>(x.rows < (1 << 20) ? x.rows : 1 << 20);
  const uint32_t total = static_cast<uint32_t>(x.total < (1 << 20) ? x.total : 1 << 20);
  const uint32_t most = static_cast<uint32_t>(tiles_per_split < (1 << 20) ? tiles_per_split : 1 << 20);
  const uint32_t steps = m.wide ? most : (most + 1) / 2 * 2;  // e4m3 takes two tiles at a time
  const bool even = x.total == static_cast<int64_t>(x.longest) * x.rows;
  const uint32_t pieces = line_tiles * (even || splits == 1 ? splits * rows : total / most + (rows + 1) / 2);
  uint32_t time = 0;
  if (even) {
    time = shared_out(pieces + ctas - 1, m) * (tile * steps + item);
  } else {
    const uint32_t share = shared_out(total, m) * line_tiles * tile + shared_out(pieces * item, m) + tile * steps / 2;
    const uint32_t one = tile * steps + item;
    time = share > one ? share : one;
  }
  const uint32_t memory = total * (m.wide ? 2 : 1) / 2 + total * (m.wide ? 2 : 1) / 16;  // 36 KB at 4.1 TB/s: 9 ns
  if (time < memory) time = memory;
  return splits == 1 ? time : time + merge + pieces * piece;
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
  uint32_t least = UINT32_MAX;
  for (int i = 0; i < kPlanCandidates; ++i) {
    const int tiles = candidate_tiles(x, m, i);
    if (tiles == 0) continue;
    const uint32_t cost = plan_cost(x, m, tiles);
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
