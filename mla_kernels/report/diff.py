# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""What moved between two reports, beyond the noise that repeated runs of each showed.

A recorded value repeats exactly (`verify` holds a report to that), so any change of it is a move. A value that does
not repeat (a time) moved when the medians of the two reports are farther apart than NOISE_FACTOR times the larger
range of either's repeated runs (`run --repeat N`); with fewer than FEWEST_RUNS of them it is not judged.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_kernels.report.compare import leaves_of
from mla_kernels.report.errors import ReportError
from mla_kernels.report.provenance import environment_alike, environment_differences
from mla_kernels.report.verify import comparable, leaves, load_report

__all__ = ["FEWEST_RUNS", "NOISE_FACTOR", "Comparison", "Move", "compare_reports"]

# Of two reports whose values come from one normal distribution, 0.6 % of the values are called moved with three runs
# of each, 0.04 % with four; with two runs it would be 7 % (simulated; tests/test_diff.py does it again).
NOISE_FACTOR = 2.0
FEWEST_RUNS = 3


@dataclass(frozen=True)
class Move:
    """One value of both reports. `noise` is what the medians may differ by; nan when that is not known."""

    notebook: str
    path: str
    a: float
    b: float
    noise: float
    runs: int  # the fewer of the two reports' runs
    unit: str = ""

    @property
    def judged(self) -> bool:
        return not math.isnan(self.noise)

    @property
    def moved(self) -> bool:
        """Beyond the noise; also from or to a value that is not finite."""
        if not math.isfinite(self.a) or not math.isfinite(self.b):
            return repr(self.a) != repr(self.b)
        return self.judged and abs(self.b - self.a) > self.noise

    @property
    def change(self) -> float:
        """Relative to A; inf from 0."""
        return (self.b - self.a) / abs(self.a) if self.a else math.copysign(math.inf, self.b - self.a)

    @property
    def relative_noise(self) -> float:
        return self.noise / abs(self.a) if self.a else math.nan


@dataclass(frozen=True)
class Comparison:
    """Two reports side by side."""

    a: Mapping[str, Any]  # manifests
    b: Mapping[str, Any]
    values: tuple[Move, ...]
    claims: tuple[tuple[str, str, str, str], ...]  # notebook, claim, verdict in A, verdict in B
    texts: tuple[tuple[str, str, str, str], ...]  # notebook, path, A, B: recorded values that are not numbers
    only: tuple[tuple[str, str, str], ...]  # "A" or "B", notebook, path ("" for a whole notebook)
    parameters: tuple[tuple[str, str, str], ...]  # notebook.name, A, B
    environment: tuple[tuple[str, str, str], ...]
    alike: tuple[str, ...]

    @property
    def moved(self) -> list[Move]:
        """The largest relative change first."""
        return sorted((v for v in self.values if v.moved), key=lambda v: (-abs(v.change), v.notebook, v.path))

    @property
    def unjudged(self) -> list[Move]:
        return [v for v in self.values if not v.judged and v.a != v.b]


@dataclass(frozen=True)
class _Loaded:
    manifest: Mapping[str, Any]
    results: Mapping[str, Any]
    timings: Mapping[str, Any]
    runs: Mapping[str, Sequence[Mapping[str, Any]]]
    units: Mapping[str, Mapping[str, str]]


