# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The accumulator model of the reference: against its description in exact arithmetic and against recorded hardware."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from drawn import rand, stored

from mla_kernels import reference
from mla_kernels.cases import SM_SCALE
from mla_kernels.formats import D, round_to
from mla_kernels.reference import KERNEL, Accumulator, Rounding, attention, tensor_core_matmul

pytestmark = pytest.mark.usefixtures("one_thread")


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def one_sum(a: list[float], b: list[float], spec: Accumulator) -> float:
    """The model from its description, in exact rational arithmetic, one dot product."""

    def exponent(x: float) -> int:
        return max(math.frexp(x)[1] - 1, spec.min_exponent)

    def cut(x: Fraction, e: int, bits: int) -> Fraction:  # toward zero, to `bits` below 2^e
        unit = Fraction(2) ** (e - bits)
        return int(x / unit) * unit

    def own(x: Fraction) -> int:  # floor(log2 |x|)
        return math.frexp(float(x))[1] - 1

    wide, part, since = Fraction(0), Fraction(0), 0
    for k in range(0, len(a), spec.k_step):
        pairs = [(x, y) for x, y in zip(a[k : k + spec.k_step], b[k : k + spec.k_step], strict=True) if x and y]
        products = [Fraction(x) * Fraction(y) for x, y in pairs]
        if spec.truncate == "sum":
            total = part + sum(products)
        else:
            exponents = [exponent(x) + exponent(y) for x, y in pairs] + ([own(part)] if part else [])
            e = max(exponents, default=0)
            total = sum((cut(x, e, spec.fraction_bits) for x in [*products, part]), Fraction(0))
        part = cut(total, own(total), min(spec.fraction_bits, 23)) if total else Fraction(0)
        since += spec.k_step
        if spec.promote_every is not None and since >= spec.promote_every:
            wide, part, since = wide + part, Fraction(0), 0
    return float(wide + part)


SPECS = {
    "hopper": Accumulator(),
    "promote-64": Accumulator(promote_every=64),
    "promote-32": Accumulator(promote_every=32),
    "14-bits": Accumulator(fraction_bits=14),
    "k-16": Accumulator(k_step=16, promote_every=48),
    "4-bits": Accumulator(fraction_bits=4),  # so few that the exponent given to subnormals shows
    "25-bits": Accumulator(fraction_bits=25),  # float64 inside
    "sum-13": Accumulator(truncate="sum"),
    "sum-promote": Accumulator(truncate="sum", promote_every=64),
}


@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("kind", ["normal", "positive", "subnormal", "wide"])
def test_accumulator_is_its_description(name: str, kind: str) -> None:
    spec, n = SPECS[name], 150  # not a multiple of k_step: the last instruction is partly filled
    a, b = rand(3, n, seed=20), rand(n, 4, seed=21)
    if kind == "positive":
        a, b = a.abs() * 100, b.abs() + 0.5
    if kind == "subnormal":
        a, b = a * 2.0**-8, b * 2.0**-7
    if kind == "wide":
        a, b = a * torch.exp2(torch.randint(-9, 8, a.shape, generator=torch.Generator().manual_seed(1))), b * 50
    a, b = round_to(a, "e4m3"), round_to(b, "e4m3")
    a[:, 40:80] = 0.0
    got = tensor_core_matmul(a, b, spec)
    expected = [[one_sum(a[i].tolist(), b[:, j].tolist(), spec) for j in range(4)] for i in range(3)]
    if spec.truncate == "sum":  # the sum of 32 products and the accumulator is float64's there
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=2.0**-12, atol=1e-12)
    else:
        assert got.tolist() == expected


def test_operands_with_many_bits_take_the_wide_path() -> None:
    a, b = rand(2, 64, seed=22), rand(64, 3, seed=23)
    spec = Accumulator(min_exponent=-1000)
    got = tensor_core_matmul(a, b, spec)
    assert got.tolist() == [[one_sum(a[i].tolist(), b[:, j].tolist(), spec) for j in range(3)] for i in range(2)]


