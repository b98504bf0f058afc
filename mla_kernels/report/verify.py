# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Run a report again from its manifest and compare every recorded number."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_kernels.report.errors import ReportError
from mla_kernels.report.files import file_hash, repository_root
from mla_kernels.report.parameters import Notebook, settle
from mla_kernels.report.provenance import environment_alike, environment_differences
from mla_kernels.report.runner import FINISHED, TIME_LIMIT, Plan, Reporter, run_report, state_of

__all__ = [
    "Difference",
    "Verification",
    "comparable",
    "differences",
    "edited_files",
    "leaves",
    "load_report",
    "unfinished_beside",
    "verify_report",
    "why",
]

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

    compared: int
    differences: tuple[Difference, ...]
    environment: tuple[tuple[str, str, str], ...]
    alike: tuple[str, ...]  # what of the environment is as it was
    unfinished: tuple[str, ...] = ()  # notebooks, or cells of a sweep
    interrupted: bool = False

    @property
    def same(self) -> bool:
        return not self.unfinished and not self.differences

    @property
    def cause(self) -> str:
        """Why numbers may differ, in a sentence."""
        return why(self.environment, self.alike)


# What may move a number, from the likeliest on: word, and how the entries of `environment_differences` begin.
CAUSES = (
    ("GPU", ("GPUs",)),
    ("data", ("data ",)),
    ("commit", ("commit", "uncommitted changes", "source of ")),
    ("kernels", ("kernels in ",)),
    ("processor", ("CPU", "cores", "torch threads")),
    ("versions", ("package ", "Python")),
    ("system", ("system",)),
)


def why(environment: Iterable[tuple[str, str, str]], alike: Iterable[str]) -> str:
    """The causes that the environments leave open, the likeliest first."""
    found = []
    for word, starts in CAUSES:
        entries = [(what, then, now) for what, then, now in environment if what.startswith(starts)]
        if not entries:
            continue
        first = ("commit", "package torch")
        what, then, now = min(entries, key=lambda entry: (not entry[0].startswith(first), entry[0]))
        detail = f"{then} → {now}" if what in ("GPUs", "CPU", "system", "Python") else _brief(what, then, now)
        more = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
        found.append(f"other {word} ({detail}{more})")
    if found:
        return "; ".join(found)
    return f"nothing that is recorded: {', '.join(alike)} are the same, so the notebook does not repeat itself here"


def _brief(what: str, then: str, now: str) -> str:
    short = [text[:10] if len(text) >= 40 else text for text in (then, now)]
    return f"{what.removeprefix('data ')}: {short[0]} → {short[1]}" if what != "commit" else " → ".join(short)


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
            f"REPORT: {report} {state}: nothing to compare or send; run it with `python -m mla_kernels.report run`"
        )
    edited = edited_files(report)
    if edited:
        raise ReportError(f"REPORT: {report} is not as it was when it finished: {'; '.join(edited)}", exit_code=1)
    manifest = json.loads((report / "manifest.json").read_text(encoding="utf-8"))
    if manifest.get("format") != 1:
        raise ReportError(f"REPORT: {report}: expected manifest format 1, got {manifest.get('format')!r}")
    return manifest, json.loads((report / "results.json").read_text(encoding="utf-8"))


def verify_report(report: Path, *, time_limit: float = TIME_LIMIT, reporter: Reporter | None = None) -> Verification:
    """Run the notebooks of a report, or the cells of a sweep, with its parameters in a temporary folder and compare.

    Compared is `notebooks` of results.json: claims (text and verdict) and recorded values, leaf by leaf, exactly.
    """
    manifest, recorded = load_report(report)
    root = repository_root()
    for entry in manifest["notebooks"].values():
        if not (root / entry["path"]).is_file():
            raise ReportError(f"REPORT: {report} was made from {entry['path']}, which is not in {root}: use its commit")
    with tempfile.TemporaryDirectory(prefix="mla-verify-") as name:
        folder = Path(name)
        if manifest.get("kind") == "sweep":
            from mla_kernels.report.sweep import sweep_again

            work, interrupted = sweep_again(manifest, folder, root)
        else:
            work, interrupted = _run_again(manifest, report, folder, root, time_limit, reporter)
        results = json.loads((work / "results.json").read_text(encoding="utf-8"))
        now = json.loads((work / "manifest.json").read_text(encoding="utf-8"))
    ended = {key for key, entry in now["notebooks"].items() if entry["finished"]}  # of the others, the reason is told
    old = {name: entry for name, entry in comparable(recorded).items() if name in ended}
    new = {name: entry for name, entry in comparable(results).items() if name in ended}
    return Verification(
        compared=len(dict(leaves(old))),
        differences=tuple(differences(old, new)),
        environment=tuple(environment_differences(manifest, now)),
        alike=tuple(environment_alike(manifest, now)),
        unfinished=tuple(name for name in now["notebooks"] if name not in ended),
        interrupted=interrupted,
    )


def _run_again(
    manifest: Mapping[str, Any], report: Path, folder: Path, root: Path, time_limit: float, reporter: Reporter | None
) -> tuple[Path, bool]:
    """(folder, interrupted) of a new run of a report."""
    notebooks = [(Notebook(root / entry["path"]), entry["parameters"]) for entry in manifest["notebooks"].values()]
    profile = {notebook.name: values for notebook, values in notebooks}
    parameters = settle([n for n, _ in notebooks], profile, {})
    variables = manifest.get("cell", {}).get("variables")
    plan = Plan(tuple(n for n, _ in notebooks), parameters, manifest["profile"], root, variables=variables)
    run = run_report(
        plan, manifest["name"], reports_dir=folder, time_limit=time_limit, reporter=reporter,
        command=["verify", str(report)],
    )  # fmt: skip
    return run.folder, run.interrupted


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
