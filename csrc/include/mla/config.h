// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// The numbers every target shares: the geometry of MLA decode and the tile of tokens that fixes the rounding points.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MLA_HOST_DEVICE __host__ __device__
#else
#define MLA_HOST_DEVICE
#endif

// Functions of the shared headers are inlined by force: the CPU kernels are compiled once for each instruction set, and
// an out-of-line copy from the AVX-512 unit could otherwise be the one the linker keeps for everybody.
#if defined(__CUDACC__)
#define MLA_INLINE __forceinline__
#else
#define MLA_INLINE inline __attribute__((always_inline))
#endif

namespace mla {

inline constexpr int kDimNope = 512;              // d_v: the latent, which is both K and V
inline constexpr int kDimRope = 64;               // the rotary part, K only
inline constexpr int kDim = kDimNope + kDimRope;  // d: one row of kv_cache
inline constexpr int kBlockN = 64;                // tokens of a tile: P is rounded and O promoted once a tile
inline constexpr int kMaxHeads = 128;             // h_q
inline constexpr int kMaxQueryTokens = 8;         // s_q
inline constexpr int kMaxPageSize = 256;          // powers of two up to this
inline constexpr int kMaxSplits = 128;            // num_kv_splits
inline constexpr int kLogPScale = 8;              // P is stored as exp(logit - max) * 2^8 in e4m3: 256 < 448 (not in
                                                  // sm90a: see its config.h)

}  // namespace mla
