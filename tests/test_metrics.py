# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Metrics by hand, planted faults for every verdict, the additive split, layer tables, distributions of next tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from drawn import rand
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_kernels import metrics
from mla_kernels.formats import round_to

pytestmark = pytest.mark.usefixtures("one_thread")

INF, NAN = math.inf, math.nan


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_metrics_by_hand() -> None:
    ref, out = t(3.0, 4.0), t(3.0, 3.0)
    assert metrics.relative_error(out, ref) == pytest.approx(1 / 5)
    assert metrics.gain_minus_1(out, ref) == pytest.approx(21 / 25 - 1)
    assert metrics.squared_relative_error(out, ref) == pytest.approx(1 - 2 * 21 / (18 + 25))
    assert metrics.max_abs_error(out, ref) == 1.0
    assert metrics.row_errors(torch.stack([out, ref]), torch.stack([ref, ref])).tolist() == pytest.approx([0.2, 0.0])


def test_gain_sees_lost_length_and_noise_does_not_look_like_it() -> None:
    ref = rand(64, 512)
    assert metrics.gain_minus_1(0.8 * ref, ref) == pytest.approx(-0.2, abs=1e-12)
    noisy = ref + 0.2 * rand(64, 512, seed=1)
    assert abs(metrics.gain_minus_1(noisy, ref)) < 0.01
    assert metrics.relative_error(noisy, ref) == pytest.approx(0.2, rel=0.02)


def test_squared_relative_error_is_half_the_square_near_a_right_answer_and_1_for_zero() -> None:
    ref = rand(8, 512)
    out = ref + 1e-3 * rand(8, 512, seed=2)
    assert metrics.squared_relative_error(out, ref) == pytest.approx(
        metrics.relative_error(out, ref) ** 2 / 2, rel=1e-2
    )
    assert metrics.squared_relative_error(torch.zeros_like(ref), ref) == 1.0
    assert metrics.squared_relative_error(1e9 * ref, ref) == pytest.approx(1.0, abs=1e-8)


def test_low_precision_inputs_are_compared_in_float64() -> None:
    ref = torch.full((1000,), 1.0, dtype=torch.bfloat16)
    out = ref.to(torch.float64) + 1e-9
    assert metrics.relative_error(out, ref) == pytest.approx(1e-9, rel=1e-6)


def test_zeros_and_infinities() -> None:
    zero, one = torch.zeros(1, 4), torch.ones(1, 4)
    assert metrics.relative_error(zero, zero) == 0.0
    assert metrics.relative_error(one, zero) == INF
    assert metrics.row_errors(zero, zero).tolist() == [0.0]
    assert metrics.row_errors(one, zero).tolist() == [INF]
    assert metrics.gain_minus_1(zero, zero) == 0.0
    assert math.isnan(metrics.gain_minus_1(one, zero))
    assert metrics.max_abs_error(t(-INF, 1.0), t(-INF, 1.5)) == 0.5  # lse of an empty row
    assert math.isnan(metrics.max_abs_error(t(0.0), t(-INF)))
    assert math.isnan(metrics.max_abs_error(t(NAN), t(0.0)))
    assert metrics.max_abs_error(torch.zeros(0), torch.zeros(0)) == 0.0


def test_non_finite_values_are_reported_first() -> None:
    ref = rand(3, 8)
    out = ref.clone()
    out[0, 0], out[1, 1], out[1, 2] = NAN, INF, -INF
    assert metrics.nonfinite_count(out) == 3
    summary = metrics.error_summary(out, ref)
    assert next(iter(summary)) == "nonfinite"
    assert summary["nonfinite"] == 3
    assert math.isnan(summary["relative_error"])
    assert math.isnan(metrics.squared_relative_error(out, ref))
    clean = metrics.error_summary(ref, ref)
    assert clean == dict.fromkeys(clean, 0.0)


