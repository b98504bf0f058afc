// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// The CPU target as its binding sees it. No torch here.
#pragma once

#include <cstdint>
#include <string>

#include "mla/checks.h"

namespace mla::cpu {

// Calls body(ctx) on up to n threads at once and returns when all have; fewer calls, even one, are right too.
struct Parallel {
  void (*run)(int64_t n, void (*body)(void* ctx), void* ctx);
  int threads;
};

// Bytes of workspace for any lengths up to capacity tokens. Never above 24 MiB.
int64_t workspace_size(int64_t b, int64_t s_q, int64_t h_q, int64_t capacity, int64_t num_kv_splits);

// Checks, then computes. Throws mla::Error (std::invalid_argument) before anything is written.
void mla_decode(const DecodeArguments& arguments, const Parallel& parallel);

// The instruction set that runs: the best one this processor has, or the one that a test asked for.
const char* isa();
void set_isa(const std::string& name);  // "generic", "avx2", "avx512", "auto"
std::string available_isas();           // comma separated, worst first

}  // namespace mla::cpu
