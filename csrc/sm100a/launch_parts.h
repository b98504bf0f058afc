// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// What launch.cu calls in the other translation units.
#pragma once

#include <cuda_runtime.h>

#include "mla/params.h"
#include "plan.h"

namespace mla::sm100a {

struct KernelCall {
  DecodeParams d;
  Plan plan;
  int32_t* seq_lens;  // [b], bounded; written by prepare_rows
  int32_t* splits;    // [b], 0 for a row without tokens
  void* out;          // [b, 128, 512], strides below in elements
  int64_t out_stride[2];
  float* lse;  // [b, 128]
  int lse_stride;
  float* partial;  // plan.h
  bool direct;     // out and lse are the caller's
  int sms;
  int device;
};

// CUTLASS's kernel, one definition in each mla_*.cu. kPersistent only for one split.
template <DType kDType, bool kPersistent>
void launch_mla(const KernelCall& call, cudaStream_t stream);

// Bounds the lengths, counts splits, and writes rows without tokens: 0 and -inf.
void prepare_rows(const KernelCall& call, cudaStream_t stream);

// Merges splits, and copies real heads out of padded ones.
void finish_rows(const KernelCall& call, cudaStream_t stream);

}  // namespace mla::sm100a
