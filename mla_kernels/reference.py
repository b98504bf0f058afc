# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Attention in float64, exact or with the rounding points of the kernels, each switchable.

    out[t, h] = softmax(sm_scale * q[t, h] · K^T) V,  K = kv (576 dims), V = kv[..., :512],  real = stored * scale

Three of the four results that the error split compares come from `attention`:

- oracle: the bf16 originals, `rounding=EXACT`;
- format: decoded stored values, `rounding=EXACT`;
- stage: stored values, `rounding=KERNEL` (`KERNEL_BF16`, `KERNEL_FP16`), the arithmetic of our kernels point by point.

What `KERNEL` does to a row: its keys are cut into splits at multiples of `block_n` (`split_bounds`). Inside a split,
tile by tile, m is the running maximum of the logits (or a base that is renewed less often: `Rounding.slack`);
P = exp(logit - m) * 2^8 (`Rounding.p_scale`) is rounded to e4m3; every tile's P V is
summed on its own and folded as O = O * alpha + tile. Two row sums are kept: of the rounded P, which divides the output,
and of the unrounded P, which gives lse. Partial results of splits are merged with weights exp(lse_i - lse), where these
lse are those of the rounded sums, so that the weights add up to 1. The output is multiplied by kv_scale and rounded
once to bf16. What the kernels do in fp32 is float64 here, so `kernel - stage` shows fp32 and nothing else.

The accumulator model (`Accumulator`, `tensor_core_matmul`) is off by default and goes into either product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch

from mla_kernels.formats import D_V, ELEMENTS, decode_element, round_to

__all__ = [
    "EXACT",
    "KERNEL",
    "KERNEL_BF16",
    "KERNEL_FP16",
    "KERNEL_SM90A",
    "Accumulator",
    "Rounding",
    "attention",
    "gather",
    "kernel_rounding",
    "merge",
    "split_bounds",
    "tensor_core_matmul",
]


@dataclass(frozen=True)
class Accumulator:
    """A tensor core's narrow accumulator.

    One instruction adds `k_step` products to the accumulator. All addends and the accumulator are aligned to the
    largest exponent among them (a product's is the sum of its operands', its significand lies in [1, 4)), cut to
    `fraction_bits` below it (toward zero), and summed exactly; the sum is normalised and cut to `fraction_bits` again.
    `promote_every` contracted elements (tokens for P V, dims for Q K^T) the accumulator is added to a wide sum and
    cleared; None: never, one accumulator in place to the end of the split. `truncate="sum"` cuts only the running sum.

    Sources: MMA-Sim (arXiv 2511.10909), bit-accurate for Hopper's fp8 wgmma: 13 fraction bits, k = 32, every addend
    cut. Agreeing: SageAttention2 (arXiv 2411.10958), accumulator of 1 + 8 + 13 bits; DeepSeek-V3 (arXiv 2412.19437,
    section 3.3.2), "around 14 bits" (13 and the leading one), promotion every 128. For the method: Fasi, Higham,
    Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7:e330 (2021).

    `min_exponent` is the smallest operand exponent: subnormals align as if they had it (-6 for e4m3).
    """

    fraction_bits: int = 13
    k_step: int = 32
    promote_every: int | None = None
    truncate: Literal["addends", "sum"] = "addends"
    min_exponent: int = -6

    def __post_init__(self) -> None:
        if not 1 <= self.fraction_bits <= 40:
            raise ValueError(f"fraction_bits: expected 1 to 40, got {self.fraction_bits}")
        if self.k_step < 1:
            raise ValueError(f"k_step: expected a positive integer, got {self.k_step}")
        if self.promote_every is not None and (self.promote_every < 1 or self.promote_every % self.k_step):
            raise ValueError(
                f"promote_every: expected None or a multiple of k_step = {self.k_step}, got {self.promote_every}"
            )


