# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""What a build will do, before it does it: the tools, the key, and the command lines."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_kernels import toolchain
from mla_kernels._store import sha256_file
from mla_kernels.toolchain import BuildError, printable

OLDEST_CMAKE, OLDEST_NINJA = (3, 25), (1, 10)

# Variables that CMake and compilers read. They are passed on (conda's compilers need theirs), so they are in the key.
_FLAGS = (
    *("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CUDAFLAGS"),
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CMAKE_PREFIX_PATH", "CMAKE_TOOLCHAIN_FILE"),
    *("CMAKE_CXX_COMPILER_LAUNCHER", "CMAKE_CUDA_COMPILER_LAUNCHER"),
)
PLAIN = re.compile(r"[A-Za-z0-9_./+-]+")  # paths that CMake, Ninja, dependency files and nvcc all take as they are


@dataclass(frozen=True)
class Plan:
    """What a build would do: its key, what the key is taken over (`identity`), and its command lines."""

    key: str
    targets: tuple[str, ...]
    identity: dict[str, Any]
    paths: dict[str, str]
    options: dict[str, str]
    notes: list[str] = field(default_factory=list)

    def _link(self, name: str, work: str) -> tuple[str, str, str]:
        """(path to hand to CMake, link, what the link points to) for a path with odd characters."""
        path = self.paths[name]
        if name == "cmake":  # looks for its own modules two folders up, so the link stands for that folder
            return f"{work}/links/cmake/bin/cmake", f"{work}/links/cmake", os.path.dirname(os.path.dirname(path))
        base = os.path.basename(path)  # kept where possible: compilers go by the name they are called with
        link = f"{work}/links/{name}/{base if PLAIN.fullmatch(base) else name}"
        return link, link, path

    def place(self, name: str, work: str) -> str:
        """The path to hand to CMake: the real one, or a link inside `work` where the real one has odd characters."""
        return self.paths[name] if PLAIN.fullmatch(self.paths[name]) else self._link(name, work)[0]

    def links(self, work: str) -> dict[str, str]:
        """The links that `place` counts on, and what each points to."""
        return dict(self._link(name, work)[1:] for name, path in self.paths.items() if not PLAIN.fullmatch(path))

    def commands(self, work: str = "WORK", jobs: int = 1) -> list[list[str]]:
        """The two command lines, configure and compile, each a list of arguments (nothing goes through a shell)."""
        options = {name: self.place(v[1:], work) if v[:1] == "@" else v for name, v in self.options.items()}
        options["CMAKE_LIBRARY_OUTPUT_DIRECTORY"] = f"{work}/lib"
        return [
            [
                *(self.place("cmake", work), "-S", self.place("source", work), "-B", f"{work}/build", "-G", "Ninja"),
                *(f"-D{name}={value}" for name, value in options.items()),
            ],
            [self.place("ninja", work), "-C", f"{work}/build", "-j", str(jobs), "-v"],
        ]


def _checked_targets(targets: Sequence[str]) -> tuple[str, ...]:
    if isinstance(targets, str) or not targets:
        raise ValueError(f"targets: expected a sequence of names such as ('cpu',), got {targets!r}")
    for name in targets:
        if name not in toolchain.TARGETS:
            near = difflib.get_close_matches(str(name), toolchain.TARGETS, n=1, cutoff=0.3)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"targets: unknown target {name!r}; there are {', '.join(toolchain.TARGETS)}{hint}")
    return tuple(sorted(set(targets)))


def _source_folder(source_dir: str | os.PathLike[str] | None) -> Path:
    package = Path(__file__).resolve().parent
    candidates = [package / "csrc", package.parent / "csrc"]
    if source_dir is not None:
        candidates = [Path(os.path.abspath(source_dir))]
    for folder in candidates:
        if (folder / "CMakeLists.txt").is_file():
            return folder
    tried = " and ".join(printable(str(folder)) for folder in candidates)
    raise BuildError(
        f"source_dir: no CMakeLists.txt in {tried}. Pass source_dir= with the folder csrc of the repository"
    )


def _present_targets(source: Path) -> list[str]:
    """Targets that have a folder in csrc/ and a word in its CMakeLists.txt."""
    text = (source / "CMakeLists.txt").read_text("utf-8", "replace")
    folders = {"cpu": "cpu", **{name: target.folder for name, target in toolchain.GPU_TARGETS.items()}}
    return [name for name in toolchain.TARGETS if (source / folders[name]).is_dir() and re.search(rf"\b{name}\b", text)]


