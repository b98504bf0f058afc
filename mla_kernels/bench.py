# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Speed and accuracy of our operator beside every peer, in one run, recorded in files of measurements.

    python -m mla_kernels.bench gpu --record data/measurements/h200/speed.json --rows table
    python -m mla_kernels.bench accuracy --record data/measurements/h200/accuracy.json

Both need torch, numpy and platformdirs alone, so they also run from a copied package with `--library FILE` on a machine
that cannot build. Ratios are only fair inside one run on one machine: one file of measurements holds the rows of one
run, with its provenance. Every contestant answers once before it is timed, into memory that held NaN, and is compared
with float64 on the values that it was given: the time of a wrong answer is no time. What did not run has a row, or an
entry under `absent` in the provenance, that says why.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_kernels import build, metrics, ops, peers, toolchain
from mla_kernels.cases import DISTRIBUTIONS, SM_SCALE, select
from mla_kernels.formats import D_V, D
from mla_kernels.measurements import provenance, short_command, speed_row, write_measurements
from mla_kernels.reference import KERNEL, Rounding, attention
from mla_kernels.timing import ceilings, clock_for, flops, hardware, moved_bytes

__all__ = ["QUICK", "TABLE", "main", "measure_accuracy", "measure_speed", "paged_inputs", "parse_shapes"]

