# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Compile the kernels from Python, and load them into this process.

    from mla_kernels import build
    built = build.load(targets=("cpu",))  # compiles on the first call; later calls and processes load the same file

`build` drives CMake and Ninja over csrc/ and keeps the library in a per-user cache, under a key over everything that
went into it. `load` loads it and tests it once. Import starts neither. Progress is a few lines on standard error; the
compiler's output goes to a log file, whose end is in the BuildError when a build fails.
"""

from __future__ import annotations

import _ctypes
import argparse
import collections
import contextlib
import ctypes
import functools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mla_kernels import _store, toolchain
from mla_kernels._plan import PLAIN, Plan, plan, source_digest
from mla_kernels.toolchain import BuildError, embedded_architectures, printable

__all__ = [
    "BuildError",
    "Built",
    "Plan",
    "available_targets",
    "build",
    "capability_report",
    "embedded_architectures",
    "load",
    "loaded",
    "plan",
]

BUILD_TIMEOUT = 3600.0  # seconds; one instantiation of the Blackwell MLA kernel takes 65 s of a core
EDITS = 5  # how often a build starts over because its sources changed under it
TAIL_LINES, ERROR_LINES, LINE_LENGTH = 20, 5, 300

# Variables that would change what is run or printed; the build does not see them.
_HIDDEN = re.compile(
    r"LC_\w+|LANG|LANGUAGE|CMAKE_GENERATOR\w*|CMAKE_BUILD_TYPE|DESTDIR|MAKEFLAGS|NINJA_STATUS|TORCH_CUDA_ARCH_LIST"
)
_ERROR = re.compile(
    rb"\berror\b|undefined reference|cannot find -l|No space left|internal compiler error|\bKilled\b|not found", re.I
)


@dataclass(frozen=True)
class Built:
    """A library in the cache.

    path: shared library, its name carries the key. key: hex digits over everything that went into it; also what
    torch.ops.mla_kernels.build_key() returns. targets: sorted. log: full output of the build. seconds: how long
    compiling took, also when it now came from the cache. rebuilt: whether this call compiled it. info: compiler, flags,
    torch, CPU features, CUTLASS version, jobs, GPU architectures inside, seconds of each file and of the processors,
    and notes.
    """

    path: Path
    key: str
    targets: tuple[str, ...]
    log: Path
    seconds: float
    rebuilt: bool
    info: dict[str, Any]


def _say(text: str) -> None:
    if sys.stderr is not None:
        print(f"mla_kernels: {printable(text)}", file=sys.stderr, flush=True)


def build(
    targets: Sequence[str] = ("cpu",),
    *,
    fast_math: bool = False,
    first_only: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    source_dir: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    force: bool = False,
    compiler: str | os.PathLike[str] | None = None,
    build_timeout: float = BUILD_TIMEOUT,
) -> Built:
    """The library for `targets`, from the cache or compiled now.

    targets: names from cpu, sm90a, sm100a, sm100f. fast_math: let the compiler reorder fp32 arithmetic. first_only: of
    sm100a and sm100f, compile one instantiation (e4m3, split rows) instead of six, to inspect and not to run: the
    library refuses the others. cache_dir: a folder of your own; by default the user's cache, or a temporary folder
    where that cannot be used. source_dir: by default csrc/. jobs: compilers at once, by default from free memory and
    cores. force: compile even if the cache has it. compiler: path of a C++ compiler. build_timeout: seconds after which
    everything that it started is killed.

    The key covers the contents of all files in csrc/, targets, fast_math, compiler, flags, nvcc, CUTLASS, torch and CPU
    features: editing a header builds again, editing nothing does not. One build runs at a time in a cache; other
    processes and threads wait with a message and use the same file. A build that is killed at any moment leaves nothing
    that loads, and a failure is not remembered. Raises ValueError for arguments, and BuildError with the first errors,
    the end of the log and its path.
    """
    if jobs is not None and (not isinstance(jobs, int) or jobs < 1):
        raise ValueError(f"jobs: expected a whole number of at least 1 or None, got {jobs!r}")
    if not build_timeout > 0:
        raise ValueError(f"build_timeout: expected seconds above 0, got {build_timeout!r}")
    plan_again = functools.partial(
        plan, targets, fast_math=fast_math, first_only=first_only, source_dir=source_dir, compiler=compiler
    )
    asked = plan_again()
    root = _store.open_cache(cache_dir, _say)
    if not force and (found := _from_cache(root, asked)):
        return found
    with _store.lock(root, _say) as held:
        for _ in range(EDITS):
            if not force and (found := _from_cache(root, asked, quiet=True)):
                return found
            used = jobs or toolchain.choose_jobs(any(toolchain.TARGETS[name] for name in asked.targets))
            if built := _compile(root, asked, held, used, build_timeout):
                return built
            _say("the sources were edited while they were compiled; starting over")
            asked = plan_again()
    raise BuildError(f"{asked.paths['source']} was edited while it was compiled, {EDITS} times; build when it rests")


def _as_built(entry: dict[str, Any], targets: tuple[str, ...], rebuilt: bool) -> Built:
    path = Path(entry["path"])
    return Built(path, entry["key"], targets, path.parent / entry["log"], entry["seconds"], rebuilt, entry["info"])


def _from_cache(root: Path, asked: Plan, quiet: bool = False) -> Built | None:
    try:
        entry = _store.lookup(root, asked.key)
    except _store.DamagedEntryError as error:
        if not quiet:
            _say(f"the cached library of key {asked.key} is not used: {error}; building again")
        return None
    return _as_built(entry, asked.targets, rebuilt=False) if entry else None


def _work_parent(root: Path) -> Path:
    """Where a build's private folder goes: in the cache, or in a temporary folder if the cache's path is odd."""
    for folder in (root, Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")):
        if PLAIN.fullmatch(str(folder)) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise BuildError(
        f"cache_dir: {printable(str(root))} has characters that CMake cannot take, and neither {tempfile.gettempdir()} "
        "nor /tmp can be used in its stead; pass a cache_dir= of letters, digits and . _ + - only"
    )


def _compile(root: Path, asked: Plan, held: _store.Held, jobs: int, build_timeout: float) -> Built | None:
    """Compile and store; None if the sources did not stay as they were for their key."""
    start, used_before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with _store.explained(root, "cannot set up the build"):
        work = held.private_folder(_work_parent(root))
        links = asked.links(str(work))
        for link, target in links.items():
            os.makedirs(os.path.dirname(link), exist_ok=True)
            os.symlink(target, link)
        (work / "tmp").mkdir()
        (root / asked.key).mkdir(mode=0o700, exist_ok=True)
        log_path = root / asked.key / f"build-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.log"
        log = open(log_path, "wb", buffering=0)  # noqa: SIM115
    environment = {name: value for name, value in os.environ.items() if not _HIDDEN.fullmatch(name)}
    environment |= {"LC_ALL": "C.UTF-8", "TMPDIR": str(work / "tmp")}
    if cudart := asked.paths.get("cudart"):
        folders = [os.path.dirname(cudart), environment.get("LIBRARY_PATH", "")]
        environment["LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    names = ", ".join(asked.targets)
    _say(f"building {names} (key {asked.key}, {jobs} at once); log: {log_path}")
    for note in asked.notes:
        _say(note)
    with log:
        for step, command in zip(("configuring", "compiling"), asked.commands(str(work), jobs), strict=True):
            with _store.explained(root, f"{step} {names} failed"):
                log.write(f"$ {printable(json.dumps(command, ensure_ascii=False))}\n".encode())
                code = _supervised(command, log, environment, build_timeout - (time.monotonic() - start))
            if code != 0:
                after = f"after {time.monotonic() - start:.1f} s"
                how = f"exit code {code} {after}"
                if code is None:
                    how = f"was ended by build_timeout={build_timeout:g} {after}"
                raise BuildError(_failure(f"{step} {names} failed: {how}", root, log_path, jobs, links))
    library = work / "lib" / "libmla_kernels.so"
    if not library.is_file():
        raise BuildError(_failure(f"compiling {names} made no libmla_kernels.so", root, log_path, jobs, links))
    if source_digest(Path(asked.paths["source"])) != asked.identity["sources"]:
        return None
    architectures = _checked_architectures(library, asked.targets)
    seconds = round(time.monotonic() - start, 3)
    recorded: dict[str, Any] = {
        "jobs": jobs,
        "architectures": architectures,
        "notes": asked.notes,
        "recovered": held.recovered,
    }
    recorded["file_seconds"] = _file_seconds(work / "build" / ".ninja_log")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    recorded["processor_seconds"] = round(
        used.ru_utime + used.ru_stime - used_before.ru_utime - used_before.ru_stime, 1
    )
    with _store.explained(root, "cannot store the library"):
        fields = {"log": log_path.name, "seconds": seconds, "info": {**asked.identity, **recorded}}
        entry = _store.commit(root, asked.key, library, fields)
    _store.prune(root, asked.key)
    _say(f"built {names} in {seconds:.1f} s: {entry['path']}")
    return _as_built(entry, asked.targets, rebuilt=True)


def _file_seconds(ninja_log: Path) -> dict[str, float]:
    """Wall time of each compiled file, from Ninja's log: {"sm100a/launch.cu": 1.5}; empty where there is no log."""
    try:
        lines = ninja_log.read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    seconds = {}
    for line in lines:
        fields = line.split("\t")
        if len(fields) == 5 and fields[3].endswith(".o"):
            name = re.sub(r"CMakeFiles/\w+\.dir/", "", fields[3]).removesuffix(".o")
            seconds[name] = round((int(fields[1]) - int(fields[0])) / 1000, 1)
    return dict(sorted(seconds.items()))


