// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// What a kernel gets: plain pointers, 64-bit strides in elements, and scales. No torch here, on purpose.
#pragma once

#include <cstdint>

#include "mla/config.h"

namespace mla {

enum class DType : int { kE4M3 = 0, kBF16 = 1, kFP16 = 2, kFP32 = 3, kInt32 = 4, kOther = 5 };

struct DecodeParams {
  // q_nope [b, s_q, h_q, 512] and q_pe [b, s_q, h_q, 64], last stride 1
  const void* q_nope;
  const void* q_pe;
  int64_t q_nope_stride[3];
  int64_t q_pe_stride[3];
  // kv_cache [num_blocks, page_size, 576], last stride 1, page and token strides free
  const void* kv_cache;
  int64_t kv_page_stride;
  int64_t kv_token_stride;
  int64_t num_blocks;
  int page_size_log2;
  // seq_lens [b]; block_table [b, max_blocks], last stride 1
  const int32_t* seq_lens;
  int64_t seq_lens_stride;
  const int32_t* block_table;
  int64_t block_table_stride;
  int64_t max_blocks;
  // out [b, s_q, h_q, 512], last stride 1; lse [b, s_q, h_q]
  void* out;
  int64_t out_stride[3];
  float* lse;
  int64_t lse_stride[3];

  int b;
  int s_q;
  int h_q;
  DType dtype;        // of q and cache; out is bf16, or fp16 where dtype is fp16
  float logit_scale;  // sm_scale * q_scale * kv_scale: logit = (q . k) * logit_scale
  float out_scale;    // kv_scale: out = (P . V) * out_scale
  int num_kv_splits;  // 0: automatic
};

}  // namespace mla
