# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Drawn tensors that several test files use."""

from __future__ import annotations

import torch

from mla_kernels.formats import round_to


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal, float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stored(*shape: int, seed: int = 0, mean: float = 0.0) -> torch.Tensor:
    """e4m3 values as float64."""
    return round_to(rand(*shape, seed=seed) + mean, "e4m3")