def source_digest(source: Path) -> str:
    """SHA-256 over names and contents of all files under csrc/, but for hidden files, backups and notes (.md)."""
    digest = hashlib.sha256()
    seen: set[str] = set()
    for folder, folders, files in os.walk(source, followlinks=True):
        real = os.path.realpath(folder)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and real not in seen)
        seen.add(real)
        for name in sorted(files):
            path = os.path.join(folder, name)
            if name.startswith(".") or name.endswith(("~", ".md")) or not os.path.isfile(path):
                continue
            digest.update(os.fsencode(os.path.relpath(path, source)) + b"\0" + sha256_file(Path(path)).encode())
    return digest.hexdigest()


def plan(
    targets: Sequence[str] = ("cpu",),
    *,
    fast_math: bool = False,
    first_only: bool = False,
    source_dir: str | os.PathLike[str] | None = None,
    compiler: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Plan:
    """Find all tools, work out the key and the command lines; compile nothing. Arguments and errors as for `build`."""
    wanted = _checked_targets(targets)
    source = _source_folder(source_dir)
    if missing := [name for name in wanted if name not in (there := _present_targets(source))]:
        raise BuildError(
            f"targets: {', '.join(missing)} is not implemented in {printable(str(source))}, which has: "
            f"{', '.join(there) or 'none'}"
        )
    gpu = [name for name in wanted if toolchain.TARGETS[name]]
    torch = toolchain.torch_facts()
    cxx = toolchain.find_compiler(compiler, environ)
    cmake = toolchain.find_tool("cmake", OLDEST_CMAKE, environ)
    ninja = toolchain.find_tool("ninja", OLDEST_NINJA, environ)
    paths = {"source": str(source), "torch": torch.folder, "cxx": cxx.path, "cmake": cmake.path, "ninja": ninja.path}
    # A value "@name" stands for the path of that name. Hidden symbols: two builds in one process must not share any.
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_COMPILER": "@cxx",
        "CMAKE_CXX_VISIBILITY_PRESET": "hidden",
        "CMAKE_VISIBILITY_INLINES_HIDDEN": "ON",
        "CMAKE_MAKE_PROGRAM": "@ninja",
        "MLA_TARGETS": ";".join(wanted),
        "MLA_FAST_MATH": "ON" if fast_math else "OFF",
        "MLA_TORCH_DIR": "@torch",
    }
    identity: dict[str, Any] = {
        "sources": source_digest(source),
        "targets": list(wanted),
        "fast_math": bool(fast_math),
        "compiler": {"path": printable(cxx.path), "version": cxx.banner},
        "torch": {"version": torch.version, "revision": torch.revision, "cuda": torch.cuda},
        "cpu": toolchain.cpu_features(),
        "flags": {name: printable(environ[name]) for name in _FLAGS if environ.get(name)},
    }
    notes: list[str] = []
    if gpu:
        nvcc = toolchain.find_nvcc(gpu, torch=torch, host=cxx, environ=environ)
        cutlass, cutlass_version = toolchain.find_cutlass()
        architectures, notes = toolchain.cuda_architectures(gpu, environ.get("TORCH_CUDA_ARCH_LIST", ""))
        paths |= {"nvcc": nvcc.path, "cutlass": cutlass}
        if cudart := toolchain.packaged_cudart(nvcc.path):
            paths["cudart"] = cudart
            options["CUDA_CUDART"] = "@cudart"
        if first_only:
            options["MLA_SM100A_FIRST"] = "ON"
        options |= {
            "CMAKE_CUDA_COMPILER": "@nvcc",
            "CMAKE_CUDA_HOST_COMPILER": "@cxx",
            "CMAKE_CUDA_ARCHITECTURES": ";".join(architectures),
            "CMAKE_CUDA_VISIBILITY_PRESET": "hidden",
            "MLA_CUTLASS_DIR": "@cutlass",
        }
        identity |= {"nvcc": {"path": printable(nvcc.path), "version": nvcc.banner}, "cutlass": cutlass_version}
    identity["options"] = dict(options)
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    options["MLA_BUILD_KEY"] = key
    identity |= {"cmake": cmake.banner, "ninja": ninja.banner}  # recorded, and not part of the key
    return Plan(key, wanted, identity, paths, options, notes)
