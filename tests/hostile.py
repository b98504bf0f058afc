# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Hostile memory for tests: everything that a kernel writes is poisoned before it runs, and looked at afterwards.

`mla_kernels.cases.inputs_from` gives the hostile inputs (NaN in memory that nobody owns, wild table slots).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mla_kernels import ops
from mla_kernels.cases import Results

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits(x: Tensor) -> Tensor:
    """The bit patterns of x, so that NaN and −0 compare like everything else."""
    return x.contiguous().view(BITS[x.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def poison(x: Tensor) -> Tensor:
    """x, every byte 0xFF: NaN in every float format. Works for strided views."""
    x.copy_(torch.full(x.shape, -1, dtype=BITS[x.element_size()], device=x.device).view(x.dtype))
    return x


def mla_decode(q_nope: Tensor, *args: Any, num_kv_splits: int | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """`ops.mla_decode` through the out-variant, into poisoned, strided memory; the memory around must stay poisoned."""
    dtype = torch.float16 if q_nope.dtype == torch.float16 else torch.bfloat16
    *lead, h_q, _ = q_nope.shape
    out_all = poison(torch.empty(*lead, h_q + 1, 520, dtype=dtype, device=q_nope.device))
    lse_all = poison(torch.empty(*lead, h_q + 1, 2, device=q_nope.device))
    kv_cache, block_table = args[1:4:2] if len(args) == 4 else (kwargs["kv_cache"], kwargs["block_table"])
    size = ops.workspace_size(
        lead[0],
        lead[1] if len(lead) == 2 else 1,
        h_q,
        block_table.shape[1] * kv_cache.shape[1],
        num_kv_splits,
        q_nope.device,
    )
    space = poison(torch.empty(size + 64, dtype=torch.uint8, device=q_nope.device))
    out, lse = out_all[..., :h_q, :512], lse_all[..., :h_q, 0]
    ops.mla_decode_out(q_nope, *args, num_kv_splits=num_kv_splits, out=out, lse=lse, workspace=space[:size], **kwargs)
    assert bool((bits(out_all[..., :h_q, 512:]) == -1).all()), "wrote past the 512 dims of out"
    assert bool((bits(out_all[..., h_q:, :]) == -1).all()), "wrote past the heads of out"
    assert bool((bits(lse_all[..., :h_q, 1:]) == -1).all()), "wrote between the elements of lse"
    assert bool((bits(lse_all[..., h_q:, :]) == -1).all()), "wrote past the heads of lse"
    assert bool((space[size:] == 255).all()), "wrote past the workspace"
    return out.clone(), lse.clone()


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over disjoint sets of tokens, merged by natural-log lse in float64; an empty part has weight 0."""
    lse = torch.stack([part[1].double() for part in parts])
    total = torch.logsumexp(lse, 0)
    weight = torch.exp(lse - torch.where(total == -torch.inf, 0.0, total))
    return (torch.stack([part[0].double() for part in parts]) * weight.unsqueeze(-1)).sum(0), total


def check_empty_rows(results: Results) -> Tensor:
    """Outputs are finite, and rows without keys, which are returned as a mask, have out 0 and lse −inf; others not."""
    assert results.kernel is not None
    assert results.kernel_lse is not None
    assert bool(torch.isfinite(results.kernel).all())
    empty = results.stage_lse == -math.inf
    assert torch.equal(results.kernel_lse == -math.inf, empty)
    assert bool((results.kernel[empty] == 0).all())
    return empty
