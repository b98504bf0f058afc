# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The report runner: parameters, faults of notebooks and kernels, the folder that comes out, verify.

Starting kernels is slow, so most tests look at a few runs that are shared.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from report_checkout import ROOT, Checkout, alive, ended, interrupt, wait_for

from mla_kernels.report.cli import main
from mla_kernels.report.errors import ReportError
from mla_kernels.report.parameters import Notebook, convert, settle
from mla_kernels.report.runner import plan_run, run_report
from mla_kernels.report.verify import differences, edited_files
from mla_kernels.report.verify import load_report as load_checked

SCHEMA = {
    "num_heads": {"type": "integer", "minimum": 1, "maximum": 128, "description": "Query heads."},
    "batch": {"type": "integer", "minimum": 1},
    "tol": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "k_scale": {"type": "number", "exclusiveMinimum": 0},
    "tag": {"type": "string"},
    "dtype": {"type": "string", "enum": ["bfloat16", "float16", "float32"]},
    "seq_lens": {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1, "maxItems": 8},
    "splits": {"type": ["integer", "null"], "minimum": 1},
    "fast_math": {"type": "boolean"},
    "seed": {"type": "integer", "minimum": 0},
}
PARAMETERS = """num_heads = 16
batch = 1
tol = 1e-3
k_scale = 1.0
tag = "none"
dtype = "bfloat16"
seq_lens = [128]
splits = None
fast_math = False
seed = 0"""
NAMES = ", ".join(f"{name}={name}" for name in SCHEMA)

# The notebooks of the shared run of failures: name, cells after the page is opened, words of the reason.
FAILURES = {
    # W1: killed, crashed. Code cells: parameters, page, then these; the fifth dies.
    "11_sigkill": (["x = 1", "import os, signal\nx = 2", "os.kill(os.getpid(), signal.SIGKILL)", "x = 3"], "SIGKILL"),
    "12_sigsegv": (["x = 1", "import os, signal\nx = 2", "os.kill(os.getpid(), signal.SIGSEGV)", "x = 3"], "SIGSEGV"),
    # W4: failures that look like success.
    "13_shell": (["!false"], "CalledProcessError"),
    "14_run_magic": (["open('bad.py', 'w').write('raise ValueError(42)')", "%run bad.py"], "ValueError: 42"),
    "15_hook": (
        [
            "def hook(*_, **__):\n    pass\nget_ipython().set_custom_exc((Exception,), hook)",
            "raise ValueError('hidden')",
        ],
        "ValueError: hidden",
    ),
    "16_exit3": (["import sys\nsys.exit(3)"], "SystemExit"),
    "17_exit0": (["import sys\nsys.exit(0)"], "SystemExit"),
    "18_os_exit0": (["import os\nos._exit(0)"], "exit code 0"),
    "19_swallowed": (
        ["page.claim('one is two', 1 == 2)", "try:\n    page.finish()\nexcept AssertionError:\n    pass"],
        "one is two",
    ),
}  # fmt: skip
LEAVES_CHILD = (
    "import subprocess, sys\n"
    "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    "open({path!r}, 'w').write(str(child.pid))"
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """All notebooks of this file, in one checkout."""
    place = Checkout(tmp_path_factory.mktemp("report") / "my work (1)")
    place.notebook(
        "01_echo",
        f"given = dict({NAMES})\npage.record('given', given)",
        "page.record('types', {k: type(v).__name__ for k, v in given.items()})",
        "import sys\npage.record('executable', sys.executable, volatile=True)",
        "page.record('not_a_number', float('nan'))",
        "import random\nrandom.seed(seed)\npage.record('drawn', [random.random() for _ in range(4)])",
        parameters=PARAMETERS,
        schema=SCHEMA,
    )
    place.notebook("02_flood", "for i in range(300_000):\n    print('line', i)", "!seq 100000", kernelspec="no-such")
    place.notebook(
        "03_other", "import sys\npage.record('executable', sys.executable, volatile=True)", kernelspec="without-torch"
    )
    for name, (sources, _) in FAILURES.items():
        if name in ("11_sigkill", "12_sigsegv"):
            child = LEAVES_CHILD.format(path=str(place.folder / f"{name}.pid"))
            sources = [f"{sources[0]}\n{child}", *sources[1:]]
        place.notebook(name, *sources, finish=name != "19_swallowed")
    place.notebook("20_no_finish", "x = 1", finish=False)
    hang = "import os, time\nopen('hanging', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    place.notebook(
        "21_hang", LEAVES_CHILD.format(path=str(place.folder / "hang.pid")), "## It waits here", hang, "x = 3"
    )
    place.profile("cpu", "01_echo:\n")
    spec = place.folder / "jupyter" / "kernels" / "without-torch"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(
        json.dumps({"argv": ["/bin/false", "-f", "{connection_file}"], "display_name": "x", "language": "python"})
    )
    return place


