// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// The binding: torch's stable ABI in, the launchers' views out. The schemas are defined once in a process by
// mla_kernels/ops.py; this library only brings implementations, so that a newer build can be loaded over an older one.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../cpu/launch.h"
#include "mla/scheduler.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

mla::DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float8_e4m3fn:
      return mla::DType::kE4M3;
    case ScalarType::BFloat16:
      return mla::DType::kBF16;
    case ScalarType::Half:
      return mla::DType::kFP16;
    case ScalarType::Float:
      return mla::DType::kFP32;
    case ScalarType::Int:
      return mla::DType::kInt32;
    default:
      return mla::DType::kOther;
  }
}

mla::TensorView view(const char* name, const Tensor& t) {
  mla::TensorView v{};
  v.name = name;
  v.ndim = static_cast<int>(t.dim());
  if (v.ndim > 4) mla::fail(name, "at most 4 dimensions", v.ndim, "reshape it");
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

void run_on_torch_threads(int64_t n, void (*body)(void*), void* ctx) {
  struct Call {
    void (*body)(void*);
    void* ctx;
  } call{body, ctx};
  const auto once = [](int64_t, int64_t, void* c) { static_cast<Call*>(c)->body(static_cast<Call*>(c)->ctx); };
  if (torch_parallel_for(0, n, 1, once, &call) != 0) throw std::runtime_error("mla_decode: torch_parallel_for failed");
}

mla::cpu::Parallel torch_threads() {
  uint32_t n = 1;
  if (torch_get_num_threads(&n) != 0) throw std::runtime_error("mla_decode: torch_get_num_threads failed");
  return {run_on_torch_threads, static_cast<int>(n)};
}

void mla_decode_out(Tensor q_nope, Tensor q_pe, Tensor kv_cache, Tensor seq_lens, Tensor block_table, double sm_scale,
                    double q_scale, double kv_scale, std::optional<Tensor> q_scale_tensor,
                    std::optional<Tensor> kv_scale_tensor, std::optional<int64_t> num_kv_splits, Tensor out, Tensor lse,
                    std::optional<Tensor> workspace) {
  mla::DecodeArguments a;
  a.q_nope = view("q_nope", q_nope);
  a.q_pe = view("q_pe", q_pe);
  a.kv_cache = view("kv_cache", kv_cache);
  a.seq_lens = view("seq_lens", seq_lens);
  a.block_table = view("block_table", block_table);
  a.out = view("out", out);
  a.lse = view("lse", lse);
  mla::TensorView views[3];
  if (q_scale_tensor) a.q_scale = &(views[0] = view("q_scale", *q_scale_tensor));
  if (kv_scale_tensor) a.kv_scale = &(views[1] = view("kv_scale", *kv_scale_tensor));
  if (workspace) a.workspace = &(views[2] = view("workspace", *workspace));
  a.sm_scale = sm_scale;
  a.q_scale_value = q_scale;
  a.kv_scale_value = kv_scale;
  a.num_kv_splits = num_kv_splits.value_or(0);
  mla::cpu::mla_decode(a, torch_threads());
}

int64_t cpu_workspace_size(int64_t b, int64_t s_q, int64_t h_q, int64_t capacity,
                           std::optional<int64_t> num_kv_splits) {
  return mla::cpu::workspace_size(b, s_q, h_q, capacity, num_kv_splits.value_or(0));
}

// Token boundaries of a row's splits: 0 ... seq_len.
std::vector<int64_t> split_plan(int64_t seq_len, std::optional<int64_t> num_kv_splits) {
  const int n = mla::num_splits(seq_len, static_cast<int>(num_kv_splits.value_or(0)));
  std::vector<int64_t> bounds{0};
  for (int i = 1; i <= n; ++i) bounds.push_back(mla::split_begin(seq_len, n, i));
  return bounds;
}

std::string build_key() { return MLA_BUILD_KEY; }
std::string compiled_targets() { return "cpu"; }
std::string cpu_isa() { return mla::cpu::isa(); }
std::string available_cpu_isas() { return mla::cpu::available_isas(); }
void set_cpu_isa(std::string name) { mla::cpu::set_isa(name); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mla_kernels, CPU, m) { m.impl("mla_decode_out", TORCH_BOX(&mla_decode_out)); }

STABLE_TORCH_LIBRARY_IMPL(mla_kernels, CompositeExplicitAutograd, m) {
  m.impl("build_key", TORCH_BOX(&build_key));
  m.impl("compiled_targets", TORCH_BOX(&compiled_targets));
  m.impl("split_plan", TORCH_BOX(&split_plan));
  m.impl("cpu_workspace_size", TORCH_BOX(&cpu_workspace_size));
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("available_cpu_isas", TORCH_BOX(&available_cpu_isas));
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
}
