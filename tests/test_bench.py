# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Speed and accuracy runs on the CPU with real and with planted contestants, their command line, and their files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import Cuda

from mla_kernels import bench, build, measurements, ops, peers
from mla_kernels.cases import SM_SCALE, inputs_from
from mla_kernels.measurements import speed_row
from mla_kernels.metrics import relative_error
from mla_kernels.peers import torch_path
from mla_kernels.reference import attention
from mla_kernels.timing import GpuClock, Timing, hardware

COLUMNS = ["kernel", "dtype", "b", "s_q", "h_q", "s", "page_size", "us_median", "us_p10", "us_p90", "num_kv_splits"]
ACCURACY = [
    "kernel", "dtype", "distribution", "q_std", "b", "h_q", "s", "relative_error", "gain_minus_1",
    "squared_relative_error", "reference", "num_kv_splits",
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["e4m3", "bf16", "fp16"])
def test_torch_path_is_attention(dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, kv = torch.randn(3, 1, 4, 576, generator=generator), torch.randn(3, 200, 576, generator=generator)
    case = inputs_from(q, kv, [200, 0, 65], dtype=dtype, layout="padded")
    out = torch_path(**case.args)
    expected, _ = attention(
        case.q_stored.float(),
        case.kv_stored.float(),
        [200, 0, 65],
        sm_scale=SM_SCALE,
        q_scale=case.q_scale,
        kv_scale=case.kv_scale,
    )
    assert out.dtype == (torch.float16 if dtype == "fp16" else torch.bfloat16)
    assert relative_error(out, expected[:, 0]) < 2.0**-8  # the last rounding, to bf16


def test_measurements_come_back(tmp_path: Path) -> None:
    rows = [
        speed_row("mla_kernels", "e4m3", Timing(12.3456, 12.0, 13.0, 5), b=8, h_q=16, s=4096, page_size=64),
        speed_row("torch_sdpa", "e4m3", Timing(99.0, 98.0, 100.0, 5), b=8, h_q=16, s=4096, page_size=64),
    ]
    assert rows[0] == {
        "kernel": "mla_kernels",
        "dtype": "e4m3",
        "b": 8,
        "s_q": 1,
        "h_q": 16,
        "s": 4096,
        "page_size": 64,
        "us_median": 12.35,
        "us_p10": 12.0,
        "us_p90": 13.0,
    }
    source = measurements.provenance(peers={"peer": "1.0"}, isa="avx2")
    path = measurements.write_measurements(tmp_path / "cpu" / "speed.json", rows, source)
    assert measurements.read_measurements(path) == (source, rows)
    assert list(path.parent.iterdir()) == [path]
    assert json.loads(path.read_text())["rows"][1]["us_p90"] == 100.0
    with pytest.raises(ValueError, match="rows: expected finite numbers, got nan for us_median"):
        measurements.write_measurements(path, [{"us_median": float("nan")}], source)
    assert measurements.read_measurements(path) == (source, rows)


def test_provenance_says_where_and_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["/some/where/pytest/__main__.py", "benchmarks", "--python", "/home/me/bin/python"]
    )
    source = measurements.provenance()
    assert source["command"] == "python -m pytest benchmarks --python python"
    assert source["torch"] == torch.__version__
    assert source["cpu"]
    assert source["gpu"] is None
    assert {"date", "commit", "driver", "cuda", "peers", "threads"} <= source.keys()
    assert measurements.provenance("make bench")["command"] == "make bench"
    assert f"{torch.get_num_threads()} threads" in hardware()


# --- runs ---


