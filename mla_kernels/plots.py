# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""One function per figure: a table (DataFrame) in, a matplotlib Figure out.

Errors are drawn on logarithmic axes; a series is told by its line or marker as well as by its colour (seaborn's
colour-blind palette). The columns that a function reads stand in its docstring; the notebooks save the same table
beside the picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

__all__ = [
    "case_budget",
    "distance_histogram",
    "error_at_length",
    "error_histogram",
    "error_quantiles",
    "format_comparison",
    "gain_at_length",
    "kl_by_position",
    "layer_errors",
    "layer_heatmap",
    "log_histogram",
    "row_errors",
    "split_bars",
    "use_style",
]

PART_ORDER = ("format", "stage", "implementation", "total")
_PALETTE = sns.color_palette("colorblind", 10).as_hex()
PART_COLOURS = dict(zip(PART_ORDER, (_PALETTE[0], _PALETTE[1], _PALETTE[2], "#333333"), strict=True))
_PART_DASHES = {"format": (), "stage": (4, 1.5), "implementation": (1, 1), "total": ()}
_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*", "<", ">")


def use_style() -> None:
    """Set the look of every figure of this workbook (fonts, grid, sizes)."""
    sns.set_theme(
        context="notebook",
        style="whitegrid",
        palette="colorblind",
        rc={
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.titlesize": 12,
            "axes.labelsize": 11,
            "axes.edgecolor": "#888888",
            "grid.color": "#e4e4e4",
            "legend.frameon": False,
            "legend.fontsize": 10,
            "figure.dpi": 110,
            "figure.constrained_layout.use": True,
            "savefig.facecolor": "white",
        },
    )


def log_histogram(
    values: Mapping[str, Sequence[float]], *, name: str = "part", bins_per_decade: int = 4
) -> pd.DataFrame:
    """Histogram of absolute values on a logarithmic scale, one series a key.

    Returns columns `name`, `log10_error` (bin centre), `share` (of all values of the series) and a row with
    `log10_error` = −inf for exact zeros. Non-finite values are counted under +inf.
    """
    arrays = {key: np.abs(np.asarray(value, dtype=np.float64).ravel()) for key, value in values.items()}
    positive = [a[(a > 0) & np.isfinite(a)] for a in arrays.values()]
    logs = np.concatenate([np.log10(p) for p in positive]) if positive else np.zeros(0)
    low, high = (np.floor(logs.min()), np.ceil(logs.max())) if logs.size else (-1.0, 0.0)
    edges = np.linspace(low, max(high, low + 1), int(max(high - low, 1) * bins_per_decade) + 1)
    frames = []
    for key, a in arrays.items():
        inside = a[(a > 0) & np.isfinite(a)]
        counts, _ = np.histogram(np.log10(inside), bins=edges)
        centres = [-np.inf, *(edges[:-1] + edges[1:]) / 2, np.inf]
        all_counts = [int((a == 0).sum()), *counts, int((~np.isfinite(a)).sum())]
        frames.append(pd.DataFrame({name: key, "log10_error": centres, "share": np.array(all_counts) / max(a.size, 1)}))
    return pd.concat(frames, ignore_index=True)


def error_histogram(table: pd.DataFrame) -> Figure:
    """Element errors by part, a panel per input distribution. Columns: distribution, part, log10_error, share."""
    panels = list(dict.fromkeys(table["distribution"]))
    figure, axes = _grid(len(panels), height=3.0)
    finite = table[np.isfinite(table["log10_error"])]
    for axis, panel in zip(axes, panels, strict=False):
        rows = finite[finite["distribution"] == panel]
        for part in [p for p in PART_ORDER if p in set(rows["part"])]:
            line = rows[rows["part"] == part]
            axis.plot(
                line["log10_error"], 100 * line["share"].where(line["share"] > 0), drawstyle="steps-mid",
                color=PART_COLOURS[part], dashes=_PART_DASHES[part], linewidth=2.4 if part == "total" else 1.8,
                marker="." if part == "implementation" else None, label=part,
            )  # fmt: skip
        exact = table[(table["distribution"] == panel) & (table["log10_error"] == -np.inf) & (table["share"] > 0.01)]
        if not exact.empty:
            words = "\n".join(f"{row.part}: {100 * row.share:.4g} % exactly 0" for row in exact.itertuples())
            axis.set_title(words, loc="right", fontsize=8.5, fontweight="normal", color="#333333")
        axis.set_title(panel.replace("_", " "))
        axis.set_xlabel("absolute error of an output element")
        axis.set_ylabel("share of elements, %")
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"$10^{{{x:g}}}$"))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    _legend_below(figure, axes[0], "part of the error")
    return figure


