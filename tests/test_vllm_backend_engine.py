# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The whole engine with our backend and data/tiny-mla: the ways a prompt can reach the cache give the same answers.

Each engine runs in a process of its own, started and found as a user's: the plugin is loaded by its entry point.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; `make serve` installs it in an environment of its own")

from mla_kernels.calibration import Scales, save_scales

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "data" / "tiny-mla"
LAYERS, NEW = 6, 24

CHILD = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, file, options, rounds, new = json.loads(sys.argv[1])
    with open(file) as lines:
        problems = [json.loads(line) for line in lines]
    shots = "\\n\\n".join(f"Question: {p['question']}\\nAnswer: {p['answer']}" for p in problems[:2])
    prompts = [f"{shots}\\n\\nQuestion: {p['question']}\\nAnswer:" for p in problems[2:6]]
    options |= {"max_model_len": 2048, "max_num_seqs": 8, "dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 28}
    llm = LLM(model=model, **options)
    asked = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, logprobs=1)
    for _ in range(rounds):
        done = llm.generate(prompts, asked, use_tqdm=False)
        print("RESULT", json.dumps([
            [o.prompt_token_ids.__len__(), o.num_cached_tokens, list(o.outputs[0].token_ids),
             [next(iter(x.values())).logprob for x in o.outputs[0].logprobs]] for o in done]))
"""


def answers(rounds: int = 1, environment: dict[str, str] | None = None, **options: Any) -> tuple[list[Any], str]:
    """For each round: of each prompt its tokens, how many of them were cached, new tokens, their log probabilities."""
    words = json.dumps([str(MODEL), str(next((ROOT / "data" / "gsm-tiny").glob("*test*.jsonl"))), options, rounds, NEW])
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLA_KERNELS_")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, words],
        env=env | (environment or {}),
        capture_output=True,
        text=True,
        timeout=500,
        cwd=MODEL,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    found = [json.loads(line.partition("RESULT ")[2]) for line in done.stdout.splitlines() if "RESULT " in line]
    assert len(found) == rounds, log[-4000:]
    return found, log


def differences(a: list[Any], b: list[Any]) -> tuple[int, float]:
    """Prompts whose tokens differ, and the largest difference of log probabilities up to the first that does."""
    differ, largest = 0, 0.0
    for one, other in zip(a, b, strict=True):
        same = [x == y for x, y in zip(one[2], other[2], strict=True)]
        first = same.index(False) if False in same else len(same)
        differ += first < len(same)
        largest = max([largest, *(abs(x - y) for x, y in zip(one[3][:first], other[3][:first], strict=True))])
    return differ, largest


@pytest.fixture(scope="module")
def whole() -> list[Any]:
    """fp8 by its name alone, prompts at once, without prefix caching, eager."""
    (found,), log = answers(kv_cache_dtype="fp8", enforce_eager=True, enable_prefix_caching=False)
    assert "CUTLASS_MLA" in log
    return found


# Context from the cache is rounded to e4m3 and new tokens are not, so where a prompt is cut moves log probabilities by
# the format's error: 0.0015 to 0.005 measured here, and no token. Scales that clip (0.001 for the cache) change tokens
# of all four prompts, and log probabilities by 0.64.
BAND = 0.05


def check(a: list[Any], b: list[Any]) -> None:
    differ, largest = differences(a, b)
    assert differ == 0
    assert largest < BAND


def test_chunks_and_prefix_caching(whole: list[Any]) -> None:
    rounds, _ = answers(2, kv_cache_dtype="fp8", enforce_eager=True, max_num_batched_tokens=64)
    for found in rounds:
        check(found, whole)
    assert all(cached >= count // 64 * 64 - 64 for count, cached, *_ in rounds[1])  # read from the cache, in fp8
    check(*rounds)


def test_compiled(whole: list[Any]) -> None:
    (found,), _ = answers(
        kv_cache_dtype="fp8", enable_prefix_caching=False, attention_config={"backend": "CUTLASS_MLA"}
    )
    check(found, whole)


def test_auto_and_calibrated_scales(whole: list[Any], tmp_path: Path) -> None:
    """fp8 with a scale a layer answers as bf16 does, and the log says what was loaded."""
    common = {"enforce_eager": True, "enable_prefix_caching": False, "attention_config": {"backend": "CUTLASS_MLA"}}
    (auto,), _ = answers(kv_cache_dtype="auto", **common)
    path = save_scales(Scales((0.25,) * LAYERS, (0.0625,) * LAYERS), tmp_path / "scales.json")
    (scaled,), log = answers(kv_cache_dtype="fp8", environment={"MLA_KERNELS_SCALES": str(path)}, **common)
    assert f"scales.json: kv_scale found for {LAYERS} of {LAYERS} layers" in log
    for found in (scaled, whole):
        check(found, auto)
    assert scaled != whole
