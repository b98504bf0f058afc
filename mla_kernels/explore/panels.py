# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The explorer's figures, made to be drawn in tens of milliseconds: fixed places, few ticks, no layout engine.

Each function draws a table of `compute.Study` into axes. `picture` makes a PNG of one panel, `sheet` one Figure of all,
for pages without widgets.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from html import escape
from typing import Any

import matplotlib as mpl
import matplotlib.colors
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, FigureBase
from matplotlib.text import Text

from mla_kernels.explore.compute import HEAT_STEPS
from mla_kernels.plots import PART_COLOURS, PART_ORDER

__all__ = ["PANELS", "layers_html", "picture", "sheet"]

LAYERS_TITLE = f"Layers, last {HEAT_STEPS} steps: a colour scale for each column"
DPI = 144  # one and a half pixels a CSS pixel
CSS_DPI = 96
SHEET = 0.74  # a page holds it three times: file, page and notebook
_TEXT = "#222222"
_STYLE: Any = {
    "font.family": "sans-serif", "font.size": 9, "axes.edgecolor": "#999999", "axes.linewidth": 0.8, "axes.grid": False,
    "axes.facecolor": "white", "figure.facecolor": "white", "text.color": _TEXT, "axes.labelcolor": _TEXT,
    "axes.labelsize": 9, "axes.titlesize": 10, "xtick.labelsize": 9, "ytick.labelsize": 9, "xtick.major.width": 0.8,
    "ytick.major.width": 0.8, "xtick.color": _TEXT, "ytick.color": _TEXT, "xtick.bottom": True, "ytick.left": True,
    "xtick.major.size": 3, "ytick.major.size": 3, "figure.constrained_layout.use": False,
}  # fmt: skip
_DASHES: dict[str, Any] = {"format": "-", "stage": (0, (4, 1.5)), "implementation": (0, (1, 1)), "total": "-"}
_SHORT = {"implementation": "kernel"}
_MAP = mpl.colors.LinearSegmentedColormap.from_list(
    "heat", ["#fff8e1", "#ffd27a", "#f29a5b"]
)  # black text on all of it


def _title(axis: Axes, text: str) -> None:
    axis.set_title(text, loc="left", fontsize=10, fontweight="bold", color=_TEXT)


def _percent(value: float) -> str:
    return "0" if value == 0 else f"{100 * value:.2g} %" if 1e-6 <= abs(value) < 10 else f"{value:.0e}"


def _power(exponent: float) -> str:
    """10⁻³, as text: TeX takes ten times as long to draw."""
    return "10" + f"{exponent:.0f}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def histogram(axes: list[Axes], table: pd.DataFrame) -> None:
    """Columns: part, log10_error, share (`plots.log_histogram`)."""
    (axis,) = axes
    finite = table[np.isfinite(table["log10_error"]) & (table["share"] > 0)]
    for part in PART_ORDER:
        line = finite[finite["part"] == part]
        if len(line):
            axis.plot(
                line["log10_error"], np.log10(line["share"]), drawstyle="steps-mid", color=PART_COLOURS[part],
                linestyle=_DASHES[part], linewidth=2.2 if part == "total" else 1.6, label=_SHORT.get(part, part),
                marker="." if len(line) < 3 else None,
            )  # fmt: skip
    exact = table[(table["log10_error"] == -np.inf) & (table["share"] > 0.01) & (table["part"] != "total")]
    zeros = zip(exact["part"].tolist(), exact["share"].tolist(), strict=True)
    words = ", ".join(f"{_SHORT.get(part, part)} {100 * share:.3g} %" for part, share in zeros)
    if words:
        axis.text(0.0, -0.30, f"exactly 0: {words}", transform=axis.transAxes, fontsize=8)
    low, high = (finite["log10_error"].min(), finite["log10_error"].max()) if len(finite) else (-6.0, 0.0)
    low = max(low, high - 8)
    axis.set_xlim(low - 0.2, high + 0.2)
    ticks = np.arange(np.floor(low), np.ceil(high) + 1)[:: max(1, int(np.ceil((high - low) / 7)))]
    axis.set_xticks(ticks, [_power(t) for t in ticks])
    axis.set_yticks([-4, -3, -2, -1, 0], ["0.01", "0.1", "1", "10", "100"])
    axis.set_ylim(-4.2, 0.1)
    axis.set_xlabel("absolute error of an output element")
    axis.set_ylabel("share of elements, %")
    if len(finite):
        axis.legend(loc="upper left", fontsize=8, frameon=False, handlelength=1.8, borderaxespad=0.1)
    _title(axis, "Errors of the elements")


def split(axes: list[Axes], table: pd.DataFrame) -> None:
    """Columns: part, relative_error, gain."""
    (axis,) = axes
    names = [_SHORT.get(part, part) for part in table["part"]]
    _bars(axis, names, table, [PART_COLOURS[part] for part in table["part"]])
    axis.set_xlabel("relative error of the output (gain: its share along the output)")
    _title(axis, "Where the error of the output comes from")


