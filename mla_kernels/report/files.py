# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Files and folders: the repository root, atomic writes, hashes, and a lock that dies with its holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mla_kernels.report.errors import ReportError

__all__ = [
    "file_hash",
    "folder_lock",
    "relative_name",
    "repository_root",
    "write_bytes",
    "write_json",
    "write_text",
    "write_trouble",
]


def repository_root(start: Path | None = None) -> Path:
    """The checkout that `start` (default: the working folder) lies in, else the one that this package lies in.

    A checkout is known by `pyproject.toml` beside a folder `notebooks`. Without one (an installed wheel, used
    elsewhere) the working folder itself is taken.
    """
    here = (start or Path.cwd()).resolve()
    for folder in [here, *here.parents, *Path(__file__).resolve().parents]:
        if (folder / "pyproject.toml").is_file() and (folder / "notebooks").is_dir():
            return folder
    return here


def relative_name(path: Path, root: Path) -> str:
    """`path` as it is written into reports: relative to `root` where it lies inside, else absolute."""
    path = path.resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def write_bytes(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a file atomically: a reader finds the old content or the new one, never a part.

    Args:
        sync: wait until it is on the disk, so that a power cut does not leave a part either.

    Raises:
        OSError: with the file's name in it, also for a full disk (where Python leaves it out). No part is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_text(path: Path, text: str, *, sync: bool = True) -> None:
    """Write a text file as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"), sync=sync)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically. NaN and infinity are refused: they are not JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_trouble(error: OSError, folder: Path) -> str:
    """Why `folder` could not be written, in a few words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left in {folder}"
    return f"cannot write {error.filename or folder}: {error.strerror or error}"


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def folder_lock(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` while the block runs; raise ReportError at once when another process holds it.

    The lock is the kernel's (flock), so that it goes with its holder, however that ends. The file stays and means
    nothing by itself; it names the holder for the message.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
            raise ReportError(f"{what} is being written by {holder}: wait for it, or choose another --name") from None
        os.ftruncate(handle, 0)
        with contextlib.suppress(OSError):  # a full disk: the name is only for the message
            os.pwrite(handle, f"process {os.getpid()} since {time.strftime('%H:%M:%S')}".encode(), 0)
        yield
    finally:
        os.close(handle)
