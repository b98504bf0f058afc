# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Figures of the pages that compare reports: a table in, a matplotlib Figure out.

They are drawn without pyplot, so that no state of it matters, and read in grey as well as in colour.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mla_kernels.report.values import number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["SCREEN_DPI", "moves", "png", "tile_maps"]

INK, SOFT, BAD = "#1d2024", "#f4f3ee", "#9c1f18"
WIDTH = 10.2  # inches, the width of a page
MOST_PANELS = 36
LOG_RANGE = 30.0  # largest over smallest value from which colours are logarithmic
SCREEN_DPI = 96  # CSS pixels an inch
DPI = 2 * SCREEN_DPI


def png(figure: Figure) -> bytes:
    """The figure as a PNG of twice the screen's resolution, with 256 colours of its own.

    That is under half the size of all colours, three times in a report, and nothing that an eye sees: over the figures
    of the notebooks the mean difference is 0.28 of 255 at most.
    """
    from PIL import Image

    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=DPI)
    with Image.open(full) as image:
        ground = Image.new("RGBA", image.size, "white")  # what is transparent would be black otherwise
        ground.alpha_composite(image.convert("RGBA"))
    colours = ground.convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    colours.save(small, "PNG", optimize=True)
    return small.getvalue()


def tile_maps(
    values: Mapping[tuple[str, str, str], float],
    failed: set[tuple[str, str, str]],
    *,
    panels: Sequence[str],
    rows: Sequence[str],
    columns: Sequence[str],
    row_name: str,
    column_name: str,
    title: str,
) -> Figure:
    """Small multiples: a map for each panel, a tile for each cell, one colour scale; failed cells are hatched.

    Args:
        values: (panel, row, column) -> value.
        failed: cells that did not finish.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure

    shown = list(panels)[:MOST_PANELS]
    across = min(len(shown), 4, max(1, int(WIDTH / (1.1 + 0.85 * len(columns)))))
    down = math.ceil(len(shown) / across)
    tilt = max(map(len, columns), default=0) * len(columns) * across > 80
    panel_height = 0.55 + 0.42 * len(rows) + (0.55 if tilt else 0.2) + (0.25 if shown != [""] else 0.0)
    figure = Figure(figsize=(WIDTH, 0.65 + down * panel_height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    finite = [value for value in values.values() if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    log = low > 0 and high > LOG_RANGE * low
    norm = LogNorm(low, high) if log else Normalize(low, high) if high > low else Normalize(low - 1.0, low + 0.7)
    scale = ScalarMappable(norm, colormaps["cividis"])
    for index, axis in enumerate(axes.flat):
        if index >= len(shown):
            axis.set_visible(False)
            continue
        _tiles(axis, shown[index], rows, columns, values, failed, scale, across)
        axis.set_title(shown[index], fontsize=10, loc="left", color=INK)
        axis.set_xticks(range(len(columns)), columns, rotation=30 if tilt else 0, ha="right" if tilt else "center")
        axis.set_yticks(range(len(rows)), rows)
        axis.tick_params(labelsize=9, length=0, labelbottom=True)
        if index % across == 0 and row_name:
            axis.set_ylabel(row_name, fontsize=10)
        axis.set_xlabel(column_name, fontsize=10)
    if finite and high > low:
        bar = figure.colorbar(scale, ax=axes, fraction=0.03, pad=0.01, aspect=14)
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=8)
    return figure


def _tiles(
    axis: Axes, panel: str, rows: Sequence[str], columns: Sequence[str], values: Mapping[tuple[str, str, str], float],
    failed: set[tuple[str, str, str]], scale: Any, across: int,
) -> None:  # fmt: skip
    from matplotlib.patches import Rectangle

    axis.set_xlim(-0.5, len(columns) - 0.5)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    for spine in axis.spines.values():
        spine.set_visible(False)
    size = 9 if len(columns) * across <= 12 else 7 if len(columns) * across <= 20 else 0
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            key = (panel, row, column)
            corner, value = (x - 0.47, y - 0.45), values.get(key)
            if key in failed:
                axis.add_patch(Rectangle(corner, 0.94, 0.9, facecolor="white", edgecolor=BAD, hatch="////", lw=0.8))
                continue
            if value is None or not math.isfinite(value):
                axis.add_patch(Rectangle(corner, 0.94, 0.9, facecolor=SOFT, edgecolor="none"))
                text, colour = "–" if value is None else number_text(value), INK
            else:
                fill = scale.to_rgba(value)
                axis.add_patch(Rectangle(corner, 0.94, 0.9, facecolor=fill, edgecolor="none"))
                light = 0.2126 * fill[0] + 0.7152 * fill[1] + 0.0722 * fill[2]
                text, colour = number_text(float(value), 3).replace("\u00a0", ""), "white" if light < 0.45 else INK
            if size:
                axis.text(x, y, text, ha="center", va="center", fontsize=size, color=colour)


def moves(labels: Sequence[str], changes: Sequence[float], noises: Sequence[float], *, title: str) -> Figure:
    """A dot for each value that moved, with a bar for the noise that repeated runs showed around no change.

    Args:
        labels: names of the values, the largest move first.
        changes: relative changes, in percent.
        noises: relative noise (half-width), in percent.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 1.1 + 0.3 * len(labels)), layout="constrained")
    axis = figure.subplots()
    axis.use_sticky_edges = False  # or the bars of noise end at the frame
    places = range(len(labels))
    axis.barh(places, [2 * n for n in noises], left=[-n for n in noises], height=0.62, color="#c9cdd3", label="noise")
    axis.hlines(places, 0, changes, color="#0b559f", lw=1.2)
    axis.plot(changes, places, "o", color="#0b559f", label="change")
    axis.axvline(0, color=INK, lw=0.8)
    axis.set_yticks(places, [text if len(text) <= 60 else "…" + text[-59:] for text in labels], fontsize=9)
    axis.invert_yaxis()
    largest = max((abs(c) for c in changes if math.isfinite(c)), default=1.0)
    smallest = min((abs(c) for c in changes if c), default=1.0)
    if largest > LOG_RANGE * smallest:
        axis.set_xscale("symlog", linthresh=smallest)
    axis.set_xlabel("change, %")
    axis.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
    axis.grid(axis="x", color="#e4e4e4")
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.legend(frameon=False, fontsize=9, loc="best")
    return figure
