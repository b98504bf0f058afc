# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""What vLLM says about itself in its log: the attention backend that it uses, and the size of its cache."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["bytes_per_token_layer", "errors", "read_log", "tail"]

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PATTERNS = {
    # "Using AttentionBackendEnum.FLASHMLA backend.", "Using FLASHMLA attention backend out of potential backends: …",
    # "Using CUTLASS_MLA of mla_kernels on CPU, …"
    "backend_used": re.compile(r"Using (?:\w+\.)?([A-Z][A-Z0-9_]*MLA[A-Z0-9_]*)(?: attention backend| backend| of )"),
    "prefill_backend": re.compile(r"Using (?:MLAPrefillBackendEnum\.)?([A-Z][A-Z0-9_]*) MLA prefill backend"),
    "kv_cache_tokens": re.compile(r"KV cache size: ([0-9,]+) tokens"),
    # "Available KV cache memory: 110.35 GiB"; on a CPU "Explicitly set (1.0/20.46) GiB for KV cache on node 0."
    "kv_cache_gib": re.compile(
        r"Available KV cache memory: ([0-9.]+) GiB|\(([0-9.]+)/[0-9.]+\) GiB for KV cache"
    ),
    "kv_cache_dtype_used": re.compile(r"\bkv_cache_dtype=([a-z0-9_]+)"),
}  # fmt: skip
_ERROR = re.compile(r"(?:\b\w*(?:Error|Exception)\b|error): |^.*\bKilled\b|out of memory", re.IGNORECASE)


def read_log(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the log of a vLLM process tells.

    Returns:
        backend_used (of decode), prefill_backend, kv_cache_dtype_used, kv_cache_tokens, kv_cache_gib (of one rank);
        what the log does not say is left out. The last statement of each kind counts.
    """
    found: dict[str, Any] = {}
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            text = _ANSI.sub("", line[:4000])
            for name, pattern in _PATTERNS.items():
                if match := pattern.search(text):
                    found[name] = next(group for group in match.groups() if group)
    if "kv_cache_tokens" in found:
        found["kv_cache_tokens"] = int(found["kv_cache_tokens"].replace(",", ""))
    if "kv_cache_gib" in found:
        found["kv_cache_gib"] = float(found["kv_cache_gib"])
    return found


def bytes_per_token_layer(found: dict[str, Any], layers: int) -> float | None:
    """Bytes of cache for a token in a layer, from what `read_log` found; None where the log does not say both.

    kv_cache_gib has two decimals in the log, and the last block is not whole: expect a value within 0.5 % or so.
    """
    if not found.get("kv_cache_tokens") or not found.get("kv_cache_gib"):
        return None
    return round(float(found["kv_cache_gib"]) * 2**30 / found["kv_cache_tokens"] / layers, 1)


def tail(path: str | os.PathLike[str], count: int = 15) -> list[str]:
    """The last lines of a log, without colours, cut to 300 characters."""
    lines = Path(path).read_bytes()[-200_000:].decode("utf-8", "replace").replace("\r", "\n").splitlines()
    return [_ANSI.sub("", line).rstrip()[:300] for line in lines if line.strip()][-count:]


def errors(path: str | os.PathLike[str], count: int = 3) -> Sequence[str]:
    """The last lines of a log that look like errors; the last lines where none does."""
    lines = tail(path, 2000)
    looks = [line for line in lines if _ERROR.search(line)]
    return (looks or lines)[-count:]
