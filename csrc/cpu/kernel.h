// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// What an instruction set offers to the launcher, and what the launcher hands to it.
#pragma once

#include <cstdint>

#include "mla/params.h"

namespace mla::cpu {

inline constexpr int kGroupRows = 64;  // query rows (token, head) that share a decoded tile

// One work item: a split of one row for one group of query rows. Query row r is token r / h_q, head r % h_q.
struct Item {
  int row;         // batch row
  int q_begin;     // first query row of the group
  int q_rows;      // 1 .. kGroupRows
  int split;       // which of n_splits
  int n_splits;    // of this row; 1 writes the output directly
  float* partial;  // [n_splits][q_rows][512] O / l, then [n_splits][q_rows][2] lse of the rounded and of the exact P
};

// Scratch of one thread, in floats, 64-byte aligned: about 0.45 MB, so that it stays in a level-2 cache.
inline constexpr int64_t kScratchQ = static_cast<int64_t>(kDim) * kGroupRows;      // q, [block][576][rows of block]
inline constexpr int64_t kScratchKV = static_cast<int64_t>(kBlockN) * kDim;        // decoded tile, [64][576]
inline constexpr int64_t kScratchS = static_cast<int64_t>(kBlockN) * kGroupRows;   // S, then P, [64][rows]
inline constexpr int64_t kScratchO = static_cast<int64_t>(kGroupRows) * kDimNope;  // O, [rows][512]
inline constexpr int64_t kScratchRow = 8 * kGroupRows;                             // per-row state
inline constexpr int64_t kScratchFloats = kScratchQ + kScratchKV + kScratchS + kScratchO + kScratchRow;

inline constexpr int64_t partial_floats(int q_rows, int n_splits) {
  return static_cast<int64_t>(n_splits) * q_rows * (kDimNope + 2);
}

struct Kernels {
  const char* isa;
  void (*run)(const DecodeParams& params, const Item& item, float* scratch);
  void (*combine)(const DecodeParams& params, const Item& item, int begin, int end);  // rows of the group; any split
};

const Kernels& kernels_generic();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();

}  // namespace mla::cpu
