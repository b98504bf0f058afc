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

// threadIdx.x, read anew: what is worked out from it is not kept in registers meanwhile.
__device__ __forceinline__ int thread_again() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// x, kept in a register: the compiler does not work it out anew from threadIdx.
template <class X>
__device__ __forceinline__ X kept(X x) {
  asm volatile("" : "+r"(x));
  return x;
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

// All of a warpgroup's copies so far have landed, and its tensor cores may read them.
__device__ __forceinline__ void finish_copies(int barrier) {
  copy_async_commit();
  copy_async_wait<0>();
  fence_async_proxy();
  warpgroup_sync(barrier);
}

template <int kOffset>
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.u32 [%0 + %2], %1;" ::"r"(address), "r"(x), "n"(kOffset) : "memory");
}

// ---- values ----
__device__ __forceinline__ float max_in_order(float a, float b) {
  float y;
  asm volatile("max.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
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
};
template <>
struct Gmma<128> {
  using SS = cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_SS_TN<>;
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
// The first product of a sum, d = a b: its registers are written only. (CuTe's atom also reads them, so that whatever
// the code made of the old sum must end up in the same registers; ptxas then fences each of those writes against the
// products under way.)
__device__ __forceinline__ void gmma_ss_first(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1;\n}"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), "=f"(d[8]),
        "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]), "=f"(d[16]),
        "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]), "=f"(d[24]),
        "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31]), "=f"(d[32]),
        "=f"(d[33]), "=f"(d[34]), "=f"(d[35]), "=f"(d[36]), "=f"(d[37]), "=f"(d[38]), "=f"(d[39]), "=f"(d[40]),
        "=f"(d[41]), "=f"(d[42]), "=f"(d[43]), "=f"(d[44]), "=f"(d[45]), "=f"(d[46]), "=f"(d[47]), "=f"(d[48]),
        "=f"(d[49]), "=f"(d[50]), "=f"(d[51]), "=f"(d[52]), "=f"(d[53]), "=f"(d[54]), "=f"(d[55]), "=f"(d[56]),
        "=f"(d[57]), "=f"(d[58]), "=f"(d[59]), "=f"(d[60]), "=f"(d[61]), "=f"(d[62]), "=f"(d[63])
      : "l"(a), "l"(b));
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
