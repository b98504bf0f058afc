# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""What a speed run says, from rows with known times; its figures; and notebook 05 with and without a recorded run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest

from mla_kernels import bench, build, plots_speed, speed, timing
from mla_kernels.measurements import write_measurements
from mla_kernels.ops import split_plan

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ((1, 16, 4096), (128, 16, 4096), (128, 128, 4096))


def row(kernel: str, dtype: str, shape: tuple[int, int, int], us: float | None, **more: Any) -> dict[str, Any]:
    b, h_q, s = shape
    times = dict.fromkeys(("us_median", "us_p10", "us_p90"), us)
    said = {"reason": "planted"} if us is None else {"clock": "graph", "l2": "cleared", "relative_error": 0.01}
    base = {"kernel": kernel, "dtype": dtype, "b": b, "s_q": 1, "h_q": h_q, "s": s, "page_size": 64}
    return {**base, **times, "num_kv_splits": None, **said, **more}


def rows() -> list[dict[str, Any]]:
    """Ours 10, 200, 300 µs; FlashMLA fp8 twice, 1.5 times, half of that; bf16 four times, one without a time."""
    found: list[dict[str, Any]] = [
        {"kernel": "ceiling", "name": "read_tb_s", "value": 4.0, "how": "sum"},
        {"kernel": "ceiling", "name": "fp8_gemm_tflop_s", "value": 1000.0, "how": "mm"},
        {"kernel": "ceiling", "name": "bf16_gemm_tflop_s", "value": 500.0, "how": "mm"},
    ]
    for shape, us, ratio in zip(SHAPES, (10.0, 200.0, 300.0), (2.0, 1.5, 0.5), strict=True):
        found += [
            row("mla_kernels", "e4m3", shape, us),
            row("mla_kernels", "e4m3", shape, us / 2, num_kv_splits=1),  # a pinned plan is not the answer
            row("mla_kernels", "bf16", shape, None, reason="NotImplementedError: mla_decode: q_nope: expected e4m3"),
            row("flashmla", "e4m3", shape, us * ratio),
            row("flashmla", "bf16", shape, None if shape[1] == 128 else 4 * us),
        ]
    return found


def source(**more: Any) -> dict[str, Any]:
    absent = {
        "fa3, bf16": "not installed (no _vllm_fa3_C.abi3.so)", "fa3, e4m3": "takes bf16, fp16",
        "flashinfer_fa3, bf16": "not installed", "read_tb_s: sum": "no such reduction",
    }  # fmt: skip
    return {
        "date": "2026-01-02", "commit": "0123456789abcdef", "gpu": "NVIDIA Planted", "driver": "1.0", "cuda": "13.0",
        "torch": "2.11", "peers": {"flashmla, e4m3": "vllm 0.1"}, "absent": absent, **more,
    }  # fmt: skip


@pytest.fixture
def run() -> speed.Run:
    return speed.run_from(rows(), source())


def test_limits_of_each_row(run: speed.Run) -> None:
    table = run.table[(run.table["kernel"] == "mla_kernels") & run.table["num_kv_splits"].isna()]
    fp8 = table[table["dtype"] == "e4m3"].set_index("b")
    moved = 1 * ((4096 + 16) * 576 + 16 * 1024)
    assert fp8.loc[1, "limit_us"] == pytest.approx(moved / 4e6)  # 4 TB/s
    assert fp8.loc[1, "of_limit"] == pytest.approx(moved / 4e6 / 10)
    assert fp8.loc[1, "bound"] == "memory"
    heavy = fp8[fp8["h_q"] == 128].iloc[0]
    assert heavy["limit_us"] == pytest.approx(timing.flops(128, 1, 128, 4096) / 1e9)  # 1000 TFLOP/s
    assert heavy["bound"] == "compute"
    assert heavy["tflop_s"] == pytest.approx(timing.flops(128, 1, 128, 4096) / 300 / 1e6)
    bf16 = table[(table["dtype"] == "bf16") & (table["h_q"] == 128)].iloc[0]
    assert bf16["limit_us"] == pytest.approx(2 * heavy["limit_us"])
    assert np.isnan(bf16["us_median"])


