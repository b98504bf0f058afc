# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""fp8 MLA decode: what it costs in accuracy, and what it buys in speed."""
