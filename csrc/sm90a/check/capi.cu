// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// A C entry for check.py, which drives the kernel from Python without the operator.
#include <cstdio>
#include <exception>

#include "../launch.h"

extern "C" {

size_t mla_check_params_size() { return sizeof(mla::DecodeParams); }

size_t mla_check_workspace(const mla::DecodeParams* p) { return mla::sm90a::workspace_bytes(*p); }

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
