# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The case table, its hostile inputs, and whether it would catch a wrong kernel.

No kernel is built here. `fp32_kernel` restates the kernels' arithmetic with torch in fp32; it must meet every budget,
and each fault planted into it must break one. The kernel itself is held against the same table in test_ops.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_kernels import metrics
from mla_kernels.cases import (
    CASES,
    DISTRIBUTIONS,
    GROUPS,
    Case,
    Inputs,
    Results,
    captured_inputs,
    draw,
    inputs_from,
    make_inputs,
    run_case,
    select,
)
from mla_kernels.formats import decode
from mla_kernels.reference import gather, kernel_rounding, split_bounds

pytestmark = pytest.mark.usefixtures("one_thread")


def fp32_kernel(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    sm_scale: float,
    q_scale: float,
    kv_scale: float,
    num_kv_splits: int | None,
    fault: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator in fp32 with torch, tile by tile; `fault` plants one."""
    rounding = kernel_rounding(q_nope.dtype)
    squeeze = q_nope.dim() == 3
    q = torch.cat([q_nope.to(torch.float32), q_pe.to(torch.float32)], -1)
    q = q.unsqueeze(1) if squeeze else q
    p_dtype = q_nope.dtype
    out_dtype = torch.float16 if q_nope.dtype == torch.float16 else torch.bfloat16
    kv = gather(kv_cache, block_table, seq_lens).to(torch.float32)
    b, s_q, h_q, _ = q.shape
    out = torch.zeros(b, s_q, h_q, 512, dtype=out_dtype)
    lse = torch.full((b, s_q, h_q), -math.inf)
    scale = torch.tensor(sm_scale * kv_scale * (1.0 if fault == "no q_scale" else q_scale), dtype=torch.float32)
    token = torch.arange(s_q).repeat_interleave(h_q)
    for i in range(b):
        length = int(seq_lens[i])
        visible = length - s_q + token + (2 if fault == "causal off by one" else 1)
        rows, parts = q[i].flatten(0, 1), []
        for begin, end in split_bounds(length, num_kv_splits):
            m, o = torch.full((s_q * h_q, 1), -math.inf), torch.zeros(s_q * h_q, 512)
            rounded, exact = torch.zeros(s_q * h_q, 1), torch.zeros(s_q * h_q, 1)
            for t in range(begin, end, 64):
                if fault == "last tile dropped" and t + 64 >= length > 64:
                    continue
                tile = kv[i, t : min(t + 64, end)]
                s = (rows @ tile.T) * scale
                s = s.masked_fill(torch.arange(t, t + tile.shape[0]) >= visible[:, None], -math.inf)
                new = torch.maximum(m, s.amax(-1, keepdim=True))
                base = new.masked_fill(new == -math.inf, 0.0)
                alpha = torch.exp(m - base) if fault != "no rescale" else torch.ones_like(m)
                p = torch.exp(s - base) * rounding.p_scale
                r = p.to(p_dtype).to(torch.float32)
                o = o * alpha + r @ tile[:, :512]
                rounded = rounded * alpha + r.sum(-1, keepdim=True)
                exact = exact * alpha + p.sum(-1, keepdim=True)
                m = new
            empty = rounded == 0
            logs = [(m + torch.log(x / rounding.p_scale)).masked_fill(empty, -math.inf) for x in (rounded, exact)]
            parts.append((torch.where(empty, torch.zeros(()), o / rounded), *logs))
        if not parts:
            continue
        weights = torch.stack([part[1] for part in parts])
        weights = torch.exp(weights - weights.logsumexp(0).nan_to_num(neginf=0.0))
        if fault == "splits not weighted":
            weights = torch.full_like(weights, 1.0 / len(parts))
        o = sum(w * part[0] for w, part in zip(weights, parts, strict=True))
        out[i] = (o * (1.0 if fault == "no kv_scale" else kv_scale)).to(out_dtype).view(s_q, h_q, 512)
        lse[i] = torch.stack([part[2] for part in parts]).logsumexp(0).view(s_q, h_q)
    if fault == "lse in base 2":
        lse = lse / math.log(2.0)
    if fault == "a head swapped":
        out = out.roll(1, dims=2)
    return (out.squeeze(1), lse.squeeze(1)) if squeeze else (out, lse)


def broken(case: Case, results: Results) -> list[str]:
    """The bars that a result misses."""
    assert results.kernel is not None
    assert results.kernel_lse is not None
    missed = []
    if metrics.nonfinite_count(results.kernel):
        missed.append("finite")
    if not metrics.relative_error(results.kernel, results.stage) <= case.budget:
        missed.append("budget")
    relative = results.split.relative()
    if case.dtype == "e4m3" and not relative["implementation"] <= relative["format"] / 10:
        missed.append("tenth of format")
    if not metrics.max_abs_error(results.kernel_lse, results.format_lse) <= 1e-3:
        missed.append("lse")
    return missed


# Every kind of case: distributions, dtypes, ragged rows, splits, query tokens, heads, pages, scales, layouts, empty.
SHORT = [c for c in select("correctness") if max(c.seq_lens) * c.h_q * c.s_q <= 40000]
EMPTY = [c for c in select("corner") if max(c.seq_lens) <= 300 and not c.name.startswith("scales")]


@pytest.mark.parametrize("case", SHORT + EMPTY, ids=lambda case: f"{case.group}-{case.name}")
def test_fp32_meets_every_budget(case: Case) -> None:
    results = run_case(case, fp32_kernel)
    assert broken(case, results) == []
    assert results.split.residual <= 1e-12
    budget = max(case.budget, metrics.row_budget(case.dtype))
    verdicts = metrics.row_verdicts(results.kernel, results.stage, budget=budget, previous=math.nan)  # type: ignore[arg-type]
    assert {v.verdict for v in verdicts} == {"ok"}


def test_budget_and_tenth_at_length() -> None:
    """Where the format error is smallest: near-uniform weights on a mean, 8192 keys."""
    case = next(c for c in CASES if c.name == "shifted_mean-q0.1-8192")
    results = run_case(case, fp32_kernel)
    assert broken(case, results) == []
    relative = results.split.relative()
    assert relative["format"] < 1.5e-3
    one_flip = 2.0**-7 / math.sqrt(results.stage.numel())
    assert one_flip < relative["format"] / 30  # no single flip decides


@pytest.mark.parametrize(
    ("fault", "name", "bar"),
    [
        ("no rescale", "zero_mean-1024", "budget"),
        ("last tile dropped", "tail-13-of-64", ""),  # a row of one tile keeps it: this case cannot see the fault
        ("last tile dropped", "ragged-tiles", "budget"),
        ("causal off by one", "s_q-2", "budget"),
        ("no kv_scale", "scales-3-2", "budget"),
        ("no kv_scale", "scales-1-1", ""),  # a scale of 1 cannot see it
        ("no q_scale", "scales-3-2", "budget"),
        ("splits not weighted", "splits-2", "budget"),
        ("splits not weighted", "zero_mean-128", ""),  # one split cannot see it
        ("lse in base 2", "h_q-8", "lse"),
        ("a head swapped", "h_q-8", "budget"),
    ],
)
def test_the_table_sees_planted_faults(fault: str, name: str, bar: str) -> None:
    case = next(c for c in CASES if c.name == name)

    def kernel(**args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return fp32_kernel(**args, fault=fault)

    missed = broken(case, run_case(case, kernel))
    assert bar in missed if bar else missed == []


def test_fault_of_one_row_is_named() -> None:
    case = next(c for c in CASES if c.name == "h_q-8")

    def kernel(**args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return fp32_kernel(**args, fault="a head swapped")

    results = run_case(case, kernel)
    assert results.kernel is not None
    verdicts = metrics.row_verdicts(results.kernel, results.stage, budget=metrics.row_budget())
    assert {v.verdict for v in verdicts} == {"swapped"}


# --------------------------------------------------------------------------------------------------------------- table


def test_names_are_unique_in_their_group() -> None:
    names = [(case.group, case.name) for case in CASES]
    assert len(set(names)) == len(names)
    assert {case.group for case in CASES} == set(GROUPS)


def test_published_grid_is_complete() -> None:
    cases = select("published")
    assert len(cases) == 2 * 3 * 4 * 2
    assert {case.b for case in cases} == {128}
    assert {case.h_q for case in cases} == {16, 32, 64, 128}
    assert {case.page_size for case in cases} == {64}
    assert {case.s_q for case in cases} == {1}
    fixed = [case for case in cases if "varlen" not in case.name]
    assert {case.seq_lens[0] for case in fixed} == {4096, 8192, 16384}
    assert all(len(set(case.seq_lens)) == 1 for case in fixed)
    varlen = [case for case in cases if "varlen" in case.name]
    assert len(varlen) == len(fixed)
    assert all(len(set(case.seq_lens)) > 100 and min(case.seq_lens) >= 1 for case in varlen)
    assert varlen[0].seq_lens[:2] == (4598, 3078)  # random.seed(42); normalvariate(4096, 2048)
    assert all(case.q_scale == 1.0 and case.kv_scale == 1.0 for case in cases if case.dtype == "e4m3")
    assert all(case.sm_scale == 576**-0.5 for case in cases)


def test_table_covers_what_it_should() -> None:
    correctness, corner = select("correctness"), select("corner")
    assert {case.distribution for case in correctness} == set(DISTRIBUTIONS)
    assert {case.page_size for case in correctness} == {2**k for k in range(9)}
    assert {case.dtype for case in correctness} == {"e4m3", "bf16", "fp16"}
    assert {case.s_q for case in correctness} >= {1, 2, 4, 8}
    assert {case.layout for case in correctness} == {"contiguous", "layers", "padded"}
    assert {1, 128} <= {case.h_q for case in correctness}
    assert max(max(case.seq_lens) for case in correctness) == 8192
    assert None in {case.num_kv_splits for case in correctness}
    assert 131072 in {max(case.seq_lens) for case in corner}
    assert any(0 in case.seq_lens and max(case.seq_lens) > 0 for case in corner)
    assert any(max(case.seq_lens) == 0 for case in corner)
    assert any(case.s_q > min(case.seq_lens) > 0 for case in corner)
    scales = {(case.q_scale, case.kv_scale) for case in corner if case.q_scale is not None}
    assert scales == {(q, kv) for q in (0.5, 1.0, 3.0) for kv in (0.01, 0.06, 1.0, 2.0)}
    stds = {(case.q_std, case.num_kv_splits, case.dtype) for case in corner if case.q_std is not None}
    assert len(stds) == 4 * 5 * 2
    assert all(0 < case.budget <= 1e-2 for case in CASES)


def test_select() -> None:
    assert select("correctness", dtype="fp16") == [c for c in CASES if c.group == "correctness" and c.dtype == "fp16"]
    assert len(select()) == len(CASES)
    assert select(name="no such case") == []


# -------------------------------------------------------------------------------------------------------------- inputs


@pytest.mark.parametrize("name", ["ragged-tiles", "page-1", "page-256", "layers", "padded", "s_q-8", "fp16-layers"])
def test_inputs_are_the_originals_in_hostile_memory(name: str) -> None:
    case = next(c for c in CASES if c.group == "correctness" and c.name == name)
    inputs = make_inputs(case)
    args = inputs.args
    cache, table = args["kv_cache"], args["block_table"]
    page = case.page_size
    assert cache.shape[1:] == (page, 576)
    assert cache.stride(-1) == 1
    assert table.dtype == args["seq_lens"].dtype == torch.int32
    assert args["q_nope"].shape == ((case.b, case.s_q, case.h_q, 512) if case.s_q > 1 else (case.b, case.h_q, 512))

    dense = gather(cache, table, inputs.seq_lens)
    assert torch.equal(dense.view(torch.uint8), inputs.kv_stored.view(torch.uint8))
    q = torch.cat([args["q_nope"].to(torch.float64), args["q_pe"].to(torch.float64)], -1)
    assert torch.equal(q.view(inputs.q_stored.shape), inputs.q_stored.to(torch.float64))

    pages = [-(-n // page) for n in case.seq_lens]
    owned = [int(table[i, j]) for i in range(case.b) for j in range(pages[i])]
    assert len(set(owned)) == len(owned)
    assert len(owned) < 4 or owned != sorted(owned)  # shuffled
    assert table.shape[1] > max(pages)  # every row has unused slots
    for i in range(case.b):
        assert all(not 0 <= int(slot) < cache.shape[0] for slot in table[i, pages[i] :])
        if case.seq_lens[i] % page:
            tail = cache[int(table[i, pages[i] - 1]), case.seq_lens[i] % page :]
            assert tail.to(torch.float32).isnan().all()
    free = sorted(set(range(cache.shape[0])) - set(owned))
    assert len(free) >= 2
    assert cache[free].to(torch.float32).isnan().all()
    signs = {bool(s) for s in torch.signbit(cache[free].to(torch.float32)).flatten().tolist()[:2]}
    assert cache.element_size() == 2 or {int(x) for x in cache[free].view(torch.uint8).unique()} == {0x7F, 0xFF}
    assert signs


def test_layouts_are_strided() -> None:
    layers, padded = (make_inputs(Case("x", "corner", (70, 3), layout=name)).args for name in ("layers", "padded"))
    assert layers["kv_cache"].stride() == (3 * 64 * 576, 576, 1)
    assert padded["kv_cache"].stride() == (64 * 640, 640, 1)
    for args in (layers, padded):
        assert not args["q_nope"].is_contiguous()
        assert args["q_pe"].stride(-2) == 576
    cache = layers["kv_cache"].view(torch.uint8)
    between = cache.as_strided(cache.shape, cache.stride(), storage_offset=0)  # layer 0; the cache is layer 1
    assert (between & 0x7F == 0x7F).all()


def test_originals_are_drawn_anew_and_the_same_every_time() -> None:
    case = next(c for c in CASES if c.name == "ragged-tiles")
    first, second = make_inputs(case), make_inputs(case)
    for name, value in first.args.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.view(torch.uint8), second.args[name].view(torch.uint8)), name
        else:
            assert value == second.args[name]
    assert first.q.dtype == first.kv.dtype == torch.bfloat16
    assert not torch.equal(first.q, make_inputs(replace(case, seed=1)).q)
    decoded = decode(first.encoded[1]) if first.encoded else None
    assert decoded is not None
    assert 0.01 < metrics.relative_error(decoded, first.kv) < 0.04  # originals are not decoded fp8


def test_amax_scales_saturate_nothing() -> None:
    for name in DISTRIBUTIONS:
        inputs = make_inputs(Case("x", "corner", (300,), distribution=name))
        assert inputs.encoded is not None
        assert [e.counters.saturated for e in inputs.encoded] == [0, 0]
        assert inputs.args["kv_scale"] == inputs.kv_scale != 1.0
    plain = make_inputs(Case("x", "corner", (30,), dtype="bf16"))
    assert (plain.q_scale, plain.kv_scale, plain.encoded) == (1.0, 1.0, None)


@pytest.mark.parametrize("name", list(DISTRIBUTIONS))
def test_distributions_are_what_they_say(name: str) -> None:
    q, kv = draw(Case("x", "corner", (4096,), h_q=64, distribution=name))
    x, distribution = kv[0].to(torch.float64), DISTRIBUTIONS[name]
    assert float(q.to(torch.float64).std()) == pytest.approx(distribution.q_std, rel=0.02)
    assert float(x.square().mean().sqrt()) <= distribution.kv_rms * 1.05
    mean, std = x.mean(0), x.std(0)
    if name == "shifted_mean":
        assert float(mean.mean()) == pytest.approx(1.0, abs=0.01)
    else:
        assert float(mean.mean().abs()) < 0.05
    if name == "outlier_channels":
        assert (std > 15).nonzero().flatten().tolist() == [7, 135, 263, 391, 515, 547]
        assert float(std[7]) == pytest.approx(50, rel=0.05)
    if name == "long_tail":
        assert float(x.abs().max()) > 30
    if name in ("zero_mean", "q_large", "shifted_mean"):
        assert float(std.min()) > 0.9
        assert float(std.max()) < 1.1


def test_results_without_a_kernel() -> None:
    results = run_case(Case("x", "corner", (40,)))
    assert results.kernel is None
    assert results.split.relative()["implementation"] == 0.0


# ------------------------------------------------------------------------------------------------------------ captured


def capture(length: int = 20, heads: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "q": torch.randn(length, heads, 576, generator=generator).to(torch.bfloat16),
        "latent": torch.randn(length, 512, generator=generator).to(torch.bfloat16),
        "rope": torch.randn(length, 64, generator=generator).to(torch.bfloat16),
    }


def test_captured_positions_see_their_past() -> None:
    data = capture()
    inputs = captured_inputs(data, positions=[0, 7, 19], page_size=4, num_kv_splits=2)
    assert inputs.seq_lens.tolist() == [1, 8, 20]
    assert torch.equal(inputs.q[1, 0], data["q"][7])
    assert torch.equal(inputs.kv[1, :8], torch.cat([data["latent"], data["rope"]], -1)[:8])
    results = run_case(inputs, fp32_kernel)
    assert metrics.relative_error(results.kernel, results.stage) < 1e-2  # type: ignore[arg-type]
    one = captured_inputs(SimpleNamespace(**data))
    assert one.seq_lens.tolist() == [20]
    assert isinstance(one, Inputs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: captured_inputs({**capture(), "rope": torch.zeros(19, 64)}), r"capture: expected q .*\[19, 64\]"),
        (
            lambda: captured_inputs({**capture(), "q": torch.zeros(20, 576)}),
            r"capture: expected q \[T, h, 576\].*\[20, 576\]",
        ),
        (lambda: captured_inputs(capture(), positions=[20]), r"positions: expected 0 to 19, got \[20\]"),
        (lambda: captured_inputs(capture(), positions=[]), r"positions: expected 0 to 19, got \[\]"),
        (lambda: select("speed"), r"group: expected one of correctness, corner, performance, published, got 'speed'"),
        (lambda: Case("x", "corner", (1,), dtype="e5m2"), r"dtype: expected one of e4m3, bf16, fp16, got 'e5m2'"),
        (
            lambda: Case("x", "corner", (1,), distribution="cauchy"),
            r"distribution: expected one of zero_mean, .*'cauchy'",
        ),
        (lambda: Case("x", "nightly", (1,)), r"group: expected one of .*got 'nightly'"),
        (lambda: inputs_from(torch.zeros(1, 1, 1, 576), torch.zeros(1, 2, 576), [3]), r"seq_lens: expected at most"),
        (lambda: inputs_from(torch.zeros(1, 1, 576), torch.zeros(1, 2, 576), [2]), r"q: expected \[b, s_q, h_q, 576\]"),
        (
            lambda: inputs_from(torch.zeros(1, 1, 1, 576), torch.zeros(1, 2, 576), [2], layout="tiled"),
            r"layout: expected one of contiguous, layers, padded, got 'tiled'",
        ),
    ],
)
def test_messages_name_the_argument(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
