# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The page of a sweep: small multiples of what the cells recorded, and a table of all cells that sorts."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader

from mla_kernels.report import figures
from mla_kernels.report.files import write_bytes, write_text
from mla_kernels.report.render import TEMPLATES, duration_text, machine_text, page_style, provenance_rows, read_results
from mla_kernels.report.values import number_text

if TYPE_CHECKING:
    from mla_kernels.report.sweep import Ending, Sweep

__all__ = ["leaves_of", "render_comparison"]

MOST_METRICS = 12
UNNAMED_METRICS = 6  # that are shown when a notebook has no key number


def leaves_of(value: Any, path: str = "") -> dict[str, float]:
    """Path -> number, for every number in a recorded value; those that are not finite ("nan", "inf") included."""
    if isinstance(value, Mapping):
        pairs = [leaves_of(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()]
    elif isinstance(value, list):
        pairs = [leaves_of(item, f"{path}[{index}]") for index, item in enumerate(value)]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        return {path: value}
    elif value in ("nan", "inf", "-inf"):
        return {path: float(value)}
    else:
        return {}
    return {key: item for found in pairs for key, item in found.items()}


class _Table:
    """What the cells of a sweep recorded, by metric and cell."""

    def __init__(self, sweep: Sweep, folder: Path, results: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        self.numbers: dict[str, dict[str, float]] = {}  # cell id -> metric -> value
        self.units: dict[str, str] = {}
        keys: dict[str, None] = {}
        everything: dict[str, None] = {}
        for cell in sweep.cells:
            recorded = results["notebooks"].get(cell.label, {}).get("records", {})
            found = {**leaves_of(recorded), **leaves_of(timings.get(cell.label, {}))}
            self.numbers[cell.id] = found
            page = read_results(folder / "cells" / cell.id, sweep.notebook.name)
            self.units |= page.get("units", {})
            keys |= {key: None for key in page.get("key_numbers", []) if key in found}
            everything |= dict.fromkeys(leaves_of(recorded))
        asked = sweep.definition["compare"]
        known = {**everything, **{key: None for found in self.numbers.values() for key in found}}
        self.missing = [name for name in asked if not any(_under(path, name) for path in known)]
        chosen = [path for name in asked for path in known if _under(path, name)]
        self.metrics = list(dict.fromkeys(chosen if asked else keys or list(everything)[:UNNAMED_METRICS]))
        self.left_out = self.metrics[MOST_METRICS:]
        self.metrics = self.metrics[:MOST_METRICS]


def _under(path: str, name: str) -> bool:
    return path == name or path.startswith((f"{name}.", f"{name}["))


def render_comparison(
    sweep: Sweep,
    folder: Path,
    manifest: Mapping[str, Any],
    endings: Mapping[str, Ending],
    results: Mapping[str, Any],
    timings: Mapping[str, Any],
) -> str:
    """Write the figures with their numbers and `sweep.csv` into the folder; returns the page."""
    from mla_kernels.report.sweep import value_label

    table = _Table(sweep, folder, results, timings)
    labels = {cell.id: {name: value_label(value) for name, value in cell.varied.items()} for cell in sweep.cells}
    pictures = [_picture(sweep, folder, metric, table, labels, endings) for metric in table.metrics]
    names = list(sweep.axes)
    rows = [
        [*labels[cell.id].values(), _state(endings[cell.id]), endings[cell.id].seconds]
        + [_plain(table.numbers[cell.id].get(metric)) for metric in table.metrics]
        for cell in sweep.cells
    ]
    write_text(folder / "sweep.csv", _csv([*names, "state", "seconds", *table.metrics], rows))
    done = [endings[cell.id] for cell in sweep.cells]
    template = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True).get_template("sweep.html.j2")
    return template.render(
        name=manifest["name"],
        title=sweep.notebook.title,
        notebook=sweep.notebook.name,
        date=manifest["started"].replace("T", " ")[:16] + " UTC",
        machine=machine_text(manifest),
        duration=duration_text(manifest["seconds"]),
        cells=len(done),
        finished=sum(ending.finished for ending in done),
        reused=sum(ending.reused for ending in done),
        failed=[
            {"label": cell.label, "reason": endings[cell.id].reason.splitlines()[0], "page": _page(folder, cell, sweep)}
            for cell in sweep.cells
            if not endings[cell.id].finished
        ],
        axes=[(name, ", ".join(map(value_label, values))) for name, values in sweep.axes.items()],
        fixed=[(name, value_label(v)) for name, v in sweep.cells[0].parameters.items() if name not in sweep.axes],
        pictures=pictures,
        missing=table.missing,
        left_out=table.left_out,
        names=names,
        metrics=[{"name": m, "label": _words(m), "unit": table.units.get(m, "")} for m in table.metrics],
        rows=[_row(sweep, folder, cell, endings[cell.id], labels[cell.id], table) for cell in sweep.cells],
        provenance=provenance_rows(manifest),
        style=page_style(),
    )


def _words(metric: str) -> str:
    return metric.replace("_", " ")


def _state(ending: Ending) -> str:
    return "finished" if ending.finished else "lost" if ending.lost else "failed"


def _page(folder: Path, cell: Any, sweep: Sweep) -> str:
    place = f"cells/{cell.id}/{sweep.notebook.name}.html"
    return place if (folder / place).is_file() else ""


def _plain(value: float | None) -> Any:
    return "" if value is None else value


def _csv(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()


def _row(
    sweep: Sweep, folder: Path, cell: Any, ending: Ending, labels: Mapping[str, str], table: _Table
) -> dict[str, Any]:
    def entry(value: Any, text: str) -> dict[str, Any]:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return {"text": text, "sort": repr(value) if number else text, "kind": "num" if number else "short"}

    values = [entry(cell.varied[name], labels[name]) for name in sweep.axes]
    found = [table.numbers[cell.id].get(metric) for metric in table.metrics]
    return {
        "cells": values,
        "state": _state(ending),
        "reason": ending.reason.splitlines()[0] if ending.reason else "",
        "page": _page(folder, cell, sweep),
        "numbers": [
            {"text": "–", "sort": "", "kind": "num"} if value is None else entry(value, number_text(value))
            for value in found
        ],
        "seconds": entry(ending.seconds, f"{ending.seconds:.1f}"),
    }


def _picture(
    sweep: Sweep, folder: Path, metric: str, table: _Table, labels: Mapping[str, Mapping[str, str]],
    endings: Mapping[str, Ending],
) -> dict[str, Any]:  # fmt: skip
    """Draw one metric; columns are the last parameter that varies, rows the one before, panels the others."""
    varied = [name for name, values in sweep.axes.items() if len(values) > 1] or list(sweep.axes)[:1]
    column, row, rest = varied[-1], varied[-2] if len(varied) > 1 else "", varied[:-2]

    def place(cell: Any) -> tuple[str, str, str]:
        text = labels[cell.id]
        return ", ".join(f"{name} = {text[name]}" for name in rest), text[row] if row else "", text[column]

    def along(name: str) -> list[str]:
        return list(dict.fromkeys(labels[cell.id][name] for cell in sweep.cells)) if name else [""]

    panels = [
        ", ".join(f"{name} = {value}" for name, value in zip(rest, values, strict=True))
        for values in itertools.product(*(along(name) for name in rest))
    ]
    values = {place(cell): table.numbers[cell.id][metric] for cell in sweep.cells if metric in table.numbers[cell.id]}
    failed = {place(cell) for cell in sweep.cells if not endings[cell.id].finished}
    unit = table.units.get(metric, "")
    title = _words(metric) + (f", {unit}" if unit else "")
    figure = figures.tile_maps(
        {key: value for key, value in values.items() if key not in failed}, failed, panels=panels, rows=along(row),
        columns=along(column), row_name=row, column_name=column, title=title,
    )  # fmt: skip
    slug = re.sub(r"[^A-Za-z0-9_]+", "-", metric).strip("-")
    name = f"figures/{table.metrics.index(metric) + 1:02d}-{slug}"
    write_bytes(folder / f"{name}.png", figures.png(figure))
    rows = [
        [*labels[cell.id].values(), _state(endings[cell.id]), _plain(table.numbers[cell.id].get(metric))]
        for cell in sweep.cells
    ]
    write_text(folder / f"{name}.csv", _csv([*sweep.axes, "state", metric], rows))
    width, height = (round(inches * figures.SCREEN_DPI) for inches in figure.get_size_inches())
    cut = f" Shown are {figures.MOST_PANELS} of {len(panels)} panels." if len(panels) > figures.MOST_PANELS else ""
    return {
        "png": f"{name}.png", "csv": f"{name}.csv", "width": width, "height": height, "title": title,
        "alt": _alt(title, column, row, values, failed), "cut": cut, "hatched": bool(failed), "id": slug,
    }  # fmt: skip


def _alt(
    title: str, column: str, row: str, values: Mapping[tuple[str, str, str], float], failed: set[tuple[str, str, str]]
) -> str:
    good = {key: value for key, value in values.items() if key not in failed and math.isfinite(value)}
    axes = f"{column} across" + (f", {row} down" if row else "")
    if not good:
        return f"{title}: {axes}; no finished cell has a finite value."
    low, high = min(good, key=lambda key: good[key]), max(good, key=lambda key: good[key])

    def where(key: tuple[str, str, str]) -> str:
        return ", ".join(filter(None, [key[0], f"{row} = {key[1]}" if row else "", f"{column} = {key[2]}"]))

    ends = f"from {number_text(good[low])} ({where(low)}) to {number_text(good[high])} ({where(high)})"
    more = f"; {len(failed)} cells did not finish" if failed else ""
    return f"{title}: {axes}; {ends}{more}."
