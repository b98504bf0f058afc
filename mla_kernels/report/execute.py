# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Run one notebook in its own processes and say how it ended. Nothing is left running, whatever happens."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from mla_kernels.report.files import write_text, write_trouble
from mla_kernels.report.parameters import Notebook
from mla_kernels.report.processes import end_marked

__all__ = ["Outcome", "Progress", "execute", "package_path"]

# After `stop`, the worker saves the partial notebook; this is far more than that takes.
GRACE_SECONDS = 20.0

# torch's threads sleep while they wait, unless the caller's environment says otherwise: threads that spin make a
# notebook five times slower as soon as anything else runs on the machine (measured on two cores).
OMP_WAIT_POLICY = "PASSIVE"

# Optional parts of the worker's packages that take seconds to import and that it does not use: papermill's Hadoop
# storage, jsonschema's checker of IRIs.
WORKER = """
import sys
sys.modules.update(rfc3987_syntax=None, pyarrow=None)
from mla_kernels.report.worker import main
sys.exit(main())
"""


@dataclass(frozen=True)
class Progress:
    """The cell that has just started."""

    index: int
    of: int
    number: int  # among the code cells of the notebook file, from 1
    line: str
    heading: str

    def __str__(self) -> str:
        line = self.line if len(self.line) <= 70 else self.line[:69] + "…"
        under = f" under “{self.heading}”" if self.heading else ""
        return f"code cell {self.number}{under}: {line}"


@dataclass(frozen=True)
class Outcome:
    """How a notebook ended. `finished` means: every cell ran, page.finish() was reached, and all claims hold."""

    notebook: str
    finished: bool
    reason: str = ""
    cell: Progress | None = None
    seconds: float = 0.0
    interrupted: bool = False
    ran: bool = True


def execute(
    notebook: Notebook,
    folder: Path,
    parameters: Mapping[str, Any],
    *,
    time_limit: float,
    variables: Mapping[str, str] | None = None,
    on_progress: Callable[[Progress | None, float], None] = lambda progress, seconds: None,
) -> Outcome:
    """Run a notebook into the report folder `folder`.

    Writes `<name>.ipynb` (partial if it fails) and, through the page, figures, tables and `results/<name>.json`;
    text output goes in full to `logs/<name>.txt`. The kernel is this interpreter, in the notebook's own folder.

    Args:
        parameters: settled values (see `parameters.settle`); `report_dir` is added for notebooks that have it.
        time_limit: seconds of wall clock.
        variables: environment variables that the notebook gets besides those of the caller.
        on_progress: called for every cell that starts and about once a second, with the seconds so far.
    """
    output, logs = folder / f"{notebook.name}.ipynb", folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    raw = logs / f"{notebook.name}.kernel.txt"
    read_end, write_end = os.pipe()
    mark = uuid.uuid4().hex
    job = {
        "input": str(notebook.path),
        "output": str(output),
        "parameters": {**parameters, **({"report_dir": str(folder)} if "report_dir" in notebook.defaults else {})},
        "cwd": str(notebook.path.parent),
        "log": str(logs / f"{notebook.name}.txt"),
        "events": write_end,
        "mark": mark,
    }
    start = time.monotonic()
    with raw.open("wb") as raw_file:
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE, stdout=raw_file, stderr=raw_file, pass_fds=(write_end,), start_new_session=True,
            env={"OMP_WAIT_POLICY": OMP_WAIT_POLICY, **os.environ, "PYTHONPATH": package_path(), **(variables or {})},
        )  # fmt: skip
    os.close(write_end)
    assert worker.stdin is not None
    watch = _Watch(worker, read_end, start, on_progress)
    try:
        _say(worker, json.dumps(job))
        watch.until(start + time_limit)
        interrupted, reason = False, watch.reason
        if worker.poll() is None and not watch.ended:
            reason = f"stopped at the time limit of {time_limit:g} s"
            _stop(worker, watch, reason)
    except KeyboardInterrupt:
        interrupted, reason = True, "interrupted"
        _stop(worker, watch, reason)
    finally:
        _end_everything(worker, mark)
        os.close(read_end)
    seconds = time.monotonic() - start
    if not watch.ran and not reason:
        reason = f"the notebook's worker ended with exit code {worker.returncode} (see logs/{raw.name})"
    if not reason or reason.startswith("AssertionError"):
        reason = _verdict(folder, notebook.name, failed=bool(reason)) or reason
    if re.search(rf"No space left on device: '{re.escape(str(folder))}", reason):
        reason = write_trouble(OSError(errno.ENOSPC, ""), folder)
    if output.exists():
        try:
            _tidy(output)
        except OSError as error:
            reason = reason or write_trouble(error, folder)
        except ValueError as error:
            reason = reason or f"{output.name} is damaged: {type(error).__name__}: {str(error)[:200]}"
    if raw.exists() and not raw.stat().st_size:
        raw.unlink()
    return Outcome(
        notebook.name, finished=not reason, reason=reason, cell=None if watch.ran else watch.progress,
        seconds=round(seconds, 3), interrupted=interrupted,
    )  # fmt: skip


