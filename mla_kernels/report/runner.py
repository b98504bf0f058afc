# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Run notebooks and write the report folder.

A run writes into `<reports>/<name>.unfinished`. Only when every notebook is finished does the folder get its marker
`FINISHED` (hashes of all files) and its name `<reports>/<name>`, in place of an earlier report. So a folder of that
name is always a finished report, a failed run leaves an earlier one alone, and what a failed run wrote can be read.
"""

from __future__ import annotations

import datetime
import json
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mla_kernels.report.errors import ReportError
from mla_kernels.report.execute import Outcome, Progress, execute
from mla_kernels.report.files import file_hash, folder_lock, relative_name, repository_root, write_json, write_trouble
from mla_kernels.report.parameters import Notebook, check_profile, choose, load_profile, notebooks_in, settle
from mla_kernels.report.provenance import environment, gpu_profile, seeds_of

__all__ = [
    "FINISHED",
    "TIME_LIMIT",
    "Plan",
    "ReportRun",
    "Reporter",
    "finish_folder",
    "kind_of",
    "now",
    "plan_run",
    "recorded",
    "report_folder",
    "run_report",
    "state_of",
]

FINISHED = "FINISHED"
ANOTHER_NAME = "choose another name"
TIME_LIMIT = 3600.0  # seconds a notebook


@dataclass(frozen=True)
class Plan:
    """What will run, checked: nothing is written before a plan stands."""

    notebooks: tuple[Notebook, ...]
    parameters: Mapping[str, Mapping[str, Any]]
    profile: str
    root: Path
    repeat: int = 1  # times that each notebook runs; the further runs show the noise
    variables: Mapping[str, str] | None = None  # of the environment, for every notebook
    repository: Mapping[str, Any] | None = None  # where the checkout runs without its git
    cell: Mapping[str, Any] | None = None  # for the manifest of a cell of a sweep


@dataclass(frozen=True)
class ReportRun:
    """A run that has ended. `folder` is the report, or the unfinished folder of a run that failed."""

    folder: Path
    outcomes: tuple[Outcome, ...]

    @property
    def finished(self) -> bool:
        return all(outcome.finished for outcome in self.outcomes)

    @property
    def interrupted(self) -> bool:
        return any(outcome.interrupted for outcome in self.outcomes)


class Reporter:
    """What a run tells on its way; this one keeps silent."""

    def start(self, plan: Plan, folder: Path) -> None: ...

    def notebook_start(self, notebook: Notebook) -> None: ...

    def progress(self, notebook: Notebook, progress: Progress | None, seconds: float) -> None: ...

    def notebook_end(self, notebook: Notebook, outcome: Outcome) -> None: ...


def plan_run(
    notebooks: Sequence[str] = (),
    *,
    profile: str = "auto",
    parameters: Mapping[str, Any] | Sequence[str] = (),
    root: Path | None = None,
) -> Plan:
    """Choose notebooks and settle their parameters.

    Args:
        notebooks: names, numbers or paths; none means those that the profile lists.
        profile: "auto" (h200 where a supported GPU is, else cpu), a name under notebooks/params, or a YAML file.
        parameters: `name=value` texts, or a mapping with Python values; see `parameters.settle`.
        root: the checkout.

    Raises:
        ReportError: for anything that does not fit, before anything is written.
    """
    root = root or repository_root()
    folder = root / "notebooks"
    found = (gpu_profile() or "cpu") if profile == "auto" else profile
    # Notebooks that are named run with their own defaults where there is no profile for this machine.
    optional = profile == "auto" and bool(notebooks)
    listed = {} if optional and not (folder / "params" / f"{found}.yaml").is_file() else load_profile(found, folder)
    if not notebooks:
        check_profile(listed, [n.name for n in notebooks_in(folder)])
    chosen = choose(list(notebooks) or list(listed), folder)
    if not chosen:
        raise ReportError(f"NOTEBOOK: profile {found!r} lists no notebook: name one")
    return Plan(tuple(chosen), settle(chosen, listed, parameters, folder), found, root)


def run_report(
    plan: Plan,
    name: str,
    *,
    reports_dir: Path | None = None,
    time_limit: float = TIME_LIMIT,
    fail_fast: bool = False,
    command: Sequence[str] = (),
    reporter: Reporter | None = None,
) -> ReportRun:
    """Run a plan and write the report `<reports_dir>/<name>`.

    One notebook that fails does not stop the others, unless `fail_fast`. An interrupt (KeyboardInterrupt) ends the
    run, keeps what there is, and is returned, not raised.

    Raises:
        ReportError: when the name cannot be used, another process is writing this report, or the summary cannot be
            written (a full disk).
    """
    reporter = reporter or Reporter()
    reports = reports_dir or plan.root / "reports"
    final = report_folder(reports, name)
    with folder_lock(reports / f".{name}.lock", f"the report {final}"):
        old = reports / f".{name}.old"
        if old.exists() and not final.exists():
            old.rename(final)  # a run was killed in the very moment between the two renames below
        work = reports / f"{name}.unfinished"
        for folder in (final, work):
            if kind_of(folder) != "report":
                raise ReportError(
                    f"--name: {folder} is a {kind_of(folder)}, which a run does not replace: {ANOTHER_NAME}"
                )
        if work.exists():
            shutil.rmtree(work)
        work.mkdir(parents=True)
        reporter.start(plan, work)
        try:
            manifest = _manifest(plan, name, command)
            write_json(work / "manifest.json", manifest)
            outcomes = _run_all(plan, work, manifest, time_limit, fail_fast, reporter)
            _write_summary(plan, work, final, manifest, outcomes)
            if not all(outcome.finished for outcome in outcomes):
                return ReportRun(work, tuple(outcomes))
            finish_folder(work, final, old)
        except OSError as error:
            raise ReportError(
                f"not finished: {write_trouble(error, reports)}; what there is: {work}", exit_code=1
            ) from error
    return ReportRun(final, tuple(outcomes))


def kind_of(folder: Path) -> str:
    """ "sweep" for the folder of a sweep, "report" for any other and for none."""
    try:
        return str(json.loads((folder / "manifest.json").read_text(encoding="utf-8")).get("kind", "report"))
    except (OSError, ValueError, AttributeError):
        return "report"


def report_folder(reports: Path, name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name.endswith(".unfinished") or name == "interactive":
        raise ReportError(
            '--name: expected letters, digits, "_", "-" and ".", not ending in ".unfinished" and not "interactive", '
            f"got {name!r}"
        )
    final = reports / name
    if final.exists() and not (final / FINISHED).is_file():
        raise ReportError(f"--name: {final} is there and is not a report (it has no {FINISHED}): choose another name")
    return final


def finish_folder(work: Path, final: Path, old: Path) -> None:
    """Give the finished folder its marker and its name; an earlier one goes only when the new one is in its place."""
    hashes = {p.relative_to(work).as_posix(): file_hash(p) for p in sorted(work.rglob("*")) if p.is_file()}
    write_json(work / FINISHED, {"finished": now(), "sha256": hashes})
    if old.exists():
        shutil.rmtree(old)
    if final.exists():
        final.rename(old)
    work.rename(final)
    if old.exists():
        shutil.rmtree(old)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _manifest(plan: Plan, name: str, command: Sequence[str]) -> dict[str, Any]:
    return {
        "format": 1,
        "name": name,
        "profile": plan.profile,
        "command": shlex.join(command),
        "repeat": plan.repeat,
        **({"cell": dict(plan.cell)} if plan.cell else {}),
        "started": now(),
        "ended": "",
        "seconds": 0.0,
        "finished": False,
        **environment(plan.root),
        **({"repository": dict(plan.repository)} if plan.repository else {}),
        "notebooks": {
            n.name: {
                "path": relative_name(n.path, plan.root),
                "title": n.title,
                "sha256": n.sha256,
                "parameters": dict(plan.parameters[n.name]),
                "seeds": seeds_of(plan.parameters[n.name]),
            }
            for n in plan.notebooks
        },
    }


def _run_all(
    plan: Plan, work: Path, manifest: Mapping[str, Any], time_limit: float, fail_fast: bool, reporter: Reporter
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    stop = ""
    for notebook in plan.notebooks:
        if stop:
            outcomes.append(Outcome(notebook.name, finished=False, reason=stop, ran=False))
            continue
        reporter.notebook_start(notebook)
        outcome = execute(
            notebook,
            work,
            plan.parameters[notebook.name],
            time_limit=time_limit,
            variables=plan.variables,
            on_progress=lambda progress, seconds, notebook=notebook: reporter.progress(notebook, progress, seconds),  # type: ignore[misc]
        )
        outcome = _repeat(plan, notebook, work, time_limit, outcome)
        outcome = _render(plan, notebook, work, manifest, outcome)
        outcomes.append(outcome)
        reporter.notebook_end(notebook, outcome)
        if outcome.interrupted:
            stop = "not run: interrupted before"
        elif fail_fast and not outcome.finished:
            stop = f"not run: {notebook.name} failed (--fail-fast)"
    return outcomes


def _repeat(plan: Plan, notebook: Notebook, work: Path, time_limit: float, outcome: Outcome) -> Outcome:
    """Run a finished notebook again, `plan.repeat` times in all, and keep what each run recorded in `repeats/`."""
    from mla_kernels.report.render import read_results

    if not outcome.finished or plan.repeat == 1:
        return outcome
    runs = [recorded(read_results(work, notebook.name))]
    aside = work / ".repeat"
    try:
        for number in range(2, plan.repeat + 1):
            again = execute(
                notebook, aside, plan.parameters[notebook.name], time_limit=time_limit, variables=plan.variables
            )
            if not again.finished:
                return replace(again, reason=f"run {number} of {plan.repeat}: {again.reason}", seconds=outcome.seconds)
            runs.append(recorded(read_results(aside, notebook.name)))
            shutil.rmtree(aside)
        write_json(work / "repeats" / f"{notebook.name}.json", {"runs": runs})
    except OSError as error:
        return replace(outcome, finished=False, reason=write_trouble(error, work))
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return outcome


def recorded(results: Mapping[str, Any]) -> dict[str, Any]:
    """What a notebook recorded, those values that no second run repeats included."""
    return {"records": results["records"], "timings": results["timings"]}


def _render(plan: Plan, notebook: Notebook, work: Path, manifest: Mapping[str, Any], outcome: Outcome) -> Outcome:
    from mla_kernels.report import render

    if not (work / f"{notebook.name}.ipynb").is_file():
        return outcome
    pages = [{"name": n.name, "title": n.title, "report": manifest["name"]} for n in plan.notebooks]
    try:
        render.render_notebook(
            work,
            notebook.name,
            outcome=outcome,
            pages=pages,
            machine=render.machine_text(manifest),
            commit=manifest["repository"]["commit"],
            parameters=plan.parameters[notebook.name],
            descriptions={key: value.get("description", "") for key, value in notebook.schema.items()},
        )
    except KeyboardInterrupt:
        return replace(outcome, finished=False, interrupted=True, reason="interrupted while its page was rendered")
    except OSError as error:
        return replace(outcome, finished=False, reason=outcome.reason or write_trouble(error, work))
    except ValueError as error:
        reason = f"its page could not be rendered: {type(error).__name__}: {str(error)[:200]}"
        return replace(outcome, finished=False, reason=outcome.reason or reason)
    return outcome


def _write_summary(plan: Plan, work: Path, final: Path, manifest: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """results.json (what repeats), timings.json (what does not), the completed manifest.json and index.html."""
    from mla_kernels.report.render import read_results, render_index

    merged: dict[str, Any] = {"notebooks": {}}
    timings: dict[str, Any] = {}
    for outcome in outcomes:
        results = read_results(work, outcome.notebook)
        entry = manifest["notebooks"][outcome.notebook]
        entry |= {"finished": outcome.finished, "reason": outcome.reason, "seconds": outcome.seconds}
        if results:
            merged["notebooks"][outcome.notebook] = {"claims": results["claims"], "records": results["records"]}
            timings[outcome.notebook] = results["timings"]
            entry["environment"] = results["environment"]
    started = datetime.datetime.fromisoformat(manifest["started"])
    manifest["ended"] = now()
    manifest["seconds"] = (datetime.datetime.fromisoformat(manifest["ended"]) - started).total_seconds()
    manifest["finished"] = all(outcome.finished for outcome in outcomes)
    write_json(work / "results.json", merged)
    write_json(work / "timings.json", timings)
    write_json(work / "manifest.json", manifest)
    render_index(work, manifest, outcomes, verify_path=(plan.cell or {}).get("path") or relative_name(final, plan.root))


def state_of(folder: Path) -> str:
    """ "" for a finished report, else what it is instead, to stand behind its name."""
    if not folder.is_dir():
        return "is not there"
    if not (folder / "manifest.json").is_file():
        return "is not a report (no manifest.json)"
    try:
        notebooks = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["notebooks"]
        reasons = [
            f"{name}: {entry['reason'].splitlines()[0]}" for name, entry in notebooks.items() if entry.get("reason")
        ]
        if (folder / FINISHED).is_file():
            json.loads((folder / FINISHED).read_text(encoding="utf-8"))["sha256"]
            return ""
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"is damaged: {type(error).__name__}: {error}"
    more = f"; and {len(reasons) - 4} more" if len(reasons) > 4 else ""
    return "is not finished" + (
        f" ({'; '.join(reasons[:4])}{more})" if reasons else " (its run was killed, or is still going on)"
    )
