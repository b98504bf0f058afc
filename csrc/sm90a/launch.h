// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// The Hopper target, without torch. Shapes and semantics: mla/params.h.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mla/params.h"

namespace mla::sm90a {

// Scales that live on the device (one float each, read when the kernel runs, so a captured graph sees new values).
// A pointer that is not null is a factor on top of params.logit_scale (both) and params.out_scale (kv_scale).
struct DeviceScales {
  const float* q_scale = nullptr;
  const float* kv_scale = nullptr;
};

// Bytes of workspace that launch() needs: fp32 partials of every split of the longest row the table can describe. A
// function of b, s_q, h_q, the table's capacity and num_kv_splits, never of seq_lens. 0 where no row can have two
// splits.
size_t workspace_bytes(const DecodeParams& params);

// Computes out and lse on `stream` of the current device. Allocates nothing, synchronises nothing, reads lengths, table
// and data only on the device: it may be captured in a CUDA graph and replayed with other lengths. `workspace`:
// workspace_bytes(params) bytes, aligned to 256. Throws std::invalid_argument for what it cannot run (dtype other than
// e4m3, strides or addresses of the cache that are not multiples of 16 bytes, a logit scale that is not a positive
// number, a device that is not of compute capability 9.0) and std::runtime_error for errors of the driver; nothing is
// launched then.
void launch(const DecodeParams& params, void* workspace, cudaStream_t stream, const DeviceScales& scales = {});

// The share of the automatic plan (plan.h) in tiles of 64 tokens, 0 where each row is one piece, as the kernel finds it
// on a device with `sms` SMs.
// lines: s_q * h_q; wide: bf16 or fp16; gathered: pages under 64 tokens.
int plan_share(const std::vector<int64_t>& seq_lens, int lines, bool wide, bool gathered, int sms);

}  // namespace mla::sm90a
