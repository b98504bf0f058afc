// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Vectors of fp32 for one instruction set. Plain arithmetic is the compiler's own vector type; intrinsics appear only
// where the rounding or the instruction matters. Everything is inlined by force and lives in MLA_ISA's namespace, so
// that no function compiled for AVX-512 can be linked into another unit. Functions that must round do so with the
// conversion instruction, never with (x + big) - big, which a fast-math build would fold away.
#pragma once

#include <cstdint>

#include "mla/params.h"

#if defined(MLA_ISA_AVX512) || defined(MLA_ISA_AVX2)
#include <immintrin.h>
#endif

#if defined(MLA_ISA_AVX512)
#define MLA_ISA avx512
#elif defined(MLA_ISA_AVX2)
#define MLA_ISA avx2
#else
#define MLA_ISA generic
#endif

// Loops over the accumulators of a micro-kernel: only when they are unrolled whole do the accumulators live in
// registers.
#if defined(__clang__)
#define MLA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MLA_UNROLL _Pragma("GCC unroll 32")
#endif

namespace mla::cpu::MLA_ISA {

#if defined(MLA_ISA_AVX512)
inline constexpr int kW = 16;             // lanes
inline constexpr int kAccumulators = 24;  // vectors a micro-kernel keeps in registers
#elif defined(MLA_ISA_AVX2)
inline constexpr int kW = 8;
inline constexpr int kAccumulators = 12;
#else
inline constexpr int kW = 4;
inline constexpr int kAccumulators = 12;
#endif

typedef float vf __attribute__((vector_size(4 * kW), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * kW), may_alias));
typedef float vf_unaligned __attribute__((vector_size(4 * kW), may_alias, aligned(4)));

MLA_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
MLA_INLINE void store(float* p, vf v) { *reinterpret_cast<vf_unaligned*>(p) = v; }
MLA_INLINE vf set1(float x) { return x - vf{}; }
MLA_INLINE vi set1(int32_t x) { return x - vi{}; }
MLA_INLINE vi bits(vf v) { return reinterpret_cast<vi>(v); }
MLA_INLINE vf as_float(vi v) { return reinterpret_cast<vf>(v); }
MLA_INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }

// max returns b where either is NaN; cvt_rne rounds to the nearest integer, ties to even, for |x| < 2^22.
#if defined(MLA_ISA_AVX512)
MLA_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
MLA_INLINE vf max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
MLA_INLINE vi cvt_rne(vf x) { return (vi)_mm512_cvtps_epi32((__m512)x); }
#elif defined(MLA_ISA_AVX2)
MLA_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
MLA_INLINE vf max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
MLA_INLINE vi cvt_rne(vf x) { return (vi)_mm256_cvtps_epi32((__m256)x); }
#else
MLA_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
MLA_INLINE vf max(vf a, vf b) { return a > b ? a : b; }
MLA_INLINE vi cvt_rne(vf x) {
  const vi t = __builtin_convertvector(x, vi);
  const vf d = x - to_float(t);
  const vi odd = -(t & 1);
  const vi up = (d > 0.5f) | ((d == 0.5f) & odd);
  const vi down = (d < -0.5f) | ((d == -0.5f) & odd);
  return t - up + down;  // a true lane is -1
}
#endif

// exp(x) * 2^kShift for x <= 0: Cody-Waite reduction and a polynomial of degree 6, within 2 ulp, exactly 2^kShift at 0.
// Below -87 the result is 0, NaN stays NaN.
template <int kShift>
MLA_INLINE vf exp_scaled(vf x) {
  const vf clamped = max(set1(-87.0f), x);
  const vi n = cvt_rne(clamped * 1.44269504088896341f);
  vf r = fma(to_float(n), set1(-0.693359375f), clamped);  // 9 bits of ln 2: the product is exact
  r = fma(to_float(n), set1(2.12194440e-4f), r);
  vf y = set1(1.9875691500e-4f);
  y = fma(y, r, set1(1.3981999507e-3f));
  y = fma(y, r, set1(8.3334519073e-3f));
  y = fma(y, r, set1(4.1665795894e-2f));
  y = fma(y, r, set1(1.6666665459e-1f));
  y = fma(y, r, set1(5.0000001201e-1f));
  y = fma(y, r * r, r) + 1.0f;
  y = y * as_float((n + (127 + kShift)) << 23);
  return as_float(bits(y) & ~(x < -87.0f));
}

// Round p >= 0 to kMantissa stored bits with smallest normal exponent kMinExponent, to nearest, ties to even; NaN stays
// NaN. The caller keeps p below the format's maximum.
template <int kMantissa, int kMinExponent>
MLA_INLINE vf round_to(vf p) {
  static_assert(kMinExponent - kMantissa > -127, "the step must be a normal fp32 number");
  const vi exponent = bits(p) & 0x7f800000;
  const vi lowest = set1((kMinExponent + 127) << 23);
  const vi step = (exponent > lowest ? exponent : lowest) - (kMantissa << 23);
  const vf rounded = to_float(cvt_rne(p * as_float((254 << 23) - step))) * as_float(step);
  return p == p ? rounded : p;
}

