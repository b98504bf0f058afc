// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// A tensor as the launchers see it, without torch.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

#include "mla/params.h"

namespace mla {

struct TensorView {
  const char* name;  // public argument name, for messages
  void* data;
  DType dtype;
  int device_type;  // torch's numbers: 0 cpu, 1 cuda
  int device_index;
  int ndim;
  int64_t size[4];
  int64_t stride[4];  // in elements
  int64_t element_size;
};

inline const char* dtype_name(DType t) {
  switch (t) {
    case DType::kE4M3:
      return "float8_e4m3fn";
    case DType::kBF16:
      return "bfloat16";
    case DType::kFP16:
      return "float16";
    case DType::kFP32:
      return "float32";
    case DType::kInt32:
      return "int32";
    default:
      return "another dtype";
  }
}

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

inline std::string shape_string(const TensorView& t) {
  std::ostringstream stream;
  stream << "[";
  for (int i = 0; i < t.ndim; ++i) stream << (i ? ", " : "") << t.size[i];
  stream << "]";
  return stream.str();
}

}  // namespace mla
