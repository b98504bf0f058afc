# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""fp8 MLA decode: what it costs in accuracy, and what it buys in speed.

Importing this package touches no GPU and starts no build; torch itself is imported with the first use of the operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_kernels.ops import mla_decode, mla_decode_out

__all__ = ["mla_decode", "mla_decode_out"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in __all__:
        from mla_kernels import ops

        return getattr(ops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
