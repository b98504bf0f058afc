# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Figures of serving: one function per figure, a table of `mla_kernels.serving.tables` in, a Figure out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from mla_kernels.serving.tables import rows_of

__all__ = ["exact_match", "profile", "ratios", "throughput"]

_PALETTE = sns.color_palette("colorblind", 10).as_hex()
_DTYPES: Mapping[str, tuple[str, str]] = {"auto": (_PALETTE[7], ""), "fp8": (_PALETTE[0], "///")}
_MARKERS = ("o", "s", "D", "^", "v")


def _cards(gpus: Any) -> str:
    return "1 GPU" if gpus == 1 else f"{int(gpus)} GPUs"


def _run_name(row: Any, several: bool) -> str:
    """In words; with its commit and flags where the rows beside it are of several runs."""
    cut = "" if row.layers == row.of_layers else f", {int(row.layers)} of {int(row.of_layers)} layers"
    how = f", commit {row.commit}" * several + (f"\n{row.flags}" if row.flags else "")
    return f"{row.where}\n{row.backend}{cut}{how}"


def _with_run(rows: pd.DataFrame, names: list[str], same: list[str]) -> list[str]:
    """`names`, with commit and flags after those that stand twice with the same values of the columns `same`."""
    twice = rows.assign(name=names).duplicated(["name", *same], keep=False)
    return [
        f"{name}\ncommit {row.commit}{row.flags and ', ' + row.flags}" if more else name
        for name, row, more in zip(names, rows_of(rows), twice, strict=True)
    ]


def throughput(table: pd.DataFrame, *, title: str) -> Figure:
    """Requests a second, two bars (auto, fp8) a backend and machine; a panel a model and number of prompts.

    Panels of one model have one scale. Columns: where, model, layers, of_layers, gpus, prompts, backend,
    kv_cache_dtype, commit, flags, requests_per_s.
    """
    rows = table[table["requests_per_s"].notna()]
    several = (
        rows.groupby(["where", "model", "gpus", "prompts"])[["commit", "flags"]].transform("nunique").max(axis=1) > 1
    )
    rows = rows.assign(name=[_run_name(row, more) for row, more in zip(rows_of(rows), several, strict=True)])
    groups = [(name, group) for name, group in rows.groupby(["model", "gpus", "prompts"], sort=False)]
    sizes = [group["name"].nunique() for _, group in groups]
    figure, axes = plt.subplots(
        len(groups), 1, figsize=(8.6, 1.2 + 0.75 * sum(sizes) + 0.5 * len(groups)), squeeze=False,
        gridspec_kw={"height_ratios": sizes},
    )  # fmt: skip
    for axis, ((model, gpus, prompts), group) in zip(axes[:, 0], groups, strict=True):
        names = list(dict.fromkeys(group["name"]))
        top = float(rows["requests_per_s"][(rows["model"] == model) & (rows["gpus"] == gpus)].max())
        for row in rows_of(group):
            colour, hatch = _DTYPES[row.kv_cache_dtype]
            y = names.index(row.name) + (-0.19 if row.kv_cache_dtype == "auto" else 0.19)
            axis.barh(y, row.requests_per_s, height=0.36, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
            axis.text(row.requests_per_s + top * 0.01, y, f"{row.requests_per_s:.2f}", va="center", fontsize=9)
        axis.set_yticks(range(len(names)), names, fontsize=8.5)
        axis.set(xlim=(0, top * 1.12), ylim=(len(names) - 0.5, -0.5))
        axis.grid(axis="y", visible=False)
        axis.set_title(f"{model}, {_cards(gpus)}, {prompts} prompts", fontsize=10)
    axes[-1, 0].set_xlabel("requests per second")
    figure.suptitle(title)
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=c, hatch=h, edgecolor="white") for c, h in _DTYPES.values()]
    figure.legend(handles, [f"kv_cache_dtype {name}" for name in _DTYPES], loc="outside lower center", ncols=2)
    return figure


