# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Builds that are killed, interrupted or timed out, lock files, and several processes at once, with stub compilers."""

from __future__ import annotations

import re
import signal
import textwrap
import threading
import time
from pathlib import Path

import pytest
from build_stubs import BUILD, Site, alive, calls, child, result, stub_compiler, value_of, wait_for

from mla_kernels import build
from mla_kernels.build import BuildError


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def assert_recovers(site: Site, killed: int, compilations: int) -> None:
    key = site.plan().key
    assert not (site.cache / key / "manifest.json").exists()
    path, _, rebuilt, _, err = result(site.child())
    assert rebuilt
    assert f"recovered: the build of process {killed}" in str(err)
    assert value_of(Path(str(path))) == 1
    assert calls(site.compiler) == compilations
    assert site.left_over() == []
    assert "recovered" not in str(result(site.child())[-1])


@pytest.mark.parametrize("moment", ["before", "during"])
def test_kill_before_and_during_the_compile(tmp_path: Path, moment: str) -> None:
    pid_file, go = tmp_path / "pid", tmp_path / "go"
    body = f"if [ ! -e {go} ]; then echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; sleep 300; fi"
    site = Site(tmp_path)
    stub_compiler(site.compiler, body, on="CMakeCXXCompilerABI.cpp" if moment == "before" else "probe.cpp")
    process = site.child()
    wait_for(pid_file.exists)
    compiler = int(pid_file.read_text())
    assert alive(compiler)
    process.kill()
    process.communicate()
    wait_for(lambda: not alive(compiler), 5)  # no orphan is left running
    go.touch()
    compiled = calls(site.compiler)
    Path(f"{site.compiler}.count").unlink()
    assert compiled == 1
    assert_recovers(site, process.pid, 1)


@pytest.mark.parametrize(
    "written", ["nothing", "half of the library", "the library", "the manifest under its first name"]
)
def test_kill_just_after_the_compile(site: Site, written: str) -> None:
    """At four points of storing the result the process kills itself with SIGKILL."""
    code = f"""
        import signal
        from pathlib import Path
        written, real = {written!r}, _store._write
        def write(path, block):
            manifest = path.name == "manifest.json"
            if written == "the library" and manifest or written == "nothing":
                os.kill(os.getpid(), signal.SIGKILL)
            if written == "half of the library":
                path.with_name(f".incoming-1-{{path.name}}").write_bytes(block[: len(block) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            if manifest:
                os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            real(path, block)
        _store._write = write
    """
    process = site.child(textwrap.dedent(code) + BUILD)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert_recovers(site, process.pid, 2)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "12345\n",
        "held by somebody",
        "[1, 2]",
        '{"pid": "x"}',
        "\xff\0",
        '{"pid": 1, "since": "", "folders": ["VICTIM"]}',
    ],
)
def test_lock_file_left_by_hand_blocks_nobody(site: Site, content: str) -> None:
    victim = site.folder / "victim"
    victim.mkdir()
    site.cache.mkdir(mode=0o700)
    (site.cache / "lock").write_text(content.replace("VICTIM", str(victim)), "latin-1")
    assert site.build().rebuilt
    assert victim.exists()  # only folders named like a build's own are removed
    assert (site.cache / "lock").read_bytes() == b""


def test_lock_that_cannot_be_opened_is_explained(site: Site) -> None:
    (site.cache / "lock").mkdir(parents=True)
    site.cache.chmod(0o700)
    with pytest.raises(BuildError, match=r"cannot lock the cache: Is a directory .*pass another cache_dir="):
        site.build()


def test_six_processes_one_compile(tmp_path: Path) -> None:
    site = Site(tmp_path, "sleep 5")
    results = [result(process) for process in [site.child() for _ in range(6)]]
    assert calls(site.compiler) == 1
    assert len({tuple(map(str, (path, key, digest))) for path, key, _, digest, _ in results}) == 1
    assert [rebuilt for _, _, rebuilt, _, _ in results].count(True) == 1
    waited = [err for _, _, rebuilt, _, err in results if not rebuilt]
    assert len(waited) == 5
    assert all(re.search(r"waiting for the build of (process \d+, since|another process)", str(err)) for err in waited)


