# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Sweeps: grids, workers that are lost, cells that fail, what a second run takes over, and the page.

Ray and kernels are slow to start, so most tests look at a few sweeps that are shared.
"""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types
import uuid
from pathlib import Path

import psutil
import pytest
from browser import Browser
from report_checkout import ROOT, Checkout, alive, ended, interrupt, wait_for

from mla_kernels.report import engine as engines
from mla_kernels.report import sweep as sweeps
from mla_kernels.report.errors import ReportError
from mla_kernels.report.sweep import load_sweep, run_sweep
from mla_kernels.report.verify import edited_files

# What a cell does, by its parameter `kind`. Its runs are counted; `healed` ends the losses. The kernel's parent is the
# process of papermill, whose parent is the worker.
CELL = """import os, signal, time
import psutil
from pathlib import Path
flags = Path({flags!r})
with (flags / f"{{kind}}-{{n}}.runs").open("a") as file:
    file.write("x")
runs = (flags / f"{{kind}}-{{n}}.runs").stat().st_size
loses = kind == "loses" or (kind == "loses_once" and runs == 1)
if loses and not (flags / "healed").exists():
    psutil.Process().parent().parent().kill()
    time.sleep(600)
if kind == "hangs":
    (flags / "hanging").write_text(str(os.getpid()))
    time.sleep(600)