def error_quantiles(table: pd.DataFrame) -> Figure:
    """Absolute error against quantile, a panel per distribution. Columns: distribution, part, quantile, abs_error."""
    panels = list(dict.fromkeys(table["distribution"]))
    figure, axes = _grid(len(panels), height=3.0)
    for axis, panel in zip(axes, panels, strict=False):
        rows = table[table["distribution"] == panel]
        for part in [p for p in PART_ORDER if p in set(rows["part"])]:
            line = rows[(rows["part"] == part) & (rows["abs_error"] > 0) & (rows["quantile"] < 1)]
            axis.plot(
                1 - line["quantile"], line["abs_error"], color=PART_COLOURS[part], dashes=_PART_DASHES[part],
                linewidth=2.4 if part == "total" else 1.9, label=part, marker=".",
            )  # fmt: skip
        axis.set(xscale="log", yscale="log", title=panel.replace("_", " "))
        axis.set_xlabel("share of elements with a larger error")
        axis.set_ylabel("absolute error")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g} %"))
    axes[0].invert_xaxis()  # shared by all panels
    _legend_below(figure, axes[0], "part of the error")
    return figure


def split_bars(table: pd.DataFrame) -> Figure:
    """Where the error comes from, per distribution. Columns: distribution, part, relative_error."""
    order = list(dict.fromkeys(table["distribution"]))
    figure, axis = plt.subplots(figsize=(8.6, 1.4 + 0.85 * len(order)))
    present = [p for p in PART_ORDER if p in set(table["part"])]
    height = 0.8 / len(present)
    floor = table.loc[table["relative_error"] > 0, "relative_error"].min() / 3
    for i, part in enumerate(present):
        rows = table[table["part"] == part].set_index("distribution")["relative_error"].reindex(order)
        y = np.arange(len(order)) + (i - (len(present) - 1) / 2) * height
        axis.barh(y, rows.clip(lower=floor), left=0, height=height * 0.92, color=PART_COLOURS[part], label=part)
        for yi, value in zip(y, rows, strict=True):
            if np.isfinite(value):
                axis.text(max(value, floor) * 1.08, yi, _percent(value), va="center", fontsize=8.5, color="#333333")
    axis.set(xscale="log", xlim=(floor, float(table["relative_error"].max()) * 4))
    axis.set_yticks(range(len(order)), [d.replace("_", " ") for d in order])
    axis.invert_yaxis()
    axis.set_xlabel("relative error of the output, ‖part‖ / ‖oracle‖")
    _percent_ticks(axis.xaxis)
    axis.grid(axis="y", visible=False)
    axis.set_title("Where the error of the output comes from")
    _legend_below(figure, axis, "part")
    return figure


