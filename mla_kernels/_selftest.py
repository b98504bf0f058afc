# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The test that a library must pass before it is used: a small case with a known answer, outputs poisoned beforehand.

It calls torch.ops.mla_kernels.mla_decode_out as it is registered now. A kernel that returns without writing leaves the
poison standing, and is found out whatever the device reports.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shape:
    """The small case: two tiles of `tile` tokens, a row without tokens, a single token."""

    page: int = 16
    tile: int = 64
    lengths: tuple[int, ...] = (70, 0, 1)
    small_weights: bool = True  # down to 2**-16, which e4m3 holds only if P is stored times 2**8
    tail: float = math.nan  # what the last page of a row holds after its tokens
    splits: tuple[int | None, ...] = (None,)


HEADS = 3
# CUTLASS's kernel takes pages of 128 only, stores P as it is, and multiplies what follows a row's tokens by 0, so that
# must be finite. Splits pick its scheduler, so both are run.
_CUTLASS = Shape(128, 128, (200, 0, 1), small_weights=False, tail=0.0, splits=(None, 1))
SHAPES = {"sm100a": _CUTLASS, "sm100f": _CUTLASS}  # others: Shape()
FORMATS = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
FORMATS_OF = {"sm90a": ("e4m3",)}  # what a target takes; others: all

# The logits are whole multiples of ln 2, so every P is a power of two, exact in e4m3 and bf16 alike. The answer then
# differs from float64 by fp32 sums (far under 1e-5 of the sum of weight x |v|) and the last rounding to bf16 (2**-9;
# doubled).
SUM_TOLERANCE, ROUNDING, LSE_TOLERANCE = 1e-5, 2.0**-8, 1e-4


def _inputs(
    dtype: torch.dtype, device: torch.device, shape: Shape
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """The operator's tensors, and q [h, 576] and kv [tokens, 576] in float64."""
    page, lengths = shape.page, shape.lengths
    token, dim = torch.arange(sum(lengths))[:, None], torch.arange(576)[None]
    kv = ((token * 7 + dim * 3) % 9 - 4).double()  # whole numbers from -4 to 4
    kv[:, 512:] = 0
    kv[:, 517] = -1 - ((token[:, 0] * 5) % 8).double()  # exponents -1 to -8 from the rope part, in a scattered order
    kv[shape.tile + 2, 517] = 0  # the largest in the second tile, so that the first one's sums are rescaled
    q = torch.zeros(HEADS, 576, dtype=torch.float64)
    q[:, 517] = 1
    q[1, 0] = shape.small_weights  # and 4 to -4 from the latent part, in one head
    q[2, 517] = 0  # one head with equal weights
    blocks = [-(-n // page) for n in lengths]
    # Pages that nobody owns hold NaN, block 0 among them.
    cache = torch.full((sum(blocks) + 1, page, 576), math.nan, dtype=torch.float32)
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    block = start = 0
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        for i in range(count):
            block += 1
            table[row, i] = sum(blocks) + 1 - block  # pages in reverse order
            part = kv[start + i * page : start + min((i + 1) * page, length)]
            cache[table[row, i]] = shape.tail
            cache[table[row, i], : len(part)] = part.float()
        start += length
    tensors = {
        "q_nope": q[:, :512].expand(len(lengths), 1, HEADS, 512).to(dtype),
        "q_pe": q[:, 512:].expand(len(lengths), 1, HEADS, 64).to(dtype),
        "kv_cache": cache.to(dtype),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "block_table": table,
    }
    return {name: tensor.contiguous().to(device) for name, tensor in tensors.items()}, q, kv


def _faults(name: str, device: torch.device, shape: Shape, splits: int | None) -> Iterable[str]:
    tensors, q, kv = _inputs(FORMATS[name], device, shape)
    b = len(shape.lengths)
    q_scale, kv_scale = (0.5, 2.0) if name == "e4m3" else (1.0, 1.0)
    sm_scale = math.log(2.0)
    out = torch.full((b, 1, HEADS, 512), math.nan, dtype=torch.bfloat16, device=device)
    lse = torch.full((b, 1, HEADS), math.nan, dtype=torch.float32, device=device)
    torch.ops.mla_kernels.mla_decode_out(
        *tensors.values(), sm_scale, q_scale, kv_scale, None, None, splits, out, lse, None
    )
    got, got_lse = out[:, 0].double().cpu(), lse[:, 0].double().cpu()
    start = 0
    for row, length in enumerate(shape.lengths):
        keys = kv[start : start + length]
        start += length
        logits = q @ keys.T * (sm_scale * q_scale * kv_scale)
        want_lse = torch.logsumexp(logits, -1)  # -inf without keys
        weights = torch.softmax(logits, -1)
        want = weights @ keys[:, :512] * kv_scale
        if unwritten := int(got[row].isnan().sum() + got_lse[row].isnan().sum()):
            yield f"row of {length} tokens: {unwritten} outputs are NaN: not written, or made from memory of nobody"
            continue
        allowed = SUM_TOLERANCE * (weights @ keys[:, :512].abs() * kv_scale) + ROUNDING * want.abs()
        excess = (got[row] - want).abs() - allowed
        if float(excess.max()) > 0:
            at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
            yield f"row of {length} tokens: out{at} (head, dim) is {got[row][at]:.6g}, {want[at]:.6g} is right"
        wrong = (got_lse[row] - want_lse).abs() > LSE_TOLERANCE if length else got_lse[row] != want_lse
        if bool(wrong.any()):
            head = int(wrong.nonzero()[0])
            yield f"row of {length} tokens: lse({head},) is {got_lse[row, head]:.6g}, {want_lse[head]:.6g} is right"


def devices(targets: Iterable[str], device_targets: dict[tuple[int, int], str]) -> dict[str, torch.device | None]:
    """For each target the device that it is tested on: the first one here that it runs on, or None."""
    found: dict[str, torch.device | None] = {}
    for target in targets:
        found[target] = torch.device("cpu") if target == "cpu" else None
        for index in range(torch.cuda.device_count() if target != "cpu" else 0):
            if device_targets.get(torch.cuda.get_device_capability(index)) == target:
                found[target] = torch.device("cuda", index)
                break
    return found


def self_test(targets: Iterable[str], device_targets: dict[tuple[int, int], str]) -> list[str]:
    """Faults of the registered kernels, one line each; empty if right. Targets without a device here are not run.

    torch's default dtype and device, which a caller may have set to its model's, do not count.
    """
    faults = []
    for target, device in devices(targets, device_targets).items():
        if device is None:
            continue
        shape = SHAPES.get(target, Shape())
        for name in FORMATS_OF.get(target, FORMATS):
            for splits in shape.splits:
                said = f"{device}, {name}" + (f", num_kv_splits={splits}" if splits else "")
                with torch.device("cpu"):
                    faults += [f"{said}: {fault}" for fault in _faults(name, device, shape, splits)]
    return faults
