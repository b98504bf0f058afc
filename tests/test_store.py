# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Where built libraries are kept: read-only homes, folders of other users, full disks as root or not."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from build_stubs import BUILD, Site, child, finish, result, stub_compiler, value_of, write_tree

from mla_kernels import _store, build
from mla_kernels.build import BuildError

ROOT = os.geteuid() == 0
PACKAGE = Path(build.__file__).parent
# Root may write anywhere; without these capabilities it is bound by permissions like any other user.
BOUND = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--") if ROOT else ()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def other_users_folder(tmp_path: Path) -> Path:
    if not ROOT:
        return Path("/usr/share")
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    os.chown(folder, 65534, 65534)
    return folder


def digest(folder: Path) -> str:
    """Over names, modes, times of change and contents of everything in a folder."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        seen = path.lstat()
        total.update(f"{path.relative_to(folder)} {seen.st_mode} {seen.st_mtime_ns}".encode())
        total.update(path.read_bytes() if path.is_file() else b"")
    return total.hexdigest()


@pytest.fixture
def installed(tmp_path: Path):  # type: ignore[no-untyped-def]
    """The package as a wheel lays it, csrc inside, with a home; both read-only."""
    packages, home = tmp_path / "site-packages", tmp_path / "home"
    shutil.copytree(PACKAGE, packages / "mla_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    write_tree(packages / "mla_kernels" / "csrc")
    home.mkdir()
    everything = [packages, home, *packages.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield packages, home
    for path in everything:
        path.chmod(0o755)


def test_read_only_home_and_package_fall_back(tmp_path: Path, installed: tuple[Path, Path]) -> None:
    packages, home = installed
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    before = digest(packages)
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import json, os
from mla_kernels import _store, build
try:
    open(sys.argv[1] + "/mla_kernels/x", "w")
except PermissionError:
    pass
else:
    raise SystemExit("the package folder can be written: this test would prove nothing")
built = build.build(compiler=sys.argv[2])
print(json.dumps([str(built.path), build.__file__, built.rebuilt]))
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XDG")}
    environment |= {"HOME": str(home), "TMPDIR": str(temporary)}
    for rebuilt in (True, False):
        process = subprocess.Popen(
            [*BOUND, sys.executable, "-c", code, str(packages), str(stub_compiler(tmp_path / "c++"))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        path, module, was_rebuilt, err = result(process)
        assert module == str(packages / "mla_kernels" / "build.py")
        assert was_rebuilt is rebuilt
        assert Path(str(path)).is_relative_to(temporary / f"mla-kernels-{os.geteuid()}")
        assert "cannot be written (Permission denied); using" in str(err)
        assert value_of(Path(str(path))) == 1
    assert digest(packages) == before
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("kind", ["theirs", "world-writable", "relative", "file", "link to a file", "no parent"])
def test_default_cache_that_cannot_be_used_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    home = tmp_path / "cache-home"
    home.mkdir()
    default = home / "mla-kernels"
    if kind == "theirs":
        default.symlink_to(other_users_folder(tmp_path))
    elif kind == "world-writable":
        default.mkdir()
        default.chmod(0o777)
    elif kind == "file":
        default.write_text("")
    elif kind == "link to a file":
        (home / "file").write_text("")
        default.symlink_to(home / "file")
    elif kind == "no parent":
        home = home / "file" / "below"
        home.parent.write_text("")
    monkeypatch.setattr(
        _store.platformdirs,
        "user_cache_dir",
        lambda *_, **__: "~/x" if kind == "relative" else str(home / "mla-kernels"),
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    reason = {
        "theirs": "belongs to user",
        "world-writable": "can be written by other users (mode 777); chmod go-w it",
        "relative": "is not an absolute path",
        "no parent": "cannot be written (",
    }.get(kind, "is not a folder")
    assert _store.open_cache(None, said.append) == tmp_path / f"mla-kernels-{os.geteuid()}"
    assert len(said) == 1
    assert reason in said[0]
    assert "using" in said[0]
    assert oct((tmp_path / f"mla-kernels-{os.geteuid()}").stat().st_mode)[-3:] == "700"


def test_taken_temporary_folder_is_left_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody made /tmp/mla-kernels-<uid> a link to their own folder."""
    theirs = other_users_folder(tmp_path)
    (tmp_path / f"mla-kernels-{os.geteuid()}").symlink_to(theirs)
    monkeypatch.setattr(_store.platformdirs, "user_cache_dir", lambda *_, **__: str(theirs))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    folder = _store.open_cache(None, said.append)
    assert folder.parent == tmp_path
    assert folder.resolve() != theirs
    assert "this process only" in said[0]


