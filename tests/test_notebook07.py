# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The published failing case in fresh processes, the recorded runs, and the planted faults of notebook 07."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hostile import same_bits

from mla_kernels import failure, measurements, planted
from mla_kernels.cases import SM_SCALE, select

ROOT = Path(__file__).resolve().parents[1]
SMALL = {"b": 3, "seq_len": 200, "h_q": 4}


def row(**changes):
    right = {
        "rows_wrong": {}, "unwritten": 0, "nonfinite": 0, "squared_relative_error": 8e-5,
        "lse_squared_relative_error": 1e-15, "differing": 0, "wrote_outside": False,
    }  # fmt: skip
    return right | changes


def test_the_case_is_the_published_one():
    case = failure.failed_case()
    assert (case.b, case.h_q, set(case.seq_lens), case.page_size) == (128, 16, {4096}, 64)
    assert (case.q_scale, case.kv_scale, case.num_kv_splits, case.seed) == (1.0, 1.0, 1, 42)
    assert case.sm_scale == 576**-0.5 != SM_SCALE
    assert failure.failed_case(dtype="bf16").kv_scale is None
    assert len(select("published")) == 48


@pytest.fixture(scope="module")
def rows(cpu_build):
    return failure.run(failure.failed_case(**SMALL), processes=3, repeats=2, at_once=2)


@pytest.fixture(scope="module")
def batches(cpu_build):
    return planted.batches(12, 4096, 4)


class TestProcesses:
    def test_a_row_a_process_all_right(self, rows):
        assert [r["process"] for r in rows] == [0, 1, 2]
        assert {r["verdict"] for r in rows} == {"ok"}
        for r in rows:
            assert (r["launches"], r["differing"], r["unwritten"], r["wrote_outside"]) == (3, 0, 0, False)
            assert r["worst_row_error"] < 1e-2
            assert r["first_launch_us"] > 0

    def test_fresh_processes_agree(self, rows):
        assert len({r["squared_relative_error"] for r in rows}) == 1

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("processes", "processes: expected at least 1, got 0"),
            ("at_once", "at_once: expected at least 1, got 0"),
        ],
    )
    def test_counts_below_one_are_refused(self, cpu_build, name, message):
        with pytest.raises(ValueError, match=message):
            failure.run(failure.failed_case(**SMALL), **{name: 0})

    def test_a_process_that_dies_is_a_row(self, cpu_build, tmp_path):
        """Its library cannot be loaded: the row says so, with the last words."""
        case = failure.failed_case(**SMALL)
        failure._prepare(case, "cpu", tmp_path / "case.pt")
        broken = tmp_path / "broken.so"
        broken.write_text("no library")
        (found,) = failure._children(tmp_path, case, broken, "cpu", 1, 1, 1, 60.0, print)
        assert found["verdict"] == "exit status 1"
        assert "broken.so" in found["last_words"]

    def test_a_process_that_hangs_is_a_row(self, cpu_build, tmp_path):
        case = failure.failed_case(**SMALL)
        (found,) = failure._children(tmp_path, case, tmp_path, "cpu", 1, 1, 1, 0.0, print)
        assert found["verdict"] == "hung for 0 s"

    def test_no_build_is_said(self):
        script = "from mla_kernels import failure; failure.run(failure.failed_case(b=1, seq_len=64))"
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
        assert "build: expected a loaded build, got none; call mla_kernels.build.load() first" in done.stderr


