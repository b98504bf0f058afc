# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The cache of built libraries: which folder, the lock, and what makes an entry count.

<cache>/lock                                     held by the one build that is running; its text names the holder
<cache>/building-<pid>-<random>/                 private folder of that build
<cache>/<key>/manifest.json                      written last, by an atomic rename: an entry without it does not exist
<cache>/<key>/libmla_kernels-<key>-<sha256>.so   what the manifest names, with its SHA-256
<cache>/<key>/build-<time>-<pid>.log             full output of a build, also of one that failed
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from mla_kernels.toolchain import BuildError, printable

FORMAT = 1  # of manifest.json
KEPT_LOGS = 5
KEPT_ENTRIES = 32
_DAY = 86400.0
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

_threads = threading.Lock()  # POSIX record locks exclude processes, not the threads of one


def _after_fork() -> None:
    global _threads
    _threads = threading.Lock()  # the thread that held it does not exist in the child


os.register_at_fork(after_in_child=_after_fork)


class DamagedEntryError(Exception):
    """An entry whose library is not what its manifest says."""


def disk_full(folder: Path) -> str:
    try:
        free = f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB free"
    except OSError:
        free = "free space unknown"
    return f"the disk is full: {free} in {printable(str(folder))}. Make room there, or pass cache_dir= on another disk"


@contextlib.contextmanager
def explained(folder: Path, what: str) -> Iterator[None]:
    """Turns an OSError while writing the cache into a BuildError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise BuildError(f"{what}: {disk_full(folder)}") from error
        name = "" if error.filename is None else f" ({printable(str(error.filename))})"
        raise BuildError(
            f"{what}: {error.strerror or error}{name}; the cache is {printable(str(folder))}, pass another cache_dir="
        ) from error


def fault(folder: Path) -> str | None:
    """Why `folder` cannot hold libraries that this user's processes load; None if it can. Creates it where missing."""
    if not folder.is_absolute():
        return "is not an absolute path"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        user = os.geteuid()
        for seen in (os.lstat(folder), os.stat(folder)):
            if seen.st_uid != user:
                return f"belongs to user {seen.st_uid}, not to {user}: what lies there is not trusted"
        if not stat.S_ISDIR(seen.st_mode):
            return "is not a folder"
        if seen.st_mode & 0o022:
            return f"can be written by other users (mode {stat.S_IMODE(seen.st_mode):o}); chmod go-w it"
        if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
            return "is on a disk mounted noexec, from which nothing can be loaded"
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"probe")
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    return None