def format_comparison(table: pd.DataFrame) -> Figure:
    """Cache formats side by side. Columns: format, bytes_per_token, distribution, relative_error."""
    order = list(dict.fromkeys(table["format"]))
    bytes_of = table.groupby("format", sort=False)["bytes_per_token"].first()
    floor = table.loc[table["relative_error"] > 0, "relative_error"].min() / 3
    figure, axis = plt.subplots(figsize=(8.6, 1.6 + 0.55 * len(order)))
    for i, (name, rows) in enumerate(table.groupby("distribution", sort=False)):
        y = rows["format"].map(order.index) + (i - 1.5) * 0.11
        exact = rows["relative_error"] == 0
        axis.scatter(
            rows["relative_error"].clip(lower=floor),
            y,
            s=58,
            marker=_MARKERS[i],
            color=_PALETTE[i],
            label=str(name).replace("_", " "),
            zorder=3,
        )
        for name_y in rows.loc[exact, "format"].map(order.index) if i == 0 else ():
            axis.text(floor * 1.15, name_y, "exact", va="center", fontsize=10)
    axis.set(xscale="log")
    axis.set_yticks(range(len(order)), [f"{name}\n{bytes_of[name]:g} B per token" for name in order])
    axis.set_ylim(len(order) - 0.5, -0.5)
    axis.set_xlabel("relative error of the attention output against the oracle")
    _percent_ticks(axis.xaxis)
    axis.set_title("What each cache format costs, before any kernel is involved")
    _legend_below(figure, axis)
    return figure


def row_errors(table: pd.DataFrame) -> Figure:
    """Relative error of every row, sorted, a line per distribution. Columns: distribution, row, relative_error."""
    figure, axis = plt.subplots(figsize=(8.6, 3.4))
    for i, (name, rows) in enumerate(table.groupby("distribution", sort=False)):
        values = np.sort(rows["relative_error"].to_numpy())[::-1]
        axis.plot(
            np.arange(1, len(values) + 1),
            values,
            color=_PALETTE[i],
            marker=_MARKERS[i],
            markevery=0.12,
            label=str(name).replace("_", " "),
        )
    axis.set(
        xscale="log", yscale="log", xlabel="row (batch entry × head), worst first", ylabel="relative error of the row"
    )
    _percent_ticks(axis.yaxis)
    axis.set_title("Worst rows: a whole-tensor number hides them")
    axis.legend()
    return figure


def distance_histogram(table: pd.DataFrame) -> Figure:
    """ULP distance between kernel and stage, in units of the output format. Columns: distribution, ulps, share."""
    figure, axis = plt.subplots(figsize=(8.6, 3.2))
    seen = table.groupby("ulps", sort=False)["share"].max()
    labels = [str(u) for u in seen.index if u != "nan" or seen[u] > 0]
    while len(labels) > 2 and seen[labels[-1]] == 0:
        labels.pop()  # bins that nobody reached
    table = table[table["ulps"].isin(labels)]
    names = list(dict.fromkeys(table["distribution"]))
    for i, name in enumerate(names):
        rows = table[table["distribution"] == name]
        x = np.array([labels.index(str(u)) for u in rows["ulps"]]) + (i - (len(names) - 1) / 2) * 0.8 / len(names)
        axis.bar(x, 100 * rows["share"], width=0.75 / len(names), color=_PALETTE[i], label=str(name).replace("_", " "))
    axis.set_xticks(range(len(labels)), labels)
    axis.set(
        yscale="symlog", xlabel="distance between kernel and stage reference, bf16 ULP", ylabel="share of elements, %"
    )
    axis.set_yscale("symlog", linthresh=0.01)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axis.set_title("The kernel returns what the stage reference predicts")
    axis.legend(ncols=2)
    return figure


def case_budget(table: pd.DataFrame) -> Figure:
    """Kernel against stage for each case. Columns: case, implementation_error, budget, format_error."""
    figure, axis = plt.subplots(figsize=(8.6, 1.6 + 0.24 * len(table)))
    y = np.arange(len(table))
    axis.scatter(
        table["implementation_error"].clip(lower=1e-8),
        y,
        color=PART_COLOURS["implementation"],
        marker="o",
        label="kernel − stage",
        zorder=3,
    )
    axis.scatter(table["budget"], y, color="#333333", marker="|", s=120, label="budget", zorder=3)
    fp8 = table["format_error"] > 1e-8
    axis.scatter(
        table.loc[fp8, "format_error"],
        y[fp8],
        color=PART_COLOURS["format"],
        marker="D",
        s=24,
        label="format − oracle",
        zorder=3,
    )
    axis.set(xscale="log", ylim=(len(table) - 0.4, -0.6), xlabel="relative error of the output")
    axis.set_yticks(y, table["case"], fontsize=8.5)
    axis.set_title("Case table: the implementation part stays under its budget")
    _percent_ticks(axis.xaxis)
    axis.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.55 / (1.6 + 0.24 * len(table))))
    return figure


