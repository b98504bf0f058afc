# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""What the plugin says of decode batches larger than the largest CUDA graph, and when it says nothing."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from mla_kernels.serving import tables
from mla_kernels.vllm import graphs


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_said", False)


def config_of(rows: Any = 1024, captured: Any = 512, mode: Any = "FULL_AND_PIECEWISE", most: Any = 16384,
              rank: int = 0) -> Any:  # fmt: skip
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            max_cudagraph_capture_size=captured, cudagraph_mode=SimpleNamespace(name=mode)
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=rows, max_num_batched_tokens=most),
        parallel_config=SimpleNamespace(rank=rank),
    )


def captured_sizes(flag: int, most: int) -> list[int]:
    """Sizes that vLLM 0.23.0 captures for --max-cudagraph-capture-size, as its documentation of the flag says."""
    flag = min(flag, most)
    sizes = {1, 2, 4, *range(8, min(flag + 1, 256), 8), *range(256, flag + 1, 16)}
    return sorted(size for size in sizes | ({most} if most <= flag else set()) if size <= flag)


@pytest.mark.parametrize(
    ("changes", "s_q", "size"),
    [
        ({}, 1, 1024),  # vLLM's defaults on a large GPU
        ({"rows": 513}, 1, 528),
        ({"rows": 1000}, 1, 1008),
        ({"rows": 300}, 2, 608),  # tokens are counted, two a row
        ({"rows": 33, "captured": 32}, 1, 48),
        ({"rows": 1000, "most": 1000}, 1, 1000),
        ({"rows": 1000, "most": 700}, 1, 700),
        ({"rows": 512}, 1, None),
        ({"rows": 1024, "captured": 1024}, 1, None),
        ({"rows": 1000, "most": 512}, 1, None),  # no step is larger
        ({"captured": 0}, 1, None),  # --enforce-eager
        ({"mode": "NONE"}, 1, None),
        ({"captured": None}, 1, None),
        ({"rows": None}, 1, None),
        ({"most": None}, 1, 1024),
    ],
)
def test_the_size_is_one_that_vllm_takes_and_holds_the_largest_step(
    changes: dict[str, Any], s_q: int, size: int | None
) -> None:
    config = config_of(**changes)
    assert graphs.wanted_size(config, s_q) == size
    if size is not None:
        most = config.scheduler_config.max_num_batched_tokens or 10**6
        sizes = captured_sizes(size, most)
        assert sizes[-1] == size  # not truncated
        assert sizes[-1] >= min(config.scheduler_config.max_num_seqs * s_q, most)


def test_it_is_said_once_by_the_first_rank_with_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm.mla_kernels")
    graphs.advise(config_of(rows=256), 1)
    graphs.advise(config_of(rank=1), 1)
    assert caplog.messages == []
    config = config_of()
    before = repr(config)
    graphs.advise(config, 1)
    graphs.advise(config, 1)
    assert len(caplog.messages) == 1
    assert "max_num_seqs 1024 allows decode steps of more tokens than the largest CUDA graph, 512" in caplog.messages[0]
    assert "pass --max-cudagraph-capture-size 1024 (" in caplog.messages[0]
    assert graphs.MEASURED in caplog.messages[0]
    assert repr(config) == before


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(),
        SimpleNamespace(compilation_config=SimpleNamespace(), scheduler_config=SimpleNamespace(max_num_seqs=1024)),
        SimpleNamespace(compilation_config=SimpleNamespace(max_cudagraph_capture_size=512)),
    ],
)
def test_a_vllm_that_does_not_say_is_left_alone(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm.mla_kernels")
    graphs.advise(config, 1)
    assert caplog.messages == []


def test_what_was_measured_is_what_the_file_says() -> None:
    rows = {row["flags"]: row for row in tables.read("h200").of("serving.json")
            if (row["backend"], row["kv_cache_dtype"], row["prompts"]) == ("CUTLASS_MLA", "fp8", 1000)}  # fmt: skip
    without, with_flag = rows[""], rows[f"{graphs.FLAG} 1024"]
    assert f"{with_flag['requests_per_s']:.2f} requests/s with graphs up to 1024, and " in graphs.MEASURED
    assert f"{without['requests_per_s']:.2f} with vLLM's default at an older commit" in graphs.MEASURED
    assert without["commit"] != with_flag["commit"]
    assert (without["input_len"], without["output_len"]) == (8192, 1024)
