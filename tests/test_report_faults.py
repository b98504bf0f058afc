# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The runner on a disk that is full, or can no longer be written, after any number of bytes.

A preloaded library makes it so, for root too, whom modes do not stop, and in every process of a run: runner, papermill
and kernel. The other faults of the runner are tested where what they touch is: a killed kernel, a hanging cell, an
interrupt, a killed runner and a second run in test_report.py (TestFailures, TestEndings), a flood of output there and
in test_report_limits.py, the same of sweeps in test_sweep.py.
"""

import errno
import json
import re
import struct
import subprocess
import sys

import nbformat
import pytest
from report_checkout import ROOT, Checkout

from mla_kernels.report.verify import edited_files

FIGURE = """import matplotlib.pyplot as plt
page.figure(plt.figure(), "f", caption="c", alt="a", data=[n])
print("text " * 1000)"""
SWEEP = """import sys
from pathlib import Path
from mla_kernels.report import engine
engine.has_ray = lambda: False
from mla_kernels.report.cli import main
main(["sweep", "grid.yaml", "--workers", "1"], prog_name="sweep")"""


class Disk:
    """A checkout whose `reports` lies on a disk that can be made to fail."""

    def __init__(self, folder):
        self.library, self.count = folder / "full_disk.so", folder / "count"
        source = ROOT / "tests" / "full_disk.cpp"
        command = ["g++", "-O1", "-shared", "-fPIC", "-o", str(self.library), str(source), "-ldl"]
        subprocess.run(command, check=True)
        self.checkout = Checkout(folder / "checkout")
        self.reports = self.checkout.folder / "reports"
        integer = {"type": "integer", "minimum": 0, "description": "x."}
        self.checkout.notebook("01_disk", FIGURE, parameters="n = 1", schema={"n": integer})
        (self.checkout.folder / "grid.yaml").write_text("notebook: 01\ngrid: {n: [1, 2]}\n")

    def variables(self, limit, error=errno.ENOSPC):
        self.count.write_bytes(bytes(8))
        return {
            "LD_PRELOAD": str(self.library), "FULL_DISK_FOLDER": str(self.reports), "FULL_DISK_COUNT": str(self.count),
            "FULL_DISK_BYTES": str(limit), "FULL_DISK_ERRNO": str(error),
        }  # fmt: skip

    @property
    def used(self):
        return struct.unpack("q", self.count.read_bytes())[0]


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """With a finished report `kept`, and `total`, the bytes that a run writes."""
    place = Disk(tmp_path_factory.mktemp("disk"))
    code, out, err = place.checkout.call("run", "01", "--name", "kept", variables=place.variables(1 << 40))
    assert code == 0, out + err
    place.total = place.used
    assert place.total > 50_000
    return place


@pytest.mark.parametrize(
    ("error", "share"),
    [*(("ENOSPC", share) for share in (0.0, 0.05, 0.4, 0.8, 0.99)), ("EROFS", 0.0), ("EROFS", 0.4)],
)
def test_nothing_finished_is_lost_and_nothing_half_done_looks_finished(disk, error, share):
    before = (disk.reports / "kept" / "FINISHED").read_bytes()
    variables = disk.variables(int(disk.total * share), getattr(errno, error))
    code, out, err = disk.checkout.call("run", "01", "--name", "kept", variables=variables)
    assert code == (1 if share else 2), out + err
    assert "Traceback" not in out + err
    assert err.count("\n") == 1
    words = {"ENOSPC": "[Nn]o space left", "EROFS": "Read-only file system"}[error]
    assert re.search(words, out + err), out + err
    assert (disk.reports / "kept" / "FINISHED").read_bytes() == before
    assert edited_files(disk.reports / "kept") == []
    unfinished = disk.reports / "kept.unfinished"
    assert not (unfinished / "FINISHED").exists()
    for path in unfinished.rglob("*.json"):
        json.loads(path.read_text())  # whole, or not there
    for path in unfinished.glob("*.ipynb"):
        nbformat.read(path, as_version=4)


def test_with_space_again_the_same_command_finishes(disk):
    code, out, err = disk.checkout.call("run", "01", "--name", "kept", variables=disk.variables(1 << 40))
    assert code == 0, out + err
    assert edited_files(disk.reports / "kept") == []
    assert not (disk.reports / "kept.unfinished").exists()


def test_a_folder_that_nobody_may_write_is_refused_before_anything_runs(disk):
    """As root too: /proc takes no folders."""
    code, out, err = disk.checkout.call("run", "01", "--reports-dir", "/proc/reports")
    assert code == 2
    assert err.startswith("Error: cannot read or write /proc/reports")
    assert err.count("\n") == 1
    assert "✓" not in out


def test_a_sweep_on_a_full_disk_keeps_the_cells_that_were_stored(disk):
    def sweep(limit):
        return disk.checkout.call(script=SWEEP, variables=disk.variables(limit))

    cell = sum(path.stat().st_size for path in (disk.reports / "kept").rglob("*") if path.is_file())
    code, out, err = sweep(int(1.5 * cell))  # room for one cell and a part of the second
    assert code == 1, out + err
    assert "Traceback" not in out + err
    work = disk.reports / "grid.unfinished"
    assert err == f"Error: not finished: no space left in {disk.reports}; what there is: {work}\n"
    assert [path.name[:3] for path in (work / "cells").iterdir()] == ["n-1"]
    assert edited_files(next((work / "cells").iterdir())) == []
    code, out, err = sweep(1 << 40)
    assert code == 0, out + err
    assert "1 of an earlier run is taken over" in out
    assert out.count("✓") == 1
    assert edited_files(disk.reports / "grid") == []


def test_the_library_itself_fails_the_disk_where_and_when_it_says(disk, tmp_path):
    """Or the tests above would pass on a disk that never fails."""
    script = (
        "import os, sys\n"
        "a, b = os.open(sys.argv[1] + '/in', 65), os.open(sys.argv[2], 65)\n"
        "print(os.write(a, b'x' * 80), os.write(a, b'x' * 80), os.write(b, b'x' * 80))\n"
        "try:\n    os.write(a, b'x')\nexcept OSError as error:\n    print(error.errno)\n"
    )
    (tmp_path / "disk").mkdir()
    variables = {**disk.variables(100, errno.EROFS), "FULL_DISK_FOLDER": str(tmp_path / "disk")}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "disk"), str(tmp_path / "out")],
        env=variables, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "80 20 80\n30\n", done.stderr