class TestVerdict:
    """Each kind of wrongness is named; a fault that is planted is found."""

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({}, "ok"),
            ({"rows_wrong": {"zero": 2, "noise": 1}}, "2 rows zero; 1 rows noise"),
            ({"unwritten": 512, "nonfinite": 512, "squared_relative_error": math.nan}, "512 elements unwritten"),
            ({"nonfinite": 3}, "3 elements not finite"),
            ({"lse_squared_relative_error": 0.1}, "squared relative error of lse 0.1"),
            ({"lse_squared_relative_error": math.nan}, "squared relative error of lse nan"),
            ({"differing": 4}, "4 repeats differ from the first launch"),
            ({"wrote_outside": True}, "wrote outside its outputs"),
        ],
    )
    def test_words(self, changes, words):
        assert failure.verdict_of(row(**changes)) == words

    @pytest.mark.parametrize("kind", ["zero", "stale", "swapped", "outlier", "noise"])
    def test_wrong_rows_are_counted_by_kind(self, kind):
        generator = torch.Generator().manual_seed(3)
        right = torch.randn(4, 8, 512, generator=generator, dtype=torch.float64)
        out, lse = right.to(torch.bfloat16), torch.zeros(4, 8)
        faulty = {
            "zero": torch.zeros(512), "stale": torch.full((512,), math.nan), "swapped": right[2, 4],
            "outlier": right[2, 3] + 100 * torch.nn.functional.one_hot(torch.tensor(7), 512), "noise": -right[2, 3],
        }  # fmt: skip
        out[2, 3] = faulty[kind].to(torch.bfloat16)
        found = failure._compared(out, lse, right, lse.double(), right, "e4m3")
        assert found["rows_wrong"] == {kind: 1}
        assert failure.verdict_of({**row(), **found}) != "ok"


def test_the_grid_is_right_and_passes_the_published_limits(cpu_build):
    rows = failure.grid([4096], rows=1, heads=[16])
    assert [r["case"] for r in rows] == [
        "bf16-h16-s4096", "e4m3-h16-s4096", "bf16-h16-s4096-varlen", "e4m3-h16-s4096-varlen"
    ]  # fmt: skip
    assert all(r["verdict"] == "ok" and r["passes"] for r in rows)


def test_a_dtype_without_a_kernel_is_said(cpu_build, monkeypatch):
    monkeypatch.setattr(failure, "CUDA_INPUT_DTYPES", (torch.float8_e4m3fn,))
    (found,) = [r for r in failure.grid([4096], rows=1, heads=[16], device="cuda", dtypes=["bf16"]) if not r["varlen"]]
    assert found["verdict"] == "not run: no bf16 kernel on this device"


