// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// The Blackwell target, without torch: a launcher over the MLA kernel of CUTLASS example 77. Shapes and semantics:
// mla/params.h; what it refuses: guards.h; splits and workspace: plan.h.
#pragma once

#include <cuda_runtime.h>

#include "mla/checks.h"
#include "mla/params.h"
#include "plan.h"

namespace mla::sm100a {

// Whether this build has code for the device: 10.0 where it was built for sm100a, 10.3 where for sm100f.
bool runs_on(int major, int minor);

// Streaming multiprocessors of a device.
int sm_count(int device);

// `a` and `d` say the same; `a` has the views by name, for messages. `plan` is make_plan() of the same call, and
// `workspace` holds plan.bytes, aligned to 256. Computes on `stream` of the current device, which is `device`;
// allocates nothing, synchronises nothing, reads lengths, table and data on the device only. Throws
// std::invalid_argument for what it cannot run and std::runtime_error for errors of the driver; nothing is launched
// then.
void launch(const DecodeArguments& a, const DecodeParams& d, const Plan& plan, void* workspace, int device,
            cudaStream_t stream);

}  // namespace mla::sm100a