def _load(report: Path) -> _Loaded:
    manifest, results = load_report(report)
    timings = _json(report / "timings.json") or {}
    runs, units = {}, {}
    for name, entry in manifest["notebooks"].items():
        runs[name] = (_json(report / "repeats" / f"{name}.json") or {}).get("runs", [])
        cell = report / "cells" / entry["cell"] if "cell" in entry else report
        page = _json(cell / "results" / f"{Path(entry['path']).stem}.json") or {}
        units[name] = page.get("units", {})
    return _Loaded(manifest, results, timings, runs, units)


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def compare_reports(a: Path, b: Path) -> Comparison:
    """Compare two finished reports (or two sweeps), notebook by notebook.

    Raises:
        ReportError: when one cannot be used, or they have no notebook (no cell) in common.
    """
    one, two = _load(a), _load(b)
    there = comparable(one.results), comparable(two.results)
    both = [name for name in there[0] if name in there[1]]
    if not both:
        raise ReportError(
            f"A, B: {a} and {b} have no notebook in common: {', '.join(list(there[0])[:4])} against "
            f"{', '.join(list(there[1])[:4])}"
        )
    only = [("A", name, "") for name in there[0] if name not in both] + [
        ("B", name, "") for name in there[1] if name not in both
    ]
    values: list[Move] = []
    claims, texts = [], []
    for name in both:
        old, new = there[0][name], there[1][name]
        for claim in dict.fromkeys([*old["claims"], *new["claims"]]):
            verdicts = [_verdict(side["claims"].get(claim)) for side in (old, new)]
            if verdicts[0] != verdicts[1]:
                claims.append((name, claim, verdicts[0], verdicts[1]))
        more, missing = _values(name, one, two)
        values += more
        only += missing
        texts += _texts(name, old["records"], new["records"])
    return Comparison(
        one.manifest, two.manifest, tuple(values), tuple(claims), tuple(texts), tuple(only),
        tuple(_parameters(one.manifest, two.manifest, both)),
        tuple(environment_differences(one.manifest, two.manifest)),
        tuple(environment_alike(one.manifest, two.manifest)),
    )  # fmt: skip


def _verdict(ok: bool | None) -> str:
    return "not claimed" if ok is None else "holds" if ok else "does not hold"


def _values(name: str, one: _Loaded, two: _Loaded) -> tuple[list[Move], list[tuple[str, str, str]]]:
    values, only = [], []
    for store in ("records", "timings"):
        sides = [_series(loaded, name, store) for loaded in (one, two)]
        for path in dict.fromkeys([*sides[0], *sides[1]]):
            if path not in sides[0] or path not in sides[1]:
                only.append(("A" if path in sides[0] else "B", name, path))
                continue
            series = sides[0][path], sides[1][path]
            values.append(_move(name, path, series, exact=store == "records", unit=two.units[name].get(path, "")))
    return values, only


def _series(loaded: _Loaded, name: str, store: str) -> dict[str, list[float]]:
    """path -> the value in every run of the report."""
    first = loaded.results["notebooks"][name]["records"] if store == "records" else loaded.timings.get(name, {})
    runs = [leaves_of(run[store]) for run in loaded.runs[name]] or [leaves_of(first)]
    return {path: [run[path] for run in runs if path in run] for path in leaves_of(first)}


def _move(name: str, path: str, series: tuple[list[float], list[float]], *, exact: bool, unit: str) -> Move:
    a, b = (statistics.median(values) for values in series)
    runs = min(map(len, series))
    spread = max(max(values) - min(values) for values in series)
    known = exact and not spread
    noise = NOISE_FACTOR * spread if known or runs >= FEWEST_RUNS else math.nan
    return Move(name, path, a, b, noise, runs, unit)


def _texts(name: str, old: Any, new: Any) -> list[tuple[str, str, str, str]]:
    sides = [{path: value for path, value in leaves(side) if path not in leaves_of(side)} for side in (old, new)]
    return [
        (name, path, str(sides[0][path]), str(sides[1][path]))
        for path in sides[0]
        if path in sides[1] and sides[0][path] != sides[1][path]
    ]


def _parameters(a: Mapping[str, Any], b: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, str, str]]:
    found = []
    for name in names:
        old, new = (manifest["notebooks"][name]["parameters"] for manifest in (a, b))
        for key in dict.fromkeys([*old, *new]):
            if old.get(key) != new.get(key):
                found.append((f"{name}.{key}", json.dumps(old.get(key)), json.dumps(new.get(key))))
    return found
