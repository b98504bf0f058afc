// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// A tensor as the launchers see it, without torch.
#pragma once

#include <cstdint>
#include <cstdio>
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

// Words and numbers into one string. Not iostream: in a process with CUDA libraries that bring a C++ runtime of their
// own, writing a number to an ostream of this library ended in a segmentation fault.
inline void append(std::string& s, const char* part) { s.append(part); }
inline void append(std::string& s, const std::string& part) { s.append(part); }
inline void append(std::string& s, long long number) {
  char digits[24];
  std::snprintf(digits, sizeof digits, "%lld", number);
  s.append(digits);
}
inline void append(std::string& s, long number) { append(s, static_cast<long long>(number)); }
inline void append(std::string& s, int number) { append(s, static_cast<long long>(number)); }
inline void append(std::string& s, double number) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%g", number);
  s.append(digits);
}

template <class... Parts>
std::string text(const Parts&... parts) {
  std::string s;
  (append(s, parts), ...);
  return s;
}

inline std::string shape_string(const TensorView& t) {
  std::string s = "[";
  for (int i = 0; i < t.ndim; ++i) {
    if (i) append(s, ", ");
    append(s, t.size[i]);
  }
  return s.append("]");
}

}  // namespace mla