def open_cache(cache_dir: str | os.PathLike[str] | None, say: Callable[[str], None]) -> Path:
    """The folder to use. A given `cache_dir` is used or refused; the default falls back to a temporary folder."""
    if cache_dir is not None:
        folder = Path(os.path.abspath(Path(cache_dir).expanduser()))
        if reason := fault(folder):
            raise BuildError(
                f"cache_dir {printable(str(folder))} {reason}; pass a folder of your own that you can write"
            )
        return folder
    default = Path(platformdirs.user_cache_dir("mla-kernels", appauthor=False))
    reason = fault(default)
    if reason is None:
        return default
    folder = Path(tempfile.gettempdir()) / f"mla-kernels-{os.geteuid()}"
    with_reuse = "builds are kept there until it is emptied"
    if second := fault(folder):
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="mla-kernels-"))
            second = fault(folder)
            with_reuse = "this process only"
        if second:
            raise BuildError(
                f"nowhere to put a library: {printable(str(default))} {reason}; {printable(str(folder))} {second}. "
                "Pass cache_dir= with a folder of your own that you can write"
            )
    say(f"{printable(str(default))} {reason}; using {printable(str(folder))} instead ({with_reuse})")
    return folder


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lookup(root: Path, key: str) -> dict[str, Any] | None:
    """The manifest of a complete entry, its library checked against its SHA-256; None if there is no entry.

    Raises DamagedEntryError where a manifest exists and the library is missing, cut short or changed.
    """
    manifest = root / key / "manifest.json"
    try:
        try:
            entry = json.loads(manifest.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        library = root / key / os.path.basename(entry["library"])
        if entry["format"] != FORMAT or entry["key"] != key:
            raise DamagedEntryError("its manifest is of another format or key")
        if os.stat(library).st_uid != os.geteuid():
            raise DamagedEntryError("its library belongs to another user")
        if sha256_file(library) != entry["sha256"]:
            raise DamagedEntryError("its library does not have the SHA-256 that its manifest states")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedEntryError(f"it cannot be read ({error})") from error
    with contextlib.suppress(OSError):
        os.utime(manifest)  # last use, for `prune`
    entry["path"] = library
    return dict(entry)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, block: bytes) -> None:
    """Write a file so that its name never shows less than all of it, not even after a power cut."""
    temporary = path.with_name(f".incoming-{os.getpid()}-{path.name}")
    with open(temporary, "wb") as file:
        file.write(block)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def commit(root: Path, key: str, library: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Make `library` the entry of `key`, under the lock. A file that a process may have loaded is never written to."""
    entry = root / key
    for left in entry.glob(".incoming-*"):
        left.unlink()
    block = library.read_bytes()
    digest = hashlib.sha256(block).hexdigest()
    target = entry / f"libmla_kernels-{key}-{digest[:8]}.so"
    _write(target, block)
    manifest = {"format": FORMAT, "key": key, "library": target.name, "sha256": digest, "size": len(block), **fields}
    _write(entry / "manifest.json", json.dumps(manifest, indent=1, sort_keys=True).encode())
    return {**manifest, "path": target}


def prune(root: Path, key: str) -> None:
    """Delete old logs of this key, and entries beyond the newest KEPT_ENTRIES that nobody used for a day."""
    with contextlib.suppress(OSError):
        for log in sorted((root / key).glob("build-*.log"))[:-KEPT_LOGS]:
            log.unlink()
        entries = [(manifest.stat().st_mtime, manifest) for manifest in root.glob("*/manifest.json")]
        for used, manifest in sorted(entries, reverse=True)[KEPT_ENTRIES:]:
            if time.time() - used > _DAY:
                manifest.unlink()  # first, so that what is left never counts as an entry
                shutil.rmtree(manifest.parent)


@dataclass
class Held:
    """A lock that is held. `recovered` tells of a build that was killed before; `folders` are private to this build."""

    handle: int
    recovered: str | None = None
    folders: list[Path] = field(default_factory=list)

    def private_folder(self, parent: Path) -> Path:
        """A new folder for this build alone. It is named in the lock file first, so that it is found after a kill."""
        folder = parent / f"building-{os.getpid()}-{os.urandom(4).hex()}"
        self.folders.append(folder)
        self.sign()
        folder.mkdir(mode=0o700)
        return folder

    def sign(self) -> None:
        record = {
            "pid": os.getpid(),
            "since": time.strftime("%H:%M:%S"),
            "folders": [os.fsdecode(f) for f in self.folders],
        }
        os.ftruncate(self.handle, 0)
        os.pwrite(self.handle, json.dumps(record).encode(), 0)


def _holder(handle: int) -> dict[str, Any]:
    """What the lock file says about its holder; empty if it says nothing, or nothing of ours."""
    try:
        record = json.loads(os.pread(handle, 65536, 0))
        return {
            "pid": int(record["pid"]),
            "since": str(record["since"]),
            "folders": [str(f) for f in record["folders"]],
        }
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def _remove_left(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if folder.name.startswith("building-") and os.lstat(folder).st_uid == os.geteuid():
            shutil.rmtree(folder)


def _acquire(root: Path, handle: int, say: Callable[[str], None]) -> Held:
    told = False
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        if not told:
            by = _holder(handle)
            who = f"process {by['pid']}, since {by['since']}" if by else "another process"
            say(f"waiting for the build of {who}")
            told = True
        time.sleep(0.05)
    held = Held(handle)
    before = _holder(handle)
    if before:
        held.recovered = f"the build of process {before['pid']} (since {before['since']}) was killed"
        say(f"recovered: {held.recovered}; its unfinished files are removed")
    for name in [*before.get("folders", ()), *map(str, root.glob("building-*"))]:
        _remove_left(Path(name))
    held.sign()
    return held


@contextlib.contextmanager
def lock(root: Path, say: Callable[[str], None]) -> Iterator[Held]:
    """The only build in this cache, across threads and processes. Waits, with a message, while the holder lives.

    A POSIX record lock: the system drops it when its holder ends in whatever way, and it is not handed on to forked
    children. The file itself means nothing; one that is left over, or made by hand, blocks nobody.
    """
    with _threads:
        with explained(root, "cannot lock the cache"):
            handle = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with explained(root, "cannot lock the cache"):
                held = _acquire(root, handle, say)
            try:
                yield held
            finally:
                for folder in held.folders:
                    shutil.rmtree(folder, ignore_errors=True)
                os.ftruncate(handle, 0)
        finally:
            os.close(handle)
