# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""What this machine can build with: CMake, Ninja, compilers, the CUDA toolkit, architectures, memory.

Nothing here compiles or imports torch. `BuildError` is raised with what was looked for, what was found and the way out.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import select
import shutil
import signal
import struct
import subprocess
import sysconfig
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "DEVICES",
    "DEVICE_TARGETS",
    "GPU_TARGETS",
    "TARGETS",
    "BuildError",
    "Choice",
    "Device",
    "GpuTarget",
    "Tool",
    "TorchFacts",
    "choose_jobs",
    "cpu_features",
    "cuda_architectures",
    "cuobjdumps",
    "device_choice",
    "embedded_architectures",
    "find_compiler",
    "find_cutlass",
    "find_nvcc",
    "find_tool",
    "packaged_cudart",
    "printable",
    "torch_facts",
]


@dataclass(frozen=True)
class GpuTarget:
    """What a GPU target is compiled for, and from what. Only nvcc 13.0 was tried, whatever `oldest_cuda` says.

    architecture: the "a" form runs on exactly one compute capability, the "f" form on its family. folder: in csrc/.
    oldest_cuda: first release of nvcc that takes flags and sources. first: the one instantiation that CI compiles.
    on_request: left out where "all that can be built" are, unless a device for it is here.
    """

    architecture: str
    folder: str
    oldest_cuda: tuple[int, int]
    first: str
    on_request: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """What nvcc needs for the architecture, as in csrc/; machine code only, no PTX."""
        return (f"-gencode=arch=compute_{self.architecture},code=sm_{self.architecture}",)


@dataclass(frozen=True)
class Device:
    """One row of the device table: a compute capability (any minor number where it is None), and what serves it."""

    major: int
    minor: int | None
    name: str
    target: str | None
    reason: str = ""  # why there is no target


@dataclass(frozen=True)
class Choice:
    """What serves a device. outcome: "target", "refused" (known not to work), or "cpu" (nothing known of it)."""

    outcome: str
    target: str
    message: str


GPU_TARGETS = {
    "sm90a": GpuTarget("90a", "sm90a", (13, 0), "decode_n16.cu"),
    "sm100a": GpuTarget("100a", "sm100a", (12, 8), "mla_e4m3_individual.cu"),
    "sm100f": GpuTarget("100f", "sm100a", (12, 9), "mla_e4m3_individual.cu", on_request=True),
}
DEVICES = (
    Device(9, 0, "Hopper: H100, H200, GH200", "sm90a"),
    Device(10, 0, "Blackwell: B200, GB200", "sm100a"),
    Device(10, 3, "Blackwell Ultra: B300, GB300", "sm100f"),
    Device(11, 0, "Thor", None, "CUTLASS's Blackwell kernels were reported to give NaN there (CUTLASS issue 3128)"),
    Device(
        12, None, "Blackwell: RTX 50, RTX PRO, GB10", None,
        "it has no tensor memory and 99 KiB of shared memory a block; the kernel of sm100a needs both",
    ),
)  # fmt: skip

# Derived from the two tables. TARGETS: CUDA architecture that a target is compiled for. DEVICE_TARGETS: capability ->
# target; never "at least".
TARGETS: dict[str, str | None] = {"cpu": None, **{name: target.architecture for name, target in GPU_TARGETS.items()}}
DEVICE_TARGETS = {(row.major, row.minor): row.target for row in DEVICES if row.target and row.minor is not None}


def device_choice(capability: tuple[int, int], cuda: tuple[int, int] | None = None) -> Choice:
    """What serves a device of this compute capability, by the table; with `cuda`, what nvcc of that release can build.

    Anything else than a target runs on the CPU target; the message says why.
    """
    shown = f"compute capability {capability[0]}.{capability[1]}"
    for row in DEVICES:
        if row.major != capability[0] or row.minor not in (None, capability[1]):
            continue
        if row.target is None:
            return Choice("refused", "cpu", f"{shown} ({row.name}) is refused: {row.reason}; use the CPU")
        oldest = GPU_TARGETS[row.target].oldest_cuda
        if cuda is not None and cuda < oldest:
            needs = f"target {row.target} needs nvcc {oldest[0]}.{oldest[1]} or newer, not {cuda[0]}.{cuda[1]}"
            return Choice("cpu", "cpu", f"{shown} ({row.name}): {needs}; update nvcc, or use the CPU")
        return Choice("target", row.target, f"{shown} ({row.name}) is served by target {row.target}")
    known = ", ".join(f"{major}.{minor}" for major, minor in DEVICE_TARGETS)
    return Choice("cpu", "cpu", f"{shown}: no target serves it, there are some for {known}; use the CPU")


