// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// The CPU launcher: checks, picks an instruction set, and cuts a call into work items (batch row, group of up to 64
// query rows, split) that threads take from one queue. Which thread computes an item never matters.
//
// Rows of one split write their output directly. The others write fp32 partials into the workspace, and since that is
// bounded, they run in waves: as many units (row, group) as fit, all their splits, then their combine.
#include "launch.h"

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "kernel.h"
#include "mla/make_params.h"
#include "mla/scheduler.h"

#if defined(MLA_HAVE_X86_KERNELS)
#include <cpuid.h>
#endif

namespace mla::cpu {
namespace {

constexpr int64_t kWorkspaceBudget = int64_t{24} << 20;
constexpr int kCombineRows = 8;  // query rows of a combine item

int group_rows(int64_t rows) { return static_cast<int>(rows < kGroupRows ? rows : kGroupRows); }

struct AlignedDelete {
  void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
};
using AlignedFloats = std::unique_ptr<float[], AlignedDelete>;

AlignedFloats aligned_floats(int64_t n) {
  return AlignedFloats(
      static_cast<float*>(::operator new[](static_cast<size_t>(n) * sizeof(float), std::align_val_t{64})));
}

float* thread_scratch() {
  thread_local AlignedFloats scratch = aligned_floats(kScratchFloats);
  return scratch.get();
}

// Runs body(i) for i in [0, n), items taken from a shared counter; the first exception of any thread comes out.
template <class Body>
void for_each_item(int64_t n, const Parallel& parallel, const Body& body) {
  struct Queue {
    const Body& body;
    int64_t n;
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::exception_ptr error;
  } queue{body, n, {}, {}, {}};
  const auto drain = [](void* ctx) {
    Queue& q = *static_cast<Queue*>(ctx);
    try {
      for (int64_t i; (i = q.next.fetch_add(1, std::memory_order_relaxed)) < q.n;) q.body(i);
    } catch (...) {
      q.next.store(q.n);
      const std::lock_guard<std::mutex> hold(q.mutex);
      if (!q.error) q.error = std::current_exception();
    }
  };
  if (n > 1 && parallel.threads > 1) {
    parallel.run(n < parallel.threads ? n : parallel.threads, drain, &queue);
  } else {
    drain(&queue);
  }
  if (queue.error) std::rethrow_exception(queue.error);
}

float read_scale(const TensorView* t, double value) {
  if (!t) return static_cast<float>(value);
  const float stored = *static_cast<const float*>(t->data);
  check_scale(t->name, stored);
  return stored;
}

// Scales are numbers here: a tensor's element is read.
DecodeParams params_of(const DecodeArguments& a) {
  if (a.q_nope.dtype != DType::kE4M3) return make_params(a, 1.0f, 1.0f);
  const float q_scale = read_scale(a.q_scale, a.q_scale_value);
  return make_params(a, q_scale, read_scale(a.kv_scale, a.kv_scale_value));
}

// Lengths and page ids: the values that decide which memory is read.
void check_values(const DecodeParams& p) {
  const int64_t capacity = p.max_blocks << p.page_size_log2;
  const int64_t page_size = int64_t{1} << p.page_size_log2;
  for (int64_t row = 0; row < p.b; ++row) {
    const int64_t len = p.seq_lens[row * p.seq_lens_stride];
    if (len < 0) fail(text("seq_lens[", row, "]"), "0 or more", len, "a row without tokens has length 0");
    if (len > capacity)
      fail(text("seq_lens[", row, "]"), text("at most max_blocks * page_size = ", capacity), len, "widen block_table");
    const int32_t* table = p.block_table + row * p.block_table_stride;
    for (int64_t i = 0; i < ceil_div(len, page_size); ++i)
      if (table[i] < 0 || table[i] >= p.num_blocks)
        fail(text("block_table[", row, ", ", i, "]"), text("a page id from 0 to ", p.num_blocks - 1), table[i],
             text("seq_lens[", row, "] = ", len, " needs this page"));
  }
}

void write_empty_row(const DecodeParams& p, int row) {
  for (int s = 0; s < p.s_q; ++s)
    for (int h = 0; h < p.h_q; ++h) {
      uint16_t* out = static_cast<uint16_t*>(p.out) + row * p.out_stride[0] + s * p.out_stride[1] + h * p.out_stride[2];
      for (int d = 0; d < kDimNope; ++d) out[d] = 0;  // +0 in bf16 and in fp16
      p.lse[row * p.lse_stride[0] + s * p.lse_stride[1] + h * p.lse_stride[2]] = -HUGE_VALF;
    }
}

struct NamedKernels {
  const Kernels* kernels;
  bool available;
};

std::vector<NamedKernels> all_kernels() {
  std::vector<NamedKernels> all{{&kernels_generic(), true}};
#if defined(MLA_HAVE_X86_KERNELS)
  // F16C by hand: Clang's builtin does not know the name. That the system saves the registers, "avx2" has checked.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  all.push_back({&kernels_avx2(), avx2});
  all.push_back({&kernels_avx512(), avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")});
#endif
  return all;
}

const Kernels* best_kernels() {
  const Kernels* best = nullptr;
  for (const NamedKernels& k : all_kernels())
    if (k.available) best = k.kernels;
  return best;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{best_kernels()};
  return kernels;
}

}  // namespace

const char* isa() { return chosen().load()->isa; }

std::string available_isas() {
  std::string names;
  for (const NamedKernels& k : all_kernels())
    if (k.available) names.append(names.empty() ? "" : ",").append(k.kernels->isa);
  return names;
}

void set_isa(const std::string& name) {
  const Kernels* found = name == "auto" ? best_kernels() : nullptr;
  for (const NamedKernels& k : all_kernels())
    if (k.available && name == k.kernels->isa) found = k.kernels;
  if (!found) fail("isa", text("auto or one of ", available_isas()), name, "this processor has no other");
  chosen().store(found);
}

int64_t workspace_size(int64_t b, int64_t s_q, int64_t h_q, int64_t capacity, int64_t num_kv_splits) {
  const int n_splits = num_splits(capacity, static_cast<int>(num_kv_splits));
  if (n_splits <= 1 || b == 0) return 0;
  const int64_t unit = partial_floats(group_rows(s_q * h_q), n_splits) * static_cast<int64_t>(sizeof(float));
  const int64_t units = b * ceil_div(s_q * h_q, kGroupRows);
  const int64_t fit = kWorkspaceBudget / unit > 1 ? kWorkspaceBudget / unit : 1;
  return (units < fit ? units : fit) * unit;
}

void mla_decode(const DecodeArguments& a, const Parallel& parallel) {
  check_decode(a);
  const DecodeParams p = params_of(a);
  const int64_t capacity = p.max_blocks << p.page_size_log2;
  const int64_t bytes = workspace_size(p.b, p.s_q, p.h_q, capacity, p.num_kv_splits);
  if (a.workspace) check_workspace(*a.workspace, bytes, sizeof(float));
  check_values(p);

  AlignedFloats own;
  float* workspace = a.workspace ? static_cast<float*>(a.workspace->data) : nullptr;
  if (!workspace && bytes > 0) workspace = (own = aligned_floats(bytes / static_cast<int64_t>(sizeof(float)))).get();

  const Kernels& kernels = *chosen().load();
  const int rows = p.s_q * p.h_q;
  std::vector<Item> items, units;
  int64_t used = 0;
  const auto run_wave = [&] {
    for_each_item(static_cast<int64_t>(items.size()), parallel,
                  [&](int64_t i) { kernels.run(p, items[i], thread_scratch()); });
    constexpr int64_t kParts = kGroupRows / kCombineRows;
    for_each_item(static_cast<int64_t>(units.size()) * kParts, parallel, [&](int64_t i) {
      const Item& unit = units[i / kParts];
      const int begin = static_cast<int>(i % kParts) * kCombineRows;
      const int end = begin + kCombineRows < unit.q_rows ? begin + kCombineRows : unit.q_rows;
      kernels.combine(p, unit, begin, end);
    });
    items.clear();
    units.clear();
    used = 0;
  };
  for (int row = 0; row < p.b; ++row) {
    const int n_splits = num_splits(p.seq_lens[row * p.seq_lens_stride], p.num_kv_splits);
    if (n_splits == 0) {
      write_empty_row(p, row);
      continue;
    }
    for (int begin = 0; begin < rows; begin += kGroupRows) {
      Item item{row, begin, group_rows(rows - begin), 0, n_splits, nullptr};
      if (n_splits > 1) {
        const int64_t need = partial_floats(item.q_rows, n_splits);
        if ((used + need) * static_cast<int64_t>(sizeof(float)) > bytes) run_wave();
        item.partial = workspace + used;
        used += need;
        units.push_back(item);
      }
      for (item.split = 0; item.split < n_splits; ++item.split) items.push_back(item);
    }
  }
  run_wave();
}

}  // namespace mla::cpu
