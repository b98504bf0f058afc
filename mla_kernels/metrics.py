# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Error metrics, named for what they compute, in float64 inside.

A row is one vector of the last dimension: the output of one query token and head. Every table of rows starts with the
count of non-finite values. Functions that return tables return lists of dicts; `pandas.DataFrame(rows)` takes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mla_kernels.formats import ELEMENTS, CacheFormat, decode, encode, round_to

__all__ = [
    "ErrorSplit",
    "RowVerdict",
    "error_split",
    "error_summary",
    "gain_minus_1",
    "implementation_budget",
    "kl_by_position",
    "kl_divergence",
    "kl_summary",
    "layer_row",
    "layers_to_keep",
    "max_abs_error",
    "nonfinite_count",
    "quantiles",
    "relative_error",
    "row_budget",
    "row_errors",
    "row_verdicts",
    "squared_relative_error",
    "top1_agreement",
    "ulp_distance",
    "ulp_histogram",
    "verdict_counts",
]

QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)


def _pair(out: torch.Tensor, ref: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if out.shape != ref.shape:
        raise ValueError(f"out: expected the shape of ref, {list(ref.shape)}, got {list(out.shape)}")
    return out.detach().to(torch.float64), ref.detach().to(torch.float64)


def nonfinite_count(x: torch.Tensor) -> int:
    """Number of NaN and infinite elements."""
    return x.numel() - int(torch.count_nonzero(torch.isfinite(x)))


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """‖out − ref‖ / ‖ref‖ over all elements (Frobenius norms).

    NaN if anything is not finite; 0 for two zero tensors; infinite for a zero ref and another out.
    """
    out, ref = _pair(out, ref)
    return _ratio((out - ref).norm(), ref.norm())


def _ratio(error: torch.Tensor, size: torch.Tensor) -> float:
    if not bool(torch.isfinite(error)) or not bool(torch.isfinite(size)):
        return math.nan
    if float(size) == 0.0:
        return 0.0 if float(error) == 0.0 else math.inf
    return float(error / size)


def row_errors(out: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """‖out − ref‖ / ‖ref‖ of each row: float64, without the last dim. 0/0 is 0; another out over a zero ref is inf."""
    out, ref = _pair(out, ref)
    error, size = (out - ref).norm(dim=-1), ref.norm(dim=-1)
    ratio = error / size
    return torch.where((size == 0) & (error == 0), torch.zeros_like(ratio), ratio)


def gain_minus_1(out: torch.Tensor, ref: torch.Tensor) -> float:
    """⟨out, ref⟩ / ⟨ref, ref⟩ − 1: the share by which out is too long along ref (as ⟨out − ref, ref⟩ / ⟨ref, ref⟩).

    −0.2 means that out lost 20 % of its length. 0 for a zero ref and a zero out, NaN for a zero ref and another out.
    """
    out, ref = _pair(out, ref)
    size = (ref * ref).sum()
    if float(size) == 0.0:
        return 0.0 if float((out * out).sum()) == 0.0 else math.nan
    return float(((out - ref) * ref).sum() / size)


def squared_relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """1 − 2⟨out, ref⟩ / (‖out‖² + ‖ref‖²) = ‖out − ref‖² / (‖out‖² + ‖ref‖²).

    The field calls it "cosine diff" (`cal_diff` in the tests of FlashMLA and vLLM). It is no cosine: it sees length
    too, and near a right answer it is half the square of the relative error. 1 for a zero out.
    """
    out, ref = _pair(out, ref)
    size = (out * out).sum() + (ref * ref).sum()
    return _ratio(((out - ref) ** 2).sum(), size)


def max_abs_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Largest |out − ref|. Equal infinities (lse of an empty row) differ by 0; a NaN or a lone infinity gives NaN."""
    out, ref = _pair(out, ref)
    if out.numel() == 0:
        return 0.0
    difference = torch.where(out == ref, torch.zeros_like(out), out - ref).abs()
    return math.nan if nonfinite_count(difference) else float(difference.max())


def quantiles(x: torch.Tensor, q: Sequence[float] = QUANTILES) -> dict[float, float]:
    """Quantiles of |x| over its finite elements (linear interpolation; any size). Empty: NaN for each."""
    values = x.detach().to(torch.float64).abs().reshape(-1)
    values = values[torch.isfinite(values)].cpu()
    if values.numel() == 0:
        return dict.fromkeys(q, math.nan)
    return dict(zip(q, np.quantile(values.numpy(), q, overwrite_input=True).tolist(), strict=True))


def error_summary(out: torch.Tensor, ref: torch.Tensor) -> dict[str, float]:
    """One row of numbers for out against ref: nonfinite first, then the metrics of this module by name."""
    rows = row_errors(out, ref)
    q = quantiles(rows)
    return {
        "nonfinite": nonfinite_count(out),
        "relative_error": relative_error(out, ref),
        "gain_minus_1": gain_minus_1(out, ref),
        "squared_relative_error": squared_relative_error(out, ref),
        "max_abs_error": max_abs_error(out, ref),
        "row_error_p50": q[0.5],
        "row_error_p99": q[0.99],
        "row_error_max": q[1.0],
    }


def ulp_distance(out: torch.Tensor, ref: torch.Tensor, element: str = "bf16") -> torch.Tensor:
    """Number of representable steps of `element` between out and ref, both rounded to it first; int64, out's shape.

    −0 and 0 are the same point; infinity is one step past the largest finite value. −1 where either is NaN.
    """
    out, ref = _pair(out, ref)
    a, b = _ordinal(out, element), _ordinal(ref, element)
    return torch.where(out.isnan() | ref.isnan(), torch.full_like(a, -1), (a - b).abs())


def _ordinal(x: torch.Tensor, element: str) -> torch.Tensor:
    """Index of x on the number line of the element type, 0 at zero."""
    spec = ELEMENTS[element]
    value = round_to(x, element).nan_to_num(nan=0.0, posinf=2 * spec.max_finite, neginf=-2 * spec.max_finite)
    exponent = (torch.frexp(value.abs())[1] - 1).clamp(min=spec.min_exponent)
    steps = torch.ldexp(value.abs(), spec.fraction_bits - exponent.to(torch.float64))  # in steps of its binade
    binade = (exponent - spec.min_exponent).to(torch.int64) << spec.fraction_bits
    index = torch.where(value == 0, torch.zeros_like(binade), binade + steps.to(torch.int64))
    top = (int(math.log2(spec.max_finite)) - spec.min_exponent) << spec.fraction_bits
    top += int(math.ldexp(spec.max_finite, spec.fraction_bits - int(math.log2(spec.max_finite))))
    index = index.clamp(max=top + 1)
    return torch.where(value < 0, -index, index)


def ulp_histogram(
    out: torch.Tensor, ref: torch.Tensor, element: str = "bf16", edges: Sequence[int] = (0, 1, 2, 4, 8, 16, 32, 64)
) -> list[dict[str, Any]]:
    """Histogram of `ulp_distance`: rows nan, then bins [edge, next edge); the last bin is open.

    Each row: `bin` (text), `low`, `high` (exclusive; None if open), `count`, `share` of all elements.
    """
    distance = ulp_distance(out, ref, element).reshape(-1)
    total = max(distance.numel(), 1)
    count = int((distance == -1).sum())
    rows: list[dict[str, Any]] = [{"bin": "nan", "low": None, "high": None, "count": count, "share": count / total}]
    for low, high in zip(edges, [*edges[1:], None], strict=True):
        inside = distance >= low if high is None else (distance >= low) & (distance < high)
        count = int(inside.sum())
        name = f"{low}+" if high is None else str(low) if high == low + 1 else f"{low}–{high - 1}"
        rows.append({"bin": name, "low": low, "high": high, "count": count, "share": count / total})
    return rows


@dataclass(frozen=True)
class RowVerdict:
    """What one row is. `row` is its index without the last dim, `error` its relative error, `detail` the evidence.

    `verdict` is one of ok, noise (over budget, spread over the row), outlier (over budget, a few elements carry it),
    zero (all zero, the reference is not), stale (what the buffer held before), swapped (another row's answer),
    non_finite.
    """

    row: tuple[int, ...]
    verdict: str
    error: float
    detail: str = ""


VERDICTS = ("non_finite", "stale", "zero", "swapped", "outlier", "noise", "ok")


def row_verdicts(
    out: torch.Tensor,
    ref: torch.Tensor,
    *,
    budget: float,
    previous: torch.Tensor | float | None = None,
    outlier_share: float = 0.9,
    outlier_elements: float = 0.05,
) -> list[RowVerdict]:
    """One verdict a row, in row order. `budget`: the relative error up to which a row is ok.

    `previous`: what the output buffer held before the call (a tensor like out, or one poison value, NaN included). A
    row over budget of which an eighth or more still holds that content, equal in value, is stale. Swapped: within
    budget (at least 1e-2) of another row's reference. Outlier: `outlier_elements` of the row carry `outlier_share` of
    its squared error.
    """
    shape = out.shape[:-1]
    raw = out.detach()
    out, ref = _pair(out, ref)
    rows, refs = out.reshape(-1, out.shape[-1]), ref.reshape(-1, ref.shape[-1])
    errors = row_errors(rows, refs)
    finite = torch.isfinite(rows).all(-1)
    held = _held(raw.reshape(-1, raw.shape[-1]), refs, previous)
    good = finite & (errors <= budget)
    verdicts = []
    for i in range(rows.shape[0]):
        where = tuple(int(k) for k in torch.unravel_index(torch.tensor(i), shape)) if shape else ()
        error = float(errors[i])
        if bool(good[i]):
            verdicts.append(RowVerdict(where, "ok", error))
            continue
        verdict, detail = _diagnose(
            rows[i], refs[i], i, refs, float(held[i]), budget, outlier_share, outlier_elements, shape
        )
        verdicts.append(RowVerdict(where, verdict, error, detail))
    return verdicts


def _held(rows: torch.Tensor, refs: torch.Tensor, previous: torch.Tensor | float | None) -> torch.Tensor:
    """Share of each row that still holds `previous` and should not."""
    if previous is None:
        return torch.zeros(rows.shape[0], dtype=torch.float64)
    old = previous if isinstance(previous, torch.Tensor) else torch.full_like(rows, previous)
    old = old.to(rows.dtype).expand(rows.shape) if old.dim() == 0 else old.reshape(rows.shape).to(rows.dtype)
    same = (rows == old) | (rows.isnan() & old.isnan())
    return (same & (rows.to(torch.float64) != refs.to(rows.dtype).to(torch.float64))).to(torch.float64).mean(-1)


def _diagnose(
    row: torch.Tensor,
    ref: torch.Tensor,
    index: int,
    refs: torch.Tensor,
    held: float,
    budget: float,
    outlier_share: float,
    outlier_elements: float,
    shape: torch.Size,
) -> tuple[str, str]:
    if held >= 0.125:
        return "stale", f"{held:.0%} of the row holds what the buffer held before"
    bad = row.numel() - int(torch.isfinite(row).sum())
    if bad:
        return "non_finite", f"{int(row.isnan().sum())} NaN, {int(row.isinf().sum())} infinite of {row.numel()}"
    if not bool(row.any()):
        return "zero", "every element is 0, the reference is not"
    distance = (refs - row).norm(dim=-1) / refs.norm(dim=-1)
    distance[index] = math.inf
    distance = distance.nan_to_num(nan=math.inf)
    other = int(distance.argmin())
    if float(distance[other]) <= max(budget, 1e-2):
        where = tuple(int(k) for k in torch.unravel_index(torch.tensor(other), shape))
        return "swapped", f"equals the reference of row {where} within {float(distance[other]):.1e}"
    squared = ((row - ref) ** 2).sort(descending=True).values
    few = max(1, int(outlier_elements * row.numel()))
    share = float(squared[:few].sum() / squared.sum())
    if share >= outlier_share:
        return "outlier", f"{few} of {row.numel()} elements carry {share:.0%} of the squared error"
    return "noise", f"spread: the {few} worst elements carry {share:.0%} of the squared error"


def verdict_counts(verdicts: Iterable[RowVerdict]) -> dict[str, int]:
    """Rows of each verdict, worst kind first, zero counts kept."""
    counts = dict.fromkeys(VERDICTS, 0)
    for verdict in verdicts:
        counts[verdict.verdict] += 1
    return counts


@dataclass(frozen=True)
class ErrorSplit:
    """total = format + stage + implementation, as vectors (float64, the output's shape).

    `oracle` is what the relative numbers refer to.
    """

    oracle: torch.Tensor
    format: torch.Tensor
    stage: torch.Tensor
    implementation: torch.Tensor
    total: torch.Tensor

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The three error vectors, in order."""
        return {"format": self.format, "stage": self.stage, "implementation": self.implementation}

    @property
    def residual(self) -> float:
        """‖format + stage + implementation − total‖ / ‖total‖: 0 up to float64 rounding."""
        gap = self.format + self.stage + self.implementation - self.total
        return _ratio(gap.norm(), self.total.norm())

    def relative(self) -> dict[str, float]:
        """‖part‖ / ‖oracle‖ for the three parts and the total. Norms do not add up; vectors do."""
        size = self.oracle.norm()
        return {name: _ratio(part.norm(), size) for name, part in {**self.parts, "total": self.total}.items()}

    def gain(self) -> dict[str, float]:
        """⟨part, oracle⟩ / ⟨oracle, oracle⟩ of each part and the total. These do add up."""
        size = (self.oracle * self.oracle).sum()
        return {
            name: _ratio((part * self.oracle).sum(), size) for name, part in {**self.parts, "total": self.total}.items()
        }

    def rows(self, **labels: Any) -> list[dict[str, Any]]:
        """One dict a part and one for the total: labels, part, nonfinite, relative_error, gain, max_abs."""
        relative, gain = self.relative(), self.gain()
        return [
            {
                **labels,
                "part": name,
                "nonfinite": nonfinite_count(part),
                "relative_error": relative[name],
                "gain": gain[name],
                "max_abs": float(part.abs().max()) if part.numel() else 0.0,
            }
            for name, part in {**self.parts, "total": self.total}.items()
        ]


def error_split(oracle: torch.Tensor, format: torch.Tensor, stage: torch.Tensor, kernel: torch.Tensor) -> ErrorSplit:
    """The additive split of kernel − oracle: format − oracle, stage − format, kernel − stage."""
    oracle, format = _pair(oracle, format)
    stage, kernel = _pair(stage, kernel)
    _pair(oracle, stage)
    return ErrorSplit(oracle, format - oracle, stage - format, kernel - stage, kernel - oracle)


_STEP = {"e4m3": 2.0**-3, "bf16": 2.0**-7, "fp16": 2.0**-10}  # largest relative step of P's format
_OUT_STEP = {"e4m3": 2.0**-7, "bf16": 2.0**-7, "fp16": 2.0**-10}  # the same of the output's format


def implementation_budget(length: int, *, dtype: str = "e4m3", logit_error: float = 2.0**-22) -> float:
    """Bound on ‖kernel − stage‖ / ‖stage‖ of a case with rows of `length` keys and inputs of `dtype`; 1e-2 at the most.

    Kernel and stage round at the same points; they differ because the kernel computes in fp32, which moves a value
    across a rounding boundary now and then. With d the error of a logit (`logit_error`, natural units: 2^-22 measured
    for queries and keys of std 1, where |lse − float64| stays under 2^-20; it grows with their product), step the
    largest relative step of P's format, w_t a key's softmax weight and ‖o‖² = Σ w_t² ‖V_t‖² (independent keys):

    - P flips. Key t flips with probability at most d P_t / ulp(P_t), and then moves o by ulp(P_t) / l · V_t. The mean
      square over ‖o‖² is at most d · step. A row has at most n = 2 d length / step flips, so the mean of |move| is at
      most √n times the root mean square.
    - fp32 sums. 2^-24 (√64 / 2 + √(length / 64)): 64 products in a tile, then one fold a tile, errors independent.
    - Output flips. Two values |a − b| apart round differently with probability |a − b| / ulp, and then differ by one
      ulp: mean square |a − b| · ulp, ulp at most `out_step` of the value.

    All three are means over what a case may draw. The bound is ten times their root sum of squares: by Chebyshev a
    case exceeds it with probability under 1 %. It is met for logits up to a few dozen; for queries of std 100 pass
    their `logit_error` (`Case.budget` does).
    """
    if dtype not in _STEP:
        raise ValueError(f"dtype: expected one of {', '.join(_STEP)}, got {dtype!r}")
    step, out_step = _STEP[dtype], _OUT_STEP[dtype]
    p_flips = math.sqrt(logit_error * step)
    mean_move = p_flips * math.sqrt(min(1.0, 2.0 * logit_error * length / step))
    sums = 2.0**-24 * (math.sqrt(64.0) / 2.0 + math.sqrt(length / 64.0))
    out_flips = math.sqrt(out_step * (mean_move + sums))
    return min(1e-2, 10.0 * math.sqrt(p_flips**2 + sums**2 + out_flips**2))


def row_budget(dtype: str = "e4m3") -> float:
    """Bound on ‖kernel − stage‖ / ‖stage‖ of one row, for `row_verdicts`: one flip of its heaviest movable weight.

    A flip changes a weight w by at most step, and the row by step w (1 - w) of the distance between that value and the
    mean of the others: at most step / 4 of two values. (The running maximum's own P is exactly 2^8, 1 for bf16 and
    fp16, and cannot flip, but on a GPU P is relative to an older one.) The output's rounding adds at most one step.
    """
    if dtype not in _STEP:
        raise ValueError(f"dtype: expected one of {', '.join(_STEP)}, got {dtype!r}")
    return _STEP[dtype] / 2.0 + _OUT_STEP[dtype]


def layer_row(
    layer: int | str,
    x: torch.Tensor,
    fmt: str | CacheFormat = "e4m3",
    scale: float | None = None,
    *,
    out: torch.Tensor | None = None,
    out_ref: torch.Tensor | None = None,
) -> dict[str, Any]:
    """One row of the per-layer table for latents and ropes x `[..., 576]` stored as `fmt` with `scale` (None: amax).

    layer, nonfinite, max |x|, p99.99 of |x|, scale, share clipped, share flushed to zero, round-trip error
    ‖decode − x‖ / ‖x‖, output error ‖out − out_ref‖ / ‖out_ref‖ (NaN if not given). A layer with NaN stays in the
    table: its nonfinite count says so, its numbers are those of the finite values, and its errors are NaN.
    """
    encoded = encode(x, fmt, scale)
    finite = x[torch.isfinite(x)]
    top = quantiles(finite, (0.9999, 1.0))
    return {
        "layer": layer,
        "nonfinite": nonfinite_count(x),
        "max": top[1.0],
        "p99.99": top[0.9999],
        "scale": float(encoded.scale.max()) if encoded.scale is not None else math.nan,
        "share_clipped": encoded.counters.share("saturated"),
        "share_flushed": encoded.counters.share("flushed"),
        "round_trip_error": relative_error(decode(encoded), x),
        "output_error": math.nan if out is None or out_ref is None else relative_error(out, out_ref),
    }


def layers_to_keep(rows: Sequence[Mapping[str, Any]], *, by: str = "output_error", limit: float) -> list[Any]:
    """Layers to keep in bf16, worst first: those whose `by` is over `limit`, and before them those with NaN in it."""
    bad = [row for row in rows if not row[by] <= limit]
    return [
        row["layer"] for row in sorted(bad, key=lambda row: math.inf if row[by] != row[by] else row[by], reverse=True)
    ]


def kl_divergence(logits: torch.Tensor, ref_logits: torch.Tensor) -> torch.Tensor:
    """KL(ref ‖ ours) of next-token distributions, in nats: float64, the shape without the vocabulary.

    sum over tokens of p_ref * (log p_ref − log p), from float64 log-softmax; a token of probability 0 in ref adds 0.
    """
    logits, ref_logits = _pair(logits, ref_logits)
    log_p, log_ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    p_ref = log_ref.exp()
    return torch.where(p_ref == 0, torch.zeros_like(p_ref), p_ref * (log_ref - log_p)).sum(-1)


def top1_agreement(logits: torch.Tensor, ref_logits: torch.Tensor) -> torch.Tensor:
    """Whether both distributions have the same most likely token: bool, the shape without the vocabulary."""
    logits, ref_logits = _pair(logits, ref_logits)
    return logits.argmax(-1) == ref_logits.argmax(-1)


def kl_summary(logits: torch.Tensor, ref_logits: torch.Tensor) -> dict[str, float]:
    """Over all positions: count, nonfinite, KL mean, median, p99, p99.9, max (nats), share with the same top token."""
    kl = kl_divergence(logits, ref_logits).reshape(-1)
    q = quantiles(kl, (0.5, 0.99, 0.999, 1.0))
    finite = kl[torch.isfinite(kl)]
    return {
        "positions": kl.numel(),
        "nonfinite": nonfinite_count(kl),
        "kl_mean": float(finite.mean()) if finite.numel() else math.nan,
        "kl_median": q[0.5],
        "kl_p99": q[0.99],
        "kl_p99.9": q[0.999],
        "kl_max": q[1.0],
        "top1_agreement": float(top1_agreement(logits, ref_logits).to(torch.float64).mean())
        if kl.numel()
        else math.nan,
    }


def kl_by_position(logits: torch.Tensor, ref_logits: torch.Tensor) -> list[dict[str, float]]:
    """Logits `[sequences, positions, vocabulary]` (or one sequence): a row a position, KL mean, max, same top token."""
    kl, same = kl_divergence(logits, ref_logits), top1_agreement(logits, ref_logits).to(torch.float64)
    kl, same = kl.reshape(-1, kl.shape[-1]), same.reshape(-1, same.shape[-1])
    return [
        {
            "position": t,
            "kl_mean": float(kl[:, t].mean()),
            "kl_max": float(kl[:, t].max()),
            "top1_agreement": float(same[:, t].mean()),
        }
        for t in range(kl.shape[1])
    ]
