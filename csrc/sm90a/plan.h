// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// The split plan of the Hopper kernel. A pinned num_kv_splits is that of mla/scheduler.h: a function of the row's own
// length. The automatic plan looks at the whole batch. Either each row is one piece, and CTAs take rows in turn; or the
// tiles of all rows, one row after the other, are cut at multiples of one number, the share, and each group of CTAs
// (one for each line tile) takes one share: whatever the lengths are, all have the same work, and at most one more
// partial than there are groups is written. It is the one with the least estimated time. Worked out on the device from
// seq_lens, so a captured graph plans anew at each replay. The host functions give the same numbers, for tests and
// figures.
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

// ceil(2^32 / n), at most 2^32 - 1
MLA_HOST_DEVICE MLA_INLINE constexpr uint32_t reciprocal(int n) {
  return n > 1 ? static_cast<uint32_t>(((uint64_t{1} << 32) + static_cast<uint32_t>(n) - 1) / static_cast<uint32_t>(n))
               : UINT32_MAX;
}

// What bounds the plan besides lengths.
struct Machine {
  int ctas;                     // that run at once
  int line_tiles;               // of a row
  int lines_a_tile;             // 16, 32 or 64
  bool wide;                    // bf16 and fp16
  int groups;                   // of CTAs, one CTA for each line tile: shares at most
  uint32_t per_cta, per_group;  // reciprocals: a division takes 130 cycles, and this lies before the first load
};
MLA_HOST_DEVICE MLA_INLINE constexpr Machine machine(int ctas, int line_tiles, int lines_a_tile, bool wide) {
  const int groups = ctas > line_tiles ? ctas / line_tiles : 1;
  return {ctas, line_tiles, lines_a_tile, wide, groups, reciprocal(ctas), reciprocal(groups)};
}

// x / n by its reciprocal: exact while x n < 2^32, never too small, and off by one at most below 2^25.
MLA_HOST_DEVICE MLA_INLINE constexpr uint32_t divided(uint32_t x, int n, uint32_t per_n) {
  return n == 1 ? x : static_cast<uint32_t>(static_cast<uint64_t>(x) * per_n >> 32);
}

// Query lines of a CTA: as few as hold them all; 64 at most, 32 where pages are gathered, always 64 for bf16 and fp16.
MLA_HOST_DEVICE MLA_INLINE constexpr int lines_a_tile(int lines, bool wide, bool gathered) {
  return wide || (lines > 32 && !gathered) ? 64 : lines > 16 ? 32 : 16;
}

// Partials of an automatic plan at most (workspace is sized by it): the piece of row r in share k has slot r + k.
MLA_HOST_DEVICE MLA_INLINE constexpr int64_t most_slots(int64_t b, const Machine& m) { return b + m.groups; }

// Estimated times, in units of 16 ns on an H200; the constants are measured (DESIGN.md).
struct PlanCost {
  uint32_t tile, item, merge, piece;
  MLA_HOST_DEVICE MLA_INLINE constexpr explicit PlanCost(const Machine& m)
      // A tile where memory does not bound; what a piece of work adds; the merge; a partial of 2 KB a line, there and
      // back.
      : tile(m.wide                 ? 2000 / 16
             : m.lines_a_tile == 64 ? 920 / 16
                                    : 800 / 16),
        item(m.wide ? 5000 / 16 : 3500 / 16),
        merge(3000 / 16),
        piece(static_cast<uint32_t>(m.lines_a_tile) * 2048 / 2200 / 16 + 1) {}
  // A tile while so many CTAs run: 36 KB each (72 KB in 16 bits) at 4.1 TB/s, once for CTAs that share them.
  MLA_HOST_DEVICE MLA_INLINE constexpr uint32_t tile_beside(const Machine& m, uint32_t ctas) const {
    const uint32_t memory = ctas * (m.wide ? 18 : 9) / (m.line_tiles == 1 ? 16 : 32);
    return memory > tile ? memory : tile;
  }
};

MLA_HOST_DEVICE MLA_INLINE constexpr uint64_t rows_cost(const BatchTiles& x, const Machine& m) {
  const PlanCost cost(m);
  const auto rows = static_cast<uint32_t>(x.rows), ctas = static_cast<uint32_t>(m.ctas);
  const auto total = static_cast<uint32_t>(x.total), longest = static_cast<uint32_t>(x.longest);
  const uint32_t mean = (total + rows - 1) / rows;
  const uint32_t pieces = rows * static_cast<uint32_t>(m.line_tiles);
  uint32_t rounds = divided(pieces, m.ctas, m.per_cta);
  if (rounds * ctas > pieces) --rounds;
  const uint32_t left = pieces - rounds * ctas;
  uint64_t time = uint64_t{rounds} * (uint64_t{mean} * cost.tile_beside(m, ctas) + cost.item);
  if (left > 0) time += uint64_t{mean} * cost.tile_beside(m, left) + cost.item;
  return time + uint64_t{longest - mean} * cost.tile;  // who gets the longest gets others, too
}

MLA_HOST_DEVICE MLA_INLINE constexpr uint64_t shares_cost(const BatchTiles& x, const Machine& m, int share) {
  const PlanCost cost(m);
  const auto rows = static_cast<uint32_t>(x.rows), total = static_cast<uint32_t>(x.total);
  const uint32_t shares = (total + static_cast<uint32_t>(share) - 1) / static_cast<uint32_t>(share);
  const uint32_t line_tiles = static_cast<uint32_t>(m.line_tiles);
  const uint32_t items = 1 + divided(rows, m.groups, m.per_group);
  const uint32_t partials = line_tiles * (shares + (rows < shares ? rows : shares));
  return uint64_t{static_cast<uint32_t>(share)} * cost.tile_beside(m, shares * line_tiles) + items * cost.item +
         cost.merge + partials * cost.piece;
}

inline constexpr int64_t kMostTiles = 1 << 25;  // of a batch that is planned as a whole

// The share of the automatic plan in tiles, 0 where each row is one piece. e4m3 takes two tiles at a time, and a row
// may have kMaxSplits pieces.
MLA_HOST_DEVICE MLA_INLINE constexpr int plan_share(const BatchTiles& x, const Machine& m) {
  if (x.longest < 2 || x.total >= kMostTiles) return 0;
  uint32_t share = divided(static_cast<uint32_t>(x.total) + m.groups - 1, m.groups, m.per_group);
  const int most = x.rows == 1 ? kMaxSplits : kMaxSplits - 1;  // a row that begins inside a share has one piece more
  const auto least = static_cast<uint32_t>((x.longest + most - 1) / most);
  if (share < least) share = least;
  share = share < 2 ? 2 : (share + 1) / 2 * 2;
  const int whole = static_cast<int>(share);
  return shares_cost(x, m, whole) < rows_cost(x, m) ? whole : 0;
}

// Splits of a row of `tiles` tiles where each row is planned alone. pinned 0: one.
MLA_HOST_DEVICE MLA_INLINE constexpr int row_splits(int tiles, int pinned) {
  return pinned == 0 ? tiles > 0 : pinned < tiles ? pinned : tiles;
}

}  // namespace mla::sm90a
