# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Clocks: interleaved calls on the CPU or between CUDA events, the limits of a device, and what device it was.

Ratios are only fair inside one run on one machine, so all contestants are timed in turns. Times are microseconds.

On a GPU a call is timed between two events on one stream, after a read of a buffer larger than L2 that leaves nothing
of its inputs there. (After a write the call would also pay for writing back what that left in L2, up to 7 µs on an
H200; what runs between two attention layers of a model mostly reads weights.) A call is captured into a CUDA graph
where that works, so that its host time does not count; one that cannot be captured is queued behind a kernel that only
waits, long enough for the host to have queued all of the call before the device comes to it. A row says which of the
two it was.
"""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mla_kernels.formats import D_V, D

__all__ = [
    "GpuClock",
    "Launch",
    "Timing",
    "ceilings",
    "clocks",
    "driver",
    "flops",
    "hardware",
    "interleaved",
    "moved_bytes",
    "timed",
]

L2_READ = 256 << 20  # bytes read before a timed call: five times the L2 of an H200
WAIT_MHZ = 2000  # no slower than the clock that the waiting kernel counts in: waits are rather too long
MAX_WAIT_US = 20_000


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
    _check_rounds(rounds)
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(warmup + rounds):
        for name, once in contestants.items():
            time.sleep(pause_s)
            us = once()
            if i >= warmup:
                samples[name].append(us)
    return {name: _timing(us) for name, us in samples.items()}


def _check_rounds(rounds: int) -> None:
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")


def _timing(samples: Sequence[float]) -> Timing:
    at = torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)
    median, p10, p90 = torch.quantile(torch.tensor(samples, dtype=torch.float64), at).tolist()
    return Timing(median, p10, p90, len(samples))


@dataclass(frozen=True)
class Launch:
    """A call ready to be timed. `how`: "graph" (a replay) or "eager"; `why`: what kept it from being captured.

    `keep` is the call itself: a graph knows addresses only, and its tensors have to live as long as it is replayed.
    """

    run: Callable[[], object]
    how: str
    host_us: float = 0.0
    why: str = ""
    keep: object = None


class GpuClock:
    """Times calls on one CUDA device with events, L2 cleared before each.

    Args:
        device: a CUDA device.
        l2_read: bytes read before each timed call; at least four times the device's L2.
        cuda: stands for `torch.cuda` in tests.
    """

    l2 = "cleared"

    def __init__(self, device: torch.device | str = "cuda", *, l2_read: int = L2_READ, cuda: Any = None) -> None:
        self._cuda = torch.cuda if cuda is None else cuda
        self._device = torch.device(device)
        size = max(l2_read, 4 * int(self._cuda.get_device_properties(self._device).L2_cache_size))
        with self._cuda.device(self._device):
            self._buffer = torch.zeros(size // 4, dtype=torch.int32, device=self._device)
            self._read = torch.zeros((), dtype=torch.int64, device=self._device)

    def launch(self, call: Callable[[], object], *, graph: bool = True) -> Launch:
        """Warm a call up and capture it; where capture fails, or `graph` is False, time it as it is.

        What the call itself raises outside a capture goes through.
        """
        cuda = self._cuda
        side = cuda.Stream(self._device)
        side.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(side):
            for _ in range(3):
                call()
        cuda.current_stream(self._device).wait_stream(side)
        cuda.synchronize(self._device)
        why = "asked for"
        if graph:
            try:
                captured = cuda.CUDAGraph()
                with cuda.graph(captured):
                    call()
                captured.replay()
                cuda.synchronize(self._device)
                return Launch(captured.replay, "graph", keep=call)
            except RuntimeError as error:
                why = (str(error).strip().splitlines() or [type(error).__name__])[0]
                cuda.synchronize(self._device)
        start = time.perf_counter()
        for _ in range(3):
            call()
        host_us = (time.perf_counter() - start) / 3 * 1e6
        cuda.synchronize(self._device)
        return Launch(call, "eager", host_us, why)

    def interleaved(self, launches: Mapping[str, Launch], *, rounds: int = 30, warmup: int = 3) -> dict[str, Timing]:
        """Time launches in turns, each round beginning with another; nothing is waited for until all are queued."""
        _check_rounds(rounds)
        marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in launches}
        with self._cuda.device(self._device):
            order = list(launches.items())
            for i in range(warmup + rounds):
                for name, launch in order[i % len(order) :] + order[: i % len(order)] if order else []:
                    torch.sum(self._buffer, (0,), out=self._read)
                    if launch.how == "eager":
                        self._cuda._sleep(int(min(2 * launch.host_us + 50, MAX_WAIT_US) * WAIT_MHZ))
                    start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    launch.run()
                    end.record()
                    if i >= warmup:
                        marks[name].append((start, end))
            self._cuda.synchronize(self._device)
        return {name: _timing([1e3 * a.elapsed_time(b) for a, b in pairs]) for name, pairs in marks.items()}


class CpuClock:
    """`GpuClock` for the CPU: wall-clock time of plain calls; caches stay as the call before left them."""

    l2 = "not cleared"

    def launch(self, call: Callable[[], object], *, graph: bool = True) -> Launch:
        """Warm a call up."""
        call()
        return Launch(call, "wall clock")

    def interleaved(self, launches: Mapping[str, Launch], *, rounds: int = 15, warmup: int = 2) -> dict[str, Timing]:
        """`interleaved` over the launches."""
        return interleaved({k: timed(v.run) for k, v in launches.items()}, rounds=rounds, warmup=warmup)


def clock_for(device: torch.device | str) -> GpuClock | CpuClock:
    """The clock of a device."""
    return GpuClock(device) if torch.device(device).type == "cuda" else CpuClock()


def flops(b: int, s_q: int, h_q: int, s: float) -> float:
    """Floating-point operations of a decode: 2 · b · s_q · h_q · s · (576 + 512), the causal corner not subtracted."""
    return 2.0 * b * s_q * h_q * s * (D + D_V)


def moved_bytes(b: int, s_q: int, h_q: int, s: float, dtype: str) -> float:
    """Bytes that a decode must move: the cache and q once in (1 byte an element in e4m3, else 2), out once out."""
    return b * ((s + s_q * h_q) * D * (1 if dtype == "e4m3" else 2) + s_q * h_q * D_V * 2.0)


def ceilings(
    device: torch.device | str = "cpu", *, size: int | None = None, n: int | None = None, rounds: int | None = None
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Limits of a device, measured here: rows of speed.json with kernel "ceiling", and what could not be measured.

    Names: read_tb_s (the fastest of four reductions), copy_tb_s (bytes read and written), and matrix products of n³:
    fp8_gemm_tflop_s (`torch._scaled_mm`, e4m3, fast accumulation; the product without it has its own row),
    bf16_gemm_tflop_s, on the CPU fp32_gemm_tflop_s. On a GPU also empty_graph_us: what the clock shows for a graph of
    one tiny kernel, which is part of every time. `size` bytes are read (default 4 GiB, on the CPU 256 MiB); n defaults
    to 8192, on the CPU to 1024, and rounds to 10, on the CPU to 3.
    """
    gpu = torch.device(device).type == "cuda"
    size, n, rounds = (
        size or (4 << 30 if gpu else 256 << 20),
        n or (8192 if gpu else 1024),
        rounds or (10 if gpu else 3),
    )
    clock = clock_for(device)
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}

    def measure(name: str, makers: Mapping[str, Callable[[], Callable[[], object]]], amount: float) -> None:
        """The best of several ways; amount / µs is the value (0: the value is the time)."""
        best: tuple[float, str] | None = None
        for how, make in makers.items():
            try:
                us = clock.interleaved({how: clock.launch(make())}, rounds=rounds)[how].us_median
            except (RuntimeError, NotImplementedError, TypeError) as error:
                failed[f"{name}: {how}"] = (str(error).strip().splitlines() or [type(error).__name__])[0]
                continue
            value = amount / us if amount else us
            best = max(best or (value, how), (value, how))
        if best is not None:
            rows.append({"kernel": "ceiling", "name": name, "value": float(f"{best[0]:.5g}"), "how": best[1]})

    measure("read_tb_s", _reductions(size, device), size / 1e6)
    measure("copy_tb_s", {"copy_": lambda: _copy(size, device)}, 2 * size / 1e6)

    def plain(dtype: torch.dtype) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
            return lambda: torch.mm(a, b)

        return make

    def scaled(fast: bool) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            a, b = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in range(2))
            one = torch.ones((), device=device)
            return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

        return make

    work = 2 * n**3 / 1e6
    if gpu:
        measure("fp8_gemm_tflop_s", {"_scaled_mm, fast accumulation": scaled(True)}, work)
        measure("fp8_gemm_slow_accumulation_tflop_s", {"_scaled_mm": scaled(False)}, work)
        measure("bf16_gemm_tflop_s", {"mm": plain(torch.bfloat16)}, work)
        measure("empty_graph_us", {"add_ of one element": lambda: _tiny(device)}, 0)
    else:
        measure("fp32_gemm_tflop_s", {"mm": plain(torch.float32)}, work)
    return rows, failed


