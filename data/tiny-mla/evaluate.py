# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Exact match of data/tiny-mla on data/gsm-tiny through our operator, by cache format.

    python data/tiny-mla/evaluate.py --formats bf16 e4m3 --out data/measurements/cpu/eval.json

Greedy, 0-shot, scales calibrated on the first 8 documents of calibration.jsonl. Weights are bf16; what is computed
between the operator's calls is float32, or bf16 with `--dtype bfloat16`, as GPUs serve it (slow on most CPUs).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import mla_kernels
from mla_kernels import build, model

HERE = Path(__file__).parent
GSM = HERE.parent / "gsm-tiny"


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (GSM / name).read_text(encoding="utf-8").splitlines()]


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate data/tiny-mla on data/gsm-tiny.")
    parser.add_argument("--formats", nargs="+", default=["bf16", "e4m3"])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    torch.set_num_threads(args.threads)
    build.load()
    lm = model.load_model(HERE, dtype=getattr(torch, args.dtype))
    problems = lines("test.jsonl")[: args.count]
    scales = model.calibrate(model.capture(lm, [row["text"] for row in lines("calibration.jsonl")[:8]]))
    rows: list[dict[str, Any]] = []
    texts: dict[str, list[str]] = {}
    for fmt in args.formats:
        begun = time.perf_counter()
        answers: list[dict[str, Any]] = []
        for start in range(0, len(problems), 125):
            part = problems[start : start + 125]
            answers += model.answer_problems(lm, part, batch=125, max_new_tokens=400, formats=fmt, scales=scales)
            print(fmt, len(answers), sum(a["strict_match"] for a in answers) / len(answers), flush=True)
        texts[fmt] = [answer["text"] for answer in answers]
        same = sum(a == b for a, b in zip(texts[fmt], texts[args.formats[0]], strict=True)) / len(answers)
        for kind, name in (("strict_match", "strict-match"), ("flexible_extract", "flexible-extract")):
            share = sum(answer[kind] for answer in answers) / len(answers)
            level = {}
            for k in sorted({problem["level"] for problem in problems}):
                right = [a[kind] for a, problem in zip(answers, problems, strict=True) if problem["level"] == k]
                level[str(k)] = {"n": len(right), "exact_match": sum(right) / len(right)}
            rows.append(
                {
                    "engine": "mla_kernels.generation",
                    "version": mla_kernels.__version__,
                    "model": "data/tiny-mla",
                    "task": "gsm_tiny",
                    "filter": name,
                    "backend": "cpu",
                    "kv_cache_dtype": fmt,
                    "compute_dtype": args.dtype,
                    "n": len(answers),
                    "exact_match": share,
                    "stderr": (share * (1 - share) / (len(answers) - 1)) ** 0.5,
                    "by_level": level,
                    f"share_of_answers_equal_to_{args.formats[0]}": same,
                    "seconds": round(time.perf_counter() - begun),
                }
            )
    provenance = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit,
        "command": "python data/tiny-mla/evaluate.py " + " ".join(sys.argv[1:]),
        "gpu": None,
        "cpu": f"{cpu_name()}, {torch.ops.mla_kernels.cpu_isa()}, {args.threads} thread",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"provenance": provenance, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