#: Shapes (b, h_q, s) of the speed table.
TABLE = tuple((case.b, case.h_q, case.seq_lens[0]) for case in select("performance", dtype="e4m3"))
QUICK = ((1, 128, 32768), (128, 128, 4096), (1, 16, 32768), (128, 16, 4096))
LENGTHS = (512, 2048, 8192, 32768, 131072)
BATCHES = (1, 132)  # 132: two rows for each pair of an H200's 132 SMs, so that FlashMLA cuts no row into splits
DTYPES = {"e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}
OURS = "mla_kernels"
# P in e4m3 costs 2 % at the most on the inputs of a speed row (mean 0, std 1), FlashMLA's accumulator no more: what is
# five times as far off is not an answer.
WRONG = 0.1
COMPARED_ROWS = 4  # of a batch, evenly spread, against float64

Arguments = Mapping[str, Any]


def paged_inputs(
    b: int,
    h_q: int,
    s: int,
    *,
    s_q: int = 1,
    page_size: int = 64,
    dtypes: Sequence[str] = ("e4m3", "bf16"),
    distribution: str = "zero_mean",
    q_std: float | None = None,
    sm_scale: float = SM_SCALE,
    spread: int = 0,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """Arguments of `mla_decode` for each of `dtypes`: one draw, rounded to bf16 and from there to e4m3, scales 1.

    All rows have s tokens, or with a `spread` s - spread to s of them; the pages are shuffled, and the cache holds no
    others.
    """
    if not 0 <= spread < s:
        raise ValueError(f"spread: expected 0 to {s - 1}, fewer than the {s} tokens of the longest row, got {spread}")
    generator = torch.Generator(device=device).manual_seed(seed)
    kind = DISTRIBUTIONS[distribution]
    pages = -(-s // page_size)
    count = b * pages
    caches = {name: torch.empty(count, page_size, D, dtype=DTYPES[name], device=device) for name in dtypes}
    step = max(1, (1 << 20) // page_size)
    for first in range(0, count, step):  # in pieces: the draw is fp32
        last = min(first + step, count)
        values = kind.kv(generator, (last - first) * page_size).to(torch.bfloat16).view(-1, page_size, D)
        for cache in caches.values():
            cache[first:last] = values.clamp(-448, 448).to(cache.dtype)
    std = kind.q_std if q_std is None else q_std
    q = (torch.randn(b, s_q, h_q, D, generator=generator, device=device) * std).to(torch.bfloat16)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + 1)).to(device, torch.int32)
    arguments = {}
    for name, cache in caches.items():
        stored = q.clamp(-448, 448).to(cache.dtype)
        arguments[name] = {
            "q_nope": stored[..., :D_V].contiguous(),
            "q_pe": stored[..., D_V:].contiguous(),
            "kv_cache": cache,
            "seq_lens": (s - torch.arange(b) * 977 % (spread + 1)).to(device, torch.int32),
            "block_table": order.view(b, pages),
            "sm_scale": sm_scale,
            "q_scale": 1.0,
            "kv_scale": 1.0,
        }
    return arguments


def _reference(args: Arguments, rows: Sequence[int], rounding: Rounding | None = None, **more: Any) -> Tensor:
    """float64 [rows, s_q, h_q, 512] on the values that were given; one row of the batch at a time."""
    answers = []
    for i in rows:
        n = int(args["seq_lens"][i])
        pages = args["block_table"][i, : -(-n // args["kv_cache"].shape[1])].long()
        kv = args["kv_cache"][pages].reshape(1, -1, D)[:, :n].to(torch.float32)
        q = torch.cat([args[name][i : i + 1].to(torch.float32) for name in ("q_nope", "q_pe")], -1)
        if rounding is not None:
            more["rounding"] = rounding
        answers.append(attention(q, kv, [n], sm_scale=args["sm_scale"], **more)[0])
    return torch.cat(answers)


@dataclass(frozen=True)
class _Contestant:
    """A kernel on one dtype; `plan` is our num_kv_splits (None: automatic)."""

    kernel: str
    dtype: str
    make: Callable[[Arguments], peers.Call]
    plan: int | None = None
    refuses: Callable[[Arguments], str] = staticmethod(lambda args: "")  # noqa: RUF009

    @property
    def key(self) -> str:
        return f"{self.kernel}, {self.dtype}" + (f", {self.plan} splits" if self.plan is not None else "")


def _ours(args: Arguments, plan: int | None) -> peers.Call:
    q = args["q_nope"]
    dtype = torch.float16 if q.dtype == torch.float16 else torch.bfloat16
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:-1], torch.nan, dtype=torch.float32, device=q.device)
    capacity = args["block_table"].shape[1] * args["kv_cache"].shape[1]
    size = ops.workspace_size(q.shape[0], q.shape[1], q.shape[2], capacity, plan, q.device)
    workspace = torch.full((max(size, 1),), 0xFF, dtype=torch.uint8, device=q.device)
    return partial(ops.mla_decode_out, **args, num_kv_splits=plan, out=out, lse=lse, workspace=workspace)


def _contestants(
    device: torch.device, dtypes: Sequence[str], names: Sequence[str], plans: Sequence[int | None]
) -> tuple[list[_Contestant], dict[str, str], dict[str, str]]:
    """Who takes part; who is absent, and why; versions of the peers."""
    found = [_Contestant(OURS, dtype, partial(_ours, plan=plan), plan) for dtype in dtypes for plan in plans]
    absent, versions = {}, {}
    for peer in map(peers.find, names):
        for dtype in dtypes:
            reason = peer.missing(device, dtype)
            if reason:
                absent[f"{peer.name}, {dtype}"] = reason
            else:
                found.append(_Contestant(peer.name, dtype, peer.prepare, refuses=peer.refuses))
                versions[f"{peer.name}, {dtype}"] = peer.version(dtype)
    return found, absent, versions


def _poison(args: Arguments) -> None:
    """Leave NaN in the memory that a peer which allocates its outputs is likely to be given."""
    shape = args["q_nope"].shape
    for dtype, size in ((torch.bfloat16, shape), (torch.float32, shape[:-1])):
        torch.full(size, torch.nan, dtype=dtype, device=args["q_nope"].device)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def _spread(b: int, count: int = COMPARED_ROWS) -> list[int]:
    return sorted({i * (b - 1) // max(min(count, b) - 1, 1) for i in range(min(count, b))})


def _answers(
    contestants: Sequence[_Contestant], inputs: Mapping[str, Arguments], rows: Sequence[int]
) -> Iterator[tuple[_Contestant, peers.Call | None, Tensor | None, str]]:
    """Each contestant with its call and the rows of its first answer in float64; or with the reason why not."""
    for contestant in contestants:
        args = inputs[contestant.dtype]
        reason = contestant.refuses(args)
        if reason:
            yield contestant, None, None, reason
            continue
        try:
            call = contestant.make(args)
            _poison(args)
            out = call()[0][list(rows)].to(torch.float64)
            missing = metrics.nonfinite_count(out)  # waits for the device: its errors are reported here too
        except Exception as error:  # a kernel of others may raise anything: it is reported in its row
            yield contestant, None, None, _first_line(error)
            continue
        yield contestant, call, out, f"wrong answer: {missing} elements are not finite" if missing else ""


@contextlib.contextmanager
def _clean(device: torch.device) -> Iterator[None]:
    """Free what a shape held: the next one may need all of the memory."""
    try:
        yield
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measure_speed(
    shapes: Iterable[tuple[int, int, int]],
    *,
    device: torch.device | str = "cuda",
    dtypes: Sequence[str] = ("e4m3", "bf16"),
    names: Sequence[str] | None = None,
    plans: Sequence[int | None] = (None,),
    s_q: int = 1,
    page_size: int = 64,
    q_std: float = 1.0,
    spread: int = 0,
    rounds: int = 30,
    graph: bool = True,
    seed: int = 0,
    say: Callable[[str], object] = lambda line: None,
) -> tuple[list[dict[str, Any]], dict[str, str], dict[str, str]]:
    """Time our operator and every peer in turns, shape by shape.

    Args:
        shapes: (b, h_q, s) each.
        dtypes: of the cache, among e4m3 and bf16.
        names: of peers; None means all.
        plans: num_kv_splits of our kernel, a contestant each; None is the automatic plan.
        q_std: of the queries, and times 24 sm_scale that of the logits: the speed of the Hopper kernel depends on it.
        spread: rows have s - spread to s tokens.
        rounds: timed calls of each contestant.
        graph: replay a CUDA graph where the call can be captured.
        say: told a line for each row.

    Returns:
        rows of speed.json; who is absent and why; versions of the peers. A row that has no time has `reason`. Beside
        the columns of every row: mean_s (tokens of a row, where they differ), num_kv_splits (ours; None automatic),
        clock (graph, eager or wall clock), l2 (cleared or not cleared) and relative_error (of the answer, against
        float64 on the same values).
    """
    on = torch.device(device)
    clock = clock_for(on)
    listed = [peer.name for peer in peers.PEERS] if names is None else names
    contestants, absent, versions = _contestants(on, dtypes, listed, plans)
    rows: list[dict[str, Any]] = []
    for b, h_q, s in shapes:
        with _clean(on):
            inputs = paged_inputs(
                b, h_q, s, s_q=s_q, page_size=page_size, dtypes=dtypes, q_std=q_std, spread=spread, device=on, seed=seed
            )  # fmt: skip
            lens = next(iter(inputs.values()))["seq_lens"]
            drawn = {"mean_s": round(float(lens.double().mean()), 1)} if spread else {}
            compared = _spread(b, 2)
            truth = {dtype: _reference(args, compared) for dtype, args in inputs.items()}
            launches, errors, reasons = {}, {}, {}
            for contestant, call, out, reason in _answers(contestants, inputs, compared):
                if out is not None and not reason:
                    errors[contestant.key] = metrics.relative_error(out, truth[contestant.dtype])
                    if errors[contestant.key] > WRONG:
                        reason = f"wrong answer: relative error {errors[contestant.key]:.2g}"
                if call is not None and not reason:
                    try:
                        launches[contestant.key] = clock.launch(call, graph=graph)
                    except Exception as error:
                        reason = _first_line(error)
                reasons[contestant.key] = reason
            timings = clock.interleaved(launches, rounds=rounds)
            for contestant in contestants:
                key = contestant.key
                timing = timings.get(key)
                more: dict[str, Any] = {**drawn, "num_kv_splits": contestant.plan}
                if timing is None:
                    more["reason"] = reasons[key]
                else:
                    more |= {"clock": launches[key].how, "l2": clock.l2, "relative_error": errors[key]}
                rows.append(
                    speed_row(
                        contestant.kernel, contestant.dtype, timing,
                        b=b, s_q=s_q, h_q=h_q, s=s, page_size=page_size, **more,
                    )
                )  # fmt: skip
                say(_speed_line(rows[-1]))
            launches, inputs, truth, call, out = {}, {}, {}, None, None
    return rows, absent, versions


def _speed_line(row: Mapping[str, Any]) -> str:
    plan = "" if row["num_kv_splits"] is None else f"/{row['num_kv_splits']}"
    head = f"b={row['b']:<4} h_q={row['h_q']:<4} s={row['s']:<7} {row['kernel'] + plan:<16} {row['dtype']:<5}"
    if row["us_median"] is None:
        return f"{head} {row['reason']}"
    shape = (row["b"], row["s_q"], row["h_q"], row.get("mean_s", row["s"]))
    us = row["us_median"]
    rates = f"{flops(*shape) / us / 1e6:8.3g} TFLOP/s {moved_bytes(*shape, row['dtype']) / us / 1e6:7.3g} TB/s"
    spread = f"{us:10.1f} us ({row['us_p10']:.1f} to {row['us_p90']:.1f})"
    return f"{head} {spread} {rates}, {row['clock']}, error {row['relative_error']:.1e}"


def measure_accuracy(
    lengths: Sequence[int] = LENGTHS,
    *,
    device: torch.device | str = "cuda",
    dtypes: Sequence[str] = ("e4m3", "bf16"),
    names: Sequence[str] | None = None,
    plans: Sequence[int | None] = (None,),
    distributions: Sequence[str] = ("shifted_mean",),
    q_stds: Sequence[float] = (1.0, 0.1),
    batches: Sequence[int] = BATCHES,
    h_q: int = 128,
    page_size: int = 64,
    sm_scale: float = SM_SCALE,
    seed: int = 0,
    stage: bool = True,
    say: Callable[[str], object] = lambda line: None,
) -> tuple[list[dict[str, Any]], dict[str, str], dict[str, str]]:
    """Errors of our operator and of every peer against float64 on the values that they were given (`format`).

    Four rows of the batch are compared. With `stage` there is also a kernel "stage" in e4m3, row 0 alone: the
    reference that rounds P and the output as our kernels do and sums in fp32 or better.

    Returns:
        rows of accuracy.json; who is absent and why; versions of the peers. A row without figures has `reason`.
    """
    on = torch.device(device)
    listed = [peer.name for peer in peers.PEERS] if names is None else names
    contestants, absent, versions = _contestants(on, dtypes, listed, plans)
    rows: list[dict[str, Any]] = []
    for distribution in distributions:
        for q_std, b, s in ((q_std, b, s) for q_std in q_stds for b in batches for s in lengths):
            with _clean(on):
                inputs = paged_inputs(
                    b, h_q, s, page_size=page_size, dtypes=dtypes, distribution=distribution, q_std=q_std,
                    sm_scale=sm_scale, device=on, seed=seed,
                )  # fmt: skip
                compared = _spread(b)
                truth = {dtype: _reference(args, compared) for dtype, args in inputs.items()}
                shape = {"distribution": distribution, "q_std": q_std, "b": b, "h_q": h_q, "s": s}
                for contestant, _call, out, reason in _answers(contestants, inputs, compared):
                    plan = {"num_kv_splits": contestant.plan}
                    rows.append(
                        _accuracy_row(contestant.kernel, contestant.dtype, shape, out, truth, reason) | plan
                    )  # fmt: skip
                    say(_accuracy_line(rows[-1]))
                if stage and "e4m3" in inputs:
                    out = _reference(inputs["e4m3"], compared[:1], KERNEL, num_kv_splits=plans[0])
                    first = {"e4m3": truth["e4m3"][:1]}
                    rows.append(_accuracy_row("stage", "e4m3", shape, out, first, "") | {"num_kv_splits": plans[0]})
                    say(_accuracy_line(rows[-1]))
                inputs, truth, _call, out = {}, {}, None, None
    return rows, absent, versions


def _accuracy_row(
    kernel: str, dtype: str, shape: Mapping[str, Any], out: Tensor | None, truth: Mapping[str, Tensor], reason: str
) -> dict[str, Any]:
    row: dict[str, Any] = {"kernel": kernel, "dtype": dtype, **shape}
    for name in ("relative_error", "gain_minus_1", "squared_relative_error"):
        found = math.nan if out is None or reason else getattr(metrics, name)(out, truth[dtype])
        row[name] = None if math.isnan(found) else float(f"{found:.6g}")
    return row | {"reference": "format"} | ({"reason": reason} if reason else {})


def _accuracy_line(row: Mapping[str, Any]) -> str:
    head = f"q_std={row['q_std']:<4g} b={row['b']:<4} s={row['s']:<7} {row['kernel']:<16} {row['dtype']:<5}"
    if row["relative_error"] is None:
        return f"{head} {row['reason']}"
    return f"{head} relative error {row['relative_error']:.2e}, gain - 1 {row['gain_minus_1']:+.2e}"


def parse_shapes(text: str) -> tuple[tuple[int, int, int], ...]:
    """Shapes (b, h_q, s): "table", "quick", or b x h_q x s with commas between shapes: "128x128x4096,1x16x32768"."""
    if text in ("table", "quick"):
        return TABLE if text == "table" else QUICK
    try:
        b_h_s = [tuple(int(n) for n in shape.split("x")) for shape in text.split(",")]
    except ValueError:
        b_h_s = []
    if not b_h_s or any(len(shape) != 3 or min(shape) < 1 for shape in b_h_s):
        raise ValueError(f"shapes: expected table, quick or BxHxS,… such as 128x128x4096, got {text!r}")
    return tuple((b, h_q, s) for b, h_q, s in b_h_s)


def _shapes(text: str) -> tuple[tuple[int, int, int], ...]:
    try:
        return parse_shapes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _plans(text: str) -> tuple[int | None, ...]:
    """--num-kv-splits: auto, a number, or several with commas."""
    try:
        return tuple(None if word == "auto" else int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected auto or numbers, such as auto,1,16, got {text!r}") from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(kind(word) for word in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mla_kernels.bench", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="what", required=True)
    speed = commands.add_parser("gpu", help="times of our kernel and of every peer, with the limits of the device")
    accuracy = commands.add_parser("accuracy", help="errors of our kernel and of every peer at length")
    for sub in (speed, accuracy):
        sub.add_argument("--record", type=Path, help="write the rows to this file")
        sub.add_argument("--device", default="cuda", help="default: cuda")
        sub.add_argument("--library", type=Path, help="a built library to load, where nothing can be built")
        sub.add_argument("--commit", help="commit to record, where the package is not in a checkout")
        sub.add_argument("--peers", type=_words, help="names with commas; default: all, empty: none")
        sub.add_argument("--peers-dir", type=Path, help="folder with libraries of the vLLM wheel; or MLA_PEERS_DIR")
        sub.add_argument("--dtypes", type=_words, default=tuple(DTYPES), help="default: e4m3,bf16")
        sub.add_argument("--num-kv-splits", type=_plans, default=(None,), help="our plans: auto,1,16; default: auto")
        sub.add_argument("--page-size", type=int, default=64)
        sub.add_argument("--seed", type=int, default=0)
    speed.add_argument("--rows", type=_shapes, default=QUICK, help="table, quick (default) or BxHxS,…")
    speed.add_argument("--q-std", type=float, default=1.0, help="of the queries (default: 1)")
    speed.add_argument("--spread", type=int, default=0, help="rows of S - SPREAD to S tokens (default: 0)")
    speed.add_argument("--rounds", type=int, default=30, help="timed calls of each (default: 30)")
    speed.add_argument("--timing", choices=("graph", "eager"), default="graph", help="default: graph replays")
    speed.add_argument("--ceiling-bytes", type=int, help="bytes of the memory limits; default: 4 GiB, CPU 256 MiB")
    speed.add_argument("--ceiling-n", type=int, help="size of the matrix products; default: 8192, CPU 1024")
    accuracy.add_argument("--lengths", type=_numbers(int), default=LENGTHS)
    accuracy.add_argument("--q-std", type=_numbers(float), default=(1.0, 0.1))
    accuracy.add_argument("--batches", type=_numbers(int), default=BATCHES, help="default: 1,132")
    accuracy.add_argument("--heads", type=int, default=128)
    accuracy.add_argument("--distributions", type=_words, default=("shifted_mean",))
    accuracy.add_argument("--sm-scale", type=float, default=SM_SCALE, help="default: 192^-0.5")
    return parser


def _load(device: torch.device, library: Path | None) -> None:
    if library is not None:
        torch.ops.load_library(str(library))
        return
    target = "cpu"
    if device.type == "cuda":
        target = toolchain.DEVICE_TARGETS.get(torch.cuda.get_device_capability(device), "cpu")
    build.load(targets=tuple(dict.fromkeys(("cpu", target))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda needs a GPU that torch sees; --device cpu runs the same on the processor")
    for name in options.dtypes:
        if name not in DTYPES:
            parser.error(f"--dtypes: expected {', '.join(DTYPES)}, got {name}")
    try:
        names = None if options.peers is None else [peers.find(name).name for name in options.peers]
    except ValueError as error:
        parser.error(f"--{error}")
    if options.what == "gpu" and not 0 <= options.spread < (shortest := min(s for _, _, s in options.rows)):
        parser.error(f"--spread: expected 0 to {shortest - 1}, fewer than any row's tokens, got {options.spread}")
    if options.peers_dir is not None:
        peers.set_library_folder(options.peers_dir)
    _load(device, options.library)
    say = partial(print, flush=True)
    say(hardware(device))
    common: dict[str, Any] = {
        "device": device, "dtypes": options.dtypes, "names": names, "plans": options.num_kv_splits,
        "page_size": options.page_size, "seed": options.seed, "say": say,
    }  # fmt: skip
    limits: list[dict[str, Any]] = []
    if options.what == "gpu":
        limits, failed = ceilings(device, size=options.ceiling_bytes, n=options.ceiling_n)
        for row in limits:
            say(f"{row['name']}: {row['value']} ({row['how']})")
        graph = options.timing == "graph"
        rows, absent, versions = measure_speed(
            options.rows, q_std=options.q_std, spread=options.spread, rounds=options.rounds, graph=graph, **common
        )
        absent |= failed
        more: dict[str, Any] = {"rounds": options.rounds, "q_std": options.q_std, "spread": options.spread}
    else:
        rows, absent, versions = measure_accuracy(
            options.lengths, q_stds=options.q_std, batches=options.batches, h_q=options.heads,
            distributions=options.distributions, sm_scale=options.sm_scale, **common,
        )  # fmt: skip
        more = {"sm_scale": options.sm_scale, "page_size": options.page_size}
    for name, reason in absent.items():
        say(f"{name}: {reason}")
    if options.record is not None:
        source = provenance(
            arguments if arguments is None else ["python", "-m", "mla_kernels.bench", *short_command(arguments)],
            device=device, peers=versions, absent=absent, build=torch.ops.mla_kernels.build_key(), **more,
        )  # fmt: skip
        if options.commit:
            source["commit"] = options.commit
        say(str(write_measurements(options.record, [*limits, *rows], source)))
    return 0


if __name__ == "__main__":
    from mla_kernels.bench import main as _main_of_the_package  # this file runs as __main__: types live in the package

    sys.exit(_main_of_the_package())