def layer_heatmap(table: pd.DataFrame, *, title: str) -> Figure:
    """Layers × measures; each column is coloured on its own scale, cells carry the numbers.

    Index: layer. Columns: measures (numeric, dimensionless); NaN and inf are drawn as hatched cells with their name.
    """
    values = table.to_numpy(dtype=np.float64)
    finite = np.where(np.isfinite(values), values, np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        span = np.nanmax(finite, axis=0) - np.nanmin(finite, axis=0)
        shade = (finite - np.nanmin(finite, axis=0)) / np.where(span > 0, span, 1)
    figure, axis = plt.subplots(figsize=(1.6 + 1.15 * table.shape[1], 1.6 + 0.46 * table.shape[0]))
    labels = np.vectorize(_cell)(values)
    sns.heatmap(
        shade, annot=labels, fmt="", cmap="flare", vmin=-0.1, vmax=1.2, cbar=False, linewidths=1.2, linecolor="white",
        xticklabels=[str(c).replace("_", "\n") for c in table.columns], yticklabels=list(table.index), ax=axis,
        annot_kws={"fontsize": 9},
    )  # fmt: skip
    for row, column in zip(*np.where(~np.isfinite(values)), strict=True):
        axis.add_patch(plt.Rectangle((column, row), 1, 1, fill=False, hatch="///", edgecolor="#999999", linewidth=0))
        axis.text(column + 0.5, row + 0.5, _cell(values[row, column]), ha="center", va="center", fontsize=9)
    axis.tick_params(axis="y", rotation=0)
    axis.tick_params(axis="x", labelsize=9)
    axis.set_ylabel("layer")
    axis.set_title(title)
    return figure


def layer_errors(table: pd.DataFrame) -> Figure:
    """Error of the attention output by layer. Columns: layer, mode, format, relative_error."""
    figure, axis = plt.subplots(figsize=(8.6, 3.8))
    modes = list(dict.fromkeys(table["mode"]))
    formats = list(dict.fromkeys(table["format"]))
    for (name, mode), rows in table.groupby(["format", "mode"], sort=False):
        i, j = formats.index(name), modes.index(mode)
        axis.plot(
            rows["layer"], rows["relative_error"], color=_PALETTE[i], linestyle=("-", "--", ":")[j], marker=_MARKERS[i],
            label=f"{name}, {mode}",
        )  # fmt: skip
    axis.set(yscale="log", xlabel="layer", ylabel="relative error against bf16")
    axis.set_xticks(sorted(set(table["layer"])))
    _percent_ticks(axis.yaxis)
    axis.set_title("Error by layer: attention alone, and what arrives")
    axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9)
    return figure