_FEATURES = re.compile(r"^(avx2|fma|f16c|avx512\w*|avx_vnni|amx_\w+|asimd\w*|sve\w*|bf16|i8mm|fphp)$")


class BuildError(RuntimeError):
    """A library could not be built or loaded; the message says why, where the log is and the way out."""


@dataclass(frozen=True)
class Tool:
    """A program: its path, its version as (major, minor), and the first line of its ``--version``."""

    path: str
    version: tuple[int, int]
    banner: str


@dataclass(frozen=True)
class TorchFacts:
    """What the build needs to know of torch, read from its files: importing it takes seconds.

    The C++ ABI is not among it: from torch 2.11 on there is only one (C++11).
    """

    folder: str
    version: str
    cuda: str | None
    revision: str


def printable(text: str) -> str:
    """`text` as valid Unicode without control bytes: file names and compiler output may hold anything."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def ask(command: Sequence[str], seconds: float = 5.0) -> tuple[int | None, str]:
    """Exit code and first 64 KiB of output; the code is None if the program did not end in time (it is killed)."""
    end = time.monotonic() + seconds
    output = b""
    with subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        code: int | None = None
        while len(output) < 65536:
            left = end - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                break
            block = os.read(process.stdout.fileno(), 65536)
            if not block:
                try:
                    code = process.wait(max(0.1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    code = None
                break
            output += block
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return code, printable(output.decode("utf-8", "replace"))


def _first_line(text: str) -> str:
    return next((line.strip()[:200] for line in text.splitlines() if line.strip()), "(nothing)")


def _package_folder(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def find_tool(name: str, oldest: tuple[int, int], environ: Mapping[str, str] = os.environ) -> Tool:
    """`cmake` or `ninja`: from PATH, else from the PyPI package of that name in this interpreter's environment."""
    candidates = [shutil.which(name, path=environ.get("PATH", ""))]
    package, scripts = _package_folder(name), sysconfig.get_path("scripts")
    if package is not None:
        candidates.append(shutil.which(name, path=str(package / "data" / "bin")))
        candidates.append(shutil.which(name, path=scripts))
        if candidates[1] and candidates[0] and os.path.dirname(candidates[0]) == scripts:
            del candidates[0]  # a script of that package, which starts a second Python in front of the program
    seen = []
    for path in candidates:
        if path is None:
            continue
        try:
            code, text = ask([path, "--version"])
        except OSError as error:
            code, text = None, str(error)
        match = re.search(r"(\d+)\.(\d+)", text)
        if code == 0 and match and (int(match[1]), int(match[2])) >= oldest:
            return Tool(os.path.abspath(path), (int(match[1]), int(match[2])), _first_line(text))
        seen.append(f"{printable(path)}: {_first_line(text)}")
    found = f"found {'; '.join(seen)}" if seen else "found neither on PATH nor in this Python environment"
    raise BuildError(
        f"{name} {oldest[0]}.{oldest[1]} or newer is needed; {found}. Install it with: python -m pip install {name}"
    )


def find_compiler(compiler: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ) -> Tool:
    """The C++ compiler: `compiler`, else CXX, else c++, g++ or clang++ from PATH."""
    path_list = environ.get("PATH", "")
    if compiler is not None:
        names, origin = [os.fspath(compiler)], f"compiler={printable(os.fspath(compiler))!r}"
    elif environ.get("CXX"):
        names, origin = [environ["CXX"]], f"CXX={printable(environ['CXX'])!r}"
    else:
        names, origin = ["c++", "g++", "clang++"], "c++, g++ or clang++"
    path = next((p for name in names if (p := shutil.which(name, path=path_list))), None)
    if path is None:
        raise BuildError(
            f"no C++ compiler: {origin} is not an executable file and not on PATH. "
            "Install g++ 11 or newer (Debian: apt-get install g++), or pass compiler= with the path of one program"
        )
    path = os.path.abspath(path)  # not the real path: wrappers such as ccache go by the name they are called with
    try:
        code, text = ask([path, "--version"], 10)
    except OSError as error:
        raise BuildError(f"the C++ compiler {printable(path)} cannot be started: {error.strerror}") from error
    if code is None:
        raise BuildError(
            f"the C++ compiler {printable(path)} did not answer --version within 10 s; pass another compiler="
        )
    if code != 0:
        raise BuildError(
            f"the C++ compiler {printable(path)} --version ended with exit code {code}: {_first_line(text)}; "
            "pass another compiler="
        )
    match = re.search(r"(\d+)\.(\d+)(?:\.\d+)", text)
    return Tool(path, (int(match[1]), int(match[2])) if match else (0, 0), _first_line(text))