def _supervised(command: list[str], log: BinaryIO, environment: dict[str, str], seconds: float) -> int | None:
    """Run a command, its output in `log`; None if it had to be ended. It never outlives this process or this call."""
    supervisor = [
        sys.executable,
        "-P",
        "-S",
        str(Path(__file__).with_name("_supervise.py")),
        str(os.getpid()),
        *command,
    ]
    process = subprocess.Popen(
        supervisor, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
    )
    assert process.stdin is not None
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.stdin.close()  # the supervisor then ends everything
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(what: str, root: Path, log: Path, jobs: int, links: dict[str, str]) -> str:
    """`what`, the first lines of the log that look like errors, its last lines, its path, and hints."""
    errors: list[str] = []
    last: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
    full = killed = False
    with open(log, "rb") as file:
        while line := file.readline(65536):
            text = printable(line[: 4 * LINE_LENGTH].decode("utf-8", "replace")).strip()[:LINE_LENGTH]
            if not text:
                continue
            for link, target in links.items():
                text = text.replace(link, printable(target))
            last.append(text)
            if not text.startswith("$ ") and _ERROR.search(line):
                full |= b"No space left" in line
                killed |= b"Killed" in line
                if len(errors) < ERROR_LINES:
                    errors.append(text)
    parts = [what]
    with contextlib.suppress(OSError):  # CMake does not always say so, and the log may be what found no room
        full |= shutil.disk_usage(root).free < 2**20
    if full:
        parts.append(_store.disk_full(root))
    if killed:
        parts.append(f"a compiler was killed, most likely for want of memory: {jobs} ran at once, pass jobs=1")
    if errors:
        parts.append("first errors:\n  " + "\n  ".join(errors))
    parts.append(f"last lines of {printable(str(log))}:\n  " + "\n  ".join(last))
    return "\n".join(parts)


