# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Where the GPU's time goes: kernels of a torch profiler trace sorted into classes by their names."""

from __future__ import annotations

import collections
import gzip
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["CLASSES", "classify", "kernel_times", "profile_rows"]

#: Classes and the kernel names they take, tried in this order; what none takes is "other".
CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        # gather_and_maybe_dequant_cache, cp_gather_cache of chunked prefill
        ("cache read", r"gather.*cache|dequant_cache|cache.*gather|upconvert"),
        # concat_and_cache_mla, reshape_and_cache; also fused with rope
        ("cache write", r"concat_and_cache|reshape_and_cache|_and_cache_|cache_mla_kernel|insert.*cache"),
        # ours (mla::sm90a, sm100a), FlashMLA's splitkv and combine, CUTLASS's Sm100 MLA, FA3's in its MLA form (qv)
        (
            "decode attention",
            r"mla::|mla_kernels|\bmla_(?:decode|combine)|sm100_fmha_mla|sm100fmhamla|flash_fwd_splitkv_mla|splitkv_mla"
            r"|flash_fwd_mla|get_mla_metadata|mla_metadata|mla_combine|flash_mla|sparse_attn_fwd|batchmla|decode_grouped_att"
            r"|_fwd_kernel_stage|decode_att|merge_(?:splits|partials)|flash_fwd_combine|FlashAttnFwdCombine",
        ),
        ("prefill attention", r"flash|fmha|attention|attn_fwd|merge_attn_states|prefill|fwd_kernel|trtllm_ragged"),
        ("quantise", r"quant|scaled_fp8|to_fp8|cvt_fp8|float8|fp8_cast"),
        ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|multimem|symm_mem|custom_ar"),
        ("MoE", r"moe|topk|expert|grouped_gemm|group_gemm|silu_and_mul.*expert|align_block_size|count_and_sort"),
        ("GEMM", r"gemm|gemv|cublas|cutlass|nvjet|wgmma|matmul|splitkreduce|\bmm_|sm90_xmma|sm80_xmma|ampere_|hopper_"),
    )
)
NAMES = (*(name for name, _ in CLASSES), "other")
#: FlashAttention 3 is prefill and, for FLASH_ATTN_MLA, decode: the decode form has V of 512 columns.
_FA3_DECODE = re.compile(r"flash.*(?:\b512\b|hasqv|has_qv)", re.IGNORECASE)


def classify(kernel: str) -> str:
    """The class of a kernel by its name (demangled or not): one of `NAMES`."""
    for name, pattern in CLASSES:
        if name == "prefill attention" and _FA3_DECODE.search(kernel):
            return "decode attention"
        if pattern.search(kernel):
            return name
    return "other"


def kernel_times(trace: str | os.PathLike[str]) -> dict[str, tuple[float, int]]:
    """(microseconds, launches) of each GPU kernel and copy in a Chrome trace of the torch profiler, .json or .json.gz.

    A kernel that began before another of its stream ended (programmatic dependent launch) counts from that end on:
    until then it waits.

    Raises:
        ValueError: for a file that is no such trace, or has no kernels (a CPU run).
    """
    path = Path(trace)
    try:
        content = path.read_bytes()
        events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise ValueError(f"trace: {path.name} is no trace of the torch profiler: {error}") from error
    times: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    ends: dict[tuple[Any, Any], float] = {}
    ours = (e for e in events if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    for event in sorted(ours, key=lambda e: float(e.get("ts", 0))):
        begin, stream = float(event.get("ts", 0)), (event.get("pid"), event.get("tid"))
        end = begin + float(event.get("dur", 0))
        before = ends.get(stream, begin)
        entry = times[str(event.get("name"))]
        entry[0] += max(end - max(begin, before), 0.0)
        entry[1] += 1
        ends[stream] = max(end, before)
    if not times:
        raise ValueError(f"trace: {path.name} has no GPU kernels")
    return {name: (us, int(count)) for name, (us, count) in times.items()}


def profile_rows(times: Mapping[str, tuple[float, int]], more: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Rows of profile.json: a row a class (us, share, launches, and its longest kernels), then one a kernel of "other"
    over 1 %, so that a kernel which no pattern knows is seen. `more`: columns of every row."""
    whole = sum(us for us, _ in times.values())
    groups: dict[str, list[tuple[str, float, int]]] = {name: [] for name in NAMES}
    for kernel, (us, count) in times.items():
        groups[classify(kernel)].append((kernel, us, count))
    rows = []
    for name, members in groups.items():
        members.sort(key=lambda member: -member[1])
        us = sum(member[1] for member in members)
        longest = [
            {"kernel": kernel[:160], "us": round(spent, 1), "launches": count} for kernel, spent, count in members[:4]
        ]
        rows.append(
            {
                **more,
                "class": name,
                "us": round(us, 1),
                "share": round(us / whole, 5),
                "launches": sum(member[2] for member in members),
                "kernels": longest,
            }
        )
    return rows
