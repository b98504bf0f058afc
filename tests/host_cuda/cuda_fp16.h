// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
#pragma once

#include <bit>

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
inline __half __float2half_rn(float x) { return {std::bit_cast<uint16_t>(static_cast<_Float16>(x))}; }