@pytest.fixture(scope="module")
def good(checkout):
    """A report that finishes: W7's values through the Python call, a flood (W2), two wrong kernel names (W11)."""
    os.environ["JUPYTER_PATH"] = str(checkout.folder / "jupyter")
    values = {
        "seq_lens": (128, 4096), "batch": np.int64(3), "dtype": torch.bfloat16, "tol": np.float32(0.25), "tag": "007",
        "num_heads": torch.tensor(32), "splits": None, "fast_math": np.bool_(True),
    }  # fmt: skip
    try:
        plan = plan_run(["01", "02", "03"], parameters=values, root=checkout.folder)
        return run_report(plan, "good", command=["test"])
    finally:
        del os.environ["JUPYTER_PATH"]


@pytest.fixture(scope="module")
def failed(checkout):
    """(exit code, stdout, stderr) of one run of all notebooks that fail."""
    return checkout.call("run", *FAILURES, "20_no_finish", "--name", "failed")


class TestParameters:
    """W5, W7, W8: the schema decides, and everything is refused before anything runs."""

    def test_w5_unknown_name_is_refused_with_the_nearest_and_nothing_is_written(self, checkout):
        code, out, err = checkout.call("run", "01", "--name", "w5", "-p", "num_head=16")
        assert code == 2
        assert (
            err == "Error: -p num_head: no notebook of this run has a parameter 'num_head'; did you mean 'num_heads'?\n"
        )
        assert not out
        assert not list(checkout.folder.glob("reports/*w5*"))

    def test_w8_text_becomes_what_the_schema_says(self, checkout):
        given = [
            "batch=4.0", "tol=1e-4", "tag=007", "k_scale=2", "splits=None", "fast_math=True", "seq_lens=128,4096",
            "dtype=float16",
        ]  # fmt: skip
        code, out, err = checkout.call("schema", "01", "--json", *[word for text in given for word in ("-p", text)])
        assert code == 0, err
        assert json.loads(out) == {
            "num_heads": 16, "batch": 4, "tol": 1e-4, "k_scale": 2.0, "tag": "007", "dtype": "float16",
            "seq_lens": [128, 4096], "splits": None, "fast_math": True, "seed": 0,
        }  # fmt: skip
        assert '"batch": 4,' in out
        assert '"k_scale": 2.0,' in out

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("batch", "4.5", "expected an integer of at least 1, got '4.5'"),
            ("batch", "1_000x", "expected an integer of at least 1, got '1_000x'"),
            ("batch", "0", "expected an integer of at least 1, got '0'"),
            ("batch", True, "expected an integer of at least 1, got True (bool)"),
            ("batch", float("inf"), "expected an integer of at least 1, got inf (float)"),
            ("num_heads", "129", "expected an integer from 1 to 128, got '129'"),
            ("k_scale", "nan", "expected a finite number above 0, got 'nan'"),
            ("k_scale", math.nan, "expected a finite number above 0, got nan (float)"),
            ("k_scale", "-1", "expected a finite number above 0, got '-1'"),
            ("tol", "2", "expected a finite number above 0 and up to 1, got '2'"),
            ("tag", 7, "expected text, got 7 (int)"),
            ("dtype", torch.float8_e4m3fn, "expected one of bfloat16, float16, float32, got 'float8_e4m3fn'"),
            ("fast_math", "1", "expected true or false, got '1'"),
            ("splits", "auto", "expected an integer of at least 1, or none, got 'auto'"),
            ("seq_lens", "[128, 0]", "expected a list of 1 to 8 integers of at least 1, got '[128, 0]'"),
            ("seq_lens", [], "expected a list of 1 to 8 integers of at least 1, got [] (list)"),
            ("seq_lens", 128, "got 128 (int): write it as [1, 2, 3]"),
            ("seq_lens", np.arange(1, 4), "got a numpy.ndarray of shape (3,): pass value.tolist()"),
            ("seq_lens", torch.ones(2, 2), "of shape (2, 2): pass value.tolist()"),
        ],
    )  # fmt: skip
    def test_wrong_values_are_refused_with_what_is_allowed(self, checkout, name, value, words):
        echo = Notebook(checkout.notebooks / "01_echo.ipynb")
        with pytest.raises(ReportError) as refused:
            settle([echo], {}, {name: value})
        assert f"01_echo: {name} (-p): " in str(refused.value)
        assert words in str(refused.value)

    @pytest.mark.parametrize(
        ("name", "value", "expected"),
        [
            ("seq_lens", (128, 4096), [128, 4096]),
            ("seq_lens", [np.int32(5), "6"], [5, 6]),
            ("seq_lens", "(128, 4096)", [128, 4096]),
            ("seq_lens", "128", [128]),
            ("batch", np.int64(3), 3),
            ("batch", np.float64(4), 4),
            ("batch", torch.tensor(5), 5),
            ("dtype", torch.bfloat16, "bfloat16"),
            ("dtype", np.dtype("float32"), "float32"),
            ("dtype", np.float16, "float16"),
            ("tag", Path("a/b"), "a/b"),
            ("fast_math", "no", False),
            ("splits", "null", None),
            ("tol", 1, 1.0),
        ],
    )
    def test_w7_values_are_converted(self, name, value, expected):
        converted = convert(value, SCHEMA[name], name)
        assert converted == expected
        assert type(converted) is type(expected)

    def test_w7_converted_values_arrive_in_the_kernel(self, checkout, good):
        assert good.finished, good.outcomes
        records = checkout.results("good")["notebooks"]["01_echo"]["records"]
        assert records["given"] == {
            "num_heads": 32, "batch": 3, "tol": 0.25, "k_scale": 1.0, "tag": "007", "dtype": "bfloat16",
            "seq_lens": [128, 4096], "splits": None, "fast_math": True, "seed": 0,
        }  # fmt: skip
        assert records["types"] == {
            "num_heads": "int", "batch": "int", "tol": "float", "k_scale": "float", "tag": "str", "dtype": "str",
            "seq_lens": "list", "splits": "NoneType", "fast_math": "bool", "seed": "int",
        }  # fmt: skip
        assert records["not_a_number"] == "nan"

    def test_profile_texts_are_read_by_the_schema_and_p_goes_to_one_notebook(self, checkout):
        checkout.profile("mine", "01_echo:\n  tag: 007\n  batch: 4.0\n  seq_lens: [1, 2]\n03_other:\n")
        plan = plan_run(profile="mine", parameters=["01_echo.seed=5"], root=checkout.folder)
        assert [n.name for n in plan.notebooks] == ["01_echo", "03_other"]
        echo = plan.parameters["01_echo"]
        assert (echo["tag"], echo["batch"], echo["seq_lens"], echo["seed"]) == ("007", 4, [1, 2], 5)
        assert plan.parameters["03_other"] == {}

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["run", "04"], "NOTEBOOK: '04' is not there; known: 01_echo, "),
            (["run", "01_ecco"], "NOTEBOOK: '01_ecco' is not there; did you mean '01_echo'?"),
            (["run", "1", "01"], "NOTEBOOK: 01_echo is asked for twice"),
            (["run", "01", "-p", "seed"], "-p seed: expected name=value"),
            (["run", "01", "-p", "02_flood.seed=1"], "'02_flood' is not among the notebooks of this run"),
            (["run", "01", "-p", "report_dir=x"], "report_dir is set by the runner; use --name and --reports-dir"),
            (["run", "--profile", "cpv"], "did you mean 'cpu'?"),
            (["run", "--profile", "bad.yaml"], "expected a mapping `notebook: {parameter: value}`"),
            (["run", "--profile", "other.yaml"], "'01_ecco', which is no notebook here; did you mean '01_echo'?"),
            (["run", "--profile", "latin.yaml"], "latin.yaml: expected YAML, but: 'utf-8' codec can't decode byte"),
            (["run", "--profile", "binary.yaml"], "binary.yaml: expected YAML, but: "),
            (["run", "--profile", "twice.yaml"], "the key 'seed' is given twice, in line 2 and in line 4"),
            (["run", "--profile", "again.yaml"], "the key '01_echo' is given twice, in line 1 and in line 3"),
            (["schema", "01", "--profile", "cpv"], "did you mean 'cpu'?"),
            (["schema", "01", "--profile", "binary.yaml"], "binary.yaml: expected YAML, but: "),
            (["schema", "01", "--profile", "wrong.yaml"], "01_echo: batch (profile): expected an integer of at least"),
            (["run", "latin.ipynb"], "latin.ipynb: expected a Jupyter notebook (format 4), but: UnicodeDecodeError"),
            (["run", "list.ipynb"], "list.ipynb: expected a Jupyter notebook (format 4), but: TypeError"),
            (["run", "cells.ipynb"], "cells.ipynb: expected a Jupyter notebook (format 4), but: KeyError"),
            (["run", "odd/latin.ipynb"], "latin.schema.json: expected JSON, but: 'utf-8' codec can't decode byte 0xe9"),
            (["run", "odd/list.ipynb"], "list.schema.json: expected a JSON Schema object with `properties`, got []"),
            (["run", "01", "--name", "../x"], "--name: expected letters, digits"),
            (["verify", "nothing"], "REPORT: nothing is not there"),
            (["verify", "notebooks"], "REPORT: notebooks is not a report (no manifest.json)"),
        ],
    )  # fmt: skip
    def test_bad_input_is_one_line_without_a_traceback(self, checkout, arguments, words, monkeypatch):
        (checkout.folder / "bad.yaml").write_text("- 1\n- 2\n")
        (checkout.folder / "other.yaml").write_text("01_ecco:\n")
        (checkout.folder / "latin.yaml").write_bytes("01_echo: {tag: é}\n".encode("latin-1"))
        (checkout.folder / "binary.yaml").write_bytes(bytes(range(64)))
        (checkout.folder / "twice.yaml").write_text("01_echo:\n  seed: 1\n  batch: 2\n  seed: 3\n")
        (checkout.folder / "again.yaml").write_text("01_echo:\n  seed: 1\n01_echo:\n  batch: 2\n")
        (checkout.folder / "wrong.yaml").write_text("01_echo:\n  batch: many\n")
        (checkout.folder / "latin.ipynb").write_bytes('{"cells": ["é"]}'.encode("latin-1"))
        (checkout.folder / "list.ipynb").write_text("[]")
        (checkout.folder / "cells.ipynb").write_text('{"cells": [{}]}')
        params = checkout.folder / "odd" / "params"
        params.mkdir(parents=True, exist_ok=True)
        for name, text in (("latin", '{"é": 1}'), ("list", "[]")):
            shutil.copy(checkout.notebooks / "01_echo.ipynb", params.parent / f"{name}.ipynb")
            (params / f"{name}.schema.json").write_bytes(text.encode("latin-1"))
        monkeypatch.chdir(checkout.folder)
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 2
        assert words in done.stderr
        assert done.stderr.startswith("Error: ")
        assert done.stderr.count("\n") == 1
        assert not done.stdout

    def test_schema_shows_type_range_default_and_description(self, checkout):
        code, out, _ = checkout.call("schema", "01_echo")
        assert code == 0
        assert "num_heads = 16\n    an integer from 1 to 128\n    Query heads.\n" in out
        assert "splits = null\n    an integer of at least 1, or none\n" in out

    def test_schema_shows_the_values_of_the_profile(self, checkout, monkeypatch):
        (checkout.folder / "some.yaml").write_text("01_echo:\n  num_heads: 64\n")
        monkeypatch.chdir(checkout.folder)
        done = CliRunner().invoke(main, ["schema", "01", "--profile", "some.yaml", "-p", "seed=3"])
        assert done.exit_code == 0, done.stderr
        assert "num_heads = 64\n" in done.stdout
        assert "seed = 3\n" in done.stdout