class TestRecorded:
    def test_no_run_yet_is_said_and_a_run_is_summed_up(self, tmp_path, monkeypatch):
        monkeypatch.setattr(failure, "__file__", str(tmp_path / "mla_kernels" / "failure.py"))
        table = failure.recorded_runs()
        assert set(table["what"]) == {"no recorded run yet"}
        cold = {"kind": "cold", "b": 128, "h_q": 16, "s": 4096, "page_size": 64, "dtype": "e4m3", "launches": 51}
        rows = [
            {**cold, "process": 0, "verdict": "ok", "squared_relative_error": 8e-5, "differing": 0},
            {
                **cold,
                "process": 1,
                "verdict": "2 repeats differ from the first launch",
                "squared_relative_error": 9e-5,
                "differing": 2,
            },
            {**cold, "process": 2, "verdict": "killed by signal 11"},
            {"kind": "grid", "verdict": "ok"},
            {"kind": "grid", "verdict": "not run: no bf16 kernel on this device"},
        ]
        path = tmp_path / "data" / "measurements" / "h200" / "failure.json"
        measurements.write_measurements(path, rows, {"date": "2026-01-01", "gpu": "NVIDIA H200", "cpu": "x"})
        found = failure.recorded_runs().set_index("device").loc["h200"]
        assert (found["processes"], found["launches"], found["not_ok"], found["differing"]) == (3, 153, 2, 2)
        assert (found["grid_cases"], found["grid_not_ok"]) == (1, 0)
        assert found["worst_squared_relative_error"] == 9e-5

    def test_the_command_writes_what_is_read(self, cpu_build, tmp_path):
        out = tmp_path / "failure.json"
        command = [sys.executable, "-m", "mla_kernels.failure", "--processes", "1", "--repeats", "1", "--b", "2",
                   "--seq-len", "130", "--h-q", "2", "--out", str(out)]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        source, rows = measurements.read_measurements(out)
        assert json.dumps(rows)
        assert rows[0]["kind"] == "cold"
        assert rows[0]["verdict"] == "ok"
        assert source["command"].startswith("python -m mla_kernels.failure --processes 1")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--processes", "0"], "processes: expected at least 1, got 0"),
            (["--dtype", "e4m3", "--device", "cuda"], "device: cuda needs a GPU that torch sees"),
            (["--b", "2", "--out", "/dev/null/x/failure.json"], "/dev/null"),
        ],
    )
    def test_what_cannot_run_is_said_before_anything_runs(self, cpu_build, options, words):
        if "cuda" in options and torch.cuda.is_available():
            options = [*options, "--processes", "0"]
            words = "processes: expected at least 1, got 0"
        command = [sys.executable, "-m", "mla_kernels.failure", *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr


class TestPlanted:
    def test_the_kernel_is_right_in_every_row(self, batches):
        for batch in batches:
            for entry in (0, 5, 11):
                stage = batch.stage(entry)
                assert float((batch.out[entry].double() - stage).norm() / stage.norm()) < 1e-3

    def test_every_fault_that_changes_a_bit_is_named_and_nothing_else(self, batches):
        for batch in batches:
            table = planted.planted_faults(batch).set_index("fault")
            assert set(table.index) == set(planted.FAULTS)
            assert (table["false_alarms"] == 0).all()
            named = table["verdict"].to_dict()
            assert named.pop("lost scale") == "ok"
            assert "ok" not in named.values()
            assert named["unwritten, zeros"] == "zero"
            assert named["stale output"] == "stale"
            assert named["swapped heads"] == "swapped"
            assert named["unwritten, garbage"] == "outlier"

    def test_hidden_rows_is_the_most_that_passes(self, batches):
        """Counted again the slow way: rows are made faulty one by one, those with the smallest error first."""
        equal, _ = batches
        name = "few elements lost"
        hidden = int(planted.planted_faults(equal).set_index("fault").loc[name, "hidden_rows"])
        bad = planted.FAULTS[name][1](equal)
        error = ((bad.double() - equal.form) ** 2).sum(-1) - ((equal.out.double() - equal.form) ** 2).sum(-1)
        order = error.flatten().argsort()
        for count, passes in ((hidden, True), (hidden + 1, False)):
            out = equal.out.clone().flatten(0, 1)
            out[order[:count]] = bad.flatten(0, 1)[order[:count]]
            assert (planted._number(out.view_as(equal.out), equal) < planted.LIMIT) == passes

    def test_a_lost_scale_changes_no_bit_at_scale_1(self, batches):
        assert same_bits(planted.FAULTS["lost scale"][1](batches[0]), batches[0].out)

    def test_what_prints_exactly_one(self, batches):
        table = planted.exactly_one(batches[0]).set_index("output")["printed"]
        assert set(table[table == "1.0"].index) == {
            "all zeros",
            "one element of 1e30, the rest right",
            "1e30 everywhere",
        }
        assert table["one NaN, the rest right"] == "NaN"

    def test_short_contexts_are_refused(self):
        with pytest.raises(ValueError, match="seq_len: expected at least 128, two tiles, got 100"):
            planted.batches(seq_len=100)

    def test_rounding_fills_most_of_the_limit_and_a_narrow_accumulator_passes(self):
        room = planted.rounding_room(4096, b=1)["squared_relative_error"]
        assert 0.5 * planted.LIMIT < room.max() < planted.LIMIT
        table = planted.accumulator_faults(4096, h_q=2).set_index(["distribution", "accumulator"])["passes"]
        assert table["zero_mean", "13 bits, in place"]
        assert not table["shifted_mean", "13 bits, in place"]
