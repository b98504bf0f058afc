# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The build: cache, key, arguments, compiler output, odd paths. What is compiled is a tiny stand-in for csrc/."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import time
from pathlib import Path

import nbclient
import nbformat
import pytest
from build_stubs import (
    BUILD,
    ODD,
    Site,
    calls,
    finish,
    result,
    script,
    set_value,
    stub_compiler,
    value_of,
    write_tree,
)

from mla_kernels import _plan, _store, build, toolchain
from mla_kernels.build import BuildError

ROOT = os.geteuid() == 0
REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


# What is in the cache, and under which key


def test_first_build_compiles_second_does_not(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    first = site.build()
    assert first.rebuilt
    assert value_of(first.path) == 1
    assert first.path.name.startswith(f"libmla_kernels-{first.key}")
    assert first.log.read_text().count("$ [") == 2
    assert {"compiler", "torch", "cpu", "flags", "jobs", "options"} <= first.info.keys()
    assert first.info["jobs"] == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 2  # where it is building, and that it is built
    second = site.build()
    assert not second.rebuilt
    assert (second.path, second.key, second.seconds, second.log) == (first.path, first.key, first.seconds, first.log)
    assert capfd.readouterr() == ("", "")
    assert calls(site.compiler) == 1


def test_force_compiles_again_and_old_file_stays(site: Site) -> None:
    first = site.build()
    again = site.build(force=True)
    assert again.rebuilt
    assert calls(site.compiler) == 2
    assert again.key == first.key
    assert first.path.exists()


def test_edited_header_builds_a_new_file(site: Site) -> None:
    first = site.build()
    set_value(site.tree, 2)
    second = site.build()
    assert second.rebuilt
    assert second.path != first.path
    assert (value_of(first.path), value_of(second.path)) == (1, 2)
    set_value(site.tree, 1)
    assert site.build().path == first.path
    assert calls(site.compiler) == 2


def test_failure_is_not_remembered(site: Site) -> None:
    text = (site.tree / "include/value.h").read_text()
    for _ in range(2):
        set_value(site.tree, "not_declared_anywhere")
        with pytest.raises(
            BuildError, match=r"(?s)compiling cpu failed: exit code 1 .*not_declared_anywhere.*last lines"
        ):
            site.build()
    assert calls(site.compiler) == 2
    (site.tree / "include/value.h").write_text(text)
    assert site.build().rebuilt
    assert site.left_over() == []


def test_ninja_missing_then_added(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with_ninja = os.environ["PATH"]
    ninja = toolchain.find_tool("ninja", (1, 10)).path
    cmake = toolchain.find_tool("cmake", (3, 25)).path
    folder = site.folder / "tools"
    folder.mkdir()
    (folder / "cmake").symlink_to(cmake)
    monkeypatch.setenv("PATH", str(folder))
    found = toolchain._package_folder
    monkeypatch.setattr(toolchain, "_package_folder", lambda name: None if name == "ninja" else found(name))
    with pytest.raises(BuildError, match=r"ninja 1\.10 or newer is needed; found neither on PATH.*pip install ninja"):
        site.build()
    (folder / "ninja").symlink_to(ninja)
    monkeypatch.setenv("PATH", f"{folder}:{with_ninja}")
    assert site.build().rebuilt


def key_inputs() -> dict[str, object]:
    """Each entry changes one thing that must change the key."""

    def flags(site: Site, patch: pytest.MonkeyPatch) -> None:
        patch.setenv("CXXFLAGS", "-g")

    def torch(site: Site, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(toolchain, "torch_facts", lambda: toolchain.TorchFacts("/torch", "2.14.0", None, "abc"))

    def cpu(site: Site, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(toolchain, "cpu_features", lambda: ["x86_64", "avx9"])

    def compiler_version(site: Site, patch: pytest.MonkeyPatch) -> None:
        script(site.compiler, "echo c++ 99.1.0\n")

    return {
        "header edited": lambda site, _: set_value(site.tree, 7),
        "source edited": lambda site, _: (site.tree / "cpu/probe.cpp").open("a").write("// more\n"),
        "CMakeLists edited": lambda site, _: (site.tree / "CMakeLists.txt").open("a").write("# more\n"),
        "file added": lambda site, _: (site.tree / "include/new.h").write_text(""),
        "file renamed": lambda site, _: (site.tree / "include/value.h").rename(site.tree / "include/values.h"),
        "flags": flags,
        "torch": torch,
        "cpu": cpu,
        "compiler version": compiler_version,
    }


@pytest.mark.parametrize("name", key_inputs())
def test_key_changes_with(site: Site, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = site.plan().key
    assert site.plan().key == before
    key_inputs()[name](site, monkeypatch)  # type: ignore[operator]
    assert site.plan().key != before


def test_key_changes_with_options(site: Site) -> None:
    other = stub_compiler(site.folder / "bin2" / "c++")
    keys = {site.plan(**change).key for change in ({}, {"fast_math": True}, {"compiler": other})}
    assert len(keys) == 3


def test_key_does_not_depend_on_notes_backups_or_place(site: Site) -> None:
    before = site.plan().key
    for name in ("README.md", "cpu/.probe.cpp.swp", "cpu/probe.cpp~"):
        (site.tree / name).write_text("x")
    moved = site.folder / "elsewhere"
    shutil.copytree(site.tree, moved)
    assert site.plan().key == site.plan(source_dir=moved).key == before


def test_linked_folders_of_sources_are_in_the_key(site: Site) -> None:
    outside = site.folder / "outside"
    outside.mkdir()
    (outside / "more.h").write_text("1")
    (site.tree / "linked").symlink_to(outside)
    (outside / "loop").symlink_to(outside)
    before = site.plan().key
    (outside / "more.h").write_text("2")
    assert site.plan().key != before


def test_sources_edited_while_compiling(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    header = shlex.quote(str(tmp_path / "csrc/include/value.h"))
    site = Site(tmp_path, f"echo '#define VALUE 5' > {header}")
    built = site.build()
    assert value_of(built.path) == 5
    assert built.key == site.plan().key  # of the sources that are in it
    assert calls(site.compiler) == 2
    assert "starting over" in capfd.readouterr().err
    stub_compiler(site.compiler, f"echo '#define VALUE 6 //' $$ > {header}")
    with pytest.raises(BuildError, match="was edited while it was compiled, 5 times; build when it rests"):
        site.build(force=True)
    assert site.left_over() == []


@pytest.mark.parametrize("damage", ["cut short", "one byte", "gone", "manifest cut", "manifest of another key"])
def test_damaged_entry_is_built_again(site: Site, damage: str, capfd: pytest.CaptureFixture[str]) -> None:
    built = site.build()
    manifest = built.path.with_name("manifest.json")
    block = built.path.read_bytes()
    if damage == "cut short":
        built.path.write_bytes(block[: len(block) // 2])
    elif damage == "one byte":
        built.path.write_bytes(block[:-1] + bytes([block[-1] ^ 1]))
    elif damage == "gone":
        built.path.unlink()
    elif damage == "manifest cut":
        manifest.write_text(manifest.read_text()[:50])
    else:
        manifest.write_text(manifest.read_text().replace(built.key, "0" * 16))
    with pytest.raises(BuildError, match=r"is not loaded: .*Build it again"):
        build.load(built)
    capfd.readouterr()
    again = site.build()
    assert again.rebuilt
    assert value_of(again.path) == 1
    assert "the cached library of key" in capfd.readouterr().err
    assert not site.build().rebuilt


def test_old_entries_and_logs_are_pruned(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store, "KEPT_ENTRIES", 2)
    built = site.build()
    old, fresh, week_ago = site.cache / "old", site.cache / "fresh", time.time() - 7 * 86400
    for entry in (old, fresh, site.cache / "fresher"):
        entry.mkdir()
        (entry / "manifest.json").write_text("{}")
    os.utime(old / "manifest.json", (week_ago, week_ago))
    for i in range(9):
        (built.path.parent / f"build-2020010{i}T000000-1.log").write_text("")
    _store.prune(site.cache, built.key)
    assert not old.exists()
    assert fresh.exists()  # used within a day
    logs = sorted(built.path.parent.glob("*.log"))
    assert len(logs) == _store.KEPT_LOGS
    assert built.log in logs


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "cpu"}, r"targets: expected a sequence of names such as \('cpu',\), got 'cpu'"),
        ({"targets": ()}, r"targets: expected a sequence of names"),
        ({"targets": ("sm_90a",)}, r"targets: unknown target 'sm_90a'; there are cpu, .*did you mean 'sm90a'"),
        ({"jobs": 0}, r"jobs: expected a whole number of at least 1 or None, got 0"),
        ({"jobs": 1.5}, r"jobs: expected a whole number of at least 1 or None, got 1\.5"),
        ({"build_timeout": 0}, r"build_timeout: expected seconds above 0, got 0"),
        ({"build_timeout": float("nan")}, r"build_timeout: expected seconds above 0, got nan"),
    ],
)
def test_bad_argument_is_named(site: Site, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        site.build(**options)
    assert calls(site.compiler) == 0


def test_missing_things_are_named(site: Site) -> None:
    with pytest.raises(BuildError, match=r"source_dir: no CMakeLists\.txt in .*nowhere.*Pass source_dir="):
        site.build(source_dir=site.folder / "nowhere")
    with pytest.raises(BuildError, match=r"targets: sm100a is not implemented in .*csrc, which has: cpu"):
        site.build(targets=("cpu", "sm100a"))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: compiler='.*none' is not an executable file"):
        site.build(compiler=site.folder / "none")
    with pytest.raises(TypeError, match="a build and options for another one"):
        build.load(build.Built(Path("x"), "k", ("cpu",), Path("l"), 0.0, False, {}), fast_math=True)


def test_jobs_come_from_memory_and_cores(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(toolchain, "_cgroup_limits", lambda: (float("inf"), float("inf")))
    assert 1 <= toolchain.choose_jobs(gpu=False) <= cores
    monkeypatch.setattr(toolchain, "_cgroup_limits", lambda: (float("inf"), 2**30))
    assert site.build(jobs=None).info["jobs"] == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for memory, gpu, jobs in ((6 * 2**30, False, 8), (12 * 2**30, True, 3), (1, True, 1)):
        monkeypatch.setattr(toolchain, "_cgroup_limits", lambda memory=memory: (float("inf"), memory))
        assert toolchain.choose_jobs(gpu) <= jobs
    monkeypatch.setattr(toolchain, "_cgroup_limits", lambda: (1.5, float("inf")))
    assert toolchain.choose_jobs(gpu=False) == 1


# Output (W2, W20)


def test_flood_goes_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    site = Site(tmp_path, "yes 'probe.cpp:1:1: warning: something long enough to be seen' | head -300000 >&2")
    built = site.build()
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("", 2)
    with open(built.log, "rb") as log:
        assert sum(1 for _ in log) > 300000


def test_error_is_picked_out_of_a_flood(tmp_path: Path) -> None:
    site = Site(tmp_path, "echo 'probe.cpp:3:4: error: the one that matters'; seq 300000; exit 7")
    with pytest.raises(BuildError) as caught:
        site.build()
    message = str(caught.value)
    assert "first errors:\n  probe.cpp:3:4: error: the one that matters" in message
    assert "300000" in message
    assert "299000" not in message
    assert len(message) < 10000
    log = Path(re.search(r"last lines of (.*\.log):", message)[1])  # type: ignore[index]
    assert log.stat().st_size > 300000 * 6


def test_memory_kill_is_explained(tmp_path: Path) -> None:
    site = Site(tmp_path, "echo 'c++: fatal error: Killed signal terminated program cc1plus'; exit 1")
    with pytest.raises(
        BuildError, match=r"a compiler was killed, most likely for want of memory: 1 ran at once, pass jobs=1"
    ):
        site.build()


FOREIGN = r"""printf 'probe.cpp:1: error: erreur \351t\350 / \203\107\203\211\201\133 / a\000b\033[31m\n'; exit 3"""


def test_foreign_bytes_under_an_ascii_locale(tmp_path: Path) -> None:
    """Latin-1, Shift-JIS, NUL, an escape sequence: the real error and the exit code arrive, as text that JSON takes."""
    site = Site(tmp_path, FOREIGN)
    code = """
        try:
            build.build(source_dir=sys.argv[1], cache_dir=sys.argv[2], compiler=sys.argv[3])
        except build.BuildError as error:
            print(json.dumps(str(error)))
    """
    process = site.child(code, LANG="C", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    out, _ = finish(process)
    message = json.loads(out)
    message.encode("utf-8")
    assert "error: erreur \ufffdt\ufffd /" in message
    assert re.search(r"exit code [13] ", message)  # Ninja 1.11 ends with 1, from 1.12 on with the compiler's own code
    assert "\0" not in message
    assert "\033" not in message


def test_notebook_stays_small_and_valid(tmp_path: Path) -> None:
    """A notebook under an ASCII locale: a build that floods passes, one that speaks foreign bytes fails with it."""
    good = Site(tmp_path / "good", "seq 300000")
    bad = Site(tmp_path / "bad", FOREIGN)
    cells = ["from mla_kernels import build"]
    for site in (good, bad):
        options = {name: str(value) if isinstance(value, Path) else value for name, value in site.options.items()}
        cells.append(f"built = build.build(**{options!r})\nbuilt.log")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    environment = {**os.environ, "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    client = nbclient.NotebookClient(notebook, timeout=60, allow_errors=True, kernel_name="python3")
    client.execute(env=environment)
    text = nbformat.writes(notebook)
    assert len(text) < 100_000
    json.loads(text.encode("utf-8"))
    assert not any(o["output_type"] == "error" for o in notebook.cells[1].outputs)
    assert "build-" in notebook.cells[1].outputs[-1]["data"]["text/plain"]
    error = next(o for o in notebook.cells[2].outputs if o["output_type"] == "error")
    assert error["ename"] == "BuildError"
    assert "error: erreur \ufffdt\ufffd /" in error["evalue"]


# Paths (W19)


def odd_site(tmp_path: Path) -> Site:
    site = Site(tmp_path / "plain")
    site.tree = write_tree(tmp_path / ODD / "csrc")
    site.cache = tmp_path / ODD / "cache"
    site.compiler = stub_compiler(
        tmp_path / ODD / "my c++", f'printf "%s\\n" "$@" > {shlex.quote(str(tmp_path / "arguments"))}'
    )
    return site


@pytest.mark.parametrize("locale", [{}, {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_odd_paths_build(tmp_path: Path, locale: dict[str, str]) -> None:
    site = odd_site(tmp_path)
    code = BUILD.replace("str(built.path)", "os.fsencode(built.path).decode('utf-8')").replace(
        "print(", "sys.stdout.reconfigure(encoding='utf-8'); print("
    )
    process = site.child(code, **locale)
    path, _, rebuilt, _, _ = result(process)
    assert rebuilt
    assert Path(str(path)).is_relative_to(site.cache)
    assert value_of(Path(str(path))) == 1
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert sum(argument.endswith("/cpu/probe.cpp") for argument in arguments) == 1
    assert sum(argument.startswith("-I") for argument in arguments) == 1
    assert not list(
        Path("/tmp").glob(f"building-{process.pid}-*")
    )  # the private folder, outside the odd cache, is gone


def test_odd_paths_in_messages_are_the_real_ones(tmp_path: Path) -> None:
    site = odd_site(tmp_path)
    set_value(site.tree, "not_declared_anywhere")
    with pytest.raises(BuildError) as caught:
        site.build()
    assert f"{site.tree}/include/value.h:1:" in str(caught.value)


def test_dry_run_shows_one_argument_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Source, compiler, torch, CUTLASS, nvcc, CMake and Ninja under odd folders: one argument each, by a link."""
    site = odd_site(tmp_path)
    odd = tmp_path / ODD
    (site.tree / "sm90a").mkdir()
    tools = {name: script(odd / "tools" / "bin" / name, f"echo {name} version 3.99.1\n") for name in ("cmake", "ninja")}
    nvcc = script(odd / "cuda" / "bin" / "nvcc", "echo release 13.0, V13.0.88\n")
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: (str(odd / "cutlass"), "4.2.0.0"))
    monkeypatch.setattr(toolchain, "torch_facts", lambda: toolchain.TorchFacts(str(odd / "torch"), "2.13.0", None, "x"))
    monkeypatch.setenv("CUDA_HOME", str(odd / "cuda"))
    monkeypatch.setenv("PATH", f"{odd / 'tools' / 'bin'}:{os.environ['PATH']}")
    plan = site.plan(targets=("sm90a", "cpu"))
    configure, compile_ = plan.commands("/work_folder", jobs=3)
    assert all(_plan.PLAIN.fullmatch(argument.partition("=")[2] or argument.lstrip("-")) for argument in compile_)
    given = dict(argument[2:].split("=", 1) for argument in configure if argument.startswith("-D"))
    links = plan.links("/work_folder")
    assert links[given["CMAKE_CXX_COMPILER"]] == str(site.compiler)
    assert links[given["MLA_TORCH_DIR"]] == str(odd / "torch")
    assert links[given["MLA_CUTLASS_DIR"]] == str(odd / "cutlass")
    assert links[given["CMAKE_CUDA_COMPILER"]] == str(nvcc)
    assert links[configure[configure.index("-S") + 1]] == str(site.tree)
    assert links["/work_folder/links/cmake"] == str(tools["cmake"].parent.parent)
    assert links[given["CMAKE_MAKE_PROGRAM"]] == links[compile_[0]] == str(tools["ninja"])
    assert given["MLA_TARGETS"] == "cpu;sm90a"
    assert given["CMAKE_CUDA_ARCHITECTURES"] == "90a-real"
    for command in (configure, compile_):
        assert shlex.split(shlex.join(command)) == command
        assert not any(character in argument for argument in command for character in " \"'$()&")
