// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// What a kernel instantiation is made of: N query lines a CTA, the shared-memory plan, registers of each role.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "config.h"
#include "mla/params.h"

namespace mla::sm90a {

// Everything the kernels get. Read from constant memory; the tensor maps must keep their 64-byte alignment.
struct KernelParams {
  CUtensorMap kv_nope;  // [num_blocks][4 chunks][page_size][128 B], 128-byte swizzle, box 64 tokens x 4 chunks
  CUtensorMap kv_rope;  // [num_blocks][page_size][64 B], 64-byte swizzle, box 64 tokens
  DecodeParams d;
  const float* q_scale;  // device, one float each, or null: factors of d.logit_scale, and of d.out_scale
  const float* kv_scale;
  float* partial_o;     // [b][max_splits][lines][512], normalised; rows with one split are not written
  float2* partial_lse;  // [b][max_splits][lines]: (log-sum-exp of rounded P, of unrounded P)
  int lines;            // s_q * h_q: line = i * h_q + h
  int line_tiles;       // ceil(lines / N)
  int max_splits;       // of any row: num_splits(capacity)
  int capacity;         // tokens a row of block_table can hold
  bool q_aligned;       // q can be copied in pieces of 16 bytes
};

// One piece of work: lines of one line tile against tokens of one split of one row.
struct alignas(16) Work {
  int row;         // index in the batch; -1: no more work
  int split;       // of `splits`
  int splits;      // of this row
  int line_tile;   // lines [line_tile * N, ...)
  int len;         // tokens of the row
  int tile_begin;  // tiles of 64 tokens of this split
  int tile_end;
};

// State of the list (loader warp only) and the ring through which everybody gets it.
struct WorkList {
  Work ring[kWorkSlots];
  int item;       // of this CTA
  int before;     // items of the rows below first_row
  int first_row;  // of the 32 rows held below
  int inclusive[32];
  int len[32];
};

template <int N_, bool kTma_>
struct Traits {
  static constexpr int N = N_;         // query lines of a CTA: 16, 32 or 64
  static constexpr bool kTma = kTma_;  // pages of 64 tokens and more by TMA; smaller ones are gathered with cp.async
  static constexpr int kAccumulators = N / 2;  // registers of one m64nN fp32 tile
  // With 64 lines O fills 128 registers, so there is room for one tile of PV; else two alternate.
  static constexpr int kTileBuffers = N == 64 ? 1 : 2;
  // A thread has 128 registers at launch; setmaxnreg moves them to where O is.
  static constexpr int kLoaderRegisters = N == 64 ? (kTma ? 24 : 40) : 56;
  static constexpr int kScoresRegisters = N == 64 ? 88 : 104;
  static constexpr int kValuesRegisters = N == 64 ? (kTma ? 200 : 192) : 176;
  static_assert(kLoaderRegisters + kScoresRegisters + 2 * kValuesRegisters <= 512);

  struct SharedStorage {
    alignas(1024) uint8_t q[kRowsM * kDim];          // [4][64 lines][128 B] swizzle 128 B, then [64][64 B] swizzle 64 B
    alignas(1024) uint8_t kv[kStages][kStageBytes];  // the same with tokens as lines; K and V at once
    alignas(1024) uint8_t p[kPBuffers][N * kBlockN];  // [N lines][64 tokens, permuted] e4m3, swizzle 64 B
    alignas(16) float alpha[kPBuffers][N];            // rescale of O for this tile, order of column_slot()
    alignas(16) float final_scale[kPBuffers][N];      // valid with the last tile: scale / row sum
    WorkList list;
    alignas(8) uint64_t kv_full[kStages];   // the tokens of the stage are there
    alignas(8) uint64_t kv_empty[kStages];  // both values warpgroups are done with them, and with the P of that tile
    alignas(8) uint64_t p_full[kPBuffers];  // P, alpha (and final_scale) of a tile are written; scores are done with K
  };
  static constexpr int kSharedBytes = static_cast<int>(sizeof(SharedStorage));
  static_assert(kSharedBytes <= 232448, "227 KB is what a CTA can have");
};

}  // namespace mla::sm90a