class TestGoodRun:
    def test_folder_holds_everything_and_its_marker_has_the_hashes(self, checkout, good):
        folder = good.folder
        assert folder == checkout.folder / "reports" / "good"
        for name in ("index.html", "results.json", "manifest.json", "FINISHED", "01_echo.ipynb", "01_echo.html"):
            assert (folder / name).is_file(), name
        assert edited_files(folder) == []
        assert not (checkout.folder / "reports" / "good.unfinished").exists()

    def test_w2_flood_passes_in_a_small_notebook_with_the_full_log_linked(self, checkout, good):
        folder = good.folder
        assert (folder / "02_flood.ipynb").stat().st_size < 5_000_000
        log = (folder / "logs" / "02_flood.txt").read_text()
        assert log.count("\nline ") == 300_000
        assert "\n100000\n" in log
        outputs = next(c.outputs for c in checkout.executed("good", "02_flood").cells if "300_000" in c.source)
        head, note, tail = outputs
        assert head.text.startswith("line 0\nline 1\n")
        assert '<a href="logs/02_flood.txt">Full log</a>' in note.data["text/html"]
        assert tail.text.endswith("line 299999\n")
        assert "logs/02_flood.txt" in (folder / "02_flood.html").read_text()

    def test_w11_the_kernel_is_the_runners_interpreter_whatever_the_notebook_names(self, checkout, good):
        timings = checkout.timings("good")
        assert timings["03_other"]["executable"] == timings["01_echo"]["executable"] == sys.executable
        assert checkout.manifest("good")["python"]["executable"] == sys.executable
        assert sys.executable in (good.folder / "index.html").read_text()
        assert checkout.executed("good", "03_other").metadata.kernelspec.name == "python3"

    def test_volatile_values_are_kept_out_of_what_verify_compares(self, checkout, good):
        results = checkout.results("good")
        assert set(results) == {"notebooks"}
        assert "executable" not in results["notebooks"]["01_echo"]["records"]
        assert checkout.timings("good")["01_echo"]["seconds"] > 0

    def test_manifest_tells_where_the_numbers_come_from(self, checkout, good):
        manifest = checkout.manifest("good")
        echo = manifest["notebooks"]["01_echo"]
        assert echo["path"] == "notebooks/01_echo.ipynb"
        assert echo["seeds"] == {"seed": 0}
        assert echo["parameters"]["seq_lens"] == [128, 4096]
        assert len(echo["sha256"]) == 64
        assert manifest["packages"]["torch"] == torch.__version__
        assert manifest["machine"]["cpu"]
        assert manifest["started"] <= manifest["ended"]
        assert set(manifest) >= {"command", "repository", "data", "python", "machine", "profile"}

    def test_no_folder_of_this_machine_in_the_notebook_that_is_sent_on(self, good):
        for path in good.folder.glob("*.ipynb"):
            assert ".unfinished" not in path.read_text()


