// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Host side: refuses what cannot run, builds the tensor maps, picks the instantiation.
#include "launch.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "check_cuda.h"
#include "launch_parts.h"
#include "mla/scheduler.h"

namespace mla::sm90a {
namespace {

constexpr size_t kAlign = 256;

size_t align_up(size_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

int capacity(const DecodeParams& d) {
  const int64_t tokens = d.max_blocks << d.page_size_log2;
  return static_cast<int>(std::min<int64_t>(tokens, std::numeric_limits<int32_t>::max() - kBlockN));
}

struct Plan {
  int lines, max_splits, capacity;
  size_t partial_o_bytes, partial_lse_bytes;
};

Plan plan(const DecodeParams& d) {
  Plan x{};
  x.lines = d.s_q * d.h_q;
  x.capacity = capacity(d);
  x.max_splits = num_splits(x.capacity, d.num_kv_splits);
  if (x.max_splits > 1) {
    const size_t partials = static_cast<size_t>(d.b) * x.max_splits * x.lines;
    x.partial_o_bytes = align_up(partials * kDimNope * sizeof(float));
    x.partial_lse_bytes = align_up(partials * sizeof(float2));
  }
  return x;
}

[[noreturn]] void refuse(const std::string& what, const std::string& expected, const std::string& got) {
  throw std::invalid_argument(what + ": the sm90a kernel expects " + expected + ", got " + got);
}

void check(const DecodeParams& d) {
  if (d.dtype != DType::kE4M3)
    refuse("q_nope, q_pe, kv_cache", "dtype e4m3 (bf16 and fp16 run on the cpu target)", "another dtype");
  int device = 0, major = 0, minor = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  if (major != 9 || minor != 0)
    refuse("device", "compute capability 9.0", std::to_string(major) + "." + std::to_string(minor));
  if (!(d.logit_scale > 0.f) || !std::isfinite(d.logit_scale))
    refuse("sm_scale * q_scale * kv_scale", "a positive finite number", std::to_string(d.logit_scale));
  if (reinterpret_cast<uintptr_t>(d.kv_cache) % 16 != 0)
    refuse("kv_cache", "an address that is a multiple of 16", "another one; copy it");
  if (d.kv_page_stride % 16 != 0 || d.kv_token_stride % 16 != 0)
    refuse("kv_cache", "page and token strides that are multiples of 16 elements",
           std::to_string(d.kv_page_stride) + " and " + std::to_string(d.kv_token_stride));
  if (reinterpret_cast<uintptr_t>(d.out) % 4 != 0 || d.out_stride[0] % 2 != 0 || d.out_stride[1] % 2 != 0 ||
      d.out_stride[2] % 2 != 0)
    refuse("out", "an address that is a multiple of 4 and even strides", "others");
}

bool q_aligned(const DecodeParams& d) {
  int64_t all = static_cast<int64_t>(reinterpret_cast<uintptr_t>(d.q_nope) | reinterpret_cast<uintptr_t>(d.q_pe));
  for (int i = 0; i < 3; ++i) all |= d.q_nope_stride[i] | d.q_pe_stride[i];
  return all % 16 == 0;
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Through the runtime, so that the library needs no libcuda to load.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult status{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &status),
               "cudaGetDriverEntryPointByVersion");
    if (status != cudaDriverEntryPointSuccess || f == nullptr)
      throw std::runtime_error("the driver has no cuTensorMapEncodeTiled: it is older than CUDA 12.0");
    return reinterpret_cast<EncodeTiled>(f);
  }();
  return function;
}

template <int kRank>
void encode(CUtensorMap* map, const char* name, const void* address, const cuuint64_t (&size)[kRank],
            const cuuint64_t (&stride)[kRank - 1], const cuuint32_t (&box)[kRank], CUtensorMapSwizzle swizzle) {
  cuuint32_t ones[kRank];
  for (auto& x : ones) x = 1;
  const CUresult r = encode_tiled()(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, kRank, const_cast<void*>(address), size, stride,
                                    box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r != CUDA_SUCCESS)
    throw std::invalid_argument(std::string("kv_cache: the driver refuses a tensor map of its ") + name +
                                " part, CUresult " + std::to_string(static_cast<int>(r)));
}

void encode_cache(KernelParams& p) {
  const DecodeParams& d = p.d;
  const auto pages = static_cast<cuuint64_t>(d.num_blocks), tokens = cuuint64_t{1} << d.page_size_log2;
  const auto page = static_cast<cuuint64_t>(d.kv_page_stride), token = static_cast<cuuint64_t>(d.kv_token_stride);
  encode<4>(&p.kv_nope, "nope", d.kv_cache, {kChunkBytes, tokens, kChunks, pages}, {token, kChunkBytes, page},
            {kChunkBytes, kBlockN, kChunks, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  encode<3>(&p.kv_rope, "rope", static_cast<const uint8_t*>(d.kv_cache) + kDimNope, {kDimRope, tokens, pages},
            {token, page}, {kDimRope, kBlockN, 1}, CU_TENSOR_MAP_SWIZZLE_64B);
}

template <int N>
void decode(const KernelParams& p, bool tma, int ctas, cudaStream_t stream) {
  tma ? launch_decode<N, true>(p, ctas, stream) : launch_decode<N, false>(p, ctas, stream);
}

}  // namespace

size_t workspace_bytes(const DecodeParams& params) {
  const Plan x = plan(params);
  return x.partial_o_bytes + x.partial_lse_bytes;
}

void launch(const DecodeParams& params, void* workspace, cudaStream_t stream, const DeviceScales& scales) {
  if (params.b == 0 || params.s_q * params.h_q == 0) return;
  check(params);
  const Plan x = plan(params);
  if (x.partial_o_bytes > 0 && (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % kAlign != 0))
    refuse("workspace", std::to_string(workspace_bytes(params)) + " bytes aligned to 256",
           "none, or another alignment");

  KernelParams p{};
  p.d = params;
  p.q_scale = scales.q_scale;
  p.kv_scale = scales.kv_scale;
  p.partial_o = static_cast<float*>(workspace);
  p.partial_lse = reinterpret_cast<float2*>(static_cast<uint8_t*>(workspace) + x.partial_o_bytes);
  p.lines = x.lines;
  p.max_splits = x.max_splits;
  p.capacity = x.capacity;
  p.q_aligned = q_aligned(params);
  const int n = x.lines <= 16 ? 16 : x.lines <= 32 ? 32 : 64;
  p.line_tiles = (x.lines + n - 1) / n;
  const bool tma = (1 << params.page_size_log2) >= kMinTmaPage && params.num_blocks > 0;
  if (tma) encode_cache(p);

  int device = 0, sms = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  const int64_t most = static_cast<int64_t>(params.b) * std::max(x.max_splits, 1) * p.line_tiles;
  const int ctas = static_cast<int>(std::min<int64_t>(most, sms));
  switch (n) {
    case 16:
      decode<16>(p, tma, ctas, stream);
      break;
    case 32:
      decode<32>(p, tma, ctas, stream);
      break;
    default:
      decode<64>(p, tma, ctas, stream);
  }
  if (x.max_splits > 1) launch_combine(p, stream);
}

}  // namespace mla::sm90a
