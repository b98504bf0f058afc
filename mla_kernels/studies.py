# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The computations behind the notebooks: parameters in, tables (DataFrames) out, one function per question.

Inputs are drawn anew from a seed, never decoded from fp8 first; the kernel runs before the references. Names of columns
are those that `mla_kernels.plots` reads.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from mla_kernels import build, metrics, plots
from mla_kernels.cases import DTYPES, Case, Results, inputs_from, logit_bound, make_inputs, run_case, select
from mla_kernels.checks import CUDA_INPUT_DTYPES
from mla_kernels.formats import FORMATS, decode, encode, round_to
from mla_kernels.model import Comparison, Model
from mla_kernels.ops import loaded_targets, mla_decode, split_plan
from mla_kernels.reference import KERNEL, Accumulator, Rounding, attention, tensor_core_matmul
from mla_kernels.toolchain import DEVICE_TARGETS

__all__ = [
    "accumulator_loop_table",
    "accumulator_table",
    "batch_table",
    "budget",
    "case_table",
    "data_path",
    "describe",
    "format_table",
    "kl_table",
    "layer_table",
    "length_split_table",
    "load_kernels",
    "match_table",
    "pick_device",
    "read_texts",
    "recorded",
    "rounding_table",
    "run_distributions",
    "sign_test",
    "tables_of",
]

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 0.9995, 0.9999, 1.0)


#: Targets that the notebooks compute with. Their cases have page sizes and numbers of query tokens that sm100a refuses.
NOTEBOOK_TARGETS = ("cpu", "sm90a")


def load_kernels() -> build.Built:
    """Load the targets of NOTEBOOK_TARGETS that this machine can build and run: the CPU's, and that of a GPU here."""
    rows = [row for row in build.capability_report() if row["target"] in NOTEBOOK_TARGETS]
    return build.load(targets=tuple(row["target"] for row in rows if row["can_build"] and row["can_run"]) or ("cpu",))


