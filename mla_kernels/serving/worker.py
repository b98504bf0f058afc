# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Runs in an interpreter that has vLLM, as a script: decoding timed, or its tokens and logits kept.

    python worker.py '{"what": "agree", "model": …, "engine": {…}, "output": …, "prompts": 8, "output_len": 128}'

Imports nothing of this package: vLLM's plugin mechanism brings it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

GSM = Path(__file__).resolve().parents[2] / "data" / "gsm-tiny"


def texts(name: str, count: int) -> list[dict[str, Any]]:
    lines = (GSM / name).read_text("utf-8").splitlines()[:count]
    return [json.loads(line) for line in lines]


def decode(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second of decoding alone: sequences at once over the median time of the steps in which all of them, and
    nothing else, get a token; from all rounds."""
    from vllm import SamplingParams

    tokenizer = llm.get_tokenizer()
    n, batch = job["output_len"], job["batch"]
    length = job["engine"]["max_model_len"] - n
    rows = texts("documents.jsonl", 16)
    prompts = []
    for i in range(batch):  # every prompt begins differently, so that no cached prefix answers for another
        ids = tokenizer.encode(f"{i} " + rows[i % len(rows)]["text"])
        prompts.append({"prompt_token_ids": (ids * (length // len(ids) + 1))[:length]})
    params = SamplingParams(temperature=0.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False)

    def steps() -> list[float]:
        llm.enqueue(prompts, params, use_tqdm=False)
        times, ends = [], []
        while llm.llm_engine.has_unfinished_requests():
            begun = time.perf_counter()
            answers = llm.llm_engine.step()
            times.append(time.perf_counter() - begun)
            ends += [len(times)] * sum(answer.finished for answer in answers)
        # a sequence that ends with step e has its first token from step e - n + 1
        alone = times[max(ends) - n + 1 : min(ends)] if len(ends) == batch else []
        if len(alone) < n // 2:
            raise RuntimeError(
                f"expected {batch} sequences that decode side by side, got {len(alone)} such steps of {n}"
            )
        return alone

    steps()
    times = sorted(time for _ in range(job["rounds"]) for time in steps())
    rates = [round(batch / times[min(int(len(times) * part), len(times) - 1)], 2) for part in (0.5, 0.9, 0.1)]
    names = ("decode_tokens_per_s", "decode_tokens_per_s_p10", "decode_tokens_per_s_p90")
    return {"context": length + n // 2, "decode_steps": len(times), **dict(zip(names, rates, strict=True))}


def agree(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of the first problems, and the natural logarithm of every token's probability at each step."""
    from vllm import SamplingParams

    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    prompts = [f"Question: {row['question']}\nAnswer:" for row in texts("test.jsonl", job["prompts"])]
    length = job["output_len"]
    params = SamplingParams(temperature=0.0, max_tokens=length, logprobs=vocabulary, detokenize=False)
    answers = llm.generate(prompts, params, use_tqdm=False)
    found = []
    for answer in answers:
        out = answer.outputs[0]
        steps = [{str(token): entry.logprob for token, entry in step.items()} for step in out.logprobs]
        found.append({"tokens": list(out.token_ids), "logprobs": steps})
    return {"answers": found}


def evaluate(lm: Any, limit: int) -> dict[str, Any]:
    """lm-eval's gsm_tiny with the model that runs already."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(GSM))
    result = lm_eval.simple_evaluate(lm, tasks=["gsm_tiny"], task_manager=tasks, limit=limit, log_samples=False)
    return {"results": result["results"], "n-samples": result["n-samples"]}


def main() -> None:
    job = json.loads(sys.argv[1])
    engine = dict(job["engine"])
    if job["what"] == "agree":
        engine["max_logprobs"] = -1
    if job.get("limit"):
        from lm_eval.models.vllm_causallms import VLLM

        lm = VLLM(pretrained=job["model"], **engine)
        llm = lm.model
    else:
        from vllm import LLM

        lm, llm = None, LLM(model=job["model"], disable_log_stats=True, **engine)
    result = decode(llm, job) if job["what"] == "decode" else agree(llm, job)
    if lm is not None:
        result["evaluation"] = evaluate(lm, job["limit"])
    part = job["output"] + ".part"
    with open(part, "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.replace(part, job["output"])


if __name__ == "__main__":  # vLLM's engine is a process that imports this file again
    main()
