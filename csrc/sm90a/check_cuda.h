// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace mla::sm90a {

inline void check_cuda(cudaError_t e, const char* what) {
  if (e != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(e) + ", " + cudaGetErrorString(e));
}

}  // namespace mla::sm90a
