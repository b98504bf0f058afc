# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The report runner at its limits: a disk that is full at any of its writes, and a notebook that floods its log.

Also its lock.
"""

import errno
import json
import os

import nbformat
import pytest
from report_checkout import Checkout

from mla_kernels.report.errors import ReportError
from mla_kernels.report.files import folder_lock, write_text

# Atomic writes go to a side file `.NAME.part`; where that is a link to /dev/full, the disk is full for this one write.
FULL = "import os\nos.symlink('/dev/full', os.path.join(report_dir, {part!r}))"
FULL_AT = {
    "01_notebook": ".01_notebook.ipynb.part",
    "02_results": "results/.02_results.json.part",
    "03_page": ".03_page.html.part",
    "04_figure": "figures/04_figure/.f.png.part",
}
FULL_LOG = """import os
from mla_kernels.report import kernel
kernel.Log._handle = os.open("/dev/full", os.O_WRONLY)"""
FIGURE = """import matplotlib.pyplot as plt
page.figure(plt.figure(), "f", caption="c", alt="a", data=[1])"""
FLOOD = """from mla_kernels.report import kernel
kernel.LOG_LIMIT = 1_000_000
for i in range(100_000):
    print("long line", i)"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    place = Checkout(tmp_path_factory.mktemp("limits"))
    for name, part in FULL_AT.items():
        fill = FULL.format(part=part).replace(
            "os\n", f"os\nos.makedirs(f'{{report_dir}}/{os.path.dirname(part)}', exist_ok=True)\n"
        )
        place.notebook(name, fill, FIGURE, "print('text')")
    place.notebook("05_log", FULL_LOG, "print('text')")
    for name in (".index.html.part", ".results.json.part", ".FINISHED.part"):
        place.notebook(f"1{len(name) % 10}_summary", FULL.format(part=name))
    place.notebook("20_flood", FLOOD, "print('one line more')", "import sys\nprint('and one', file=sys.stderr)")
    return place


@pytest.fixture(scope="module")
def full(checkout):
    """(exit code, stdout, stderr) of a run in which every notebook meets a full disk elsewhere."""
    return checkout.call("run", *FULL_AT, "05", "--name", "full")


class TestFullDisk:
    @pytest.mark.parametrize("name", [*FULL_AT, "05_log"])
    def test_it_is_the_outcome_of_the_notebook(self, checkout, full, name):
        code, out, err = full
        folder = checkout.folder / "reports" / "full.unfinished"
        assert code == 1
        assert "Traceback" not in out + err
        assert err.count("\n") == 1
        entry = checkout.manifest("full.unfinished")["notebooks"][name]
        assert entry["finished"] is False
        assert entry["reason"] == f"no space left in {folder}"
        assert f"no space left in {folder}" in next(line for line in out.splitlines() if f"✗ {name}" in line)

    @pytest.mark.parametrize("name", [*FULL_AT, "05_log"])
    def test_the_executed_notebook_is_whole(self, checkout, full, name):
        executed = nbformat.read(checkout.folder / "reports" / "full.unfinished" / f"{name}.ipynb", as_version=4)
        assert any("/dev/full" in cell.source for cell in executed.cells)

    def test_nothing_looks_finished(self, checkout, full):
        assert not (checkout.folder / "reports" / "full").exists()
        assert not list(checkout.folder.glob("reports/full.unfinished/**/FINISHED"))
        assert not list(checkout.folder.glob("reports/full.unfinished/**/.*.part"))

    @pytest.mark.parametrize("name", [".index.html.part", ".results.json.part", ".FINISHED.part"])
    def test_a_summary_that_cannot_be_written_ends_the_run_in_one_line(self, checkout, name):
        code, _, err = checkout.call("run", f"1{len(name) % 10}_summary", "--name", "summary")
        reports = checkout.folder / "reports"
        assert code == 1
        assert err == (
            f"Error: not finished: no space left in {reports}; what there is: {reports / 'summary.unfinished'}\n"
        )
        assert not (reports / "summary").exists()
        assert not (reports / "summary.unfinished" / "FINISHED").exists()

    def test_a_file_is_old_or_new_and_the_error_names_it(self, tmp_path):
        path = tmp_path / "a.txt"
        path.write_text("old")
        (tmp_path / ".a.txt.part").symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left on device") as full:
            write_text(path, "new")
        assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(path))
        assert path.read_text() == "old"
        assert os.listdir(tmp_path) == ["a.txt"]


def test_a_log_ends_at_its_limit_and_says_what_is_left_out(checkout):
    code, out, err = checkout.call("run", "20", "--name", "flood")
    assert code == 0, out + err
    log = (checkout.folder / "reports" / "flood" / "logs" / "20_flood.txt").read_text()
    assert 1_000_000 <= len(log) < 1_001_000
    whole = "".join(f"long line {i}\n" for i in range(100_000))
    head, _, after = log.partition("\n[what follows is left out: the limit of 1,000,000 bytes is reached]\n")
    kept = head[head.index("long line 0") :]
    assert len(kept) > 990_000
    assert whole.startswith(kept)
    cells = after.split("\n── ")
    assert cells[0] == f"[{len(whole) - len(kept):,} bytes of this cell are left out]\n"
    assert "[14 bytes of this cell are left out]\n" in cells[1]
    assert "[8 bytes of this cell are left out]\n" in cells[2]
    assert json.loads((checkout.folder / "reports" / "flood" / "FINISHED").read_text())
    outputs = next(c.outputs for c in checkout.executed("flood", "20_flood").cells if "LOG_LIMIT" in c.source)
    assert outputs[-1].text.endswith("long line 99999\n")


def test_the_lock_dies_with_its_holder_and_a_file_left_by_hand_does_not_block(tmp_path):
    path = tmp_path / "lock"
    path.write_text("process 1 since yesterday")
    with (
        folder_lock(path, "the report"),
        pytest.raises(ReportError, match=f"written by process {os.getpid()} since"),
        folder_lock(path, "the report"),
    ):
        pass
    with folder_lock(path, "the report"):
        pass
