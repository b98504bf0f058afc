# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Run a report again from its manifest and compare every recorded number."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_kernels.report.errors import ReportError
from mla_kernels.report.files import file_hash, repository_root
from mla_kernels.report.parameters import Notebook, settle
from mla_kernels.report.provenance import environment_differences
from mla_kernels.report.runner import FINISHED, TIME_LIMIT, Plan, Reporter, ReportRun, run_report, state_of

__all__ = ["Difference", "Verification", "differences", "edited_files", "unfinished_beside", "verify_report"]

MISSING = "(not there)"


@dataclass(frozen=True)
class Difference:
    """One leaf of results.json that is not the same."""

    path: str
    recorded: Any
    now: Any


@dataclass(frozen=True)
class Verification:
    """What came of running a report again."""

    run: ReportRun
    compared: int
    differences: tuple[Difference, ...]
    environment: tuple[tuple[str, str, str], ...]

    @property
    def same(self) -> bool:
        return self.run.finished and not self.differences


def edited_files(report: Path) -> list[str]:
    """Files of a finished report that are not as they were when it finished: changed, missing or added."""
    recorded: dict[str, str] = json.loads((report / FINISHED).read_text(encoding="utf-8"))["sha256"]
    there = {p.relative_to(report).as_posix() for p in report.rglob("*") if p.is_file()} - {FINISHED}
    found = [
        f"{name} was changed" for name in sorted(there & set(recorded)) if file_hash(report / name) != recorded[name]
    ]
    found += [f"{name} is missing" for name in sorted(set(recorded) - there)]
    return found + [f"{name} was added" for name in sorted(there - set(recorded))]


def unfinished_beside(report: Path) -> Path | None:
    """The folder of a run of the same name that did not finish, or still goes on."""
    path = report.parent / f"{report.name}.unfinished"
    return path if report.name and path.is_dir() else None


def load_report(report: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(manifest, results) of a finished report that nobody has edited.

    Raises:
        ReportError: naming what is wrong with it.
    """
    state = state_of(report)
    if not report.exists() and (other := unfinished_beside(report)):
        state += f", but {other.name} is, which {state_of(other)}"
    if state:
        raise ReportError(
            f"REPORT: {report} {state}: nothing to verify; run it with `python -m mla_kernels.report run`"
        )
    edited = edited_files(report)
    if edited:
        raise ReportError(f"REPORT: {report} is not as it was when it finished: {'; '.join(edited)}", exit_code=1)
    manifest = json.loads((report / "manifest.json").read_text(encoding="utf-8"))
    if manifest.get("format") != 1:
        raise ReportError(f"REPORT: {report}: expected manifest format 1, got {manifest.get('format')!r}")
    return manifest, json.loads((report / "results.json").read_text(encoding="utf-8"))


def verify_report(report: Path, *, time_limit: float = TIME_LIMIT, reporter: Reporter | None = None) -> Verification:
    """Run the notebooks of a report with its parameters in a temporary folder and compare.

    Compared is `notebooks` of results.json: claims (text and verdict) and recorded values, leaf by leaf, exactly.
    `timings` is not.
    """
    manifest, recorded = load_report(report)
    root = repository_root()
    notebooks = []
    for name, entry in manifest["notebooks"].items():
        path = root / entry["path"]
        if not path.is_file():
            raise ReportError(f"REPORT: {report} was made from {entry['path']}, which is not in {root}: use its commit")
        notebooks.append((Notebook(path), entry["parameters"], name))
    parameters = settle([n for n, _, _ in notebooks], {name: values for _, values, name in notebooks}, {})
    plan = Plan(tuple(n for n, _, _ in notebooks), parameters, manifest["profile"], root)
    with tempfile.TemporaryDirectory(prefix="mla-verify-") as folder:
        run = run_report(
            plan, manifest["name"], reports_dir=Path(folder), time_limit=time_limit, reporter=reporter,
            command=["verify", str(report)],
        )  # fmt: skip
        results = json.loads((run.folder / "results.json").read_text(encoding="utf-8"))
        now = json.loads((run.folder / "manifest.json").read_text(encoding="utf-8"))
    ended = {outcome.notebook for outcome in run.outcomes if outcome.finished}  # of the others, the reason is told
    old = {name: entry for name, entry in comparable(recorded).items() if name in ended}
    new = {name: entry for name, entry in comparable(results).items() if name in ended}
    return Verification(
        run,
        compared=len(dict(leaves(old))),
        differences=tuple(differences(old, new)),
        environment=tuple(environment_differences(manifest, now)),
    )


def comparable(results: Mapping[str, Any]) -> dict[str, Any]:
    """The part of results.json that must repeat: records and verdicts (the detail of a claim may hold a time)."""
    return {
        name: {"claims": {claim["claim"]: claim["ok"] for claim in entry["claims"]}, "records": entry["records"]}
        for name, entry in results["notebooks"].items()
    }


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every leaf. An empty list or dict is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def differences(recorded: Any, now: Any) -> Iterator[Difference]:
    """Leaves that are not the same, exactly: 1 and 1.0 are, 0.1 and its neighbour are not."""
    old, new = dict(leaves(recorded)), dict(leaves(now))
    for path in dict.fromkeys([*old, *new]):
        a, b = old.get(path, MISSING), new.get(path, MISSING)
        if a != b or isinstance(a, bool) != isinstance(b, bool):
            yield Difference(path, a, b)
