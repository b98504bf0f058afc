# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Child processes that serve: started on the GPUs they are given, logged to a file, ended with all they started."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Child", "Ended", "defaults", "environment", "gpus", "probe", "run_all", "run_child"]

_SUPERVISE = Path(__file__).resolve().parents[1] / "_supervise.py"
#: What every child gets, unless it is set already. NVLink multicast stays off: not every host has it for all GPUs.
DEFAULTS = {
    "NCCL_NVLS_ENABLE": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # else the first call compiles it
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
#: The same on a CPU: GiB of cache, where vLLM would take most of the memory; no core kept free; no engine in a process
#: of its own, whose start takes a third of a short run.
CPU_DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_PROBE = """
import importlib.metadata as metadata, json, platform
def version(*names):
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
import torch
points = metadata.entry_points(group="vllm.general_plugins")
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
    "vllm": version("vllm-cpu", "vllm"), "lm_eval": version("lm_eval"), "transformers": version("transformers"),
    "plugins": sorted(point.value for point in points if point.value.startswith("mla_kernels")),
}))
"""


@dataclass(frozen=True)
class Child:
    """A command to run. `gpus`: how many it needs; `label`: names its log."""

    label: str
    command: Sequence[str]
    gpus: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a child ended: `code` None: ended because `reason`."""

    child: Child
    code: int | None
    seconds: float
    log: Path
    on: tuple[str, ...] = ()
    reason: str = ""


def gpus() -> list[dict[str, str]]:
    """index, name, driver of the GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES allows; CUDA stays untouched."""
    query = ["nvidia-smi", "--query-gpu=index,name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = [dict(zip(("index", "name", "driver"), map(str.strip, line.split(",")), strict=False))
             for line in said.splitlines() if line.strip()]  # fmt: skip
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    wanted = [word.strip() for word in visible.split(",") if word.strip()]
    return [gpu for index in wanted for gpu in found if gpu["index"] == index]


def defaults() -> dict[str, str]:
    """What a child's environment gets where it is unset."""
    return DEFAULTS if gpus() else DEFAULTS | CPU_DEFAULTS


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: this one, `defaults` where unset, this package's folder on PYTHONPATH, `more`."""
    path = [str(_SUPERVISE.parents[1]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**defaults(), **os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), **(more or {})}


def probe(python: str, seconds: float = 120) -> dict[str, Any]:
    """Versions that an interpreter has: python, torch, cuda, vllm, lm_eval, transformers, and our plugins in it.

    Raises:
        FileNotFoundError: when it cannot be run, or has no vLLM.
    """
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=seconds, env=environment(), check=False
        )
        found = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        raise FileNotFoundError(f"python: cannot ask {python} for its versions: {error}") from error
    if found is None:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise FileNotFoundError(f"python: {python} has no torch: {last}")
    if not found.get("vllm"):
        raise FileNotFoundError(
            f"python: {python} has no vLLM: name an interpreter that has it with --python; without a GPU, "
            "`make serve` makes one in .venv-vllm"
        )
    return dict(found)


def run_child(
    child: Child, *, log: Path, seconds: float, on: Sequence[str] = (), stop: threading.Event | None = None
) -> Ended:
    """Run one child to its end, or end it (with all it started) after `seconds` or when `stop` is set.

    It runs in the root of the checkout. Its output, both streams, goes to `log`, after a line with the command. It does
    not outlive this process.
    """
    variables = environment(child.environment)
    if on:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(on)
        # engines that start at the same time would write the same compiled graphs
        variables.setdefault("VLLM_CACHE_ROOT", os.path.join(tempfile.gettempdir(), f"mla-vllm-cache-{'-'.join(on)}"))
    log.parent.mkdir(parents=True, exist_ok=True)
    supervisor = [sys.executable, "-P", "-S", str(_SUPERVISE), str(os.getpid()), *child.command]
    begun, reason, code = time.monotonic(), "", None
    with open(log, "wb") as out:
        out.write(("$ " + " ".join(child.command) + "\n").encode())
        out.flush()
        process = subprocess.Popen(
            supervisor, stdin=subprocess.PIPE, stdout=out, stderr=out, env=variables, cwd=_SUPERVISE.parents[1],
            start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        try:
            while code is None and not reason:
                try:
                    code = process.wait(0.2)
                except subprocess.TimeoutExpired:
                    if stop is not None and stop.is_set():
                        reason = "stopped"
                    elif time.monotonic() - begun > seconds:
                        reason = f"no end within {seconds:.0f} s"
        finally:
            process.stdin.close()  # the supervisor then ends everything
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            _end_group(process.pid)  # an engine that its parent left behind would hold the GPU's memory
            process.wait()
    return Ended(child, code, time.monotonic() - begun, log, tuple(on), reason)


def _end_group(group: int) -> None:
    end = time.monotonic() + 20
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < end:
            os.killpg(group, signal.SIGKILL)
            time.sleep(0.05)


def run_all(
    children: Iterable[Child],
    *,
    folder: Path,
    seconds: float,
    cards: Sequence[str] = (),
    at_once: int = 1,
    deadline: float | None = None,
    done: Callable[[Ended], object] = lambda ended: None,
) -> list[Ended]:
    """Run children in their order, up to `at_once` at a time, each on GPUs of its own among `cards` (indices).

    Args:
        folder: of the logs.
        seconds: limit of each child.
        deadline: time.monotonic() after which none runs; those that could not start end with a reason.
        done: called in this thread with each as it ends.

    Raises:
        ValueError: when a child needs more GPUs than there are.
    """
    listed = list(children)
    for child in listed:
        if child.gpus > len(cards):
            raise ValueError(f"gpus: {child.label} needs {child.gpus}, there are {len(cards)}")
    free, lock, stop = list(cards), threading.Condition(), threading.Event()
    ended: queue.SimpleQueue[Ended | BaseException] = queue.SimpleQueue()

    def one(child: Child) -> None:
        with lock:
            lock.wait_for(lambda: len(free) >= child.gpus or stop.is_set())
            mine = [free.pop(0) for _ in range(min(child.gpus, len(free)))]
        log = folder / f"{child.label}.log"
        left = seconds if deadline is None else min(seconds, deadline - time.monotonic())
        try:
            if stop.is_set() or left <= 0:
                ended.put(Ended(child, None, 0.0, log, reason="not started: no time was left"))
            else:
                ended.put(run_child(child, log=log, seconds=left, on=mine, stop=stop))
        except BaseException as error:
            ended.put(error)
        finally:
            with lock:
                free[:0] = mine
                lock.notify_all()

    results: list[Ended] = []
    with ThreadPoolExecutor(max(1, at_once)) as pool:
        try:
            for child in listed:
                pool.submit(one, child)
            for _ in listed:
                result = ended.get()
                if isinstance(result, BaseException):
                    raise result
                results.append(result)
                done(result)
        finally:
            stop.set()
            with lock:
                lock.notify_all()
    return results