def _bars(axis: Axes, names: list[str], table: pd.DataFrame, colours: list[str]) -> None:
    """Horizontal bars of relative_error on a logarithmic scale, drawn as its exponents; each with number and gain."""
    values = table["relative_error"].to_numpy()
    positive = values[np.isfinite(values) & (values > 1e-12)]
    high = np.log10(positive.max()) if len(positive) else 0.0
    low = max(min(np.log10(positive.min()) if len(positive) else -1.0, high - 2) - 0.4, high - 6)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(np.isfinite(values), np.log10(np.maximum(values, 0)), high)
    lengths = np.clip(logs, low, None) - low
    axis.barh(range(len(names)), lengths, left=low, height=0.72, color=colours, linewidth=0)
    gains = table["gain"].tolist()
    for y, (value, length, gain) in enumerate(zip(values.tolist(), lengths.tolist(), gains, strict=True)):
        words = _percent(value) if np.isfinite(value) else str(value)
        if abs(gain) > 0.1 * value:  # else it is mostly noise
            words += f" (gain {'−' if gain < 0 else '+'}{_percent(abs(gain))})"
        axis.text(low + length + 0.05, y, words, va="center", fontsize=8.5)
    ticks = np.arange(np.ceil(low), np.floor(high) + 1)
    axis.set_xticks(ticks, [_percent(10.0**t) for t in ticks])
    axis.set_xlim(low, high + 0.6 * max(high - low, 1))
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)


def _shades(table: pd.DataFrame) -> np.ndarray:
    """0 (smallest) to 1 (largest of a column) for each cell; what is not finite is 1."""
    values = table.to_numpy(dtype=np.float64)
    finite = np.where(np.isfinite(values), values, np.nan)
    low, high = np.nanmin(finite, axis=0), np.nanmax(finite, axis=0)
    return np.nan_to_num((finite - low) / np.where(high > low, high - low, 1), nan=1.0)


def _cell(column: str, value: float) -> str:
    return f"{value:.3g}" if column == "max" or not np.isfinite(value) else _percent(value)


def layers(axes: list[Axes], table: pd.DataFrame) -> None:
    """Index: layer. Columns: measures, each on its own colour scale; cells carry their numbers."""
    (axis,) = axes
    axis.imshow(_shades(table), cmap=_MAP, vmin=0, vmax=1, aspect="auto")
    for j, column in enumerate(table.columns):
        for i, value in enumerate(table[column].tolist()):
            axis.text(j, i, _cell(column, value), ha="center", va="center", fontsize=8.5, color="black")
    axis.set_xticks(range(table.shape[1]), [str(c).replace("_", " ") for c in table.columns])
    axis.set_yticks(range(table.shape[0]), [str(name).replace("_", " ") for name in table.index])
    axis.tick_params(length=0)
    for edge in axis.spines.values():
        edge.set_visible(False)
    _title(axis, LAYERS_TITLE)