@dataclass(frozen=True)
class Rounding:
    """Rounding points of a kernel, each switchable; None means exact.

    `p_format` element of P before P V, `p_scale` the factor on P before rounding (a power of two), `row_sum` which sum
    divides the output (of the "rounded" P that the product sees, or of the "unrounded"), `block_n` tokens a tile,
    `split_n` at whose multiples splits are cut (None: `block_n`; tiles begin anew with each split),
    `running_max` the maximum that logits are taken relative to ("exact", or raised to the next "power_of_two" of its
    exp, so that a new maximum scales P by a power of two and rounds it alike in every tile and split),
    `slack` by how many powers of two a tile's maximum may lie above it before it is renewed (0: a running maximum, and
    P at most `p_scale`; else a base that mostly stays that of a split's first tile, and P at most p_scale * 2^slack),
    `pv_accumulator` and `qk_accumulator` the accumulator models, `out_format` element of the output.
    """

    p_format: str | None = None
    p_scale: float = 1.0
    row_sum: Literal["rounded", "unrounded"] = "rounded"
    block_n: int = 64
    split_n: int | None = None
    running_max: Literal["exact", "power_of_two"] = "exact"
    slack: float = 0.0
    pv_accumulator: Accumulator | None = None
    qk_accumulator: Accumulator | None = None
    out_format: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("p_format", self.p_format), ("out_format", self.out_format)):
            if value is not None and value not in ELEMENTS:
                raise ValueError(f"{name}: expected None or one of {', '.join(ELEMENTS)}, got {value!r}")
        if not (self.p_scale > 0 and math.frexp(self.p_scale)[0] == 0.5):
            raise ValueError(f"p_scale: expected a power of two, got {self.p_scale}")
        if self.row_sum not in ("rounded", "unrounded"):
            raise ValueError(f"row_sum: expected 'rounded' or 'unrounded', got {self.row_sum!r}")
        if self.running_max not in ("exact", "power_of_two"):
            raise ValueError(f"running_max: expected 'exact' or 'power_of_two', got {self.running_max!r}")
        if not 0.0 <= self.slack < math.inf:
            raise ValueError(f"slack: expected a finite number of at least 0, got {self.slack}")
        if self.slack > 0 and self.running_max != "exact":
            raise ValueError(f"slack: expected 0 beside running_max {self.running_max!r}, got {self.slack}")
        if self.slack > 0 and self.p_format == "e4m3" and self.p_scale * 2.0**self.slack > _LARGEST_E4M3:
            raise ValueError(
                f"slack: expected p_scale * 2^slack of at most {_LARGEST_E4M3:g}, the largest e4m3, "
                f"got {self.p_scale:g} * 2^{self.slack:g}"
            )
        for name, number in (("block_n", self.block_n), ("split_n", self.split_n)):
            if number is not None and number < 1:
                raise ValueError(f"{name}: expected a positive integer, got {number}")


_LARGEST_E4M3 = 448.0

EXACT = Rounding()
KERNEL = Rounding(p_format="e4m3", p_scale=256.0, out_format="bf16")
KERNEL_BF16 = Rounding(p_format="bf16", out_format="bf16")
KERNEL_FP16 = Rounding(p_format="fp16", out_format="fp16")
# Hopper's e4m3 kernel: tiles of 128 tokens, q · k in the tensor core for all 18 steps, P · V for the four of a tile.
# The maximum is renewed only where P would not fit e4m3 (32 * 2^3.75 = 430.5), so that hardly a tile waits for one.
KERNEL_SM90A = replace(
    KERNEL,
    p_scale=32.0,
    slack=3.75,
    block_n=128,
    split_n=64,
    qk_accumulator=Accumulator(),
    pv_accumulator=Accumulator(promote_every=128),
)


def kernel_rounding(dtype: torch.dtype | str, device_type: str = "cpu") -> Rounding:
    """The rounding points of our kernels for inputs of `dtype` (torch dtype, or e4m3, bf16, fp16).

    On "cuda" e4m3 gives `KERNEL_SM90A`, with the tensor core's accumulators; those of bf16 and fp16 are close to fp32.
    """
    table: dict[torch.dtype | str, Rounding] = {
        "e4m3": KERNEL,
        torch.float8_e4m3fn: KERNEL,
        "bf16": KERNEL_BF16,
        torch.bfloat16: KERNEL_BF16,
        "fp16": KERNEL_FP16,
        torch.float16: KERNEL_FP16,
    }
    if dtype not in table:
        raise ValueError(f"dtype: expected e4m3, bf16 or fp16, got {dtype}")
    found = table[dtype]
    return KERNEL_SM90A if device_type == "cuda" and found is KERNEL else found


