# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""A word in the log where decode batches may be larger than vLLM's largest CUDA graph. Nothing is changed.

vLLM 0.23.0 captures graphs up to 512 tokens unless it is told otherwise, and runs up to 1024 sequences on a large GPU.
A step of more tokens than the largest graph runs without one. An fp8 cache holds twice the sequences, so it gets there
first.
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["advise", "wanted_size"]

FLAG = "--max-cudagraph-capture-size"
#: data/measurements/h200/serving.json, the rows of 1000 prompts with an fp8 cache.
MEASURED = (
    "recorded on one H200, DeepSeek-V2-Lite, fp8, 1000 prompts of 8192 + 1024 tokens: 6.32 requests/s with graphs up "
    "to 1024, and 5.19 with vLLM's default at an older commit of these kernels; the flag alone was not measured"
)
_STEP = 16  # vLLM captures 1, 2, 4, multiples of 8 below 256 and of 16 from there on: all have multiples of 16

logger = logging.getLogger("vllm.mla_kernels")
_said = False


def wanted_size(vllm_config: Any, s_q: int) -> int | None:
    """The capture size that the largest decode step needs (max_num_seqs rows of `s_q` tokens), as vLLM takes it.

    None where the graphs are large enough, where there are none (eager), and for a vLLM that does not say.
    """
    compilation = getattr(vllm_config, "compilation_config", None)
    scheduler = getattr(vllm_config, "scheduler_config", None)
    mode = getattr(compilation, "cudagraph_mode", None)
    captured = getattr(compilation, "max_cudagraph_capture_size", None)
    rows = getattr(scheduler, "max_num_seqs", None)
    if not isinstance(captured, int) or not isinstance(rows, int) or captured < 1:
        return None
    if getattr(mode, "name", mode) == "NONE":
        return None
    tokens, most = rows * s_q, getattr(scheduler, "max_num_batched_tokens", None)
    size = -(-tokens // _STEP) * _STEP
    if isinstance(most, int) and most > 0:  # of all tokens of a step; vLLM captures this size, too
        tokens, size = min(tokens, most), min(size, most)
    return size if tokens > captured else None


def advise(vllm_config: Any, s_q: int) -> None:
    """Say it, once in a process and only in the first of the ranks."""
    global _said
    size = wanted_size(vllm_config, s_q)
    rank = getattr(getattr(vllm_config, "parallel_config", None), "rank", 0)
    if size is None or _said or rank != 0:
        return
    _said = True
    logger.info(
        "max_num_seqs %d allows decode steps of more tokens than the largest CUDA graph, %d; such steps run without a "
        "graph. Where the cache has room for as many sequences, pass %s %d (%s)",
        vllm_config.scheduler_config.max_num_seqs,
        vllm_config.compilation_config.max_cudagraph_capture_size,
        FLAG,
        size,
        MEASURED,
    )
