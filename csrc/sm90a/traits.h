// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// What a kernel instantiation is made of: N query lines a CTA, the shared-memory plan, registers of each role.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "config.h"
#include "mla/params.h"
#include "plan.h"

namespace mla::sm90a {

// Everything the kernels get. Read from constant memory; the tensor maps must keep their 64-byte alignment.
struct KernelParams {
  CUtensorMap kv_nope;  // [num_blocks][4 chunks][page_size][128 B], 128-byte swizzle, box 64 tokens x 1 chunk; for
                        // bf16 and fp16 nine chunks, rope included
  CUtensorMap kv_rope;  // [num_blocks][page_size][64 B], 64-byte swizzle, box 64 tokens
  CUtensorMap q_nope;   // e4m3: the same of q, with rows of the batch as pages and lines as tokens, box of 4 chunks
  CUtensorMap q_rope;
  DecodeParams d;
  const float* q_scale;  // device, one float each, or null: factors of d.logit_scale, and of d.out_scale
  const float* kv_scale;
  int* any_split;    // workspace: not 0 where some row has several splits; null where none can have
  int2* row_plan;    // [b]: (slot of the row's first split, splits)
  float* partial_o;  // [slots][lines][512], normalised; rows with one split are not written
  float2*
      partial_lse;    // [lines][slots]: (log-sum-exp of rounded P, of unrounded P); the splits of a row are neighbours
  int slots;          // that the workspace has
  int lines;          // s_q * h_q: line = i * h_q + h
  uint32_t per_head;  // ceil(2^20 / h_q): see line_place()
  Machine m;
  int capacity;    // tokens a row of block_table can hold
  int workers;     // CTAs with a list of work; one more in the grid rehearses
  bool q_tma;      // q_nope and q_rope are there
  bool q_aligned;  // else: q can be copied in pieces of 16 bytes
};

// One piece of work: lines of one line tile against some or all tokens of one row.
struct alignas(16) Work {
  int row;         // index in the batch; -1: no more work
  int slot;        // of its partials
  int line_tile;   // lines [line_tile * N, ...)
  int len;         // tokens of the row
  int tile_begin;  // tiles of 64 tokens of this piece
  int tile_end;
  int whole;  // all tiles of the row: out and lse are written here
};

// State of the list (loader warp only) and the ring through which everybody gets it.
struct WorkList {
  Work ring[kWorkSlots];
  int share;      // tiles of a share, or 0: items by number
  int at;         // item, or tile of the batch
  int end;        // of the share
  int before;     // items or tiles of the rows below first_row
  int first_row;  // of the 32 rows held below
  int inclusive[32];
  int len[32];
};

template <int N_, bool kTma_>
struct Traits {
  static constexpr int N = N_;         // query lines of a CTA: 16, 32 or 64
  static constexpr bool kTma = kTma_;  // pages of 64 tokens and more by TMA; smaller ones are gathered with cp.async
  static_assert(kTma || N < 64, "the gathering loader has no registers beside 64 lines");
  static constexpr int kAccumulators = N / 2;  // registers of one m64nN fp32 tile
  static constexpr int kSlots = 10;            // 128 dims of 128 tokens each: two and a half steps
  static constexpr int kSumsWarps = N == 64 ? 2 : 1;
  // setmaxnreg moves registers to where O is.
  static constexpr int kLaunchRegisters = 128;  // 65536 / kThreads
  static constexpr int kLoaderRegisters = N == 64 ? 24 : 56;
  static constexpr int kScoresRegisters = N == 64 ? 104 : 152;
  static constexpr int kValuesRegisters = N == 64 ? 192 : 152;
  static_assert(kLoaderRegisters + kScoresRegisters + 2 * kValuesRegisters <= 512);

  struct SharedStorage {
    alignas(1024) uint8_t q[kRowsM * kDim];  // [4][64 lines][128 B] swizzle 128 B, then [64][64 B] swizzle 64 B
    alignas(1024) uint8_t kv_nope[kSlots][kSlotBytes];    // [128 tokens][128 B], swizzle 128 B; K and V at once
    alignas(1024) uint8_t kv_rope[kRopeStepBytes];        // [128 tokens][64 B], swizzle 64 B
    alignas(1024) uint8_t p[kPBuffers][N * kStepTokens];  // [N lines][128 tokens, permuted] e4m3, swizzle 128 B
    alignas(16) float alpha[kPBuffers][N];                // rescale of O for this step, order of column_slot()
    alignas(4) uint8_t renewed[kPBuffers][4];             // not 0: some line of this scores warp has an alpha
    alignas(16) float final_scale[kScaleBuffers][N];      // with the last step: shift, then scale / row sum
    WorkList list;
    alignas(8) uint64_t q_full;              // q of an item is there (by TMA)
    alignas(8) uint64_t q_empty;             // scores are done with it
    alignas(8) uint64_t kv_full[kSlots];     // the tokens of the slot are there
    alignas(8) uint64_t kv_empty[kSlots];    // its values warpgroup is done with them
    alignas(8) uint64_t rope_full;           // the same of the rope part
    alignas(8) uint64_t rope_empty;          // scores are done with it
    alignas(8) uint64_t p_full[kPBuffers];   // P, alpha (and shift) of a step are written; scores are done with K
    alignas(8) uint64_t p_empty[kPBuffers];  // values and sums are done with P and alpha
    alignas(8) uint64_t sums_full[2];        // final_scale of an item is there
    alignas(8) uint64_t multiplied[2];       // Q K^T of a step is done, or need not be waited for
  };
  static constexpr int kSharedBytes = static_cast<int>(sizeof(SharedStorage));
  static_assert(kSharedBytes <= 232448, "227 KB is what a CTA can have");
};

}  // namespace mla::sm90a
