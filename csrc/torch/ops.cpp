// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// The binding: torch's stable ABI in, the launchers' views out. The schemas are defined once in a process by
// mla_kernels/ops.py; this library only brings implementations, so that a newer build can be loaded over an older one.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../cpu/launch.h"
#include "mla/scheduler.h"
#include "view.h"

namespace {

using torch::stable::Tensor;

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
  const mla::Operands operands(q_nope, q_pe, kv_cache, seq_lens, block_table, sm_scale, q_scale, kv_scale,
                               q_scale_tensor, kv_scale_tensor, num_kv_splits, out, lse, workspace);
  mla::cpu::mla_decode(operands.a, torch_threads());
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
std::string compiled_targets() {
  std::string targets = "cpu";
#ifdef MLA_HAVE_SM100A
  targets += ",sm100a";
#endif
#ifdef MLA_HAVE_SM100F
  targets += ",sm100f";
#endif
#ifdef MLA_HAVE_SM90A
  targets += ",sm90a";
#endif
  return targets;
}
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