class _Watch:
    """Reads the worker's events."""

    def __init__(
        self,
        worker: subprocess.Popen[bytes],
        read_end: int,
        start: float,
        on_progress: Callable[[Progress | None, float], None],
    ) -> None:
        self.worker, self.read_end, self.start, self.on_progress = worker, read_end, start, on_progress
        self.progress: Progress | None = None
        self.reason = ""
        self.ran = self.ended = False
        self._rest = b""

    def until(self, deadline: float) -> None:
        """Follow the worker until it ends or the deadline passes."""
        while not self.ended and time.monotonic() < deadline:
            wait = min(1.0, max(deadline - time.monotonic(), 0.0))
            ready, _, _ = select.select([self.read_end], [], [], wait)
            data = os.read(self.read_end, 1 << 16) if ready else None
            if data == b"":
                self.ended = True
                break
            *lines, self._rest = (self._rest + (data or b"")).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            self.on_progress(self.progress, time.monotonic() - self.start)

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "cell":
            self.progress = Progress(**event)
        elif kind == "failed":
            self.reason = self.reason or event["reason"]
        elif kind == "ran":
            self.ran = True


def package_path() -> str:
    """PYTHONPATH with which this package can be imported in another process, installed or not."""
    return os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])


def _say(worker: subprocess.Popen[bytes], line: str) -> None:
    assert worker.stdin is not None
    try:
        worker.stdin.write(line.encode() + b"\n")
        worker.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended; the caller sees how


def _stop(worker: subprocess.Popen[bytes], watch: _Watch, reason: str) -> None:
    """Ask the worker to end the kernel and to save what there is."""
    _say(worker, f"stop: {reason}")
    with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: no more waiting
        watch.until(time.monotonic() + GRACE_SECONDS)


def _end_everything(worker: subprocess.Popen[bytes], mark: str) -> None:
    try:
        worker.wait(timeout=5 if worker.poll() is None else 0)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()
    end_marked(mark)
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        worker.stdin.close()


def _verdict(folder: Path, name: str, failed: bool) -> str:
    """Why a notebook whose cells all ran is not finished; "" if it is."""
    path = folder / "results" / f"{name}.json"
    if not path.is_file():
        return "" if failed else "every cell ran, but page.finish() was not reached"
    claims = json.loads(path.read_text(encoding="utf-8"))["claims"]
    bad = [claim["claim"] for claim in claims if not claim["ok"]]
    return f"{len(bad)} of {len(claims)} claims do not hold: {'; '.join(bad)}" if bad else ""


def _tidy(path: Path) -> None:
    """Leave nothing of this machine's folders and no papermill banners in the notebook that is sent on."""
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    papermill = notebook.metadata.get("papermill", {})
    for key in ("input_path", "output_path"):
        papermill[key] = Path(papermill.get(key) or path).name
    if "parameters" in papermill:
        papermill["parameters"].pop("report_dir", None)
    notebook.cells = [c for c in notebook.cells if "papermill-error-cell-tag" not in c.metadata.get("tags", [])]
    for cell in notebook.cells:
        if "injected-parameters" in cell.metadata.get("tags", []):
            lines = [
                'report_dir = "."' if line.startswith("report_dir = ") else line for line in cell.source.splitlines()
            ]
            cell.source = "\n".join(lines)
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    write_text(path, nbformat.writes(notebook) + "\n")


def _joined(outputs: list[Any]) -> list[Any]:
    """Neighbouring pieces of one stream as one output, with overwritten progress lines left out."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if output.output_type == "stream" and last is not None and last.get("name") == output.name:
            last.text += output.text
        else:
            joined.append(output)
    for output in joined:
        if output.output_type == "stream":
            output.text = re.sub(r"[^\n]*\r(?=[^\n])", "", output.text.replace("\r\n", "\n"))
    return joined
