# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Rows of serving.json and eval.json, from the files that `vllm bench throughput` and lm-eval write."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mla_kernels.measurements import short_command
from mla_kernels.serving.children import Ended
from mla_kernels.serving.log import bytes_per_token_layer, errors, read_log
from mla_kernels.serving.models import ROOT

__all__ = [
    "FILTERS", "agree_rows", "agreement", "decode_rows", "eval_rows", "failure", "log_facts", "scores",
    "throughput_row",
]  # fmt: skip

FILTERS = ("strict-match", "flexible-extract")
#: Columns that a row without a result has nevertheless, as None.
_THROUGHPUT = ("requests_per_s", "total_tokens_per_s", "output_tokens_per_s", "elapsed_s")


def failure(ended: Ended) -> str:
    """Why a child has no result: "" for one that ended well."""
    if ended.reason:
        return ended.reason
    if ended.code == 0:
        return ""
    try:
        said = " | ".join(errors(ended.log))
    except OSError:
        said = "it has no log"
    return f"exit code {ended.code}: {said}"[:600]


def log_facts(ended: Ended, layers: int, asked: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What the log tells, for the row; and why it contradicts what was asked ("" when it does not)."""
    try:
        found = read_log(ended.log)
    except OSError:
        return {}, ""
    per = bytes_per_token_layer(found, layers)
    facts = {**found, **({} if per is None else {"kv_cache_bytes_per_token_layer": per})}
    for name in ("backend", "kv_cache_dtype"):
        used = found.get(f"{name}_used")
        if used is not None and asked[name] != "default" and used != asked[name]:
            return facts, f"{name}: asked for {asked[name]}, vLLM used {used}"
    return facts, ""


def _number(content: Mapping[str, Any], key: str) -> float:
    value = content.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{key}: expected a positive number, got {value!r}")
    return float(value)


def _common(ended: Ended, asked: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **asked,
        "seconds": round(ended.seconds, 1),
        "on_gpus": ",".join(ended.on),
        "log": ended.log.name,
        "command": " ".join(short_command(map(str, ended.child.command))).replace(f"{ROOT}{os.sep}", ""),
    }


def throughput_row(ended: Ended, output: str | os.PathLike[str], asked: Mapping[str, Any]) -> dict[str, Any]:
    """A row of serving.json. `asked` has its fixed columns: engine, version, model, layers, gpus, expert_parallel,
    backend, kv_cache_dtype, prompts, input_len, output_len. `output`: the file of --output-json.

    Without a result the numbers are None and `reason` says why: the child failed or hung, the file is missing or no
    JSON, a number is not positive, other prompts were served than asked for, or the log names another backend.
    """
    reason = failure(ended)
    facts, contradiction = log_facts(ended, int(asked["layers"]), asked)
    numbers: dict[str, Any] = dict.fromkeys(_THROUGHPUT)
    if not reason:
        try:
            content = json.loads(Path(output).read_text("utf-8"))
            if not isinstance(content, dict):
                raise ValueError("expected an object")
            elapsed, total = _number(content, "elapsed_time"), _number(content, "total_num_tokens")
            if content.get("num_requests") != asked["prompts"]:
                raise ValueError(f"num_requests: expected {asked['prompts']}, got {content.get('num_requests')!r}")
            wanted = asked["prompts"] * (asked["input_len"] + asked["output_len"])
            if abs(total - wanted) > 0.01 * wanted:  # a tokenizer that does not read back what it wrote
                raise ValueError(f"total_num_tokens: expected {wanted} within 1 %, got {total:.0f}")
            numbers = {
                "requests_per_s": round(_number(content, "requests_per_second"), 4),
                "total_tokens_per_s": round(_number(content, "tokens_per_second"), 1),
                "output_tokens_per_s": round(asked["prompts"] * asked["output_len"] / elapsed, 1),
                "elapsed_s": round(elapsed, 2),
            }
        except FileNotFoundError:
            reason = "vllm bench throughput ended well and wrote no --output-json"
        except (OSError, ValueError) as error:
            reason = f"the output of vllm bench throughput: {error}"
    return _finished(ended, asked, numbers, facts, reason or contradiction)


def _finished(
    ended: Ended, asked: Mapping[str, Any], numbers: Mapping[str, Any], facts: Mapping[str, Any], reason: str
) -> dict[str, Any]:
    if reason:
        numbers = dict.fromkeys(numbers)
    row = {**asked, **numbers, **facts, **_common(ended, {})}
    return {**row, "reason": reason} if reason else row


def eval_rows(ended: Ended, folder: str | os.PathLike[str], asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of eval.json, one a filter. `asked`: engine, version, model, layers, task, backend, kv_cache_dtype.

    `folder` is that of lm-eval's --output_path. Without a result there is one row, with `reason`.
    """
    reason = failure(ended)
    facts, contradiction = log_facts(ended, int(asked["layers"]), asked)
    empty: dict[str, Any] = {"filter": None, "n": None, "exact_match": None, "stderr": None}
    if not reason and not contradiction:
        try:
            return [
                _finished(ended, asked, numbers, facts, "") for numbers in _scores(Path(folder), str(asked["task"]))
            ]
        except (OSError, ValueError) as error:
            reason = f"the output of lm-eval: {error}"
    return [_finished(ended, asked, empty, facts, reason or contradiction)]


def _scores(folder: Path, task: str) -> Sequence[dict[str, Any]]:
    files = sorted(folder.rglob("results_*.json"))
    if not files:
        raise ValueError("it ended well and wrote no results_*.json")
    return scores(json.loads(files[-1].read_text("utf-8")), task)


def scores(content: Mapping[str, Any], task: str) -> list[dict[str, Any]]:
    """filter, n, exact_match and stderr of each filter in lm-eval's results; ValueError for what is none."""
    try:
        scored, count = content["results"][task], content["n-samples"][task]["effective"]
    except (KeyError, TypeError):
        raise ValueError(f"there are no results of {task} in it") from None
    found = []
    names = [key.partition(",")[2] for key in scored if key.startswith("exact_match,")]
    for name in names:
        score, stderr = scored[f"exact_match,{name}"], scored.get(f"exact_match_stderr,{name}")
        if not isinstance(score, (int, float)) or not 0 <= score <= 1:
            raise ValueError(f"exact_match of {name}: expected 0 to 1, got {score!r}")
        if not isinstance(stderr, (int, float)) or not math.isfinite(stderr):
            raise ValueError(f"stderr of {name}: expected a number, got {stderr!r} (one problem alone has none)")
        found.append({"filter": name, "n": int(count), "exact_match": float(score), "stderr": float(stderr)})
    if not found:
        raise ValueError(f"there is no exact_match of {task} in it")
    return found


def _worker_output(ended: Ended, output: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """What worker.py wrote, or why it did not."""
    reason = failure(ended)
    if reason:
        return {}, reason
    try:
        content = json.loads(Path(output).read_text("utf-8"))
        if not isinstance(content, dict):
            raise ValueError("expected an object")
    except (OSError, ValueError) as error:
        return {}, f"the output of worker.py: {error}"
    return content, ""


def decode_rows(ended: Ended, output: str | os.PathLike[str], asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The row of a timing of decode alone: what worker.py wrote, beside what was asked."""
    content, reason = _worker_output(ended, output)
    facts, contradiction = log_facts(ended, int(asked["layers"]), asked)
    if not reason:
        try:
            _number(content, "decode_tokens_per_s")
        except ValueError as error:
            reason = f"the output of worker.py: {error}"
    numbers = {"decode_tokens_per_s": None, **content}
    return [_finished(ended, asked, numbers, facts, reason or contradiction)]


def agree_rows(
    ended: Ended, output: str | os.PathLike[str], asked: Mapping[str, Any], reference: str | os.PathLike[str]
) -> list[dict[str, Any]]:
    """A row of how a run agrees with the run that wrote `reference` (with itself: every difference is 0), and, where
    lm-eval ran, rows as in eval.json."""
    content, reason = _worker_output(ended, output)
    facts, contradiction = log_facts(ended, int(asked["layers"]), asked)
    reason = reason or contradiction
    numbers: dict[str, Any] = dict.fromkeys(AGREEMENT)
    found: list[dict[str, Any]] = []
    if not reason:
        try:
            numbers = agreement(content["answers"], json.loads(Path(reference).read_text("utf-8"))["answers"])
            if "evaluation" in content:
                found = scores(content["evaluation"], "gsm_tiny")
        except FileNotFoundError:
            reason = "the run that it is compared with has no result"
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"the output of worker.py: {type(error).__name__}: {error}"
    evaluated = {**asked, "task": "gsm_tiny"}
    return [_finished(ended, asked, numbers, facts, reason),
            *(_finished(ended, evaluated, numbers, facts, "") for numbers in found)]  # fmt: skip


#: Columns of `agreement`.
AGREEMENT = (
    "answers", "answers_equal", "steps", "steps_compared", "kl_mean", "kl_max", "logprob_difference_max",
)  # fmt: skip


def agreement(mine: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How two runs of the same greedy prompts agree.

    Each answer has `tokens` and `logprobs`, of every token of the vocabulary at each step. Steps are compared as long
    as both have read the same tokens, so up to and with the first step where the tokens differ.

    Returns:
        answers, answers_equal (token for token), steps (tokens of `mine`), steps_compared, kl_mean and kl_max
        (KL(other, mine) of a step, nats), logprob_difference_max (of tokens that `other` gives 1e-3 or more, nats).
    """
    if len(mine) != len(other):
        raise ValueError(f"answers: expected {len(other)}, got {len(mine)}")
    divergences, largest, equal = [], 0.0, 0
    for one, two in zip(mine, other, strict=True):
        equal += one["tokens"] == two["tokens"]
        pairs = zip(one["tokens"], two["tokens"], one["logprobs"], two["logprobs"], strict=False)
        for token, token_of_other, here, there in pairs:
            if here.keys() != there.keys():
                raise ValueError("logprobs: expected those of the whole vocabulary, got different tokens")
            divergence = 0.0
            for name, log in there.items():
                weight = math.exp(log)
                if weight > 0:
                    divergence += weight * (log - here[name])
                    if weight >= 1e-3:
                        largest = max(largest, abs(log - here[name]))
            divergences.append(max(divergence, 0.0))
            if token != token_of_other:
                break
    if not divergences:
        raise ValueError("answers: expected at least one step, got none")
    return {
        "answers": len(mine), "answers_equal": equal, "steps": sum(len(one["tokens"]) for one in mine),
        "steps_compared": len(divergences), "kl_mean": sum(divergences) / len(divergences),
        "kl_max": max(divergences), "logprob_difference_max": largest,
    }  # fmt: skip
