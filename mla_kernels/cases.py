# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The one case table, used by tests, benchmarks and notebooks alike, and the inputs a case stands for.

Groups: `correctness` (small enough that every reference and the CPU kernel run in seconds), `corner` (what broke other
kernels: empty rows, odd lengths and heads, huge logits, 131072 tokens), `performance` (shapes of the recorded H200
figures), `published` (the grid of vLLM's `test_cutlass_mla_decode.py`).

`make_inputs(case)` returns bf16 originals, their stored form, and the operator's arguments in hostile memory: pages are
shuffled; rows that nobody owns, tails of last pages and, in strided layouts, the memory between hold NaN (bytes 0x7F
and 0xFF); slots of the block table past a row's pages hold wild ids. `run_case(case)` gives the four results.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from mla_kernels.formats import D_ROPE, D_V, D, Encoded, encode
from mla_kernels.metrics import ErrorSplit, error_split, implementation_budget
from mla_kernels.ops import split_plan
from mla_kernels.reference import attention, kernel_rounding

__all__ = [
    "CASES",
    "DISTRIBUTIONS",
    "GROUPS",
    "SM_SCALE",
    "Case",
    "Distribution",
    "Inputs",
    "Results",
    "captured_inputs",
    "draw",
    "inputs_from",
    "logit_bound",
    "make_inputs",
    "run_case",
    "select",
    "splits_of",
]

SM_SCALE = 192**-0.5  # DeepSeek-V2 and V3: 128 + 64 dims of a head before absorption
GROUPS = ("correctness", "corner", "performance", "published")
LAYOUTS = ("contiguous", "layers", "padded")
DTYPES = {"e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Distribution:
    """A named distribution of tokens `[n, 576]`.

    `q_std`: standard deviation of queries that goes with it. `kv_rms`: root mean square of its values.
    """

    name: str
    what: str
    kv: Callable[[torch.Generator, int], torch.Tensor]
    q_std: float = 1.0
    kv_rms: float = 1.0


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device=generator.device)


def _shifted_mean(generator: torch.Generator, n: int) -> torch.Tensor:
    return _normal(generator, n, D) + 1.0


def _outlier_channels(generator: torch.Generator, n: int) -> torch.Tensor:
    x = _normal(generator, n, D)
    x[:, 7:D_V:128] *= 50.0  # four latent channels
    x[:, D_V + 3 :: 32] *= 20.0  # two rope channels
    return x


def _long_tail(generator: torch.Generator, n: int) -> torch.Tensor:
    chi = _normal(generator, 3, n, D).square_().sum(0)  # Student's t with 3 degrees of freedom
    return _normal(generator, n, D) / (chi / 3.0).sqrt_()


DISTRIBUTIONS: dict[str, Distribution] = {
    distribution.name: distribution
    for distribution in (
        Distribution("zero_mean", "independent, mean 0, std 1: the usual test data", lambda g, n: _normal(g, n, D)),
        Distribution("shifted_mean", "independent, mean 1, std 1: sums grow with length", _shifted_mean, kv_rms=1.5),
        Distribution(
            "outlier_channels", "std 1; 4 latent channels × 50, 2 rope channels × 20", _outlier_channels, kv_rms=4.5
        ),
        Distribution("long_tail", "Student's t, 3 degrees of freedom", _long_tail, kv_rms=1.8),
        Distribution("q_large", "mean 0, std 1; queries with std 100", lambda g, n: _normal(g, n, D), 100.0),
    )
}


@dataclass(frozen=True)
class Case:
    """One row of the table.

    `q_scale`, `kv_scale` None: from amax (e4m3) or 1 (bf16, fp16). `q_std` None: the distribution's. `num_kv_splits`
    None: the automatic plan. `layout` of the cache: contiguous; layers (a layer of `[num_blocks, 3, page_size, 576]`);
    padded (token stride 640). Strided queries go with the last two.
    """

    name: str
    group: str
    seq_lens: tuple[int, ...]
    h_q: int = 16
    s_q: int = 1
    page_size: int = 64
    dtype: str = "e4m3"
    distribution: str = "zero_mean"
    q_std: float | None = None
    q_scale: float | None = None
    kv_scale: float | None = None
    num_kv_splits: int | None = 1
    sm_scale: float = SM_SCALE
    layout: Literal["contiguous", "layers", "padded"] = "contiguous"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("group", GROUPS), ("dtype", DTYPES), ("distribution", DISTRIBUTIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    @property
    def b(self) -> int:
        return len(self.seq_lens)

    @property
    def budget(self) -> float:
        """`implementation_budget` of this case: the error of a logit grows with the size of queries and keys."""
        distribution = DISTRIBUTIONS[self.distribution]
        size = (distribution.q_std if self.q_std is None else self.q_std) * distribution.kv_rms
        return implementation_budget(
            max(self.seq_lens, default=0), dtype=self.dtype, logit_error=2.0**-22 * max(1.0, size)
        )


@dataclass(frozen=True)
class Inputs:
    """What a case stands for, all on one device.

    `q` bf16 `[b, s_q, h_q, 576]` and `kv` bf16 `[b, s, 576]` (zero past each length): the real values. `q_stored`,
    `kv_stored`: the same shapes in the operator's dtype, real = stored * scale. `args`: the operator's arguments.
    """

    q: torch.Tensor
    kv: torch.Tensor
    seq_lens: torch.Tensor
    q_stored: torch.Tensor
    kv_stored: torch.Tensor
    sm_scale: float
    q_scale: float
    kv_scale: float
    num_kv_splits: int | None
    args: dict[str, Any] = field(repr=False)
    encoded: tuple[Encoded, Encoded] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Results:
    """The four results `[b, s_q, h_q, 512]`, each with its lse `[b, s_q, h_q]`: float64, and what the kernel gave."""

    oracle: torch.Tensor
    format: torch.Tensor
    stage: torch.Tensor
    kernel: torch.Tensor | None
    oracle_lse: torch.Tensor
    format_lse: torch.Tensor
    stage_lse: torch.Tensor
    kernel_lse: torch.Tensor | None

    @property
    def split(self) -> ErrorSplit:
        """kernel − oracle as format, stage and implementation error; without a kernel the last is 0."""
        return error_split(self.oracle, self.format, self.stage, self.stage if self.kernel is None else self.kernel)


def draw(case: Case, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 originals of a case: q `[b, s_q, h_q, 576]`, kv `[b, max(seq_lens), 576]`, zero past each length.

    Correctness and corner cases are drawn on the CPU and moved, so that every device sees the same values.
    """
    on = torch.device(device) if case.group in ("performance", "published") else torch.device("cpu")
    generator = torch.Generator(device=on).manual_seed(case.seed)
    distribution = DISTRIBUTIONS[case.distribution]
    q_std = distribution.q_std if case.q_std is None else case.q_std
    q = (_normal(generator, case.b, case.s_q, case.h_q, D) * q_std).to(torch.bfloat16)
    kv = torch.zeros(case.b, max(case.seq_lens, default=0), D, dtype=torch.bfloat16, device=on)
    for i, n in enumerate(case.seq_lens):
        if n:
            kv[i, :n] = distribution.kv(generator, n).to(torch.bfloat16)
    return q.to(device), kv.to(device)


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Originals, stored values and the operator's arguments of a case; the same bits every time."""
    q, kv = draw(case, device)
    return inputs_from(
        q,
        kv,
        case.seq_lens,
        dtype=case.dtype,
        page_size=case.page_size,
        sm_scale=case.sm_scale,
        q_scale=case.q_scale,
        kv_scale=case.kv_scale,
        num_kv_splits=case.num_kv_splits,
        layout=case.layout,
        seed=case.seed,
    )


def inputs_from(
    q: torch.Tensor,
    kv: torch.Tensor,
    seq_lens: Sequence[int] | torch.Tensor,
    *,
    dtype: str = "e4m3",
    page_size: int = 64,
    sm_scale: float = SM_SCALE,
    q_scale: float | None = None,
    kv_scale: float | None = None,
    num_kv_splits: int | None = 1,
    layout: str = "contiguous",
    seed: int = 0,
) -> Inputs:
    """Like `make_inputs`, for given originals q `[b, s_q, h_q, 576]` and kv `[b, s, 576]` (any float dtype)."""
    if q.dim() != 4 or kv.dim() != 3 or q.shape[-1] != D or kv.shape[-1] != D:
        raise ValueError(f"q: expected [b, s_q, h_q, {D}] and kv [b, s, {D}], got {list(q.shape)} and {list(kv.shape)}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    lens = torch.as_tensor([int(n) for n in seq_lens], dtype=torch.int32, device=q.device)
    if lens.numel() and not 0 <= int(lens.min()) <= int(lens.max()) <= kv.shape[1]:
        raise ValueError(f"seq_lens: expected at most the {kv.shape[1]} tokens of kv, got {lens.tolist()}")
    encoded = None
    if dtype == "e4m3":
        encoded = (encode(q, "e4m3", q_scale), encode(kv, "e4m3", kv_scale))
        q_stored, kv_stored = encoded[0].stored, encoded[1].stored
        scales = [float(e.scale) for e in encoded if e.scale is not None]
    else:
        q_stored, kv_stored, scales = q.to(DTYPES[dtype]), kv.to(DTYPES[dtype]), [1.0, 1.0]
    kv_cache, block_table = _page(kv_stored, [int(n) for n in lens], page_size, layout, seed)
    q_nope, q_pe = q_stored[..., :D_V], q_stored[..., D_V:]
    if layout == "contiguous":
        q_nope, q_pe = q_nope.contiguous(), q_pe.contiguous()
    else:  # q_nope as a batched matmul leaves it, [h_q, b, s_q, 512] transposed; q_pe stays columns of a wider tensor
        q_nope = q_nope.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    if q.shape[1] == 1:
        q_nope, q_pe = q_nope.squeeze(1), q_pe.squeeze(1)
    args = {
        "q_nope": q_nope,
        "q_pe": q_pe,
        "kv_cache": kv_cache,
        "seq_lens": lens,
        "block_table": block_table,
        "sm_scale": sm_scale,
        "q_scale": scales[0],
        "kv_scale": scales[1],
        "num_kv_splits": num_kv_splits,
    }
    return Inputs(q, kv, lens, q_stored, kv_stored, sm_scale, scales[0], scales[1], num_kv_splits, args, encoded)


def _page(
    stored: torch.Tensor, lens: list[int], page_size: int, layout: str, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shuffled pages in hostile memory: kv_cache `[num_blocks, page_size, 576]`, block_table `[b, max_blocks]`."""
    device = stored.device
    pages = [-(-n // page_size) for n in lens]
    owned = sum(pages)
    num_blocks = owned + owned // 8 + 2
    shape = {
        "contiguous": (num_blocks, page_size, D),
        "layers": (num_blocks, 3, page_size, D),
        "padded": (num_blocks, page_size, D + D_ROPE),
    }[layout]
    one_byte = stored.element_size() == 1
    bits = torch.empty(shape, dtype=torch.uint8 if one_byte else torch.int16, device=device)
    bits[..., 0::2] = 0x7F if one_byte else 0x7FFF  # NaN with either sign
    bits[..., 1::2] = 0xFF if one_byte else -1
    view = bits if layout == "contiguous" else bits[:, 1] if layout == "layers" else bits[..., :D]
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed + 1)).to(device)
    max_blocks = max(pages, default=0) + 3
    wild = torch.tensor([-1, 2**31 - 1, num_blocks, -(2**31), 0x5A5A5A5A], dtype=torch.int32, device=device)
    table = wild.repeat(-(-len(lens) * max_blocks // 5))[: len(lens) * max_blocks].view(len(lens), max_blocks).clone()
    source = stored.view(bits.dtype)
    taken = 0
    for i, n in enumerate(lens):
        ids = order[taken : taken + pages[i]]
        taken += pages[i]
        if n == 0:
            continue
        table[i, : pages[i]] = ids.to(torch.int32)
        block = view[ids]  # NaN so far
        block.flatten(0, 1)[:n] = source[i, :n]
        view[ids] = block
    return view.view(stored.dtype), table


def logit_bound(inputs: Inputs) -> float:
    """Bound on the error of a logit on a Hopper GPU: q · k stays in the tensor core's accumulator for all its steps.

    e4m3: each of 18 steps of 32 dims aligns its products and the sum so far to the largest of them and cuts at 2⁻¹³ of
    that (csrc/sm90a/DESIGN.md). So a logit is off by at most 18 · 2⁻¹³ of the largest running sum or product. bf16 and
    fp16: 36 steps of 16 dims, cut at 2⁻²³ (two bits for the carry taken off).
    """
    bits = 18 * 2.0**-13 if inputs.q_stored.dtype == DTYPES["e4m3"] else 36 * 2.0**-21
    worst = 0.0
    for row, length in enumerate(inputs.seq_lens.tolist()):
        q = inputs.q_stored[row].double().reshape(-1, 18, 32)
        for start in range(0, length, 4096):
            k = inputs.kv_stored[row, start : min(start + 4096, length)].double().reshape(-1, 18, 32)
            running = torch.einsum("lsd,tsd->lts", q, k).cumsum(-1)
            product = q.abs().amax((0, 1, 2)) * k.abs().amax((0, 1, 2))
            worst = max(worst, float(running.abs().max()), float(product))
    return bits * worst * inputs.sm_scale * inputs.q_scale * inputs.kv_scale


def run_case(
    case: Case | Inputs,
    kernel: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    device: torch.device | str = "cpu",
) -> Results:
    """Oracle, format and stage of a case, and `kernel(**inputs.args)` where one is given; the kernel runs first.

    The stage has the rounding points of the kernel of that device: on a GPU also the tensor core's accumulators.
    """
    inputs = make_inputs(case, device) if isinstance(case, Case) else case
    out, lse = kernel(**inputs.args) if kernel is not None else (None, None)
    if out is not None and lse is not None and out.dim() == 3:
        out, lse = out.unsqueeze(1), lse.unsqueeze(1)
    lens, sm_scale = inputs.seq_lens, inputs.sm_scale
    oracle, oracle_lse = attention(inputs.q, inputs.kv, lens, sm_scale=sm_scale)
    stored = partial(
        attention,
        inputs.q_stored,
        inputs.kv_stored,
        lens,
        sm_scale=sm_scale,
        q_scale=inputs.q_scale,
        kv_scale=inputs.kv_scale,
    )
    form, format_lse = stored()
    rounding = kernel_rounding(inputs.q_stored.dtype, inputs.q_stored.device.type)
    stage, stage_lse = stored(rounding=rounding, num_kv_splits=splits_of(inputs))
    return Results(oracle, form, stage, out, oracle_lse, format_lse, stage_lse, lse)


def splits_of(inputs: Inputs) -> list[int | list[int] | None]:
    """Splits of each row, as the kernel of the inputs' device plans them: a number, boundaries (`ops.split_plan`), or
    None for the CPU's automatic plan.
    """
    q = inputs.q_stored
    if inputs.num_kv_splits is not None or q.device.type == "cpu":
        return [inputs.num_kv_splits] * len(inputs.seq_lens)
    plan = split_plan(
        inputs.seq_lens,
        sms=torch.cuda.get_device_properties(q.device).multi_processor_count,
        lines=q.shape[1] * q.shape[2],
        dtype=q.dtype,
        page_size=inputs.args["kv_cache"].shape[1],
    )
    return [*plan]


def captured_inputs(
    capture: Mapping[str, torch.Tensor] | Any,
    *,
    positions: Sequence[int] | None = None,
    **options: Any,
) -> Inputs:
    """Inputs of the distribution `captured`: activations of one layer of a real model.

    `capture` is a mapping, or an object with attributes, of `q` `[T, h, 576]` (absorbed), `latent` `[T, 512]` and
    `rope` `[T, 64]`. One batch row for each of `positions` (default: the last one): the query of position t sees tokens
    0 … t. `options` go to `inputs_from`.
    """

    def get(name: str) -> torch.Tensor:
        value = capture[name] if isinstance(capture, Mapping) else getattr(capture, name)
        return torch.as_tensor(value)

    q, latent, rope = get("q"), get("latent"), get("rope")
    t = q.shape[0]
    if q.dim() != 3 or q.shape[-1] != D or latent.shape != (t, D_V) or rope.shape != (t, D_ROPE):
        raise ValueError(
            f"capture: expected q [T, h, {D}], latent [T, {D_V}], rope [T, {D_ROPE}], "
            f"got {list(q.shape)}, {list(latent.shape)}, {list(rope.shape)}"
        )
    kv = torch.cat([latent, rope], dim=-1)
    chosen = [q.shape[0] - 1] if positions is None else [int(t) for t in positions]
    if not chosen or min(chosen) < 0 or max(chosen) >= q.shape[0]:
        raise ValueError(f"positions: expected 0 to {q.shape[0] - 1}, got {chosen}")
    dense = torch.zeros(len(chosen), max(chosen) + 1, D, dtype=kv.dtype, device=kv.device)
    for i, t in enumerate(chosen):
        dense[i, : t + 1] = kv[: t + 1]
    return inputs_from(q[chosen].unsqueeze(1), dense, [t + 1 for t in chosen], **options)


def _correctness() -> list[Case]:
    def case(name: str, seq_lens: Sequence[int], **options: Any) -> Case:
        return Case(name, "correctness", tuple(seq_lens), **options)

    cases = [
        case(f"{name}-{n}", (n, n), distribution=name)
        for name in ("zero_mean", "shifted_mean", "outlier_channels", "long_tail")
        for n in (128, 1024, 8192)
    ]
    cases += [
        # Near-uniform weights on a mean: rounding of the cache averages out, and format error falls to 1e-3. One
        # flipped bf16 output is 2^-7 of an element just over 1, 2^-7 / √n of a case with n outputs: with 128 heads and
        # two tokens 2e-5, fit to be compared with a tenth of 1e-3 (with 16 heads it is 9e-5: one flip would decide).
        case("shifted_mean-q0.1-8192", (8192,), h_q=128, s_q=2, distribution="shifted_mean", q_std=0.1),
        case(
            "shifted_mean-q0.1-8192-splits",
            (8192,),
            h_q=128,
            s_q=2,
            distribution="shifted_mean",
            q_std=0.1,
            num_kv_splits=16,
        ),
        case("q_large", (512, 2048), distribution="q_large"),
        case("q_large-splits", (512, 2048), distribution="q_large", num_kv_splits=4),
        case("ragged-tiles", (1, 63, 64, 65, 127, 129), num_kv_splits=2),
        case("ragged-long", (1000, 8192, 37, 4096), num_kv_splits=None),
        case("splits-2", (3000,), num_kv_splits=2),
        case("splits-16", (3000, 100), num_kv_splits=16),
        case("splits-auto", (5000, 300), num_kv_splits=None, distribution="shifted_mean"),
        case("s_q-2", (700, 64), s_q=2, num_kv_splits=3),
        case("s_q-4", (1500,), s_q=4, distribution="long_tail"),
        case("s_q-8", (900, 130), s_q=8, h_q=8, num_kv_splits=2),
        case("layers", (1000, 200), layout="layers"),
        case("padded", (1000, 200), layout="padded", s_q=2),
    ]
    cases += [case(f"h_q-{h}", (600,), h_q=h) for h in (1, 8, 32, 64, 128)]
    cases += [
        case(f"page-{p}", (777, 300), page_size=p, h_q=8, num_kv_splits=2) for p in (1, 2, 4, 8, 16, 32, 128, 256)
    ]
    cases += [
        case(f"scales-{q:g}-{kv:g}", (640,), q_scale=q, kv_scale=kv)
        for q, kv in ((0.5, 0.06), (1.0, 1.0), (3.0, 2.0), (0.02, 0.01))
    ]
    for dtype in ("bf16", "fp16"):
        cases += [
            case(f"{dtype}-zero_mean", (1024, 100), dtype=dtype),
            case(f"{dtype}-shifted_mean", (4096,), dtype=dtype, distribution="shifted_mean", num_kv_splits=4),
            case(f"{dtype}-s_q", (500, 20), dtype=dtype, s_q=4, h_q=8, num_kv_splits=None),
            case(f"{dtype}-layers", (300, 77), dtype=dtype, layout="layers", page_size=16),
        ]
    return cases


def _corner() -> list[Case]:
    def case(name: str, seq_lens: Sequence[int], **options: Any) -> Case:
        return Case(name, "corner", tuple(seq_lens), **options)

    cases = [
        case(f"empty-rows-{dtype}-splits{n}", (0, 5, 0, 4096, 0), dtype=dtype, num_kv_splits=n)
        for dtype in DTYPES
        for n in (1, 8)
    ]
    cases += [case(f"all-empty-splits{n}", (0, 0, 0), num_kv_splits=n) for n in (1, 8)]
    cases += [
        case("one-token", (1,)),
        case("tail-13-of-64", (13,)),
        case("tail-129-of-128", (129,), page_size=128),
        case("tail-fp16", (13, 129), dtype="fp16", page_size=128),
        case("s_q-equals-length", (4, 8), s_q=4),
        case("s_q-over-length", (1, 3, 0), s_q=8, num_kv_splits=4),
        case("page-1-ragged", (0, 1, 300), page_size=1, num_kv_splits=None),
        case("page-256-ragged", (1, 255, 257), page_size=256, s_q=2),
        case("auto-empty", (0, 20000, 1), h_q=4, num_kv_splits=None),
        case("long-131072", (131072,), h_q=2, num_kv_splits=None),
        case("long-131072-one-split", (131072,), h_q=8, distribution="shifted_mean"),
        case("long-131072-bf16", (131072,), h_q=2, dtype="bf16", num_kv_splits=None),
        case("layers-page-1", (65, 5), layout="layers", page_size=1),
    ]
    cases += [case(f"h_q-{h}", (100, 64), h_q=h, s_q=1 + h % 2) for h in (3, 12, 20, 24, 96, 127)]
    cases += [
        case(f"q_std-{std:g}-splits{n}-{dtype}", (1000,), q_std=std, num_kv_splits=n, dtype=dtype, h_q=8)
        for dtype in ("e4m3", "bf16")
        for std in (0.1, 1.0, 10.0, 100.0)
        for n in (1, 2, 4, 8, 16)
    ]
    cases += [
        case(f"scales-{q:g}-{kv:g}", (200, 7), q_scale=q, kv_scale=kv, h_q=8)
        for q in (0.5, 1.0, 3.0)
        for kv in (0.01, 0.06, 1.0, 2.0)
    ]
    return cases


def _performance() -> list[Case]:
    shapes = [(1, 4096), (1, 32768), (1, 131072), (16, 4096), (64, 4096), (128, 4096), (128, 8192), (32, 32768)]
    return [
        Case(f"{dtype}-h{h}-b{b}-s{s}", "performance", (s,) * b, h_q=h, dtype=dtype, num_kv_splits=None)
        for dtype in ("e4m3", "bf16")
        for h in (128, 16)
        for b, s in shapes
    ]


def _published() -> list[Case]:
    """vllm-project/vllm, tests/kernels/attention/test_cutlass_mla_decode.py: seed 42, scales 1, sm_scale 576^-0.5."""
    cases = []
    for varlen in (False, True):
        for s in (4096, 8192, 16384):
            rng = random.Random(42)
            lens = [max(int(rng.normalvariate(s, s / 2)), 1) if varlen else s for _ in range(128)]
            for h in (16, 32, 64, 128):
                for dtype in ("bf16", "e4m3"):
                    name = f"{dtype}-h{h}-s{s}{'-varlen' if varlen else ''}"
                    scale = 1.0 if dtype == "e4m3" else None
                    cases.append(
                        Case(
                            name,
                            "published",
                            tuple(lens),
                            h_q=h,
                            dtype=dtype,
                            q_scale=scale,
                            kv_scale=scale,
                            sm_scale=D**-0.5,
                            seed=42,
                        )
                    )
    return cases


CASES: tuple[Case, ...] = (*_correctness(), *_corner(), *_performance(), *_published())


def select(group: str | None = None, **fields: Any) -> list[Case]:
    """Cases of a group whose fields have the given values: `select("correctness", dtype="e4m3")`."""
    if group is not None and group not in GROUPS:
        raise ValueError(f"group: expected one of {', '.join(GROUPS)}, got {group!r}")
    return [
        case
        for case in CASES
        if (group is None or case.group == group) and all(getattr(case, k) == v for k, v in fields.items())
    ]
