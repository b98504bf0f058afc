// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// From checked arguments to what a kernel gets.
#pragma once

#include <cmath>

#include "mla/checks.h"

namespace mla {

// `a` has passed check_decode(). The scales are those known on the host; a scale that lives on a device counts as 1
// here.
inline DecodeParams make_params(const DecodeArguments& a, float q_scale, float kv_scale) {
  const auto copy3 = [](int64_t* to, const int64_t* from) {
    for (int i = 0; i < 3; ++i) to[i] = from[i];
  };
  DecodeParams p{};
  p.q_nope = a.q_nope.data;
  p.q_pe = a.q_pe.data;
  copy3(p.q_nope_stride, a.q_nope.stride);
  copy3(p.q_pe_stride, a.q_pe.stride);
  p.kv_cache = a.kv_cache.data;
  p.num_blocks = a.kv_cache.size[0];
  p.kv_page_stride = a.kv_cache.stride[0];
  p.kv_token_stride = a.kv_cache.stride[1];
  while ((int64_t{1} << p.page_size_log2) < a.kv_cache.size[1]) ++p.page_size_log2;
  p.seq_lens = static_cast<const int32_t*>(a.seq_lens.data);
  p.seq_lens_stride = a.seq_lens.stride[0];
  p.block_table = static_cast<const int32_t*>(a.block_table.data);
  p.block_table_stride = a.block_table.stride[0];
  p.max_blocks = a.block_table.size[1];
  p.out = a.out.data;
  copy3(p.out_stride, a.out.stride);
  p.lse = static_cast<float*>(a.lse.data);
  copy3(p.lse_stride, a.lse.stride);
  p.b = static_cast<int>(a.q_nope.size[0]);
  p.s_q = static_cast<int>(a.q_nope.size[1]);
  p.h_q = static_cast<int>(a.q_nope.size[2]);
  p.dtype = a.q_nope.dtype;
  p.num_kv_splits = static_cast<int>(a.num_kv_splits);
  p.logit_scale = static_cast<float>(a.sm_scale * q_scale * kv_scale);
  p.out_scale = kv_scale;
  if (!std::isfinite(p.logit_scale))
    fail("sm_scale", "sm_scale * q_scale * kv_scale finite in fp32", a.sm_scale * q_scale * kv_scale, "lower a scale");
  return p;
}

// A workspace that a caller brought, against what the call needs.
inline void check_workspace(const TensorView& w, int64_t bytes, int64_t alignment) {
  if (w.ndim != 1 || (w.size[0] > 1 && w.stride[0] != 1) || w.size[0] * w.element_size < bytes)
    fail("workspace", text("a 1-D contiguous tensor of at least ", bytes, " bytes"),
         text(shape_string(w), " of ", w.element_size, " bytes each"), "ask workspace_size()");
  if (reinterpret_cast<uintptr_t>(w.data) % static_cast<uintptr_t>(alignment) != 0)
    fail("workspace", text("an address that is a multiple of ", alignment), "another",
         "pass the tensor as it was allocated");
}

}  // namespace mla
