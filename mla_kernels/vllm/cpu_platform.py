# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Lets MLA models on vLLM's CPU platform choose the backend, which that platform otherwise takes from a fixed list.

Two of its methods are wrapped. For an MLA model that asks for CUTLASS_MLA, or for an fp8 cache without naming a
backend, `get_attn_backend_cls` answers with ours, and `check_and_update_config` keeps the block size, chunked prefill
and prefix caching, which vLLM switches off for its own reference backend, and takes its rotary kernel for CPUs out:
that of 0.32.0 turns the wrong elements of a query that is a slice of a wider tensor, as the one of DeepSeek-V2 is.
Everything else goes to vLLM unchanged.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from mla_kernels.vllm.detect import CPU_BACKEND, NAME

__all__ = ["BLOCK_SIZE", "install", "is_ours"]

#: Tokens of a page where the user names none: a tile of the kernel.
BLOCK_SIZE = 64
_MARK = "_mla_kernels"
_ROTARY = "rotary_embedding"

logger = logging.getLogger("vllm.mla_kernels")


def is_ours(backend: Any, kv_cache_dtype: object) -> bool:
    """Whether an MLA model with this choice (an enum member or None) and cache gets our backend."""
    name = getattr(backend, "name", backend)
    return name == NAME or (name is None and str(kv_cache_dtype).startswith("fp8"))


def _wrap(platform: type, name: str, make: Any) -> None:
    """Replace a class method of exactly this class by make(the old function), once."""
    old = getattr(platform, name).__func__
    if not hasattr(old, _MARK):
        new = functools.wraps(old)(make(old))
        setattr(new, _MARK, True)
        setattr(platform, name, classmethod(new))


def _choosing(old: Any) -> Any:
    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, *args: Any, **more: Any
    ) -> str:
        asked = attn_selector_config
        if asked.use_mla and not asked.use_sparse and is_ours(selected_backend, asked.kv_cache_dtype):
            logger.info("Using %s of mla_kernels on CPU, kv_cache_dtype %s.", NAME, asked.kv_cache_dtype)
            return CPU_BACKEND
        return old(cls, selected_backend, attn_selector_config, *args, **more)

    return get_attn_backend_cls


def _configuring(old: Any) -> Any:
    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        model, cache, scheduler = vllm_config.model_config, vllm_config.cache_config, vllm_config.scheduler_config
        mla = model is not None and getattr(model, "use_mla", False)
        if not (mla and is_ours(vllm_config.attention_config.backend, cache.cache_dtype)):
            old(cls, vllm_config)
            return
        named = cache.block_size if cache.user_specified_block_size else None
        kept = scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens
        old(cls, vllm_config)
        custom_ops = vllm_config.compilation_config.custom_ops
        if f"-{_ROTARY}" not in custom_ops and f"+{_ROTARY}" not in custom_ops:
            custom_ops.append(f"-{_ROTARY}")  # the same in torch operations
        cache.block_size = named or BLOCK_SIZE
        scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens = kept
        logger.info(
            "%s of mla_kernels: block_size %d, chunked prefill %s, prefix caching %s.",
            NAME,
            cache.block_size,
            "on" if kept[0] else "off",
            "on" if kept[1] else "off",
        )

    return check_and_update_config


def install(platform: type) -> None:
    """Wrap the two methods of the current platform's class; a second call finds them wrapped."""
    _wrap(platform, "get_attn_backend_cls", _choosing)
    _wrap(platform, "check_and_update_config", _configuring)
