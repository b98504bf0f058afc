# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""A stand-in for an interpreter that has vLLM: it answers the questions of `mla_kernels.serving` and does as told.

Written as an executable by `install`; the environment variable FAKE_VLLM says how a run goes, by kv_cache_dtype:
"auto=good fp8=hang". Ways: good, late, fail, hang, garbage, silent (no output file), wrong_backend, fewer (prompts).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

VERSIONS = {"python": "3.12.3", "torch": "2.11.0+cu130", "cuda": "13.0", "vllm": "0.23.0", "lm_eval": "0.4.13",
            "transformers": "5.17.0", "plugins": ["mla_kernels.vllm:register"]}  # fmt: skip
#: What vLLM 0.23.0 says on a GPU.
LOG = """INFO 11-30 20:00:00 [core.py:101] Initializing a V1 LLM engine (v0.23.0) with config: kv_cache_dtype={dtype}, x
INFO 11-30 20:00:01 [cuda.py:318] Using AttentionBackendEnum.{backend} backend.
INFO 11-30 20:00:02 [selector.py:163] Using FLASH_ATTN MLA prefill backend.
INFO 11-30 20:00:30 [gpu_worker.py:480] Available KV cache memory: 100.00 GiB
INFO 11-30 20:00:31 [kv_cache_utils.py:1744] GPU KV cache size: {tokens:,} tokens
"""


def install(folder: Path, **changes: object) -> str:
    """The path of the stand-in. `changes`: of `VERSIONS`; None for a package that is not there."""
    path = folder / "python"
    here = Path(__file__).resolve()
    path.write_text(
        f"#!{sys.executable} -S\nimport sys\nsys.path.insert(0, {str(here.parent)!r})\nimport fake_vllm\n"
        f"fake_vllm.main(sys.argv[1:], {changes!r})\n"
    )
    path.chmod(0o755)
    return str(path)


def main(words: list[str], changes: dict[str, object]) -> None:
    if words[0] == "-c":
        print(json.dumps({**VERSIONS, **changes}))
        return
    evaluating = "lm_eval" in words
    worker = words[0] == "-P"
    if evaluating:
        engine = json.loads(words[words.index("--model_args") + 1])
    elif worker:
        job = json.loads(words[2])
        engine = job["engine"]
    else:
        engine = {
            "kv_cache_dtype": words[words.index("--kv-cache-dtype") + 1],
            "attention_backend": words[words.index("--attention-backend") + 1],
        }
    dtype, backend = engine["kv_cache_dtype"], engine["attention_backend"]
    way = dict(part.split("=") for part in os.environ.get("FAKE_VLLM", "").split()).get(dtype, "good")
    used = "FLASHMLA" if way == "wrong_backend" else backend
    layers = (
        6
        if evaluating or worker
        else json.loads(Path(_after(words, "--model"), "config.json").read_text())["num_hidden_layers"]
    )
    if "--hf-overrides" in words:
        layers = json.loads(_after(words, "--hf-overrides"))["num_hidden_layers"]
    tokens = int(100 * 2**30 / layers / (576 if dtype == "fp8" else 1152))
    print(LOG.format(dtype=dtype, backend=used, tokens=tokens), file=sys.stderr, flush=True)
    print("cards", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    print("cores", os.environ.get("VLLM_CPU_OMP_THREADS_BIND"), flush=True)
    if way == "fail":
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    if way == "late":
        time.sleep(1)
    if way == "hang":
        time.sleep(1000)
    if way == "silent":
        return
    if evaluating:
        _evaluate(words, way)
    elif worker:
        Path(job["output"]).write_text("{" if way == "garbage" else json.dumps(_worker(job, dtype)))
    else:
        _throughput(words, way, dtype)


def _after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def _throughput(words: list[str], way: str, dtype: str) -> None:
    prompts = int(_after(words, "--num-prompts"))
    length = int(_after(words, "--random-input-len")) + int(_after(words, "--random-output-len"))
    elapsed = prompts / (5.5 if dtype == "fp8" else 5.0)
    content = {
        "elapsed_time": elapsed,
        "num_requests": prompts - (way == "fewer"),
        "total_num_tokens": prompts * length,
        "requests_per_second": prompts / elapsed,
        "tokens_per_second": prompts * length / elapsed,
    }
    text = "Throughput: nan" if way == "garbage" else json.dumps(content)
    Path(_after(words, "--output-json")).write_text(text)
    if "--profiler-config" in words:
        folder = Path(json.loads(_after(words, "--profiler-config"))["torch_profiler_dir"])
        events = [
            {"ph": "X", "cat": "kernel", "name": "void mla::sm90a::decode<e4m3>(Params)", "ts": 0.0, "dur": 30.0},
            {"ph": "X", "cat": "kernel", "name": "fused_moe_kernel", "ts": 30.0, "dur": 60.0},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "dur": 500.0},
            {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 90.0, "dur": 10.0},
        ]
        (folder / "rank0.pt.trace.json").write_text(json.dumps({"traceEvents": events}))


def _evaluate(words: list[str], way: str) -> None:
    folder = Path(_after(words, "--output_path"), "tiny-mla")
    folder.mkdir(parents=True)
    scores = {f"exact_match,{name}": 0.7 for name in ("strict-match", "flexible-extract")}
    scores |= {f"exact_match_stderr,{name}": 0.0145 for name in ("strict-match", "flexible-extract")}
    if way == "garbage":
        scores["exact_match,strict-match"] = 7.0
    content = {"results": {"gsm_tiny": scores}, "n-samples": {"gsm_tiny": {"original": 1000, "effective": 1000}}}
    (folder / "results_2026-11-30.json").write_text(json.dumps(content))


def _worker(job: dict, dtype: str) -> dict:
    if job["what"] == "decode":
        return {"context": 1983, "decode_tokens_per_s": 110.0 if dtype == "fp8" else 100.0}
    near = 0.0 if dtype == "auto" else 0.01
    step = {"0": -0.1 - near, "1": -2.4}
    return {"answers": [{"tokens": [0, 0], "text": "", "logprobs": [step, step]} for _ in range(job["prompts"])]}
