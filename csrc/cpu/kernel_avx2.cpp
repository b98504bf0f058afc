// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
#define MLA_ISA_AVX2
#define MLA_KERNELS kernels_avx2
#include "decode.h"