def layers_html(table: pd.DataFrame, chosen: int) -> str:
    """The same heat map as an HTML table, the chosen layer marked: drawn by the browser, and readable by its tools."""
    colours = (_MAP(_shades(table))[..., :3] * 255).round().astype(int)
    head = "".join(
        f'<th scope="col" style="padding:2px 10px">{escape(c.replace("_", " "))}</th>' for c in table.columns
    )
    rows = []
    for i, (name, row) in enumerate(zip(table.index, table.to_numpy(dtype=np.float64).tolist(), strict=True)):
        cells = "".join(
            f'<td style="background:rgb({",".join(map(str, colours[i, j]))});color:black;text-align:right;'
            f'padding:2px 10px">{_cell(column, value)}</td>'
            for j, (column, value) in enumerate(zip(table.columns, row, strict=True))
        )
        mark, weight = ("▸ ", "bold") if i == chosen else ("", "normal")
        label = escape(str(name).replace("_", " "))
        rows.append(
            f'<tr><th scope="row" style="text-align:right;font-weight:{weight};padding:2px 10px">{mark}{label}</th>'
            f"{cells}</tr>"
        )
    return (
        f'<table class="mla-explore-layers" style="border-collapse:collapse;line-height:1.5">'
        f'<caption style="text-align:left;font-weight:bold">{escape(LAYERS_TITLE)}</caption>'
        f'<thead><tr><th scope="col">layer</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def detail(axes: list[Axes], tables: Mapping[str, pd.DataFrame]) -> None:
    """`tokens`, `causes` and `tiles` of one row, left to right."""
    scores, probabilities, causes, tiles = axes
    tokens = tables["tokens"]
    show = _thinned(tokens)
    scores.plot(show["token"], show["score_oracle"], ".", markersize=2.5, color=PART_COLOURS["total"])
    off = scores.twinx()
    off.plot(
        show["token"], show["score_format"] - show["score_oracle"], ".", markersize=2, color=PART_COLOURS["format"]
    )
    off.set_ylabel("format − oracle", color=PART_COLOURS["format"], fontsize=8)
    off.tick_params(labelsize=8)
    scores.set_ylabel("oracle")
    scores.set_xlabel("token" + (f" ({len(show)} of {len(tokens)} shown)" if len(show) < len(tokens) else ""))
    _title(scores, "Scores")

    floor = 1e-9
    probabilities.plot(
        np.log10(show["p_oracle"].clip(lower=floor)), np.log10(show["p_stage"].clip(lower=floor)), ".", markersize=3,
        color=PART_COLOURS["stage"],
    )  # fmt: skip
    low, high = np.log10(max(float(show["p_oracle"].min()), floor)), np.log10(float(show["p_oracle"].max()))
    probabilities.plot([low, high], [low, high], color="#888888", linewidth=0.8)
    ticks = np.arange(np.ceil(low), np.floor(high) + 1)[:: max(1, int((high - low) // 4))]
    for place in (probabilities.set_xticks, probabilities.set_yticks):
        place(ticks, [_power(t) for t in ticks])
    lost = int((tokens["p_stage"] == 0).sum())
    probabilities.set_xlabel("exact" + (f" ({lost} of {len(tokens)} flushed to 0)" if lost else ""))
    probabilities.set_ylabel("stage")
    _title(probabilities, "Probabilities, exact and as the stage holds them")

    table = tables["causes"]
    colours = ["format", "format", "stage", "stage", "stage", "implementation"]
    _bars(causes, list(table["cause"]), table, [PART_COLOURS[c] for c in colours[: len(table)]])
    causes.set_xlabel("relative error of the row")
    _title(causes, "What the error arose from")

    table = tables["tiles"]
    width = 0.9 * (table["first"].iloc[1] - table["first"].iloc[0]) if len(table) > 1 else 1
    tiles.bar(table["first"], 100 * table["share"], width=width, align="edge", color=PART_COLOURS["total"], linewidth=0)
    p = table["probability"].to_numpy()
    tiles.step(
        [*table["first"], table["first"].iloc[-1] + width], 100 * np.append(p, p[-1]),
        where="post", color=PART_COLOURS["stage"], linewidth=1.4,
    )  # fmt: skip
    tiles.set_xlabel("token (tiles of 64)")
    _title(tiles, "Where: % of squared error (line: of P)")


def _thinned(table: pd.DataFrame, most: int = 500) -> pd.DataFrame:
    """At most `most` tokens: half of them the likeliest, the others evenly spread. Dots are what a PNG weighs."""
    if len(table) <= most:
        return table
    top = table.nlargest(most // 2, "p_oracle")
    rest = table.drop(top.index)
    return pd.concat([top, rest.iloc[:: -(-len(rest) // (most - len(top)))]]).sort_values("token")


#: Panel: its size in inches, its axes [left, bottom, width, height] in inches, and what draws it.
PANELS: dict[str, tuple[tuple[float, float], list[tuple[float, float, float, float]], Any]] = {
    "histogram": ((5.4, 3.0), [(0.65, 0.72, 4.6, 1.95)], histogram),
    "split": ((5.4, 3.0), [(0.75, 0.55, 4.5, 2.12)], split),
    "layers": ((10.9, 2.6), [(1.25, 0.35, 9.5, 1.92)], layers),
    "detail": (
        (10.9, 5.4),
        [(0.6, 3.25, 4.0, 1.8), (6.1, 3.25, 4.6, 1.8), (1.15, 0.55, 4.05, 1.95), (6.1, 0.55, 4.6, 1.95)],
        detail,
    ),
}


def picture(panel: str, data: Any) -> tuple[bytes, int, int]:
    """PNG of one panel, and its width and height in CSS pixels."""
    (width, height), _, _ = PANELS[panel]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), dpi=DPI)
        _draw(figure, panel, data)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").save(file, "png", compress_level=1)
    return file.getvalue(), round(width * CSS_DPI), round(height * CSS_DPI)


def sheet(data: Mapping[str, Any], title: str) -> Figure:
    """All panels on one Figure, as the widgets lay them out, at SHEET of their size. `data` by panel."""
    gap, top = 0.15, 0.4
    places = {"histogram": (0.0, 0), "split": (5.5, 0), "layers": (0.0, 1), "detail": (0.0, 2)}
    heights = [3.0, 2.6, 5.4]
    total = top + sum(heights) + gap * len(heights)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(10.9, total))
        for panel, (left, row) in places.items():
            bottom = total - top - sum(heights[: row + 1]) - gap * row
            _draw(figure, panel, data[panel], left, bottom)
        figure.text(0.01, 1 - 0.2 / total, title, fontsize=10, va="center", color=_TEXT)
        for text in figure.findobj(Text):
            text.set_fontsize(SHEET * float(text.get_fontsize()))
        for axis in figure.axes:  # their labels, those to come included
            axis.tick_params(labelsize=SHEET * _STYLE["xtick.labelsize"])
        figure.set_size_inches(SHEET * 10.9, SHEET * total)
    return figure


def _draw(figure: FigureBase, panel: str, data: Any, left: float = 0.0, bottom: float = 0.0) -> None:
    width, height = figure.get_figure().get_size_inches()  # type: ignore[union-attr]
    boxes = PANELS[panel][1]
    axes = [figure.add_axes(((left + x) / width, (bottom + y) / height, w / width, h / height)) for x, y, w, h in boxes]
    PANELS[panel][2](axes, data)
