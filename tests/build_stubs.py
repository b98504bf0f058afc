# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""A tiny stand-in for csrc/, stub compilers, and child processes: what the tests of the build share."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from mla_kernels import build

REAL_COMPILER = shutil.which("g++") or shutil.which("c++") or "no C++ compiler on PATH"
ODD = "my \"work\" (1) $HOME 'é' & 漢"  # space, quotes, dollar, parentheses, ampersand, non-ASCII letters

CMAKE = """\
cmake_minimum_required(VERSION 3.25)
project(probe LANGUAGES CXX)
# targets: cpu sm90a
add_library(mla_kernels SHARED cpu/probe.cpp)
target_include_directories(mla_kernels PRIVATE include)
target_compile_definitions(mla_kernels PRIVATE KEY="${MLA_BUILD_KEY}")
"""
PROBE = """\
#include "value.h"
extern "C" __attribute__((visibility("default"))) int value() { return VALUE; }
extern "C" __attribute__((visibility("default"))) const char* key() { return KEY; }
"""


def write_tree(folder: Path, value: int = 1) -> Path:
    """csrc/ with one source and one header; the library has value() and key() and knows nothing of torch."""
    for name, text in {
        "CMakeLists.txt": CMAKE,
        "cpu/probe.cpp": PROBE,
        "include/value.h": f"#define VALUE {value}\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def set_value(tree: Path, value: int | str) -> None:
    (tree / "include/value.h").write_text(f"#define VALUE {value}\n")


def value_of(library: Path) -> int:
    return int(ctypes.CDLL(os.fspath(library)).value())


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def stub_compiler(path: Path, body: str = "", on: str = "probe.cpp") -> Path:
    """A compiler that counts its runs on `on` in PATH.count, does `body` in them, and then what the real one does."""
    count = shlex.quote(f"{path}.count")
    return script(
        path,
        f'case " $* " in *" -c "*{on}*) echo $$ >> {count}\n{body}\n;; esac\nexec {shlex.quote(REAL_COMPILER)} "$@"\n',
    )


def calls(compiler: Path) -> int:
    """How often a stub compiler ran on the source."""
    count = Path(f"{compiler}.count")
    return len(count.read_text().split()) if count.exists() else 0


def child(code: str, *arguments: object, prefix: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[str]:
    """Another Python process: runs `code` after `from mla_kernels import build`; its arguments are `sys.argv[1:]`."""
    program = "import json, os, sys\nfrom mla_kernels import _store, build\n" + textwrap.dedent(code)
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="surrogateescape",
        env={**os.environ, **environment},
    )


BUILD = """
built = build.build(source_dir=sys.argv[1], cache_dir=sys.argv[2], compiler=sys.argv[3], jobs=1)
print(json.dumps([str(built.path), built.key, built.rebuilt, _store.sha256_file(built.path)]))
"""


def finish(process: subprocess.Popen[str], seconds: float = 60) -> tuple[str, str]:
    """Output and error output of a child that must end well."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
    return out, err


def result(process: subprocess.Popen[str]) -> list[object]:
    out, err = finish(process)
    return [*json.loads(out), err]


def wait_for(condition, seconds: float = 20) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Site:
    """A stand-in source tree, a compiler that counts, and a cache."""

    def __init__(self, folder: Path, body: str = "") -> None:
        self.folder = folder
        self.tree = write_tree(folder / "csrc")
        self.cache = folder / "cache"
        self.compiler = stub_compiler(folder / "bin" / "c++", body)

    @property
    def options(self) -> dict[str, object]:
        return {"source_dir": self.tree, "cache_dir": self.cache, "compiler": self.compiler, "jobs": 1}

    def build(self, **changes: object) -> build.Built:
        return build.build(**{**self.options, **changes})  # type: ignore[arg-type]

    def plan(self, **changes: object) -> build.Plan:
        return build.plan(**{"source_dir": self.tree, "compiler": self.compiler, **changes})  # type: ignore[arg-type]

    def child(self, code: str = BUILD, prefix: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[str]:
        return child(code, self.tree, self.cache, self.compiler, prefix=prefix, **environment)

    def left_over(self) -> list[Path]:
        return [*self.cache.glob("building-*"), *self.cache.rglob(".incoming-*")]