def kl_by_position(table: pd.DataFrame, *, window: int = 32) -> Figure:
    """KL divergence of the next-token distribution. Columns: format, position, kl (nats)."""
    figure, axis = plt.subplots(figsize=(8.6, 3.6))
    for i, (name, rows) in enumerate(table.groupby("format", sort=False)):
        by_position = rows.groupby("position")["kl"].mean().clip(lower=1e-12)
        axis.plot(by_position.index, by_position, color=_PALETTE[i], linewidth=0.5, alpha=0.35)
        smooth = by_position.rolling(window, min_periods=max(1, window // 4), center=True).median()
        axis.plot(
            smooth.index, smooth, color=_PALETTE[i], label=str(name), marker=_MARKERS[i], markevery=0.15, linewidth=2
        )
    axis.set(yscale="log", xlabel="position in the context, tokens", ylabel="KL divergence from bf16, nats")
    axis.set_title(f"What the cache format does to the model: running median of {window} positions")
    axis.legend()
    return figure


def gain_at_length(table: pd.DataFrame, *, bar: float | None = None) -> Figure:
    """Output lost or gained against context length.

    Columns: series, source (model, kernel or recorded), tokens, gain_minus_1. `bar` shades |gain − 1| ≤ bar.
    """
    figure, axis = plt.subplots(figsize=(8.6, 4.4))
    styles = {"model": "-", "kernel": "-", "recorded": "none"}
    for i, ((name, source), rows) in enumerate(table.groupby(["series", "source"], sort=False)):
        axis.plot(
            rows["tokens"], 100 * rows["gain_minus_1"], linestyle=styles.get(str(source), "--"),
            marker=_MARKERS[i % len(_MARKERS)], color=_PALETTE[i % len(_PALETTE)], label=f"{name} ({source})",
            markersize=7, markerfacecolor="white" if source == "recorded" else None,
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("symlog", linthresh=0.1)
    if bar is not None:
        axis.axhspan(-100 * bar, 100 * bar, color="#009e73", alpha=0.10, label=f"|gain − 1| ≤ {100 * bar:g} %")
    axis.set(xlabel="context length, tokens", ylabel="gain − 1, %")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_title("A sum that grows in a narrow accumulator loses its small addends")
    axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9)
    return figure


def error_at_length(table: pd.DataFrame, *, x: str = "tokens", title: str = "Error against context length") -> Figure:
    """Relative error of each part against length or batch size. Columns: distribution, part, `x`, relative_error."""
    panels = list(dict.fromkeys(table["distribution"]))
    figure, axes = _grid(len(panels), height=3.0)
    for axis, panel in zip(axes, panels, strict=False):
        rows = table[table["distribution"] == panel]
        for i, part in enumerate([p for p in PART_ORDER if p in set(rows["part"])]):
            line = rows[(rows["part"] == part) & (rows["relative_error"] > 0)].sort_values(x)
            zeros = int(((rows["part"] == part) & (rows["relative_error"] == 0)).sum())
            if zeros:
                axis.set_title(f"{part}: 0 at {zeros} points", loc="right", fontsize=8.5, fontweight="normal")
            axis.plot(
                line[x],
                line["relative_error"],
                color=PART_COLOURS[part],
                marker=_MARKERS[i],
                dashes=_PART_DASHES[part],
                label=part,
            )
        axis.set_xscale("log", base=2)
        axis.set(
            yscale="log",
            title=panel.replace("_", " "),
            xlabel={"tokens": "context length, tokens", "b": "batch size b"}.get(x, x),
        )
        axis.set_ylabel("relative error")
        ticks = sorted(set(table[x]))
        axis.set_xticks(ticks, [f"{v:,.0f}" for v in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
        _percent_ticks(axis.yaxis)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    _legend_below(figure, axes[0], "part of the error")
    return figure


def _grid(count: int, *, height: float, columns: int = 2) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, `columns` wide, axes shared; unused places are removed."""
    columns = min(columns, max(count, 1))
    rows = -(-max(count, 1) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(4.4 * columns + 0.4, height * rows), sharex=True, sharey=True, squeeze=False
    )
    axes = list(grid.ravel())
    for axis in axes[count:]:
        axis.remove()
    for axis in axes[:count]:
        axis.tick_params(labelbottom=True, labelleft=True)
    return figure, axes[:count]


def _percent_ticks(axis: Any) -> None:
    """Percent on a logarithmic axis; within two decades the minor ticks at 2 and 5 get their numbers too."""
    axis.set_major_formatter(FuncFormatter(lambda v, _: _percent(v)))
    low, high = sorted(axis.get_view_interval())
    wide = low <= 0 or high / low > 100
    axis.set_minor_formatter(FuncFormatter(lambda v, _: "" if wide or f"{v:e}"[0] not in "25" else _percent(v)))


def _legend_below(figure: Figure, axis: Axes, title: str = "") -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, title=title or None, loc="outside lower center", ncols=len(labels))


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _cell(value: float) -> str:
    if not np.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"
