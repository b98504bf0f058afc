// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Thin wrappers. wgmma and TMA come from CuTe's arch atoms; here is what those lack or do without a memory clobber.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

namespace mla::sm90a {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarriers ----
__device__ __forceinline__ void barrier_init(uint64_t* bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ bool barrier_try(uint64_t* bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(bar)), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ void barrier_wait(uint64_t* bar, uint32_t parity) {
#if defined(MLA_SM90A_WATCHDOG)
  for (uint32_t tries = 0; !barrier_try(bar, parity); ++tries)
    if (tries > (1u << 22)) __trap();
#else
  while (!barrier_try(bar, parity)) {
  }
#endif
}
__device__ __forceinline__ void warpgroup_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }

// ---- proxies, cp.async ----
// Ordinary writes to shared memory become visible to wgmma and TMA.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// 16 bytes, or 16 zero bytes where `valid` is false (the source is then not read).
__device__ __forceinline__ void copy_async_16(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// ---- values ----
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Two fp32 to two e4m3, nearest even, clamped to 448; `lo` in the low byte.
__device__ __forceinline__ uint16_t to_e4m3x2(float lo, float hi) {
  uint16_t y;
  asm volatile("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
  return y;
}
__device__ __forceinline__ __half2 from_e4m3x2(uint16_t x) {
  uint32_t y;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(x));
  return *reinterpret_cast<__half2*>(&y);
}

// Four transposed 8x8 matrices of 16-bit elements.
__device__ __forceinline__ void load_matrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// ---- wgmma ----
enum class Swizzle : uint64_t { k128 = 1, k64 = 2 };

// K-major operand; rows of 128 or 64 bytes, eight of them an atom, atoms one after the other.
template <Swizzle kSwizzle>
__device__ __forceinline__ uint64_t matrix_descriptor(const void* p) {
  constexpr uint64_t atom_bytes = kSwizzle == Swizzle::k128 ? 1024 : 512;
  return (static_cast<uint64_t>(kSwizzle) << 62) | ((atom_bytes >> 4) << 32) | (uint64_t{1} << 16) |
         static_cast<uint64_t>((shared_address(p) & 0x3FFFF) >> 4);
}

// A descriptor moved on by 16-byte units. Addresses stay below 2^18, so nothing carries out of the low word.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t units) {
  return (descriptor & 0xFFFFFFFF00000000u) | (static_cast<uint32_t>(descriptor) + units);
}
__device__ __forceinline__ uint64_t uniform(uint64_t descriptor) {
  return (descriptor & 0xFFFFFFFF00000000u) | __shfl_sync(~0u, static_cast<uint32_t>(descriptor), 0);
}

template <int N>
struct Gmma;
template <>
struct Gmma<16> {
  using RS = cute::SM90::GMMA::MMA_64x16x32_F32E4M3E4M3_RS_TN<>;
};
template <>
struct Gmma<32> {
  using RS = cute::SM90::GMMA::MMA_64x32x32_F32E4M3E4M3_RS_TN<>;
};
template <>
struct Gmma<64> {
  using RS = cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_RS_TN<>;
  using SS = cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_SS_TN<>;
};

using ScaleOut = cute::SM90::GMMA::ScaleOut;

template <class Atom, int R, int... I>
__device__ __forceinline__ void gmma_ss(float (&d)[R], uint64_t a, uint64_t b, ScaleOut scale,
                                        std::integer_sequence<int, I...>) {
  Atom::fma(a, b, d[I]..., scale);
}
template <class Atom, int R>
__device__ __forceinline__ void gmma_ss(float (&d)[R], uint64_t a, uint64_t b, ScaleOut scale) {
  gmma_ss<Atom>(d, a, b, scale, std::make_integer_sequence<int, R>{});
}
template <class Atom, int R, int... I>
__device__ __forceinline__ void gmma_rs(float (&d)[R], const uint32_t* a, uint64_t b, ScaleOut scale,
                                        std::integer_sequence<int, I...>) {
  Atom::fma(a[0], a[1], a[2], a[3], b, d[I]..., scale);
}
template <class Atom, int R>
__device__ __forceinline__ void gmma_rs(float (&d)[R], const uint32_t* a, uint64_t b, ScaleOut scale) {
  gmma_rs<Atom>(d, a, b, scale, std::make_integer_sequence<int, R>{});
}
template <int R>
__device__ __forceinline__ void fence_registers(float (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R; ++i) cute::warpgroup_fence_operand(d[i]);
}

}  // namespace mla::sm90a
