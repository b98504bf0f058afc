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


# First 48 bytes of image headers that nvcc 13.0 wrote into .nv_fatbin, and what cuobjdump 13.5 calls those images.
FATBIN_IMAGES = {
    "sm_80": "0200010140000000280c0000000000000000000000000000080001005000000000000000000000001100000000000000",
    "sm_90": "020001014000000008060000000000000000000000000000080001005a00000000000000000000001100000000000000",
    "sm_90a": "020001014000000008060000000000000000000000000000080001005a00000000000000000000001100100000000000",
    "compute_90": "01000101500000000001000000000000fb00000040000000000009005a00000000000000000000001180000000000000",
    "compute_90a": "01000101500000000001000000000000fc00000040000000000009005a00000000000000000000001180100000000000",
    "sm_100a": "020001016000000060060000000000000000000040000000080001006400000000000000000000001100100100000000",
    "sm_100f": "020001016000000060060000000000000000000040000000080001006400000000000000000000001100200100000000",
}


def fatbin(*images: str) -> bytes:
    """Contents of a .nv_fatbin section with these images, one fat binary each; the code itself is zeros."""
    section = b""
    for name in images:
        header = bytes.fromhex(FATBIN_IMAGES[name])
        header_size, payload = int.from_bytes(header[4:8], "little"), int.from_bytes(header[8:16], "little")
        image = header.ljust(header_size, b"\0") + bytes(payload)
        section += bytes.fromhex("50ed55ba01001000") + len(image).to_bytes(8, "little") + image + bytes(8)
    return section


def fatbin_source(*images: str) -> str:
    """C++ that puts such a section into a library."""
    numbers = ",".join(map(str, fatbin(*images)))
    return f'extern "C" __attribute__((used, section(".nv_fatbin"))) const unsigned char fatbin[] = {{{numbers}}};\n'


# torch's stable C interface, declared here: its C++ headers take seconds to compile.
TORCH_PROBE = """\
#include <cstdint>
#include <cstdio>
#include "value.h"
extern "C" {
using Boxed = void (*)(uint64_t* stack, uint64_t inputs, uint64_t outputs);
int aoti_torch_library_init_impl(const char* ns, const char* key, const char* file, uint32_t line, void** library);
int torch_library_impl(void* library, const char* name, Boxed function, uint64_t version);
int aoti_torch_delete_library_object(void* library);
int torch_new_string_handle(const char* data, size_t length, uint64_t* handle);
}
// An inline variable is one object in a process unless its symbol is hidden: a second build must not see this one.
inline int inline_value = VALUE;
static void build_key(uint64_t* stack, uint64_t, uint64_t) { torch_new_string_handle(KEY, sizeof(KEY) - 1, stack); }
static void value(uint64_t* stack, uint64_t, uint64_t) {
  char text[32];
  torch_new_string_handle(text, snprintf(text, sizeof text, "%d %d", VALUE, inline_value), stack);
}
static void decode(uint64_t*, uint64_t, uint64_t) {}
struct Registered {
  void* library;
  Registered(const char* dispatch_key) { aoti_torch_library_init_impl("mla_kernels", dispatch_key, "", 0, &library); }
  ~Registered() { aoti_torch_delete_library_object(library); }
  Registered& add(const char* name, Boxed function) {
    torch_library_impl(library, name, function, 0x020a000000000000);
    return *this;
  }
};
static Registered plain = Registered("CompositeExplicitAutograd");
static Registered cpu = Registered("CPU");
static Registered& all = (cpu.add("mla_decode_out", decode), plain.add("build_key", build_key).add("cpu_isa", value));
"""


def write_torch_tree(folder: Path) -> Path:
    """A stand-in with torch operators: build_key, cpu_isa (gives VALUE, twice), and a decode that writes nothing."""
    write_tree(folder)
    (folder / "cpu/probe.cpp").write_text(TORCH_PROBE)
    with open(folder / "CMakeLists.txt", "a") as file:
        file.write('target_link_libraries(mla_kernels PRIVATE "${MLA_TORCH_DIR}/lib/libtorch_cpu.so")\n')
    return folder
