# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The process that runs one notebook with papermill; `execute` starts it.

It reads a job (one line of JSON) from stdin and writes events (lines of JSON) to the descriptor named in the job.
stdin stays open: a second line `stop: REASON` ends the kernel and keeps the partial notebook; the end of stdin means
that the runner is gone, and everything goes with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, TextIO

import nbformat
import papermill
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellExecutionError, DeadKernelError
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from papermill.iorw import papermill_io

from mla_kernels.report.files import write_text
from mla_kernels.report.processes import MARK, end_marked

__all__ = ["main"]

KERNEL_NAME = "mla-report"


class State:
    """What the threads and the engine tell each other."""

    events: TextIO
    cell: Any = None  # the cell that runs, or ran last
    exit_code: int | None = None  # of a kernel that died
    error = ""  # that ended a cell
    stop_reason = ""
    done = False


def emit(**event: Any) -> None:
    print(json.dumps(event), file=State.events, flush=True)


class Output:
    """Where papermill saves the notebook, after every cell: atomically, or a full disk leaves half a notebook."""

    @staticmethod
    def write(text: str, path: str) -> None:
        write_text(Path(path), text, sync=False)

    @staticmethod
    def pretty_path(path: str) -> str:
        return path


class WatchedManager(AsyncKernelManager):
    """Kernel manager that remembers how the kernel ended."""

    async def is_alive(self) -> bool:  # type: ignore[override]
        if self.provisioner is not None and self.has_kernel:
            code = await self.provisioner.poll()
            if code is not None and State.exit_code is None:
                State.exit_code = code
        return bool(await super().is_alive())


class ReportEngine(NBClientEngine):
    """papermill's own engine, telling which cell runs."""

    @classmethod
    def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **kwargs: Any) -> Any:
        start, mark, number, heading = nb_man.cell_start, nb_man.cell_exception, 0, ""

        def cell_start(cell: Any, cell_index: int | None = None, **more: Any) -> None:
            nonlocal number, heading
            if cell.cell_type == "code" and "injected-parameters" not in cell.metadata.get("tags", []):
                number += 1
            if cell.cell_type == "markdown" and cell.source.lstrip().startswith("##"):
                heading = cell.source.lstrip().splitlines()[0].lstrip("# ")
            if cell.cell_type == "code":
                State.cell = cell
                line = next((text for text in cell.source.splitlines() if text.strip()), "")
                emit(event="cell", index=cell_index, of=len(nb_man.nb.cells), number=number, line=line, heading=heading)
            start(cell, cell_index, **more)

        def cell_exception(cell: Any, cell_index: int | None = None, **more: Any) -> None:
            if isinstance(error := more.get("exception"), CellExecutionError):
                State.error = f"{error.ename}: {error.evalue}".strip().removesuffix(":")
            mark(cell, cell_index, **more)

        nb_man.cell_start, nb_man.cell_exception = cell_start, cell_exception
        kwargs.pop("log_output", None)
        try:
            return super().execute_managed_notebook(nb_man, kernel_name, **kwargs)
        except Exception:
            # papermill calls the cell of a dead kernel, and all that follow, completed.
            if State.cell is not None:
                nb_man.cell_exception(State.cell)
            raise


def _listen(mark: str) -> None:
    """Wait for the runner's words, or its end."""
    for line in sys.stdin:
        if line.startswith("stop:"):
            State.stop_reason = line.removeprefix("stop:").strip()
            threading.Thread(target=_keep_ending, args=(mark,), daemon=True).start()
    if not State.done:
        end_marked(mark)
        os._exit(1)


def _keep_ending(mark: str) -> None:
    """End the kernel, also one that is only about to start."""
    while not State.done:
        end_marked(mark)
        time.sleep(0.2)


def _kernelspec(folder: Path, job: dict[str, Any]) -> None:
    """A private kernel specification: this interpreter, whatever the notebook names."""
    spec = folder / "kernels" / KERNEL_NAME
    spec.mkdir(parents=True)
    roots = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    argv = [
        sys.executable,
        "-m",
        "mla_kernels.report.kernel",
        job["log"],
        "-f",
        "{connection_file}",
        "--log-level=ERROR",
    ]
    env = {MARK: job["mark"], "PYTHONPATH": os.pathsep.join(roots), "IPYTHONDIR": str(folder / "ipython")}
    (spec / "kernel.json").write_text(
        json.dumps(
            {"argv": argv, "env": env, "display_name": "Report", "language": "python", "interrupt_mode": "signal"}
        )
    )
    os.environ["JUPYTER_RUNTIME_DIR"] = str(folder / "runtime")
    os.environ["JUPYTER_PATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("JUPYTER_PATH")])])


def _run(job: dict[str, Any]) -> None:
    papermill_io.register(job["output"], Output)
    notebook = papermill.execute_notebook(
        job["input"],
        job["output"],
        parameters=job["parameters"],
        engine_name="mla-report",
        kernel_name=KERNEL_NAME,
        language="python",
        cwd=job["cwd"],
        progress_bar=False,
        start_timeout=120,
        iopub_timeout=60,
        kernel_manager_class=WatchedManager,
    )
    if any(cell.metadata.get("papermill", {}).get("exception") for cell in notebook.cells):
        emit(event="failed", reason=State.error or "a cell failed")  # papermill lets sys.exit(0) pass
    else:
        emit(event="ran")


def _died() -> str:
    code = State.exit_code
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = "; out of memory?" if name == "SIGKILL" else ""
        return f"the kernel died of {name}{hint}"
    return "the kernel died" if code is None else f"the kernel ended with exit code {code}"


def _mark_partial(job: dict[str, Any], reason: str) -> None:
    """Say in the cell that ran last why the notebook ends there."""
    output = Path(job["output"])
    if not output.exists() or State.cell is None:
        return
    notebook = nbformat.read(output, as_version=4)
    for cell in notebook.cells:
        if cell.metadata.get("papermill", {}).get("exception"):
            cell.outputs.append(nbformat.v4.new_output("error", ename="NotFinished", evalue=reason, traceback=[reason]))
    write_text(output, nbformat.writes(notebook) + "\n")


def main() -> int:
    job = json.loads(sys.stdin.readline())
    State.events = os.fdopen(job["events"], "w", encoding="utf-8")
    threading.Thread(target=_listen, args=(job["mark"],), daemon=True).start()
    papermill_engines.register("mla-report", ReportEngine)
    with tempfile.TemporaryDirectory(prefix="mla-report-", ignore_cleanup_errors=True) as folder:
        _kernelspec(Path(folder), job)
        try:
            _run(job)
        except PapermillExecutionError as error:
            emit(event="failed", reason=State.error or f"{error.ename}: {error.evalue}")
        except Exception as error:
            dead = isinstance(error, DeadKernelError) or State.stop_reason or State.exit_code is not None
            reason = State.stop_reason or (_died() if dead else f"{type(error).__name__}: {error}")
            with contextlib.suppress(OSError):  # the disk is full: the reason is told all the same
                _mark_partial(job, reason)
            emit(event="failed", reason=reason)
    State.done = True
    return 0
