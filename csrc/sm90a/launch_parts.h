// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// What launch.cu calls in the other translation units.
#pragma once

#include <cuda_runtime.h>

#include "traits.h"

namespace mla::sm90a {

// N query lines a CTA, pages by TMA or gathered; one definition in each decode_nN.cu.
template <int N, bool kTma>
void launch_decode(const KernelParams& p, int ctas, cudaStream_t stream);

// Merges the partials of rows with several splits; starts by programmatic dependent launch.
void launch_combine(const KernelParams& p, cudaStream_t stream);

}  // namespace mla::sm90a