def test_without_the_limits_nothing_is_said_of_them() -> None:
    run = speed.run_from([r for r in rows() if r["kernel"] != "ceiling"], source())
    assert run.table["of_limit"].isna().all()
    assert set(run.table["bound"]) == {"unknown"}
    assert not any("limit" in answer for answer in speed.answers(run))


def test_ratios_use_the_automatic_plan(run: speed.Run) -> None:
    table = speed.ratio_table(run)
    fp8 = table[(table["kernel"] == "flashmla") & (table["dtype"] == "e4m3")]
    assert fp8["times"].tolist() == [2.0, 1.5, 0.5]
    assert table[table["dtype"] == "bf16"]["times"].tolist() == [4.0, 4.0]
    assert speed.ratio_table(run, "bf16").empty


def test_answers_are_made_from_the_rows(run: speed.Run) -> None:
    said = speed.answers(run)
    assert said[:2] == [
        "Against FlashMLA, e4m3: faster in 2 of 3 shapes, 0.50 to 2.00 times as fast, geometric mean 1.14. "
        "Not faster at b = 128, h_q = 128, s = 4096 (0.50).",
        "Against FlashMLA, bf16: faster in 2 of 2 shapes, 4.00 to 4.00 times as fast, geometric mean 4.00.",
    ]
    assert said[2] == "Not in this run, not installed: FlashAttention 3 bf16, FlashInfer fa3 bf16."
    assert said[3].startswith("Against the best e4m3 peer of each shape: faster in 2 of 3 shapes")
    assert said[4].startswith("Against the best peer of each shape in any dtype: faster in 2 of 3 shapes")
    of_limit = 100 * timing.flops(128, 1, 128, 4096) / 1e9 / 300
    assert said[5] == (
        f"Where the matrix-product rate is the limit, it reaches {of_limit:.3g} % of it at best (b = 128, h_q = 128, "
        f"s = 4096) and {of_limit:.3g} % at worst (b = 128, h_q = 128, s = 4096), 1 shapes."
    )
    assert said[6].startswith("Where the read bandwidth is the limit")
    assert len(said) == 7
    assert speed.answers(run, "bf16") == [
        "This kernel has no bf16 time in this run: NotImplementedError: mla_decode: q_nope: expected e4m3."
    ]


def test_the_wide_table_leaves_no_cell_blank(run: speed.Run) -> None:
    table = speed.wide_table(run)
    assert table[["b", "h_q", "s"]].to_numpy().tolist() == [list(shape) for shape in SHAPES]  # the order of the run
    assert table["this kernel, e4m3"].tolist() == ["10", "200", "300"]
    assert table["this kernel, e4m3, 1 splits"].tolist() == ["5", "100", "150"]
    assert table["FlashMLA, bf16"].tolist() == ["40", "800", "planted"]
    assert set(table["FlashAttention 3, bf16"]) == {"not installed"}
    assert set(table["this kernel, bf16"]) == {"NotImplementedError: mla_de…"}
    assert "FlashAttention 3, e4m3" not in table  # it takes no such cache: nothing is missing
    assert table.notna().all().all()
    assert [speed.microseconds(us) for us in (1.23456, 123.456, 12345.6)] == ["1.235", "123.5", "12,346"]


def test_provenance_is_a_line_each(run: speed.Run) -> None:
    table = speed.provenance_table(run).set_index("what")["value"]
    assert table["gpu"] == "NVIDIA Planted"
    assert table["peers: flashmla, e4m3"] == "vllm 0.1"
    assert run.words() == "NVIDIA Planted, driver 1.0, CUDA 13.0, torch 2.11, 2026-01-02, commit 0123456789ab"