def _checked_architectures(library: Path, targets: Sequence[str]) -> list[str] | None:
    """Architectures inside `library`; a GPU target without its "a" form there is refused. None: could not be told."""
    wanted = {f"sm_{toolchain.TARGETS[name]}" for name in targets if toolchain.TARGETS[name]}
    if not wanted:
        return []
    found = embedded_architectures(library)
    if found is None:
        _say(f"the GPU architectures inside {library.name} cannot be read; only the self-test can tell")
        return None
    if missing := sorted(wanted - found):
        raise BuildError(
            f"the library {printable(str(library))} holds {', '.join(sorted(found)) or 'no GPU code'} and not "
            f"{', '.join(missing)}: on the device such a kernel returns with its output unwritten and no error. "
            'Compile for the "a" form'
        )
    return sorted(found)


@dataclass
class _Process:
    """What this process has loaded. Libraries stay loaded; the dispatcher asks the one that was registered last."""

    built: Built | None = None
    opened: set[str] = field(default_factory=set)  # paths, as given to the loader
    lock: threading.RLock = field(default_factory=threading.RLock)


_process = _Process()


def loaded() -> Built | None:
    """The build that answers in this process; None if there is none."""
    return _process.built


def load(built: Built | None = None, *, targets: Sequence[str] = ("cpu",), **build_options: Any) -> Built:
    """Load a build into this process and test it: `built`, else what `build(targets, **build_options)` gives.

    May be called again with another build, which then answers in place of the one before: after an edit of csrc/,
    calling it again in the same process gives the new code. The first load of a build runs the self-test: outputs
    filled with NaN, a small case with a known answer, on the CPU and on one present GPU of each built target. It takes
    milliseconds; info["self_test"] says for each target where it passed, or why it was not run (no such GPU here). A
    library that fails is unloaded and raises BuildError; whatever answered before answers again. No GPU and no driver
    are needed.
    """
    if built is None:
        built = build(targets, **build_options)
    elif build_options:
        raise TypeError(
            f"load: got a build and options for another one ({', '.join(build_options)}); give one of the two"
        )
    with _process.lock:
        if _process.built is not None and _process.built.path == built.path:
            return built
        _check_file(built)
        _activate(built)
        _process.built = built
    return built


