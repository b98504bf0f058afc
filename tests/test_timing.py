# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Clocks with known times: turns, quantiles, graphs and queues on a stand-in for torch.cuda, limits of a processor."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_cuda import Cuda

from mla_kernels import timing


def test_interleaved_takes_turns_and_knows_its_quantiles() -> None:
    order: list[str] = []

    def contestant(name: str, times: list[float]) -> object:
        left = iter(times)

        def once() -> float:
            order.append(name)
            return next(left)

        return once

    contestants = {
        "a": contestant("a", [900.0, *range(11)]),
        "b": contestant("b", [900.0, *(10.0 * i for i in range(11))]),
    }
    timings = timing.interleaved(contestants, rounds=11, warmup=1, pause_s=0.0)
    assert order == ["a", "b"] * 12
    assert timings["a"] == timing.Timing(5.0, 1.0, 9.0, 11)
    assert timings["b"] == timing.Timing(50.0, 10.0, 90.0, 11)
    with pytest.raises(ValueError, match="rounds: expected at least 1, got 0"):
        timing.interleaved({}, rounds=0)


def test_timed_measures_the_call() -> None:
    calls: list[int] = []
    once = timing.timed(lambda: calls.append(1))
    assert 0.0 < once() < 1e6
    assert calls == [1]


def test_flops() -> None:
    assert timing.flops(1, 1, 1, 1) == 2176
    assert timing.flops(128, 1, 128, 4096) == 2 * 128 * 128 * 4096 * 1088


# --- the GPU's clock, on a device that writes down what is queued ---


def clock(cuda: Cuda) -> timing.GpuClock:
    return timing.GpuClock("cpu", l2_read=1 << 12, cuda=cuda)


def test_a_captured_call_lives_as_long_as_its_launch() -> None:
    """A graph knows addresses only: were the call's tensors freed, its replays would write into memory of others."""
    cuda = Cuda()
    tensor = torch.zeros(4)
    alive = weakref.ref(tensor)

    def call(kept: torch.Tensor = tensor) -> None:
        cuda.call()

    launch = clock(cuda).launch(call)
    assert launch.how == "graph"
    del tensor, call
    gc.collect()
    assert alive() is not None
    del launch
    gc.collect()
    assert alive() is None


def test_each_round_begins_with_another() -> None:
    order: list[str] = []
    launches = {name: timing.Launch(lambda name=name: order.append(name), "graph") for name in "abc"}
    clock(Cuda()).interleaved(launches, rounds=3, warmup=1)
    assert "".join(order) == "abcbcacababc"


def test_graph_replays_are_timed_with_the_l2_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    device = clock(cuda)
    launch = device.launch(cuda.call)
    assert (launch.how, launch.why) == ("graph", "")
    assert cuda.queued.count("call") == 3  # warm
    assert cuda.queued.count("captured call") == 1
    cuda.queued.clear()
    read = []
    monkeypatch.setattr(torch, "sum", lambda x, *_, out: read.append(x.nbytes) or cuda.queued.append("clear"))
    timings = device.interleaved({"a": launch, "b": launch}, rounds=4, warmup=1)
    assert timings == {name: timing.Timing(20.0, 20.0, 20.0, 4) for name in ("a", "b")}
    assert cuda.queued == ["clear", "event", "replay", "event"] * 10 + ["wait"]
    assert read == [1 << 12] * 10


def test_the_buffer_is_larger_than_the_l2() -> None:
    cuda = Cuda()
    cuda.get_device_properties = lambda device: types.SimpleNamespace(L2_cache_size=1 << 14)  # type: ignore[method-assign]
    assert clock(cuda)._buffer.nbytes == 4 << 14


@pytest.mark.parametrize("graph", [True, False])
def test_what_cannot_be_captured_is_queued_behind_a_wait(graph: bool) -> None:
    cuda = Cuda("operation not permitted when stream is capturing")
    device = clock(cuda)
    launch = device.launch(cuda.call, graph=graph)
    assert launch.how == "eager"
    assert launch.why == ("operation not permitted when stream is capturing" if graph else "asked for")
    assert launch.host_us > 0
    cuda.queued.clear()
    timings = device.interleaved({"a": launch}, rounds=2, warmup=0)
    assert cuda.queued == ["sleep", "event", "call", "event"] * 2 + ["wait"]
    assert timings["a"].us_median == pytest.approx(20.0)  # the wait is outside


def test_what_the_call_raises_goes_through() -> None:
    def call() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        clock(Cuda()).launch(call)
    with pytest.raises(ValueError, match="rounds: expected at least 1, got 0"):
        clock(Cuda()).interleaved({}, rounds=0)


# --- limits ---


def test_limits_of_this_processor() -> None:
    rows, failed = timing.ceilings("cpu", size=1 << 22, n=64, rounds=2)
    assert [row["name"] for row in rows] == ["read_tb_s", "copy_tb_s", "fp32_gemm_tflop_s"]
    assert all(row["kernel"] == "ceiling" and row["value"] > 0 and row["how"] for row in rows)
    assert failed == {}


def test_limits_are_the_best_of_several_ways_and_failures_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Callable[[], object]:
        raise RuntimeError("no such instruction\nat all")

    class Known:
        """A clock that takes 100 µs for "slow", 50 µs for anything else."""

        def launch(self, call: Callable[[], object]) -> Any:
            call()

        def interleaved(self, launches: dict[str, Any], rounds: int) -> dict[str, timing.Timing]:
            us = {name: 100.0 if name == "slow" else 50.0 for name in launches}
            return {name: timing.Timing(t, t, t, rounds) for name, t in us.items()}

    ways: dict[str, Any] = {"slow": lambda: lambda: None, "quick": lambda: lambda: None, "broken": fails}
    monkeypatch.setattr(timing, "clock_for", lambda device: Known())
    monkeypatch.setattr(timing, "_reductions", lambda size, device: ways)
    rows, failed = timing.ceilings("cpu", size=1 << 20, n=1000, rounds=2)
    # 2^20 bytes in 50 µs, twice as many for a copy; 2 · 1000³ operations in 50 µs
    assert {row["name"]: (row["value"], row["how"]) for row in rows} == {
        "read_tb_s": (0.020972, "quick"),
        "copy_tb_s": (0.041943, "copy_"),
        "fp32_gemm_tflop_s": (40.0, "mm"),
    }
    assert failed == {"read_tb_s: broken": "no such instruction"}


def test_bytes_of_a_decode() -> None:
    assert timing.moved_bytes(1, 1, 1, 1, "e4m3") == 2 * 576 + 1024
    assert timing.moved_bytes(128, 1, 16, 4096, "bf16") == 128 * ((4096 + 16) * 1152 + 16 * 1024)
