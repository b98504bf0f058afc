// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// The split plan and the workspace of the Blackwell target, for host and device, without CUDA and torch: every test of
// it runs on any machine. CUTLASS's kernel cuts a row of `tiles` tiles into n splits of ceil(tiles / n) tiles each, so
// the last ones may be empty, and an empty split may never end. Hence two numbers:
//
//   launch_splits = most splits that any row may get: the depth of the grid, and what partial results are sized for
//       pinned      min(num_kv_splits, tiles(capacity))
//       automatic   min(cluster slots / b, tiles(capacity), 128), at least 1      a split occupies a cluster of two SMs
//   row_splits    = ceil(tiles / ceil(tiles / min(launch_splits, tiles)))         so that no split is empty; 0 for a
//   row
//                                                                                 without tokens, which is skipped
//
// Workspace, parts aligned to 256 bytes:
//   seq_lens [b] int32 | splits [b] int32 | out [b, 128, 512] 2 bytes | lse [b, 128] fp32
//   | partial out [b, 128, launch_splits, 512] fp32, then partial lse [b, launch_splits, 128] fp32, if launch_splits >
//   1
// The kernel always stores 128 heads. out and lse are used where the caller's tensors have not room for as many.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mla/config.h"

namespace mla::sm100a {

inline constexpr int kTile = 128;         // tokens; also the page size, since one TMA box is one page
inline constexpr int kPaddedHeads = 128;  // a CTA pair takes 128 rows of Q and stores as many
inline constexpr int kCtasPerCluster = 2;
inline constexpr size_t kAlign = 256;

MLA_HOST_DEVICE MLA_INLINE constexpr int64_t tiles(int64_t seq_len) {
  return seq_len <= 0 ? 0 : (seq_len + kTile - 1) / kTile;
}

// Clusters that a device can hold at once.
MLA_HOST_DEVICE MLA_INLINE constexpr int cluster_slots(int sms) {
  return sms < kCtasPerCluster ? 1 : sms / kCtasPerCluster;
}

// `capacity`: tokens that the block table can describe. 0 if that is 0. num_kv_splits 0: automatic.
MLA_HOST_DEVICE MLA_INLINE constexpr int launch_splits(int64_t b, int64_t capacity, int num_kv_splits, int sms) {
  int64_t n = num_kv_splits > 0 ? num_kv_splits : b > 0 ? cluster_slots(sms) / b : 1;
  if (n < 1) n = 1;
  if (n > kMaxSplits) n = kMaxSplits;
  return static_cast<int>(n < tiles(capacity) ? n : tiles(capacity));
}

MLA_HOST_DEVICE MLA_INLINE constexpr int row_splits(int64_t seq_len, int most) {
  const int64_t all = tiles(seq_len), wanted = most < all ? most : all;
  if (wanted <= 0) return 0;
  const int64_t per_split = (all + wanted - 1) / wanted;
  return static_cast<int>((all + per_split - 1) / per_split);
}

// The length that a row counts as: 0 below 0, the table's capacity above it.
MLA_HOST_DEVICE MLA_INLINE constexpr int32_t bounded_length(int32_t seq_len, int32_t capacity) {
  return seq_len < 0 ? 0 : seq_len < capacity ? seq_len : capacity;
}

// Tokens that a table of max_blocks pages describes, as the kernel's 32-bit length: with room for rounding up a tile.
MLA_HOST_DEVICE MLA_INLINE constexpr int32_t capacity_of(int64_t max_blocks) {
  constexpr int64_t most = (int64_t{INT32_MAX} - kTile) / kTile;
  return static_cast<int32_t>((max_blocks < 0 ? 0 : max_blocks < most ? max_blocks : most) * kTile);
}

// The persistent scheduler hangs with splits set by hand: it is for one split only.
MLA_HOST_DEVICE MLA_INLINE constexpr bool is_persistent(int most) { return most <= 1; }

struct Plan {
  int b, most;                                 // most: launch_splits
  int32_t capacity;                            // tokens
  size_t seq_lens, splits, out, lse, partial;  // offsets of the parts, in bytes
  size_t bytes;                                // 0 only if b is 0
};

MLA_HOST_DEVICE MLA_INLINE constexpr size_t align_up(size_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

// The one function that sizes and launches.
MLA_HOST_DEVICE MLA_INLINE constexpr Plan make_plan(int64_t b, int64_t capacity, int num_kv_splits, int sms) {
  Plan p{};
  if (b <= 0) return p;
  const size_t rows = static_cast<size_t>(b);
  p.b = static_cast<int>(b);
  p.capacity = static_cast<int32_t>(capacity);
  p.most = launch_splits(b, capacity, num_kv_splits, sms);
  p.splits = p.seq_lens + align_up(rows * sizeof(int32_t));
  p.out = p.splits + align_up(rows * sizeof(int32_t));
  p.lse = p.out + align_up(rows * kPaddedHeads * kDimNope * 2);
  p.partial = p.lse + align_up(rows * kPaddedHeads * sizeof(float));
  p.bytes = p.partial;
  if (p.most > 1) p.bytes += align_up(rows * p.most * kPaddedHeads * (kDimNope + 1) * sizeof(float));
  return p;
}

}  // namespace mla::sm100a
