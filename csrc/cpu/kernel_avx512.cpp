// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
#define MLA_ISA_AVX512
#define MLA_KERNELS kernels_avx512
#include "decode.h"
