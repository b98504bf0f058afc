# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Finding and ending every process that a notebook has started, also those that have left its process group."""

from __future__ import annotations

import contextlib
import select
import shutil
import sys
import time

import psutil  # type: ignore[import-untyped]

__all__ = ["MARK", "end_children", "end_marked", "marked"]

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


def end_children(parent: int, folder: str) -> None:
    """Wait for the end of stdin, then kill what the process `parent` has started meanwhile, and remove `folder`.

    stdin is a pipe that only the parent holds, so it ends with the parent, however that ends. Its descendants are noted
    while it lives: afterwards nothing tells whose they were.
    """
    known: set[psutil.Process] = set()
    while True:
        with contextlib.suppress(psutil.Error):
            known |= set(psutil.Process(parent).children(recursive=True))
        known = {process for process in known if process.is_running()} - {psutil.Process()}
        if select.select([sys.stdin], [], [], 1.0)[0]:
            break
    for process in known:
        with contextlib.suppress(psutil.Error):
            process.kill()
    shutil.rmtree(folder, ignore_errors=True)
