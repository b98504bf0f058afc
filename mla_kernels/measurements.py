# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The files that keep measured numbers: rows, and the provenance that goes with them.

One file holds the rows of one run on one machine, so that ratios between them are fair.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mla_kernels.timing import Timing, clocks, cpu_name, driver

__all__ = ["provenance", "read_measurements", "short_command", "speed_row", "write_measurements"]


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
    driver, CUDA, torch, clocks, versions of peers. `command` is that of this process where it is not given; of absolute
    paths in it only the last part is kept."""
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
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "driver": driver() if on.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        **({"clocks": clocks()} if on.type == "cuda" else {}),
        "peers": dict(peers or {}),
        **more,
    }


def _own_command() -> list[str]:
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        start = ["python", "-m", program.parent.name]
    elif program.parent == Path(__file__).parent:
        start = ["python", "-m", f"mla_kernels.{program.stem}"]
    else:
        start = [program.name]
    return [*start, *short_command(sys.argv[1:])]


def short_command(words: Iterable[str]) -> list[str]:
    """Words of a command, absolute paths cut to their last part."""
    return [Path(word).name if os.path.isabs(word) else word for word in words]


_TIMES = ("us_median", "us_p10", "us_p90")


def speed_row(
    kernel: str,
    dtype: str,
    timing: Timing | None,
    *,
    b: int,
    s_q: int = 1,
    h_q: int,
    s: int,
    page_size: int,
    **more: Any,
) -> dict[str, Any]:
    """A row of `data/measurements/<gpu>/speed.json`. Without a timing the times are None, and `reason` says why."""
    times = {name: None if timing is None else round(getattr(timing, name), 2) for name in _TIMES}
    return {
        "kernel": kernel,
        "dtype": dtype,
        "b": b,
        "s_q": s_q,
        "h_q": h_q,
        "s": s,
        "page_size": page_size,
        **times,
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
