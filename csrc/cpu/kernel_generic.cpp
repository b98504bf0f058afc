// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
#define MLA_KERNELS kernels_generic
#include "decode.h"
