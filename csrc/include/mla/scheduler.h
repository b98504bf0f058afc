// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// The split plan, for host and device. It is a function of one row's length (and of a pinned num_kv_splits) only: batch
// mates, thread counts and table widths never move a boundary, so they never change a bit of the result.
//
//   tiles(len)      = ceil(len / 64)
//   automatic count = min(ceil(tiles / 8), 64)     8 tiles = 512 tokens to a split, longer splits from 32768 tokens on
//   pinned count    = min(num_kv_splits, tiles)    no split is ever empty
//   split i         = tiles [i * tiles / n, (i + 1) * tiles / n), rounded down; sizes differ by one tile at the most
#pragma once

#include <cstdint>

#include "mla/config.h"

namespace mla {

inline constexpr int kAutoTilesPerSplit = 8;
inline constexpr int kAutoMaxSplits = 64;

MLA_HOST_DEVICE MLA_INLINE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

MLA_HOST_DEVICE MLA_INLINE constexpr int64_t num_tiles(int64_t seq_len) {
  return seq_len <= 0 ? 0 : ceil_div(seq_len, kBlockN);
}

// Number of splits of a row; 0 for a row without tokens. num_kv_splits 0 asks for the automatic plan.
MLA_HOST_DEVICE MLA_INLINE constexpr int num_splits(int64_t seq_len, int num_kv_splits) {
  const int64_t tiles = num_tiles(seq_len);
  const int64_t automatic = ceil_div(tiles, kAutoTilesPerSplit);
  const int64_t wanted = num_kv_splits > 0 ? num_kv_splits : (automatic < kAutoMaxSplits ? automatic : kAutoMaxSplits);
  return static_cast<int>(wanted < tiles ? wanted : tiles);
}

// First token of split i of n; i = n gives the end of the row.
MLA_HOST_DEVICE MLA_INLINE constexpr int64_t split_begin(int64_t seq_len, int n, int i) {
  const int64_t token = (num_tiles(seq_len) * i / n) * kBlockN;
  return token < seq_len ? token : seq_len;
}

}  // namespace mla
