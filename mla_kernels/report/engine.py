# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Where the cells of a sweep run: on Ray, or one after another in this process where Ray is not installed.

A cell is a report of its own, made in a temporary folder where it runs and brought back as one archive. So nothing
half-done reaches the sweep's folder, and a machine of a cluster needs no disk in common with this one.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from mla_kernels.report.errors import ReportError
from mla_kernels.report.execute import package_path
from mla_kernels.report.parameters import Notebook
from mla_kernels.report.runner import Plan, run_report

__all__ = ["Engine", "LostWorker", "RayEngine", "Sequence", "has_ray", "run_cell", "unpack"]

INSTALL = "pip install 'mla-kernels[cluster]'"
OBJECTS = 256 << 20  # bytes of Ray's object store on this machine; a cell's archive is under a few megabytes
STARTS = 4  # tries to start Ray here, which gives up after 30 s, too few on a machine that is busy
LEFT_OUT = [".git", ".venv", "reports", "build", "**/__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"]


# Some of Ray's processes outlive a killed parent.
WARDEN = """
import sys
from mla_kernels.report.processes import end_children
end_children(int(sys.argv[1]), sys.argv[2])
"""


class LostWorker(Exception):
    """The process, or machine, that ran a cell is gone: of the cell nothing is known."""


class Engine(Protocol):
    """Runs jobs; see `run_cell` for what a job is."""

    def submit(self, job: Mapping[str, Any]) -> None:
        """Start a job, now or when a worker is free."""

    def ended(self, timeout: float) -> list[tuple[str, bytes | Exception]]:
        """(id, archive or error) of jobs that have ended; waits for the first of them, `timeout` seconds at most."""

    def close(self) -> None:
        """End everything, also what runs."""


def has_ray() -> bool:
    """Whether Ray can be imported."""
    import importlib.util

    return importlib.util.find_spec("ray") is not None


def run_cell(job: Mapping[str, Any]) -> bytes:
    """Run one cell and return its report folder as an archive.

    Args:
        job: `id`, `root` (of the checkout; "" means the working folder), `notebook` (path in it), `parameters`,
            `variables` (of its environment), `time_limit`, `scratch` (a folder for its files; default: where temporary
            files go); for the manifest `profile`, `command`, `repository`, `cell`.

    Raises:
        ReportError: when the cell's report could not be written.
    """
    root = Path(job["root"] or os.getcwd())
    notebook = Notebook(root / job["notebook"])
    plan = Plan(
        (notebook,), {notebook.name: job["parameters"]}, job["profile"], root,
        variables=job["variables"], repository=job["repository"], cell=job["cell"],
    )  # fmt: skip
    scratch = job.get("scratch") or None
    with tempfile.TemporaryDirectory(prefix="mla-sweep-", dir=scratch, ignore_cleanup_errors=True) as folder:
        done = run_report(
            plan, job["id"], reports_dir=Path(folder), time_limit=job["time_limit"], command=job["command"]
        )
        if done.interrupted:
            raise KeyboardInterrupt
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w:gz", compresslevel=1) as archive:
            archive.add(done.folder, arcname=".")
        return data.getvalue()


