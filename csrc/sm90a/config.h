// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// The numbers of the Hopper kernel. Those that fix results (tile of tokens, scale of P) are in mla/config.h.
#pragma once

#include "mla/config.h"

namespace mla::sm90a {

inline constexpr int kWarpgroup = 128;                  // threads
inline constexpr int kThreads = 3 * kWarpgroup;         // one scores warpgroup, two values warpgroups
inline constexpr int kRowsM = 64;                       // wgmma M: query lines of S = Q K^T, dims of O^T = V^T P^T
inline constexpr int kChunkBytes = 128;                 // dims (bytes) of one 128-byte swizzled column block
inline constexpr int kChunks = kDimNope / kChunkBytes;  // 4
inline constexpr int kNopeTileBytes = kBlockN * kDimNope;
inline constexpr int kRopeTileBytes = kBlockN * kDimRope;
inline constexpr int kStageBytes = kNopeTileBytes + kRopeTileBytes;  // 36 KB: 64 tokens
inline constexpr int kStages = 5;
inline constexpr int kPBuffers = 2;
inline constexpr int kWorkAhead = kStages + 2;          // items listed before the one that scores is at: the loader needs
                                                        // at most kStages, and everybody looks one further
inline constexpr int kWorkSlots = 16;                   // ring: values may be kPBuffers items behind scores
inline constexpr int kBlocksM = kDimNope / 2 / kRowsM;  // 4 blocks of 64 dims for each values warpgroup
inline constexpr int kMinTmaPage = 64;                  // smaller pages are gathered with cp.async

}  // namespace mla::sm90a
