// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
#pragma once

#include <bit>

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const auto u = std::bit_cast<uint32_t>(x);
  if (x != x) return {0x7FFF};
  return {static_cast<uint16_t>((u + 0x7FFF + (u >> 16 & 1)) >> 16)};
}
