# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Sweeps: one notebook over a grid of parameters, a report for each cell, and one page that compares them.

A sweep writes into `<reports>/<name>.unfinished`, a cell at a time: `cells/<id>` is there as a whole or not at all.
When every cell is finished, the folder gets its marker and its name, as a report does. A second run of the same
sweep takes over the cells that have ended, if what decides their numbers is as it was; a cell of a lost worker is run
again, one that failed by itself is not.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_kernels.report import engine as engines
from mla_kernels.report.errors import ReportError
from mla_kernels.report.files import file_hash, folder_lock, repository_root, write_json, write_text, write_trouble
from mla_kernels.report.parameters import Notebook, choose, load_profile, load_yaml, nearest, settle
from mla_kernels.report.provenance import MAIN_PACKAGES, environment
from mla_kernels.report.runner import (
    ANOTHER_NAME,
    FINISHED,
    TIME_LIMIT,
    finish_folder,
    kind_of,
    now,
    report_folder,
)
from mla_kernels.report.values import number_text
from mla_kernels.report.verify import edited_files

__all__ = ["Cell", "Ending", "Sweep", "SweepReporter", "SweepRun", "load_sweep", "run_sweep", "sweep_again"]

KEYS = ("notebook", "profile", "parameters", "grid", "threads", "gpus", "time_limit", "compare")
MOST_CELLS = 10_000
ATTEMPTS = 3  # of a cell whose worker is lost


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    varied: Mapping[str, Any]  # the grid's parameters
    parameters: Mapping[str, Any]  # all of the notebook's

    @property
    def label(self) -> str:
        """ "b=4, seq_len=256": the name of the cell in results.json and on the page."""
        return ", ".join(f"{name}={value_label(value)}" for name, value in self.varied.items())

    @property
    def id(self) -> str:
        """Name of its folder: readable, and its own for every choice of parameters."""
        text = json.dumps(self.parameters, sort_keys=True)
        slug = re.sub(r"[^A-Za-z0-9]+", "-", self.label).strip("-")[:48].rstrip("-") or "cell"
        return f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Sweep:
    """What will run, checked."""

    notebook: Notebook
    cells: tuple[Cell, ...]
    axes: Mapping[str, tuple[Any, ...]]
    definition: Mapping[str, Any]  # as in the file, with all defaults
    root: Path


@dataclass(frozen=True)
class Ending:
    """How a cell ended. `lost`: nothing of it is known, since its worker was lost or never began."""

    finished: bool
    reason: str = ""
    seconds: float = 0.0
    lost: bool = False
    attempts: int = 1
    reused: bool = False


@dataclass(frozen=True)
class SweepRun:
    """A sweep that has ended. `folder` is the finished one, or the unfinished one."""

    folder: Path
    endings: Mapping[str, Ending]  # by cell id
    interrupted: bool = False

    @property
    def finished(self) -> bool:
        return all(ending.finished for ending in self.endings.values())


class SweepReporter:
    """What a sweep tells on its way; this one keeps silent."""

    def start(self, sweep: Sweep, folder: Path, reused: int, stale: Mapping[str, int]) -> None: ...

    def cell(self, cell: Cell, ending: Ending, done: int, of: int) -> None: ...

    def again(self, cell: Cell, reason: str, attempt: int) -> None: ...

    def waiting(self, done: int, of: int) -> None: ...


