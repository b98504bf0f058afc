// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// MLA decode in e4m3 on Hopper.
//
//   S   = Q K^T                 [64 lines, 64 tokens] = [64, 576] x [64, 576]^T: wgmma m64n64k32, both from shared
//   memory P   = e4m3(2^(S c - m + 8))  m: running row maximum of S c, c = logit_scale * log2(e) T^T = V^T P^T [512
//   dims, N lines] = [512, 128 tokens] x [N, 128]^T: wgmma m64nNk32, V^T from registers O^T = O^T alpha + T^T alpha =
//   2^(m_old - m) by line: the rescale and the promotion to fp32 are one fma out = O / row sum
//
// A step is two tiles of 64 tokens: one maximum, one P, one promotion for 128 tokens. The last step of a split may have
// one tile only.
//
// A line is one head of one query token; a CTA has N = 16, 32 or 64 of them and walks its list of work (work.cuh).
// fp8 wgmma wants both operands K-major, so PV needs V^T, while V lies [token][dim]. ldmatrix.trans on pairs of dims
// and two byte permutes give exactly the register A fragment of V^T with the tokens of each 16-block in the order 0 1 8
// 9 | 2 3 10 11 | 4 5 12 13 | 6 7 14 15. The sum over tokens does not mind, as long as P is in the same order, and
// packing the accumulator of S two 8-blocks at a time *is* that order. Row g of the A fragment is dim 2g of a 16-block,
// row g + 8 is dim 2g + 1, so a lane ends up with pairs of neighbouring dims.
//
//   role                     waits for                             signals
//   loader (warp 12)         kv_empty[stage], rope_empty[slot]     kv_full[stage] (TMA, or cp.async for small pages)
//   q (warp 14, N = 64)      q_empty                               q_full (TMA; else the scores warps copy q)
//   scores (warps 0-3)       q_full, kv_full[stage], p_empty[..]   q_empty, rope_empty[slot], p_full[buffer]
//   values (warps 4-7, 8-11) kv_full[stage], p_full[buffer]        kv_empty[stage], p_empty[buffer]
//                            each has 256 of the 512 dims
// kv_empty comes after p_full, so it covers K, too.
// One CTA more than those that work may run a step on nothing, so that the code is in L2: rehearse() in work.cuh.
//
// Shared memory is the scarcest: by ncu its pipe is busy 59 % of the time at 64 lines. Q K^T takes 576 of its
// cycles a tile, P 256, the fragments of V 256, TMA 288.
//
// Where values leave fp32: products of e4m3 in the tensor core (both wgmmas; its accumulator is narrower than fp32: 18
// steps of 32 for S, 4 for T), P to e4m3, the output to bf16. Row sums are fp32, of the rounded P (divides) and of the
// unrounded P (gives lse).
#pragma once

#include "scores.cuh"
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
    for (int i = 0; i < T::kStages; ++i) {
      barrier_init(&sm.kv_full[i], 1);   // the loader
      barrier_init(&sm.kv_empty[i], 8);  // warps of values
    }
    for (int i = 0; i < kRopeStages; ++i) barrier_init(&sm.rope_empty[i], 4);  // warps of scores
    for (int i = 0; i < kPBuffers; ++i) {
      barrier_init(&sm.p_full[i], 4);   // warps of scores
      barrier_init(&sm.p_empty[i], 8);  // warps of values
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
    if (threadIdx.x < 3 * kWarpgroup + 32) {
      loader_role<T>(p, sm);
    } else if (threadIdx.x < 3 * kWarpgroup + 64 && blockIdx.x == 0 && p.any_split != nullptr) {
      write_plan(p, sm.list.share);
    } else if (T::N == kRowsM && p.q_tma && threadIdx.x / 32 == 3 * kWarpgroup / 32 + 2) {
      q_role<T>(p, sm);
    }
  }
}

}  // namespace mla::sm90a