def _nvcc_candidates(environ: Mapping[str, str]) -> Iterable[tuple[str, Path]]:
    if path := shutil.which("nvcc", path=environ.get("PATH", "")):
        yield "PATH", Path(path)
    package = _package_folder("nvidia")
    for packaged in sorted(package.glob("*/bin/nvcc")) if package else []:
        yield "package nvidia-cuda-nvcc", packaged


def _nvcc_path(environ: Mapping[str, str]) -> tuple[str, Path]:
    """Where nvcc is and who said so. A CUDA_HOME that is set is obeyed or refused, never passed over."""
    others = [(origin, path) for origin, path in _nvcc_candidates(environ) if os.access(path, os.X_OK)]
    for name in ("CUDA_HOME", "CUDA_PATH"):
        value = environ.get(name)
        if not value:
            continue
        path = Path(value) / "bin" / "nvcc"
        if path.is_file() and os.access(path, os.X_OK):
            return name, path
        if not os.path.isdir(value) and os.pathsep in value:
            fault = f"which joins several folders with {os.pathsep!r}; name one of them"
        elif not os.path.isdir(value):
            fault = "which is not a folder"
        elif path.is_file():
            fault = f"but {printable(str(path))} is not executable; chmod +x it"
        else:
            fault = "which has no bin/nvcc"
        also = "".join(f" (or unset {name} to use {printable(str(p))}, from {origin})" for origin, p in others[:1])
        raise BuildError(f"{name} is {printable(value)!r}, {fault}{also}")
    if others:
        return others[0]
    raise BuildError(
        "no nvcc: CUDA_HOME and CUDA_PATH are not set, PATH has none and no package brings one. "
        "Install the CUDA toolkit, or: python -m pip install nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt "
        "nvidia-cuda-cccl nvidia-cuda-runtime"
    )


def newest_gcc(nvcc: str) -> int | None:
    """Newest gcc that this toolkit takes as host compiler, from its crt/host_config.h; None if that cannot be read."""
    for root in (Path(nvcc).parent.parent, Path(os.path.realpath(nvcc)).parent.parent):
        for header in (root / "include/crt/host_config.h", *root.glob("targets/*/include/crt/host_config.h")):
            try:
                match = re.search(r"#if\s+__GNUC__\s*>\s*(\d+)", header.read_text("utf-8", "replace"))
            except OSError:
                continue
            if match:
                return int(match[1])
    return None


def find_nvcc(
    targets: Sequence[str], *, torch: TorchFacts, host: Tool | None = None, environ: Mapping[str, str] = os.environ
) -> Tool:
    """nvcc, checked against `targets`, torch and the host compiler before anything is compiled.

    Looked for in CUDA_HOME, CUDA_PATH, PATH and the package nvidia-cuda-nvcc. Takes at most about 5 seconds.
    """
    origin, path = _nvcc_path(environ)
    where = f"{printable(str(path))} (from {origin})"
    try:
        code, text = ask([str(path), "--version"])
    except OSError as error:
        raise BuildError(f"nvcc {where} cannot be started: {error.strerror}") from error
    if code is None:
        raise BuildError(f"nvcc {where} did not answer --version within 5 s; set CUDA_HOME to a working toolkit")
    match = re.search(r"release (\d+)\.(\d+)", text)
    if code != 0 or not match:
        raise BuildError(
            f"nvcc {where} --version ended with exit code {code} and names no release: {_first_line(text)!r}; "
            "set CUDA_HOME to a working toolkit"
        )
    version = int(match[1]), int(match[2])
    named = f"nvcc {version[0]}.{version[1]} at {where}"
    for target in targets:
        oldest = GPU_TARGETS[target].oldest_cuda
        if version < oldest:
            raise BuildError(
                f"{named} is too old for target {target!r}, which needs CUDA {oldest[0]}.{oldest[1]} or newer; "
                "set CUDA_HOME to a newer toolkit"
            )
    if torch.cuda and int(torch.cuda.split(".")[0]) != version[0]:
        raise BuildError(
            f"{named} and torch {torch.version} at {printable(torch.folder)} disagree: torch is built with CUDA "
            f"{torch.cuda}. Set CUDA_HOME to a CUDA {torch.cuda.split('.')[0]} toolkit, or install a torch built with "
            f"CUDA {version[0]}"
        )
    newest = newest_gcc(str(path))
    if host and newest and "clang" not in host.banner and host.version[0] > newest:
        raise BuildError(
            f"{named} takes gcc up to {newest} as host compiler; {printable(host.path)} is {host.version[0]}."
            f"{host.version[1]}. Pass compiler= with a g++ {newest} or older"
        )
    return Tool(os.path.abspath(path), version, f"{match[0]} ({origin})")


