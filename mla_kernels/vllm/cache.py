# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The cache as vLLM keeps it: names of its dtypes, and e4m3 rows written and read with torch operations.

real = stored * scale. vLLM keeps an fp8 cache as bytes (uint8); the same bytes as e4m3 are the operator's kv_cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_kernels.formats import ELEMENTS

__all__ = ["cache_dtype", "dequantise_pages", "quantise", "quantise_queries", "write_rows"]

E4M3 = torch.float8_e4m3fn
_BY_NAME = {
    "fp8": E4M3,
    "fp8_e4m3": E4M3,
    "float8_e4m3fn": E4M3,
    "e4m3": E4M3,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "fp16": torch.float16,
}
MAX = ELEMENTS["e4m3"].max_finite


def cache_dtype(name: str | torch.dtype | None, model_dtype: torch.dtype) -> torch.dtype:
    """The cache's dtype for vLLM's kv_cache_dtype: "auto" or None is the model's dtype, "fp8" is e4m3.

    TypeError for a model in another dtype than bf16 and fp16; ValueError for a cache that the kernels do not read, and
    for a 16-bit cache that differs from the model, whose queries it is multiplied with.
    """
    model = str(model_dtype).removeprefix("torch.")
    if model_dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"dtype: expected bfloat16 or float16, got {model}; pass dtype=bfloat16")
    if name is None or name == "auto":
        return model_dtype
    found = _BY_NAME.get(str(name).removeprefix("torch."))
    if found is None:
        raise ValueError(
            f"kv_cache_dtype: expected auto, {model}, fp8 or fp8_e4m3, got {name}; the kernels multiply e4m3, pass fp8"
        )
    if found not in (E4M3, model_dtype):
        raise ValueError(f"kv_cache_dtype: expected {model} as the model, auto or fp8, got {name}; pass auto")
    return found


def quantise(x: Tensor, scale: Tensor | float) -> Tensor:
    """e4m3 codes of x / scale, saturated at ±448; NaN stays NaN. The division is done in fp32."""
    return (x.float() / scale).clamp_(-MAX, MAX).to(E4M3)


def quantise_queries(q_nope: Tensor, q_pe: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """[tokens, h_q, 512] and [tokens, h_q, 64] to e4m3, divided by `scale`; the inputs are not changed."""
    return quantise(q_nope, scale), quantise(q_pe, scale)


def write_rows(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor, scale: Tensor) -> None:
    """Write latents [tokens, 512] and rope parts [tokens, (1,) 64] into flat token slots [tokens] of the cache.

    cache: [num_blocks, page_size, 576], uint8 or e4m3 for e4m3 codes (divided by `scale`), else a 16-bit dtype. A
    negative slot is padding. There may be fewer slots than rows: the rows after them are padding too.
    """
    slots = slots.flatten().long()
    rows = slots.numel()
    kv_c, k_pe = kv_c[:rows], k_pe[:rows].reshape(rows, k_pe.shape[-1])
    if bool((slots < 0).any()):
        keep = slots >= 0
        slots, kv_c, k_pe = slots[keep], kv_c[keep], k_pe[keep]
    values = torch.cat([kv_c, k_pe], dim=-1)
    if cache.element_size() == 1:
        values, cache = quantise(values, scale).view(torch.uint8), cache.view(torch.uint8)
    pages = slots // cache.shape[1]
    cache[pages, slots - pages * cache.shape[1]] = values.to(cache.dtype)


def dequantise_pages(cache: Tensor, block_table: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The pages that a block table names, in `dtype` with their real values, and the table of their new places.

    cache: [num_blocks, page_size, 576] e4m3; block_table: int32, any shape. Returns [pages, page_size, 576] and a table
    of the given one's shape.
    """
    used, places = torch.unique(block_table, return_inverse=True)
    pages = cache.view(torch.uint8)[used.long()].view(E4M3)
    return (pages.float() * scale).to(dtype), places.to(block_table.dtype)