def pick_device(device: str = "auto") -> str:
    """ "auto" gives "cuda" where the loaded library has a target of NOTEBOOK_TARGETS for torch's GPU, else "cpu"."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: expected auto, cpu or cuda, got {device!r}")
    usable = set(loaded_targets()) & set(NOTEBOOK_TARGETS)
    gpu = torch.cuda.is_available() and DEVICE_TARGETS.get(torch.cuda.get_device_capability()) in usable
    if device == "cuda" and not gpu:
        raise ValueError(
            f'device: "cuda" needs a GPU and a library with a target for it that the notebooks compute with '
            f'({", ".join(NOTEBOOK_TARGETS[1:])}), loaded: {loaded_targets()}; use "auto"'
        )
    return "cuda" if device != "cpu" and gpu else "cpu"


def _has_kernel(case: Case, device: str) -> bool:
    return torch.device(device).type == "cpu" or DTYPES[case.dtype] in CUDA_INPUT_DTYPES


def case_table(group: str = "correctness", *, device: str = "cpu", names: Sequence[str] = ()) -> pd.DataFrame:
    """Every case of a group through kernel and references: a row a case, with the budget that it must meet.

    Columns: case, dtype, distribution, b, s_q, h_q, longest, nonfinite, implementation_error, budget, format_error,
    stage_error, total_error, lse_error (largest absolute difference to the format reference's lse), lse_stage_error
    (to the stage's) and its lse_budget: 1e-4, on a GPU with `cases.logit_bound` on top.
    """
    chosen = {case.name: case for case in select(group)}
    for name in names:
        if name not in chosen:
            near = difflib.get_close_matches(name, chosen, 1)
            raise ValueError(
                f"names: no case {name!r} in group {group!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
    rows = []
    for case in [chosen[name] for name in names] or [case for case in chosen.values() if _has_kernel(case, device)]:
        given = make_inputs(case, device)
        result = run_case(given, mla_decode)
        assert result.kernel is not None
        assert result.kernel_lse is not None
        relative = result.split.relative()
        rows.append(
            {
                "case": case.name,
                "dtype": case.dtype,
                "distribution": case.distribution,
                "b": case.b,
                "s_q": case.s_q,
                "h_q": case.h_q,
                "longest": max(case.seq_lens),
                "nonfinite": metrics.nonfinite_count(result.kernel),
                "implementation_error": metrics.relative_error(result.kernel, result.stage),
                "budget": case.budget,
                "format_error": relative["format"],
                "stage_error": relative["stage"],
                "total_error": relative["total"],
                "lse_error": metrics.max_abs_error(result.kernel_lse, result.format_lse),
                "lse_stage_error": metrics.max_abs_error(result.kernel_lse, result.stage_lse),
                "lse_budget": 1e-4 + (logit_bound(given) if given.q_stored.is_cuda else 0.0),
            }
        )
    return pd.DataFrame(rows)


def run_distributions(
    distributions: Sequence[str],
    *,
    b: int,
    h_q: int,
    seq_len: int,
    dtype: str = "e4m3",
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Results]:
    """The four results for each named distribution, same shape and seed."""
    return {
        name: run_case(
            Case(f"study-{name}", "correctness", (seq_len,) * b, h_q=h_q, dtype=dtype, distribution=name, seed=seed),
            mla_decode,
            device,
        )
        for name in distributions
    }


def tables_of(results: dict[str, Results], *, budget: float) -> dict[str, pd.DataFrame]:
    """The tables of notebook 02 from results by distribution.

    split (distribution, part, relative_error, gain, max_abs), histogram, quantiles, rows (relative error of each row
    against the oracle, with the verdict on kernel against stage), ulps (kernel against stage).
    """
    split, histogram, levels, rows, ulps = [], [], [], [], []
    for name, result in results.items():
        assert result.kernel is not None
        parts = {**result.split.parts, "total": result.split.total}
        split += result.split.rows(distribution=name)
        binned = plots.log_histogram({part: error.flatten().tolist() for part, error in parts.items()})
        histogram.append(binned.assign(distribution=name))
        for part, error in parts.items():
            found = metrics.quantiles(error, QUANTILES)
            levels += [{"distribution": name, "part": part, "quantile": q, "abs_error": v} for q, v in found.items()]
        errors = metrics.row_errors(result.kernel, result.oracle).flatten().tolist()
        verdicts = metrics.row_verdicts(result.kernel, result.stage, budget=budget, previous=float("nan"))
        rows += [
            {"distribution": name, "row": i, "relative_error": error, "verdict": verdict.verdict}
            for i, (error, verdict) in enumerate(zip(errors, verdicts, strict=True))
        ]
        ulps += [
            {"distribution": name, "ulps": bar["bin"], "share": bar["share"], "count": bar["count"]}
            for bar in metrics.ulp_histogram(result.kernel, result.stage)
        ]
    return {
        "split": pd.DataFrame(split),
        "histogram": pd.concat(histogram, ignore_index=True),
        "quantiles": pd.DataFrame(levels),
        "rows": pd.DataFrame(rows),
        "ulps": pd.DataFrame(ulps),
    }


def format_table(
    distributions: Sequence[str], formats: Sequence[str], *, b: int, h_q: int, seq_len: int, seed: int = 0
) -> pd.DataFrame:
    """Cache formats side by side: exact attention on decoded values against the oracle; queries stay bf16.

    Columns: format, bytes_per_token, distribution, relative_error, gain_minus_1, share_saturated, share_flushed.
    """
    rows = []
    for name in distributions:
        inputs = make_inputs(
            Case(f"study-{name}", "correctness", (seq_len,) * b, h_q=h_q, distribution=name, seed=seed)
        )
        oracle, _ = attention(inputs.q, inputs.kv, inputs.seq_lens, sm_scale=inputs.sm_scale)
        for fmt in formats:
            encoded = encode(inputs.kv, fmt)
            out, _ = attention(inputs.q, decode(encoded), inputs.seq_lens, sm_scale=inputs.sm_scale)
            rows.append(
                {
                    "format": fmt,
                    "bytes_per_token": FORMATS[fmt].bytes_per_token,
                    "distribution": name,
                    "relative_error": metrics.relative_error(out, oracle),
                    "gain_minus_1": metrics.gain_minus_1(out, oracle),
                    "share_saturated": encoded.counters.share("saturated"),
                    "share_flushed": encoded.counters.share("flushed"),
                }
            )
    return pd.DataFrame(rows)


def rounding_table(
    distributions: Sequence[str], roundings: dict[str, Rounding], *, b: int, h_q: int, seq_len: int, seed: int = 0
) -> pd.DataFrame:
    """Stage error of named sets of rounding points on the same e4m3 inputs, against the format result (float64).

    Columns: rounding, distribution, relative_error, gain_minus_1.
    """
    rows = []
    for name in distributions:
        inputs = make_inputs(
            Case(f"study-{name}", "correctness", (seq_len,) * b, h_q=h_q, distribution=name, seed=seed)
        )
        exact, _ = _stage(inputs, Rounding())
        for label, rounding in roundings.items():
            out, _ = _stage(inputs, rounding)
            rows.append({"rounding": label, "distribution": name, **_against(out, exact)})
    return pd.DataFrame(rows)


def length_split_table(
    lengths: Sequence[int],
    distributions: Sequence[str],
    *,
    h_q: int,
    q_std: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
) -> pd.DataFrame:
    """Error split and gain of the kernel against context length, one row of the batch a length.

    Columns: distribution, tokens, part, relative_error, gain, max_abs, nonfinite; and under part "kernel" the kernel
    against the format result (relative_error, gain).
    """
    rows: list[dict[str, Any]] = []
    for name in distributions:
        for tokens in lengths:
            case = Case(
                f"study-{name}-{tokens}", "correctness", (tokens,), h_q=h_q, distribution=name, q_std=q_std, seed=seed,
                num_kv_splits=None,
            )  # fmt: skip
            result = run_case(case, mla_decode, device)
            assert result.kernel is not None
            rows += result.split.rows(distribution=name, tokens=tokens)
            against = _against(result.kernel.to(torch.float64).cpu(), result.format.cpu())
            rows.append(
                {
                    "distribution": name,
                    "tokens": tokens,
                    "part": "kernel",
                    "relative_error": against["relative_error"],
                    "gain": against["gain_minus_1"],
                }
            )
    return pd.DataFrame(rows)


def accumulator_table(
    lengths: Sequence[int],
    accumulators: dict[str, Accumulator | None],
    *,
    distribution: str = "shifted_mean",
    q_std: float = 1.0,
    h_q: int = 4,
    seed: int = 0,
) -> pd.DataFrame:
    """What a tensor core's accumulator does at length: stage with each accumulator in P·V against the format result.

    Columns: series, source ("model"), tokens, q_std, relative_error, gain_minus_1. None stands for fp32 and wider.
    """
    rows = []
    for tokens in lengths:
        case = Case(
            f"study-{tokens}", "correctness", (tokens,), h_q=h_q, distribution=distribution, q_std=q_std, seed=seed
        )
        inputs = make_inputs(case)
        exact, _ = _stage(inputs, Rounding())
        for series, accumulator in accumulators.items():
            out, _ = _stage(inputs, replace(KERNEL, pv_accumulator=accumulator))
            rows.append({"series": series, "source": "model", "tokens": tokens, "q_std": q_std, **_against(out, exact)})
    return pd.DataFrame(rows)


def accumulator_loop_table(fraction_bits: int = 13, *, longest: int = 131072, seed: int = 0) -> pd.DataFrame:
    """The recorded loop of one fp8 instruction beside the model: V = 1 ± 0.5, P in 0..1, sums against exact sums.

    Columns: k32_steps, tokens, promote_every_steps (0: in place), recorded and model (value / exact − 1).
    """
    _, table = recorded("h200", "accumulator")
    table = table[table["tokens"] <= longest]
    generator = torch.Generator().manual_seed(seed)
    p = round_to(torch.rand(8, longest, generator=generator, dtype=torch.float64), "e4m3")
    v = round_to(torch.rand(longest, 16, generator=generator, dtype=torch.float64) + 0.5, "e4m3")
    rows = []
    for row in table.to_dict("records"):
        tokens, steps = int(row["tokens"]), row["promote_every_steps"]
        in_place = steps != steps  # NaN: null in the file
        accumulator = Accumulator(fraction_bits, promote_every=None if in_place else 32 * int(steps))
        exact = p[:, :tokens] @ v[:tokens]
        value = tensor_core_matmul(p[:, :tokens], v[:tokens], accumulator)
        rows.append(
            {
                "k32_steps": int(row["k32_steps"]),
                "tokens": tokens,
                "promote_every_steps": 0 if in_place else int(steps),
                "recorded": row["value_minus_1"],
                "model": float((value / exact - 1).mean()),
            }
        )
    return pd.DataFrame(rows)


def batch_table(
    batches: Sequence[int],
    *,
    h_q: int,
    seq_len: int,
    num_kv_splits: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> pd.DataFrame:
    """One row alone, then among b − 1 others of other lengths: does its answer change?

    Columns: b, splits (of row 0), same_bits (row 0 equals its answer at the smallest batch, bit for bit),
    relative_error (row 0 against the oracle).
    """
    lens = [seq_len, *(1 + (seq_len * (7 * i + 3) // 11) % (2 * seq_len) for i in range(max(batches) - 1))]
    widest = make_inputs(Case("study-batch", "correctness", tuple(lens), h_q=h_q, seed=seed))
    oracle, _ = attention(widest.q[:1], widest.kv[:1, :seq_len], [seq_len], sm_scale=widest.sm_scale)
    rows, first = [], None
    for b in sorted(batches):
        inputs = inputs_from(
            widest.q[:b].to(device), widest.kv[:b, : max(lens[:b])].to(device), lens[:b],
            q_scale=widest.q_scale, kv_scale=widest.kv_scale, num_kv_splits=num_kv_splits, seed=seed + b,
        )  # fmt: skip
        out, lse = mla_decode(**inputs.args)
        answer = (out[0].clone(), lse[0].clone())
        first = first or answer
        rows.append(
            {
                "b": b,
                "splits": len(split_plan([seq_len], num_kv_splits)[0]) - 1,
                "same_bits": all(
                    torch.equal(a.view(torch.uint8), c.view(torch.uint8)) for a, c in zip(answer, first, strict=True)
                ),
                "relative_error": metrics.relative_error(out[0].cpu(), oracle[0, 0]),
            }
        )
    return pd.DataFrame(rows)


def budget(distribution: str, seq_len: int) -> float:
    """Bound on ‖kernel − stage‖ / ‖stage‖ of a whole e4m3 output: `Case.budget` of these inputs."""
    return Case("study", "correctness", (seq_len,), distribution=distribution).budget


def data_path(name: str) -> str:
    """A checkpoint or file that a notebook names: a path in the checkout where there is one, else `name` as it is."""
    inside = Path(__file__).resolve().parents[1] / name
    return str(inside) if inside.exists() else name


def read_texts(model: Model, path: str, *, count: int, tokens: int) -> list[torch.Tensor]:
    """Token ids of the first `count` documents of a JSON-lines file with a `text` each, cut to `tokens`."""
    lines = Path(data_path(path)).read_text(encoding="utf-8").splitlines()
    if len(lines) < count:
        raise ValueError(f"prompts: expected at most the {len(lines)} documents of {path}, got {count}")
    return [model.tokens(json.loads(line)["text"])[:tokens] for line in lines[:count]]


def layer_table(forced: dict[str, list[dict[str, Any]]], compared: dict[str, Comparison]) -> pd.DataFrame:
    """Errors by layer for `plots.layer_errors`: columns layer, mode, format, relative_error.

    "attention alone": the layer's attention output after its projection, on the same inputs as bf16 (teacher-forced).
    "hidden state": what arrives after the layer when all layers run in the format (propagated).
    """
    rows = [
        {"layer": row["layer"], "mode": "attention alone", "format": name, "relative_error": row["hidden_error"]}
        for name, table in forced.items()
        for row in table
    ]
    rows += [
        {"layer": row["layer"], "mode": "hidden state", "format": name, "relative_error": row["hidden_error"]}
        for name, comparison in compared.items()
        for row in comparison.layers
    ]
    return pd.DataFrame(rows)


def kl_table(compared: dict[str, Comparison]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(summary, by position): what each format does to the next-token distribution, against bf16."""
    summary = pd.DataFrame([{"format": name, **comparison.kl} for name, comparison in compared.items()])
    by_position = pd.DataFrame(
        [
            {"format": name, "position": row["position"], "kl": row["kl_mean"], "top1_agreement": row["top1_agreement"]}
            for name, comparison in compared.items()
            for row in comparison.by_position
        ]
    )
    return summary, by_position


def match_table(answers: dict[str, list[dict[str, Any]]]) -> pd.DataFrame:
    """Exact match of answered problems: columns format, n, strict_match, flexible_extract, each with its stderr."""
    rows = []
    for name, answered in answers.items():
        row: dict[str, Any] = {"format": name, "n": len(answered)}
        for kind in ("strict_match", "flexible_extract"):
            share = sum(bool(answer[kind]) for answer in answered) / max(len(answered), 1)
            row |= {kind: share, f"{kind}_stderr": (share * (1 - share) / max(len(answered) - 1, 1)) ** 0.5}
        rows.append(row)
    return pd.DataFrame(rows)


def sign_test(reference: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """Exact one-sided sign test on strict_match of the same problems: is `ours` worse than `reference`?

    lost and won: problems that only `reference`, or only `ours`, solves. p_value: chance of at least that many lost
    among them if both were equally good. least_loss: the smallest loss (share of problems, all in one direction) that
    the test would call significant at 5 %.
    """
    pairs = [(bool(a["strict_match"]), bool(b["strict_match"])) for a, b in zip(reference, ours, strict=True)]
    lost, won = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    p_value = sum(math.comb(lost + won, k) for k in range(lost, lost + won + 1)) / 2 ** (lost + won)
    least = 5 / max(len(pairs), 1)  # 2^-5 < 5 %
    words = f"lost {lost}, won {won} of {len(pairs)}, p = {p_value:.2g}; a loss of {100 * least:.2g} points would show"
    return {"lost": lost, "won": won, "p_value": p_value, "least_loss": least, "words": words}


def recorded(gpu: str, name: str) -> tuple[dict[str, Any], pd.DataFrame]:
    """(provenance, rows) of `data/measurements/<gpu>/<name>.json`; a missing file raises FileNotFoundError."""
    folder = Path(__file__).resolve().parents[1] / "data" / "measurements"
    path = folder / gpu / f"{name}.json"
    if not path.is_file():
        present = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.json"))
        raise FileNotFoundError(
            f"recorded measurements: {gpu}/{name}.json is not there; present: {', '.join(present) or 'none'}"
        )
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["provenance"], pd.DataFrame(content["rows"])


def describe(result: Results) -> dict[str, float]:
    """Relative error of the parts and the total, and the residual of their sum: what notebook 02 records."""
    return {**result.split.relative(), "residual": result.split.residual}


def _stage(inputs: Any, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    return attention(
        inputs.q_stored.to(torch.float32),
        inputs.kv_stored.to(torch.float32),
        inputs.seq_lens,
        sm_scale=inputs.sm_scale,
        q_scale=inputs.q_scale,
        kv_scale=inputs.kv_scale,
        rounding=rounding,
    )


def _against(out: torch.Tensor, ref: torch.Tensor) -> dict[str, float]:
    return {
        "relative_error": metrics.relative_error(out, ref.reshape(out.shape)),
        "gain_minus_1": metrics.gain_minus_1(out, ref.reshape(out.shape)),
    }