class TestFailures:
    """W1 and W4, in one run: a failure does not stop the others, is named, and is never finished."""

    def test_exit_code_and_no_marker(self, checkout, failed):
        code, _, err = failed
        assert code == 1
        assert "not finished (11_sigkill, 12_sigsegv, " in err
        assert not (checkout.folder / "reports" / "failed").exists()
        assert not (checkout.folder / "reports" / "failed.unfinished" / "FINISHED").exists()

    @pytest.mark.parametrize("name", FAILURES)
    def test_each_is_not_finished_for_its_own_reason(self, checkout, failed, name):
        entry = checkout.manifest("failed.unfinished")["notebooks"][name]
        assert entry["finished"] is False
        assert FAILURES[name][1] in entry["reason"]
        assert f"✗ {name}" in failed[1]
        if name != "19_swallowed":  # which ran to its end
            stopped_at = 5 if name < "13" else 2 + len(FAILURES[name][0])
            assert re.search(rf"✗ {name} .*\n    in code cell {stopped_at}: ", failed[1])
        page = (checkout.folder / "reports" / "failed.unfinished" / f"{name}.html").read_text()
        assert "Not finished" in page

    def test_a_notebook_that_never_finishes_its_page_is_not_finished(self, checkout, failed):
        entry = checkout.manifest("failed.unfinished")["notebooks"]["20_no_finish"]
        assert entry["reason"] == "every cell ran, but page.finish() was not reached"

    @pytest.mark.parametrize(("name", "signal_name"), [("11_sigkill", "SIGKILL"), ("12_sigsegv", "SIGSEGV")])
    def test_w1_partial_notebook_names_the_cell_and_no_process_is_left(self, checkout, failed, name, signal_name):
        cells = [c for c in checkout.executed("failed.unfinished", name).cells if c.cell_type == "code"]
        cells = [c for c in cells if "injected-parameters" not in c.metadata.get("tags", [])]
        status = [cell.metadata.papermill.status for cell in cells]
        assert status == ["completed"] * 4 + ["failed"] + ["pending"] * 2
        assert [cell.execution_count is not None for cell in cells[:4]] == [True] * 4
        assert signal_name in cells[4].outputs[-1].evalue
        assert f"in code cell 5: os.kill(os.getpid(), signal.{signal_name})" in failed[1]
        assert not alive((checkout.folder / f"{name}.pid").read_text())

    def test_w1_a_good_run_right_after_works(self, checkout, failed):
        code, out, err = checkout.call("run", "03", "--name", "after")
        assert code == 0, out + err
        assert sys.executable in out
        assert (checkout.folder / "reports" / "after" / "FINISHED").is_file()

    def test_a_failed_rerun_leaves_the_finished_report_alone(self, checkout, good):
        before = (good.folder / "FINISHED").read_text()
        code, _, _ = checkout.call("run", "17_exit0", "--name", "good")
        assert code == 1
        assert (good.folder / "FINISHED").read_text() == before
        assert edited_files(good.folder) == []
        assert (checkout.folder / "reports" / "good.unfinished" / "17_exit0.ipynb").is_file()


