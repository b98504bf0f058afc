# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Queries to e4m3 in one launch: what torch would do in four to eight kernels before every decode call."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_kernels.checks import D_NOPE, D_ROPE

__all__ = ["quantise_queries"]


# Triton reads annotations as types of its own, so the two kernels have none but constexpr.
@triton.jit
def _codes(x, scale):  # type: ignore[no-untyped-def]
    # Rounded division, as torch has it; NaN stays NaN, the rest saturates.
    real = tl.clamp(tl.div_rn(x.to(tl.float32), scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return real.to(tl.float8e4nv)


@triton.jit
def _quantise(  # type: ignore[no-untyped-def]
    q_nope,  # [tokens, h_q, 512], last stride 1
    q_pe,  # [tokens, h_q, 64], last stride 1
    scale,  # one fp32
    out,  # [tokens, h_q, 576] e4m3, contiguous
    nope_token,
    nope_head,
    pe_token,
    pe_head,
    h_q,
    nope: tl.constexpr,
    rope: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token, head = row // h_q, row % h_q
    by = tl.load(scale)
    i, j = tl.arange(0, nope), tl.arange(0, rope)
    latent = tl.load(q_nope + token * nope_token + head * nope_head + i)
    rotary = tl.load(q_pe + token * pe_token + head * pe_head + j)
    tl.store(out + row * (nope + rope) + i, _codes(latent, by))
    tl.store(out + row * (nope + rope) + nope + j, _codes(rotary, by))


def quantise_queries(q_nope: Tensor, q_pe: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """[tokens, h_q, 512] and [tokens, h_q, 64] to e4m3, divided by `scale` (one fp32 on the device).

    Strides are free but for the last, which is 1; the inputs are not changed. The results are two views of one tensor
    [tokens, h_q, 576]. The same bytes as `mla_kernels.vllm.cache.quantise` gives.
    """
    tokens, h_q, _ = q_nope.shape
    out = torch.empty((tokens, h_q, D_NOPE + D_ROPE), dtype=torch.float8_e4m3fn, device=q_nope.device)
    if tokens:
        _quantise[(tokens * h_q,)](
            q_nope,
            q_pe,
            scale,
            out,
            q_nope.stride(0),
            q_nope.stride(1),
            q_pe.stride(0),
            q_pe.stride(1),
            h_q,
            D_NOPE,
            D_ROPE,
            num_warps=2,
        )
    return out[..., :D_NOPE], out[..., D_NOPE:]
