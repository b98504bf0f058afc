// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// CUTLASS example 77's MLA kernel as it is, from the package nvidia-cutlass; device::MLA around it is not used, since
// it sets the limit of shared memory once for a process and brings the reduction kernel that merge.h stands in for.
//
//   tile 128 heads x 128 tokens x (512 latent + 64 rope), a cluster of two CTAs, pages of 128 tokens by TMA
//   warps 0-3 softmax and epilogue, 4 MMA (the leader CTA's), 5 TMA loads
//   leaves fp32: P, unscaled, to the input's format; out, once
//
// Device code keeps CuTe's assertions: addresses and tensor-memory lanes that do not fit end in a CUDA error instead of
// wrong numbers, and without them ptxas 13.0 spills 100 to 150 bytes. Host code goes without: an assertion there would
// end the process.
#pragma once

#ifdef __CUDA_ARCH__
#undef NDEBUG
#elif !defined(NDEBUG)
#define NDEBUG
#endif

#include <cassert>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "../sm90a/check_cuda.h"
#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "guards.h"
#include "kernel/sm100_fmha_mla_tma_warpspecialized.hpp"
#include "launch_parts.h"

namespace mla::sm100a {

template <DType kDType>
using Element = std::conditional_t<kDType == DType::kE4M3, cutlass::float_e4m3_t,
                                   std::conditional_t<kDType == DType::kBF16, cutlass::bfloat16_t, cutlass::half_t>>;
template <DType kDType>
using ElementOut = std::conditional_t<kDType == DType::kFP16, cutlass::half_t, cutlass::bfloat16_t>;

template <DType kDType, bool kPersistent>
using Kernel = cutlass::fmha::kernel::Sm100FmhaMlaKernelTmaWarpspecialized<
    cute::Shape<cute::Int<kPaddedHeads>, cute::Int<kTile>, cute::Shape<cute::Int<kDimNope>, cute::Int<kDimRope>>>,
    Element<kDType>, float, ElementOut<kDType>, float,
    std::conditional_t<kPersistent, cutlass::fmha::kernel::Sm100MlaPersistentTileScheduler,
                       cutlass::fmha::kernel::Sm100MlaIndividualTileScheduler>,
    /*kIsCpAsync=*/false>;

// CuTe reports a refused tensor map on standard error and leaves it zero.
template <class Tma>
void check_encoded(const Tma& tma, const char* name) {
  static const unsigned char zeros[sizeof(cute::TmaDescriptor)] = {};
  if (std::memcmp(tma.get_tma_descriptor(), zeros, sizeof zeros) == 0)
    throw std::runtime_error(std::string("mla_decode: ") + name + ": the driver refuses its tensor map");
}

template <DType kDType, bool kPersistent>
void launch_mla(const KernelCall& c, cudaStream_t stream) {
  using K = Kernel<kDType, kPersistent>;
  using Qk = typename K::CollectiveMmaQK;
  using E = Element<kDType>;
  const DecodeParams& d = c.d;
  const int b = d.b, h_q = d.h_q;
  const auto pointer = [](const void* p) { return static_cast<E*>(const_cast<void*>(p)); };
  const auto stride = [](int64_t rows, int64_t planes) { return cute::make_stride(rows, cute::_1{}, planes); };
  // A stride of a dimension of size 1 may be anything; the driver looks at it all the same.
  const auto query = [&](const int64_t* s, int64_t dims) {
    const int64_t head = h_q > 1 ? s[2] : dims;
    return stride(head, b > 1 ? s[0] : head * h_q);
  };
  const auto q_nope_stride = query(d.q_nope_stride, kDimNope), q_pe_stride = query(d.q_pe_stride, kDimRope);
  const auto kv_stride = stride(d.kv_token_stride, d.num_blocks > 1 ? d.kv_page_stride : d.kv_token_stride * kTile);

  typename K::Arguments arguments{};
  cute::get<1>(arguments.problem_shape) = c.plan.capacity;
  cute::get<3>(arguments.problem_shape) = b;
  auto& main = arguments.mainloop;
  main.softmax_scale = d.logit_scale;
  main.ptr_q_latent = pointer(d.q_nope);
  main.stride_q_latent = q_nope_stride;
  main.ptr_q_rope = pointer(d.q_pe);
  main.stride_q_rope = q_pe_stride;
  main.ptr_c_latent = pointer(d.kv_cache);
  main.stride_c_latent = kv_stride;
  main.ptr_k_rope = pointer(d.kv_cache) + kDimNope;
  main.stride_k_rope = kv_stride;
  main.ptr_seq = c.seq_lens;
  main.ptr_page_table = const_cast<int32_t*>(d.block_table);
  main.stride_page_table = cute::make_stride(cute::_1{}, b > 1 ? static_cast<int>(d.block_table_stride) : 0);
  main.page_count = static_cast<int>(d.num_blocks);
  main.page_size = kTile;
  arguments.epilogue.ptr_o = static_cast<ElementOut<kDType>*>(c.out);
  arguments.epilogue.stride_o = stride(c.out_stride[1], c.out_stride[0]);
  arguments.epilogue.ptr_lse = c.lse;
  arguments.epilogue.stride_lse = cute::make_stride(cute::_1{}, c.lse_stride);
  arguments.epilogue.output_scale = d.out_scale;
  arguments.hw_info.device_id = c.device;
  arguments.hw_info.sm_count = cluster_slots(c.sms) * kCtasPerCluster;
  arguments.split_kv = c.plan.most;
  arguments.ptr_split_kv = c.splits;
  typename K::Params params = K::to_underlying_arguments(arguments, c.partial);

  // The kernel's own tensor maps of the queries have 128 heads, and would read the next row's, or past the end. Maps of
  // the real heads give zeros there, so that no memory of others reaches a tensor core and nothing is copied.
  const auto real_heads = [&](E* p, auto strides, int dims) {
    const typename Qk::Arguments q{p, strides, main.ptr_c_latent, main.stride_c_latent};
    return Qk::to_underlying_arguments(cute::make_shape(h_q, kTile, dims, b), q, nullptr).tma_load_a;
  };
  auto& maps = params.mainloop_params;
  maps.tma_load_q_latent = real_heads(main.ptr_q_latent, q_nope_stride, kDimNope);
  maps.tma_load_q_rope = real_heads(main.ptr_q_rope, q_pe_stride, kDimRope);
  check_encoded(maps.tma_load_q_latent, "q_nope");
  check_encoded(maps.tma_load_q_rope, "q_pe");
  check_encoded(maps.tma_load_c_latent, "kv_cache");
  check_encoded(maps.tma_load_k_rope, "kv_cache");
  check_encoded(maps.tma_load_c_latent_transpose, "kv_cache");

  const auto function = reinterpret_cast<const void*>(&cutlass::device_kernel<K>);
  static OncePerDevice limit;
  limit(c.device, [&] {
    sm90a::check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, K::SharedStorageSize),
                      "shared memory of the sm100a kernel");
  });
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = kCtasPerCluster;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = K::get_grid_shape(params);
  config.blockDim = K::get_block_shape();
  config.dynamicSmemBytes = K::SharedStorageSize;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  void* pointers[] = {&params};
  sm90a::check_cuda(cudaLaunchKernelExC(&config, function, pointers), "launch of the sm100a kernel");
}

}  // namespace mla::sm100a