class TestEndings:
    """Time limit, Ctrl-C, a killed runner, two runs at once."""

    def hang(self, checkout, *more):
        (checkout.notebooks / "hanging").unlink(missing_ok=True)
        process = checkout.start("run", "21_hang", "--name", "ends", *more)
        wait_for((checkout.notebooks / "hanging").exists, "the hanging cell")
        wait_for((checkout.notebooks / "hanging").read_text, "its process id")
        return process, (checkout.notebooks / "hanging").read_text()

    def test_interrupts_locks_and_limits(self, checkout):
        pid = checkout.folder / "hang.pid"
        process, kernel = self.hang(checkout)
        # A second run into the same folder is refused while the first goes on.
        code, _, err = checkout.call("run", "03", "--name", "ends")
        assert code == 2
        assert f"reports/ends is being written by process {process.pid} since" in err
        # Killed: the kernel goes, the lock goes, nothing looks finished.
        process.kill()
        ended(process)
        wait_for(lambda: not alive(kernel), "the end of the kernel of a killed runner", 20)
        wait_for(lambda: not alive(pid.read_text()), "the end of what its notebook started", 20)
        assert not (checkout.folder / "reports" / "ends").exists()
        code, _, err = checkout.call("verify", "reports/ends.unfinished")
        assert code == 2
        assert "is not finished (its run was killed, or is still going on)" in err
        # Ctrl-C: the partial notebook is kept, and the run says so.
        process, kernel = self.hang(checkout)
        interrupt(process)
        code, out, err = ended(process, 60)
        assert code == 130, out + err
        assert "✗ 21_hang" in out
        assert "in code cell 4 under “It waits here”: import os, time" in out
        cells = checkout.executed("ends.unfinished", "21_hang").cells
        assert [c.metadata.papermill.status for c in cells][-3:] == ["failed", "pending", "pending"]
        assert checkout.manifest("ends.unfinished")["notebooks"]["21_hang"]["reason"] == "interrupted"
        assert not alive(kernel)
        assert not alive(pid.read_text())

    def test_time_limit_ends_the_whole_group_and_fail_fast_the_run(self, checkout):
        process = checkout.start(
            "run", "21_hang", "20_no_finish", "--name", "slow", "--time-limit", "12", "--fail-fast"
        )
        code, out, err = ended(process)
        assert code == 1, out + err
        notebooks = checkout.manifest("slow.unfinished")["notebooks"]
        assert notebooks["21_hang"]["reason"] == "stopped at the time limit of 12 s"
        assert notebooks["21_hang"]["seconds"] < 40
        assert notebooks["20_no_finish"]["reason"] == "not run: 21_hang failed (--fail-fast)"
        assert "in code cell 4 under “It waits here”: import os, time" in out
        assert not alive((checkout.folder / "hang.pid").read_text())

    def test_a_folder_that_is_no_report_is_not_replaced(self, checkout):
        precious = checkout.folder / "reports" / "precious"
        precious.mkdir(parents=True)
        code, _, err = checkout.call("run", "03", "--name", "precious")
        assert code == 2
        assert "is there and is not a report (it has no FINISHED): choose another name" in err
        assert precious.is_dir()

    def test_unwritable_reports_folder(self, checkout, tmp_path):
        (tmp_path / "file").touch()
        code, _, err = checkout.call("run", "03", "--reports-dir", str(tmp_path / "file" / "x"))
        assert code == 2
        assert err.startswith("Error: cannot read or write")
        assert "Traceback" not in err