def test_inputs_are_one_draw_in_shuffled_pages() -> None:
    both = bench.paged_inputs(3, 2, 130, page_size=32, distribution="shifted_mean", q_std=0.5, s_q=2)
    fp8, bf16 = both["e4m3"], both["bf16"]
    assert torch.equal(bf16["kv_cache"].to(torch.float8_e4m3fn).view(torch.uint8), fp8["kv_cache"].view(torch.uint8))
    assert bf16["kv_cache"].float().mean() == pytest.approx(1, abs=0.01)
    assert bf16["q_nope"].float().std() == pytest.approx(0.5, rel=0.05)
    assert fp8["q_nope"].shape == (3, 2, 2, 512)
    table = fp8["block_table"]
    assert sorted(table.flatten().tolist()) == list(range(15))
    assert table.flatten().tolist() != list(range(15))
    again = bench.paged_inputs(3, 2, 130, page_size=32, distribution="shifted_mean", q_std=0.5, s_q=2)["e4m3"]
    assert torch.equal(again["kv_cache"].view(torch.uint8), fp8["kv_cache"].view(torch.uint8))


def test_the_table_is_that_of_the_performance_cases() -> None:
    assert len(bench.TABLE) == 16
    assert {h_q for _, h_q, _ in bench.TABLE} == {16, 128}
    assert set(bench.QUICK) < set(bench.TABLE)


def test_speed_run_has_every_contestant_or_its_reason(cpu_build: build.Built) -> None:
    said: list[str] = []
    rows, absent, versions = bench.measure_speed(
        [(2, 3, 130), (1, 1, 64)], device="cpu", plans=(None, 2), rounds=2, say=said.append
    )
    # ours with two plans, torch_bmm and torch_sdpa, each in two dtypes, at two shapes
    assert len(rows) == len(said) == 2 * (2 * 2 + 2 * 2)
    for row in rows:
        assert list(row)[:11] == COLUMNS
        assert (row["clock"], row["l2"]) == ("wall clock", "not cleared")
        assert 0 < row["us_p10"] <= row["us_median"] <= row["us_p90"]
        assert row["relative_error"] < (3e-2 if row["dtype"] == "e4m3" else 5e-3)
    assert [row["num_kv_splits"] for row in rows[:4]] == [None, 2, None, 2]
    assert absent["flashmla, e4m3"] == "runs on cuda only"
    assert absent["vllm_cpu, e4m3"] == "takes bf16"
    assert set(versions) == {f"{name}, {dtype}" for name in ("torch_bmm", "torch_sdpa") for dtype in ("e4m3", "bf16")}


def test_rows_of_drawn_lengths(cpu_build: build.Built) -> None:
    rows, _, _ = bench.measure_speed([(4, 3, 130)], device="cpu", dtypes=("e4m3",), spread=99, rounds=1)
    lens = bench.paged_inputs(4, 3, 130, dtypes=("e4m3",), spread=99)["e4m3"]["seq_lens"].tolist()
    assert len(set(lens)) == 4
    assert max(lens) == 130
    assert min(lens) >= 31
    assert [row["kernel"] for row in rows] == ["mla_kernels", "torch_bmm", "torch_sdpa"]
    for row in rows:
        assert row["mean_s"] == round(sum(lens) / 4, 1)
        assert row["relative_error"] < 3e-2
    with pytest.raises(ValueError, match=r"spread: expected 0 to 129, fewer than the 130 tokens .* got 130"):
        bench.paged_inputs(4, 3, 130, spread=130)


def planted(answer: Callable[[dict[str, Any]], peers.Call], name: str = "planted", **more: Any) -> peers.Peer:
    return replace(peers.find("torch_bmm"), name=name, build=answer, **more)