def test_quantiles() -> None:
    x = torch.arange(101.0)[torch.randperm(101, generator=torch.Generator().manual_seed(0))] - 50
    assert metrics.quantiles(x, (0.0, 0.5, 0.985, 1.0)) == {0.0: 0.0, 0.5: 25.0, 0.985: 49.5, 1.0: 50.0}
    assert metrics.quantiles(t(1.0, NAN, -3.0, INF), (0.5, 1.0)) == {0.5: 2.0, 1.0: 3.0}
    assert math.isnan(metrics.quantiles(t(NAN), (0.5,))[0.5])
    assert metrics.quantiles(rand(1 << 22), (1.0,))[1.0] > 4.5  # torch.quantile refuses this size


@pytest.mark.parametrize(
    ("a", "b", "element", "steps"),
    [
        (1.0, 1.0078125, "bf16", 1),
        (1.0, 0.99609375, "bf16", 1),
        (1.0, 2.0, "bf16", 128),
        (-1.0, 1.0, "bf16", 2 * 127 * 128),
        (0.0, -0.0, "bf16", 0),
        (0.0, 2.0**-133, "bf16", 1),
        (1.0, 1.001, "bf16", 0),
        (448.0, 416.0, "e4m3", 1),
        (0.0, 2.0**-9, "e4m3", 1),
        (2.0**-6, 7 * 2.0**-9, "e4m3", 1),
        (-(2.0**-9), 2.0**-9, "e4m3", 2),
        (1.0, 1.125, "e4m3", 1),
        (448.0, 1e9, "e4m3", 0),
        (65504.0, INF, "fp16", 1),
        (NAN, 1.0, "bf16", -1),
    ],
)
def test_ulp_distance_by_hand(a: float, b: float, element: str, steps: int) -> None:
    assert metrics.ulp_distance(t(a), t(b), element).tolist() == [steps]
    assert metrics.ulp_distance(t(b), t(a), element).tolist() == [steps]


def test_ulp_distance_equals_the_distance_of_bit_patterns() -> None:
    x, y = rand(1000, seed=3).exp().to(torch.bfloat16), rand(1000, seed=4).exp().to(torch.bfloat16)
    bits = (x.view(torch.int16).to(torch.int64) - y.view(torch.int16).to(torch.int64)).abs()
    assert torch.equal(metrics.ulp_distance(x, y), bits)


def test_ulp_histogram_counts_everything_once() -> None:
    ref = round_to(rand(50, 64, seed=5), "bf16")
    out = ref * (1 + 2.0**-7 * torch.randint(0, 40, ref.shape, generator=torch.Generator().manual_seed(0)))
    out[0, 0] = NAN
    rows = metrics.ulp_histogram(out, ref)
    assert [row["bin"] for row in rows] == ["nan", "0", "1", "2–3", "4–7", "8–15", "16–31", "32–63", "64+"]
    assert rows[0]["count"] == 1
    assert sum(row["count"] for row in rows) == ref.numel()
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)
    distance = metrics.ulp_distance(out, ref)
    assert rows[3]["count"] == int(((distance == 2) | (distance == 3)).sum())


# ------------------------------------------------------------------------------------------------------------ verdicts

BUDGET = 1e-3


