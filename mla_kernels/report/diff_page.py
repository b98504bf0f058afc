# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The page of a comparison of two reports: a folder of its own, with the numbers beside it."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from mla_kernels.report import figures
from mla_kernels.report.diff import FEWEST_RUNS, NOISE_FACTOR, Comparison, Move
from mla_kernels.report.errors import ReportError
from mla_kernels.report.files import write_bytes, write_text
from mla_kernels.report.render import TEMPLATES, machine_text, page_style
from mla_kernels.report.values import number_text
from mla_kernels.report.verify import why

__all__ = ["render_diff"]

SHOWN = 200  # values in the page's table; the CSV has all
DRAWN = 30  # in the figure
PICTURES = 16  # pairs of figures
GENERATOR = '<meta name="generator" content="mla_kernels.report diff">'


def render_diff(found: Comparison, a: Path, b: Path, output: Path) -> Path:
    """Write the page of a comparison into the folder `output`; returns the page.

    Args:
        a: folder of the first report, for its figures; `b`: of the second.

    Raises:
        ReportError: when `output` is there and is not such a folder.
    """
    page = output / "index.html"
    if output.exists():
        if not page.is_file() or GENERATOR not in page.read_text(encoding="utf-8")[:2000]:
            raise ReportError(f"--output: {output} is there and is not a comparison: choose another name")
        shutil.rmtree(output)
    moved = found.moved
    everything = [_csv_row(value) for value in sorted(found.values, key=lambda v: (v.notebook, v.path))]
    head = ["notebook", "value", "unit", "a", "b", "relative_change", "noise", "runs", "verdict"]
    write_text(output / "values.csv", _csv([head, *everything]))
    write_text(output / "moved.csv", _csv([head, *map(_csv_row, moved)]))
    picture = _draw(moved, found, output)
    pairs = _pairs(found, a, b, output)
    template = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True).get_template("diff.html.j2")
    html = template.render(
        generator=GENERATOR,
        a=_side(found.a),
        b=_side(found.b),
        moved=[_row(value) for value in moved[:SHOWN]],
        moved_count=len(moved),
        still=sum(value.judged and not value.moved for value in found.values),
        unjudged=[_row(value) for value in found.unjudged[:SHOWN]],
        unjudged_count=len(found.unjudged),
        claims=found.claims,
        texts=[(f"{name}: {path}", old[:200], new[:200]) for name, path, old, new in found.texts[:SHOWN]],
        only=[(side, f"{name}: {path}" if path else name) for side, name, path in found.only[:SHOWN]],
        parameters=found.parameters,
        environment=[row for row in found.environment if not row[0].startswith("package ")],
        packages=[(what[8:], old, new) for what, old, new in found.environment if what.startswith("package ")],
        alike=found.alike,
        why=_why(found),
        picture=picture,
        pairs=pairs,
        factor=f"{NOISE_FACTOR:g}",
        fewest=FEWEST_RUNS,
        style=page_style(),
    )
    write_text(page, html)
    return page


def _side(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": manifest["name"],
        "date": manifest["started"].replace("T", " ")[:16] + " UTC",
        "machine": machine_text(manifest),
        "commit": (manifest["repository"]["commit"] or "no commit")[:10],
        "changed": bool(manifest["repository"]["changed"]),
        "repeat": manifest.get("repeat", 1),
    }


def _why(found: Comparison) -> str:
    if found.parameters:
        names = ", ".join(name for name, _, _ in found.parameters[:6])
        rest = f"; {why(found.environment, found.alike)}" if found.environment else ""
        return f"other parameters ({names}){rest}"
    return why(found.environment, found.alike)


def _csv_row(value: Move) -> list[Any]:
    verdict = "moved" if value.moved else "not judged" if not value.judged else "within the noise"
    noise = "" if math.isnan(value.noise) else value.noise
    change = value.change if value.a != value.b else 0.0
    return [value.notebook, value.path, value.unit, value.a, value.b, change, noise, value.runs, verdict]


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def percent(value: float) -> str:
    """A relative change for people: 0.0123 -> "+1.23 %", 3.4 -> "× 4.4"."""
    if not math.isfinite(value):
        return "–"
    return (
        f"× {number_text(1 + value, 3)}" if value >= 1 else f"{'+' if value > 0 else ''}{number_text(100 * value, 3)} %"
    )


def _row(value: Move) -> dict[str, str]:
    noise = "not known" if not value.judged else "none" if not value.noise else number_text(value.noise, 2)
    return {
        "notebook": value.notebook,
        "path": value.path,
        "unit": value.unit,
        "a": number_text(value.a),
        "b": number_text(value.b),
        "change": percent(value.change),
        "noise": noise,
        "runs": str(value.runs),
    }


def _draw(moved: Sequence[Move], found: Comparison, output: Path) -> dict[str, Any] | None:
    drawn = [value for value in moved if math.isfinite(value.change)][:DRAWN]
    if not drawn:
        return None
    many = len({value.notebook for value in found.values}) > 1
    labels = [f"{value.notebook}: {value.path}" if many else value.path for value in drawn]
    title = f"{found.b['name']} against {found.a['name']}"
    noises = [100 * value.relative_noise for value in drawn]
    figure = figures.moves(labels, [100 * value.change for value in drawn], noises, title=title)
    write_bytes(output / "figures" / "moved.png", figures.png(figure))
    width, height = (round(inches * figures.SCREEN_DPI) for inches in figure.get_size_inches())
    largest = ", ".join(f"{label} {percent(value.change)}" for label, value in zip(labels[:3], drawn, strict=False))
    return {
        "png": "figures/moved.png", "width": width, "height": height, "drawn": len(drawn),
        "alt": f"Relative change of {len(drawn)} values, the largest first: {largest}.",
    }  # fmt: skip


def _pairs(found: Comparison, a: Path, b: Path, output: Path) -> list[dict[str, Any]]:
    """Figures of both reports whose numbers are not the same, side by side."""
    pairs: list[dict[str, Any]] = []
    for name in found.a["notebooks"]:
        sides = [_figures(folder, name) for folder in (a, b)]
        for key in sides[0]:
            old, new = sides[0][key], sides[1].get(key)
            if new is None or len(pairs) == PICTURES:
                continue
            if (a / old["csv"]).read_bytes() == (b / new["csv"]).read_bytes():
                continue
            entry: dict[str, Any] = {"notebook": name, "name": key, "caption": new["caption"]}
            for side, folder, figure in (("a", a, old), ("b", b, new)):
                place = f"figures/{side}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}-{key}"
                for kind in ("png", "csv"):
                    write_bytes(output / f"{place}.{kind}", (folder / figure[kind]).read_bytes(), sync=False)
                entry[side] = {"place": place, **{k: figure[k] for k in ("alt", "width", "height")}}
            pairs.append(entry)
    return pairs


def _figures(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    path = folder / "results" / f"{name}.json"
    if not path.is_file():
        return {}
    return {figure["name"]: figure for figure in json.loads(path.read_text(encoding="utf-8"))["figures"]}