def value_label(value: Any) -> str:
    """A parameter value in few characters: [128, 4096] -> "128+4096", None -> "none"."""
    if isinstance(value, list):
        return "+".join(map(value_label, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, str) else number_text(value).replace("\u202f", "")


def load_sweep(path: Path, *, root: Path | None = None) -> Sweep:
    """Read a sweep file.

    ```yaml
    notebook: 02_error_distribution
    profile: smoke            # of notebooks/params, or a file; default: the notebook's own values
    parameters: {b: 2}        # for every cell
    grid: {seq_len: [256, 1024], h_q: [4, 16]}
    threads: 1                # of torch in each cell, so that no number depends on the number of workers
    gpus: 0                   # that each cell gets for itself; with 0 it sees none
    time_limit: 3600          # seconds, each cell
    compare: [worst_row_error, relative_error.zero_mean.total]   # default: the notebook's key numbers
    ```

    Raises:
        ReportError: for anything that does not fit, before anything is written.
    """
    loaded = load_yaml(path)
    return plan_sweep(loaded, str(path), root=root)


def plan_sweep(loaded: Any, where: str, *, root: Path | None = None) -> Sweep:
    """A sweep from what its file holds; see `load_sweep`."""
    root = root or repository_root()
    if not isinstance(loaded, dict):
        raise ReportError(f"{where}: expected a mapping with the keys notebook and grid, got {str(loaded)[:100]!r}")
    for key in loaded:
        if key not in KEYS:
            raise ReportError(f"{where}: unknown key {key!r}; {nearest(key, KEYS)}")
    if not isinstance(loaded.get("notebook"), str):
        raise ReportError(f"{where}: notebook: expected a name or number, got {loaded.get('notebook')!r}")
    notebook = choose([loaded["notebook"]], root / "notebooks")[0]
    fixed, grid = loaded.get("parameters") or {}, loaded.get("grid") or {}
    if not isinstance(fixed, dict):
        raise ReportError(f"{where}: parameters: expected a mapping `name: value`, got {str(fixed)[:100]!r}")
    if not isinstance(grid, dict) or not grid or not all(isinstance(v, list) and v for v in grid.values()):
        raise ReportError(
            f"{where}: grid: expected a mapping `name: [value, value]` with one list or more, got {str(grid)[:100]!r}"
        )
    count = math.prod(len(values) for values in grid.values())
    if count > MOST_CELLS:
        raise ReportError(f"{where}: grid: expected at most {MOST_CELLS} cells, got {count}: split the sweep")
    both = set(fixed) & set(grid)
    if both:
        raise ReportError(f"{where}: {sorted(both)[0]!r} is given under parameters and under grid: keep one")
    profile = loaded.get("profile")
    listed = load_profile(profile, root / "notebooks").get(notebook.name, {}) if profile else {}
    cells = []
    for values in itertools.product(*grid.values()):
        given = {**fixed, **dict(zip(grid, values, strict=True))}
        settled = settle([notebook], {notebook.name: listed}, given)[notebook.name]
        cells.append(Cell({name: settled[name] for name in grid}, settled))
    seen: dict[str, Cell] = {}
    for cell in cells:
        if cell.id in seen:
            raise ReportError(f"{where}: grid: the cell {cell.label} is there twice: give every value once")
        seen[cell.id] = cell
    axes: dict[str, tuple[Any, ...]] = {}
    for name in grid:
        axes[name] = tuple(json.loads(text) for text in dict.fromkeys(json.dumps(cell.varied[name]) for cell in cells))
    definition = {
        "notebook": notebook.name,
        "profile": profile or "",
        "parameters": fixed,
        "grid": grid,
        "threads": _count(loaded, "threads", 1, 1, where),
        "gpus": _count(loaded, "gpus", 0, 0, where),
        "time_limit": _seconds(loaded, where),
        "compare": _compare(loaded, where),
    }
    return Sweep(notebook, tuple(cells), _axes(grid, cells), definition, root)


def _axes(grid: Iterable[str], cells: Sequence[Cell]) -> dict[str, tuple[Any, ...]]:
    """The values of each parameter of the grid, each once, in their order."""
    texts = {name: dict.fromkeys(json.dumps(cell.varied[name]) for cell in cells) for name in grid}
    return {name: tuple(map(json.loads, values)) for name, values in texts.items()}


def _count(loaded: Mapping[str, Any], key: str, default: int, least: int, where: str) -> int:
    text = str(loaded.get(key, default))
    if not re.fullmatch(r"\d{1,4}", text) or int(text) < least:
        raise ReportError(f"{where}: {key}: expected an integer of at least {least}, got {text!r}")
    return int(text)


def _seconds(loaded: Mapping[str, Any], where: str) -> float:
    text = str(loaded.get("time_limit", TIME_LIMIT))
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise ReportError(f"{where}: time_limit: expected seconds above 0, got {text!r}")


def _compare(loaded: Mapping[str, Any], where: str) -> list[str]:
    names = loaded.get("compare") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ReportError(f"{where}: compare: expected a list of names of recorded values, got {str(names)[:100]!r}")
    return names


def fingerprint(sweep: Sweep, cell: Cell) -> dict[str, str]:
    """What decides the numbers of a cell. Another machine is not in it: a sweep may run on several."""
    package = Path(__file__).resolve().parents[1]
    return {
        "parameters": _hash(json.dumps(cell.parameters, sort_keys=True)),
        "threads": str(sweep.definition["threads"]),
        "gpus": str(sweep.definition["gpus"]),
        "time_limit": str(sweep.definition["time_limit"]),
        "notebook": sweep.notebook.sha256,
        "sources": _tree_hash([package, sweep.root / "csrc"], (".py", ".h", ".cpp", ".cu", ".cuh", ".txt")),
        "data": _tree_hash([sweep.root / "data"], ("",)),
        "versions": _hash(platform.python_version() + json.dumps(_versions())),
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _tree_hash(folders: Sequence[Path], endings: tuple[str, ...]) -> str:
    files = sorted(p for f in folders for p in f.rglob("*") if p.suffix in endings or "" in endings)
    pairs = [(str(p), file_hash(p)) for p in files if p.is_file() and "__pycache__" not in p.parts]
    return _hash(json.dumps([(Path(name).name, value) for name, value in pairs]))


def _versions() -> dict[str, str]:
    import importlib.metadata

    found = {}
    for name in MAIN_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@dataclass
class _Progress:
    """Where a running sweep stands."""

    endings: dict[str, Ending] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)


def run_sweep(
    sweep: Sweep,
    name: str,
    *,
    workers: int | None = None,
    address: str = "",
    reports_dir: Path | None = None,
    again: bool = False,
    command: Sequence[str] = (),
    reporter: SweepReporter | None = None,
) -> SweepRun:
    """Run a sweep and write `<reports_dir>/<name>`.

    Args:
        workers: cells at once. Default: as many as the machine's cores (or GPUs, where a cell takes some) allow; on a
            cluster, as many as it has room for.
        address: of a Ray cluster; "" runs here.
        again: run cells again that failed in an earlier run.

    Raises:
        ReportError: when the name cannot be used, another process writes this sweep, Ray is needed and missing or
            has not what the cells ask for, or the disk is full.
    """
    reporter = reporter or SweepReporter()
    reports = reports_dir or sweep.root / "reports"
    final = report_folder(reports, name)
    with folder_lock(reports / f".{name}.lock", f"the sweep {final}"):
        old, work = reports / f".{name}.old", reports / f"{name}.unfinished"
        if old.exists() and not final.exists():
            old.rename(final)
        for folder in (final, work):
            if folder.exists() and kind_of(folder) != "sweep":
                raise ReportError(f"--name: {folder} is not a sweep: {ANOTHER_NAME}")
        progress, interrupted = _Progress(), False
        try:
            (work / "cells").mkdir(parents=True, exist_ok=True)
            manifest = _manifest(sweep, name, command)
            write_json(work / "manifest.json", manifest)
            prints = _prints(sweep)
            stale = _take_over(sweep, work, final, prints, progress, again)
            reporter.start(sweep, work, len(progress.endings), stale)
            missing = [cell for cell in sweep.cells if cell.id not in progress.endings]
            if missing:
                interrupted = _run_missing(
                    sweep, missing, work, name, manifest, prints, progress, reporter, workers, address, command
                )
            _write_summary(sweep, work, manifest, progress)
            if not manifest["finished"]:
                return SweepRun(work, progress.endings, interrupted)
            finish_folder(work, final, old)
        except OSError as error:
            raise ReportError(
                f"not finished: {write_trouble(error, reports)}; what there is: {work}", exit_code=1
            ) from error
    return SweepRun(final, progress.endings)


def _prints(sweep: Sweep) -> dict[str, dict[str, str]]:
    shared = fingerprint(sweep, sweep.cells[0])
    return {
        cell.id: {**shared, "parameters": _hash(json.dumps(cell.parameters, sort_keys=True))} for cell in sweep.cells
    }


def _take_over(
    sweep: Sweep, work: Path, final: Path, prints: Mapping[str, Mapping[str, str]], progress: _Progress, again: bool
) -> Counter[str]:
    """Cells of earlier runs that need not run; returns why others must, and how many."""
    stale: Counter[str] = Counter()
    for cell in sweep.cells:
        here = work / "cells" / cell.id
        for folder in (here, final / "cells" / cell.id):
            if not folder.is_dir():
                continue
            ending, why = _earlier(folder, sweep.notebook.name, prints[cell.id])
            if ending is None or (again and not ending.finished):
                stale.update([why] if why else [])
                continue
            if folder != here:
                shutil.rmtree(here, ignore_errors=True)
                shutil.copytree(folder, here)
            progress.endings[cell.id] = ending
            break
        else:
            shutil.rmtree(here, ignore_errors=True)
    known = {cell.id for cell in sweep.cells}
    for folder in (work / "cells").iterdir():
        if folder.name not in known:
            shutil.rmtree(folder)
    return stale


def _earlier(folder: Path, notebook: str, expected: Mapping[str, str]) -> tuple[Ending | None, str]:
    """How the cell in a folder ended; None, and why, if it does not count."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        entry, was = manifest["notebooks"][notebook], manifest["cell"]["fingerprint"]
        finished, reason, seconds = bool(entry["finished"]), str(entry["reason"]), float(entry["seconds"])
        edited = edited_files(folder) if finished else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"damaged ({type(error).__name__})"
    if edited:
        return None, edited[0]
    other = [key for key in expected if was.get(key) != expected[key]]
    if other:
        return None, f"other {', '.join(other)}"
    return Ending(finished, reason, seconds, reused=True), ""


def _manifest(sweep: Sweep, name: str, command: Sequence[str]) -> dict[str, Any]:
    return {
        "format": 1,
        "kind": "sweep",
        "name": name,
        "profile": sweep.definition["profile"],
        "command": shlex.join(command),
        "started": now(),
        "ended": "",
        "seconds": 0.0,
        "finished": False,
        **environment(sweep.root),
        "sweep": dict(sweep.definition),
        "notebooks": {},
    }


def _run_missing(
    sweep: Sweep, missing: Sequence[Cell], work: Path, name: str, manifest: Mapping[str, Any],
    prints: Mapping[str, Mapping[str, str]], progress: _Progress, reporter: SweepReporter,
    workers: int | None, address: str, command: Sequence[str],
) -> bool:  # fmt: skip
    """Run cells until each has ended; True when interrupted."""
    definition = sweep.definition
    cells = {cell.id: cell for cell in missing}
    variables = {name: str(definition["threads"]) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    if not definition["gpus"]:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    engine = _engine(sweep, len(missing), workers, address)

    def submit(cell: Cell) -> None:
        progress.attempts[cell.id] = progress.attempts.get(cell.id, 0) + 1
        engine.submit(
            {
                "id": cell.id,
                "root": "" if address else str(sweep.root),
                "notebook": os.path.relpath(sweep.notebook.path, sweep.root),
                "parameters": dict(cell.parameters),
                "variables": variables,
                "time_limit": definition["time_limit"],
                "profile": definition["profile"],
                "command": list(command),
                "repository": manifest["repository"],
                "cell": {
                    "sweep": name, "label": cell.label, "varied": dict(cell.varied),
                    "path": f"reports/{name}/cells/{cell.id}", "variables": variables,
                    "fingerprint": dict(prints[cell.id]),
                },
            }
        )  # fmt: skip

    try:
        for cell in missing:
            submit(cell)
        while len(progress.endings) < len(sweep.cells):
            for key, result in engine.ended(60.0):
                attempt = progress.attempts[key]
                if isinstance(result, engines.LostWorker) and attempt < ATTEMPTS:
                    reporter.again(cells[key], str(result), attempt)
                    submit(cells[key])
                    continue
                ending = _store(result, work / "cells" / key, sweep.notebook.name, attempt)
                progress.endings[key] = ending
                reporter.cell(cells[key], ending, len(progress.endings), len(sweep.cells))
            reporter.waiting(len(progress.endings), len(sweep.cells))
    except KeyboardInterrupt:
        for key in cells:
            progress.endings.setdefault(key, Ending(False, "not run: interrupted before", lost=True, attempts=0))
        return True
    finally:
        engine.close()
    return False


def _engine(sweep: Sweep, cells: int, workers: int | None, address: str) -> engines.Engine:
    definition = sweep.definition
    if not engines.has_ray() and not address and workers == 1:
        return engines.Sequence()
    if not engines.has_ray():
        raise ReportError(
            f"Ray is not installed, and {'a cluster' if address else 'more than one worker'} needs it: "
            f"{engines.INSTALL}; or --workers 1 runs the cells one after another without it"
        )
    if workers is None and not address:
        room = len(os.sched_getaffinity(0)) // definition["threads"]
        workers = max(1, min(room, cells))
    return engines.RayEngine(
        workers=workers, threads=definition["threads"], gpus=definition["gpus"], address=address, root=sweep.root
    )


def _store(result: bytes | Exception, folder: Path, notebook: str, attempts: int) -> Ending:
    if isinstance(result, engines.LostWorker):
        return Ending(False, f"{result}; tried {attempts} times", lost=True, attempts=attempts)
    if isinstance(result, Exception):
        text = str(result).strip().splitlines()
        reason = f"{type(result).__name__}: {text[0] if text else ''}"
        return Ending(False, reason, lost=True, attempts=attempts)
    engines.unpack(result, folder)
    entry = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["notebooks"][notebook]
    finished = bool(entry["finished"]) and (folder / FINISHED).is_file()
    return Ending(finished, entry["reason"], entry["seconds"], attempts=attempts)


def _write_summary(sweep: Sweep, work: Path, manifest: dict[str, Any], progress: _Progress) -> None:
    """results.json (what repeats, whatever ran the cells), timings.json, sweep.csv, manifest.json and the page."""
    from mla_kernels.report.compare import render_comparison

    results: dict[str, Any] = {"notebooks": {}}
    timings: dict[str, Any] = {}
    for cell in sweep.cells:
        ending = progress.endings[cell.id]
        manifest["notebooks"][cell.label] = {
            "path": os.path.relpath(sweep.notebook.path, sweep.root), "title": sweep.notebook.title,
            "sha256": sweep.notebook.sha256, "parameters": dict(cell.parameters), "cell": cell.id,
            "finished": ending.finished, "reason": ending.reason, "seconds": ending.seconds, "lost": ending.lost,
            "attempts": ending.attempts,
        }  # fmt: skip
        folder = work / "cells" / cell.id
        for name, into in (("results.json", results["notebooks"]), ("timings.json", timings)):
            if (folder / name).is_file():
                loaded = json.loads((folder / name).read_text(encoding="utf-8"))
                entry = loaded.get("notebooks", loaded).get(sweep.notebook.name)
                if entry:
                    into[cell.label] = entry
    manifest["ended"] = now()
    started = datetime.datetime.fromisoformat(manifest["started"])
    manifest["seconds"] = (datetime.datetime.fromisoformat(manifest["ended"]) - started).total_seconds()
    manifest["finished"] = all(ending.finished for ending in progress.endings.values())
    write_json(work / "results.json", results)
    write_json(work / "timings.json", timings)
    write_json(work / "manifest.json", manifest)
    write_text(work / "index.html", render_comparison(sweep, work, manifest, progress.endings, results, timings))


def sweep_again(manifest: Mapping[str, Any], reports: Path, root: Path) -> tuple[Path, bool]:
    """Run the cells of a finished sweep again, from its manifest, into `reports`; (folder, interrupted)."""
    definition = manifest["sweep"]
    grid = list(definition["grid"])
    entries = list(manifest["notebooks"].values())
    notebook = Notebook(root / entries[0]["path"])
    cells = []
    for entry in entries:
        settled = settle([notebook], {notebook.name: entry["parameters"]}, {})[notebook.name]
        cells.append(Cell({name: settled[name] for name in grid}, settled))
    sweep = Sweep(notebook, tuple(cells), _axes(grid, cells), definition, root)
    workers = None if engines.has_ray() else 1
    done = run_sweep(sweep, manifest["name"], workers=workers, reports_dir=reports, command=["verify"])
    return done.folder, done.interrupted