def test_wrong_answers_and_failures_have_no_time(monkeypatch: pytest.MonkeyPatch, cpu_build: build.Built) -> None:
    right = peers.find("torch_bmm")

    def half(args: dict[str, Any]) -> peers.Call:
        call = right.build(args)
        return lambda: (call()[0] * 0.5, None)

    def unwritten(args: dict[str, Any]) -> peers.Call:
        return lambda: (torch.full_like(right.build(args)()[0], torch.nan), None)

    def fails(args: dict[str, Any]) -> peers.Call:
        raise OSError("nvcc: not found\nlong log")

    listed = (
        planted(half, "half"), planted(unwritten, "unwritten"), planted(fails, "fails"),
        planted(right.build, "narrow", page_sizes=(16,)), planted(right.build, "right"),
    )  # fmt: skip
    monkeypatch.setattr(peers, "PEERS", listed)
    rows, absent, _ = bench.measure_speed([(2, 3, 130)], device="cpu", dtypes=("e4m3",), rounds=1)
    reasons = {row["kernel"]: row.get("reason") for row in rows}
    assert reasons == {
        "mla_kernels": None,
        "half": "wrong answer: relative error 0.5",
        "unwritten": f"wrong answer: {2 * 3 * 512} elements are not finite",
        "fails": "OSError: nvcc: not found",
        "narrow": "page_size: takes 16, got 64",
        "right": None,
    }
    assert absent == {}
    for row in rows:
        assert (row["us_median"] is None) == ("reason" in row)


@pytest.mark.parametrize(("fails", "how"), [("", "graph"), ("not permitted", "eager")])
def test_rows_say_how_they_were_timed(
    fails: str, how: str, monkeypatch: pytest.MonkeyPatch, cpu_build: build.Built
) -> None:
    cuda = Cuda(fails, call_us=30.0)
    decode = ops.mla_decode_out

    def takes_20_us(**args: Any) -> Any:
        cuda.now_us += 20.0
        return decode(**args)

    monkeypatch.setattr(ops, "mla_decode_out", takes_20_us)
    monkeypatch.setattr(bench, "clock_for", lambda device: GpuClock("cpu", l2_read=1024, cuda=cuda))
    rows, _, _ = bench.measure_speed([(1, 2, 64)], device="cpu", dtypes=("e4m3",), names=(), rounds=3)
    assert [(row["clock"], row["l2"]) for row in rows] == [(how, "cleared")]
    assert rows[0]["us_median"] == pytest.approx(30.0 if how == "graph" else 20.0)  # a replay of the stand-in takes 30


def test_our_outputs_are_poisoned_first(monkeypatch: pytest.MonkeyPatch, cpu_build: build.Built) -> None:
    monkeypatch.setattr(ops, "mla_decode_out", lambda *args, out, lse, **kwargs: (out, lse))
    rows, _, _ = bench.measure_speed([(1, 2, 64)], device="cpu", dtypes=("e4m3",), names=(), rounds=1)
    assert rows[0]["reason"] == f"wrong answer: {2 * 512} elements are not finite"


def test_accuracy_run_knows_its_errors(monkeypatch: pytest.MonkeyPatch, cpu_build: build.Built) -> None:
    right = peers.find("torch_sdpa")

    def short(args: dict[str, Any]) -> peers.Call:
        call = right.build(args)
        return lambda: (call()[0].float() * 0.75, None)

    monkeypatch.setattr(peers, "PEERS", (planted(short, "short"),))
    rows, _, _ = bench.measure_accuracy([65, 512], device="cpu", batches=(1, 6), h_q=2, q_stds=(1.0, 0.1))
    assert len(rows) == 2 * 2 * 2 * (2 + 2 + 1)
    for row in rows:
        assert list(row) == ACCURACY
        gain = {"short": -0.25}.get(row["kernel"], 0.0)
        assert row["gain_minus_1"] == pytest.approx(gain, abs=3e-3)
        assert row["reference"] == "format"
        if row["kernel"] == "short":
            assert row["relative_error"] == pytest.approx(0.25, abs=2e-3)
            assert row["squared_relative_error"] == pytest.approx(0.0625 / 1.5625, abs=1e-3)
        else:
            assert row["relative_error"] < (1.2e-2 if row["dtype"] == "e4m3" else 2.5e-3)
    stage = {(r["q_std"], r["s"]): r["relative_error"] for r in rows if r["kernel"] == "stage" and r["b"] == 1}
    ours = {
        (r["q_std"], r["s"]): r["relative_error"]
        for r in rows
        if (r["kernel"], r["dtype"], r["b"]) == ("mla_kernels", "e4m3", 1)
    }
    assert ours == pytest.approx(stage, rel=0.02)  # the kernel rounds where the stage reference does


