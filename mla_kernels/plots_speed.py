# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Figures of speed: one function per figure, a table of `mla_kernels.speed` in, a matplotlib Figure out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator

from mla_kernels.speed import microseconds

__all__ = ["ratios", "roofline", "split_map", "split_tuning"]

_PALETTE = sns.color_palette("colorblind", 10).as_hex()
_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*", "<", ">")
_DASHES = ("-", "--", ":", "-.")
# Names of limits in words; those that are no products of matrices are drawn otherwise.
_PEAKS = {
    "fp8_gemm_tflop_s": "e4m3 matrix product",
    "bf16_gemm_tflop_s": "bf16 matrix product",
    "fp32_gemm_tflop_s": "fp32 matrix product",
}


def _shape_names(table: pd.DataFrame) -> list[str]:
    return [f"b = {row.b}, h_q = {row.h_q}, s = {row.s:,}" for row in _rows(table)]


def _rows(table: pd.DataFrame) -> list[Any]:
    return list(table.itertuples())


def roofline(table: pd.DataFrame, ceilings: Mapping[str, float], *, title: str) -> Figure:
    """Rate against arithmetic intensity, under the limits measured in the same run.

    Columns: contestant, flop_per_byte, tflop_s, us_median. `ceilings`: read_tb_s and products of matrices by name. A
    larger marker is a longer run.
    """
    figure, axis = plt.subplots(figsize=(8.6, 4.8))
    low, high = float(table["flop_per_byte"].min()) / 2, float(table["flop_per_byte"].max()) * 2.5
    peaks = {name: ceilings[name] for name in _PEAKS if name in ceilings}
    top = max(peaks.values(), default=float(table["tflop_s"].max()))
    x = np.geomspace(low, high, 200)
    slope = x * ceilings.get("read_tb_s", np.inf)
    if (slope <= top).any():  # else all points are right of the ridge
        axis.plot(
            x[slope <= top],
            slope[slope <= top],
            color="#333333",
            label=f"read memory, {ceilings['read_tb_s']:.3g} TB/s",
        )
    for i, (limit, peak) in enumerate(peaks.items()):
        start = max(low, peak / ceilings["read_tb_s"]) if "read_tb_s" in ceilings else low
        axis.plot(
            [start, high], [peak, peak], color="#777777", linestyle=_DASHES[i % 4],
            label=f"{_PEAKS[limit]}, {peak:,.4g} TFLOP/s",
        )  # fmt: skip
    size = np.log10(table["us_median"])
    span = max(float(size.max() - size.min()), 1e-9)
    for i, (name, rows) in enumerate(table.groupby("contestant", sort=False)):
        area = 26 + 90 * (np.log10(rows["us_median"]) - float(size.min())) / span
        axis.scatter(
            rows["flop_per_byte"], rows["tflop_s"], s=area, marker=_MARKERS[i % 10], color=_PALETTE[i % 10], alpha=0.8,
            edgecolor="white", linewidth=0.5, zorder=3, label=str(name),
        )  # fmt: skip
    axis.set(xscale="log", yscale="log", xlim=(low, high), title=title)
    axis.set_xlabel("operations per byte of cache, queries and output")
    axis.set_ylabel("TFLOP/s")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9)
    return figure