def unpack(data: bytes, folder: Path) -> None:
    """Write the archive of a cell to `folder`, all of it or, when that fails, none."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            archive.extractall(part, filter="data")
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


class Sequence:
    """One cell after another, in this process."""

    def __init__(self) -> None:
        self._jobs: deque[Mapping[str, Any]] = deque()

    def submit(self, job: Mapping[str, Any]) -> None:
        self._jobs.append(job)

    def ended(self, timeout: float) -> list[tuple[str, bytes | Exception]]:
        if not self._jobs:
            return []
        job = self._jobs.popleft()
        try:
            return [(job["id"], run_cell(job))]
        except (ReportError, OSError) as error:
            return [(job["id"], error)]

    def close(self) -> None:
        self._jobs.clear()


class RayEngine:
    """A Ray task a cell. Ray does not retry: what a lost worker means is for the caller to say.

    Args:
        workers: cells that run at once; on a cluster None leaves it to the cluster's processors and GPUs.
        threads: processors that a cell takes on a cluster, where they are shared with others.
        gpus: GPUs that a cell takes; Ray shows a cell its own ones only.
        address: of a running cluster ("host:port", "ray://host:port" or "auto"); "" starts one on this machine, which
            ends with this object.
        root: the checkout. On a cluster it is sent to the machines, without its history and environment.
    """

    def __init__(self, *, workers: int | None, threads: int, gpus: int, address: str, root: Path) -> None:
        ray = _import_ray()
        self.ray, self._folder = ray, ""
        self._warden: subprocess.Popen[bytes] | None = None
        self._running: dict[Any, str] = {}
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        if address:
            options |= {"address": address, "runtime_env": {"working_dir": str(root), "excludes": LEFT_OUT}}
        else:
            self._folder = tempfile.mkdtemp(prefix="mla-ray-", dir="/tmp")  # short: sockets lie in it
            self._warden = subprocess.Popen(
                [sys.executable, "-c", WARDEN, str(os.getpid()), self._folder], stdin=subprocess.PIPE,
                start_new_session=True, env={**os.environ, "PYTHONPATH": package_path()},
            )  # fmt: skip
            options |= {
                "address": "local", "num_cpus": workers or 1, "include_dashboard": False, "_temp_dir": self._folder,
                "object_store_memory": OBJECTS,
            }  # fmt: skip
        try:
            with _quiet():
                self._connect(options, address)
            self._start(workers, 1 if not address else threads, gpus, address)
        except BaseException:
            self.close()
            raise

    def _connect(self, options: Mapping[str, Any], address: str) -> None:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            if port.isdigit():  # Ray itself would try for ten minutes
                socket.create_connection((host, int(port)), timeout=10).close()
            for left in reversed(range(STARTS)):
                try:
                    self.ray.init(**options)
                    break
                except Exception as error:
                    self.ray.shutdown()
                    if address or not left or "timed out during startup" not in str(error):
                        raise
        except Exception as error:  # a node that does not come up is a bare Exception
            text = " ".join(str(error).split())[:200]
            if not address:
                raise ReportError(f"Ray does not start on this machine: {text}", exit_code=1) from error
            raise ReportError(
                f"--address: no Ray cluster can be used at {address!r}: {text}. Is it up (ray status), of this version "
                f"({self.ray.__version__}) and, if it asks for a token, RAY_AUTH_MODE=token set here?"
            ) from error

    def _start(self, workers: int | None, cpus: int, gpus: int, address: str) -> None:
        there = self.ray.cluster_resources()
        where = f"the cluster at {address}" if address else "this machine"
        if gpus > there.get("GPU", 0):
            raise ReportError(
                f"gpus: {gpus} a cell are asked for, and {where} has {there.get('GPU', 0):g}: "
                "write gpus: 0, or give --address of a cluster that has some"
            )
        if cpus > there.get("CPU", 0):
            raise ReportError(
                f"threads: {cpus} a cell are asked for, and {where} has {there.get('CPU', 0):g} processors in all"
            )
        self.limit = workers if address else None
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._task = self.ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(run_cell)

    def submit(self, job: Mapping[str, Any]) -> None:
        self._waiting.append(job)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and (self.limit is None or len(self._running) < self.limit):
            job = self._waiting.popleft()
            self._running[self._task.remote({**job, "scratch": self._folder})] = job["id"]  # which goes with Ray

    def ended(self, timeout: float) -> list[tuple[str, bytes | Exception]]:
        done, _ = self.ray.wait(list(self._running), num_returns=1, timeout=timeout)
        found = [(self._running.pop(reference), self._result(reference)) for reference in done]
        self._fill()
        return found

    def _result(self, reference: Any) -> bytes | Exception:
        errors = self.ray.exceptions
        try:
            data: bytes = self.ray.get(reference)
            return data
        except errors.RayTaskError as error:  # raised by run_cell
            cause = getattr(error, "cause", error)
            return cause if isinstance(cause, Exception) else error
        except errors.OutOfMemoryError:
            return LostWorker("its worker was ended by Ray: the machine was out of memory")
        except errors.RayError as error:
            lines = str(error).strip().splitlines()
            return LostWorker(f"its worker is gone ({type(error).__name__}: {lines[0][:160] if lines else ''})")

    def close(self) -> None:
        with _quiet():
            if self.ray.is_initialized():
                for reference in self._running:
                    with contextlib.suppress(Exception):
                        self.ray.cancel(reference, force=True)
                self.ray.shutdown()
        if self._warden is not None and self._warden.stdin is not None:
            self._warden.stdin.close()
            self._warden.wait()


def _import_ray() -> Any:
    # Read when Ray is imported and by what it starts. Its workers would run at the lowest priority but one.
    for name, value in (
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("RAY_worker_niceness", "0"),
        ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1"),
    ):
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise ReportError(f"Ray is not installed, and more than one worker needs it: {INSTALL}") from None
    return ray


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what Ray says while it starts and stops off the terminal, and its handler of SIGTERM away from ours."""
    import logging
    import warnings

    handler = signal.getsignal(signal.SIGTERM)
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.signal(signal.SIGTERM, handler)
