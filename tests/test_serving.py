# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The serving runner with a stand-in for vLLM that succeeds, fails, hangs and prints nonsense."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import LOG, install

from mla_kernels.measurements import read_measurements
from mla_kernels.serving import children, cli, log, models, profiles, rows

ROOT = Path(__file__).resolve().parents[1]
CARDS = [{"index": str(i), "name": "NVIDIA H200", "driver": "580"} for i in range(4)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command line with the stand-in; returns (exit status, rows, provenance)."""
    monkeypatch.setattr(children, "gpus", lambda: CARDS[:2])
    python = install(tmp_path)

    def call(*words: str, ways: str = "") -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
        monkeypatch.setenv("FAKE_VLLM", ways)
        record = tmp_path / "out.json"
        status = cli.main([*words, "--python", python, "--record", str(record), "--logs", str(tmp_path / "logs")])
        source, found = read_measurements(record)
        return status, found, source

    return call


SMALL = ("throughput", "--layers", "4", "--prompts", "10", "--input-len", "32", "--output-len", "8")


# --- what a run records ---


def test_a_throughput_run_has_the_columns_of_serving_json(run: Any) -> None:
    status, found, source = run(*SMALL)
    assert status == 0
    assert [(row["backend"], row["kv_cache_dtype"]) for row in found] == [
        ("CUTLASS_MLA", "auto"),
        ("CUTLASS_MLA", "fp8"),
    ]
    row = found[1]
    assert row["engine"] == "vllm"
    assert row["version"] == "0.23.0"
    assert (row["layers"], row["of_layers"], row["gpus"]) == (4, 27, 1)
    assert (row["prompts"], row["input_len"], row["output_len"]) == (10, 32, 8)
    assert row["requests_per_s"] == pytest.approx(5.5)
    assert row["total_tokens_per_s"] == pytest.approx(220)
    assert row["output_tokens_per_s"] == pytest.approx(44)
    assert row["backend_used"] == "CUTLASS_MLA"
    assert row["kv_cache_bytes_per_token_layer"] == pytest.approx(576, rel=1e-3)
    assert found[0]["kv_cache_bytes_per_token_layer"] == pytest.approx(1152, rel=1e-3)
    assert "reason" not in row
    assert "--hf-overrides" in row["command"]
    assert str(ROOT) not in row["command"]
    assert source["gpu"] == "NVIDIA H200"
    assert source["driver"] == "580"
    assert source["torch"] == "2.11.0+cu130"
    assert source["peers"]["vllm"] == "0.23.0"
    assert source["environment"]["NCCL_NVLS_ENABLE"] == "0"


def test_the_whole_model_needs_no_override(run: Any) -> None:
    _, found, _ = run(
        "throughput", "--prompts", "2", "--cells", "CUTLASS_MLA:fp8", "--input-len", "8", "--output-len", "8"
    )
    assert found[0]["layers"] == 27
    assert "--hf-overrides" not in found[0]["command"]


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("fail", r"exit code 1: .*CUDA out of memory"),
        ("silent", "ended well and wrote no --output-json"),
        ("garbage", "the output of vllm bench throughput: "),
        ("fewer", "num_requests: expected 10, got 9"),
        ("wrong_backend", "backend: asked for CUTLASS_MLA, vLLM used FLASHMLA"),
    ],
)
def test_a_run_without_a_result_says_why_and_the_others_count(run: Any, way: str, reason: str) -> None:
    status, found, _ = run(*SMALL, ways=f"auto={way}")
    assert status == 1
    assert found[0]["requests_per_s"] is None
    assert re.search(reason, found[0]["reason"])
    assert found[1]["requests_per_s"] == pytest.approx(5.5)


def test_a_run_that_hangs_is_ended_and_its_log_stays(run: Any, tmp_path: Path) -> None:
    begun = time.monotonic()
    status, found, _ = run(*SMALL, "--time-limit", "1.5", ways="auto=hang")
    assert time.monotonic() - begun < 15
    assert status == 1
    assert found[0]["reason"] == "no end within 2 s"
    assert "Using AttentionBackendEnum" in (tmp_path / "logs" / found[0]["log"]).read_text()
    assert found[0]["kv_cache_tokens"] > 0
    assert subprocess.run(["pgrep", "-f", str(tmp_path / "python")], check=False, stdout=subprocess.DEVNULL).returncode


def test_what_does_not_fit_before_the_deadline_says_so(run: Any) -> None:
    status, found, _ = run(*SMALL, "--deadline", "0.001")
    assert status == 1
    assert [row["reason"] for row in found] == ["not started: no time was left"] * 2


def test_runs_side_by_side_have_gpus_of_their_own(run: Any, tmp_path: Path) -> None:
    status, found, _ = run(*SMALL, "--parallel", "2")
    assert status == 0
    assert sorted(row["on_gpus"] for row in found) == ["0", "1"]
    assert all(row["at_once"] == 2 for row in found)
    for row in found:
        assert f"cards {row['on_gpus']}" in (tmp_path / "logs" / row["log"]).read_text()


def test_runs_side_by_side_on_a_cpu_have_cores_of_their_own(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "gpus", lambda: [])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5})
    status, found, source = run("decode", "--parallel", "2")
    assert status == 0
    said = [(tmp_path / "logs" / row["log"]).read_text() for row in found]
    assert ["cores 3,5" in said[0], "cores 4\n" in said[1]] == [True, True]
    assert (source["gpu"], source["environment"]["VLLM_CPU_KVCACHE_SPACE"]) == (None, "1")
    assert "-rotary_embedding" in found[0]["command"]


def test_partial_results_are_there_as_soon_as_a_run_ends(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    written = cli.write_measurements
    monkeypatch.setattr(cli, "write_measurements", lambda path, listed, source: (
        seen.append(len(list(listed := list(listed)))), written(path, listed, source)))  # fmt: skip
    run(*SMALL)
    assert seen == [1, 2]


def test_append_keeps_rows_of_the_same_machine_and_replaces_repeated_ones(run: Any) -> None:
    run(*SMALL, "--cells", "CUTLASS_MLA:auto,FLASHMLA:auto", ways="auto=fail")
    status, found, source = run(*SMALL, "--append")
    assert status == 0
    assert [(row["backend"], row["kv_cache_dtype"], "reason" in row) for row in found] == [
        ("FLASHMLA", "auto", True), ("CUTLASS_MLA", "auto", False), ("CUTLASS_MLA", "fp8", False)]  # fmt: skip
    assert len(source["runs"]) == 2


def test_rows_say_how_they_were_made_and_other_flags_replace_nothing(run: Any) -> None:
    run(*SMALL, "--cells", "CUTLASS_MLA:fp8", "--commit", "a" * 40)
    _, found, source = run(
        *SMALL, "--cells", "CUTLASS_MLA:fp8", "--commit", "b" * 40, "--append", "--enforce-eager", "--seed", "1",
        "--extra=--max-cudagraph-capture-size  1024", "--gpu-memory-utilization", "0.5",
    )  # fmt: skip
    assert [(row["flags"], row["gpu_memory_utilization"], row["commit"][0]) for row in found] == [
        (None, None, "a"),
        ("--seed 1 --enforce-eager --max-cudagraph-capture-size 1024", 0.5, "b"),
    ]
    assert [one["commit"][0] for one in source["runs"]] == ["a", "b"]
    _, found, _ = run(*SMALL, "--cells", "CUTLASS_MLA:fp8", "--commit", "c" * 40, "--append")
    assert [row["commit"][0] for row in found] == ["b", "c"]  # the same run again


def test_append_refuses_another_environment(run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run(*SMALL)
    monkeypatch.setenv("MLA_KERNELS_VLLM", "0")  # CUTLASS_MLA would be vLLM's own
    with pytest.raises(SystemExit):
        run(*SMALL, "--append")
    assert "append: out.json has environment {" in capsys.readouterr().err


def test_append_refuses_another_machine(run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run(*SMALL)
    monkeypatch.setattr(children, "gpus", lambda: [{**CARDS[0], "name": "NVIDIA B200"}])
    with pytest.raises(SystemExit):
        run(*SMALL, "--append")
    assert "append: out.json has gpu 'NVIDIA H200', this run 'NVIDIA B200'" in capsys.readouterr().err


def test_eval_has_both_filters_with_their_errors(run: Any) -> None:
    status, found, _ = run("eval")
    assert status == 0
    assert [(row["kv_cache_dtype"], row["filter"]) for row in found] == [
        (dtype, name) for dtype in ("auto", "fp8") for name in rows.FILTERS]  # fmt: skip
    assert all((row["n"], row["exact_match"], row["stderr"]) == (1000, 0.7, 0.0145) for row in found)
    assert {row["task"] for row in found} == {"gsm_tiny"}
    assert found[0]["kv_cache_bytes_per_token_layer"] == pytest.approx(1152, rel=1e-3)
    assert '"pretrained": "data/tiny-mla"' in found[0]["command"]  # no folder of the machine


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("silent", "wrote no results_"),
        ("garbage", "exact_match of strict-match: expected 0 to 1, got 7.0"),
        ("fail", "exit code 1"),
    ],
)
def test_eval_without_a_result_has_one_row(run: Any, way: str, reason: str) -> None:
    status, found, _ = run("eval", "--cells", "CUTLASS_MLA:fp8", ways=f"fp8={way}")
    assert status == 1
    assert len(found) == 1
    assert found[0]["exact_match"] is None
    assert reason in found[0]["reason"]


def test_decode_and_agree(run: Any) -> None:
    _, found, _ = run("decode")
    assert [row["decode_tokens_per_s"] for row in found] == [100.0, 110.0]
    status, found, _ = run("agree", "--prompts", "3")
    assert status == 0
    assert (found[0]["kl_mean"], found[0]["logprob_difference_max"], found[0]["answers_equal"]) == (0.0, 0.0, 3)
    assert found[1]["logprob_difference_max"] == pytest.approx(0.01)
    status, found, _ = run("agree", "--parallel", "2", ways="auto=late")  # which the other is compared with
    assert (status, [row["kl_mean"] is None for row in found]) == (0, [False, False])
    status, found, _ = run("agree", ways="auto=fail")
    assert "the run that it is compared with has no result" in found[1]["reason"]


def test_a_profile_has_a_row_a_class(run: Any) -> None:
    status, found, _ = run("profile", "--cells", "CUTLASS_MLA:fp8", "--prompts", "2", "--layers", "2")
    assert status == 0
    shares = {row["class"]: row["share"] for row in found}
    assert list(shares) == list(profiles.NAMES)
    assert (shares["decode attention"], shares["MoE"], shares["other"]) == (0.3, 0.6, 0.1)
    assert found[0]["backend"] == "CUTLASS_MLA"
    status, found, _ = run("profile", "--cells", "CUTLASS_MLA:fp8", "--prompts", "2", ways="fp8=fail")
    assert status == 1
    assert "exit code 1" in found[0]["reason"]


# --- refusals ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backends", "CUTLAS_MLA"], "backend: expected .*, got 'CUTLAS_MLA'; did you mean CUTLASS_MLA?"),
        (["--backends", "flashmla"], "got 'flashmla'; did you mean FLASHMLA?"),
        (["--kv-cache-dtypes", "fp9"], "kv-cache-dtype: expected auto, fp8, got 'fp9'; did you mean fp8?"),
        (["--cells", "FLASHMLA"], "expected BACKEND:DTYPE with commas between, got 'FLASHMLA'"),
        (["--cells", "FLASHMLA:fp4"], "kv-cache-dtype: expected auto, fp8, got 'fp4'; did you mean fp8?"),
        (["--prompts", "0"], "expected a whole number of at least 1, got '0'"),
        (["--prompts", "1e3"], "expected a whole number of at least 1, got '1e3'"),
        (["--time-limit", "nan"], "expected seconds over 0, got 'nan'"),
        (["--gpu-memory-utilization", "90"], "expected a share of the memory, over 0 and up to 1, got '90'"),
        (["--layers", "28"], "layers: expected at most 27, those of deepseek-v2-lite, got 28"),
        (["--config", "deepseek-v2-light"], "got 'deepseek-v2-light'; did you mean deepseek-v2-lite?"),
        (["--tp", "2", "--parallel", "2"], "parallel: 2 at a time with 2 GPUs each need 4, there are 2"),
        (["--tp", "4"], "parallel: 1 at a time with 4 GPUs each need 4, there are 2"),
    ],
)  # fmt: skip
def test_refusals_name_the_way_out(run: Any, words: list[str], message: str, capsys: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("throughput", *words)
    assert stopped.value.code == 2
    assert re.search(message.replace("?", r"\?"), capsys.readouterr().err)
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({"vllm": None}, ["throughput"], "has no vLLM: name an interpreter that has it with --python"),
        ({"plugins": []}, ["throughput"], "CUTLASS_MLA is our kernel, and .* has no plugin of mla_kernels"),
        ({"lm_eval": None}, ["eval"], "has no lm_eval: pip install lm-eval==0.4.13 there"),
    ],
)
def test_what_an_interpreter_lacks_is_said_before_anything_runs(
    changes: dict[str, object], words: list[str], message: str, tmp_path: Path, capsys: Any
) -> None:
    python = install(tmp_path, **changes)
    with pytest.raises(SystemExit):
        cli.main([*words, "--python", python, "--record", str(tmp_path / "out.json")])
    assert re.search(message, capsys.readouterr().err)


def test_an_interpreter_that_is_not_there(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(["eval", "--python", str(tmp_path / "none"), "--record", str(tmp_path / "out.json")])
    assert "python: cannot ask" in capsys.readouterr().err


# --- parts ---


def test_logs_of_both_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(LOG.format(dtype="fp8", backend="FLASHMLA", tokens=6_904_000))
    assert log.read_log(path) == {
        "kv_cache_dtype_used": "fp8",
        "backend_used": "FLASHMLA",
        "prefill_backend": "FLASH_ATTN",
        "kv_cache_gib": 100.0,
        "kv_cache_tokens": 6_904_000,
    }
    path.write_text(
        "\x1b[32mINFO\x1b[0m Using CUTLASS_MLA of mla_kernels on CPU, kv_cache_dtype fp8.\n"
        "(Worker pid=1) INFO [cpu_worker.py:260] Explicitly set (1.0/20.46) GiB for KV cache on node 0.\n"
        "INFO CPU KV cache size: 310,656 tokens, Maximum concurrency for 2,048 tokens per request: 151.69x\n"
        "INFO Cannot use FLASHMLA backend on CPU.\n\xff\n",
        encoding="latin-1",
    )
    found = log.read_log(path)
    assert found == {"backend_used": "CUTLASS_MLA", "kv_cache_gib": 1.0, "kv_cache_tokens": 310_656}
    assert log.bytes_per_token_layer(found, 6) == pytest.approx(576, rel=1e-3)
    path.write_text("INFO Using FLASH_ATTN_MLA attention backend out of potential backends: ['FLASH_ATTN_MLA'].\n")
    assert log.read_log(path) == {"backend_used": "FLASH_ATTN_MLA"}
    assert log.bytes_per_token_layer({}, 6) is None


def test_agreement_stops_where_the_tokens_part() -> None:
    def answer(tokens: list[int], logs: list[dict[str, float]]) -> dict[str, Any]:
        return {"tokens": tokens, "logprobs": logs}

    half = {"0": math.log(0.5), "1": math.log(0.5)}
    skewed = {"0": math.log(0.25), "1": math.log(0.75)}
    same = rows.agreement([answer([0, 1], [half, half])], [answer([0, 1], [half, half])])
    assert same == {"answers": 1, "answers_equal": 1, "steps": 2, "steps_compared": 2, "kl_mean": 0.0, "kl_max": 0.0,
                    "logprob_difference_max": 0.0}  # fmt: skip
    parted = rows.agreement([answer([1, 0], [skewed, skewed])], [answer([0, 0], [half, half])])
    assert (parted["steps_compared"], parted["answers_equal"]) == (1, 0)
    assert parted["kl_max"] == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert parted["logprob_difference_max"] == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match="answers: expected 1, got 0"):
        rows.agreement([], [answer([0], [half])])
    with pytest.raises(ValueError, match="logprobs: expected those of the whole vocabulary"):
        rows.agreement([answer([0], [{"0": 0.0}])], [answer([0], [half])])


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("void mla::sm90a::decode<mla::Traits<e4m3>>(mla::Params)", "decode attention"),
        ("void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576, 64>>", "decode attention"),
        ("get_mla_metadata_kernel", "decode attention"),
        ("device_kernel<flash::FlashAttnFwdSm90<CollectiveMainloop<2, 64, 512, 64>>>", "decode attention"),
        ("device_kernel<flash::FlashAttnFwdSm90<CollectiveMainloop<2, 128, 128, 192>>>", "prefill attention"),
        ("void vllm::merge_attn_states_kernel<__nv_bfloat16>", "prefill attention"),
        ("void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, unsigned char>", "cache write"),
        ("void vllm::gather_and_maybe_dequant_cache<__nv_bfloat16>", "cache read"),
        ("void vllm::scaled_fp8_quant_kernel_strided<c10::BFloat16>", "quantise"),
        ("fused_moe_kernel", "MoE"),
        ("void vllm::moe::topkGatingSoftmax<6>", "MoE"),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "GEMM"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)", "communication"),
        ("void at::native::elementwise_kernel<128, 4>", "other"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "other"),
    ],
)  # fmt: skip
def test_kernels_go_to_their_class(kernel: str, name: str) -> None:
    assert profiles.classify(kernel) == name


def test_traces_are_summed_and_others_refused(tmp_path: Path) -> None:
    events = [{"ph": "X", "cat": "kernel", "name": "fused_moe_kernel", "ts": ts, "dur": 2.5} for ts in (5.0, 0.0)]
    path = tmp_path / "x.pt.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "x"}]}).encode()))
    assert profiles.kernel_times(path) == {"fused_moe_kernel": (5.0, 2)}
    path.write_bytes(b"\x1f\x8bgarbage")
    with pytest.raises(ValueError, match="is no trace of the torch profiler"):
        profiles.kernel_times(path)
    plain = tmp_path / "y.json"
    plain.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match="has no GPU kernels"):
        profiles.kernel_times(plain)


def test_a_kernel_that_waits_for_another_does_not_count_twice(tmp_path: Path) -> None:
    """Launched early on the same stream it waits; on another stream it works at the same time."""
    spans = (("decode", 0.0, 10.0, 7), ("combine", 4.0, 7.0, 7), ("other", 4.0, 7.0, 8), ("next", 11.0, 2.0, 7))
    events = [{"ph": "X", "cat": "kernel", "name": n, "ts": t, "dur": d, "pid": 0, "tid": s} for n, t, d, s in spans]
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert profiles.kernel_times(path) == {
        "decode": (10.0, 1),
        "combine": (1.0, 1),
        "other": (7.0, 1),
        "next": (2.0, 1),
    }


def test_texts_of_the_tokenizer_read_back_as_the_same_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for name in models.CONFIGS:
        folder = models.write_model(tmp_path / name, models.read_config(name))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = [*range(5, 99_999, 997), 99_999]
        assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
        assert tokenizer.vocab_size > 99_000
        longest = max(map(len, tokenizer.get_vocab()))
        assert len(tokenizer.decode(ids)) < longest * len(ids)  # vLLM's own limit on a text


def test_the_geometries_are_those_of_the_kernel() -> None:
    for name, layers, heads in (("deepseek-v2-lite", 27, 16), ("deepseek-v2", 60, 128)):
        config = models.read_config(name)
        assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (512, 64)
        assert (config["num_hidden_layers"], config["num_attention_heads"]) == (layers, heads)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    with pytest.raises(
        ValueError, match=r"config.json has no kv_lora_rank: expected the config.json of a model with MLA"
    ):
        models.read_config(str(path))
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config.json is no JSON"):
        models.read_config(str(path))


def test_children_end_with_the_runner(tmp_path: Path) -> None:
    python = install(tmp_path)
    words = ["throughput", "--layers", "2", "--prompts", "2", "--input-len", "8", "--output-len", "8", "--cells",
             "CUTLASS_MLA:fp8", "--python", python, "--record", str(tmp_path / "o.json"),
             "--logs", str(tmp_path)]  # fmt: skip
    runner = subprocess.Popen(
        [sys.executable, "-m", "mla_kernels.serving", *words], cwd=ROOT, env={**os.environ, "FAKE_VLLM": "fp8=hang"},
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    pattern = ["pgrep", "-f", f"{python} -m vllm"]
    end = time.monotonic() + 30
    while subprocess.run(pattern, check=False, stdout=subprocess.DEVNULL).returncode and time.monotonic() < end:
        time.sleep(0.1)
    runner.kill()
    runner.wait()
    while not subprocess.run(pattern, check=False, stdout=subprocess.DEVNULL).returncode and time.monotonic() < end:
        time.sleep(0.1)
    assert time.monotonic() < end
    assert not (tmp_path / "o.json").exists()


def test_the_commands_of_readme_and_the_package_are_ones(tmp_path: Path) -> None:
    texts = (ROOT / "README.md").read_text() + (ROOT / "mla_kernels" / "serving" / "__init__.py").read_text()
    lines = [line.strip() for line in texts.replace("\\\n", " ").replace("\\", "").splitlines()]
    commands = [line.split()[3:] for line in lines if line.startswith("python -m mla_kernels.serving ")]
    assert len(commands) >= 8
    for words in commands:
        cli._parser().parse_args(words)