def ratios(table: pd.DataFrame, *, title: str) -> Figure:
    """How many times as many requests a second: a line a comparison, a marker a machine. Columns: of `ratio_table`."""
    names = [
        f"{row.what}\n{row.model}, {int(row.layers)} layers, {_cards(row.gpus)}, {int(row.prompts)} prompts"
        for row in rows_of(table)
    ]
    names = _with_run(table, names, ["where"])
    order = list(dict.fromkeys(names))
    figure, axis = plt.subplots(figsize=(8.6, 1.5 + 0.5 * len(order)))
    for i, (where, rows) in enumerate(table.assign(name=names).groupby("where", sort=False)):
        y = [order.index(name) for name in rows["name"]]
        axis.scatter(rows["times"], y, s=58, marker=_MARKERS[i % 5], color=_PALETTE[i % 10], label=str(where), zorder=3)
        for x, at in zip(rows["times"], y, strict=True):
            axis.annotate(f"{x:.3f}", (x, at), xytext=(7, -3), textcoords="offset points", fontsize=8.5)
    axis.axvline(1.0, color="#333333", linewidth=1.4)
    low, high = float(table["times"].min()), float(table["times"].max())
    axis.set(xlim=(min(0.97, low - 0.03), max(1.05, high + 0.08)), ylim=(len(order) - 0.5, -0.5), title=title)
    axis.set_yticks(range(len(order)), order, fontsize=8.5)
    axis.set_xlabel("times as many requests per second")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure


def exact_match(table: pd.DataFrame, *, title: str) -> Figure:
    """Exact match with one standard error each side; a panel a filter, a line a run. Columns: of `eval_table`."""
    rows = table[table["exact_match"].notna()]
    filters = list(dict.fromkeys(rows["filter"]))
    lines = _with_run(rows, [f"{r.where}\n{r.model}, {r.backend}" for r in rows_of(rows)], ["filter", "kv_cache_dtype"])
    rows, names = rows.assign(name=lines), list(dict.fromkeys(lines))
    figure, axes = plt.subplots(
        1, len(filters), figsize=(8.6, 1.6 + 0.7 * len(names)), sharey=True, squeeze=False
    )  # fmt: skip
    for axis, name in zip(axes[0], filters, strict=True):
        for row in rows_of(rows[rows["filter"] == name]):
            y = names.index(row.name) + (-0.16 if row.kv_cache_dtype == "auto" else 0.16)
            marker, colour = ("o", "#444444") if row.kv_cache_dtype == "auto" else ("s", _PALETTE[0])
            axis.errorbar(row.exact_match, y, xerr=row.stderr, fmt=marker, color=colour, capsize=3, markersize=6)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("exact match, ± standard error")
        axis.set_ylim(len(names) - 0.5, -0.5)
    axes[0, 0].set_yticks(range(len(names)), names, fontsize=8.5)
    marks = [plt.Line2D([], [], marker=m, color=c, linestyle="") for m, c in (("o", "#444444"), ("s", _PALETTE[0]))]
    figure.suptitle(title)
    figure.legend(marks, ["kv_cache_dtype auto", "kv_cache_dtype fp8"], loc="outside lower center", ncols=2)
    return figure


def profile(table: pd.DataFrame, *, title: str) -> Figure:
    """GPU time by class of kernel, a stacked bar a run; fields over 4 % carry their share. Columns: of
    `profile_table`."""
    rows = table[table["us"].notna() & (table["us"] > 0)]
    names = list(dict.fromkeys(rows["run"]))
    classes = list(dict.fromkeys(rows["class"]))
    figure, axis = plt.subplots(figsize=(8.6, 1.9 + 0.55 * len(names)))
    left = np.zeros(len(names))
    hatches = ("", "///", "...", "\\\\\\", "xxx", "---", "++", "oo", "")
    for i, kind in enumerate(classes):
        for n, row in enumerate(rows_of(rows[rows["class"] == kind])):
            y = names.index(row.run)
            seconds = row.us / 1e6
            axis.barh(y, seconds, left=left[y], height=0.66, color=_PALETTE[i % 10], hatch=hatches[i % 9],
                      edgecolor="white", linewidth=0.6, label=kind if n == 0 else None)  # fmt: skip
            if row.share > 0.04:
                axis.text(left[y] + seconds / 2, y, f"{100 * row.share:.0f} %", ha="center", va="center", fontsize=8.5,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.85})  # fmt: skip
            left[y] += seconds
    axis.set(ylim=(len(names) - 0.5, -0.5), title=title)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.set_xlabel("seconds of GPU time")
    axis.grid(axis="y", visible=False)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8.5)
    return figure
