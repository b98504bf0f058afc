# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""One case in many fresh processes, many times in each, with poisoned memory: what a cold first launch gets wrong.

    python -m mla_kernels.failure --device cuda --processes 30 --repeats 50 --at-once 6 --grid --out FILE.json

The case is the one that failed in public (vLLM's test_cutlass_mla_decode.py: b = 128, h_q = 16, s = 4096, page_size 64,
e4m3, scales 1; https://github.com/vllm-project/vllm/issues/24590). The parent draws inputs, unowned memory NaN, and
computes the references. Each child loads the library alone, without its self-test, so that the first launch of the
kernel in that process is the case; before every launch out, lse and workspace are filled with bytes 0xFF, and a margin
behind each is looked at afterwards. One row of JSON a process: what the published metric says, what the rows are, how
many repeats differ from the first launch in a bit. A child that dies or hangs is a row with that verdict.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from mla_kernels import build, metrics, ops
from mla_kernels.cases import DTYPES, Case, Inputs, make_inputs, select
from mla_kernels.checks import CUDA_INPUT_DTYPES
from mla_kernels.formats import D_V
from mla_kernels.reference import EXACT, Rounding, attention, kernel_rounding
from mla_kernels.toolchain import DEVICE_TARGETS

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["LSE_LIMIT", "OUT_LIMIT", "failed_case", "grid", "recorded_runs", "run", "verdict_of"]

OUT_LIMIT = {"e4m3": 1e-4, "bf16": 1e-5}  # the published test's limits of `metrics.squared_relative_error`
LSE_LIMIT = 1e-3  # the same for lse
_MARGIN = 64  # bytes behind the workspace; out and lse get one batch row more


def failed_case(b: int = 128, seq_len: int = 4096, h_q: int = 16, page_size: int = 64, dtype: str = "e4m3") -> Case:
    """The published failing case, or a smaller one of its kind: scales 1, seed 42, sm_scale 576 ** -0.5, one split."""
    base = select("published", name="e4m3-h16-s4096")[0]
    scale = 1.0 if dtype == "e4m3" else None
    return replace(
        base, name=f"{dtype}-h{h_q}-s{seq_len}-b{b}", seq_lens=(seq_len,) * b, h_q=h_q, page_size=page_size,
        dtype=dtype, q_scale=scale, kv_scale=scale,
    )  # fmt: skip


def run(
    case: Case,
    *,
    device: str = "cpu",
    processes: int = 30,
    repeats: int = 50,
    at_once: int = 2,
    timeout_s: float = 300.0,
    say: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """`processes` fresh processes, `at_once` of them at a time, `repeats` + 1 launches in each: a row a process.

    The library that this process has loaded is used (`build.load` first). Rows hold kernel, device, dtype, b, s_q, h_q,
    s, page_size, num_kv_splits, process, launches, and
    verdict ("ok" or what is wrong), passes (the published test's limits), first_launch_us, unwritten and nonfinite
    (elements of the first launch), squared_relative_error and lse_squared_relative_error (against exact attention on
    the stored values, what the published test looks at), relative_error and worst_row_error (against the stage
    reference), rows_wrong (rows over `metrics.row_budget`, by kind), differing (repeats that differ from the first
    launch in any bit of out or lse), wrote_outside. Values that are not finite are strings.

    Raises ValueError for counts below 1, RuntimeError where no build is loaded.
    """
    counts = {"processes": processes, "repeats": repeats + 1, "at_once": at_once}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(
                f"{name}: expected at least {'0' if name == 'repeats' else '1'}, got {count - (name == 'repeats')}"
            )
    built = build.loaded()
    if built is None:
        raise RuntimeError("build: expected a loaded build, got none; call mla_kernels.build.load() first")
    with tempfile.TemporaryDirectory(prefix="mla-failure-") as folder:
        start = time.monotonic()
        _prepare(case, device, Path(folder) / "case.pt")
        say(f"inputs and references in {time.monotonic() - start:.1f} s")
        return _children(Path(folder), case, built.path, device, processes, repeats, at_once, timeout_s, say)


def _prepare(case: Case, device: str, path: Path) -> None:
    """Write the operator's arguments and the references of a case."""
    inputs = make_inputs(case, device)
    form, form_lse = _reference(inputs)
    stage, _ = _reference(inputs, kernel_rounding(case.dtype, torch.device(device).type))
    content = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in inputs.args.items()}
    content["kv_cache"] = content["kv_cache"].contiguous()
    torch.save({"args": content, "format": form.cpu(), "format_lse": form_lse.cpu(), "stage": stage.cpu()}, path)


def _reference(inputs: Inputs, rounding: Rounding = EXACT) -> tuple[Tensor, Tensor]:
    """(out [b, h_q, 512], lse [b, h_q]) on the stored values: float64, exact or with a kernel's roundings."""
    out, lse = attention(
        inputs.q_stored, inputs.kv_stored, inputs.seq_lens, sm_scale=inputs.sm_scale, q_scale=inputs.q_scale,
        kv_scale=inputs.kv_scale, rounding=rounding, num_kv_splits=inputs.num_kv_splits,
    )  # fmt: skip
    return out[:, 0], lse[:, 0]


def _children(
    folder: Path, case: Case, library: Path, device: str, processes: int, repeats: int, at_once: int,
    timeout_s: float, say: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    threads = str(max(1, (os.cpu_count() or 1) // at_once))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "mla_kernels.failure", "--child", str(folder), str(library), device, str(repeats)]
    waiting = list(range(processes))
    running: dict[int, tuple[subprocess.Popen[bytes], float, BinaryIO]] = {}
    rows: list[dict[str, Any]] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                index = waiting.pop(0)
                log: BinaryIO = (folder / f"{index}.log").open("wb")
                child = subprocess.Popen(
                    [*command, str(index)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
                )
                running[index] = (child, time.monotonic(), log)
            for index, (child, began, log) in list(running.items()):
                hung = time.monotonic() - began > timeout_s
                if child.poll() is None and not hung:
                    continue
                if hung:
                    child.kill()
                    child.wait()
                del running[index]
                log.close()
                found = _row_of(folder, index, child.returncode, f"hung for {timeout_s:g} s" if hung else "")
                rows.append({**_labels(case, device), "process": index, "launches": repeats + 1, **found})
                say(f"process {index}: {found['verdict']}")
            time.sleep(0.01)
    finally:
        for child, _, log in running.values():
            child.kill()
            child.wait()
            log.close()
    return sorted(rows, key=lambda row: row["process"])


def _row_of(folder: Path, index: int, code: int, hung: str) -> dict[str, Any]:
    result = folder / f"{index}.json"
    if not hung and code == 0 and result.is_file():
        row: dict[str, Any] = json.loads(result.read_text())
        return row
    lines = (folder / f"{index}.log").read_text("utf-8", "replace").strip().splitlines()
    why = hung or (f"killed by signal {-code}" if code < 0 else f"exit status {code}")
    return {"verdict": why, "last_words": lines[-1][:300] if lines else ""}


def _labels(case: Case, device: str) -> dict[str, Any]:
    return {
        "kernel": "mla_kernels", "device": device, "dtype": case.dtype, "b": case.b, "s_q": case.s_q, "h_q": case.h_q,
        "s": max(case.seq_lens), "page_size": case.page_size, "num_kv_splits": case.num_kv_splits,
    }  # fmt: skip


def _poison(x: Tensor) -> Tensor:
    """x (contiguous) with every byte 0xFF: NaN in bf16, fp16 and fp32."""
    x.view(-1).view(torch.uint8).fill_(255)
    return x


def _child(folder: Path, library: str, device: str, repeats: int, index: int) -> None:
    """Launch the case `repeats` + 1 times in this process and write `<index>.json`."""
    torch.ops.load_library(library)  # without the self-test, which would be the first launch
    content = torch.load(folder / "case.pt", mmap=True, weights_only=True)
    args: dict[str, Any] = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in content["args"].items()}
    b, h_q, _ = args["q_nope"].shape
    half = torch.float16 if args["q_nope"].dtype == torch.float16 else torch.bfloat16
    out_all = torch.empty(b + 1, h_q, D_V, dtype=half, device=device)
    lse_all = torch.empty(b + 1, h_q, device=device)
    capacity = args["block_table"].shape[1] * args["kv_cache"].shape[1]
    size = ops.workspace_size(b, 1, h_q, capacity, args["num_kv_splits"], device)
    space = torch.empty(size + _MARGIN, dtype=torch.uint8, device=device)
    first: tuple[Tensor, Tensor] | None = None
    differing, outside, first_us = 0, False, 0.0
    for _ in range(repeats + 1):
        for x in (out_all, lse_all, space):
            _poison(x)
        _wait(device)
        start = time.perf_counter()
        ops.mla_decode_out(**args, out=out_all[:b], lse=lse_all[:b], workspace=space[:size])
        _wait(device)
        seconds = time.perf_counter() - start
        now = (out_all[:b].view(torch.int16).clone(), lse_all[:b].view(torch.int32).clone())
        edge = (out_all[b:].view(torch.int16), lse_all[b:].view(torch.int32), space[size:].view(torch.int8))
        outside |= any(bool((x != -1).any()) for x in edge)
        if first is None:
            first, first_us = now, 1e6 * seconds
        else:
            differing += not (torch.equal(now[0], first[0]) and torch.equal(now[1], first[1]))
    assert first is not None
    out, lse = first[0].view(half).cpu(), first[1].view(torch.float32).cpu()
    unwritten = int((first[0] == -1).sum()) + int((first[1] == -1).sum())
    dtype = next(name for name, value in DTYPES.items() if value == args["q_nope"].dtype)
    row = _compared(out, lse, content["format"], content["format_lse"], content["stage"], dtype)
    row |= {"unwritten": unwritten, "differing": differing, "wrote_outside": outside, "first_launch_us": first_us}
    row["verdict"] = verdict_of(row)
    (folder / f"{index}.part").write_text(json.dumps(_finite(row)))
    os.replace(folder / f"{index}.part", folder / f"{index}.json")


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _compared(out: Tensor, lse: Tensor, form: Tensor, form_lse: Tensor, stage: Tensor, dtype: str) -> dict[str, Any]:
    """What out [b, h_q, 512] and lse [b, h_q] are against the references."""
    errors = metrics.row_errors(out, stage)
    budget = metrics.row_budget(dtype)
    wrong = ~(errors <= budget)
    entries = wrong.any(-1)  # batch entries with a wrong row: the diagnosis looks at these alone
    kinds: dict[str, int] = {}
    if bool(entries.any()):
        found = metrics.row_verdicts(out[entries], stage[entries], budget=budget, previous=math.nan)
        kinds = {kind: n for kind, n in metrics.verdict_counts(found).items() if n and kind != "ok"}
    number, lse_number = metrics.squared_relative_error(out, form), metrics.squared_relative_error(lse, form_lse)
    return {
        "nonfinite": metrics.nonfinite_count(out) + metrics.nonfinite_count(lse),
        "squared_relative_error": number,
        "lse_squared_relative_error": lse_number,
        "passes": number < OUT_LIMIT.get(dtype, OUT_LIMIT["bf16"]) and lse_number < LSE_LIMIT,
        "relative_error": metrics.relative_error(out, stage),
        "worst_row_error": float(errors.max()),
        "rows_wrong": kinds,
    }


def verdict_of(row: dict[str, Any]) -> str:
    """ "ok", or everything that is wrong with a row of `run`, in words.

    The published limit of the output is no part of it: short contexts miss it by rounding alone (notebook 07).
    """
    said = [f"{n} rows {kind}" for kind, n in row["rows_wrong"].items()]
    if row.get("unwritten"):
        said.append(f"{row['unwritten']} elements unwritten")
    if row["nonfinite"] and not row.get("unwritten"):
        said.append(f"{row['nonfinite']} elements not finite")
    if not row["lse_squared_relative_error"] < LSE_LIMIT:
        said.append(f"squared relative error of lse {row['lse_squared_relative_error']:.3g}")
    if row.get("differing"):
        said.append(f"{row['differing']} repeats differ from the first launch")
    if row.get("wrote_outside"):
        said.append("wrote outside its outputs")
    return "; ".join(said) or "ok"


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def grid(
    lengths: Sequence[int] = (4096, 8192, 16384),
    *,
    rows: int | None = None,
    device: str = "cpu",
    dtypes: Sequence[str] = ("e4m3", "bf16"),
    heads: Sequence[int] = (16, 32, 64, 128),
    say: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """The published grid through the operator, one launch a case, outputs poisoned: a row a case.

    `rows`: take the first so many of a case's 128 sequences (None: all; a CPU needs a minute for each case then). The
    stage reference has the CPU's rounding points on any device: a tensor core's accumulators take too long to model at
    these sizes, and their effect is far under `metrics.row_budget`. A dtype that the device's kernels do not take gives
    verdict "not run: …". Columns as in `run`, and case, varlen.
    """
    found = []
    for case in select("published"):
        name = case.name
        length = int(name.split("-")[2].removeprefix("s"))
        if length not in lengths or case.dtype not in dtypes or case.h_q not in heads:
            continue
        case = replace(case, seq_lens=case.seq_lens[: rows or case.b])
        labels = {**_labels(case, device), "case": name, "varlen": name.endswith("-varlen")}
        if device != "cpu" and DTYPES[case.dtype] not in CUDA_INPUT_DTYPES:
            found.append({**labels, "verdict": f"not run: no {case.dtype} kernel on this device"})
            continue
        inputs = make_inputs(case, device)
        out = _poison(torch.empty(case.b, case.h_q, D_V, dtype=torch.bfloat16, device=device))
        lse = _poison(torch.empty(case.b, case.h_q, device=device))
        ops.mla_decode_out(**inputs.args, out=out, lse=lse)
        form, form_lse = _reference(inputs)
        unwritten = int((out.view(torch.int16) == -1).sum()) + int((lse.view(torch.int32) == -1).sum())
        stage, _ = _reference(inputs, kernel_rounding(case.dtype))
        row = _compared(out.cpu(), lse.cpu(), form.cpu(), form_lse.cpu(), stage.cpu(), case.dtype)
        row["unwritten"] = unwritten
        row["verdict"] = verdict_of(row)
        found.append(_finite({**labels, **row}))
        say(f"{name}: {row['verdict']}")
    return found


def recorded_runs() -> pd.DataFrame:
    """Recorded runs of the failing case under data/measurements/, a row a device; see `run` for what a row is.

    Columns: device, what ("recorded" with its date, or "no recorded run yet"), machine, case, processes, launches (in
    all), not_ok (processes with another verdict than ok), differing (launches), worst squared_relative_error,
    grid_cases and grid_not_ok.
    """
    import pandas as pd

    from mla_kernels import measurements

    folder = Path(__file__).resolve().parents[1] / "data" / "measurements"
    found: list[dict[str, Any]] = []
    for device in ("h200", "b200", "cpu"):
        path = folder / device / "failure.json"
        if not path.is_file():
            found.append({"device": device, "what": "no recorded run yet"})
            continue
        source, rows = measurements.read_measurements(path)
        cold = [row for row in rows if row["kind"] == "cold"]
        cases = [row for row in rows if row["kind"] == "grid" and not row["verdict"].startswith("not run")]
        numbers = [float(row["squared_relative_error"]) for row in cold if "squared_relative_error" in row]
        found.append(
            {
                "device": device,
                "what": f"recorded {source['date']}",
                "machine": source["gpu"] or source["cpu"],
                "case": "b {b}, h_q {h_q}, s {s}, page {page_size}, {dtype}".format(**cold[0]),
                "processes": len(cold),
                "launches": sum(row["launches"] for row in cold),
                "not_ok": sum(row["verdict"] != "ok" for row in cold),
                "differing": sum(row.get("differing", 0) for row in cold),
                "worst_squared_relative_error": max(numbers, default=math.nan),
                "grid_cases": len(cases),
                "grid_not_ok": sum(row["verdict"] != "ok" for row in cases),
            }
        )
    return pd.DataFrame(found)


def _targets(device: str) -> tuple[str, ...]:
    """The CPU target, and that of this machine's GPU."""
    if device == "cpu":
        return ("cpu",)
    if not torch.cuda.is_available():
        raise ValueError(f"device: cuda needs a GPU that torch sees, torch {torch.__version__} sees none; use cpu")
    return ("cpu", DEVICE_TARGETS.get(torch.cuda.get_device_capability(), "sm90a"))


def _main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--child"]:
        folder, library, device, repeats, index = words[1:]
        _child(Path(folder), library, device, int(repeats), int(index))
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m mla_kernels.failure", description="Run the published failing case in fresh processes."
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--processes", type=int, default=30, help="fresh processes")
    parser.add_argument("--repeats", type=int, default=50, help="launches after the first, in each process")
    parser.add_argument("--at-once", type=int, default=2, help="processes at a time")
    parser.add_argument("--b", type=int, default=128)
    parser.add_argument("--h-q", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--dtype", choices=["e4m3", "bf16"], default="e4m3")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a process has hung")
    parser.add_argument("--grid", action="store_true", help="the published grid too, after the processes")
    parser.add_argument("--grid-rows", type=int, help="sequences of each case of the grid; default: all 128")
    parser.add_argument("--out", help="file to write, such as data/measurements/h200/failure.json")
    options = parser.parse_args(words)

    from mla_kernels import measurements

    case = failed_case(options.b, options.seq_len, options.h_q, options.page_size, options.dtype)
    start = time.monotonic()
    try:
        if options.out:
            Path(options.out).parent.mkdir(parents=True, exist_ok=True)  # before minutes of work, not after
        build.load(targets=_targets(options.device))
        rows = run(
            case, device=options.device, processes=options.processes, repeats=options.repeats,
            at_once=options.at_once, timeout_s=options.timeout, say=print,
        )  # fmt: skip
        cold_seconds = time.monotonic() - start
        rows = [{"kind": "cold", **row} for row in rows]
        if options.grid:
            found = grid(rows=options.grid_rows, device=options.device, dtypes=("e4m3", "bf16"), say=print)
            rows += [{"kind": "grid", **row} for row in found]
    except (ValueError, RuntimeError, OSError) as error:  # what cannot be run, in its own words
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    wrong = [row for row in rows if row["verdict"] != "ok" and not row["verdict"].startswith("not run")]
    print(f"{len(rows)} rows, {len(wrong)} not ok, {time.monotonic() - start:.0f} s")
    if options.out:
        source = measurements.provenance(
            ["python", "-m", "mla_kernels.failure", *words], device=options.device, what="the published failing case",
            seconds_cold=round(cold_seconds, 1), at_once=options.at_once,
        )  # fmt: skip
        print(measurements.write_measurements(options.out, rows, source))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(_main())
