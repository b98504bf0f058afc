# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Reproducer of 2026-11-30-p-scale-and-row-sum.md: asserts its table on any machine, in about half a minute."""

from dataclasses import replace

import torch

from mla_kernels.cases import Case, make_inputs
from mla_kernels.formats import round_to
from mla_kernels.metrics import gain_minus_1, relative_error
from mla_kernels.reference import KERNEL, attention

VARIANTS = {
    "2^8, rounded sum": replace(KERNEL, out_format=None),
    "1, rounded sum": replace(KERNEL, out_format=None, p_scale=1.0),
    "2^8, unrounded sum": replace(KERNEL, out_format=None, row_sum="unrounded"),
    "1, unrounded sum": replace(KERNEL, out_format=None, p_scale=1.0, row_sum="unrounded"),
}
found = {}
for distribution, q_std in (("zero_mean", 1.0), ("shifted_mean", 0.1)):
    case = Case("p", "correctness", (8192,), distribution=distribution, q_std=q_std, h_q=16, num_kv_splits=1)
    given = make_inputs(case)
    args = (given.q_stored, given.kv_stored, given.seq_lens)
    scales = {"sm_scale": given.sm_scale, "q_scale": given.q_scale, "kv_scale": given.kv_scale}
    exact, _ = attention(*args, **scales)
    q, kv = given.q_stored.double() * given.q_scale, given.kv_stored.double() * given.kv_scale
    p = torch.softmax(torch.einsum("bshd,btd->bsht", q, kv) * given.sm_scale, -1)
    p /= p.amax(-1, keepdim=True)
    for name, rounding in VARIANTS.items():
        out, _ = attention(*args, **scales, rounding=rounding, num_kv_splits=1)
        flushed = (round_to(p * rounding.p_scale, "e4m3") == 0).double().mean().item()
        found[distribution, name] = (relative_error(out, exact), gain_minus_1(out, exact), flushed)
        error, gain, share = found[distribution, name]
        line = f"{distribution} {name}: error {100 * error:.3f} %, gain - 1 {100 * gain:+.3f} %"
        print(f"{line}, P = 0: {share:.2%}")

zero, shifted = ({name: found[d, name] for name in VARIANTS} for d in ("zero_mean", "shifted_mean"))
assert zero["1, rounded sum"][2] > 0.3, "without a scale a third of P is flushed to zero"
assert zero["2^8, rounded sum"][2] < 0.001, "with 2^8 next to none is"
assert zero["1, rounded sum"][0] > 2 * zero["2^8, rounded sum"][0], "the error more than halves"
assert abs(shifted["2^8, unrounded sum"][1]) > 2 * abs(shifted["2^8, rounded sum"][1]), "a sum of other values drifts"
print("holds: a scale of 2^8 on P, and the sum of what the product sees")
