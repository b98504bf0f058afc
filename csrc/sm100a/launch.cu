// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// Host side: refuses what cannot run, lays out the workspace, picks the instantiation.
#include "launch.h"

#include <stdexcept>

#include "../sm90a/check_cuda.h"
#include "guards.h"
#include "launch_parts.h"

namespace mla::sm100a {
namespace {

using sm90a::check_cuda;

// MLA_SM100A_FIRST: a build with the first instantiation only, to see in short time that the target compiles.
template <DType kDType>
void run(const KernelCall& call, cudaStream_t stream) {
#ifdef MLA_SM100A_FIRST
  if constexpr (kDType != DType::kE4M3)
    fail("q_nope", "float8_e4m3fn, in this build with one instantiation", dtype_name(kDType), "build all of them");
  else if (is_persistent(call.plan.most))
    fail("num_kv_splits", "at least 2, in this build with one instantiation", call.plan.most, "build all of them");
  else
    launch_mla<kDType, false>(call, stream);
#else
  is_persistent(call.plan.most) ? launch_mla<kDType, true>(call, stream) : launch_mla<kDType, false>(call, stream);
#endif
}

}  // namespace

bool runs_on(int major, int minor) {
#ifdef MLA_HAVE_SM100A
  if (major == 10 && minor == 0) return true;
#endif
#ifdef MLA_HAVE_SM100F
  if (major == 10 && minor == 3) return true;
#endif
  return false;
}

int sm_count(int device) {
  int sms = 0;
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return sms;
}

void launch(const DecodeArguments& a, const DecodeParams& d, const Plan& plan, void* workspace, int device,
            cudaStream_t stream) {
  check_call(a, d.logit_scale);
  if (plan.b == 0) return;
  if (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % kAlign != 0)
    throw std::invalid_argument("mla_decode: workspace: expected memory aligned to 256, got another");

  auto* base = static_cast<uint8_t*>(workspace);
  KernelCall call{};
  call.d = d;
  call.plan = plan;
  call.seq_lens = reinterpret_cast<int32_t*>(base + plan.seq_lens);
  call.splits = reinterpret_cast<int32_t*>(base + plan.splits);
  call.partial = reinterpret_cast<float*>(base + plan.partial);
  call.sms = sm_count(device);
  call.device = device;
  call.direct = stores_directly(a.out, a.lse);
  call.out = call.direct ? d.out : base + plan.out;
  call.out_stride[0] = call.direct && d.b > 1 ? d.out_stride[0] : int64_t{kPaddedHeads} * kDimNope;
  call.out_stride[1] = call.direct ? d.out_stride[2] : kDimNope;
  call.lse = call.direct ? d.lse : reinterpret_cast<float*>(base + plan.lse);
  call.lse_stride = call.direct && d.b > 1 ? static_cast<int>(d.lse_stride[0]) : kPaddedHeads;

  prepare_rows(call, stream);
  if (plan.most == 0) return;  // no row can have a token
  switch (d.dtype) {
    case DType::kE4M3:
      run<DType::kE4M3>(call, stream);
      break;
    case DType::kBF16:
      run<DType::kBF16>(call, stream);
      break;
    case DType::kFP16:
      run<DType::kFP16>(call, stream);
      break;
    default:
      fail("q_nope", "float8_e4m3fn, bfloat16 or float16", dtype_name(d.dtype), "convert it");
  }
  if (plan.most > 1 || !call.direct) finish_rows(call, stream);
}

}  // namespace mla::sm100a
