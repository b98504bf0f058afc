# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Finding and ending every process that a notebook has started, also those that have left its process group."""

from __future__ import annotations

import contextlib
import time

import psutil  # type: ignore[import-untyped]

__all__ = ["MARK", "end_marked", "marked"]

# Environment variable of the kernel which every process started by it inherits, so that none is left behind.
MARK = "MLA_REPORT_RUN"


def marked(mark: str) -> list[psutil.Process]:
    """The living processes that carry the mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def end_marked(mark: str) -> None:
    """Kill every process that carries the mark."""
    for _ in range(50):  # until a look finds none: a process may fork between the look and the kill
        found = marked(mark)
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.02)  # no wait(): the exit code belongs to the parent
