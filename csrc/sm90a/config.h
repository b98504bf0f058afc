// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// The numbers of the Hopper kernel. Those that fix results (tile of tokens, scale of P) are in mla/config.h.
#pragma once

#include "mla/config.h"

namespace mla::sm90a {

inline constexpr int kWarpgroup = 128;                  // threads
inline constexpr int kThreads = 4 * kWarpgroup;         // scores, two of values, and one of which the first warp loads
inline constexpr int kRowsM = 64;                       // wgmma M: query lines of S = Q K^T, dims of O^T = V^T P^T
inline constexpr int kChunkBytes = 128;                 // dims (bytes) of one 128-byte swizzled column block
inline constexpr int kChunks = kDimNope / kChunkBytes;  // 4
inline constexpr int kNopeTileBytes = kBlockN * kDimNope;
inline constexpr int kRopeTileBytes = kBlockN * kDimRope;
inline constexpr int kTileBytes = kNopeTileBytes + kRopeTileBytes;  // 36 KB: 64 tokens
inline constexpr int kStepTokens = 2 * kBlockN;                     // one maximum, one P, one promotion
inline constexpr int kSlotBytes = kStepTokens * kChunkBytes;        // 16 KB: 128 dims of a step
inline constexpr int kRopeStepBytes = kStepTokens * kDimRope;       // 8 KB
inline constexpr int kPBuffers = 2;
inline constexpr int kScaleBuffers = 4;
// P = 2^(x - base) * 2^kLogLazyScale in e4m3, x a logit in powers of two. A line's base is the maximum of its first
// step; it is renewed when an x lies more than kLogMostP - kLogLazyScale above it: 2^kLogMostP < 448.
inline constexpr int kLogLazyScale = 5;
inline constexpr float kLogMostP = 8.75f, kMostP = 430.5f;  // 2^8.75 = 430.54
inline constexpr int kRehearsalSteps = 2;                   // see rehearse() in work.cuh
inline constexpr int kWorkSlots = 8;                        // ring of work: the loader is at most 7 items ahead
inline constexpr int kBlocksM = kDimNope / 2 / kRowsM;      // 4 blocks of 64 dims for each values warpgroup
inline constexpr int kMostCtas = 144;                       // SMs of a whole GH100; the workspace is sized for it
inline constexpr int kMinTmaPage = 64;                      // smaller pages are gathered with cp.async

}  // namespace mla::sm90a
