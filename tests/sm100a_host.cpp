// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// The host half of csrc/sm100a behind a C interface, for ctypes: plan, guards, merge, and the kernels of rows.cuh on
// the host. Compiled with tests/host_cuda in front of the include path.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "guards.h"
#include "rows.cuh"

namespace sm = mla::sm100a;

extern "C" {

void plan_rows(int64_t n, const int64_t* b, const int64_t* capacity, const int* pinned, const int* sms,
               const int64_t* seq_len, int* most, int* splits, int64_t* bytes) {
  for (int64_t i = 0; i < n; ++i) {
    const sm::Plan p = sm::make_plan(b[i], capacity[i], pinned[i], sms[i]);
    most[i] = p.most;
    splits[i] = sm::row_splits(seq_len[i], p.most);
    bytes[i] = static_cast<int64_t>(p.bytes);
  }
}

void plan_parts(int64_t b, int64_t capacity, int pinned, int sms, int64_t* parts) {
  const sm::Plan p = sm::make_plan(b, capacity, pinned, sms);
  const size_t all[] = {p.seq_lens, p.splits, p.out, p.lse, p.partial, p.bytes};
  std::copy(std::begin(all), std::end(all), parts);
}

int persistent(int most) { return sm::is_persistent(most); }
int capacity_of(int64_t max_blocks) { return sm::capacity_of(max_blocks); }
int slots(int sms) { return sm::cluster_slots(sms); }
float merged_lse(const float* lse, int n) { return sm::merged_lse(lse, n, 1); }
float merge_weight(float lse, float all) { return sm::merge_weight(lse, all); }

// Runs `n` calls on devices; the call numbered `fails` throws. How often the function ran.
int once(const int* devices, int n, int fails) {
  sm::OncePerDevice limit;
  int ran = 0;
  for (int i = 0; i < n; ++i) try {
      limit(devices[i], [&] {
        ++ran;
        if (i == fails) throw std::runtime_error("planted");
      });
    } catch (const std::runtime_error&) {
    }
  return ran;
}

struct View {
  int64_t address, dtype, device, ndim, size[4], stride[4], element_size;
};

static mla::TensorView view(const char* name, const View& v) {
  mla::TensorView t{};
  t.name = name;
  t.data = reinterpret_cast<void*>(v.address);
  t.dtype = static_cast<mla::DType>(v.dtype);
  t.device_type = static_cast<int>(v.device);
  t.ndim = static_cast<int>(v.ndim);
  std::copy(v.size, v.size + 4, t.size);
  std::copy(v.stride, v.stride + 4, t.stride);
  t.element_size = v.element_size;
  return t;
}

// Views in the order of the arguments, q_scale last (ndim −1: none). The message, empty if the call is taken.
const char* guard(const View* v, float logit_scale, int64_t num_kv_splits) {
  static std::string message;
  mla::DecodeArguments a;
  a.q_nope = view("q_nope", v[0]), a.q_pe = view("q_pe", v[1]), a.kv_cache = view("kv_cache", v[2]);
  a.seq_lens = view("seq_lens", v[3]), a.block_table = view("block_table", v[4]);
  a.out = view("out", v[5]), a.lse = view("lse", v[6]);
  const mla::TensorView scale = view("q_scale", v[7]);
  if (v[7].ndim >= 0) a.q_scale = &scale;
  a.num_kv_splits = num_kv_splits;
  message.clear();
  try {
    sm::check_call(a, logit_scale);
  } catch (const mla::Error& error) {
    message = error.what();
  }
  return message.c_str();
}

int direct(const View* out, const View* lse) { return sm::stores_directly(view("out", *out), view("lse", *lse)); }

}  // extern "C"

namespace {

template <class Function>
void cta(Function kernel) {
  std::barrier barrier(sm::kThreads);
  host_barrier = &barrier;
  std::vector<std::thread> threads;
  for (int i = 0; i < sm::kThreads; ++i)
    threads.emplace_back([&, i] {
      threadIdx = {i, 0, 0};
      kernel();
      barrier.arrive_and_drop();
    });
  for (auto& t : threads) t.join();
}

}  // namespace

struct Rows {
  int64_t b, h_q, most, capacity, fp16, direct;
  const int32_t* seq_lens;
  int64_t seq_lens_stride;
  uint16_t* out;
  int64_t out_stride[3];
  float* lse;
  int64_t lse_stride[3];
  int32_t *lengths, *splits;
  uint16_t* padded_out;
  float *padded_lse, *partial;
};

// step 0: prepare, 1: finish.
extern "C" void rows(const Rows* r, int step) {
  sm::KernelCall c{};
  c.d.b = static_cast<int>(r->b), c.d.h_q = static_cast<int>(r->h_q);
  c.d.seq_lens = r->seq_lens, c.d.seq_lens_stride = r->seq_lens_stride;
  c.d.out = r->out, c.d.lse = r->lse;
  std::copy(r->out_stride, r->out_stride + 3, c.d.out_stride);
  std::copy(r->lse_stride, r->lse_stride + 3, c.d.lse_stride);
  c.plan.b = c.d.b, c.plan.most = static_cast<int>(r->most), c.plan.capacity = static_cast<int32_t>(r->capacity);
  c.seq_lens = r->lengths, c.splits = r->splits;
  c.direct = r->direct;
  c.out = r->padded_out, c.out_stride[0] = int64_t{sm::kPaddedHeads} * mla::kDimNope, c.out_stride[1] = mla::kDimNope;
  c.lse = r->padded_lse, c.lse_stride = sm::kPaddedHeads;
  c.partial = r->partial;
  for (blockIdx.x = 0; blockIdx.x < c.d.b; ++blockIdx.x) {
    blockIdx.y = 0;
    if (step == 0) {
      cta([&] { sm::prepare_kernel(c); });
      continue;
    }
    for (; blockIdx.y < c.d.h_q; ++blockIdx.y)
      cta([&] { r->fp16 ? sm::finish_kernel<__half>(c) : sm::finish_kernel<__nv_bfloat16>(c); });
  }
}