// Scalar conversions of the 16-bit formats.
MLA_INLINE float float_of(uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
MLA_INLINE uint32_t bits_of(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  return u;
}
MLA_INLINE uint16_t to_bf16(float f) {
  const uint32_t u = bits_of(f);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
MLA_INLINE float from_fp16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 0x3ff;
  if (e == 31) return float_of(sign | 0x7f800000u | (m << 13));
  if (e == 0) {
    const float f = static_cast<float>(m) * 5.9604644775390625e-8f;  // 2^-24
    return float_of(sign | bits_of(f));
  }
  return float_of(sign | ((e + 112) << 23) | (m << 13));
}
MLA_INLINE uint16_t to_fp16(float f) {
  const uint32_t u = bits_of(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return 0x7e00;
  if (a >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more round to infinity
  if (a < 0x38800000u) {                                               // below 2^-14: multiples of 2^-24
    const uint32_t e = a >> 23, m = (a & 0x7fffffu) | 0x800000u;
    if (e < 102) return static_cast<uint16_t>(sign);
    const uint32_t shift = 126 - e, half = 1u << (shift - 1), q = m >> shift, rest = m & ((1u << shift) - 1);
    return static_cast<uint16_t>(sign | (q + (rest > half || (rest == half && (q & 1)))));
  }
  return static_cast<uint16_t>(sign | ((a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13));
}

// e4m3 values times 2^-8, which an fp16 bit pattern gives for nothing: code eeee mmm is fp16 with exponent eeee - 8.
// The kernel multiplies the missing 2^8 into its scales; both are powers of two and change no bit.
inline constexpr int kE4M3Fold = 8;

struct E4M3Table {
  float value[256];
  constexpr E4M3Table() : value() {
    for (int code = 0; code < 256; ++code) {
      const int e = (code >> 3) & 15, m = code & 7;
      float v = static_cast<float>(e == 0 ? m : m + 8) / 8.0f;
      for (int i = (e == 0 ? 1 : e); i < 7 + kE4M3Fold; ++i) v *= 0.5f;
      for (int i = 7 + kE4M3Fold; i < e; ++i) v *= 2.0f;
      value[code] = (code & 0x7f) == 0x7f ? __builtin_nanf("") : (code & 0x80) ? -v : v;
    }
  }
};
static constexpr E4M3Table kE4M3Table{};

// Stored values to fp32, n a multiple of 32. e4m3 comes out times 2^-8.
template <DType kType>
MLA_INLINE void decode(const void* source, float* out, int n) {
  if constexpr (kType == DType::kE4M3) {
    const uint8_t* s = static_cast<const uint8_t*>(source);
#if defined(MLA_ISA_AVX512) || defined(MLA_ISA_AVX2)
    for (int i = 0; i < n; i += 32) {
      const __m256i code = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s + i));
      const __m256i low7 = _mm256_set1_epi8(0x7f);
      const __m256i nan = _mm256_cmpeq_epi8(_mm256_and_si256(code, low7), low7);
      if (__builtin_expect(!_mm256_testz_si256(nan, nan), 0)) {
        for (int j = 0; j < 32; ++j) out[i + j] = kE4M3Table.value[s[i + j]];
        continue;
      }
      for (int half = 0; half < 2; ++half) {
        const __m128i c = half ? _mm256_extracti128_si256(code, 1) : _mm256_castsi256_si128(code);
        const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(c), 7);
        const __m256i h = _mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0xbf80)));
#if defined(MLA_ISA_AVX512)
        _mm512_storeu_ps(out + i + 16 * half, _mm512_cvtph_ps(h));
#else
        _mm256_storeu_ps(out + i + 16 * half, _mm256_cvtph_ps(_mm256_castsi256_si128(h)));
        _mm256_storeu_ps(out + i + 16 * half + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)));
#endif
      }
    }
#else
    for (int i = 0; i < n; ++i) out[i] = kE4M3Table.value[s[i]];
#endif
  } else {
    const uint16_t* s = static_cast<const uint16_t*>(source);
    for (int i = 0; i < n; i += kW) {
#if defined(MLA_ISA_AVX512)
      const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s + i));
      _mm512_storeu_ps(out + i, kType == DType::kFP16
                                    ? _mm512_cvtph_ps(h)
                                    : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)));
#elif defined(MLA_ISA_AVX2)
      const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(s + i));
      _mm256_storeu_ps(out + i, kType == DType::kFP16
                                    ? _mm256_cvtph_ps(h)
                                    : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)));
#else
      for (int j = 0; j < kW; ++j)
        out[i + j] = kType == DType::kFP16 ? from_fp16(s[i + j]) : float_of(static_cast<uint32_t>(s[i + j]) << 16);
#endif
    }
  }
}

}  // namespace mla::cpu::MLA_ISA
