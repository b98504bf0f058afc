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

// Code for sm_90a runs on 9.0 and on nothing else, later ones included.
void check_capability(int device) {
  int major = 0, minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  if (major != 9 || minor != 0)
    mla::fail("q_nope", "a device of compute capability 9.0, or the CPU",
              mla::text("compute capability ", major, ".", minor), "move the tensors to the CPU");
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
  check_capability(device);
  mla::sm90a::DeviceScales scales;
  scales.q_scale = device_scale(a.q_scale, a.q_scale_value);
  scales.kv_scale = device_scale(a.kv_scale, a.kv_scale_value);
  mla::check_decode(a);
  if (a.q_nope.dtype != mla::DType::kE4M3)
    mla::fail("q_nope", "float8_e4m3fn on a CUDA device", mla::dtype_name(a.q_nope.dtype),
              "encode it, or move the tensors to the CPU");
  const mla::DecodeParams p =
      mla::make_params(a, static_cast<float>(a.q_scale_value), static_cast<float>(a.kv_scale_value));
  if (!(p.logit_scale > 0.0f))
    mla::fail("sm_scale", "sm_scale * q_scale * kv_scale above 0 in fp32 on a CUDA device", p.logit_scale,
              "negate the queries");
  const auto bytes = static_cast<int64_t>(mla::sm90a::workspace_bytes(p));
  void* space = nullptr;
  std::optional<Tensor> own;  // torch's allocator keeps it for this stream until the kernels have run
  if (a.workspace) {
    mla::check_workspace(*a.workspace, bytes, kWorkspaceAlignment);
    space = a.workspace->data;
  } else if (bytes > 0) {
    own = torch::stable::new_empty(q_nope, {bytes}, torch::headeronly::ScalarType::Byte);
    space = own->data_ptr();
  }
  mla::sm90a::launch(p, space, current_stream(device), scales);
}

int64_t cuda_workspace_size(int64_t b, int64_t s_q, int64_t h_q, int64_t capacity,
                            std::optional<int64_t> num_kv_splits) {
  mla::DecodeParams p{};
  p.b = static_cast<int>(b);
  p.s_q = static_cast<int>(s_q);
  p.h_q = static_cast<int>(h_q);
  p.max_blocks = capacity;  // of one token each
  p.num_kv_splits = static_cast<int>(num_kv_splits.value_or(0));
  return static_cast<int64_t>(mla::sm90a::workspace_bytes(p));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mla_kernels, CUDA, m) { m.impl("mla_decode_out", TORCH_BOX(&mla_decode_out)); }

STABLE_TORCH_LIBRARY_IMPL(mla_kernels, CompositeExplicitAutograd, m) {
  m.impl("cuda_workspace_size", TORCH_BOX(&cuda_workspace_size));
}
