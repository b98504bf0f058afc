# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The float64 reference against slow, literal restatements of the same arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from drawn import rand, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_kernels import reference
from mla_kernels.cases import SM_SCALE
from mla_kernels.formats import D_V, D, decode, encode, round_to
from mla_kernels.reference import (
    EXACT,
    KERNEL,
    KERNEL_BF16,
    KERNEL_SM90A,
    Accumulator,
    Rounding,
    attention,
    gather,
    kernel_rounding,
    merge,
    split_bounds,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def plain(q: torch.Tensor, kv: torch.Tensor, lens: list[int], sm_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention from its definition, one query at a time."""
    b, s_q, h_q, _ = q.shape
    out, lse = torch.zeros(b, s_q, h_q, D_V, dtype=torch.float64), torch.full((b, s_q, h_q), -math.inf).double()
    for i in range(b):
        for t in range(s_q):
            n = lens[i] - s_q + t + 1
            if n > 0:
                logits = q[i, t] @ kv[i, :n].T * sm_scale
                out[i, t], lse[i, t] = logits.softmax(-1) @ kv[i, :n, :D_V], logits.logsumexp(-1)
    return out, lse


def literal(
    q: torch.Tensor,
    kv: torch.Tensor,
    n: int,
    scale: float,
    kv_scale: float,
    rounding: Rounding,
    bounds: list[tuple[int, int]],
) -> tuple[torch.Tensor, float]:
    """One query q [576] over n visible keys, the kernels' steps written out: tiles, maximum, two sums, combine."""
    partial = []
    for begin, end in bounds:
        m, o, rounded, exact = -math.inf, torch.zeros(D_V, dtype=torch.float64), 0.0, 0.0
        for tile in range(begin, min(end, n), rounding.block_n):
            keys = kv[tile : min(tile + rounding.block_n, end, n)]
            logits = [float(q @ key) * scale for key in keys]
            new = max(m, *logits)
            if rounding.slack and new <= m + rounding.slack * math.log(2.0):
                new = m  # the base holds
            alpha = math.exp(m - new) if m > -math.inf else 0.0
            p = torch.tensor([math.exp(x - new) * rounding.p_scale for x in logits], dtype=torch.float64)
            r = round_to(p, rounding.p_format) if rounding.p_format else p
            o = o * alpha + sum(r[j] * keys[j, :D_V] for j in range(len(keys)))
            rounded, exact, m = rounded * alpha + float(r.sum()), exact * alpha + float(p.sum()), new
        if m > -math.inf:
            divisor = rounded if rounding.row_sum == "rounded" else exact
            logs = [m + math.log(x / rounding.p_scale) for x in (divisor, exact)]
            partial.append((o / divisor, *logs))
    if not partial:
        return torch.zeros(D_V, dtype=torch.float64), -math.inf
    weight_lse = torch.tensor([p[1] for p in partial], dtype=torch.float64).logsumexp(0)
    out = sum(math.exp(w - float(weight_lse)) * o for o, w, _ in partial) * kv_scale
    lse = float(torch.tensor([p[2] for p in partial], dtype=torch.float64).logsumexp(0))
    return round_to(out, rounding.out_format) if rounding.out_format else out, lse


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("s_q", [1, 2, 5])
@pytest.mark.parametrize("splits", [1, 3, None])
def test_exact_is_attention(s_q: int, splits: int | None) -> None:
    lens = [200, 0, 1, 64, 3]
    q, kv = rand(5, s_q, 3, D, seed=1), rand(5, 200, D, seed=2)
    out, lse = attention(q, kv, lens, sm_scale=SM_SCALE, num_kv_splits=splits)
    ref, ref_lse = plain(q, kv, lens, SM_SCALE)
    torch.testing.assert_close(out, ref, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, ref_lse, rtol=1e-13, atol=1e-13)
    assert (out[1] == 0).all()
    assert (lse[1] == -math.inf).all()


@pytest.mark.parametrize("rounding", [EXACT, KERNEL, KERNEL_BF16])
def test_queries_without_keys_give_zero_and_minus_infinity(rounding: Rounding) -> None:
    out, lse = attention(rand(2, 4, 2, D), rand(2, 3, D), [3, 0], sm_scale=SM_SCALE, rounding=rounding)
    assert (out[0, 0] == 0).all()  # token 0 of 4 sees 3 - 4 + 1 = 0 keys
    assert (lse[0, 0] == -math.inf).all()
    assert torch.isfinite(lse[0, 1:]).all()
    torch.testing.assert_close(
        out[0, 1], round_to(rand(2, 3, D)[0, :1, :D_V], "bf16").expand(2, D_V), rtol=1e-2, atol=1e-2
    )
    assert (out[1] == 0).all()
    assert (lse[1] == -math.inf).all()


ROUNDINGS = {
    "kernel": KERNEL,
    "kernel-bf16": KERNEL_BF16,
    "unrounded-sum": replace(KERNEL, row_sum="unrounded"),
    "p-scale-1": replace(KERNEL, p_scale=1.0),
    "block-128": replace(KERNEL, block_n=128),
    "only-p": Rounding(p_format="e4m3", p_scale=256.0),
    "only-out": Rounding(out_format="bf16"),
    "slack-on-gpu": replace(KERNEL, p_scale=KERNEL_SM90A.p_scale, slack=KERNEL_SM90A.slack, block_n=128),
    "little-slack": replace(KERNEL, slack=0.5),
    "much-slack": Rounding(p_format="bf16", slack=30.0),
}


@pytest.mark.parametrize("name", list(ROUNDINGS))
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_rounding_points_are_those_of_the_kernels(name: str, splits: int) -> None:
    rounding = ROUNDINGS[name]
    lens, s_q, h_q = [170, 257, 66], 2, 2
    q, kv = stored(3, s_q, h_q, D, seed=3), stored(3, 257, D, seed=4)
    kv[0, 100] *= 3.0  # the running maximum moves late
    kv = round_to(kv, "e4m3")
    kw: dict[str, Any] = {"sm_scale": 0.08, "q_scale": 0.5, "kv_scale": 2.0}
    out, lse = attention(q, kv, lens, rounding=rounding, num_kv_splits=splits, **kw)
    for i, length in enumerate(lens):
        bounds = split_bounds(length, splits, rounding.block_n)
        for t in range(s_q):
            for h in range(h_q):
                n = length - s_q + t + 1
                expected, expected_lse = literal(q[i, t, h], kv[i], n, 0.08, 2.0, rounding, bounds)
                torch.testing.assert_close(out[i, t, h], expected, rtol=1e-11, atol=1e-12)
                assert float(lse[i, t, h]) == pytest.approx(expected_lse, abs=1e-12)


def test_switches_do_what_they_say() -> None:
    q, kv = stored(1, 1, 8, D, seed=5), stored(1, 2048, D, seed=6)
    exact, exact_lse = attention(q, kv, [2048], sm_scale=SM_SCALE)

    def error(**changes: Any) -> float:
        out, lse = attention(q, kv, [2048], sm_scale=SM_SCALE, rounding=Rounding(**changes))
        torch.testing.assert_close(lse, exact_lse, rtol=0, atol=1e-12)  # lse comes from the unrounded P
        return relative(out, exact)

    assert error() == 0.0
    assert 0.001 < error(out_format="bf16") < 0.0022  # 2^-8 / sqrt(12) .. of a value within a factor 2
    assert error(out_format="fp16") < 0.0003
    scaled, unscaled = error(p_format="e4m3", p_scale=256.0), error(p_format="e4m3", p_scale=1.0)
    assert 0.005 < scaled < unscaled  # without the scale, P under 2^-10 is lost
    assert error(p_format="bf16") < 0.002 < error(p_format="e5m2", p_scale=256.0)


def test_exact_does_not_depend_on_splits_but_rounded_p_does() -> None:
    q, kv = stored(1, 1, 4, D, seed=7), stored(1, 1000, D, seed=8)
    one = [attention(q, kv, [1000], sm_scale=SM_SCALE, num_kv_splits=n) for n in (1, 2, 7, 16, None)]
    for out, lse in one[1:]:
        torch.testing.assert_close(out, one[0][0], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(lse, one[0][1], rtol=0, atol=1e-12)
    kernel = [attention(q, kv, [1000], sm_scale=SM_SCALE, num_kv_splits=n, rounding=KERNEL)[0] for n in (1, 7)]
    assert 0 < relative(kernel[1], kernel[0]) < 0.03


def test_a_power_of_two_maximum_rounds_p_alike_in_every_split() -> None:
    """Away from the flush point, scaling by a power of two commutes with rounding: splits and tiles do not show."""
    q, kv = stored(1, 1, 4, D, seed=7), stored(1, 1000, D, seed=8)
    exact, _ = attention(q, kv, [1000], sm_scale=0.01)
    rounding = Rounding(p_format="e4m3", p_scale=256.0, running_max="power_of_two")
    one, _ = attention(q, kv, [1000], sm_scale=0.01, rounding=rounding)
    assert 1e-3 < relative(one, exact) < 2.0**-4 / math.sqrt(3.0)
    for splits, block in ((7, 64), (16, 64), (3, 128), (1, 32)):
        again, _ = attention(
            q, kv, [1000], sm_scale=0.01, rounding=replace(rounding, block_n=block), num_kv_splits=splits
        )
        torch.testing.assert_close(again, one, rtol=1e-12, atol=1e-13)
    moving = [
        attention(q, kv, [1000], sm_scale=0.01, rounding=replace(rounding, running_max="exact"), num_kv_splits=n)[0]
        for n in (1, 7)
    ]
    assert relative(moving[1], moving[0]) > 1e-3


def test_with_slack_a_base_holds_until_a_tile_lies_above_it() -> None:
    """Tiles of 2 keys with given logits: the bases, and with them P in e4m3, from what comes out."""
    logits = [0.0, -1.0, 3.0, 2.0, 4.0, 1.0, 8.2, 8.1, 3.0, 12.0]  # in powers of two
    bases = {0.0: [0, 3, 4, 8.2, 12], 3.75: [0, 0, 4, 8.2, 12], 4.75: [0, 0, 0, 8.2, 8.2]}
    kv = torch.zeros(1, len(logits), D, dtype=torch.float64)
    kv[0, :, D_V] = torch.tensor(logits, dtype=torch.float64) * math.log(2.0)
    kv[0, :, :10] = torch.eye(10, dtype=torch.float64)  # V: out is P over its sum
    q = torch.zeros(1, 1, 1, D, dtype=torch.float64)
    q[..., D_V] = 1.0
    for slack, expected in bases.items():
        rounding = Rounding(p_format="e4m3", p_scale=16.0, slack=slack, block_n=2)
        out, lse = attention(q, kv, [len(logits)], sm_scale=1.0, rounding=rounding)
        base = torch.tensor(expected, dtype=torch.float64).repeat_interleave(2)
        p = round_to(torch.exp2(torch.tensor(logits, dtype=torch.float64) - base) * 16.0, "e4m3") * torch.exp2(base)
        torch.testing.assert_close(out[0, 0, 0, :10], p / p.sum(), rtol=1e-12, atol=0)
        exact = torch.tensor(logits, dtype=torch.float64) * math.log(2.0)
        assert float(lse) == pytest.approx(float(exact.logsumexp(0)), abs=1e-12)


def test_with_slack_every_p_fits_e4m3() -> None:
    """Rising logits, the worst there are: P saturates nowhere, or the error would be larger."""
    kv = stored(1, 2000, D, seed=11)
    kv[0, :, D_V] = torch.linspace(-40.0, 40.0, 2000, dtype=torch.float64)
    q = stored(1, 1, 4, D, seed=12)
    exact, _ = attention(q, kv, [2000], sm_scale=SM_SCALE)
    p = KERNEL_SM90A
    out, _ = attention(q, kv, [2000], sm_scale=SM_SCALE, rounding=replace(p, qk_accumulator=None, pv_accumulator=None))
    assert relative(out, exact) < 2.0**-4
    assert p.p_scale * 2.0**p.slack <= 448.0


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 300), st.integers(1, 20), st.integers(0, 10**6))
def test_exact_attention_is_invariant(length: int, splits: int, seed: int) -> None:
    """Splits, the order of keys and the order of pages do not matter; keys past the length do not exist."""
    q, kv = rand(1, 1, 2, D, seed=seed), rand(1, length + 3, D, seed=seed + 1)
    kv[0, length:] = math.nan
    out, lse = attention(q, kv, [length], sm_scale=SM_SCALE)
    again, again_lse = attention(q, kv, [length], sm_scale=SM_SCALE, num_kv_splits=splits)
    torch.testing.assert_close(again, out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(again_lse, lse, rtol=0, atol=1e-11)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    again, again_lse = attention(q, kv[:, :length][:, order], [length], sm_scale=SM_SCALE)
    torch.testing.assert_close(again, out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(again_lse, lse, rtol=0, atol=1e-11)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 3, 64, 200, 500]), min_size=2, max_size=8), st.integers(0, 10**6))
