// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Torch tensors as the launchers' views.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "mla/checks.h"

namespace mla {

inline DType dtype_of(const torch::stable::Tensor& t) {
  using torch::headeronly::ScalarType;
  switch (t.scalar_type()) {
    case ScalarType::Float8_e4m3fn:
      return DType::kE4M3;
    case ScalarType::BFloat16:
      return DType::kBF16;
    case ScalarType::Half:
      return DType::kFP16;
    case ScalarType::Float:
      return DType::kFP32;
    case ScalarType::Int:
      return DType::kInt32;
    default:
      return DType::kOther;
  }
}

inline TensorView view(const char* name, const torch::stable::Tensor& t) {
  TensorView v{};
  v.name = name;
  v.ndim = static_cast<int>(t.dim());
  if (v.ndim > 4) fail(name, "at most 4 dimensions", v.ndim, "reshape it");
  v.data = t.data_ptr();
  v.dtype = dtype_of(t);
  v.device_type = t.is_cpu() ? 0 : 1;
  v.device_index = t.is_cpu() ? 0 : t.get_device_index();
  v.element_size = static_cast<int64_t>(t.element_size());
  for (int i = 0; i < v.ndim; ++i) {
    v.size[i] = t.size(i);
    v.stride[i] = t.stride(i);
  }
  return v;
}

// The arguments of torch.ops.mla_kernels.mla_decode_out as views. It keeps the views that `a` points to.
struct Operands {
  using Tensor = torch::stable::Tensor;

  Operands(const Tensor& q_nope, const Tensor& q_pe, const Tensor& kv_cache, const Tensor& seq_lens,
           const Tensor& block_table, double sm_scale, double q_scale, double kv_scale,
           const std::optional<Tensor>& q_scale_tensor, const std::optional<Tensor>& kv_scale_tensor,
           const std::optional<int64_t>& num_kv_splits, const Tensor& out, const Tensor& lse,
           const std::optional<Tensor>& workspace) {
    a.q_nope = view("q_nope", q_nope);
    a.q_pe = view("q_pe", q_pe);
    a.kv_cache = view("kv_cache", kv_cache);
    a.seq_lens = view("seq_lens", seq_lens);
    a.block_table = view("block_table", block_table);
    a.out = view("out", out);
    a.lse = view("lse", lse);
    if (q_scale_tensor) a.q_scale = &(views[0] = view("q_scale", *q_scale_tensor));
    if (kv_scale_tensor) a.kv_scale = &(views[1] = view("kv_scale", *kv_scale_tensor));
    if (workspace) a.workspace = &(views[2] = view("workspace", *workspace));
    a.sm_scale = sm_scale;
    a.q_scale_value = q_scale;
    a.kv_scale_value = kv_scale;
    a.num_kv_splits = num_kv_splits.value_or(0);
  }
  Operands(const Operands&) = delete;
  Operands& operator=(const Operands&) = delete;

  DecodeArguments a;
  TensorView views[3];
};

}  // namespace mla
