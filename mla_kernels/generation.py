# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Greedy generation over paged caches in any format, through the operator: what a cache format does to answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mla_kernels.absorbed import (
    PAGE_SIZE,
    SIMULATED,
    Kernel,
    Model,
    check_scales,
    dense_attention,
    format_names,
    logits_of,
    run_layers,
    simulated_values,
    stored_values,
)
from mla_kernels.calibration import Scales, uniform_scales
from mla_kernels.formats import D_V, D
from mla_kernels.ops import mla_decode

__all__ = ["answer_problems", "generate"]


class _LayerCache:
    """One layer's paged cache of a `generate` run, written and attended in its format."""

    def __init__(self, fmt: str, blocks: int, device: torch.device, q_scale: float, kv_scale: float) -> None:
        self.fmt = fmt
        self.q_scale, self.kv_scale = (q_scale, kv_scale) if fmt == "e4m3" else (1.0, 1.0)
        dtype = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}.get(fmt, torch.float32)
        self.rows = torch.zeros(blocks * PAGE_SIZE, D, dtype=torch.uint8 if fmt == "e4m3" else dtype, device=device)
        self.rows = self.rows.view(dtype)

    def write(self, kv: Tensor, slots: Tensor) -> None:
        """kv [n, 576] into flat token slots [n]."""
        if self.fmt in SIMULATED:
            kv = simulated_values(kv, self.fmt)
        elif self.fmt != "exact":
            kv, _ = stored_values(kv, self.fmt, self.kv_scale)
        bits = torch.uint8 if self.fmt == "e4m3" else kv.dtype
        self.rows.view(bits)[slots] = kv.view(bits)

    def attend(self, q: Tensor, seq_lens: Tensor, block_table: Tensor, sm_scale: float, kernel: Kernel) -> Tensor:
        """q [b, h, 576], one decode step: [b, h, 512]."""
        if self.fmt in ("bf16", "e4m3"):
            q, q_scale = stored_values(q, self.fmt, self.q_scale)
            cache = self.rows.view(-1, PAGE_SIZE, D)
            options = {"sm_scale": sm_scale, "q_scale": q_scale, "kv_scale": self.kv_scale}
            return kernel(q[..., :D_V], q[..., D_V:], cache, seq_lens, block_table, **options)[0].float()
        pages = self.rows.view(-1, PAGE_SIZE, D)
        q = q if self.fmt == "exact" else q.to(torch.bfloat16)
        out = [
            dense_attention(q[i : i + 1], pages[block_table[i].long()].flatten(0, 1)[:n], sm_scale, first=n - 1)
            for i, n in enumerate(seq_lens.tolist())
        ]
        return torch.cat(out) if self.fmt == "exact" else torch.cat(out).to(torch.bfloat16).float()


def generate(
    model: Model,
    prompts: Sequence[str | Sequence[int] | Tensor],
    *,
    max_new_tokens: int = 256,
    formats: str | Sequence[str] = "bf16",
    scales: Scales | None = None,
    kernel: Kernel = mla_decode,
    stop: Sequence[int] | None = None,
) -> list[list[int]]:
    """Greedy continuations, one list of token ids a prompt (without the stop token), decoded over paged caches.

    As serving engines do, the prompt attends to its own unrounded keys and is written to the cache in the layer's
    format; every later token reads the cache through the kernel. An `e4m3` layer needs `scales`. `formats` as in
    `propagated`, without `e5m2`, whose scale would have to be known before the last token is.
    """
    names = format_names(formats, model.layers)
    check_scales(scales, model.layers)
    if "e4m3" in names and scales is None:
        raise ValueError("scales: expected Scales for e4m3 layers, got None; calibrate(capture(…)) measures them")
    if "e5m2" in names:
        raise ValueError("formats: e5m2 has no scale here; use propagated(), or one of the other formats")
    ids = [model.tokens(prompt) for prompt in prompts]
    stops = set(model.stop_tokens if stop is None else stop)
    blocks = max(-(-(len(x) + max_new_tokens) // PAGE_SIZE) for x in ids)
    # Pages of a prompt are spread over the pool, as they are in an engine, not one after the other.
    tables = torch.arange(len(ids) * blocks, dtype=torch.int32, device=model.device).view(blocks, len(ids)).t()
    tables = tables.contiguous()
    used = scales or uniform_scales(model.layers)
    caches = [
        _LayerCache(name, tables.numel(), model.device, used.q_scale[i], used.kv_scale[i])
        for i, name in enumerate(names)
    ]

    def slots(rows: Tensor, positions: Tensor) -> Tensor:
        return tables[rows, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE

    last = []
    for row, prompt in enumerate(ids):
        positions = torch.arange(len(prompt), device=model.device)
        where = slots(torch.full_like(positions, row), positions)

        def prefill(layer: int, q: Tensor, kv: Tensor, where: Tensor = where) -> Tensor:
            caches[layer].write(kv[0], where)
            return dense_attention(q[0], kv[0], model.sm_scale)[None]

        last.append(logits_of(model, run_layers(model, prompt[None], positions[None], prefill)[:, -1])[0].argmax())
    next_token = torch.stack(last)
    out: list[list[int]] = [[] for _ in ids]
    lengths = torch.tensor([len(x) for x in ids], device=model.device)
    rows = torch.arange(len(ids), device=model.device)
    for step in range(max_new_tokens):
        keep = torch.tensor([int(token) not in stops for token in next_token], device=model.device)
        rows, lengths, next_token = rows[keep], lengths[keep], next_token[keep]
        if not len(rows):
            break
        for row, token in zip(rows.tolist(), next_token.tolist(), strict=True):
            out[row].append(token)
        if step == max_new_tokens - 1:
            break
        where, seq_lens, table = slots(rows, lengths), (lengths + 1).to(torch.int32), tables[rows]

        def decode_step(
            layer: int,
            q: Tensor,
            kv: Tensor,
            where: Tensor = where,
            seq_lens: Tensor = seq_lens,
            table: Tensor = table,
        ) -> Tensor:
            caches[layer].write(kv[:, 0], where)
            return caches[layer].attend(q[:, 0], seq_lens, table, model.sm_scale, kernel)[:, None]

        x = run_layers(model, next_token[:, None], lengths[:, None], decode_step)
        next_token, lengths = logits_of(model, x[:, -1]).argmax(-1), lengths + 1
    return out


def answer_problems(
    model: Model, problems: Sequence[Mapping[str, Any]], *, batch: int = 50, max_new_tokens: int = 320, **options: Any
) -> list[dict[str, Any]]:
    """Answer rows of data/gsm-tiny/test.jsonl greedily, 0-shot; `options` go to `generate`.

    One dict a problem: text, strict_match and flexible_extract (bool), with the two filters of the task: the number
    after `#### `, and the last number.
    """
    rows = []
    for begin in range(0, len(problems), batch):
        part = problems[begin : begin + batch]
        prompts = [f"Question: {problem['question']}\nAnswer:" for problem in part]
        answers = generate(model, prompts, max_new_tokens=max_new_tokens, **options)
        for problem, tokens in zip(part, answers, strict=True):
            text = model.tokenizer.decode(tokens, skip_special_tokens=True).split("\n\n")[0]
            wanted = problem["answer"].rsplit("#### ", 1)[1]
            marked, numbers = re.search(r"#### (-?[0-9.,]+)", text), re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", text)
            strict = bool(marked) and marked.group(1) == wanted if marked else False
            flexible = bool(numbers) and numbers[-1].replace(",", "").replace("$", "").rstrip(".") == wanted
            rows.append({"text": text, "strict_match": strict, "flexible_extract": flexible})
    return rows