def _check_file(built: Built) -> None:
    try:
        entry = _store.lookup(built.path.parent.parent, built.key)
    except _store.DamagedEntryError as error:
        raise BuildError(f"{printable(str(built.path))} is not loaded: {error}. Build it again") from error
    if entry is None or entry["path"] != built.path:
        raise BuildError(f"{printable(str(built.path))} is not loaded: it is no longer in the cache. Build it again")
    _checked_architectures(built.path, built.targets)


def _activate(built: Built) -> None:
    """Load, compare keys, self-test. On a fault the library is unloaded, and the kernels from before answer again."""
    import torch

    from mla_kernels import ops  # noqa: F401  (defines the schemas that the library implements)

    path = _open(built)
    try:
        start = time.monotonic()
        key = torch.ops.mla_kernels.build_key()
        faults = [f"it answers with key {key}"] if key != built.key else _self_test(built.targets)
        built.info["self_test_seconds"] = round(time.monotonic() - start, 4)
    except Exception as error:
        faults = [f"{type(error).__name__}: {error}"]
    if not faults:
        built.info["self_test"] = _tested(built.targets)
        for target, words in built.info["self_test"].items():
            if words.startswith("not run"):
                _say(f"{target} is loaded; its self-test is {words}")
        return
    if not _close(path):  # it stays registered, in front of the one from before
        if _process.built is not None:
            _open(_process.built)
        else:
            faults.insert(0, "it could not be unloaded and still answers in this process: restart this process")
    raise BuildError(
        f"{printable(str(built.path))} fails its self-test and is not used; build it with force=True, or report it:\n  "
        + "\n  ".join(faults[:ERROR_LINES])
    )


def _open(built: Built) -> str:
    """Load the library, so that its kernels are the newest; the path it was loaded from."""
    import torch

    path = built.path
    if str(path) in _process.opened:  # the loader would hand out the old copy, registered before the newest
        path = path.with_name(f".again-{os.getpid()}-{os.urandom(4).hex()}.so")
        shutil.copyfile(built.path, path)
    try:
        with _without_override_warning():
            torch.ops.load_library(str(path))
    except OSError as error:
        raise BuildError(f"{printable(str(built.path))} cannot be loaded: {error.__cause__ or error}") from error
    finally:
        if path != built.path:
            path.unlink()
    _process.opened.add(str(path))
    return str(path)


def _close(path: str) -> bool:
    """Unload a library, by closing both handles on it, torch's and this one; whether it is gone, with its kernels."""
    try:
        handle = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)._handle
    except OSError:  # a copy whose file is deleted
        return False
    _ctypes.dlclose(handle)
    _ctypes.dlclose(handle)
    try:
        ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
    except OSError:
        _process.opened.discard(path)
        return True
    return False


def _self_test(targets: Sequence[str]) -> list[str]:
    from mla_kernels import _selftest

    return _selftest.self_test(targets, toolchain.DEVICE_TARGETS)


def _tested(targets: Sequence[str]) -> dict[str, str]:
    """For each target: on which device its self-test passed, or why it was not run."""
    from mla_kernels import _selftest

    found = _selftest.devices(targets, toolchain.DEVICE_TARGETS)
    return {
        name: f"passed on {device}" if device else f"not run: {_devices_text(name)}" for name, device in found.items()
    }


_OVERRIDE = re.compile(rb"^[^\n]*Warning only once for all operators.*?new kernel:[^\n]*\n", re.S | re.M)


@contextlib.contextmanager
def _without_override_warning() -> Iterator[None]:
    """Holds back what is written to file descriptor 2, and passes it on without torch's warning about replaced kernels.

    That is what loading a second build means to do; the warning comes from C++, where Python's filters do not reach.
    """
    try:
        saved = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            if text := _OVERRIDE.sub(b"", held.read()):
                os.write(2, text)


def _reasons(check: Callable[[], object]) -> str:
    try:
        check()
    except (BuildError, ValueError) as error:
        return str(error)
    return ""