def test_times_of_two_devices_are_never_divided(run: speed.Run) -> None:
    slower = speed.run_from([r | {"us_median": r["us_median"] and 2 * r["us_median"]} if "us_median" in r else r
                             for r in rows()], source())  # fmt: skip
    table = speed.against_record(run, slower)
    assert set(table["times"]) == {2.0}
    assert len(table) == len(run.timed)
    other = speed.run_from(rows(), source(gpu="NVIDIA Other"))
    with pytest.raises(
        ValueError, match=r"record: expected timings of NVIDIA Planted, got those of NVIDIA Other: only"
    ):
        speed.against_record(run, other)


def test_rows_are_needed() -> None:
    with pytest.raises(ValueError, match="rows: expected rows of kernels, got none"):
        speed.run_from(rows()[:3], source())


def test_a_recorded_run_or_none(tmp_path: Path) -> None:
    assert speed.recorded_run("h900", tmp_path) is None
    write_measurements(tmp_path / "h900" / "speed.json", rows(), source())
    record = speed.recorded_run("h900", tmp_path)
    assert record is not None
    assert record.device == "NVIDIA Planted"
    assert len(record.table) == len(rows()) - 3
    assert record.ceilings == {"read_tb_s": 4.0, "fp8_gemm_tflop_s": 1000.0, "bf16_gemm_tflop_s": 500.0}


# --- splits ---


