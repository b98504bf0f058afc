# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The numbers of the explorer: settings in, tables out. Results are kept, so that a change computes what it changes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mla_kernels import metrics, ops, plots
from mla_kernels.explore.sources import Source
from mla_kernels.formats import D_V, FORMATS, Encoded, amax_scale, decode, decode_element, encode, round_to
from mla_kernels.reference import EXACT, Accumulator, Rounding, attention, kernel_rounding, split_bounds

__all__ = ["HEAT_STEPS", "P_SCALES", "SCALES", "Settings", "Study", "has_kernel"]

HEAT_STEPS = 2  # decode steps behind a cell of the heat map, the last ones: all layers must follow within a second

#: How the cache is scaled, by name: a factor on amax / 448, or None for 1.0 (nobody calibrated).
SCALES: dict[str, float | None] = {
    "amax / 448": 1.0,
    "amax / 448 × 2": 2.0,
    "amax / 448 × 16": 16.0,
    "amax / 448 ÷ 2 (clips)": 0.5,
    "amax / 448 ÷ 8 (clips)": 0.125,
    "1.0": None,
}
P_SCALES = (1.0, 16.0, 64.0, 128.0, 256.0, 512.0)
CAUSES = ("scores", "values", "P", "accumulator", "output", "kernel")
CAUSE_WORDS = {
    "scores": "q, K rounded",
    "values": "V rounded",
    "P": "P rounded",
    "accumulator": "accumulator",
    "output": "out to 16 bits",
    "kernel": "kernel − stage",
}


@dataclass(frozen=True)
class Settings:
    """What the widgets choose. `layer`, `head`, `step` are indices into the source's; None means all.

    `format` of the cache (and of q, for e4m3), `scale` one of SCALES, `p_scale` the factor on P before e4m3,
    `fraction_bits` the width of the accumulator (None: fp32 and wider), `promote_every` tokens (None: in place),
    `narrow_qk` whether q · k sees that accumulator too, `length` of the context (None: all there is).
    """

    layer: int = 0
    head: int | None = None
    step: int | None = None
    format: str = "e4m3"
    scale: str = "amax / 448"
    p_scale: float = 256.0
    fraction_bits: int | None = None
    promote_every: int | None = None
    narrow_qk: bool = False
    length: int | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {self.format!r}")
        if self.scale not in SCALES:
            raise ValueError(f"scale: expected one of {', '.join(SCALES)}, got {self.scale!r}")
        _ = self.rounding  # refuses what it cannot be

    @property
    def rounding(self) -> Rounding:
        """Rounding points of the stage. Formats other than e4m3 are unpacked to bf16, and P is bf16."""
        if self.format != "e4m3":
            return kernel_rounding("bf16")
        narrow = None
        if self.fraction_bits is not None:
            narrow = Accumulator(self.fraction_bits, promote_every=self.promote_every)
        whole = replace(narrow, promote_every=None) if narrow is not None and self.narrow_qk else None
        return replace(kernel_rounding("e4m3"), p_scale=self.p_scale, pv_accumulator=narrow, qk_accumulator=whole)


def has_kernel(s: Settings) -> bool:
    """Whether the CPU kernel is loaded and has these rounding points: then kernel − stage is implementation error."""
    known = s.format in ("e4m3", "bf16") and s.rounding == kernel_rounding(s.format)
    return known and "cpu" in ops.loaded_targets()


@dataclass(frozen=True)
class _Stored:
    """A layer in a format: q [steps, h, 576] and kv [n, 576] as the stage takes them, with their scales."""

    q: Tensor
    kv: Tensor
    q_scale: float
    kv_scale: float
    encoded: Encoded