# --- the command line ---


def test_command_line_records_a_run(tmp_path: Path, cpu_build: build.Built, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "speed.json"
    words = [
        "gpu", "--device", "cpu", "--rows", "1x2x64,2x1x100", "--rounds", "1", "--peers", "torch_sdpa",
        "--ceiling-bytes", "1048576", "--ceiling-n", "64", "--commit", "abc", "--record", str(record),
        "--library", str(cpu_build.path), "--q-std", "2.5",
    ]  # fmt: skip
    assert bench.main(words) == 0
    source, rows = measurements.read_measurements(record)
    assert source["q_std"] == 2.5
    kernels = [row["kernel"] for row in rows]
    assert kernels == ["ceiling"] * 3 + ["mla_kernels", "mla_kernels", "torch_sdpa", "torch_sdpa"] * 2
    assert source["commit"] == "abc"
    assert source["command"].startswith("python -m mla_kernels.bench gpu --device cpu --rows 1x2x64,2x1x100")
    assert str(tmp_path) not in source["command"]
    assert source["build"] == cpu_build.key
    assert {"date", "gpu", "driver", "cuda", "torch", "peers", "absent", "rounds"} <= source.keys()
    assert "us (" in capsys.readouterr().out


def test_command_line_records_accuracy(tmp_path: Path, cpu_build: build.Built) -> None:
    record = tmp_path / "accuracy.json"
    words = ["accuracy", "--device", "cpu", "--lengths", "64", "--batches", "1", "--heads", "2", "--q-std", "0.1"]
    assert bench.main([*words, "--peers", "", "--record", str(record), "--library", str(cpu_build.path)]) == 0
    source, rows = measurements.read_measurements(record)
    assert [(row["kernel"], row["dtype"]) for row in rows] == [
        ("mla_kernels", "e4m3"), ("mla_kernels", "bf16"), ("stage", "e4m3")
    ]  # fmt: skip
    assert source["sm_scale"] == SM_SCALE


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpu", "--rows", "12x"], "shapes: expected table, quick or BxHxS,… such as 128x128x4096, got '12x'"),
        (["gpu", "--rows", "1x0x5"], "expected table, quick or BxHxS"),
        (["gpu", "--num-kv-splits", "many"], "expected auto or numbers, such as auto,1,16, got 'many'"),
        (
            ["gpu", "--device", "cpu", "--rows", "1x2x64,2x1x9", "--spread", "9"],
            "--spread: expected 0 to 8, fewer than any row's tokens, got 9",
        ),
        (["gpu", "--device", "cpu", "--dtypes", "fp4"], "--dtypes: expected e4m3, bf16, got fp4"),
        (["gpu", "--device", "cpu", "--peers", "flashmal"], "--peers: expected flashmla, fa3"),
    ],
)
def test_command_line_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(words)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu_the_default_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["accuracy"])
    assert "--device: cuda needs a GPU that torch sees; --device cpu runs the same" in capsys.readouterr().err


def test_it_runs_from_a_copied_package_without_the_rest(tmp_path: Path, cpu_build: build.Built) -> None:
    """torch and numpy alone: what else is installed must not be imported."""
    source = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['pandas', 'matplotlib', 'seaborn', 'pytest_benchmark', 'triton'], None))\n"
        "from mla_kernels.bench import main\n"
        f"main(['gpu', '--device', 'cpu', '--rows', '1x1x64', '--rounds', '1', '--library', {str(cpu_build.path)!r},\n"
        "      '--ceiling-bytes', '65536', '--ceiling-n', '16', '--record', sys.argv[1]])\n"
    )
    copy = tmp_path / "copied"
    copy.mkdir()
    (copy / "mla_kernels").symlink_to(Path(bench.__file__).parent)
    record = tmp_path / "speed.json"
    done = subprocess.run(
        [sys.executable, "-c", source, str(record)], cwd=copy, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(record.read_text())["rows"][-1]["us_median"] > 0