def _devices_text(target: str) -> str:
    """Why `target` cannot run here; empty if it can."""
    if target == "cpu":
        return ""
    import torch

    if torch.version.cuda is None:
        return f"no CUDA: torch {torch.__version__} is built without it"
    if not torch.cuda.is_available():
        return f"no CUDA device: torch {torch.__version__} finds no usable driver or GPU"
    seen = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    choices = [toolchain.device_choice(capability) for capability in seen]
    if target in (choice.target for choice in choices):
        return ""
    wanted = next(capability for capability, name in toolchain.DEVICE_TARGETS.items() if name == target)
    here = "; ".join(dict.fromkeys(choice.message for choice in choices))
    return f"it runs on compute capability {wanted[0]}.{wanted[1]} only; here: {here}"


def capability_report(
    *, source_dir: str | os.PathLike[str] | None = None, compiler: str | os.PathLike[str] | None = None
) -> list[dict[str, Any]]:
    """One row a target: target, can_build, can_load, can_run (booleans), and why not, in words. Compiles nothing.

    can_load says that the library, wherever it was built, can be loaded here (a torch is enough: no driver is needed);
    can_run that a device for the target is here.
    """
    rows = []
    for target in toolchain.TARGETS:
        build_fault = _reasons(functools.partial(plan, (target,), source_dir=source_dir, compiler=compiler))
        load_fault = _reasons(toolchain.torch_facts)
        run_fault = load_fault or _devices_text(target)
        faults = {"build": build_fault, "load": load_fault, "run": run_fault}
        why = "; ".join(f"{verb}: {fault}" for verb, fault in faults.items() if fault)
        rows.append({"target": target, **{f"can_{verb}": not fault for verb, fault in faults.items()}, "why": why})
    return rows


def available_targets(
    *, source_dir: str | os.PathLike[str] | None = None, compiler: str | os.PathLike[str] | None = None
) -> tuple[str, ...]:
    """Targets that can be built here; `capability_report` says what keeps the others out.

    sm100f holds the same kernels as sm100a and is only among them where a device of compute capability 10.3 is here.
    """
    report = capability_report(source_dir=source_dir, compiler=compiler)
    asked = {name for name, target in toolchain.GPU_TARGETS.items() if target.on_request}
    return tuple(row["target"] for row in report if row["can_build"] and (row["can_run"] or row["target"] not in asked))


def _main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mla_kernels.build", description="Build the kernels, load and test them."
    )
    parser.add_argument(
        "--target", action="append", choices=list(toolchain.TARGETS), help="default: all that can be built here"
    )
    parser.add_argument("--fast-math", action="store_true", help="let the compiler reorder fp32 arithmetic")
    parser.add_argument("--force", action="store_true", help="compile even if the cache has it")
    parser.add_argument("--jobs", type=int, help="compilers at once; default: from free memory and cores")
    parser.add_argument("--cache-dir", help="default: the user's cache folder")
    parser.add_argument("--compiler", help="C++ compiler; default: CXX, c++, g++ or clang++")
    options = parser.parse_args(arguments)
    for row in capability_report(compiler=options.compiler):
        cells = [f"{verb} {'yes' if row[f'can_{verb}'] else 'no'}" for verb in ("build", "load", "run")]
        print(f"{row['target']}: {', '.join(cells)}{'. ' + printable(row['why']) if row['why'] else ''}")
    targets = options.target or available_targets(compiler=options.compiler)
    try:
        built = load(
            build(
                targets or ("cpu",),
                fast_math=options.fast_math,
                force=options.force,
                jobs=options.jobs,
                cache_dir=options.cache_dir,
                compiler=options.compiler,
            )
        )
    except (BuildError, ValueError) as error:
        print(printable(str(error)), file=sys.stderr)
        return 1
    path, log = printable(str(built.path)), printable(str(built.log))
    tested = [name for name, words in built.info["self_test"].items() if words.startswith("passed")]
    said = f"passes its self-test ({', '.join(tested)})" if tested else "is loaded, its self-test was not run"
    if len(tested) == len(built.targets):
        said = "passes its self-test"
    print(f"{', '.join(built.targets)}: {path} {said}; log: {log}")
    return 0


if __name__ == "__main__":
    from mla_kernels.build import (
        _main as _main_of_the_package,
    )  # this file runs as __main__: the state lives in the package

    sys.exit(_main_of_the_package())