class Study:
    """The explorer's numbers for one source. All methods return tables; `Settings` says which."""

    def __init__(self, source: Source) -> None:
        self.source = source
        keep = functools.lru_cache(maxsize=96)
        self._loaded, self._stored = keep(self._load), keep(self._store)
        self._oracle, self._format = keep(self._exact_oracle), keep(self._exact_format)
        self._stage, self._kernel = keep(self._run_stage), keep(self._run_kernel)
        self._cells = keep(self._layer_cells)

    # Results, [steps, h, 512] in float64.

    def _load(self, layer: int, length: int | None) -> tuple[Tensor, Tensor, list[int], list[int]]:
        return self.source.load(layer, length)

    def _store(self, layer: int, length: int | None, fmt: str, scale: str) -> _Stored:
        q, kv, _, _ = self._loaded(layer, length)
        factor = SCALES[scale]
        one = FORMATS[fmt].granularity == "tensor"
        kv_scale = None if not one else 1.0 if factor is None else factor * amax_scale(kv, FORMATS[fmt].latent)
        encoded = encode(kv, fmt, kv_scale)
        if fmt != "e4m3":
            return _Stored(q, decode(encoded).to(torch.float64), 1.0, 1.0, encoded)
        queries = encode(q, "e4m3", 1.0 if factor is None else None)
        return _Stored(queries.stored, encoded.stored, float(queries.scale), float(encoded.scale), encoded)  # type: ignore[arg-type]

    def _attend(self, q: Tensor, kv: Tensor, layer: int, length: int | None, last: int, **options: Any) -> Tensor:
        """Of the `last` steps; 0: of all."""
        _, _, first, lens = self._loaded(layer, length)
        dense = _windows(kv, first[-last:], lens[-last:])
        return attention(q[-last:], dense, lens[-last:], sm_scale=self.source.sm_scale, **options)[0]

    def _exact_oracle(self, layer: int, length: int | None, last: int = 0) -> Tensor:
        q, kv, _, _ = self._loaded(layer, length)
        return self._attend(q, kv, layer, length, last)

    def _exact_format(self, layer: int, length: int | None, fmt: str, scale: str, last: int = 0) -> Tensor:
        return self._stage(layer, length, fmt, scale, EXACT, last)

    def _run_stage(
        self, layer: int, length: int | None, fmt: str, scale: str, rounding: Rounding, last: int = 0
    ) -> Tensor:
        """The stage reference of the `last` steps (0: of all)."""
        if rounding.out_format is not None:  # the last rounding point of all: the rest is wanted without it too
            wide = self._stage(layer, length, fmt, scale, replace(rounding, out_format=None), last)
            return round_to(wide, rounding.out_format)
        held = self._stored(layer, length, fmt, scale)
        return self._attend(
            held.q, held.kv, layer, length, last, rounding=rounding, num_kv_splits=None, q_scale=held.q_scale,
            kv_scale=held.kv_scale,
        )  # fmt: skip

    def _run_kernel(self, layer: int, length: int | None, fmt: str, scale: str) -> Tensor:
        held = self._stored(layer, length, fmt, scale)
        _, _, first, lens = self._loaded(layer, length)
        kv = held.kv if fmt == "e4m3" else held.kv.to(torch.bfloat16)
        dense = _windows(kv, first, lens)
        pages = -(-dense.shape[1] // ops.BLOCK_N)
        bits = torch.uint8 if fmt == "e4m3" else torch.int16
        cache = torch.zeros(len(lens), pages * ops.BLOCK_N, dense.shape[2], dtype=bits)
        cache[:, : dense.shape[1]] = dense.view(bits)
        out, _ = ops.mla_decode(
            held.q[..., :D_V].contiguous(), held.q[..., D_V:].contiguous(),
            cache.view(kv.dtype).view(-1, ops.BLOCK_N, dense.shape[2]), torch.tensor(lens, dtype=torch.int32),
            torch.arange(len(lens) * pages, dtype=torch.int32).view(len(lens), pages),
            sm_scale=self.source.sm_scale, q_scale=held.q_scale, kv_scale=held.kv_scale,
        )  # fmt: skip
        return out.to(torch.float64)

    def split(self, s: Settings) -> metrics.ErrorSplit:
        """The error split of the chosen layer, all steps and heads: vectors [steps, h, 512]."""
        key = (s.layer, s.length, s.format, s.scale)
        stage = self._stage(*key, s.rounding)
        kernel = self._kernel(*key) if has_kernel(s) else stage
        return metrics.error_split(self._oracle(s.layer, s.length), self._format(*key), stage, kernel)

    # Tables.

    def parts(self, s: Settings) -> pd.DataFrame:
        """Split of the chosen rows: part (implementation with a kernel only), relative_error, gain, max_abs, …"""
        table = pd.DataFrame(_chosen(self.split(s), s).rows())
        return table if has_kernel(s) else table[table["part"] != "implementation"].reset_index(drop=True)

    def histogram(self, s: Settings) -> pd.DataFrame:
        """Absolute errors of the output elements of the chosen rows: part, log10_error, share."""
        chosen = _chosen(self.split(s), s)
        parts = {**chosen.parts, "total": chosen.total}
        if not has_kernel(s):
            del parts["implementation"]
        return plots.log_histogram({name: error.flatten().tolist() for name, error in parts.items()})

    def worst(self, s: Settings, count: int = 10) -> pd.DataFrame:
        """The chosen rows with the largest total error: step and head (indices), tokens, total, format, stage,
        implementation (relative errors of the row)."""
        split = self.split(s)
        size = split.oracle.norm(dim=-1)
        lens = self._loaded(s.layer, s.length)[3]
        steps = range(len(lens)) if s.step is None else [s.step]
        heads = range(size.shape[1]) if s.head is None else [s.head]
        named = {"total": split.total, **split.parts}
        errors = {name: error.norm(dim=-1) / size for name, error in named.items()}
        rows = [
            {"step": i, "head": j, "tokens": lens[i], **{name: float(error[i, j]) for name, error in errors.items()}}
            for i in steps
            for j in heads
        ]
        table = pd.DataFrame(rows).sort_values("total", ascending=False, kind="stable", na_position="first")
        return table.head(count).reset_index(drop=True)

    def layers(self, s: Settings) -> pd.DataFrame:
        """Every layer with these settings (index: its name): max, share_clipped, share_flushed, round_trip_error, and
        the relative errors format, stage and both of all heads in the last HEAT_STEPS steps. No kernel runs."""
        rows = [self._cells(i, s.length, s.format, s.scale, s.rounding) for i in range(len(self.source.layers))]
        return pd.DataFrame(rows, index=pd.Index(self.source.layers, name="layer"))

    def _layer_cells(
        self, layer: int, length: int | None, fmt: str, scale: str, rounding: Rounding
    ) -> dict[str, float]:
        _, kv, _, _ = self._loaded(layer, length)
        encoded = self._stored(layer, length, fmt, scale).encoded
        oracle, form = self._oracle(layer, length, HEAT_STEPS), self._format(layer, length, fmt, scale, HEAT_STEPS)
        stage = self._stage(layer, length, fmt, scale, rounding, HEAT_STEPS)
        relative = metrics.error_split(oracle, form, stage, stage).relative()
        return {
            "max": float(kv.abs().max()),
            "share_clipped": encoded.counters.share("saturated"),
            "share_flushed": encoded.counters.share("flushed"),
            "round_trip_error": metrics.relative_error(decode(encoded), kv),
            "format_error": relative["format"],
            "stage_error": relative["stage"],
            "both": relative["total"],
        }

    # One row.

    def tokens(self, s: Settings, step: int, head: int) -> pd.DataFrame:
        """Scores and probabilities of one row: token, score_oracle, score_format, p_oracle, p_stage.

        Scores are logits after sm_scale, natural units. p_stage is what the stage multiplies with V, over its row sum.
        """
        q, kv, first, lens = self._loaded(s.layer, s.length)
        held = self._stored(s.layer, s.length, s.format, s.scale)
        window = slice(first[step], first[step] + lens[step])
        exact = self.source.sm_scale * (kv[window].double() @ q[step, head].double())
        scale = self.source.sm_scale * held.q_scale * held.kv_scale
        stored = scale * (_real(held.kv[window]) @ _real(held.q[step, head]))
        return pd.DataFrame(
            {
                "token": np.arange(window.start, window.stop),
                "score_oracle": exact.numpy(),
                "score_format": stored.numpy(),
                "p_oracle": exact.softmax(0).numpy(),
                "p_stage": stage_probabilities(stored, s.rounding).numpy(),
            }
        )

    def causes(self, s: Settings, step: int, head: int) -> pd.DataFrame:
        """Where the error of one row arose: cause, relative_error (‖difference‖ / ‖oracle‖), gain.

        Each cause is the difference that switching it on makes, in the order scores, values, P, accumulator, output,
        kernel; as vectors they add up to the row's total error.
        """
        _, kv, first, lens = self._loaded(s.layer, s.length)
        table = self.tokens(s, step, head)
        window = slice(first[step], first[step] + lens[step])
        p = torch.tensor(table["score_format"].to_numpy()).softmax(0)
        key = (s.layer, s.length, s.format, s.scale)
        oracle = self._oracle(s.layer, s.length)[step, head]
        chain = [oracle, p @ kv[window, :D_V].double(), self._format(*key)[step, head]]
        full = s.rounding
        no_out = replace(full, out_format=None)
        for rounding in (replace(no_out, pv_accumulator=None, qk_accumulator=None), no_out, full):
            chain.append(self._stage(*key, rounding)[step, head])
        chain.append(chain[-1] + self.split(s).implementation[step, head])
        size = oracle.norm()
        rows = []
        for name, before, after in zip(CAUSES, chain[:-1], chain[1:], strict=True):
            step_error = after - before
            rows.append(
                {
                    "cause": CAUSE_WORDS[name],
                    "relative_error": float(step_error.norm() / size),
                    "gain": float((step_error @ oracle) / size**2),
                }
            )
        return pd.DataFrame(rows if has_kernel(s) else rows[:-1])

    def tiles(self, s: Settings, step: int, head: int) -> pd.DataFrame:
        """Which tokens the error of one row comes from, a row a tile of 64: first (token), share (of the squared
        error, before accumulator and output rounding), probability (oracle's, of the tile)."""
        table = self.tokens(s, step, head)
        _, kv, first, lens = self._loaded(s.layer, s.length)
        held = self._stored(s.layer, s.length, s.format, s.scale)
        window = slice(first[step], first[step] + lens[step])
        tiles = -(-lens[step] // ops.BLOCK_N)

        def summed(p: str, v: Tensor) -> Tensor:
            pad = tiles * ops.BLOCK_N - lens[step]
            weights = torch.nn.functional.pad(torch.tensor(table[p].to_numpy()), (0, pad))
            values = torch.nn.functional.pad(v, (0, 0, 0, pad))
            return torch.bmm(weights.view(tiles, 1, -1), values.view(tiles, -1, D_V))[:, 0]

        values = _real(held.kv[window])[:, :D_V] * held.kv_scale
        error = summed("p_stage", values) - summed("p_oracle", kv[window, :D_V].double())
        squared = (error**2).sum(-1)
        starts = np.arange(tiles) * ops.BLOCK_N
        return pd.DataFrame(
            {
                "first": starts + window.start,
                "share": (squared / squared.sum().clamp(min=1e-300)).numpy(),
                "probability": np.add.reduceat(table["p_oracle"].to_numpy(), starts),
            }
        )


def stage_probabilities(scores: Tensor, rounding: Rounding) -> Tensor:
    """What multiplies V in the stage reference, over the divisor: P in its format, by tile and split, weights [n].

    Without the accumulators' effect on scores.
    """
    n, block = len(scores), rounding.block_n
    tiles = -(-n // block)
    logits = torch.nn.functional.pad(scores, (0, tiles * block - n), value=-math.inf).view(tiles, block)
    running = logits.amax(-1)
    for begin, end in split_bounds(n, None, block):
        part = slice(begin // block, -(-end // block))
        running[part] = running[part].cummax(-1).values
    p = (logits - running[:, None]).exp() * rounding.p_scale
    if rounding.p_format is not None:
        p = round_to(p, rounding.p_format)
    p = p * (running - running.max()).exp()[:, None]
    return (p / p.sum()).flatten()[:n]


def _real(x: Tensor) -> Tensor:
    return decode_element(x.view(torch.uint8), "e4m3") if x.dtype == torch.float8_e4m3fn else x.to(torch.float64)


def _windows(kv: Tensor, first: list[int], lens: list[int]) -> Tensor:
    """kv [n, 576] as [steps, longest, 576]: row i holds its `lens` tokens from `first` on, and others after them."""
    if not any(first):
        return kv[: max(lens)].expand(len(lens), -1, -1)
    at = (torch.tensor(first)[:, None] + torch.arange(max(lens))).clamp(max=len(kv) - 1)
    return kv.view(torch.uint8)[at].view(kv.dtype) if kv.element_size() == 1 else kv[at]


def _chosen(split: metrics.ErrorSplit, s: Settings) -> metrics.ErrorSplit:
    steps = slice(None) if s.step is None else slice(s.step, s.step + 1)
    heads = slice(None) if s.head is None else slice(s.head, s.head + 1)
    vectors = (split.oracle, split.format, split.stage, split.implementation, split.total)
    return metrics.ErrorSplit(*(x[steps, heads] for x in vectors))
