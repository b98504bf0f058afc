// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// What scores and values share (decode.cuh has the whole picture).
#pragma once

#include <cuda_bf16.h>

#include <cutlass/arch/reg_reconfig.h>

#include "load.cuh"

namespace mla::sm90a {

enum NamedBarrier : int { kScoresBarrier = 1 };

// Where column (line) `c` of a tile keeps its alpha: the values warps read four floats at a time, lane j of a quad its
// own columns 8n + 2j, 8n + 2j + 1, and the four lanes neighbouring 16-byte pieces.
__device__ __forceinline__ int column_slot(int c) {
  const int j = (c & 7) >> 1, k = (c >> 3) * 2 + (c & 1);
  return (k >> 2) * 16 + j * 4 + (k & 3);
}

// Where a role is in the ring of stages.
template <int kSize>
struct Ring {
  int at = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++at == kSize) {
      at = 0;
      phase ^= 1;
    }
  }
};

}  // namespace mla::sm90a
