# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""A stand-in for torch.cuda: one stream whose operations are written down."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

from mla_kernels import timing


class Cuda:
    """Stands for torch.cuda: one stream whose operations are written down, and a time that only they move."""

    def __init__(self, capture_fails: str = "", call_us: float = 20.0) -> None:
        self.queued: list[str] = []
        self.now_us = 0.0
        self.capture_fails = capture_fails
        self.capturing = False
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                cuda.queued.append("event")
                self.at_us = cuda.now_us

            def elapsed_time(self, other: Any) -> float:
                return (other.at_us - self.at_us) / 1e3

        class CUDAGraph:
            def replay(self) -> None:
                cuda.queued.append("replay")
                cuda.now_us += call_us

        self.Event, self.CUDAGraph, self.call_us = Event, CUDAGraph, call_us

    def call(self) -> None:
        self.queued.append("captured call" if self.capturing else "call")
        self.now_us += 0 if self.capturing else self.call_us

    def get_device_properties(self, device: Any) -> Any:
        return types.SimpleNamespace(L2_cache_size=1 << 10)

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def graph(self, captured: Any) -> Iterator[None]:
        self.capturing = True
        try:
            yield
            if self.capture_fails:
                raise RuntimeError(f"{self.capture_fails}\nmore words")
        finally:
            self.capturing = False

    def Stream(self, device: Any) -> Any:
        return types.SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self, device: Any) -> Any:
        return types.SimpleNamespace(wait_stream=lambda other: None)

    def synchronize(self, device: Any) -> None:
        self.queued.append("wait")

    def _sleep(self, cycles: int) -> None:
        assert cycles >= 50 * timing.WAIT_MHZ
        self.queued.append("sleep")
        self.now_us += 1000.0
