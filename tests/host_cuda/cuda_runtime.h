// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Just enough of CUDA to run a kernel of csrc/sm100a/rows.cuh on the host: a CTA is as many threads, a barrier is a
// barrier, shared memory is static.
#pragma once

#include <barrier>
#include <cstdint>

#define __global__
#define __grid_constant__
#define __launch_bounds__(n)
#define __shared__ static

using cudaStream_t = void*;
struct Index {
  int x = 0, y = 0, z = 0;
};
inline Index blockIdx;
inline thread_local Index threadIdx;
inline std::barrier<>* host_barrier = nullptr;
inline void __syncthreads() { host_barrier->arrive_and_wait(); }