def test_split_map_has_every_tile_once() -> None:
    table = speed.split_map([100, 0, 4096, 5000], 3)
    assert set(table["row"]) == {0, 2, 3}
    for i, length in ((0, 100), (2, 4096), (3, 5000)):
        part = table[table["row"] == i]
        assert part["tokens"].sum() == length
        assert part["first_tile"].tolist()[1:] == part["last_tile"].tolist()[:-1]
        assert part["last_tile"].iloc[-1] == -(-length // 64)
    assert len(speed.split_map([4096])) == len(split_plan([4096])[0]) - 1


class FakeClock:
    """1 µs for each token of a batch, and 10 µs for each split off from eight."""

    l2 = "cleared"

    def launch(self, call: Any, *, graph: bool = True) -> timing.Launch:
        plan, lens = call.keywords["num_kv_splits"], call.keywords["seq_lens"]
        if plan == 2 and len(lens) == 2:
            raise RuntimeError("planted")
        return timing.Launch(lambda: float(lens.sum()) + 10 * abs((plan or 8) - 8), "graph")

    def interleaved(self, launches: Any, *, rounds: int) -> dict[str, timing.Timing]:
        times = {name: launch.run() for name, launch in launches.items()}
        return {name: timing.Timing(us, us, us, rounds) for name, us in times.items()}


def test_sweep_of_plans_with_known_times(monkeypatch: pytest.MonkeyPatch, cpu_build: build.Built) -> None:
    """Batch × context × plans: the best is right, what did not run is hatched and no zero."""
    monkeypatch.setattr(bench, "clock_for", lambda device: FakeClock())
    run = speed.live_run(
        ["1x2x64", "1x2x1024", "2x2x64", "2x2x1024"], device="cpu", rounds=1, plans=["auto", "2", "8"],
        dtypes=["e4m3"], names=[], limits=False,
    )  # fmt: skip
    table = speed.tuning_table(run)
    assert len(table) == 12
    assert table[table["best"]]["plan"].tolist() == ["auto", "8"] * 4
    slow = table[(table["plan"] == "2") & (table["b"] == 1) & (table["s"] == 64)].iloc[0]
    assert slow["us"] == 124
    assert slow["times_best"] == pytest.approx(124 / 64)
    failed = table[table["reason"].notna()]
    assert failed[["b", "plan", "reason"]].to_numpy().tolist() == [[2, "2", "RuntimeError: planted"]] * 2
    assert failed["us"].isna().all()
    figure = plots_speed.split_tuning(table, title="planted")
    axis = figure.axes[0]
    hatched = [patch for patch in axis.patches if patch.get_hatch()]
    assert sorted(patch.get_xy() for patch in hatched) == [(1, 2), (1, 3)]
    assert "0" not in {text.get_text().partition("\n")[0] for text in axis.texts}
    plt.close(figure)


# --- figures ---


def test_figures_show_every_row(run: speed.Run) -> None:
    table = speed.ratio_table(run)
    figure = plots_speed.ratios(table, title="planted")
    points = np.concatenate([np.asarray(dots.get_offsets())[:, 0] for dots in figure.axes[0].collections])
    assert sorted(points.tolist()) == sorted(table["times"].tolist())
    low, high = figure.axes[0].get_xlim()
    assert low < 0.5 < 4.0 < high
    plt.close(figure)

    timed = run.timed
    figure = plots_speed.roofline(timed, run.ceilings, title="planted")
    axis = figure.axes[0]
    points = np.concatenate([np.asarray(dots.get_offsets())[:, 1] for dots in axis.collections])
    assert sorted(points.tolist()) == pytest.approx(sorted(timed["tflop_s"].tolist()))
    labels = [line.get_label() for line in axis.lines]
    assert labels == ["read memory, 4 TB/s", "e4m3 matrix product, 1,000 TFLOP/s", "bf16 matrix product, 500 TFLOP/s"]
    plt.close(figure)

    splits = speed.split_map([100, 4096])
    figure = plots_speed.split_map(splits, title="planted")
    assert len(figure.axes[0].patches) == len(splits)
    assert [text.get_text() for text in figure.axes[0].texts] == ["1 split", "8 splits"]
    plt.close(figure)


# --- the notebook ---


def notebook_results(reports: Path, *more: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "mla_kernels.report", "run", "05_speed", "--profile", "smoke", "--name", "speed",
         "--reports-dir", str(reports), "-p", "rounds=1", *more],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((reports / "speed" / "results.json").read_text())["notebooks"]["05_speed"]


def test_notebook_without_a_recorded_run_says_so(tmp_path: Path, cpu_build: build.Built) -> None:
    found = notebook_results(tmp_path, "-p", f"recorded={tmp_path / 'none'}")
    assert found["records"]["recorded_run"] == "none"
    assert len(found["claims"]) == 3
    assert "no recorded run yet: data/measurements/" in (tmp_path / "speed/tables/05_speed/recorded.csv").read_text()


def test_notebook_with_a_recorded_run_marks_it(tmp_path: Path, cpu_build: build.Built) -> None:
    write_measurements(tmp_path / "h900" / "speed.json", rows(), source())
    found = notebook_results(tmp_path, "-p", f"recorded={tmp_path / 'h900'}")
    assert found["records"]["recorded_run"].startswith("NVIDIA Planted, driver 1.0")
    assert len(found["claims"]) == 5
    text = (tmp_path / "speed" / "05_speed.html").read_text()
    assert "this kernel, e4m3" in (tmp_path / "speed/tables/05_speed/recorded.csv").read_text()
    assert "Median microseconds, recorded: NVIDIA Planted" in text
    assert "Not faster at b = 128, h_q = 128, s = 4096 (0.50)" in text


def test_notebook_refuses_a_record_that_beats_the_machine(tmp_path: Path, cpu_build: build.Built) -> None:
    """A planted time below what reading the cache takes: the claim must fail, and with it the run."""
    bad = [r | {"us_median": 0.1} if r["kernel"] == "flashmla" and r["us_median"] else r for r in rows()]
    write_measurements(tmp_path / "h900" / "speed.json", bad, source())
    with pytest.raises(AssertionError, match="no recorded time is shorter than the limits"):
        notebook_results(tmp_path, "-p", f"recorded={tmp_path / 'h900'}")