def test_nowhere_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store, "fault", lambda folder: "cannot be written (Read-only file system)")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(BuildError, match=r"nowhere to put a library: .*Pass cache_dir= with a folder of your own"):
        _store.open_cache(None, lambda _: None)


def test_given_cache_dir_is_used_or_refused(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match=r"cache_dir .* belongs to user .* is not trusted; pass a folder of your own"):
        site.build(cache_dir=other_users_folder(tmp_path))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    with pytest.raises(BuildError, match=r"cache_dir .* can be written by other users \(mode 775\); chmod go-w it"):
        site.build(cache_dir=shared)
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: type("S", (), {"f_flag": real(path).f_flag | os.ST_NOEXEC}))
    with pytest.raises(BuildError, match=r"cache_dir .* mounted noexec"):
        site.build()


def test_read_only_cache_dir_is_refused(site: Site) -> None:
    site.cache.mkdir()
    site.cache.chmod(0o555)
    code = BUILD.replace("built =", "try: built =").replace(
        "print(", "except build.BuildError as error: print(json.dumps([str(error)]))\nelse: print("
    )
    message, _ = result(site.child(code, prefix=BOUND))
    assert "cannot be written (Permission denied); pass a folder of your own" in str(message)
    site.cache.chmod(0o755)


def test_library_of_another_user_is_not_used(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.build()
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(_store.DamagedEntryError, match="belongs to another user"):
        _store.lookup(site.cache, site.plan().key)


# Full disks


def test_compiler_that_finds_the_disk_full(tmp_path: Path) -> None:
    site = Site(tmp_path, "echo 'error: cannot write probe.o: No space left on device' >&2; exit 1")
    with pytest.raises(BuildError, match=r"the disk is full: \d+ MiB free in .*cache.*pass cache_dir= on another disk"):
        site.build()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_for_the_library(site: Site, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def no_room(path: Path, block: bytes) -> None:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(_store, "_write", no_room)
        with pytest.raises(BuildError, match=r"cannot store the library: the disk is full: .* MiB free in "):
            site.build()
    assert site.left_over() == []
    assert site.build().rebuilt


def test_other_error_while_storing_is_explained(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, block: bytes) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(_store, "_write", broken)
    with pytest.raises(
        BuildError, match=r"cannot store the library: Input/output error \(.*\.so\); the cache is .*, pass"
    ):
        site.build()


def can_mount() -> bool:
    return (
        ROOT
        and subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode
        == 0
    )


@pytest.mark.skipif(
    not can_mount(), reason="a small disk to fill needs the right to mount one: run as root outside a jail"
)
@pytest.mark.parametrize("kib", [4, 24, 64, 96, 128])
def test_disk_that_is_really_full(site: Site, kib: int) -> None:
    """A file system of a few KiB: too small for the log, for CMake's files, or for the library."""
    site.cache.mkdir()
    code = """
        import subprocess
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={sys.argv[4]}k,mode=700", "none", sys.argv[2]], check=True)
        try:
            build.build(source_dir=sys.argv[1], cache_dir=sys.argv[2], compiler=sys.argv[3], jobs=1)
        except build.BuildError as error:
            print(json.dumps(str(error)))
    """
    out, _ = finish(child(code, site.tree, site.cache, site.compiler, kib, prefix=("unshare", "-m")))
    assert "the disk is full" in out
    assert "MiB free in" in out
