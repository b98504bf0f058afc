// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Host side: refuses what cannot run, builds the tensor maps, picks the instantiation.
#include "launch.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "check_cuda.h"
#include "launch_parts.h"
#include "launch_parts16.h"
#include "plan.h"

namespace mla::sm90a {
namespace {

constexpr size_t kAlign = 256;

size_t align_up(size_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

int capacity(const DecodeParams& d) {
  const int64_t tokens = d.max_blocks << d.page_size_log2;
  return static_cast<int>(std::min<int64_t>(tokens, std::numeric_limits<int32_t>::max() - kBlockN));
}

int64_t element_bytes(const DecodeParams& d) { return d.dtype == DType::kE4M3 ? 1 : 2; }
bool wide(const DecodeParams& d) { return d.dtype != DType::kE4M3; }

// Whether one SM is left to a CTA that rehearses (work.cuh): for e4m3, in a small batch.
bool rehearses(int64_t b, int line_tiles, bool wide, int sms) { return !wide && sms > 1 && b * line_tiles <= sms / 2; }

// What a batch is planned for on a device with `sms` SMs.
Machine machine_of(int64_t b, int lines, bool wide, bool gathered, int sms) {
  const int n = lines_a_tile(lines, wide, gathered), line_tiles = (lines + n - 1) / n;
  return machine(std::min(sms, kMostCtas) - rehearses(b, line_tiles, wide, sms), line_tiles, n, wide);
}

// Where things lie in the workspace; bytes is 0 where no row can have two splits.
struct Layout {
  int lines, capacity;
  int64_t slots;
  size_t row_plan, partial_lse, partial_o, bytes;
};

Layout layout(const DecodeParams& d) {
  Layout x{};
  x.lines = d.s_q * d.h_q;
  x.capacity = capacity(d);
  const int64_t tiles = num_tiles(x.capacity);
  if (tiles <= 1 || d.num_kv_splits == 1 || d.b == 0 || x.lines == 0) return x;
  const int n = lines_a_tile(x.lines, wide(d), false);  // with fewer lines a tile the plan wants fewer slots
  const int64_t pinned = static_cast<int64_t>(d.b) * std::min<int64_t>(d.num_kv_splits, tiles);
  const int64_t automatic = std::min<int64_t>(d.b * std::min<int64_t>(tiles, kMaxSplits),
                                              most_slots(d.b, machine(kMostCtas, (x.lines + n - 1) / n, n, wide(d))));
  x.slots = d.num_kv_splits > 0 ? pinned : automatic;
  const size_t partials = static_cast<size_t>(x.slots) * x.lines;
  x.row_plan = kAlign;  // any_split lies before
  x.partial_lse = x.row_plan + align_up(d.b * sizeof(int2));
  x.partial_o = x.partial_lse + align_up(partials * sizeof(float2));
  x.bytes = x.partial_o + align_up(partials * kDimNope * sizeof(float));
  return x;
}

[[noreturn]] void refuse(const std::string& what, const std::string& expected, const std::string& got) {
  throw std::invalid_argument(what + ": the sm90a kernel expects " + expected + ", got " + got);
}

void check(const DecodeParams& d) {
  if (d.dtype != DType::kE4M3 && d.dtype != DType::kBF16 && d.dtype != DType::kFP16)
    refuse("q_nope, q_pe, kv_cache", "dtype e4m3, bf16 or fp16", "another dtype");
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
  if ((d.kv_page_stride | d.kv_token_stride) * element_bytes(d) % 16 != 0)
    refuse("kv_cache", "page and token strides that are multiples of 16 bytes",
           std::to_string(d.kv_page_stride) + " and " + std::to_string(d.kv_token_stride));
  if (reinterpret_cast<uintptr_t>(d.out) % 4 != 0 || d.out_stride[0] % 2 != 0 || d.out_stride[1] % 2 != 0 ||
      d.out_stride[2] % 2 != 0)
    refuse("out", "an address that is a multiple of 4 and even strides", "others");
}

bool q_aligned(const DecodeParams& d) {
  int64_t all = static_cast<int64_t>(reinterpret_cast<uintptr_t>(d.q_nope) | reinterpret_cast<uintptr_t>(d.q_pe));
  for (int i = 0; i < 3; ++i) all |= (d.q_nope_stride[i] | d.q_pe_stride[i]) * element_bytes(d);
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
            const cuuint64_t (&stride)[kRank - 1], const cuuint32_t (&box)[kRank], CUtensorMapDataType type,
            CUtensorMapSwizzle swizzle) {
  cuuint32_t ones[kRank];
  for (auto& x : ones) x = 1;
  const CUresult r = encode_tiled()(map, type, kRank, const_cast<void*>(address), size, stride, box, ones,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r != CUDA_SUCCESS)
    throw std::invalid_argument(std::string(name) + ": the driver refuses a tensor map of it, CUresult " +
                                std::to_string(static_cast<int>(r)));
}

// Of e4m3, 64 tokens and some chunks a box: [outer][4 chunks][tokens][128 B] and [outer][tokens][64 B].
void encode_nope(CUtensorMap* map, const char* name, const void* address, cuuint64_t tokens, cuuint64_t token,
                 cuuint64_t outer, cuuint64_t outer_stride, cuuint32_t chunks) {
  encode<4>(map, name, address, {kChunkBytes, tokens, kChunks, outer}, {token, kChunkBytes, outer_stride},
            {kChunkBytes, kBlockN, chunks, 1}, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B);
}
void encode_rope(CUtensorMap* map, const char* name, const void* address, cuuint64_t tokens, cuuint64_t token,
                 cuuint64_t outer, cuuint64_t outer_stride) {
  encode<3>(map, name, address, {kDimRope, tokens, outer}, {token, outer_stride}, {kDimRope, kBlockN, 1},
            CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_64B);
}

void encode_cache(KernelParams& p) {
  const DecodeParams& d = p.d;
  const auto pages = static_cast<cuuint64_t>(d.num_blocks), tokens = cuuint64_t{1} << d.page_size_log2;
  const auto page = static_cast<cuuint64_t>(d.kv_page_stride * element_bytes(d));
  const auto token = static_cast<cuuint64_t>(d.kv_token_stride * element_bytes(d));
  if (wide(d)) {
    encode<4>(&p.kv_nope, "kv_cache", d.kv_cache, {kChunkBytes / 2, tokens, kDim * 2 / kChunkBytes, pages},
              {token, kChunkBytes, page}, {kChunkBytes / 2, kBlockN, 1, 1}, CU_TENSOR_MAP_DATA_TYPE_UINT16,
              CU_TENSOR_MAP_SWIZZLE_128B);
    return;
  }
  encode_nope(&p.kv_nope, "kv_cache", d.kv_cache, tokens, token, pages, page, 1);
  encode_rope(&p.kv_rope, "kv_cache", static_cast<const uint8_t*>(d.kv_cache) + kDimNope, tokens, token, pages, page);
}

// Whether the lines of a row lie at equal distances: then it is returned, else 0.
int64_t line_stride(const DecodeParams& d, const int64_t (&stride)[3]) {
  if (d.h_q == 1) return stride[1];
  return d.s_q == 1 || stride[1] == d.h_q * stride[2] ? stride[2] : 0;
}

// For e4m3: false where q cannot be loaded by TMA.
bool encode_q(KernelParams& p) {
  const DecodeParams& d = p.d;
  const auto nope = static_cast<cuuint64_t>(line_stride(d, d.q_nope_stride));
  const auto rope = static_cast<cuuint64_t>(line_stride(d, d.q_pe_stride));
  const auto lines = static_cast<cuuint64_t>(p.lines), rows = static_cast<cuuint64_t>(d.b);
  // A single row is nowhere stepped over.
  const auto nope_row = rows == 1 ? nope : static_cast<cuuint64_t>(d.q_nope_stride[0]);
  const auto rope_row = rows == 1 ? rope : static_cast<cuuint64_t>(d.q_pe_stride[0]);
  if (!p.q_aligned) return false;
  for (const cuuint64_t stride : {nope, rope, nope_row, rope_row})
    if (stride == 0 || stride >> 40 != 0) return false;
  encode_nope(&p.q_nope, "q_nope", d.q_nope, lines, nope, rows, nope_row, kChunks);
  encode_rope(&p.q_rope, "q_pe", d.q_pe, lines, rope, rows, rope_row);
  return true;
}

template <int N>
void decode(const KernelParams& p, bool tma, int ctas, cudaStream_t stream) {
  if constexpr (N == 64) {
    launch_decode<64, true>(p, ctas, stream);  // gathered pages come with 32 lines at most
  } else {
    tma ? launch_decode<N, true>(p, ctas, stream) : launch_decode<N, false>(p, ctas, stream);
  }
}

template <class Element>
void decode16(const KernelParams& p, bool tma, int ctas, cudaStream_t stream) {
  tma ? launch_decode16<Element, true>(p, ctas, stream) : launch_decode16<Element, false>(p, ctas, stream);
}

}  // namespace

int plan_share(const std::vector<int64_t>& seq_lens, int lines, bool wide, bool gathered, int sms) {
  BatchTiles x{};
  for (const int64_t len : seq_lens) {
    const auto tiles = static_cast<int>(num_tiles(len));
    x.total += tiles;
    x.longest = std::max(x.longest, tiles);
    x.rows += tiles > 0;
  }
  return plan_share(x, machine_of(static_cast<int64_t>(seq_lens.size()), lines, wide, gathered, sms));
}

size_t workspace_bytes(const DecodeParams& params) { return layout(params).bytes; }

void launch(const DecodeParams& params, void* workspace, cudaStream_t stream, const DeviceScales& scales) {
  if (params.b == 0 || params.s_q * params.h_q == 0) return;
  check(params);
  const Layout x = layout(params);
  if (x.bytes > 0 && (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % kAlign != 0))
    refuse("workspace", std::to_string(x.bytes) + " bytes aligned to 256", "none, or another alignment");

  KernelParams p{};
  p.d = params;
  p.q_scale = scales.q_scale;
  p.kv_scale = scales.kv_scale;
  if (x.bytes > 0) {
    auto* space = static_cast<uint8_t*>(workspace);
    p.any_split = reinterpret_cast<int*>(space);
    p.row_plan = reinterpret_cast<int2*>(space + x.row_plan);
    p.partial_lse = reinterpret_cast<float2*>(space + x.partial_lse);
    p.partial_o = reinterpret_cast<float*>(space + x.partial_o);
    p.slots = static_cast<int>(x.slots);
  }
  p.lines = x.lines;
  p.per_head = ((1u << 20) + params.h_q - 1) / params.h_q;
  p.capacity = x.capacity;
  p.q_aligned = q_aligned(params);
  const bool tma = (1 << params.page_size_log2) >= kMinTmaPage && params.num_blocks > 0;
  int device = 0, sms = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  const int64_t splits = x.bytes == 0 ? 1 : params.num_kv_splits > 0 ? params.num_kv_splits : kMaxSplits;
  p.m = machine_of(params.b, x.lines, wide(params), !tma, sms);
  const int n = p.m.lines_a_tile;
  if (tma) encode_cache(p);
  p.q_tma = !wide(params) && n == kRowsM && encode_q(p);
  const int64_t pieces = params.b * std::min<int64_t>(splits, num_tiles(x.capacity));
  const int64_t most = std::max<int64_t>(1, pieces * p.m.line_tiles);
  p.workers = static_cast<int>(std::min<int64_t>(most, p.m.ctas));
  const int ctas = p.workers + rehearses(params.b, p.m.line_tiles, wide(params), sms);
  if (params.dtype == DType::kBF16) {
    decode16<__nv_bfloat16>(p, tma, ctas, stream);
  } else if (params.dtype == DType::kFP16) {
    decode16<__half>(p, tma, ctas, stream);
  } else if (n == 16) {
    decode<16>(p, tma, ctas, stream);
  } else if (n == 32) {
    decode<32>(p, tma, ctas, stream);
  } else {
    decode<64>(p, tma, ctas, stream);
  }
  if (x.bytes > 0) launch_combine(p, stream);
}

}  // namespace mla::sm90a
