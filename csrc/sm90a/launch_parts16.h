// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// What launch.cu calls for bf16 and fp16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "traits.h"

namespace mla::sm90a {

inline constexpr int kLines16 = 64;  // query lines of a CTA: line_tiles = ceil(lines / 64)

// Element: __nv_bfloat16 or __half, of q, cache and out. Pages by TMA or gathered. One definition in each
// decode16_*.cu. p.kv_nope is the one tensor map, [num_blocks][9 chunks][page_size][64 elements] with 128-byte swizzle
// and boxes of 64 tokens x 1 chunk; p.kv_rope is not used. p.q_aligned speaks of bytes, as for e4m3.
template <class Element, bool kTma>
void launch_decode16(const KernelParams& p, int ctas, cudaStream_t stream);

}  // namespace mla::sm90a