if kind == "dies":
    os.kill(os.getpid(), signal.SIGKILL)"""
RECORD = """page.record("error", n * 0.5, unit="%")
page.record("split", {"a": n, "b": [kind, 0.25]})
page.record("threads", os.environ["OMP_NUM_THREADS"])
page.record("gpus", os.environ.get("CUDA_VISIBLE_DEVICES"))
page.record("pid", os.getpid(), volatile=True)
page.claim("n is small", kind != "claims", detail=f"n = {n}")"""
KINDS = ["good", "loses_once", "loses", "claims", "dies"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    place = Checkout(tmp_path_factory.mktemp("sweep") / "my work")
    place.snapshot = place.folder / "package"  # the sources of a cell decide whether it is taken over: they stay
    shutil.copytree(ROOT / "mla_kernels", place.snapshot / "mla_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    place.flags = place.folder / "flags"
    place.flags.mkdir()
    place.notebook(
        "01_cell", CELL.format(flags=str(place.flags)), RECORD,
        parameters='kind = "good"\nn = 1\nseq_lens = [1]\nsplits = None',
        schema={
            "kind": {"type": "string", "description": "What happens."},
            "n": {"type": "integer", "minimum": 1, "description": "A number."},
            "seq_lens": {"type": "array", "items": {"type": "integer"}},
            "splits": {"type": ["integer", "null"]},
        },
    )  # fmt: skip
    write(place, "mixed", f"notebook: 01\ngrid:\n  kind: [{', '.join(KINDS)}]\n")
    write(place, "same", "notebook: 01_cell\ngrid: {n: [1, 2], seq_lens: [[128, 4096]], splits: [none]}\n")
    return place


def write(place, name, text):
    (place.folder / f"{name}.yaml").write_text(text)


def call(checkout, *arguments, variables=None):
    return checkout.call(*arguments, variables={"PYTHONPATH": str(checkout.snapshot), **(variables or {})})


def runs(checkout, kind, n=1):
    path = checkout.flags / f"{kind}-{n}.runs"
    return path.stat().st_size if path.exists() else 0


def sequence(monkeypatch, checkout, file, name, **options):
    """A sweep without Ray."""
    monkeypatch.setattr(engines, "has_ray", lambda: False)
    return run_sweep(load_sweep(checkout.folder / file, root=checkout.folder), name, workers=1, **options)


@pytest.fixture(scope="module")
def mixed(checkout):
    """(exit code, stdout, stderr) of a sweep on Ray of which not every cell finishes."""
    return call(checkout, "sweep", "mixed.yaml", "--workers", "2")


class TestFailures:
    def test_each_cell_ends_for_its_own_reason_and_the_others_go_on(self, checkout, mixed):
        code, out, err = mixed
        assert code == 1, out + err
        assert "Traceback" not in out + err
        assert err.startswith("not finished (3 of 5 cells): what there is: ")
        cells = checkout.manifest("mixed.unfinished")["notebooks"]
        found = {label: (entry["finished"], entry["lost"], entry["attempts"]) for label, entry in cells.items()}
        assert found == {
            "kind=good": (True, False, 1),
            "kind=loses_once": (True, False, 2),
            "kind=loses": (False, True, 3),
            "kind=claims": (False, False, 1),
            "kind=dies": (False, False, 1),
        }
        assert cells["kind=loses"]["reason"].startswith("its worker is gone (")
        assert cells["kind=loses"]["reason"].endswith("; tried 3 times")
        assert cells["kind=claims"]["reason"] == "1 of 2 claims do not hold: n is small"
        assert cells["kind=dies"]["reason"] == "the kernel died of SIGKILL; out of memory?"
        assert "kind=loses: its worker is gone (" in out
        assert "once more (attempt 3)" in out

    def test_only_lost_workers_are_tried_again(self, checkout, mixed):
        assert [runs(checkout, kind) for kind in KINDS] == [1, 2, 3, 1, 1]

    def test_failed_cells_are_kept_and_nothing_half_done_looks_finished(self, checkout, mixed):
        folder = checkout.folder / "reports" / "mixed.unfinished"
        cells = {label: entry["cell"] for label, entry in checkout.manifest("mixed.unfinished")["notebooks"].items()}
        assert not (folder.with_name("mixed")).exists()
        assert not (folder / "FINISHED").exists()
        there = {path.name: (path / "FINISHED").exists() for path in (folder / "cells").iterdir()}
        assert there == {
            cells["kind=good"]: True, cells["kind=loses_once"]: True, cells["kind=claims"]: False,
            cells["kind=dies"]: False,
        }  # fmt: skip
        assert (folder / "cells" / cells["kind=claims"] / "01_cell.html").is_file()
        assert edited_files(folder / "cells" / cells["kind=good"]) == []
        recorded = checkout.results("mixed.unfinished")["notebooks"]
        assert list(recorded) == ["kind=good", "kind=loses_once", "kind=claims"]

    def test_the_page_shows_every_cell_and_hatches_those_that_failed(self, checkout, mixed):
        folder = checkout.folder / "reports" / "mixed.unfinished"
        text = (folder / "index.html").read_text()
        assert "2 of 5 cells finished." in text
        assert text.count('<tr class="hatched">') == 3
        assert "Hatched: not finished." in text
        rows = list(csv.DictReader((folder / "sweep.csv").open()))
        assert [(row["kind"], row["state"], row["error"]) for row in rows] == [
            ("good", "finished", "0.5"), ("loses_once", "finished", "0.5"), ("loses", "lost", ""),
            ("claims", "failed", "0.5"), ("dies", "failed", ""),
        ]  # fmt: skip

    def test_a_second_run_tries_the_lost_cell_only_and_a_third_finishes_without_it(self, checkout, mixed):
        before = (checkout.folder / "reports" / "mixed.unfinished" / "results.json").read_text()
        (checkout.flags / "healed").touch()
        code, out, err = call(checkout, "sweep", "mixed.yaml", "--workers", "1")
        assert code == 1, out + err
        assert "  4 of an earlier run are taken over\n" in out
        assert "[5/5] ✓ kind=loses" in out
        assert [runs(checkout, kind) for kind in KINDS] == [1, 2, 4, 1, 1]
        assert "3 of 5 cells finished" in (checkout.folder / "reports" / "mixed.unfinished" / "index.html").read_text()
        # A grid without the cells that fail: nothing is left to run, and no worker is started.
        write(checkout, "mixed", "notebook: 01\ngrid:\n  kind: [good, loses_once, loses]\n")
        code, out, err = call(checkout, "sweep", "mixed.yaml")
        assert code == 0, out + err
        assert [runs(checkout, kind) for kind in KINDS] == [1, 2, 4, 1, 1]
        folder = checkout.folder / "reports" / "mixed"
        assert edited_files(folder) == []
        assert "All 3 cells finished" in (folder / "index.html").read_text()
        both = [json.loads(before)["notebooks"], checkout.results("mixed")["notebooks"]]
        assert both[1]["kind=good"] == both[0]["kind=good"]
        assert not folder.with_name("mixed.unfinished").exists()
        # A run of notebooks does not replace it, and the grid can grow.
        code, _, err = checkout.call("run", "01", "--name", "mixed")
        assert code == 2
        assert "is a sweep, which a run does not replace: choose another name" in err
        assert edited_files(folder) == []


class TestSameResults:
    def test_one_worker_two_workers_and_no_ray_give_the_same_files(self, checkout, monkeypatch):
        code, out, err = call(checkout, "sweep", "same.yaml", "--workers", "2")
        assert code == 0, out + err
        done = sequence(monkeypatch, checkout, "same.yaml", "alone")
        assert done.finished
        two, one = checkout.folder / "reports" / "same", done.folder
        names = sorted(path.relative_to(two).as_posix() for path in two.rglob("results.json"))
        assert len(names) == 3
        for name in names:
            assert (two / name).read_bytes() == (one / name).read_bytes(), name
        results = checkout.results("same")["notebooks"]
        assert list(results) == ["n=1, seq_lens=128+4096, splits=none", "n=2, seq_lens=128+4096, splits=none"]
        assert {entry["records"]["threads"] for entry in results.values()} == {"1"}
        assert {entry["records"]["gpus"] for entry in results.values()} == {""}
        # What the numbers come from is said in each cell, whose page leads back to the sweep.
        cell = next((two / "cells").iterdir())
        assert json.loads((cell / "manifest.json").read_text())["cell"]["sweep"] == "same"
        assert '<a href="../../index.html">Sweep same</a>' in (cell / "index.html").read_text()
        assert f"verify reports/same/cells/{cell.name}" in (cell / "index.html").read_text()

    def test_what_decides_the_numbers_decides_what_is_taken_over(self, checkout):
        sweep = load_sweep(checkout.folder / "same.yaml", root=checkout.folder)
        prints = sweeps._prints(sweep)
        one, other = (prints[cell.id] for cell in sweep.cells)
        assert {key for key in one if one[key] != other[key]} == {"parameters"}
        folder = checkout.folder / "reports" / "alone" / "cells" / sweep.cells[0].id
        assert sweeps._earlier(folder, "01_cell", one)[0].finished
        for key in one:
            assert sweeps._earlier(folder, "01_cell", {**one, key: "x"}) == (None, f"other {key}")
        page = (folder / "index.html").read_text()
        try:
            (folder / "index.html").write_text("forged")
            assert sweeps._earlier(folder, "01_cell", one) == (None, "index.html was changed")
        finally:
            (folder / "index.html").write_text(page)

    def test_verify_runs_all_cells_again(self, checkout, monkeypatch):
        from mla_kernels.report.verify import verify_report

        monkeypatch.setattr(engines, "has_ray", lambda: False)
        monkeypatch.chdir(checkout.folder)
        done = verify_report(checkout.folder / "reports" / "same")
        assert done.same
        assert done.compared == 2 * 8


@pytest.fixture
def hanging(checkout):
    """Start a sweep of which one cell finishes and one hangs; (process, the kernel that hangs)."""
    write(checkout, "hang", "notebook: 01\ngrid: {n: [7], kind: [good, hangs]}\n")

    def start():
        (checkout.flags / "hanging").unlink(missing_ok=True)
        process = checkout.start(
            "sweep", "hang.yaml", "--workers", "2", variables={"PYTHONPATH": str(checkout.snapshot)}
        )
        wait_for(lambda: (checkout.flags / "hanging").exists() or process.poll() is not None, "the hanging cell")
        assert process.poll() is None, process.communicate()
        wait_for(lambda: len(list(checkout.folder.glob("reports/hang.unfinished/cells/*"))) == 1, "the other cell")
        return process, (checkout.flags / "hanging").read_text()

    return start


class TestEndings:
    def test_interrupted_or_killed_it_keeps_what_is_finished_and_leaves_nothing_running(self, checkout, hanging):
        process, kernel = hanging()
        started = psutil.Process(process.pid).children(recursive=True)
        assert any("ray" in " ".join(child.cmdline()) for child in started)
        code, _, err = call(checkout, "sweep", "hang.yaml")
        assert code == 2
        assert f"the sweep {checkout.folder}/reports/hang is being written by process {process.pid} since" in err
        interrupt(process)
        code, out, err = ended(process, 60)
        assert code == 130, out + err
        assert "Traceback" not in out + err
        cells = checkout.manifest("hang.unfinished")["notebooks"]
        assert [(entry["finished"], entry["reason"]) for entry in cells.values()] == [
            (True, ""), (False, "not run: interrupted before"),
        ]  # fmt: skip
        wait_for(lambda: not alive(kernel), "the end of the kernel", 20)
        wait_for(lambda: not any(alive(child.pid) for child in started), "the end of Ray", 20)

        process, kernel = hanging()
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        _, out, _ = ended(process)
        assert "  1 of an earlier run is taken over\n" in out
        wait_for(lambda: not alive(kernel), "the end of the kernel of a killed sweep", 20)
        wait_for(lambda: not any(alive(child.pid) for child in started), "the end of Ray of a killed sweep", 40)
        assert runs(checkout, "good", 7) == 1
        write(checkout, "hang", "notebook: 01\ngrid: {n: [7], kind: [good]}\n")
        code, out, err = call(checkout, "sweep", "hang.yaml")
        assert code == 0, out + err
        assert runs(checkout, "good", 7) == 1

    def test_interrupted_without_ray(self, checkout, monkeypatch):
        def stop(job):
            raise KeyboardInterrupt

        monkeypatch.setattr(engines, "run_cell", stop)
        done = sequence(monkeypatch, checkout, "same.yaml", "stopped")
        assert done.interrupted
        assert {ending.reason for ending in done.endings.values()} == {"not run: interrupted before"}
        assert done.folder.name == "stopped.unfinished"


@pytest.mark.slow
def test_on_a_cluster_with_a_gpu_for_each_cell(checkout, tmp_path):
    """A cluster of its own on this machine, with two GPUs that Ray only believes in."""
    variables = {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2, "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    write(checkout, "gpus", "notebook: 01\ngpus: 1\ngrid: {n: [1, 2]}\n")
    write(checkout, "many", "notebook: 01\ngpus: 3\ngrid: {n: [1, 2]}\n")
    folder = f"/tmp/mla-ray-{uuid.uuid4().hex[:8]}"
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    head = subprocess.Popen(
        [*ray, "start", "--head", "--port=0", "--num-cpus=2", "--num-gpus=2", "--include-dashboard=false", "--block",
         f"--temp-dir={folder}", "--object-store-memory=100000000", "--disable-usage-stats"],
        cwd=tmp_path, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        address = Path(folder) / "ray_current_cluster"
        wait_for(lambda: address.exists() and address.read_text(), "the cluster")
        where = ["--address", address.read_text().strip()]
        code, out, err = call(checkout, "sweep", "gpus.yaml", *where, variables=variables)
        assert code == 0, out + err
        cells = checkout.results("gpus")["notebooks"].values()
        assert {cell["records"]["gpus"] for cell in cells} <= {"0", "1"}
        code, out, err = call(checkout, "sweep", "many.yaml", *where, variables=variables)
        assert code == 2, out + err
        assert "Error: gpus: 3 a cell are asked for, and the cluster at" in err
    finally:
        for process in [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]:
            process.kill()
        head.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


class TestEngine:
    def test_without_ray_more_than_one_worker_is_refused_by_name(self, checkout, monkeypatch):
        monkeypatch.setattr(engines, "has_ray", lambda: False)
        sweep = load_sweep(checkout.folder / "same.yaml", root=checkout.folder)
        with pytest.raises(ReportError) as refused:
            run_sweep(sweep, "without", workers=2)
        assert str(refused.value) == (
            "Ray is not installed, and more than one worker needs it: pip install 'mla-kernels[cluster]'; "
            "or --workers 1 runs the cells one after another without it"
        )
        with pytest.raises(ReportError, match="Ray is not installed, and a cluster needs it: pip install"):
            run_sweep(sweep, "without", workers=1, address="auto")

    def test_a_dead_address_is_refused_at_once(self, checkout):
        code, _, err = call(checkout, "sweep", "same.yaml", "--name", "dead", "--address", "127.0.0.1:9")
        assert code == 2
        assert "--address: no Ray cluster can be used at '127.0.0.1:9': " in err
        assert "Is it up (ray status)" in err

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"gpus": 1}, "gpus: 1 a cell are asked for, and this machine has 0: write gpus: 0, or give --address"),
            ({"threads": 9, "address": "auto"}, "threads: 9 a cell are asked for, and the cluster at auto has 4 proc"),
        ],
    )
    def test_cells_that_no_machine_can_take_are_refused(self, fake_ray, tmp_path, options, words):
        with pytest.raises(ReportError, match=re.escape(words)):
            engines.RayEngine(**{"workers": 2, "threads": 1, "gpus": 0, "address": "", "root": tmp_path, **options})
        assert not fake_ray.is_initialized()

    def test_the_checkout_is_sent_to_a_cluster_without_its_history(self, fake_ray, tmp_path):
        engine = engines.RayEngine(workers=None, threads=2, gpus=1, address="auto", root=tmp_path)
        assert fake_ray.options["runtime_env"]["working_dir"] == str(tmp_path)
        assert {".git", ".venv", "reports"} <= set(fake_ray.options["runtime_env"]["excludes"])
        assert fake_ray.task == {"num_cpus": 2, "num_gpus": 1, "max_retries": 0}
        engine.close()

    def test_what_an_error_of_ray_means(self, fake_ray, tmp_path):
        engine = engines.RayEngine(workers=1, threads=1, gpus=0, address="", root=tmp_path)
        errors = fake_ray.exceptions
        for error, kind, words in (
            (errors.OutOfMemoryError("x"), engines.LostWorker, "out of memory"),
            (errors.WorkerCrashedError(), engines.LostWorker, "its worker is gone (WorkerCrashedError"),
            (errors.RayTaskError("run_cell", "trace", ReportError("full")), ReportError, "full"),
        ):
            found = engine._result(error)
            assert isinstance(found, kind)
            assert words in str(found)
        engine.close()


@pytest.fixture
def fake_ray(monkeypatch):
    """Ray without processes; `get` raises what it is given."""
    import ray

    fake = types.SimpleNamespace(exceptions=ray.exceptions, options={}, task=None, __version__="x", up=False)

    def init(**options):
        fake.options, fake.up = options, True

    def remote(**options):
        fake.task = options
        return lambda function: function

    def get(error):
        raise error

    fake.init, fake.remote, fake.get = init, remote, get
    fake.is_initialized = lambda: fake.up
    fake.shutdown = lambda: setattr(fake, "up", False)
    fake.cluster_resources = lambda: {"CPU": 4.0, "GPU": 2.0} if fake.options["address"] == "auto" else {"CPU": 2.0}
    monkeypatch.setattr(engines, "_import_ray", lambda: fake)
    return fake


class TestFile:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("- 1\n", "expected a mapping with the keys notebook and grid"),
            ("notebok: 01\n", "unknown key 'notebok'; did you mean 'notebook'?"),
            ("grid: {n: [1]}\n", "notebook: expected a name or number, got None"),
            ("notebook: 01_cel\ngrid: {n: [1]}\n", "NOTEBOOK: '01_cel' is not there; did you mean '01_cell'?"),
            ("notebook: 01\n", "grid: expected a mapping `name: [value, value]` with one list or more, got '{}'"),
            ("notebook: 01\ngrid: {n: 1}\n", "grid: expected a mapping"),
            ("notebook: 01\ngrid: {n: []}\n", "grid: expected a mapping"),
            ("notebook: 01\ngrid: {m: [1]}\n", "no notebook of this run has a parameter 'm'"),
            ("notebook: 01\ngrid: {n: [0]}\n", "01_cell: n (-p): expected an integer of at least 1, got '0'"),
            ("notebook: 01\ngrid: {n: [1, 1.0]}\n", "grid: the cell n=1 is there twice: give every value once"),
            ("notebook: 01\nparameters: {n: 1}\ngrid: {n: [1]}\n", "'n' is given under parameters and under grid"),
            ("notebook: 01\nparameters: [n]\ngrid: {n: [1]}\n", "parameters: expected a mapping"),
            ("notebook: 01\nprofile: cpv\ngrid: {n: [1]}\n", "profile: 'cpv' is not there"),
            ("notebook: 01\nthreads: 0\ngrid: {n: [1]}\n", "threads: expected an integer of at least 1, got '0'"),
            ("notebook: 01\ngpus: x\ngrid: {n: [1]}\n", "gpus: expected an integer of at least 0, got 'x'"),
            ("notebook: 01\ntime_limit: inf\ngrid: {n: [1]}\n", "time_limit: expected seconds above 0, got 'inf'"),
            ("notebook: 01\ncompare: error\ngrid: {n: [1]}\n", "compare: expected a list of names"),
            (f"notebook: 01\ngrid: {{n: {list(range(1, 102))}, splits: {list(range(100))}}}\n", "at most 10000 cells"),
            ("notebook: [\n", "expected YAML, but: "),
            ("notebook: 01\ngrid: {n: [1], n: [2]}\n", "the key 'n' is given twice"),
        ],
    )
    def test_wrong_files_are_refused(self, checkout, text, words):
        write(checkout, "wrong", text)
        with pytest.raises(ReportError) as refused:
            load_sweep(checkout.folder / "wrong.yaml", root=checkout.folder)
        assert words in str(refused.value)

    def test_a_wrong_file_is_one_line_and_nothing_is_written(self, checkout):
        write(checkout, "wrong", "notebook: 01\ngrid: {m: [1]}\n")
        code, out, err = call(checkout, "sweep", "wrong.yaml")
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert not list(checkout.folder.glob("reports/*wrong*"))

    def test_names_that_are_taken(self, checkout, monkeypatch):
        (checkout.folder / "reports" / "other.unfinished").mkdir(parents=True)
        (checkout.folder / "reports" / "other.unfinished" / "manifest.json").write_text("{}")
        with pytest.raises(ReportError, match=r"other\.unfinished is not a sweep: choose another name"):
            sequence(monkeypatch, checkout, "same.yaml", "other")

    def test_cells_have_readable_folders_of_their_own(self, checkout):
        sweep = load_sweep(checkout.folder / "same.yaml", root=checkout.folder)
        ids = [cell.id for cell in sweep.cells]
        assert len(set(ids)) == 2
        assert re.fullmatch(r"n-1-seq-lens-128-4096-splits-none-[0-9a-f]{8}", ids[0])
        assert sweep.axes == {"n": (1, 2), "seq_lens": ([128, 4096],), "splits": (None,)}


class TestPage:
    def test_headings_sort_and_what_is_missing_stays_last(self, checkout, mixed):
        folder = checkout.folder / "reports" / "same"
        with Browser() as browser:
            browser.viewport(1280)
            browser.open(folder / "index.html")
            assert browser.errors == []
            column = "[...document.querySelectorAll('#sorted tbody tr')].map(r => r.cells[0].textContent)"
            assert browser.evaluate(column) == ["1", "2"]
            head = "document.querySelector('#sorted thead th')"
            browser.evaluate(f"{head}.firstElementChild.click()")
            browser.evaluate(f"{head}.firstElementChild.click()")
            assert browser.evaluate(column) == ["2", "1"]
            assert browser.evaluate(f"{head}.getAttribute('aria-sort')") == "descending"
            links = browser.evaluate("[...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))")
            assert [link for link in links if not (folder / link).is_file()] == []
            images = browser.evaluate("[...document.images].map(i => [i.naturalWidth > 0, i.alt])")
            assert images
            assert all(there and alt for there, alt in images)
            assert "error, %: n across; from 0.5 (n = 1) to 1 (n = 2)." in images[0][1]
            browser.viewport(390)
            browser.open(folder / "index.html")
            assert browser.evaluate("document.documentElement.scrollWidth") <= 390