def packaged_cudart(nvcc: str) -> str | None:
    """libcudart of a toolkit in the layout of the PyPI packages: in lib/ under its full name, where nvcc and CMake do
    not look. None for a toolkit with lib64/.
    """
    root = Path(os.path.realpath(nvcc)).parent.parent
    found = [] if (root / "lib64").exists() else sorted((root / "lib").glob("libcudart.so*"))
    return str(found[-1]) if found else None


def find_cutlass() -> tuple[str, str]:
    """Folder and version of the CUTLASS sources that the package nvidia-cutlass carries."""
    package = _package_folder("cutlass_library")
    folder = package / "source" if package else None
    if folder is None or not (folder / "include/cutlass/version.h").is_file():
        raise BuildError("no CUTLASS headers; install them with: python -m pip install 'mla-kernels[gpu]'")
    try:
        version = importlib.metadata.version("nvidia-cutlass")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return str(folder), version


def torch_facts() -> TorchFacts:
    """Folder, version, CUDA version and source revision of the torch that this interpreter would import."""
    folder = _package_folder("torch")
    if folder is None:
        raise BuildError(
            "torch is not installed in this Python environment; install it with: python -m pip install torch"
        )
    text = (folder / "version.py").read_text("utf-8", "replace")
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.M)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.M)
    revision = re.search(r"^git_version\s*=\s*['\"]([^'\"]+)", text, re.M)
    return TorchFacts(
        str(folder),
        version[1] if version else "unknown",
        cuda[1] if cuda else None,
        revision[1] if revision else "unknown",
    )


def cuda_architectures(targets: Iterable[str], arch_list: str = "") -> tuple[list[str], list[str]]:
    """(CMAKE_CUDA_ARCHITECTURES, notes). The targets decide; TORCH_CUDA_ARCH_LIST (`arch_list`) is only explained.

    A plain 9.0 or 10.0 would compile, and the kernel would then print a line on the device and return with its output
    unwritten and no CUDA error, so what is compiled is always the target's "a" or "f" form, as machine code only.
    """
    asked = [arch for target in targets if (arch := TARGETS[target])]
    notes = []
    for entry in re.split(r"[;\s,]+", arch_list.strip()) if asked and arch_list.strip() else []:
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?|[A-Z][A-Za-z+]+", entry)
        if not match:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST holds {printable(entry)!r}; expected entries such as 9.0a, joined by ';'. "
                "Mend or unset it: the targets decide what is compiled"
            )
        served = [arch for arch in asked if arch[:-1] == f"{match[1]}{match[2]}"]
        served += [
            arch for arch in asked if arch.endswith("f") and arch[:-2] == match[1]
        ]  # a family: same major number
        forms = [f"{arch[:-2]}.{arch[-2:]}" for arch in dict.fromkeys(served)]
        if not forms:
            notes.append(f"TORCH_CUDA_ARCH_LIST entry {entry} is left out: no asked target has it")
        elif forms != [entry]:
            notes.append(f"TORCH_CUDA_ARCH_LIST entry {entry} is compiled as {' and '.join(forms)}, without PTX")
    return [f"{arch}-real" for arch in asked], notes


