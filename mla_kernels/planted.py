# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Faults planted in right answers, to see which numbers notice them and which do not.

The number under test is what the field calls "cosine diff" (`metrics.squared_relative_error`), one for a whole output,
with the published limits (`failure.OUT_LIMIT`, `LSE_LIMIT`). Faulty rows are made with the operator itself where that
is possible (a wrong page, a dropped split, another call's answer), by hand elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from mla_kernels import metrics
from mla_kernels.cases import Inputs, inputs_from, make_inputs, select
from mla_kernels.failure import LSE_LIMIT, OUT_LIMIT, failed_case
from mla_kernels.formats import D_V, D, decode_element, encode
from mla_kernels.ops import BLOCK_N, mla_decode
from mla_kernels.reference import KERNEL, KERNEL_BF16, Accumulator, attention, gather, merge

__all__ = [
    "FAULTS",
    "Batch",
    "accumulator_faults",
    "batches",
    "exactly_one",
    "lse_faults",
    "planted_faults",
    "rounding_room",
]

LIMIT = OUT_LIMIT["e4m3"]


@dataclass(frozen=True)
class Batch:
    """A batch of the published kind with its right answers.

    args: the operator's arguments. out [b, h_q, 512] and lse [b, h_q]: the kernel's. form, form_lse: the same in
    float64, exact attention on the stored values.
    """

    name: str
    args: dict[str, Any]
    out: Tensor
    lse: Tensor
    form: Tensor
    form_lse: Tensor

    def stage(self, entry: int) -> Tensor:
        """The stage reference of one batch entry: float64 [h_q, 512]."""
        args = {name: self.args[name][entry : entry + 1] for name in ("q_nope", "q_pe", "seq_lens", "block_table")}
        q = torch.cat((args["q_nope"], args["q_pe"]), -1)
        kv = gather(self.args["kv_cache"], args["block_table"], args["seq_lens"])
        options = {name: self.args[name] for name in ("sm_scale", "q_scale", "kv_scale", "num_kv_splits")}
        return attention(q, kv, args["seq_lens"], rounding=KERNEL, **options)[0][0]


def batches(b: int = 128, seq_len: int = 4096, h_q: int = 16, *, sequences: int = 8, seed: int = 42) -> list[Batch]:
    """Two batches of `b` rows as in the published test: all of `seq_len` tokens, and of varying lengths.

    The varying lengths are the published ones (mean 4096), cut in proportion to seq_len; some rows have one token. The
    rows share `sequences` drawn sequences, each row with queries of its own, so that a CPU can draw them in seconds.
    seq_len: at least 128 (two tiles).
    """
    if seq_len < 2 * BLOCK_N:
        raise ValueError(f"seq_len: expected at least {2 * BLOCK_N}, two tiles, got {seq_len}")
    published = select("published", name="e4m3-h16-s4096-varlen")[0].seq_lens
    lens = [max(1, n * seq_len // 4096) for n in (published * (1 + b // len(published)))[:b]]
    case = failed_case(1, seq_len, h_q)
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(min(sequences, b), max(seq_len, *lens), D, generator=generator).to(torch.bfloat16)
    q = encode(torch.randn(b, 1, h_q, D, generator=generator).to(torch.bfloat16), "e4m3", 1.0).stored
    whole = [kv.shape[1]] * len(kv)
    pool = inputs_from(
        torch.zeros(len(kv), 1, 1, D), kv, whole, q_scale=1.0, kv_scale=1.0, sm_scale=case.sm_scale,
        page_size=case.page_size, seed=seed,
    )  # fmt: skip
    return [
        _batch("equal lengths", pool, q, [seq_len] * b),
        _batch("varying lengths", pool, q, lens),
    ]


def _batch(name: str, pool: Inputs, q: Tensor, lens: list[int]) -> Batch:
    """Row i of q [b, 1, h, 576] over the first lens[i] tokens of sequence i % n of the pool."""
    n, b = len(pool.kv_stored), len(lens)
    q_nope, q_pe = q[:, 0, :, :D_V].contiguous(), q[:, 0, :, D_V:].contiguous()
    table = pool.args["block_table"][torch.arange(b) % n].contiguous()
    args = {**pool.args, "q_nope": q_nope, "q_pe": q_pe, "block_table": table}
    args["seq_lens"] = torch.tensor(lens, dtype=torch.int32)
    out, lse = mla_decode(**args)
    form, form_lse = torch.empty(out.shape, dtype=torch.float64), torch.empty(lse.shape, dtype=torch.float64)
    for i in range(n):
        kv = decode_element(pool.kv_stored[i : i + 1].view(torch.uint8), "e4m3")
        mine = slice(i, b, n)
        some, owned = q[mine, 0], lens[mine]
        if len(set(owned)) == 1:  # all queries of the sequence at once
            some, owned = some.flatten(0, 1)[None], owned[:1]
        exact = attention(some, kv.expand(len(owned), -1, -1), owned, sm_scale=pool.sm_scale)
        form[mine], form_lse[mine] = exact[0].view(form[mine].shape), exact[1].view(form_lse[mine].shape)
    return Batch(name, args, out, lse, form, form_lse)


def _zeros(batch: Batch) -> Tensor:
    return torch.zeros_like(batch.out)


def _nan(batch: Batch) -> Tensor:
    return torch.full_like(batch.out, math.nan)


def _garbage(batch: Batch) -> Tensor:
    bad = batch.out.clone()
    bad[..., 5] = 1e30  # one element of memory that held something else
    return bad


def _few(batch: Batch) -> Tensor:
    bad = batch.out.clone()
    bad[..., -8:] = 0
    return bad


def _other_call(batch: Batch) -> Tensor:
    """The answer to other queries over the same cache: what the buffer held before."""
    args = dict(batch.args)
    args["q_nope"], args["q_pe"] = args["q_nope"].roll(1, 0), args["q_pe"].roll(1, 0)
    return mla_decode(**args)[0]


def _half(batch: Batch) -> Tensor:
    """Tokens of the first of two splits, whole pages; a row of one tile has one split."""
    tiles = (batch.args["seq_lens"] + BLOCK_N - 1) // BLOCK_N
    return torch.where(tiles > 1, tiles // 2 * BLOCK_N, batch.args["seq_lens"])


def _dropped_split(batch: Batch) -> Tensor:
    return mla_decode(**{**batch.args, "seq_lens": _half(batch)})[0]


def _stale_workspace(batch: Batch) -> Tensor:
    """Second split from the workspace of another call: its queries were others."""
    args, half = batch.args, _half(batch)
    first = mla_decode(**{**args, "seq_lens": half})
    table = args["block_table"].clone()
    page = args["kv_cache"].shape[1]
    for i, n in enumerate(half.tolist()):
        table[i] = table[i].roll(-(n // page))
    rest = {**args, "seq_lens": batch.args["seq_lens"] - half, "block_table": table}
    rest["q_nope"], rest["q_pe"] = args["q_nope"].roll(1, 0), args["q_pe"].roll(1, 0)
    second = mla_decode(**rest)
    return merge(torch.stack([first[0], second[0]]), torch.stack([first[1], second[1]]))[0].to(batch.out.dtype)


def _wrong_page(batch: Batch) -> Tensor:
    """The first page of each sequence is that of the sequence before."""
    table = batch.args["block_table"].clone()
    table[:, 0] = table[:, 0].roll(1)
    return mla_decode(**{**batch.args, "block_table": table})[0]


def _swapped(batch: Batch) -> Tensor:
    return batch.out.roll(1, 1)


def _lost_scale(batch: Batch) -> Tensor:
    """The output without its kv_scale: the published cases all have kv_scale 1."""
    return batch.out / batch.args["kv_scale"]


#: Name of a fault: what it is, and the function that gives every row of a batch that fault.
FAULTS: dict[str, tuple[str, Callable[[Batch], Tensor]]] = {
    "unwritten, zeros": ("the row was never written, its memory held zeros", _zeros),
    "unwritten, NaN": ("never written, its memory held NaN; or 0 × NaN from the unwritten tail of a page", _nan),
    "unwritten, garbage": ("one element never written, its memory held 1e30", _garbage),
    "few elements lost": ("the last 8 of 512 dims are 0", _few),
    "stale output": ("the row still holds the answer to other queries", _other_call),
    "stale workspace": ("the second of two splits is that of another call", _stale_workspace),
    "dropped split": ("the second of two splits is left out", _dropped_split),
    "wrong page": ("the first page is another sequence's", _wrong_page),
    "swapped heads": ("the row holds its neighbour's answer", _swapped),
    "lost scale": ("the output is not multiplied by kv_scale", _lost_scale),
}


def planted_faults(batch: Batch) -> pd.DataFrame:
    """Each fault in the rows of a batch that it changes: what the whole-tensor number says, what the rows say.

    Columns: batch, fault, what, rows (of the batch), rows_changed (by the fault where it is in all rows), row_error
    (relative error of the planted row against the stage reference), one_row (squared relative error of the batch with
    the fault in one row, the longest that it changes), passes (below the published limit), hidden_rows (most rows with
    the fault that still pass), verdict and detail (`metrics.row_verdicts` of the planted row against the stage
    reference, budget `metrics.implementation_budget` of its length), false_alarms (other heads of that sequence, which
    are right, with another verdict than ok).
    """
    rows = []
    for name, (what, make) in FAULTS.items():
        bad = make(batch)
        changed = (bad.view(torch.int16) != batch.out.view(torch.int16)).any(-1)
        row: dict[str, Any] = {"batch": batch.name, "fault": name, "what": what, "rows": changed.numel()}
        row["rows_changed"] = int(changed.sum())
        row["hidden_rows"] = _hidden_rows(batch, bad, changed)
        if not row["rows_changed"]:
            row |= {"row_error": 0.0, "one_row": _number(batch.out, batch), "passes": True, "verdict": "ok"}
            rows.append(row | {"detail": "no bit differs", "false_alarms": 0})
            continue
        lens = batch.args["seq_lens"].unsqueeze(-1).expand(changed.shape)
        at = int(torch.where(changed, lens, -1).flatten().argmax())
        entry, head = divmod(at, changed.shape[1])
        planted = batch.out.clone()
        planted[entry, head] = bad[entry, head]
        held: dict[str, Tensor | float] = {"stale output": bad[entry], "unwritten, NaN": math.nan}
        verdicts = metrics.row_verdicts(
            planted[entry],
            batch.stage(entry),
            budget=metrics.implementation_budget(int(lens[entry, 0])),
            previous=held.get(name),
        )
        one = _number(planted, batch)
        row |= {"row_error": verdicts[head].error, "one_row": one, "passes": one < LIMIT}
        row |= {"verdict": verdicts[head].verdict, "detail": verdicts[head].detail}
        rows.append(row | {"false_alarms": sum(v.verdict != "ok" for v in verdicts) - (row["verdict"] != "ok")})
    return pd.DataFrame(rows)


def _number(out: Tensor, batch: Batch) -> float:
    return metrics.squared_relative_error(out, batch.form)


def _hidden_rows(batch: Batch, bad: Tensor, changed: Tensor) -> int:
    """Most rows of `bad` that can stand in `batch.out` while the squared relative error stays below the limit."""
    out, form, wrong = (x.double().flatten(0, 1) for x in (batch.out, batch.form, bad))
    pick = changed.flatten()
    if not bool(pick.any()):
        return pick.numel()
    error = ((out - form) ** 2).sum(-1)
    size = (out**2).sum(-1)
    more = (((wrong - form) ** 2).sum(-1) - error)[pick].nan_to_num(nan=math.inf)
    grown = ((wrong**2).sum(-1) - size)[pick].nan_to_num(nan=0.0)
    order = more.argsort()
    share = (error.sum() + more[order].cumsum(0)) / (size.sum() + grown[order].cumsum(0) + (form**2).sum())
    over = (~(share < LIMIT)).nonzero()
    return int(over[0]) if len(over) else int(pick.sum())


def exactly_one(batch: Batch) -> pd.DataFrame:
    """Outputs and what the published formula prints for them. Columns: output, printed, passes.

    It prints 1.0 where 2 ⟨out, ref⟩ is under 2^-54 of ‖out‖² + ‖ref‖²: for zeros, or once one element is about 2^55
    times what belongs there.
    """
    out = batch.out
    half_zero = out.clone()
    half_zero[::2] = 0
    one_huge, huge, infinite, poisoned = out.clone(), torch.full_like(out, 1e30), out.clone(), out.clone()
    one_huge[0, 0, 0] = 1e30
    infinite[0, 0, 0] = math.inf
    poisoned[0, 0, 0] = math.nan
    outputs = {
        "right": out,
        "all zeros": torch.zeros_like(out),
        "zeros in every other sequence": half_zero,
        "another call's answer everywhere": _other_call(batch),
        "one element of 1e30, the rest right": one_huge,
        "1e30 everywhere": huge,
        "one NaN, the rest right": poisoned,
        "one infinity, the rest right": infinite,
    }
    rows = []
    for name, x in outputs.items():
        a, ref = x.double(), batch.form
        value = 1 - 2 * (a * ref).sum().item() / max((a * a + ref * ref).sum().item(), 1e-12)
        rows.append(
            {
                "output": name,
                "printed": "1.0" if value == 1 else "NaN" if value != value else f"{value:.3g}",
                "passes": value < LIMIT,
            }
        )
    return pd.DataFrame(rows)


def lse_faults(batch: Batch) -> pd.DataFrame:
    """Faults of lse against its published limit. Columns: fault, squared_relative_error, passes, worst (absolute)."""
    lse = batch.lse.double()
    faults = {
        "right": lse,
        "0.3 too large in every row (weights of a merge off by 35 %)": lse + 0.3,
        "another head's in every row": lse.roll(1, -1),
        "of the first split alone (half the tokens)": mla_decode(**{**batch.args, "seq_lens": _half(batch)})[1],
        "base 2 instead of e": lse / math.log(2.0),
    }
    rows = []
    for name, x in faults.items():
        number = metrics.squared_relative_error(x, batch.form_lse)
        worst = metrics.max_abs_error(x, batch.form_lse)
        rows.append({"fault": name, "squared_relative_error": number, "passes": number < LSE_LIMIT, "worst": worst})
    return pd.DataFrame(rows)


def accumulator_faults(seq_len: int = 4096, *, h_q: int = 4, fraction_bits: int = 13) -> pd.DataFrame:
    """A narrow accumulator in place, on the published zero-mean data and on latents with mean 1, one sequence.

    Columns: distribution, accumulator, squared_relative_error, passes, gain_minus_1: against exact attention on the
    stored values.
    """
    rows = []
    for distribution in ("zero_mean", "shifted_mean"):
        inputs = make_inputs(replace(failed_case(1, seq_len, h_q), distribution=distribution))
        exact = _exact(inputs)
        for name, accumulator in (("fp32", None), (f"{fraction_bits} bits, in place", Accumulator(fraction_bits))):
            out, _ = _stage(inputs, pv_accumulator=accumulator)
            number = metrics.squared_relative_error(out, exact)
            rows.append(
                {
                    "distribution": distribution,
                    "accumulator": name,
                    "squared_relative_error": number,
                    "passes": number < LIMIT,
                    "gain_minus_1": metrics.gain_minus_1(out, exact),
                }
            )
    return pd.DataFrame(rows)


def rounding_room(seq_len: int = 4096, *, b: int = 2) -> pd.DataFrame:
    """What rounding alone makes of the published number. Columns: rounding, squared_relative_error, share_of_limit."""
    inputs = make_inputs(failed_case(b, seq_len))
    exact = _exact(inputs)
    named: dict[str, dict[str, Any]] = {
        "P in e4m3, scaled by 2^8 (this workbook's kernel on a CPU)": {},
        "P in e4m3, not scaled": {"p_scale": 1.0},
        "P in e4m3, lse's sum as divisor": {"row_sum": "unrounded"},
        "P in bf16": {"p_format": KERNEL_BF16.p_format, "p_scale": KERNEL_BF16.p_scale},
        "output to bf16 alone": {"p_format": None, "p_scale": 1.0},
    }
    rows = []
    for name, changes in named.items():
        number = metrics.squared_relative_error(_stage(inputs, **changes)[0], exact)
        rows.append({"rounding": name, "squared_relative_error": number, "share_of_limit": number / LIMIT})
    return pd.DataFrame(rows)


def _exact(inputs: Inputs) -> Tensor:
    return _stage(inputs, p_format=None, p_scale=1.0, out_format=None)[0]


def _stage(inputs: Inputs, **changes: Any) -> tuple[Tensor, Tensor]:
    return attention(
        inputs.q_stored, inputs.kv_stored, inputs.seq_lens, sm_scale=inputs.sm_scale, q_scale=inputs.q_scale,
        kv_scale=inputs.kv_scale, rounding=replace(KERNEL, **changes),
    )  # fmt: skip