@pytest.fixture(scope="module")
def report(checkout):
    """A small finished report to verify."""
    code, out, err = checkout.call("run", "01", "--name", "checked", "-p", "seed=3")
    assert code == 0, out + err
    return checkout.folder / "reports" / "checked"


class TestVerify:
    def test_identical_on_the_same_machine(self, checkout, report):
        code, out, err = checkout.call("verify", "checked")
        assert code == 0, out + err
        assert "entries of" in out
        assert "results.json are identical" in out
        assert "This environment is not" not in out

    def test_other_numbers_and_another_environment_are_listed(self, checkout, report):
        """A forger who also mends the hashes is found by the numbers."""
        forged = checkout.folder / "reports" / "forged"
        shutil.copytree(report, forged)
        results = json.loads((forged / "results.json").read_text())
        drawn = results["notebooks"]["01_echo"]["records"]["drawn"]
        true, drawn[2] = drawn[2], math.nextafter(drawn[2], 1)
        manifest = json.loads((forged / "manifest.json").read_text())
        manifest["machine"]["cpu"] = "Another CPU"
        manifest["packages"]["torch"] = "1.0"
        (forged / "manifest.json").write_text(json.dumps(manifest))
        (forged / "results.json").write_text(json.dumps(results))
        code, out, err = checkout.call("verify", "reports/forged")
        assert code == 1
        assert "is not as it was when it finished: manifest.json was changed; results.json was changed" in err
        assert "Traceback" not in err
        marker = json.loads((forged / "FINISHED").read_text())
        from mla_kernels.report.files import file_hash

        marker["sha256"] |= {name: file_hash(forged / name) for name in ("manifest.json", "results.json")}
        (forged / "FINISHED").write_text(json.dumps(marker))
        code, out, err = checkout.call("verify", "reports/forged")
        assert code == 1
        assert f"01_echo.records.drawn[2]  {drawn[2]}  {true}  " in out
        assert out.count("01_echo.records.") == 1
        assert "Another CPU" in out
        assert "package torch" in out
        assert err == "not verified: the numbers differ\n"

    def test_a_notebook_that_does_not_finish_again_is_told_with_its_reason(self, checkout):
        checkout.notebook("06_turns", "import os\nassert not os.path.exists('turned'), 'it turned'")
        code, out, err = checkout.call("run", "06", "--name", "turns")
        assert code == 0, out + err
        (checkout.notebooks / "turned").touch()
        code, out, err = checkout.call("verify", "turns")
        assert code == 1
        assert "✗ 06_turns" in out
        assert "AssertionError: it turned" in out
        assert "(not there)" not in out
        assert err == "not verified: 06_turns did not finish\n"

    def test_added_and_missing_files_are_named(self, report, tmp_path):
        copy = tmp_path / "copy"
        shutil.copytree(report, copy)
        (copy / "extra.txt").touch()
        (copy / "index.html").unlink()
        with pytest.raises(ReportError, match=r"index\.html is missing; extra\.txt was added"):
            load_checked(copy)

    def test_an_unfinished_run_beside_the_report_is_mentioned(self, checkout, report, tmp_path, monkeypatch):
        copy = tmp_path / "reports" / "checked"
        shutil.copytree(report, copy)
        (copy / "extra.txt").touch()  # ends it early
        monkeypatch.chdir(tmp_path)
        quiet = CliRunner().invoke(main, ["verify", "reports/checked"])
        assert ".unfinished" not in quiet.stderr
        other = copy.with_name("checked.unfinished")
        other.mkdir()
        (other / "manifest.json").write_text(json.dumps({"notebooks": {"01_echo": {"reason": "it broke"}}}))
        done = CliRunner().invoke(main, ["verify", "reports/checked"])
        note = "note: reports/checked.unfinished lies beside it and is not finished (01_echo: it broke)\n"
        assert done.stderr == note + quiet.stderr
        shutil.rmtree(copy)
        done = CliRunner().invoke(main, ["verify", "reports/checked"])
        assert done.exit_code == 2
        expected = "checked is not there, but checked.unfinished is, which is not finished (01_echo: it broke)"
        assert expected in done.stderr

    def test_leaves_are_compared_exactly(self):
        old = {"a": [1, 0.1, "nan"], "b": {}, "c": True, "gone": 1}
        new = {"a": [1.0, math.nextafter(0.1, 1), "nan"], "b": {}, "c": 1, "new": 2}
        assert [d.path for d in differences(old, new)] == ["a[1]", "c", "gone", "new"]

    def test_list_shows_states(self, checkout, report):
        code, out, _ = checkout.call("list")
        assert code == 0
        assert "01_echo" in out
        lines = [line for line in out.splitlines() if line.startswith("  checked ")]
        assert lines
        assert lines[0].endswith("  is finished")

    def test_damaged_files_are_named(self, report, tmp_path):
        for name, text in (("manifest.json", "{"), ("manifest.json", "[]"), ("FINISHED", "")):
            copy = tmp_path / f"{name}{len(text)}"
            shutil.copytree(report, copy)
            (copy / name).write_text(text)
            with pytest.raises(ReportError, match="is damaged"):
                load_checked(copy)


def test_plain_papermill_writes_into_the_checkouts_interactive_folder(checkout, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "papermill", "01_echo.ipynb", str(tmp_path / "out.ipynb"), "-k", "python3"],
        cwd=checkout.notebooks, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    folder = checkout.folder / "reports" / "interactive" / "01_echo"
    results = json.loads((folder / "results" / "01_echo.json").read_text())
    assert results["claims"] == [{"claim": "it ran to its end", "ok": True, "detail": ""}]
    assert nbformat.read(tmp_path / "out.ipynb", as_version=4).cells