def planted(fault: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, ref, previous, all [4, 3, 512], with one fault in row (2, 1)."""
    ref, previous = rand(4, 3, 512, seed=6), rand(4, 3, 512, seed=7)
    out = ref * (1 + 1e-4 * rand(4, 3, 512, seed=8))
    row = out[2, 1]
    if fault == "zero":
        row.zero_()
    elif fault == "noise":
        row += 0.05 * rand(512, seed=9)
    elif fault == "slight-noise":
        row += 5e-3 * rand(512, seed=9)
    elif fault == "outlier":
        row[77] += 40.0
    elif fault == "non_finite":
        row[3] = NAN
    elif fault == "infinite":
        row[3] = INF
    elif fault == "stale":
        row.copy_(previous[2, 1])
    elif fault == "stale-part":
        row[64:192] = previous[2, 1, 64:192]
    elif fault == "swapped":
        row.copy_(ref[3, 0])
    elif fault == "gain":
        row *= 0.8
    return out, ref, previous


@pytest.mark.parametrize(
    ("fault", "verdict", "detail"),
    [
        ("none", "ok", ""),
        ("zero", "zero", "every element is 0"),
        ("noise", "noise", "spread"),
        ("slight-noise", "noise", "spread"),  # under 1e-2, so near its own reference: not swapped with itself
        ("gain", "noise", "spread"),
        ("outlier", "outlier", "25 of 512 elements carry 100%"),
        ("non_finite", "non_finite", "1 NaN, 0 infinite of 512"),
        ("infinite", "non_finite", "0 NaN, 1 infinite of 512"),
        ("stale", "stale", "100% of the row"),
        ("stale-part", "stale", "25% of the row"),
        ("swapped", "swapped", r"row (3, 0)"),
    ],
)
def test_each_planted_fault_is_named(fault: str, verdict: str, detail: str) -> None:
    out, ref, previous = planted(fault)
    verdicts = metrics.row_verdicts(out, ref, budget=BUDGET, previous=previous)
    assert len(verdicts) == 12
    by_row = {v.row: v for v in verdicts}
    assert by_row[2, 1].verdict == verdict
    assert detail in by_row[2, 1].detail
    assert all(v.verdict == "ok" for row, v in by_row.items() if row != (2, 1))
    counts = metrics.verdict_counts(verdicts)
    assert list(counts) == list(metrics.VERDICTS)
    assert counts["ok"] == (12 if fault == "none" else 11)
    assert counts[verdict] == (12 if fault == "none" else 1)


@pytest.mark.parametrize("poison", [NAN, 123.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_poison_left_over_is_stale(poison: float, dtype: torch.dtype) -> None:
    out, ref, _ = planted("none")
    out[2, 1, 100:400] = poison
    verdicts = metrics.row_verdicts(out.to(dtype), ref, budget=1e-2, previous=poison)
    assert [v.row for v in verdicts if v.verdict != "ok"] == [(2, 1)]
    assert next(v for v in verdicts if v.row == (2, 1)).verdict == "stale"
    unknown = metrics.row_verdicts(out.to(dtype), ref, budget=1e-2)
    assert next(v for v in unknown if v.row == (2, 1)).verdict in ("non_finite", "noise")


def test_a_right_row_that_equals_what_the_buffer_held_is_ok() -> None:
    out, ref, _ = planted("none")
    assert all(v.verdict == "ok" for v in metrics.row_verdicts(out, ref, budget=BUDGET, previous=out.clone()))


def test_empty_rows_are_ok_when_zero() -> None:
    ref = rand(2, 512)
    ref[0] = 0.0
    assert [v.verdict for v in metrics.row_verdicts(ref, ref, budget=BUDGET, previous=0.0)] == ["ok", "ok"]
    bad = ref.clone()
    bad[0, :] = 1.0
    assert metrics.row_verdicts(bad, ref, budget=BUDGET)[0].verdict == "noise"


# --------------------------------------------------------------------------------------------------------------- split


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(-6, 2), st.floats(-6, 2), st.floats(-6, 2))
def test_split_adds_up(seed: int, a: float, b: float, c: float) -> None:
    oracle = rand(3, 64, seed=seed)
    form = oracle + 10**a * rand(3, 64, seed=seed + 1)
    stage = form + 10**b * rand(3, 64, seed=seed + 2)
    kernel = stage + 10**c * rand(3, 64, seed=seed + 3)
    split = metrics.error_split(oracle, form, stage, kernel)
    assert split.residual <= 1e-12 * max(1.0, 1e-3 / metrics.relative_error(kernel, oracle))
    total = sum(split.parts.values(), torch.zeros_like(oracle))
    assert (total - split.total).norm() <= 1e-12 * kernel.norm()
    assert torch.equal(split.total, kernel - oracle)
    gain = split.gain()
    assert gain["format"] + gain["stage"] + gain["implementation"] == pytest.approx(gain["total"], abs=1e-9)


def test_a_missing_part_shows_in_the_residual() -> None:
    oracle = rand(4, 64)
    split = metrics.error_split(oracle, oracle + 1e-2, oracle + 2e-2, oracle + 3e-2)
    broken = metrics.ErrorSplit(split.oracle, split.format, torch.zeros_like(oracle), split.implementation, split.total)
    assert split.residual < 1e-12
    assert broken.residual == pytest.approx(1 / 3)


def test_split_rows() -> None:
    oracle = rand(2, 8, seed=10)
    kernel = oracle * 1.1
    rows = metrics.error_split(oracle, oracle, oracle, kernel.to(torch.bfloat16)).rows(distribution="x", tokens=3)
    assert [row["part"] for row in rows] == ["format", "stage", "implementation", "total"]
    assert all(row["distribution"] == "x" and row["tokens"] == 3 for row in rows)
    assert [row["relative_error"] for row in rows[:2]] == [0.0, 0.0]
    assert rows[2]["relative_error"] == rows[3]["relative_error"] == pytest.approx(0.1, abs=0.01)
    assert rows[3]["gain"] == pytest.approx(0.1, abs=0.01)
    kernel[0, 0] = NAN
    rows = metrics.error_split(oracle, oracle, oracle, kernel).rows()
    assert [row["nonfinite"] for row in rows] == [0, 0, 1, 1]


# -------------------------------------------------------------------------------------------------------------- budget


@pytest.mark.parametrize("dtype", ["e4m3", "bf16", "fp16"])
def test_budget_is_bounded_and_grows(dtype: str) -> None:
    budgets = [metrics.implementation_budget(n, dtype=dtype) for n in (0, 1, 128, 8192, 131072)]
    assert budgets == sorted(budgets)
    assert budgets[0] > 0
    assert budgets[-1] <= 1e-2
    assert metrics.implementation_budget(128, dtype=dtype, logit_error=1e-3) >= budgets[2]
    assert metrics.implementation_budget(10**9, dtype=dtype, logit_error=1.0) == 1e-2


def test_budget_terms_by_simulation() -> None:
    """The two flip terms of the derivation, on random numbers: errors d before rounding, compared after rounding."""
    error = 2.0**-14  # large enough to see many flips
    x = rand(1 << 18, seed=11).abs() + 0.5
    y = x * (1 + error * rand(1 << 18, seed=12))
    bound = math.sqrt(2.0**-7 * float((y - x).abs().mean() / x.square().mean().sqrt()))
    seen = metrics.relative_error(round_to(y, "bf16"), round_to(x, "bf16"))
    assert 0.4 * bound < seen < bound  # output flips: √(|a − b| · ulp)
    seen = metrics.relative_error(round_to(y, "e4m3"), round_to(x, "e4m3"))
    assert 0.4 < seen / math.sqrt(error * 2.0**-3) < 1.0  # P flips: √(d · step)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("e4m3", 2**-4 + 2**-7), ("bf16", 2**-8 + 2**-7), ("fp16", 1.5 * 2**-10)]
)
def test_row_budget(dtype: str, expected: float) -> None:
    assert metrics.row_budget(dtype) == expected


# -------------------------------------------------------------------------------------------------------------- layers


def layers() -> list[torch.Tensor]:
    """Eight synthetic layers: 2 has values near 1e-4, 5 an outlier channel × 1000, 7 a NaN."""
    made = [rand(256, 576, seed=20 + i) for i in range(8)]
    made[2] = made[2] * 1e-4
    made[5][:, 33] *= 1000.0
    made[7][3, 3] = NAN
    return made


def test_layer_table_ranks_clipping_and_flushing() -> None:
    rows = [metrics.layer_row(i, x, "e4m3", scale=0.1) for i, x in enumerate(layers())]
    assert [row["layer"] for row in rows] == list(range(8))
    assert max(rows, key=lambda row: row["share_clipped"])["layer"] == 5
    assert max(rows, key=lambda row: row["share_flushed"])["layer"] == 2
    assert rows[2]["share_flushed"] > 0.5 > 0.01 > rows[0]["share_flushed"]
    assert rows[5]["share_clipped"] > 1e-3 > rows[0]["share_clipped"] == 0
    assert rows[5]["max"] > 1000 > 10 > rows[0]["max"] > rows[0]["p99.99"] > 3
    assert rows[5]["round_trip_error"] > 0.5 > 0.05 > rows[0]["round_trip_error"]
    assert next(iter(rows[0])) == "layer"
    assert list(rows[0])[1] == "nonfinite"


def test_raising_the_scale_moves_the_counts() -> None:
    low, high = ([metrics.layer_row(i, x, "e4m3", scale=s) for i, x in enumerate(layers())] for s in (0.1, 0.4))
    assert high[5]["share_clipped"] < low[5]["share_clipped"]
    assert high[2]["share_flushed"] > low[2]["share_flushed"]
    assert all(row["share_clipped"] == 0 for row in (metrics.layer_row(0, x) for x in layers()))  # amax clips nothing


def test_a_layer_with_nan_is_shown() -> None:
    rows = [metrics.layer_row(i, x, "e4m3", scale=0.1, out=x, out_ref=x) for i, x in enumerate(layers())]
    assert rows[7]["nonfinite"] == 1
    assert math.isnan(rows[7]["round_trip_error"])
    assert rows[7]["max"] < 10
    assert math.isnan(metrics.layer_row(0, layers()[0])["output_error"])  # not given
    assert rows[0]["output_error"] == 0.0
    kept = metrics.layers_to_keep(rows, by="round_trip_error", limit=0.1)
    assert kept == [7, 5, 2]  # NaN first, then the worst
    assert metrics.layers_to_keep(rows[:2], by="round_trip_error", limit=0.1) == []


# ---------------------------------------------------------------------------------------------------------- next token


def test_kl_by_hand() -> None:
    ref, ours = t(0.5, 0.25, 0.25).log(), t(0.25, 0.5, 0.25).log()
    assert float(metrics.kl_divergence(ours + 3.0, ref - 7.0)) == pytest.approx(0.25 * math.log(2), abs=1e-14)
    assert float(metrics.kl_divergence(ref, ref)) == 0.0
    masked = t(0.0, 0.0, -INF)
    assert float(metrics.kl_divergence(masked, masked)) == pytest.approx(0.0, abs=1e-15)
    assert float(metrics.kl_divergence(masked, t(0.0, 0.0, 0.0))) == INF
    assert not bool(metrics.top1_agreement(ours, ref))
    assert bool(metrics.top1_agreement(ref, ref))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.0, 5.0))
def test_kl_is_not_negative_and_ignores_offsets(seed: int, size: float) -> None:
    ref = rand(4, 50, seed=seed)
    ours = ref + size * rand(4, 50, seed=seed + 1)
    kl = metrics.kl_divergence(ours, ref)
    assert (kl >= -1e-12).all()
    torch.testing.assert_close(metrics.kl_divergence(ours + 100.0, ref - 5.0), kl, rtol=1e-9, atol=1e-11)


def test_kl_summaries() -> None:
    ref = rand(6, 40, 30, seed=30)
    ours = ref.clone()
    ours[2, 7] = -ref[2, 7]
    summary = metrics.kl_summary(ours, ref)
    assert summary["positions"] == 240
    assert summary["kl_median"] == 0.0
    assert summary["kl_max"] > 0.1
    assert summary["kl_mean"] == pytest.approx(summary["kl_max"] / 240)
    assert summary["top1_agreement"] == pytest.approx(239 / 240)
    rows = metrics.kl_by_position(ours, ref)
    assert [row["position"] for row in rows if row["kl_max"] > 0] == [7]
    assert rows[7]["top1_agreement"] == pytest.approx(5 / 6)
    assert rows[7]["kl_mean"] == pytest.approx(summary["kl_max"] / 6)
    assert len(metrics.kl_by_position(ours[0], ref[0])) == 40
    ours[0, 0, 0] = NAN
    assert metrics.kl_summary(ours, ref)["nonfinite"] == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.relative_error(t(1.0), t(1.0, 2.0)), r"out: expected the shape of ref, \[2\], got \[1\]"),
        (
            lambda: metrics.implementation_budget(1, dtype="e5m2"),
            r"dtype: expected one of e4m3, bf16, fp16",
        ),
        (lambda: metrics.row_budget("int8"), r"dtype: expected one of .*, got 'int8'"),
    ],
)
def test_messages_name_the_argument(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
