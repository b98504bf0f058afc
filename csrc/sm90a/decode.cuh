// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// MLA decode in e4m3 on Hopper.
//
//   S   = Q K^T                       [64 lines, 128 tokens] = [64, 576] x [128, 576]^T: wgmma m64n128k32, both from
//                                     shared memory
//   P   = e4m3(2^(S c - base + 5))    c = logit_scale * log2(e); base: the maximum of S c in the line's first step,
//                                     renewed only when a step lies 3.75 or more above it (P would not fit e4m3)
//   T^T = V^T P^T                     [512 dims, N lines] = [512, 128 tokens] x [N, 128]^T: wgmma m64nNk32, V^T from
//                                     registers
//   O^T = O^T + T^T                   in fp32: the promotion. Times alpha = 2^(base_old - base_new) before that for
//                                     lines whose base is new
//   out = O / row sum
//
// A step is 128 tokens: one P, one promotion. The last step of a split may have one tile of 64 only.
//
// A line is one head of one query token; a CTA has N = 16, 32 or 64 of them and walks its list of work (work.cuh).
// fp8 wgmma wants both operands K-major, so PV needs V^T, while V lies [token][dim]. ldmatrix.trans on pairs of dims
// and two byte permutes give exactly the register A fragment of V^T with the tokens of each 16-block in the order 0 1 8
// 9 | 2 3 10 11 | 4 5 12 13 | 6 7 14 15. The sum over tokens does not mind, as long as P is in the same order, and
// packing the accumulator of S two 8-blocks at a time *is* that order. Row g of the A fragment is dim 2g of a 16-block,
// row g + 8 is dim 2g + 1, so a lane ends up with pairs of neighbouring dims.
//
//   role                     waits for                               signals
//   loader (warp 12)         kv_empty[slot], rope_empty              kv_full[slot], rope_full (TMA, or cp.async for
//                                                                    small pages)
//   scores (warps 0-3)       q_full, kv_full[slot], rope_full,       q_empty, rope_empty, multiplied[..],
//   p_full[buffer]
//                            p_empty[buffer]
//   values (warps 4-7, 8-11) kv_full[slot], p_full[buffer],          kv_empty[slot], p_empty[buffer]
//                            multiplied[..], sums_full
//   sums (warps 13, 14)      p_full[buffer]                          p_empty[buffer], sums_full
//   q (warp 14, N = 64)      q_empty                                 q_full (TMA; else the scores warps copy q)
// The tokens of a step are in four slots of 128 dims and a buffer for the rope part, which is free as soon as Q K^T is
// done. A slot is K for all and V for one values warpgroup, which has chunks 0 and 2, or 1 and 3, and gives each back
// as soon as its fragments are in registers. kv_empty comes after p_full, so it covers K, too.
// Scores work in two phases, Q K^T and exponentials, and so that the tensor cores are not wanted by both at the same
// time, values begin with a step's second block when the next Q K^T is done (multiplied).
// One CTA more than those that work may run a step on nothing, so that the code is in L2: rehearse() in work.cuh.
//
// Shared memory is the scarcest: Q K^T takes 864 of its cycles a step, P 512, the fragments of V 512, TMA 576, the rest
// 160 (64 lines).
//
// Where values leave fp32: products of e4m3 in the tensor core (both wgmmas; its accumulator is narrower than fp32: 18
// steps of 32 for S, 4 for T), P to e4m3, the output to bf16. Row sums are fp32, of the rounded P (divides; sums.cuh)
// and of the unrounded P (gives lse).
#pragma once

#include "scores.cuh"
#include "sums.cuh"
#include "values.cuh"

namespace mla::sm90a {

template <class T>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& sm = *reinterpret_cast<typename T::SharedStorage*>(shared);
  if (threadIdx.x / 32 == 3 * kWarpgroup / 32) {
    if (rehearsing(p)) {
      rehearse(p, sm.list);
    } else {
      start_list(p, sm.list);
      publish_next(p, sm.list, 0);
    }
  }
  if (threadIdx.x == 0) {
    barrier_init(&sm.q_full, 1);   // the q loader
    barrier_init(&sm.q_empty, 4);  // warps of scores
    for (int i = 0; i < T::kSlots; ++i) {
      barrier_init(&sm.kv_full[i], 1);   // the loader
      barrier_init(&sm.kv_empty[i], 4);  // warps of one values warpgroup
    }
    barrier_init(&sm.rope_full, 1);   // the loader
    barrier_init(&sm.rope_empty, 4);  // warps of scores
    for (int i = 0; i < kPBuffers; ++i) {
      barrier_init(&sm.p_full[i], 4);                   // warps of scores
      barrier_init(&sm.p_empty[i], 8 + T::kSumsWarps);  // warps of values, and of sums
      barrier_init(&sm.sums_full[i], T::kSumsWarps);
      barrier_init(&sm.multiplied[i], 4);  // warps of scores
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async_proxy();
  }
  __syncthreads();

  if (threadIdx.x < kWarpgroup) {
    if constexpr (T::kScoresRegisters > T::kLaunchRegisters) {
      cutlass::arch::warpgroup_reg_alloc<T::kScoresRegisters>();
    } else {
      cutlass::arch::warpgroup_reg_dealloc<T::kScoresRegisters>();
    }
    scores_role<T>(p, sm);
  } else if (threadIdx.x < 3 * kWarpgroup) {
    cutlass::arch::warpgroup_reg_alloc<T::kValuesRegisters>();
    values_role<T>(p, sm);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<T::kLoaderRegisters>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 5), 0) - 3 * kWarpgroup / 32;
    if (warp == 0) {
      loader_role<T>(p, sm);
    } else if (warp - 1 < T::kSumsWarps) {
      if (warp == 1 && blockIdx.x == 0 && p.any_split != nullptr) write_plan(p, sm.list.share);
      sums_role<T>(p, sm, (warp - 1) * 32, T::N == kRowsM && warp == 2 && p.q_tma);
    }
  }
}

}  // namespace mla::sm90a