def test_merge_by_lse_is_the_whole(shards: list[int], seed: int) -> None:
    length = sum(shards)
    q, kv = rand(1, 1, 2, D, seed=seed), rand(1, max(length, 1), D, seed=seed + 1)
    kv[:, : shards[0]] *= 4.0  # very different mass
    whole, whole_lse = attention(q, kv, [length], sm_scale=SM_SCALE)
    ends = torch.tensor([0, *shards]).cumsum(0).tolist()
    parts = [
        attention(q, kv[:, a:b], [b - a], sm_scale=SM_SCALE) if b > a else attention(q, kv, [0], sm_scale=SM_SCALE)
        for a, b in pairwise(ends)
    ]
    out, lse = merge(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    torch.testing.assert_close(out, whole, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-11)


def test_merge_ignores_what_an_empty_shard_holds() -> None:
    outs, lses = torch.full((2, 1, D_V), math.nan), torch.tensor([[-math.inf], [0.5]])
    outs[1] = 2.0
    out, lse = merge(outs, lses)
    assert (out == 2.0).all()
    assert float(lse[0]) == 0.5
    out, lse = merge(torch.full((3, 1, D_V), math.nan), torch.full((3, 1), -math.inf))
    assert (out == 0.0).all()
    assert float(lse[0]) == -math.inf


def test_lse_is_natural_and_of_the_true_logits() -> None:
    q, kv = stored(1, 1, 4, D, seed=9), stored(1, 700, D, seed=10)
    logits = (q[0, 0] * 0.3) @ (kv[0] * 0.7).T * SM_SCALE
    for rounding in (EXACT, KERNEL):
        _, lse = attention(
            q, kv, [700], sm_scale=SM_SCALE, q_scale=0.3, kv_scale=0.7, rounding=rounding, num_kv_splits=3
        )
        torch.testing.assert_close(lse[0, 0], logits.logsumexp(-1), rtol=0, atol=1e-11)


@pytest.mark.parametrize("rounding", [EXACT, KERNEL])
def test_scales_move_between_data_and_scale(rounding: Rounding) -> None:
    """Powers of two may move from the data to the scale without changing a bit; scaled data equals decoded data."""
    q, kv = stored(1, 1, 2, D, seed=11), stored(1, 300, D, seed=12)
    base, base_lse = attention(q, kv, [300], sm_scale=SM_SCALE, q_scale=2.0, kv_scale=0.25, rounding=rounding)
    moved, moved_lse = attention(q * 4, kv / 8, [300], sm_scale=SM_SCALE, q_scale=0.5, kv_scale=2.0, rounding=rounding)
    assert torch.equal(base, moved)
    assert torch.equal(base_lse, moved_lse)
    real, _ = attention(q * 2.0, kv * 0.25, [300], sm_scale=SM_SCALE, rounding=rounding)
    torch.testing.assert_close(real, base, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("std", [0.1, 1.0, 10.0, 100.0])
def test_large_queries_stay_finite_for_any_split(std: float) -> None:
    q, kv = encode(rand(1, 1, 4, D, seed=13) * std, "e4m3"), encode(rand(1, 1000, D, seed=14), "e4m3")
    results = [
        attention(decode(q), decode(kv), [1000], sm_scale=SM_SCALE, rounding=KERNEL, num_kv_splits=n)
        for n in (1, 2, 4, 8, 16)
    ]
    for out, lse in results:
        assert torch.isfinite(out).all()
        assert torch.isfinite(lse).all()
        # Another split, another running maximum, another rounding of P: two errors of at most 2^-4 / √3 each.
        assert relative(out, results[0][0]) < 2.0**-4 * math.sqrt(2.0 / 3.0)
        torch.testing.assert_close(lse, results[0][1], rtol=1e-12, atol=1e-12)


def test_nan_stays_in_its_row() -> None:
    q, kv = rand(2, 1, 2, D, seed=15), rand(2, 100, D, seed=16)
    clean, _ = attention(q, kv, [100, 100], sm_scale=SM_SCALE, rounding=KERNEL)
    q[0, 0, 1, 5] = math.nan
    out, lse = attention(q, kv, [100, 100], sm_scale=SM_SCALE, rounding=KERNEL)
    assert out[0, 0, 1].isnan().all()
    assert lse[0, 0, 1].isnan()
    assert torch.equal(out[0, 0, 0], clean[0, 0, 0])
    assert torch.equal(out[1], clean[1])


def test_dropped_s_q_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, kv = stored(2, 6, D, seed=17), stored(2, 300, D, seed=18)
    rounding = replace(KERNEL, qk_accumulator=Accumulator(), pv_accumulator=Accumulator(promote_every=64))
    kw: dict[str, Any] = {"sm_scale": SM_SCALE, "rounding": rounding, "num_kv_splits": [1, 2]}
    out, lse = attention(q, kv, [300, 150], **kw)
    assert out.shape == (2, 6, D_V)
    assert lse.shape == (2, 6)
    monkeypatch.setattr(reference, "_ROW_TOKENS", 700)  # two rows at a time
    monkeypatch.setattr(reference, "_TOKENS", 64)
    monkeypatch.setattr(reference, "_PRODUCTS", 1 << 12)
    monkeypatch.setattr(reference, "_SUMS", 1 << 12)
    again, again_lse = attention(q.unsqueeze(1), kv, [300, 150], **kw)
    torch.testing.assert_close(again[:, 0], out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(again_lse[:, 0], lse, rtol=1e-13, atol=1e-13)


def test_gather_reads_only_owned_slots() -> None:
    lens, page = [5, 0, 8, 1], 4
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        cache = torch.full((7, 2, page, D), math.nan).to(dtype)[:, 1]
        table = torch.tensor([[3, 1, -1], [2**31 - 1, -5, 99], [0, 5, 99], [6, -1, 2**31 - 1]], dtype=torch.int32)
        data = stored(4, 8, D, seed=19).to(torch.float32)
        for i, n in enumerate(lens):
            for t in range(n):
                cache[int(table[i, t // page]), t % page] = data[i, t].to(dtype)
        dense = gather(cache, table, torch.tensor(lens))
        assert dense.dtype == dtype
        assert dense.shape == (4, 8, D)
        for i, n in enumerate(lens):
            assert torch.equal(dense[i, :n].to(torch.float32), data[i, :n])
            assert (dense[i, n:].to(torch.float32) == 0).all()


def test_splits_by_hand() -> None:
    assert split_bounds(0) == []
    assert split_bounds(1, 8) == [(0, 1)]
    assert split_bounds(300, 2) == [(0, 128), (128, 300)]  # 5 tiles: 2 and 3
    assert split_bounds(300, 3) == [(0, 64), (64, 192), (192, 300)]
    assert split_bounds(512, None) == [(0, 512)]
    assert split_bounds(513, None) == [(0, 256), (256, 513)]  # 9 tiles: 4 and 5
    assert len(split_bounds(131072, None)) == 64


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200000), st.one_of(st.none(), st.integers(1, 300)), st.sampled_from([64, 128]))
def test_splits_cover_the_row_once_and_none_is_empty(length: int, splits: int | None, block: int) -> None:
    bounds = split_bounds(length, splits, block)
    tiles = -(-length // block)
    assert [t for begin, end in bounds for t in (begin, end)] == sorted(t for pair in bounds for t in pair)
    assert all(begin < end and begin % block == 0 for begin, end in bounds)
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    assert (bounds[0][0], bounds[-1][1]) == (0, length) if length else bounds == []
    assert len(bounds) == min(tiles, splits if splits is not None else min(-(-tiles // 8), 64))
    sizes = [-(-(end - begin) // block) for begin, end in bounds]
    assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("length", [1, 64, 65, 200, 777])
def test_tiles_of_two_cuts_give_each_split_its_own_tiles(length: int, splits: int) -> None:
    """Tiles of 128 with splits cut at 64: the same as each split alone, merged by hand."""
    generator = torch.Generator().manual_seed(length * 17 + splits)
    q = torch.randn(1, 1, 3, 576, generator=generator, dtype=torch.float64)
    kv = torch.randn(1, length, 576, generator=generator, dtype=torch.float64)
    rounding = Rounding(p_format="e4m3", p_scale=256.0, block_n=128, split_n=64, row_sum="unrounded")
    out, lse = attention(q, kv, [length], sm_scale=SM_SCALE, rounding=rounding, num_kv_splits=splits)
    parts = [
        attention(q, kv[:, begin:end], [end - begin], sm_scale=SM_SCALE, rounding=replace(rounding, split_n=None))
        for begin, end in split_bounds(length, splits, 64)
    ]
    weights = torch.stack([part[1] for part in parts]).softmax(0)
    assert torch.allclose(out, sum(w.unsqueeze(-1) * part[0] for w, part in zip(weights, parts, strict=True)))
    assert torch.allclose(lse, torch.stack([part[1] for part in parts]).logsumexp(0))


@pytest.mark.parametrize("dtype", ["e4m3", torch.float8_e4m3fn, "bf16", torch.bfloat16, "fp16", torch.float16])
def test_kernel_rounding(dtype: Any) -> None:
    rounding = kernel_rounding(dtype)
    assert rounding.p_scale == (256.0 if "8_e4m3" in str(dtype) or dtype == "e4m3" else 1.0)
    assert rounding.block_n == 64
    assert rounding.pv_accumulator is None
    on_gpu = kernel_rounding(dtype, "cuda")
    if rounding.p_format == "e4m3":
        assert on_gpu == replace(
            rounding,
            p_scale=32.0,
            slack=3.75,
            block_n=128,
            split_n=64,
            qk_accumulator=Accumulator(13, 32),
            pv_accumulator=Accumulator(13, 32, promote_every=128),
        )
    else:
        assert on_gpu is rounding


def args(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"q": rand(2, 1, 3, D), "kv": rand(2, 10, D), "seq_lens": [10, 5], "sm_scale": 1.0}
    return {**base, **changes}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: attention(**args(kv=rand(1, 10, D))),
            r"kv: expected \[2, s, 576\] and 2 seq_lens, got \[1, 10, 576\]",
        ),
        (lambda: attention(**args(seq_lens=[1])), r"kv: expected \[2, s, 576\] and 2 seq_lens.* and 1"),
        (lambda: attention(**args(seq_lens=[11, 1])), r"seq_lens: expected at most the 10 tokens of kv, got 11"),
        (lambda: attention(**args(num_kv_splits=[1])), r"num_kv_splits: expected one number or 2, got 1"),
        (lambda: attention(**args(num_kv_splits=0)), r"num_kv_splits: expected None or a positive integer, got 0"),
        (lambda: Rounding(p_format="fp4"), r"p_format: expected None or one of e4m3, .*got 'fp4'"),
        (lambda: Rounding(out_format="int8"), r"out_format: expected None or one of"),
        (lambda: Rounding(p_scale=3.0), r"p_scale: expected a power of two, got 3\.0"),
        (lambda: Rounding(row_sum="both"), r"row_sum: expected 'rounded' or 'unrounded', got 'both'"),
        (lambda: Rounding(running_max="lazy"), r"running_max: expected 'exact' or 'power_of_two', got 'lazy'"),
        (lambda: Rounding(slack=-1.0), r"slack: expected a finite number of at least 0, got -1\.0"),
        (lambda: Rounding(slack=math.inf), r"slack: expected a finite number of at least 0, got inf"),
        (
            lambda: Rounding(slack=1.0, running_max="power_of_two"),
            r"slack: expected 0 beside running_max 'power_of_two', got 1\.0",
        ),
        (
            lambda: replace(KERNEL, slack=1.0),
            r"slack: expected p_scale \* 2\^slack of at most 448, the largest e4m3, got 256 \* 2\^1",
        ),
        (lambda: Rounding(block_n=0), r"block_n: expected a positive integer, got 0"),
        (lambda: Accumulator(fraction_bits=0), r"fraction_bits: expected 1 to 40, got 0"),
        (lambda: Accumulator(k_step=0), r"k_step: expected a positive integer, got 0"),
        (lambda: Accumulator(promote_every=48), r"promote_every: expected None or a multiple of k_step = 32, got 48"),
        (lambda: kernel_rounding("e5m2"), r"dtype: expected e4m3, bf16 or fp16, got e5m2"),
    ],
)
def test_messages_name_the_argument(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
