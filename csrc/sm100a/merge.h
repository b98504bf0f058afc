// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Merging the splits of one row and head, for host and device:
//   lse = top + log sum_i exp(lse_i - top),   out = sum_i w_i O_i,   w_i = exp(lse_i - lse)
// O_i is split i's output, already divided by its own row sum. CUTLASS's reduction kernel gives lse = +inf where every
// partial is empty, which would win any later merge; here that is 0 and -inf.
#pragma once

#include <cmath>

#include "mla/config.h"

namespace mla::sm100a {

// Natural-log lse of n splits; -inf where all are empty. `step` is the distance of two of them in floats.
MLA_HOST_DEVICE MLA_INLINE float merged_lse(const float* lse, int n, int64_t step) {
  float top = -INFINITY;
  for (int i = 0; i < n; ++i) top = fmaxf(top, lse[i * step]);
  if (top == -INFINITY) return -INFINITY;
  float sum = 0.f;
  for (int i = 0; i < n; ++i) sum += expf(lse[i * step] - top);
  return top + logf(sum);
}

MLA_HOST_DEVICE MLA_INLINE float merge_weight(float lse, float all) { return all == -INFINITY ? 0.f : expf(lse - all); }

}  // namespace mla::sm100a
