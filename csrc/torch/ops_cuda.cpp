// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// The binding of the CUDA targets. It uses torch's stable ABI like ops.cpp, and one more symbol, the current stream.
// That one lives in libtorch_cuda, which this library must not name, or it would not load under a CPU build of torch.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "../sm100a/guards.h"
#include "../sm100a/launch.h"
#include "../sm90a/check_cuda.h"
#include "../sm90a/launch.h"
#include "mla/make_params.h"
#include "view.h"

namespace {

using mla::sm90a::check_cuda;
using torch::stable::Tensor;

constexpr int64_t kWorkspaceAlignment = 256;

// Makes a device the current one, and the one from before again.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    changed_ = device != before_;
    if (changed_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// A weak reference would not do: torch loads its libraries locally, so it would be null there.
cudaStream_t current_stream(int device) {
  using Function = int32_t (*)(int32_t, void**);
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    void* found = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    if (!found) throw std::runtime_error("mla_decode: this torch has no aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<Function>(found);
  }();
  void* stream = nullptr;
  if (function(device, &stream) != 0) throw std::runtime_error("mla_decode: aoti_torch_get_current_cuda_stream failed");
  return static_cast<cudaStream_t>(stream);
}

enum class Target { kSm90a, kSm100a };

// Code for sm_90a runs on 9.0 and on nothing else, later ones included; code for sm_100a likewise on 10.0.
std::optional<Target> target_of(int major, int minor) {
#ifdef MLA_HAVE_SM90A
  if (major == 9 && minor == 0) return Target::kSm90a;
#endif
#ifdef MLA_HAVE_SM100
  if (mla::sm100a::runs_on(major, minor)) return Target::kSm100a;
#endif
  return {};
}

std::optional<Target> target_of(int device, int* major, int* minor) {
  check_cuda(cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  return target_of(*major, *minor);
}

Target check_capability(int device) {
  int major = 0, minor = 0;
  const std::optional<Target> target = target_of(device, &major, &minor);
  if (!target)
    mla::fail("q_nope",
              mla::text("a device of compute capability ", target_of(9, 0) ? "9.0, " : "",
                        target_of(10, 0) ? "10.0, " : "", target_of(10, 3) ? "10.3, " : "", "or the CPU"),
              mla::text("compute capability ", major, ".", minor), "move the tensors to the CPU");
  return *target;
}

// An element on the GPU stays there, for the kernel to read when it runs. One on the CPU is a number, read now.
const float* device_scale(const mla::TensorView*& scale, double& value) {
  if (!scale) return nullptr;
  mla::check_dtype(*scale, mla::DType::kFP32, "");
  if (scale->device_type != 0) {
    value = 1.0;
    return static_cast<const float*>(scale->data);
  }
  for (int i = 0; i < scale->ndim; ++i)
    if (scale->size[i] != 1)
      mla::fail(scale->name, "one element", mla::shape_string(*scale), "one scale serves the whole tensor");
  value = *static_cast<const float*>(scale->data);
  scale = nullptr;
  return nullptr;
}

// Memory that the caller brought, or torch's: its allocator keeps it for this stream until the kernels have run.
void* workspace_of(const mla::DecodeArguments& a, int64_t bytes, const Tensor& q_nope, std::optional<Tensor>& own) {
  if (a.workspace) {
    mla::check_workspace(*a.workspace, bytes, kWorkspaceAlignment);
    return a.workspace->data;
  }
  if (bytes == 0) return nullptr;
  own = torch::stable::new_empty(q_nope, {bytes}, torch::headeronly::ScalarType::Byte);
  return own->data_ptr();
}

#ifdef MLA_HAVE_SM100
void decode_sm100a(const mla::DecodeArguments& a, const Tensor& q_nope, int device) {
  const mla::DecodeParams p =
      mla::make_params(a, static_cast<float>(a.q_scale_value), static_cast<float>(a.kv_scale_value));
  mla::sm100a::check_call(a, p.logit_scale);
  const mla::sm100a::Plan plan = mla::sm100a::make_plan(p.b, mla::sm100a::capacity_of(p.max_blocks), p.num_kv_splits,
                                                        mla::sm100a::sm_count(device));
  std::optional<Tensor> own;
  void* space = workspace_of(a, static_cast<int64_t>(plan.bytes), q_nope, own);
  mla::sm100a::launch(a, p, plan, space, device, current_stream(device));
}
#endif

void mla_decode_out(Tensor q_nope, Tensor q_pe, Tensor kv_cache, Tensor seq_lens, Tensor block_table, double sm_scale,
                    double q_scale, double kv_scale, std::optional<Tensor> q_scale_tensor,
                    std::optional<Tensor> kv_scale_tensor, std::optional<int64_t> num_kv_splits, Tensor out, Tensor lse,
                    std::optional<Tensor> workspace) {
  mla::Operands operands(q_nope, q_pe, kv_cache, seq_lens, block_table, sm_scale, q_scale, kv_scale, q_scale_tensor,
                         kv_scale_tensor, num_kv_splits, out, lse, workspace);
  mla::DecodeArguments& a = operands.a;
  if (a.q_nope.device_type == 0) mla::fail("q_nope", "a CUDA tensor, as others are", "a CPU tensor", "move it");
  const int device = a.q_nope.device_index;
  const DeviceGuard guard(device);
  const Target target = check_capability(device);
  mla::sm90a::DeviceScales scales;
  scales.q_scale = device_scale(a.q_scale, a.q_scale_value);
  scales.kv_scale = device_scale(a.kv_scale, a.kv_scale_value);
  mla::check_decode(a);
#ifdef MLA_HAVE_SM100
  if (target == Target::kSm100a) decode_sm100a(a, q_nope, device);
#endif
  if (target != Target::kSm90a) return;
#ifdef MLA_HAVE_SM90A
  const mla::DecodeParams p =
      mla::make_params(a, static_cast<float>(a.q_scale_value), static_cast<float>(a.kv_scale_value));
  if (!(p.logit_scale > 0.0f))
    mla::fail("sm_scale", "sm_scale * q_scale * kv_scale above 0 in fp32 on a CUDA device", p.logit_scale,
              "negate the queries");
  const auto bytes = static_cast<int64_t>(mla::sm90a::workspace_bytes(p));
  std::optional<Tensor> own;
  void* space = workspace_of(a, bytes, q_nope, own);
  mla::sm90a::launch(p, space, current_stream(device), scales);
#endif
}

int64_t cuda_workspace_size(int64_t b, [[maybe_unused]] int64_t s_q, [[maybe_unused]] int64_t h_q, int64_t capacity,
                            std::optional<int64_t> num_kv_splits) {
  int64_t bytes = 0;
#ifdef MLA_HAVE_SM90A
  mla::DecodeParams p{};
  p.b = static_cast<int>(b);
  p.s_q = static_cast<int>(s_q);
  p.h_q = static_cast<int>(h_q);
  p.max_blocks = capacity;  // of one token each
  p.num_kv_splits = static_cast<int>(num_kv_splits.value_or(0));
  bytes = static_cast<int64_t>(mla::sm90a::workspace_bytes(p));
#endif
#ifdef MLA_HAVE_SM100
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0, static_cast<void>(cudaGetLastError());
  for (int device = 0; device < devices; ++device) {  // enough for each device here
    int major = 0, minor = 0;
    if (target_of(device, &major, &minor) != Target::kSm100a) continue;
    const auto own = static_cast<int64_t>(
        mla::sm100a::make_plan(b, capacity, static_cast<int>(num_kv_splits.value_or(0)), mla::sm100a::sm_count(device))
            .bytes);
    if (own > bytes) bytes = own;
  }
#endif
  return bytes;
}

// The share, in tiles of 64 tokens, of the automatic plan of sm90a for a batch, or 0; see sm90a/plan.h.
int64_t cuda_plan_share([[maybe_unused]] std::vector<int64_t> seq_lens, [[maybe_unused]] int64_t lines,
                        [[maybe_unused]] bool wide, [[maybe_unused]] bool gathered, [[maybe_unused]] int64_t sms) {
#ifdef MLA_HAVE_SM90A
  return mla::sm90a::plan_share(seq_lens, static_cast<int>(lines), wide, gathered, static_cast<int>(sms));
#else
  throw std::runtime_error("cuda_plan_share: this build has no target sm90a");
#endif
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mla_kernels, CUDA, m) { m.impl("mla_decode_out", TORCH_BOX(&mla_decode_out)); }

STABLE_TORCH_LIBRARY_IMPL(mla_kernels, CompositeExplicitAutograd, m) {
  m.impl("cuda_workspace_size", TORCH_BOX(&cuda_workspace_size));
  m.impl("cuda_plan_share", TORCH_BOX(&cuda_plan_share));
}
