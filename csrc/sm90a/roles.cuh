// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// What scores and values share (decode.cuh has the whole picture).
#pragma once

#include <cuda_bf16.h>

#include <cutlass/arch/reg_reconfig.h>

#include "load.cuh"

namespace mla::sm90a {

enum NamedBarrier : int { kScoresBarrier = 1, kValuesBarrier = 2 };  // and the one after, one a warpgroup

// Where column (line) `c` of a tile keeps its alpha: the values warps read four floats at a time, lane j of a quad its
// own columns 8n + 2j, 8n + 2j + 1, and the four lanes neighbouring 16-byte pieces.
__device__ __forceinline__ int column_slot(int c) {
  const int j = (c & 7) >> 1, k = (c >> 3) * 2 + (c & 1);
  return (k >> 2) * 16 + j * 4 + (k & 3);
}

// Zero, which the compiler does not know: an address plus (x & zero) is there only when x is. A load from shared memory
// is done when something waits for what it loads, and nothing else keeps an arrive behind it.
__device__ __forceinline__ uint32_t unknown_zero(const KernelParams& p) { return static_cast<uint32_t>(p.d.h_q) >> 16; }

}  // namespace mla::sm90a
