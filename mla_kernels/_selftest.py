# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The test that a library must pass before it is used: a small case with a known answer, outputs poisoned beforehand.

It calls torch.ops.mla_kernels.mla_decode_out as it is registered now. A kernel that returns without writing leaves the
poison standing, and is found out whatever the device reports.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

PAGE, LENGTHS, HEADS = 16, (70, 0, 1), 3  # two tiles of 64, a row without tokens, a single token
FORMATS = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
FORMATS_OF = {"cpu": ("bf16", "e4m3"), "sm90a": ("e4m3",)}  # what a target takes; others: e4m3

# The logits are whole multiples of ln 2, so every P is a power of two, exact in e4m3 and bf16 alike. The answer then
# differs from float64 by fp32 sums (far under 1e-5 of the sum of weight x |v|) and the last rounding to bf16 (2**-9;
# doubled).
SUM_TOLERANCE, ROUNDING, LSE_TOLERANCE = 1e-5, 2.0**-8, 1e-4


def _inputs(dtype: torch.dtype, device: torch.device) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """The operator's tensors, and q [h, 576] and kv [tokens, 576] in float64."""
    token, dim = torch.arange(sum(LENGTHS))[:, None], torch.arange(576)[None]
    kv = ((token * 7 + dim * 3) % 9 - 4).double()  # whole numbers from -4 to 4
    kv[:, 512:] = 0
    kv[:, 517] = -1 - ((token[:, 0] * 5) % 8).double()  # exponents -1 to -8 from the rope part, in a scattered order
    kv[66, 517] = 0  # the largest in the second tile, so that the first one's sums are rescaled
    q = torch.zeros(HEADS, 576, dtype=torch.float64)
    q[:, 517] = 1
    q[1, 0] = 1  # and 4 to -4 from the latent part, in one head
    q[2, 517] = 0  # one head with equal weights
    blocks = [-(-n // PAGE) for n in LENGTHS]
    cache = torch.full((sum(blocks) + 1, PAGE, 576), math.nan)  # rows that nobody owns hold NaN; so does block 0
    table = torch.zeros(len(LENGTHS), max(blocks), dtype=torch.int32)
    block = start = 0
    for row, (length, count) in enumerate(zip(LENGTHS, blocks, strict=True)):
        for i in range(count):
            block += 1
            table[row, i] = sum(blocks) + 1 - block  # pages in reverse order
            part = kv[start + i * PAGE : start + min((i + 1) * PAGE, length)]
            cache[table[row, i], : len(part)] = part.float()
        start += length
    tensors = {
        "q_nope": q[:, :512].expand(len(LENGTHS), 1, HEADS, 512).to(dtype),
        "q_pe": q[:, 512:].expand(len(LENGTHS), 1, HEADS, 64).to(dtype),
        "kv_cache": cache.to(dtype),
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
        "block_table": table,
    }
    return {name: tensor.contiguous().to(device) for name, tensor in tensors.items()}, q, kv


def _faults(name: str, dtype: torch.dtype, device: torch.device) -> Iterable[str]:
    tensors, q, kv = _inputs(dtype, device)
    q_scale, kv_scale = (0.5, 2.0) if name == "e4m3" else (1.0, 1.0)
    sm_scale = math.log(2.0)
    out = torch.full((len(LENGTHS), 1, HEADS, 512), math.nan, dtype=torch.bfloat16, device=device)
    lse = torch.full((len(LENGTHS), 1, HEADS), math.nan, device=device)
    torch.ops.mla_kernels.mla_decode_out(
        *tensors.values(), sm_scale, q_scale, kv_scale, None, None, None, out, lse, None
    )
    got, got_lse = out[:, 0].double().cpu(), lse[:, 0].double().cpu()
    start = 0
    for row, length in enumerate(LENGTHS):
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
    """Faults of the registered kernels, one line each; empty if right. Targets without a device here are not run."""
    faults = []
    for target, device in devices(targets, device_targets).items():
        if device is None:
            continue
        for name in FORMATS_OF.get(target, ("e4m3",)):
            faults += [f"{device}, {name}: {fault}" for fault in _faults(name, FORMATS[name], device)]
    return faults