def test_six_processes_first_one_killed(tmp_path: Path) -> None:
    site = Site(tmp_path, "sleep 5")
    first = site.child()
    wait_for(lambda: calls(site.compiler) == 1)
    others = [site.child() for _ in range(5)]
    time.sleep(1.5)  # all are waiting
    first.kill()
    first.communicate()
    results = [result(process) for process in others]
    assert calls(site.compiler) == 2
    assert [rebuilt for _, _, rebuilt, _, _ in results].count(True) == 1
    assert len({(path, digest) for path, _, _, digest, _ in results}) == 1
    assert sum(f"recovered: the build of process {first.pid}" in str(err) for *_, err in results) == 1


def test_threads_of_one_process_compile_once(tmp_path: Path) -> None:
    site = Site(tmp_path, "sleep 1")
    results: list[build.Built] = []
    threads = [threading.Thread(target=lambda: results.append(site.build())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert calls(site.compiler) == 1
    assert sorted(built.rebuilt for built in results) == [False, False, True]


def test_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A worker forked during a build outlives the builder, with copies of what it had open; nothing waits for it."""
    site = Site(tmp_path, f"if [ ! -e {tmp_path}/go ]; then echo $$ > {tmp_path}/busy; sleep 300; fi")
    code = """
        import threading, time
        def fork():
            while not os.path.exists(sys.argv[4] + "/busy"):
                time.sleep(0.02)
            if os.fork() == 0:
                for fd in (1, 2):
                    os.close(fd)
                time.sleep(30)
                os._exit(0)
            os.kill(os.getpid(), 9)
        threading.Thread(target=fork).start()
    """
    process = child(textwrap.dedent(code) + BUILD, site.tree, site.cache, site.compiler, tmp_path)
    process.communicate(timeout=30)
    wait_for(lambda: not alive(int((tmp_path / "busy").read_text())), 5)
    (tmp_path / "go").touch()
    start = time.monotonic()
    assert result(site.child())[2]
    assert time.monotonic() - start < 15


def test_interrupt_ends_the_compiler_and_frees_the_lock(tmp_path: Path) -> None:
    site = Site(tmp_path, f"if [ ! -e {tmp_path}/go ]; then echo $$ > {tmp_path}/pid; sleep 300; fi")
    process = site.child()
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    compiler = int((tmp_path / "pid").read_text())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in err
    assert not alive(compiler)
    assert site.left_over() == []
    (tmp_path / "go").touch()
    assert site.build().info["recovered"] is None


def test_build_timeout_ends_everything(tmp_path: Path) -> None:
    """The compiler leaves behind a process that has no parent and a session of its own: that one is ended too."""
    site = Site(tmp_path, f"(setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 300' &)\nsleep 300")
    start = time.monotonic()
    with pytest.raises(BuildError, match=r"compiling cpu failed: was ended by build_timeout=3 after [34]\.\d s"):
        site.build(build_timeout=3)
    assert time.monotonic() - start < 6
    assert not alive(int((tmp_path / "pid").read_text()))
    assert site.left_over() == []


def test_killed_supervisor_is_a_failure(tmp_path: Path) -> None:
    """The compiler kills the supervisor: the build fails, and nothing is stored."""
    is_supervisor = "tr '\\0' ' ' < /proc/$p/cmdline | grep -q '^[^ ]*python[^ ]* -P -S'"
    body = f"p=$$\nwhile ! {is_supervisor}; do p=$(cut -d' ' -f4 /proc/$p/stat); done\nkill -9 $p; sleep 1"
    site = Site(tmp_path, body)
    with pytest.raises(BuildError, match="compiling cpu failed: exit code -9"):
        site.build()
    assert not list(site.cache.rglob("*.so"))
