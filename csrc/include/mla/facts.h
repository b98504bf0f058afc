// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// What only the compiler knows of an instantiation, left in the built file for mla_kernels/inspection.py to read, on a
// machine without a GPU: the shared memory that a launch asks for is in no report of ptxas.
#pragma once

#include <cstdint>

namespace mla {

struct Fact {
  char kernel[56];  // as inspection.py calls it
  int64_t dynamic_shared_bytes;
};

}  // namespace mla

#define MLA_FACT(identifier, kernel, ...) \
  __attribute__((used, section("mla_facts"))) static const mla::Fact identifier = {kernel, __VA_ARGS__}
