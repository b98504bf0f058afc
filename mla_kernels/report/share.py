# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Sending a report on: one archive, opened anywhere by unpacking it, and read here without unpacking it by hand."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mla_kernels.report.errors import ReportError
from mla_kernels.report.files import repository_root
from mla_kernels.report.runner import FINISHED
from mla_kernels.report.verify import load_report, unfinished_beside

__all__ = ["bundle_report", "find_report", "opened"]

LIMIT = 2 << 30  # bytes that a bundle may unpack to
FILES = 100_000


def find_report(report: Path, reports_dir: Path | None = None) -> Path:
    """The path given, or the report of that name in the checkout's reports folder."""
    named = (reports_dir or repository_root() / "reports") / report
    return named if not report.exists() and (named.exists() or unfinished_beside(named)) else report


def bundle_report(report: Path, output: Path | None = None) -> Path:
    """Write a finished report that nobody has edited as one zip file; returns its path.

    The same report gives the same bytes. Inside, everything lies in a folder of the report's name.

    Args:
        output: the file, or a folder for it; default: `<report>.zip` beside the report.

    Raises:
        ReportError: when the report is not finished, was edited, or the file is there already and is no bundle.
    """
    load_report(report)
    report = report.resolve()
    target = output or report.with_name(f"{report.name}.zip")
    target = target / f"{report.name}.zip" if target.is_dir() else target
    if target.resolve().is_relative_to(report):
        raise ReportError(f"--output: {target} lies in the report, which would then be another: choose a place outside")
    if target.exists() and not _is_bundle(target):
        raise ReportError(f"--output: {target} is there and is no bundle of a report: choose another name")
    part = target.with_name(f".{target.name}.part")
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for path in sorted(p for p in report.rglob("*") if p.is_file()):
                name = f"{report.name}/{path.relative_to(report).as_posix()}"
                entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
                entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, (stat.S_IFREG | 0o644) << 16
                archive.writestr(entry, path.read_bytes())
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise OSError(error.errno, error.strerror, str(target)) from error
    return target


def _is_bundle(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(PurePosixPath(name).name == FINISHED for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


@contextlib.contextmanager
def opened(report: Path) -> Iterator[Path]:
    """The folder of a report: itself, or that of a bundle, unpacked for as long as the block runs.

    Raises:
        ReportError: when the file is not a bundle of one report.
    """
    if not report.is_file():
        yield report
        return
    with tempfile.TemporaryDirectory(prefix="mla-bundle-") as folder:
        try:
            with zipfile.ZipFile(report) as archive:
                name = _checked(archive, report)
                archive.extractall(folder)
        except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, NotImplementedError, RuntimeError) as error:
            raise ReportError(
                f"REPORT: {report}: expected a report's folder or a bundle of one, but: {error}"
            ) from error
        yield Path(folder) / name


def _checked(archive: zipfile.ZipFile, report: Path) -> str:
    """Name of the one folder in the archive; refuses what would be written elsewhere or is too much."""
    entries = archive.infolist()
    tops = {PurePosixPath(entry.filename).parts[0] for entry in entries if entry.filename.strip("/")}
    for entry in entries:
        path = PurePosixPath(entry.filename)
        link = stat.S_ISLNK(entry.external_attr >> 16)
        if link or path.is_absolute() or ".." in path.parts or not re.fullmatch(r"[^\\\0]+", entry.filename):
            raise ReportError(f"REPORT: {report}: not a bundle made by `bundle`: it holds {entry.filename!r}")
    if len(tops) != 1 or f"{min(tops, default='')}/{FINISHED}" not in archive.namelist():
        raise ReportError(
            f"REPORT: {report}: expected a bundle, with one folder that holds {FINISHED}, got "
            f"{', '.join(sorted(tops)[:4]) or 'nothing'}"
        )
    if sum(entry.file_size for entry in entries) > LIMIT or len(entries) > FILES:
        raise ReportError(f"REPORT: {report}: over {LIMIT >> 30} GiB or {FILES} files: not made by `bundle`")
    return min(tops)