def test_narrow_and_wide_arithmetic_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = stored(2, 4, 256, seed=24, mean=1.0), stored(2, 256, 8, seed=25, mean=1.0)
    narrow = tensor_core_matmul(a, b, Accumulator(promote_every=128))
    monkeypatch.setattr(reference, "_NARROW_BITS", 0)
    assert torch.equal(tensor_core_matmul(a, b, Accumulator(promote_every=128)), narrow)


# One m64n16k32 fp8 instruction after another into one accumulator, V = 1 ± 0.5, P in 0..1: value / exact sum - 1 in
# percent, by k32 steps and promotion interval in steps (None: in place). Recorded: NVIDIA H200, CUDA 13.0, 2026-11-30.
RECORDED = {
    4: {None: -0.03, 4: -0.03, 1: -0.01},
    16: {None: -0.5, 16: -0.5, 4: -0.03, 1: -0.01},
    64: {None: -2.9, 64: -2.9, 16: -0.5, 4: -0.03, 1: -0.01},
    256: {None: -16.8, 64: -2.9, 16: -0.5, 4: -0.03, 1: -0.01},
    1024: {None: -47.9, 64: -2.9, 16: -0.5, 4: -0.03, 1: -0.01},
    4096: {None: -76.1, 64: -2.9, 16: -0.5, 4: -0.03, 1: -0.01},
}


def misses(spec: Accumulator, longest: int = 4096) -> list[tuple[int, int | None, float, float]]:
    """Entries of the recorded table that the model misses by more than 20 % of the entry and 0.01 points.

    0.01 points is the table's last digit. 20 %: the recorded P and V are known by their range only, and redrawing the
    model's moves an entry by up to 10 %; a bit more or less of accumulator moves it by a factor 2.
    """
    generator = torch.Generator().manual_seed(0)
    p = round_to(torch.rand(8, 32 * longest, generator=generator, dtype=torch.float64), "e4m3")
    v = round_to(torch.rand(32 * longest, 16, generator=generator, dtype=torch.float64) + 0.5, "e4m3")
    found = []
    for steps, line in RECORDED.items():
        if steps > longest:
            continue
        a, b = p[:, : 32 * steps], v[: 32 * steps]
        for promote, recorded in line.items():
            if steps > 256 and promote in (1, 4, 16):
                continue  # as at 256 steps: promoted sums do not depend on the length
            model = tensor_core_matmul(a, b, replace(spec, promote_every=promote and 32 * promote))
            percent = 100 * float((model / (a @ b) - 1).mean())
            if abs(percent - recorded) > 0.2 * abs(recorded) + 0.01:
                found.append((steps, promote, recorded, percent))
    return found


def test_13_bits_with_every_addend_cut_is_the_recorded_hardware() -> None:
    assert misses(Accumulator(fraction_bits=13)) == []


@pytest.mark.parametrize(
    "spec",
    [Accumulator(fraction_bits=14), Accumulator(fraction_bits=12), Accumulator(truncate="sum")],
    ids=["14-bits", "12-bits", "only-the-sum"],
)
def test_other_variants_are_not(spec: Accumulator) -> None:
    assert len(misses(spec, longest=256)) >= 5


def test_promotion_across_tiles_equals_one_wide_tile() -> None:
    """The step-by-step path (intervals over a tile) against the tile-parallel one, with a maximum that never moves."""
    q, kv = stored(1, 1, 3, D, seed=26), stored(1, 512, D, seed=27, mean=0.5)
    kv[0, 0] = q[0, 0, 0]
    q = q[:, :, :1].expand(1, 1, 3, D).clone()  # key 0 is the query: the largest logit by far
    q[0, 0, 1] *= 0.5
    q[0, 0, 2] *= 0.25
    accumulator = Accumulator(promote_every=128)
    kw: dict[str, Any] = {"sm_scale": 0.01}
    split = attention(q, kv, [500], rounding=replace(KERNEL, block_n=64, pv_accumulator=accumulator), **kw)[0]
    whole = attention(q, kv, [500], rounding=replace(KERNEL, block_n=128, pv_accumulator=accumulator), **kw)[0]
    assert torch.equal(split, whole)
    none = attention(q, kv, [500], rounding=KERNEL, **kw)[0]
    assert not torch.equal(none, whole)