def split_bounds(
    length: int, num_kv_splits: int | Sequence[int] | None = 1, block_n: int = 64
) -> list[tuple[int, int]]:
    """Token ranges of the splits of a row of `length` keys: cut at tiles of `block_n`, as even as whole tiles allow.

    Never more splits than tiles, so none is empty; split i of n covers tiles i * tiles // n to (i + 1) * tiles // n.
    None is the kernels' automatic plan: 8 tiles a split, at most 64 splits. Same plan as csrc/include/mla/scheduler.h.
    A sequence gives the boundaries themselves, [0, …, length] (`ops.split_plan` for a GPU).
    """
    if isinstance(num_kv_splits, Sequence):
        bounds = list(num_kv_splits)
        if bounds[:1] != [0] or bounds[-1] != length or any(a >= b or a % block_n for a, b in pairwise(bounds)):
            raise ValueError(
                f"num_kv_splits: expected growing boundaries from 0 to {length}, multiples of {block_n}, got {bounds}"
            )
        return list(pairwise(bounds))
    if num_kv_splits is not None and num_kv_splits < 1:
        raise ValueError(f"num_kv_splits: expected None or a positive integer, got {num_kv_splits}")
    tiles = -(-length // block_n)
    n = min(min(-(-tiles // 8), 64) if num_kv_splits is None else num_kv_splits, tiles)
    cuts = [i * tiles // n * block_n for i in range(n)] + [length] if n else []
    return list(pairwise(cuts))


def gather(kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Paged cache `[num_blocks, page_size, d]` to dense `[b, max(seq_lens), d]`, same dtype; zero past each length.

    Reads only the slots of `block_table` `[b, max_blocks]` that a row of `seq_lens` `[b]` owns.
    """
    lens = [int(n) for n in seq_lens]
    page = kv_cache.shape[1]
    dense = torch.zeros(
        len(lens), max(lens, default=0), kv_cache.shape[2], dtype=kv_cache.dtype, device=kv_cache.device
    )
    one_byte = kv_cache.element_size() == 1
    source, target = (kv_cache.view(torch.uint8), dense.view(torch.uint8)) if one_byte else (kv_cache, dense)
    for i, n in enumerate(lens):
        pages = block_table[i, : -(-n // page)].long()
        target[i, :n] = source[pages].flatten(0, 1)[:n]
    return dense


def attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    seq_lens: torch.Tensor | Sequence[int],
    *,
    sm_scale: float,
    rounding: Rounding = EXACT,
    num_kv_splits: int | Sequence[int | Sequence[int] | None] | None = 1,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA decode over a dense cache: `(out, lse)`, float64, `[b, s_q, h_q, 512]` and `[b, s_q, h_q]`, natural log.

    q `[b, s_q, h_q, 576]` (or `[b, h_q, 576]`; s_q then drops out of the results too), kv `[b, s, 576]`, any float
    dtype: real values, or stored values with `q_scale` and `kv_scale` (the accumulator model needs stored values).
    `seq_lens` `[b]`: keys of a row; query token t of s_q sees `seq_len - s_q + t + 1` of them. A query without keys
    gives out 0 and lse -inf. `num_kv_splits`: a number, None (automatic), or for each row one of
    these or its boundaries (`split_bounds`). Values past a row's length are never read.
    """
    lens = [int(n) for n in seq_lens]
    squeeze = q.dim() == 3
    q = q.unsqueeze(1) if squeeze else q
    b, s_q, h_q, d = q.shape
    if kv.dim() != 3 or kv.shape[0] != b or kv.shape[2] != d or len(lens) != b:
        raise ValueError(f"kv: expected [{b}, s, {d}] and {b} seq_lens, got {list(kv.shape)} and {len(lens)}")
    if max(lens, default=0) > kv.shape[1]:
        raise ValueError(f"seq_lens: expected at most the {kv.shape[1]} tokens of kv, got {max(lens)}")
    splits = [*num_kv_splits] if isinstance(num_kv_splits, Sequence) else [num_kv_splits] * b
    if len(splits) != b:
        raise ValueError(f"num_kv_splits: expected one number or {b}, got {len(splits)}")
    out = torch.zeros(b, s_q * h_q, D_V, dtype=torch.float64, device=q.device)
    lse = torch.full((b, s_q * h_q), -math.inf, dtype=torch.float64, device=q.device)
    scale = sm_scale * q_scale * kv_scale
    token = torch.arange(s_q, device=q.device).repeat_interleave(h_q)
    for i, length in enumerate(lens):
        if length == 0:
            continue
        rows = _real(q[i].reshape(s_q * h_q, d))
        visible = length - s_q + token + 1
        step = max(1, _ROW_TOKENS // length)  # rows at a time, to bound memory
        for r in range(0, s_q * h_q, step):
            part = slice(r, r + step)
            o, e = _rows(rows[part], kv[i, :length], visible[part], scale, rounding, splits[i])
            out[i, part], lse[i, part] = o * kv_scale, e
    if rounding.out_format is not None:
        out = round_to(out, rounding.out_format)
    out, lse = out.view(b, s_q, h_q, D_V), lse.view(b, s_q, h_q)
    return (out.squeeze(1), lse.squeeze(1)) if squeeze else (out, lse)


_ROW_TOKENS = 1 << 22  # logits held at once
_TOKENS = 1 << 13  # tokens widened to float64 at once


def _real(x: torch.Tensor) -> torch.Tensor:
    """float64 values; e4m3 by table, which is ten times faster than torch's cast on a CPU."""
    return decode_element(x.view(torch.uint8), "e4m3") if x.dtype == torch.float8_e4m3fn else x.to(torch.float64)


def _tiled(
    kv: torch.Tensor, cuts: list[tuple[int, int]], block: int
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int]]]:
    """Keys so that each split begins a tile: zero rows after splits that do not end with one, but the last.

    kv `[n, 576]` gives kv `[m, 576]`, the positions `[m]` in the sequence (past any length for the zero rows), and the
    bounds of the splits in tiles.
    """
    sizes = [-(-(end - begin) // block) for begin, end in cuts]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    bounds = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    position = torch.arange(kv.shape[0], device=kv.device)
    if all(begin == first * block for (begin, _), (first, _) in zip(cuts, bounds, strict=True)):
        return kv, position, bounds
    place = torch.cat(
        [position[begin:end] + (first * block - begin) for (begin, end), (first, _) in zip(cuts, bounds, strict=True)]
    )
    rows = int(place[-1]) + 1
    spread = torch.zeros(rows, kv.shape[1] * kv.element_size(), dtype=torch.uint8, device=kv.device)
    spread[place] = kv.contiguous().view(torch.uint8)
    where = torch.full((rows,), torch.iinfo(torch.int64).max, device=kv.device)
    where[place] = position
    return spread.view(kv.dtype), where, bounds


def _rows(
    q: torch.Tensor,
    kv: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    rounding: Rounding,
    splits: int | Sequence[int] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows q [r, 576] of one sequence kv [n, 576] to stored-unit out [r, 512] and lse [r]."""
    block, cuts = rounding.block_n, split_bounds(kv.shape[0], splits, rounding.split_n or rounding.block_n)
    kv, position, bounds = _tiled(kv, cuts, block)
    length, tiles = kv.shape[0], bounds[-1][1]
    logits = torch.full((q.shape[0], tiles * block), -math.inf, dtype=torch.float64, device=q.device)
    for t in range(0, length, _TOKENS):
        k = _real(kv[t : t + _TOKENS]).T
        s = q @ k if rounding.qk_accumulator is None else tensor_core_matmul(q, k, rounding.qk_accumulator)
        logits[:, t : t + k.shape[1]] = s.mul_(scale)
    if int(visible.min()) <= int(position.max()):
        logits[:, :length].masked_fill_(position >= visible[:, None], -math.inf)

    p = logits.view(-1, tiles, block)
    running = p.amax(-1)  # [r, tiles], then its running maximum inside each split
    for begin, end in bounds:
        running[:, begin:end] = _base(running[:, begin:end], rounding.slack * math.log(2.0))
    if rounding.running_max == "power_of_two":
        running = (running / math.log(2.0)).ceil() * math.log(2.0)
    top = running.amax(-1, keepdim=True)
    empty = running == -math.inf
    weight = (running - top.masked_fill(top == -math.inf, 0.0)).exp_()  # [r, tiles], 0 where no key was seen yet
    p.sub_(running.masked_fill(empty, 0.0).unsqueeze(-1)).exp_().mul_(rounding.p_scale)
    exact_sum = (p.sum(-1) * weight).sum(-1)
    if rounding.p_format is not None:
        p = round_to(p, rounding.p_format)
    divisor = (p.sum(-1) * weight).sum(-1) if rounding.row_sum == "rounded" else exact_sum
    if rounding.pv_accumulator is None:
        out = torch.zeros(q.shape[0], D_V, dtype=torch.float64, device=q.device)
        weighted = p.mul_(weight.unsqueeze(-1)).flatten(1)
        for t in range(0, length, _TOKENS):
            v = _real(kv[t : t + _TOKENS, :D_V])
            out += weighted[:, t : t + v.shape[0]] @ v
    else:
        out = _pv_accumulated(p, kv, weight, running, top, bounds, rounding.pv_accumulator)
    lse = top.squeeze(-1) + (exact_sum / rounding.p_scale).log()
    none = top == -math.inf
    return (out / divisor.unsqueeze(-1)).masked_fill(none, 0.0), lse.masked_fill(none.squeeze(-1), -math.inf)


def _base(maxima: torch.Tensor, slack: float) -> torch.Tensor:
    """What P of each tile is taken relative to, from the maxima [r, tiles] of the tiles of a split."""
    if slack == 0:
        return maxima.cummax(-1).values
    bases = torch.empty_like(maxima)
    base = torch.full_like(maxima[:, 0], -math.inf)
    for t, now in enumerate(maxima.unbind(-1)):
        base = torch.where(now > base + slack, now, base)
        bases[:, t] = base
    return bases


def _pv_accumulated(
    p: torch.Tensor,
    kv: torch.Tensor,
    weight: torch.Tensor,
    running: torch.Tensor,
    top: torch.Tensor,
    bounds: list[tuple[int, int]],
    accumulator: Accumulator,
) -> torch.Tensor:
    """sum over tiles of weight * (P V) with the accumulator model; p [r, tiles, block], weights relative to `top`."""
    r, _, block = p.shape
    length = kv.shape[0]
    out = torch.zeros(r, D_V, dtype=torch.float64, device=p.device)

    def values(
        first: int, last: int
    ) -> torch.Tensor:  # V of tiles [first, last): [tiles, block, 512], zero past the end
        v = _real(kv[first * block : min(last * block, length), :D_V])
        return torch.nn.functional.pad(v, (0, 0, 0, (last - first) * block - v.shape[0])).view(-1, block, D_V)

    every = accumulator.promote_every
    batch = max(1, _TOKENS // block)
    if every is not None and every <= block and block % every == 0:  # tiles do not see each other
        for begin, end in bounds:
            for first in range(begin, end, batch):
                last = min(first + batch, end)
                tiles = tensor_core_matmul(p[:, first:last].transpose(0, 1), values(first, last), accumulator)
                out += torch.einsum("rt,trc->rc", weight[:, first:last], tiles)
        return out
    weights = _Operand(p, accumulator)
    narrow = weights.narrow and all(
        _Operand(_real(kv[t : t + _TOKENS, :D_V]), accumulator).narrow for t in range(0, length, _TOKENS)
    )
    weights = weights.like(narrow)
    for begin, end in bounds:
        state = _State(accumulator, (r, D_V), narrow, p.device)
        for first in range(begin, end, batch):
            v = _Operand(values(first, min(first + batch, end)), accumulator).like(narrow)
            for t in range(first, min(first + batch, end)):
                if t > begin:
                    now = running[:, t]
                    alpha = (running[:, t - 1] - now.masked_fill(now == -math.inf, 0.0)).exp()
                    state.rescale(alpha.unsqueeze(-1))
                state.add(weights.at(slice(None), t), v.at(t - first))
        out += state.total() * weight[:, end - 1 : end]
    return out


def tensor_core_matmul(a: torch.Tensor, b: torch.Tensor, accumulator: Accumulator) -> torch.Tensor:
    """a `[..., r, k]` times b `[..., k, c]` as the modelled tensor core adds it up; float64 `[..., r, c]`.

    The values of a and b are taken as they are: they must already be rounded to the element type that the instruction
    reads. Leading dimensions of both must be equal.
    """
    lead, (r, k), c = a.shape[:-2], a.shape[-2:], b.shape[-1]
    every = accumulator.promote_every
    if every is not None and every < k:  # accumulators that are cleared do not see each other: all at once
        chunks = -(-k // every)
        pad = chunks * every - k
        a = torch.nn.functional.pad(a, (0, pad)).unflatten(-1, (chunks, every)).movedim(-2, -3)
        b = torch.nn.functional.pad(b, (0, 0, 0, pad)).unflatten(-2, (chunks, every))
        group = max(1, _SUMS // max(1, lead.numel() * r * c))
        wide = torch.zeros(*lead, r, c, dtype=torch.float64, device=a.device)
        for i in range(0, chunks, group):
            some = slice(i, i + group)
            wide += tensor_core_matmul(a[..., some, :, :], b[..., some, :, :], accumulator).sum(-3)
        return wide
    x, y = _Operand(a.reshape(-1, r, k), accumulator), _Operand(b.reshape(-1, k, c), accumulator)
    narrow = x.narrow and y.narrow
    x, y = x.like(narrow), y.like(narrow)
    n = x.value.shape[0]
    out = torch.empty(n, r, c, dtype=torch.float64, device=a.device)
    columns = max(1, min(c, _PRODUCTS // (accumulator.k_step * r)))
    batch = max(1, _PRODUCTS // (accumulator.k_step * r * columns))
    states: dict[tuple[int, int], _State] = {}  # at most four shapes: whole and last batch, whole and last columns
    for i in range(0, n, batch):
        for j in range(0, c, columns):
            part = y.at(slice(i, i + batch), slice(None), slice(j, j + columns))
            shape = (part.value.shape[0], part.value.shape[2])
            state = states.setdefault(shape, _State(accumulator, (shape[0], r, shape[1]), narrow, a.device))
            state.clear()
            state.add(x.at(slice(i, i + batch)), part)
            out[i : i + batch, :, j : j + columns] = state.total()
    return out.view(*lead, r, c)


_PRODUCTS = 1 << 19  # products held at once by the accumulator model: 2 MB an array, inside the cache
_SUMS = 1 << 21  # promoted sums held at once, float64
_NARROW_BITS = 16  # 33 addends of up to 2^(bits + 2) units are exact in fp32 up to here


class _Operand:
    """Values of one operand with the exponents that alignment goes by. Narrow: fp32 inside, exact for fp8 operands."""

    def __init__(self, x: torch.Tensor, spec: Accumulator) -> None:
        single = x.to(torch.float32)
        bits = single.view(torch.int32)
        few = bool(((bits & 0xFFF) == 0).all()) and bool((single.to(x.dtype) == x).all())  # 12 significant bits
        self.narrow = few and spec.fraction_bits <= _NARROW_BITS
        self.value = single if self.narrow else x.to(torch.float64)
        self.spec = spec
        self.exponent = self._exponents() if spec.truncate == "addends" else None

    def _exponents(self) -> torch.Tensor:
        """int16 floor(log2 |x|), at least min_exponent; zero gets one that never wins."""
        exponent = torch.frexp(self.value)[1].sub_(1).clamp_(min=self.spec.min_exponent).to(torch.int16)
        return exponent.masked_fill_(self.value == 0, -1000)

    def like(self, narrow: bool) -> _Operand:
        return self if self.narrow == narrow else self._made(self.value.to(torch.float64), self.exponent, narrow)

    def at(self, *index: slice | int) -> _Operand:
        return self._made(self.value[index], None if self.exponent is None else self.exponent[index], self.narrow)

    def _made(self, value: torch.Tensor, exponent: torch.Tensor | None, narrow: bool) -> _Operand:
        made = object.__new__(_Operand)
        made.value, made.exponent, made.narrow, made.spec = value, exponent, narrow, self.spec
        return made


class _State:
    """A running accumulator [..., r, c] with its wide sum, and the buffers of one instruction."""

    def __init__(self, spec: Accumulator, shape: tuple[int, ...], narrow: bool, device: torch.device) -> None:
        self.spec = spec
        self.dtype, self.int_dtype = (torch.float32, torch.int32) if narrow else (torch.float64, torch.int64)
        self.fraction, self.bias, self.field = (23, 127, 0xFF) if narrow else (52, 1023, 0x7FF)
        self.part = torch.zeros(shape, dtype=self.dtype, device=device)
        self.wide = torch.zeros(shape, dtype=torch.float64, device=device)
        self.since = 0
        if spec.truncate == "addends":
            products = (*shape[:-2], spec.k_step, *shape[-2:])
            self.product = torch.empty(products, dtype=self.dtype, device=device)
            self.cut = torch.empty(products, dtype=self.int_dtype, device=device)
            self.exponent = torch.empty(products, dtype=torch.int16, device=device)

    def clear(self) -> None:
        self.part.zero_()
        self.wide.zero_()
        self.since = 0

    def rescale(self, alpha: torch.Tensor) -> None:
        """The online softmax's O *= alpha, on registers: fp32."""
        self.part = (self.part * alpha.to(torch.float32).to(self.dtype)).to(torch.float32).to(self.dtype)
        self.wide *= alpha

    def total(self) -> torch.Tensor:
        return self.wide + self.part

    def add(self, a: _Operand, b: _Operand) -> None:
        step = self.spec.k_step
        for k in range(0, a.value.shape[-1], step):
            rows, cols = (..., slice(k, k + step)), (..., slice(k, k + step), slice(None))
            if a.exponent is None or b.exponent is None:
                self.part = self._cut(self.part + a.value[rows] @ b.value[cols], self.spec.fraction_bits)
            else:
                self._fused(a.value[rows], b.value[cols], a.exponent[rows], b.exponent[cols])
            self.since += step
            if self.spec.promote_every is not None and self.since >= self.spec.promote_every:
                self.wide += self.part
                self.part.zero_()
                self.since = 0

    def _cut(self, x: torch.Tensor, bits: int) -> torch.Tensor:
        """x cut toward zero to `bits` fraction bits of its own exponent (at most those of fp32)."""
        drop = self.fraction - min(bits, 23)
        return (x.contiguous().view(self.int_dtype) & -(1 << drop)).view(self.dtype)

    def _fused(self, a: torch.Tensor, b: torch.Tensor, ea: torch.Tensor, eb: torch.Tensor) -> None:
        """One instruction: align products and part to the largest exponent, cut, sum, normalise, cut."""
        n = a.shape[-1]
        product, cut, exponent = (x.narrow(-3, 0, n) for x in (self.product, self.cut, self.exponent))
        torch.mul(a.mT.unsqueeze(-1), b.unsqueeze(-2), out=product)
        torch.add(ea.mT.unsqueeze(-1), eb.unsqueeze(-2), out=exponent)
        own = ((self.part.view(self.int_dtype) >> self.fraction) & self.field) - self.bias
        e = torch.maximum(exponent.amax(-3).to(self.int_dtype), own).clamp_(min=-100)
        up = ((self.spec.fraction_bits - e + self.bias) << self.fraction).view(self.dtype)  # 2^(fraction_bits - e)
        down = ((e - self.spec.fraction_bits + self.bias) << self.fraction).view(self.dtype)
        cut.copy_(product.mul_(up.unsqueeze(-3)))  # float to integer cuts toward zero
        total = cut.sum(-3, dtype=self.int_dtype) + (self.part * up).to(self.int_dtype)
        self.part = self._cut(total.to(self.dtype), self.spec.fraction_bits).mul_(down)


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge shards of one sequence by their natural-log lse: outs `[n, ..., 512]`, lses `[n, ...]` to out and lse.

    A shard without keys has lse -inf and weight 0, whatever its out holds; all shards empty gives 0 and -inf.
    """
    outs, lses = outs.to(torch.float64), lses.to(torch.float64)
    lse = torch.logsumexp(lses, dim=0)
    weights = (lses - lse.masked_fill(lse == -math.inf, 0.0)).exp()
    empty = (lses == -math.inf).unsqueeze(-1)
    return (outs.masked_fill(empty, 0.0) * weights.unsqueeze(-1)).sum(0), lse
