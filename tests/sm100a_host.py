# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The host half of csrc/sm100a as a library: compiled once in a test run, without CUDA and torch."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
COMPILER = os.environ.get("CXX", "c++")


def compile_host(folder: Path, source_dir: Path = REPOSITORY / "csrc") -> ctypes.CDLL:
    """tests/sm100a_host.cpp over the headers in `source_dir`, loaded."""
    library = folder / "sm100a_host.so"
    tests = REPOSITORY / "tests"
    include = [tests / "host_cuda", source_dir / "sm100a", source_dir / "include"]
    flags = ["-std=c++20", "-O1", "-Wall", "-Wno-unknown-pragmas", "-Werror", "-shared", "-fPIC", "-pthread"]
    command = [COMPILER, *flags, *(f"-I{path}" for path in include), str(tests / "sm100a_host.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    host = ctypes.CDLL(str(library))
    host.merged_lse.restype = host.merge_weight.restype = ctypes.c_float
    host.merged_lse.argtypes = [ctypes.c_void_p, ctypes.c_int]
    host.merge_weight.argtypes = [ctypes.c_float, ctypes.c_float]
    host.guard.restype = ctypes.c_char_p
    host.guard.argtypes = [ctypes.c_void_p, ctypes.c_float, ctypes.c_int64]
    host.capacity_of.argtypes = [ctypes.c_int64]
    host.plan_parts.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    host.plan_rows.argtypes = [ctypes.c_int64] + [ctypes.c_void_p] * 8
    return host
