# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The library under test, built (or taken from the cache) and loaded once in a test process."""

from __future__ import annotations

import pytest

from mla_kernels import build


@pytest.fixture(scope="session")
def cpu_build() -> build.Built:
    """The CPU target, loaded."""
    return build.load(targets=("cpu",))