def test_accumulator_in_place_is_rescaled_with_the_maximum() -> None:
    """A maximum that moves up tile by tile: the in-place sum is scaled down, not lost and not doubled."""
    q, kv = stored(1, 1, 2, D, seed=28), stored(1, 640, D, seed=29)
    ramp = torch.linspace(0.0, 2.0, 640, dtype=torch.float64)
    kv[0] = round_to(kv[0] + ramp[:, None] * q[0, 0, 0].sign(), "e4m3")
    exact, _ = attention(q, kv, [640], sm_scale=0.02)
    for promote in (None, 32, 64, 128, 256):
        out, _ = attention(
            q, kv, [640], sm_scale=0.02, num_kv_splits=2,
            rounding=Rounding(p_format="e4m3", p_scale=256.0, pv_accumulator=Accumulator(promote_every=promote)),
        )  # fmt: skip
        assert relative(out, exact) < 0.03


def test_length_costs_gain_in_place_and_not_with_promotion() -> None:
    q, kv = stored(1, 1, 2, D, seed=30), stored(1, 4096, D, seed=31, mean=1.0)

    def gain(tokens: int, promote: int | None) -> float:
        rounding = replace(KERNEL, pv_accumulator=Accumulator(promote_every=promote))
        exact, _ = attention(q, kv, [tokens], sm_scale=0.002)
        out, _ = attention(q, kv, [tokens], sm_scale=0.002, rounding=rounding)
        return float((out * exact).sum() / (exact * exact).sum()) - 1

    in_place = [gain(tokens, None) for tokens in (128, 1024, 4096)]
    assert 0.001 > in_place[0] > in_place[1] > in_place[2]
    assert in_place[2] < -0.02
    assert abs(gain(4096, 64)) < 0.002
    assert abs(gain(4096, 128)) < 0.002


@pytest.mark.parametrize(
    ("q_std", "tokens", "recorded"), [(1.0, 512, -0.5), (1.0, 2048, -2.0), (1.0, 8192, -7.3), (0.1, 32768, -38.5)]
)
def test_in_place_accumulation_loses_what_a_kernel_without_promotion_lost(
    q_std: float, tokens: int, recorded: float
) -> None:
    """gain - 1 in percent of FlashMLA's fp8 decode on latents with mean 1, std 1, kv_scale 1, against the model.

    Recorded: NVIDIA H200, CUDA 13.0, vLLM 0.23.0, 2026-11-30. Its sm_scale and its scale of P were not written down;
    with 192^-0.5 and 2^8 the model comes within 11 % of each figure. Asserted: 15 % and half of the last digit.
    """
    q, kv = round_to(rand(1, 1, 2, D, seed=34) * q_std, "e4m3"), stored(1, tokens, D, seed=35, mean=1.0)
    exact, _ = attention(q, kv, [tokens], sm_scale=SM_SCALE)
    rounding = Rounding(p_format="e4m3", p_scale=256.0, pv_accumulator=Accumulator(promote_every=None))
    out, _ = attention(q, kv, [tokens], sm_scale=SM_SCALE, rounding=rounding)
    percent = 100 * (float((out * exact).sum() / (exact * exact).sum()) - 1)
    assert abs(percent - recorded) <= 0.15 * abs(recorded) + 0.05
    promoted = replace(rounding, pv_accumulator=Accumulator(promote_every=128))
    out, _ = attention(q, kv, [tokens], sm_scale=SM_SCALE, rounding=promoted)
    assert abs(100 * (float((out * exact).sum() / (exact * exact).sum()) - 1)) < 0.15


def test_a_narrow_accumulator_shifts_logits() -> None:
    q, kv = stored(1, 1, 4, D, seed=32), stored(1, 256, D, seed=33)
    exact, exact_lse = attention(q, kv, [256], sm_scale=SM_SCALE)
    for bits, low, high in ((13, 1e-6, 5e-3), (8, 5e-3, 0.5)):
        rounding = Rounding(qk_accumulator=Accumulator(fraction_bits=bits))
        out, lse = attention(q, kv, [256], sm_scale=SM_SCALE, rounding=rounding)
        assert low < float((lse - exact_lse).abs().max()) < high
        assert relative(out, exact) > 0
