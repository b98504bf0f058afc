# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The library under test, built (or taken from the cache) and loaded once in a test process."""

from __future__ import annotations

import os

# Before torch starts its threads, here and in every process that a test starts: threads that wait must not spin, or two
# processes on two cores slow each other down fivefold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Iterator

import pytest
import torch

from mla_kernels import build


@pytest.fixture(scope="session")
def cpu_build() -> build.Built:
    """The CPU target, loaded."""
    return build.load(targets=("cpu",))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For files whose tensors are small: one thread is faster, and test processes side by side do not wait on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
