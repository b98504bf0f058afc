// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// What every launcher checks before it reads a byte, in the order dtype, device, layout, shape (the architecture was
// checked by whoever picked the launcher). mla_kernels/checks.py checks the same on the Python side, where it can also
// advise before a library is loaded or while a graph is traced; these are for callers of torch.ops and keep a wrong
// call from reading memory that is not its own. A message names the argument, what was expected, what came, and the way
// out.
#pragma once

#include <cmath>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "mla/tensor_view.h"

namespace mla {

struct Error : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

struct DecodeArguments {
  TensorView q_nope, q_pe, kv_cache, seq_lens, block_table, out, lse;
  const TensorView* q_scale = nullptr;  // one fp32 element, or none: then the number below
  const TensorView* kv_scale = nullptr;
  const TensorView* workspace = nullptr;
  double sm_scale = 0.0;
  double q_scale_value = 1.0;
  double kv_scale_value = 1.0;
  int64_t num_kv_splits = 0;  // 0: automatic
};

template <class Name, class Expected, class Got, class WayOut>
[[noreturn]] void fail(const Name& name, const Expected& expected, const Got& got, const WayOut& way_out) {
  throw Error(text("mla_decode: ", name, ": expected ", expected, ", got ", got, "; ", way_out));
}

inline void check_dtype(const TensorView& t, DType expected, const char* why) {
  if (t.dtype != expected) fail(t.name, text(dtype_name(expected), why), dtype_name(t.dtype), "convert it");
}

inline void check_shape(const TensorView& t, std::initializer_list<int64_t> shape, const char* why) {
  TensorView expected{};
  for (int64_t n : shape) expected.size[expected.ndim++] = n;
  bool same = t.ndim == expected.ndim;
  for (int i = 0; same && i < t.ndim; ++i) same = t.size[i] == expected.size[i];
  if (!same) fail(t.name, text("shape ", shape_string(expected)), shape_string(t), why);
}

inline void check_inner_stride(const TensorView& t) {
  if (t.ndim > 0 && t.size[t.ndim - 1] > 1 && t.stride[t.ndim - 1] != 1)
    fail(t.name, "a last stride of 1", t.stride[t.ndim - 1], "pass .contiguous()");
}

// A written tensor must not hold one element twice.
inline void check_written_layout(const TensorView& t) {
  for (int i = 0; i < t.ndim; ++i)
    if (t.size[i] > 1 && t.stride[i] == 0)
      fail(t.name, "memory of its own for every element", "a stride of 0", "pass a real tensor, not an expanded one");
}

inline void check_scale(const char* name, double value) {
  const float stored = static_cast<float>(value);
  if (!(std::isfinite(stored) && stored > 0.0f))
    fail(name, "a finite number above 0 in fp32", value, "real = stored * scale, so calibrate it or pass 1.0");
}

// The same device everywhere, dtypes, layouts and shapes; b, s_q and h_q are then those of q_nope.
inline void check_decode(const DecodeArguments& a) {
  const TensorView& q = a.q_nope;
  if (q.dtype != DType::kE4M3 && q.dtype != DType::kBF16 && q.dtype != DType::kFP16)
    fail(q.name, "float8_e4m3fn, bfloat16 or float16", dtype_name(q.dtype), "convert it");
  check_dtype(a.q_pe, q.dtype, " as q_nope");
  check_dtype(a.kv_cache, q.dtype, " as q_nope");
  check_dtype(a.seq_lens, DType::kInt32, "");
  check_dtype(a.block_table, DType::kInt32, "");
  check_dtype(a.out, q.dtype == DType::kFP16 ? DType::kFP16 : DType::kBF16, "");
  check_dtype(a.lse, DType::kFP32, "");
  for (const TensorView* t : {a.q_scale, a.kv_scale})
    if (t) check_dtype(*t, DType::kFP32, "");

  for (const TensorView* t :
       {&a.q_pe, &a.kv_cache, &a.seq_lens, &a.block_table, &a.out, &a.lse, a.q_scale, a.kv_scale, a.workspace})
    if (t && (t->device_type != q.device_type || t->device_index != q.device_index))
      fail(t->name, "the device of q_nope", "another device", "move it");

  for (const TensorView* t : {&q, &a.q_pe, &a.kv_cache, &a.block_table, &a.out}) check_inner_stride(*t);
  check_written_layout(a.out);
  check_written_layout(a.lse);

  if (q.ndim != 4) fail(q.name, "shape [b, s_q, h_q, 512]", shape_string(q), "the wrapper adds s_q = 1");
  const int64_t b = q.size[0], s_q = q.size[1], h_q = q.size[2];
  if (s_q < 1 || s_q > kMaxQueryTokens) fail(q.name, "s_q from 1 to 8", s_q, "split the query tokens over calls");
  if (h_q < 1 || h_q > kMaxHeads) fail(q.name, "h_q from 1 to 128", h_q, "split the heads over calls");
  check_shape(q, {b, s_q, h_q, kDimNope}, "q_nope holds the 512 latent dims");
  check_shape(a.q_pe, {b, s_q, h_q, kDimRope}, "q_pe holds the 64 rotary dims of the same queries");
  if (a.kv_cache.ndim != 3)
    fail(a.kv_cache.name, "shape [num_blocks, page_size, 576]", shape_string(a.kv_cache), "view it so");
  const int64_t page = a.kv_cache.size[1];
  if (page < 1 || page > kMaxPageSize || (page & (page - 1)) != 0)
    fail(a.kv_cache.name, "page_size one of 1, 2, 4, 8, 16, 32, 64, 128, 256", page, "repack the cache");
  check_shape(a.kv_cache, {a.kv_cache.size[0], page, kDim}, "a row is 512 latent and 64 rotary dims");
  check_shape(a.seq_lens, {b}, "one length for each row of q_nope");
  if (a.block_table.ndim != 2)
    fail(a.block_table.name, "shape [b, max_blocks]", shape_string(a.block_table),
         "pass one table row for each row of q_nope");
  check_shape(a.block_table, {b, a.block_table.size[1]}, "one table row for each row of q_nope");
  check_shape(a.out, {b, s_q, h_q, kDimNope}, "allocate it so");
  check_shape(a.lse, {b, s_q, h_q}, "allocate it so");
  for (const TensorView* t : {a.q_scale, a.kv_scale}) {
    int64_t n = 1;
    for (int i = 0; t && i < t->ndim; ++i) n *= t->size[i];
    if (n != 1) fail(t->name, "one element", shape_string(*t), "one scale serves the whole tensor");
  }
  if (a.num_kv_splits < 0 || a.num_kv_splits > kMaxSplits)
    fail("num_kv_splits", "1 to 128, or None for the automatic plan", a.num_kv_splits,
         "a row never gets more splits than it has tiles of 64 tokens");
  check_scale("q_scale", a.q_scale_value);
  check_scale("kv_scale", a.kv_scale_value);
  if (!std::isfinite(a.sm_scale)) fail("sm_scale", "a finite number", a.sm_scale, "usually (192) ** -0.5");
}

}  // namespace mla
