// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// What the Blackwell target refuses, by name, before anything is launched; on top of mla/checks.h. No CUDA and no torch
// here, so that each refusal is tested on any machine. Some guards are for defects of the kernel of CUTLASS 4.2, and
// some keep its 32-bit offsets and the driver's rules for tensor maps.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

#include "mla/checks.h"
#include "plan.h"

namespace mla::sm100a {

inline constexpr int64_t kMostRows = 65535;                     // blockIdx.y
inline constexpr int64_t kMostBytes = (int64_t{1} << 40) - 16;  // stride of a tensor map
inline constexpr int64_t kMostInt = std::numeric_limits<int32_t>::max();

// TMA moves 16 bytes at a time. A stride of a dimension of size 1 is never used.
inline void check_tma_layout(const TensorView& t) {
  if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0)
    fail(t.name, "an address that is a multiple of 16 on compute capability 10.x", "another", "copy it");
  for (int i = 0; i + 1 < t.ndim; ++i) {
    const int64_t bytes = t.stride[i] * t.element_size;
    if (t.size[i] > 1 && (bytes % 16 != 0 || bytes <= 0 || bytes > kMostBytes))
      fail(t.name, "strides that are multiples of 16 bytes, above 0, on compute capability 10.x",
           text(t.stride[i], " elements of ", t.element_size, " bytes"), "pass .contiguous()");
  }
}

// `a` has passed check_decode() but for scales on the device; logit_scale = sm_scale * q_scale * kv_scale.
inline void check_call(const DecodeArguments& a, float logit_scale) {
  for (const TensorView* t : {a.q_scale, a.kv_scale})
    if (t && t->device_type != 0)
      fail(t->name, "a number or a CPU tensor on compute capability 10.x", "a tensor on the GPU",
           "CUTLASS's kernel takes scales by value at the launch");
  const int64_t b = a.q_nope.size[0], s_q = a.q_nope.size[1], page = a.kv_cache.size[1];
  if (s_q != 1)
    fail(a.q_nope.name, "s_q = 1 on compute capability 10.x", text("s_q = ", s_q), "call once for each query token");
  if (page != kTile)
    fail(a.kv_cache.name, "page_size 128 on compute capability 10.x", page,
         "repack the cache: with other pages CUTLASS 4.2 hands a stage over before its copy has landed");
  if (!(logit_scale > 0.f))
    fail("sm_scale", "sm_scale * q_scale * kv_scale above 0 in fp32 on a CUDA device", logit_scale,
         "negate the queries");
  if (b > kMostRows) fail(a.q_nope.name, text("b up to ", kMostRows), b, "split the batch over calls");
  check_tma_layout(a.q_nope);
  check_tma_layout(a.q_pe);
  check_tma_layout(a.kv_cache);
  if (a.kv_cache.size[0] > kMostInt)
    fail(a.kv_cache.name, text("num_blocks up to ", kMostInt), a.kv_cache.size[0], "use fewer pages");
  if (a.kv_cache.size[0] < 1 && a.block_table.size[1] > 0)
    fail(a.kv_cache.name, "at least one page", "none", "pass a block_table of width 0 for a batch without tokens");
  if (b > 1 && a.block_table.stride[0] > kMostInt / b)
    fail(a.block_table.name, text("b * stride(0) up to ", kMostInt, " on compute capability 10.x"),
         text(b, " * ", a.block_table.stride[0]), "pass .contiguous()");
  const int64_t splits = launch_splits(b, capacity_of(a.block_table.size[1]), static_cast<int>(a.num_kv_splits), 2);
  if (splits > 1 && splits * b > kMostInt / (kPaddedHeads * kDimNope))
    fail("num_kv_splits",
         text("b * num_kv_splits up to ", kMostInt / (kPaddedHeads * kDimNope), " on compute capability 10.x"),
         text(b, " * ", splits), "pin fewer splits");
}

// Whether the kernel may store its 128 heads straight into the caller's out and lse.
inline bool stores_directly(const TensorView& out, const TensorView& lse) {
  const int64_t b = out.size[0];
  return out.size[2] == kPaddedHeads && reinterpret_cast<uintptr_t>(out.data) % 16 == 0 && out.stride[2] > 0 &&
         out.stride[2] % 8 == 0 && (b == 1 || (out.stride[0] % 8 == 0 && out.stride[0] * 2 <= kMostBytes)) &&
         out.stride[2] * 2 <= kMostBytes && lse.stride[2] == 1 && (b == 1 || lse.stride[0] <= kMostInt / b);
}

// Runs something once for each device, not once for a process: a limit of shared memory that is set on one GPU says
// nothing on another one. What throws is tried again the next time.
class OncePerDevice {
 public:
  template <class Function>
  void operator()(int device, Function&& function) {
    const bool known = device >= 0 && device < kDevices;
    if (known && done_[device].load(std::memory_order_acquire)) return;
    function();
    if (known) done_[device].store(true, std::memory_order_release);
  }

 private:
  static constexpr int kDevices = 64;
  std::atomic<bool> done_[kDevices] = {};
};

}  // namespace mla::sm100a