def _reductions(size: int, device: torch.device | str) -> dict[str, Callable[[], Callable[[], object]]]:
    words = torch.ones(size // 4, dtype=torch.float32, device=device)
    table = words[: words.numel() // 4096 * 4096].view(-1, 4096)
    vector = torch.ones(4096, dtype=torch.float32, device=device)
    return {
        "sum": lambda: words.sum,
        "sum of rows": lambda: lambda: table.sum(-1),
        "largest": lambda: words.amax,
        "matrix times vector": lambda: lambda: torch.mv(table, vector),
    }


def _copy(size: int, device: torch.device | str) -> Callable[[], object]:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _tiny(device: torch.device | str) -> Callable[[], object]:
    one = torch.zeros(1, device=device)
    return lambda: one.add_(1)


def hardware(device: torch.device | str = "cpu") -> str:
    """One line that names the device of a timing: "AMD EPYC 9654, 2 threads" or "NVIDIA H200"."""
    on = torch.device(device)
    if on.type == "cuda":
        return torch.cuda.get_device_name(on)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def cpu_name() -> str:
    """The processor's name as its maker gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name") and ":" in line]
    return names[0] if names else platform.processor() or platform.machine()


def _nvidia_smi(fields: Iterable[str]) -> list[str]:
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [word.strip() for word in said.splitlines()[0].split(",")] if said.strip() else []


def driver() -> str | None:
    """Version of the NVIDIA driver; None where there is none."""
    words = _nvidia_smi(["driver_version"])
    return words[0] if words else None


def clocks() -> dict[str, str]:
    """Clocks and power of the first GPU as nvidia-smi says now, in MHz and W; empty where there is none."""
    names = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")
    return dict(zip(names, _nvidia_smi(names), strict=False))