def elf_section(data: bytes, wanted: bytes) -> bytes:
    """Contents of one section of a 64-bit little-endian ELF file; empty if there is none."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        start = headers[names][4] + name
        if data[start : data.index(b"\0", start)] == wanted:
            return data[offset : offset + length]
    return b""


def _fatbin_architectures(data: bytes) -> set[str]:
    """Architectures of the images in .nv_fatbin, in the layout that nvcc 13.0 writes."""
    found = set()
    section = elf_section(data, b".nv_fatbin")
    at = 0
    while at + 16 <= len(section):
        magic, _, header, length = struct.unpack_from("<IHHQ", section, at)
        if magic != 0xBA55ED50:
            at += 8  # padding between fat binaries
            continue
        image, end = at + header, at + header + length
        while image < end:
            kind, _, image_header, payload = struct.unpack_from("<HHIQ", section, image)
            (number,) = struct.unpack_from("<I", section, image + 28)
            (flags,) = struct.unpack_from("<Q", section, image + 40)
            form = "a" if flags >> 20 & 1 else "f" if flags >> 21 & 1 else ""
            if kind not in (1, 2) or not image_header:
                raise ValueError(f"unknown image kind {kind}")
            found.add(f"{'compute' if kind == 1 else 'sm'}_{number}{form}")
            image += image_header + payload
        at = end
    return found


def cuobjdumps(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Every cuobjdump here: of CUDA_HOME, on PATH, of the package nvidia-cuda-cuobjdump."""
    candidates: list[Path | str | None] = [shutil.which("cuobjdump", path=environ.get("PATH", ""))]
    if environ.get("CUDA_HOME"):
        candidates.insert(0, Path(environ["CUDA_HOME"]) / "bin" / "cuobjdump")
    package = _package_folder("nvidia")
    candidates += sorted(package.glob("*/bin/cuobjdump")) if package else []
    return [str(program) for program in candidates if program is not None and os.access(program, os.X_OK)]


def embedded_architectures(
    path: str | os.PathLike[str], environ: Mapping[str, str] = os.environ
) -> frozenset[str] | None:
    """GPU architectures inside a built library, as {'sm_90a', 'compute_90a'}: machine code is sm_, PTX is compute_.

    Reads the file's .nv_fatbin section; where that holds nothing that is known here, cuobjdump is asked, if there is
    one. It is not asked first, since cuobjdump 13.5 lists family code (sm_100f) as sm_100. Empty for a library without
    GPU code; None if neither could tell.
    """
    images: set[str] | None = None
    try:
        data = Path(path).read_bytes()
        if data[:6] == b"\x7fELF\x02\x01":
            images = _fatbin_architectures(data)
    except (OSError, ValueError, struct.error):
        pass
    if images:
        return frozenset(images)
    for program in cuobjdumps(environ):
        _, machine_code = ask([program, "--list-elf", os.fspath(path)], 20)
        _, ptx = ask([program, "--list-ptx", os.fspath(path)], 20)
        listed = re.findall(r"^ELF file\s+\d+:.*\.(sm_\d+[af]?)\.cubin", machine_code, re.M)
        listed += [f"compute_{n}" for n in re.findall(r"^PTX file\s+\d+:.*\.sm_(\d+[af]?)\.ptx", ptx, re.M)]
        if listed:
            return frozenset(listed)
    return None if images is None else frozenset()


def cpu_features() -> list[str]:
    """Machine name and the vector features of this processor that code may be compiled or chosen for."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        text = ""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.M)
    features = {word for word in match[1].split() if _FEATURES.match(word)} if match else set()
    return [platform.machine(), *sorted(features)]


def _cgroup_limits() -> tuple[float, float]:
    """(processors, bytes left) of this process's control groups (version 2); infinite where there is no limit."""
    cores = memory = float("inf")
    try:
        line = next(x for x in Path("/proc/self/cgroup").read_text().splitlines() if x.startswith("0::"))
    except (OSError, StopIteration):
        return cores, memory
    folder = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
    for group in [folder, *folder.parents]:
        if not group.is_relative_to("/sys/fs/cgroup"):
            break
        try:
            limit, used = (group / "memory.max").read_text().strip(), (group / "memory.current").read_text().strip()
            if limit != "max":
                memory = min(memory, int(limit) - int(used))
        except (OSError, ValueError):
            pass
        try:
            quota, period = (group / "cpu.max").read_text().split()
            if quota != "max":
                cores = min(cores, int(quota) / int(period))
        except (OSError, ValueError):
            pass
    return cores, memory


def choose_jobs(gpu: bool) -> int:
    """Compilers to run at once: one a usable core, at most one for each 0.75 GiB of free memory (4 GiB for GPU code).

    gcc 12 takes 0.22 GiB for the largest file of the CPU target.
    """
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:
        meminfo = ""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.M)
    cores, memory = _cgroup_limits()
    if match:
        memory = min(memory, int(match[1]) * 1024)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    per_job = (4.0 if gpu else 0.75) * 2**30
    return int(max(1, min(usable, cores, memory / per_job)))
