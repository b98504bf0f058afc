// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// A C entry for check.py, which drives the kernel from Python without the operator.
#include <cstdio>
#include <exception>

#include "../launch.h"
#include "../plan.h"

extern "C" {

size_t mla_check_params_size() { return sizeof(mla::DecodeParams); }

size_t mla_check_workspace(const mla::DecodeParams* p) { return mla::sm90a::workspace_bytes(*p); }

// The automatic plan's share for a batch on a machine with `ctas` SMs.
int mla_check_plan_share(long long total, int longest, int rows, int lines, int ctas, int wide, int gathered) {
  const int n = mla::sm90a::lines_a_tile(lines, wide, gathered);
  return mla::sm90a::plan_share({total, longest, rows}, mla::sm90a::machine(ctas, (lines + n - 1) / n, n, wide != 0));
}

// 0, or 1 with a message.
int mla_check_launch(const mla::DecodeParams* p, void* workspace, void* stream, const float* q_scale,
                     const float* kv_scale, char* message, size_t message_size) {
  try {
    mla::sm90a::launch(*p, workspace, static_cast<cudaStream_t>(stream), {q_scale, kv_scale});
    return 0;
  } catch (const std::exception& e) {
    std::snprintf(message, message_size, "%s", e.what());
    return 1;
  }
}
}