def ratios(table: pd.DataFrame, *, title: str) -> Figure:
    """How many times as fast this kernel is as each peer, a line a shape. Columns: b, h_q, s, peer, times."""
    shapes = table.drop_duplicates(["b", "h_q", "s"])
    names = _shape_names(shapes)
    place = {name: i for i, name in enumerate(names)}
    figure, axis = plt.subplots(figsize=(8.6, 1.7 + 0.34 * len(names)))
    for i, (peer, rows) in enumerate(table.groupby("peer", sort=False)):
        axis.scatter(
            rows["times"], [place[name] for name in _shape_names(rows)], s=52, marker=_MARKERS[i % 10],
            color=_PALETTE[i % 10], label=str(peer), zorder=3,
        )  # fmt: skip
    axis.axvline(1.0, color="#333333", linewidth=1.4)
    axis.set(xscale="log", ylim=(len(names) - 0.5, -0.5), title=title)
    low, high = float(table["times"].min()), float(table["times"].max())
    axis.set_xlim(min(0.8, low / 1.15), max(1.25, high * 1.15))
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100) if min(0.8, low / 1.15) <= t <= high * 1.15]
    axis.set_xticks(ticks, [f"{t:g}×" for t in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.set_xlabel("time of the peer / time of this kernel (right of the line: this kernel is faster)")
    axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9)
    return figure


def split_map(table: pd.DataFrame, *, title: str) -> Figure:
    """Which tiles each split of a row takes. Columns: row, seq_len, split, first_tile, last_tile."""
    rows = table.drop_duplicates("row")
    order = list(rows["row"])
    figure, axis = plt.subplots(figsize=(8.6, 1.6 + 0.42 * len(order)))
    for part in _rows(table):
        y = order.index(part.row)
        axis.barh(
            y, part.last_tile - part.first_tile, left=part.first_tile, height=0.72, linewidth=0.8, edgecolor="white",
            color=(_PALETTE[0], _PALETTE[2])[part.split % 2],
        )  # fmt: skip
    count = table.groupby("row")["split"].max() + 1
    longest = float(table["last_tile"].max())
    for y, row in enumerate(order):
        end = float(table[table["row"] == row]["last_tile"].max())
        axis.text(
            end + longest * 0.01, y, f"{count[row]} splits" if count[row] > 1 else "1 split", va="center", fontsize=9
        )
    axis.set(xlim=(0, longest * 1.14), ylim=(len(order) - 0.5, -0.5), title=title)
    axis.set_yticks(range(len(order)), [f"{n:,} tokens" for n in rows["seq_len"]])
    axis.set_xlabel("tile of 64 tokens")
    axis.grid(axis="y", visible=False)
    return figure


def split_tuning(table: pd.DataFrame, *, title: str) -> Figure:
    """Time of each plan over the best of its shape; the automatic plan is framed, a plan without a time is hatched.

    Columns: b, h_q, s, plan, us, times_best, best.
    """
    shapes = table.drop_duplicates(["b", "h_q", "s"])
    names, plans = _shape_names(shapes), list(dict.fromkeys(table["plan"]))
    grid = np.full((len(names), len(plans)), np.nan)
    times = grid.copy()
    for name, row in zip(_shape_names(table), _rows(table), strict=True):
        at = names.index(name), plans.index(row.plan)
        grid[at], times[at] = row.times_best, row.us
    words = np.array([["" if np.isnan(t) else f"{v:.2f}\n{microseconds(t)} µs" for v, t in zip(*pair, strict=True)]
                      for pair in zip(grid, times, strict=True)])  # fmt: skip
    figure, axis = plt.subplots(figsize=(2.6 + 1.15 * len(plans), 1.5 + 0.55 * len(names)))
    sns.heatmap(
        np.log2(grid), annot=words, fmt="", cmap="flare", vmin=-0.1, vmax=2.0, cbar=False, linewidths=1.2,
        linecolor="white", xticklabels=plans, yticklabels=names, ax=axis, annot_kws={"fontsize": 9},
    )  # fmt: skip
    for y, x in zip(*np.where(np.isnan(grid)), strict=True):
        axis.add_patch(Rectangle((x, y), 1, 1, fill=False, hatch="///", edgecolor="#999999", linewidth=0))
    if "auto" in plans:
        left = plans.index("auto")
        axis.add_patch(Rectangle((left, 0), 1, len(names), fill=False, edgecolor="#333333", linewidth=2, clip_on=False))
    axis.tick_params(axis="y", rotation=0, labelsize=9)
    axis.set_xlabel("num_kv_splits")
    axis.set_title(title)
    return figure
