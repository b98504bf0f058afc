# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""What a cache format does to a model: captured activations, per-layer errors, whole-model effects, answers.

`load_model`, `attend` and the names of the formats are those of `mla_kernels.absorbed`; `generate` and
`answer_problems` those of `mla_kernels.generation`; scales are kept in files by `mla_kernels.calibration`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_kernels import metrics
from mla_kernels.absorbed import (
    CHOICES,
    DOCUMENTED_CHOICE,
    Kernel,
    Model,
    attend,
    check_scales,
    dense_attention,
    format_names,
    load_model,
    logits_of,
    project_out,
    run_layers,
)
from mla_kernels.calibration import Scales
from mla_kernels.formats import D_V, FORMATS, amax_scale, decode, encode
from mla_kernels.generation import answer_problems, generate
from mla_kernels.ops import mla_decode

__all__ = [
    "CHOICES",
    "DOCUMENTED_CHOICE",
    "Capture",
    "Comparison",
    "LayerCapture",
    "Model",
    "Propagated",
    "answer_problems",
    "attend",
    "calibrate",
    "capture",
    "compare",
    "generate",
    "layer_sensitivity",
    "load_capture",
    "load_model",
    "propagated",
    "teacher_forced",
]


@dataclass(frozen=True)
class LayerCapture:
    """One layer: q [T, h, 576] absorbed, latent [T, 512], rope [T, 64] in bf16; out [T, h, 512] float32, exact."""

    q: Tensor
    latent: Tensor
    rope: Tensor
    out: Tensor

    @property
    def kv(self) -> Tensor:
        """[T, 576]: what a cache row holds, latent first."""
        return torch.cat((self.latent, self.rope), -1)


@dataclass(frozen=True)
class Capture:
    """Activations of all layers, the prompts one after the other along T. `tokens` are the prompts' ids."""

    layers: tuple[LayerCapture, ...]
    tokens: tuple[Tensor, ...]
    sm_scale: float
    model: str

    @property
    def data_sha256(self) -> str:
        """Hash of the prompts' token ids."""
        digest = hashlib.sha256()
        for ids in self.tokens:
            digest.update(repr(ids.tolist()).encode())
        return digest.hexdigest()

    def prompts(self) -> Iterator[Capture]:
        """A capture of each prompt alone: positions count from its own start."""
        start = 0
        for ids in self.tokens:
            part = slice(start, start + len(ids))
            start += len(ids)
            layers = tuple(LayerCapture(x.q[part], x.latent[part], x.rope[part], x.out[part]) for x in self.layers)
            yield Capture(layers, (ids,), self.sm_scale, self.model)


def capture(model: Model, prompts: Sequence[str | Sequence[int] | Tensor]) -> Capture:
    """Run the prompts with exact attention and keep what each layer's decode kernel would be given."""
    parts: list[list[LayerCapture]] = [[] for _ in range(model.layers)]
    tokens = [model.tokens(prompt) for prompt in prompts]
    if not tokens:
        raise ValueError("prompts: expected at least one, got none")

    def attention(layer: int, q: Tensor, kv: Tensor) -> Tensor:
        out = dense_attention(q[0], kv[0], model.sm_scale)
        q16, kv16 = q[0].to(torch.bfloat16), kv[0].to(torch.bfloat16)
        parts[layer].append(LayerCapture(q16, kv16[:, :D_V].clone(), kv16[:, D_V:].clone(), out))
        return out[None]

    for ids in tokens:
        run_layers(model, ids[None], torch.arange(len(ids), device=ids.device)[None], attention)
    layers = tuple(
        LayerCapture(*(torch.cat([getattr(p, name) for p in part]) for name in ("q", "latent", "rope", "out")))
        for part in parts
    )
    return Capture(layers, tuple(tokens), model.sm_scale, model.name)


def load_capture(path: str | Path, layer: int) -> tuple[dict[str, Tensor], list[int]]:
    """(activations, positions) of one layer of a file such as data/captures/tiny-mla.safetensors.

    Activations: q [T, h, 576], latent [T, 512], rope [T, 64]; q is NaN outside `positions`, of which alone it is kept.
    `cases.captured_inputs(activations, positions=positions[-4:])` makes the operator's inputs of them.
    """
    from safetensors.torch import load_file

    tensors = load_file(path)
    if f"layers.{layer}.q" not in tensors:
        held = sorted(int(name.split(".")[1]) for name in tensors if name.endswith(".q"))
        raise ValueError(f"layer: expected one of {held}, which {Path(path).name} holds, got {layer}")
    kept, positions = tensors[f"layers.{layer}.q"], tensors["positions"].long()
    latent, rope = tensors[f"layers.{layer}.latent"], tensors[f"layers.{layer}.rope"]
    q = torch.full((len(latent), *kept.shape[1:]), float("nan"), dtype=kept.dtype)
    q[positions] = kept
    return {"q": q, "latent": latent, "rope": rope}, positions.tolist()


def calibrate(source: Capture) -> Scales:
    """Per-layer scales from the largest magnitudes of a capture: amax / 448; 1.0 for a layer of zeros."""
    return Scales(
        tuple(amax_scale(layer.q) for layer in source.layers),
        tuple(amax_scale(layer.kv) for layer in source.layers),
        source.data_sha256,
        source.model,
    )


def teacher_forced(
    source: Capture,
    fmt: str = "e4m3",
    scales: Scales | None = None,
    *,
    model: Model | None = None,
    kernel: Kernel = mla_decode,
) -> list[dict[str, Any]]:
    """Per layer, on the same captured inputs: attention with the cache in `fmt` against bf16. One row a layer.

    The columns of `metrics.layer_row` (output_error is that of the latent output [T, h, 512]), and `q_scale`,
    `q_share_clipped`, `q_share_flushed`, `q_round_trip_error`, `exact_error` (fmt against exact attention) and, given
    `model`, `hidden_error` (after W_UV and o_proj). `scales` None: amax of the capture. A layer with NaN stays, its
    errors are NaN.
    """
    check_scales(scales, len(source.layers))
    parts = [list(part.layers) for part in source.prompts()]
    rows = []
    for i, layer in enumerate(source.layers):
        one_scale = fmt == "e4m3"
        q_scale = None if not one_scale else scales.q_scale[i] if scales else amax_scale(layer.q)
        kv_scale = None if not one_scale else scales.kv_scale[i] if scales else amax_scale(layer.kv)
        run = partial(attend, sm_scale=source.sm_scale, kernel=kernel)
        ref = torch.cat([run(p[i].q, p[i].kv) for p in parts])
        out = torch.cat([run(p[i].q, p[i].kv, fmt=fmt, q_scale=q_scale, kv_scale=kv_scale) for p in parts])
        row = metrics.layer_row(i, layer.kv, FORMATS.get(fmt, "bf16"), kv_scale, out=out, out_ref=ref)
        if one_scale:
            q = encode(layer.q, "e4m3", q_scale)
            row |= {"q_scale": q_scale, "q_share_clipped": q.counters.share("saturated")}
            row |= {"q_share_flushed": q.counters.share("flushed")}
            row |= {"q_round_trip_error": metrics.relative_error(decode(q), layer.q)}
        row["exact_error"] = metrics.relative_error(out, layer.out)
        if model is not None:
            attention = model.hf.model.layers[i].self_attn
            with torch.no_grad():
                ours, theirs = project_out(attention, out[None]), project_out(attention, ref[None])
            row["hidden_error"] = metrics.relative_error(ours, theirs)
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Propagated:
    """A whole run: per prompt, logits [T, vocabulary] and hidden [layers, T, hidden] after each layer, float32."""

    formats: tuple[str, ...]
    logits: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]


def propagated(
    model: Model,
    prompts: Sequence[str | Sequence[int] | Tensor],
    formats: str | Sequence[str] = "e4m3",
    scales: Scales | None = None,
    *,
    kernel: Kernel = mla_decode,
) -> Propagated:
    """Run the prompts with every attention replaced by absorbed decode over a cache in `formats` (one, or one a layer).

    Errors of a layer reach all later ones. `scales` None: each prompt's own amax in each `e4m3` layer.
    """
    names = format_names(formats, model.layers)
    check_scales(scales, model.layers)

    def attention(layer: int, q: Tensor, kv: Tensor) -> Tensor:
        own = scales is not None and names[layer] == "e4m3"
        out = attend(
            q[0],
            kv[0],
            sm_scale=model.sm_scale,
            fmt=names[layer],
            q_scale=scales.q_scale[layer] if own and scales else None,
            kv_scale=scales.kv_scale[layer] if own and scales else None,
            kernel=kernel,
        )
        return out[None]

    all_logits, states = [], []
    for prompt in prompts:
        ids, kept = model.tokens(prompt), list[Tensor]()
        positions = torch.arange(len(ids), device=ids.device)[None]

        def keep(_: int, x: Tensor, kept: list[Tensor] = kept) -> None:
            kept.append(x[0].float())

        x = run_layers(model, ids[None], positions, attention, keep)
        all_logits.append(logits_of(model, x)[0])
        states.append(torch.stack(kept))
    return Propagated(names, tuple(all_logits), tuple(states))


@dataclass(frozen=True)
class Comparison:
    """`layers`: relative error of the hidden state after each layer; `kl`: `metrics.kl_summary` over all positions;
    `by_position`: `metrics.kl_by_position`, positions counted in each prompt (up to the shortest)."""

    layers: list[dict[str, Any]]
    kl: dict[str, float]
    by_position: list[dict[str, float]]


def compare(ours: Propagated, reference: Propagated) -> Comparison:
    """What the formats of `ours` do to the model, against `reference` on the same prompts."""
    if [x.shape for x in ours.logits] != [x.shape for x in reference.logits]:
        raise ValueError("ours: expected the prompts of reference, got logits of other shapes")
    layers = [
        {
            "layer": i,
            "format": ours.formats[i],
            "hidden_error": metrics.relative_error(
                torch.cat([x[i] for x in ours.hidden]), torch.cat([x[i] for x in reference.hidden])
            ),
        }
        for i in range(len(ours.formats))
    ]
    shortest = min(len(x) for x in ours.logits)
    by_position = metrics.kl_by_position(
        torch.stack([x[:shortest] for x in ours.logits]), torch.stack([x[:shortest] for x in reference.logits])
    )
    return Comparison(layers, metrics.kl_summary(torch.cat(ours.logits), torch.cat(reference.logits)), by_position)


def layer_sensitivity(
    model: Model,
    prompts: Sequence[str | Sequence[int] | Tensor],
    fmt: str = "e4m3",
    scales: Scales | None = None,
    *,
    kernel: Kernel = mla_decode,
) -> list[dict[str, Any]]:
    """One layer at a time in `fmt`, the others in bf16: what that layer alone does to the model. One row a layer.

    Columns: layer and those of `metrics.kl_summary`, against all layers in bf16. `metrics.layers_to_keep(rows,
    by="kl_mean", limit=…)` names the layers to keep in bf16, worst first.
    """
    run = partial(propagated, model, prompts, scales=scales, kernel=kernel)
    reference = run("bf16")
    rows = []
    for i in range(model.layers):
        ours = run([fmt if i == j else "bf16" for j in range(model.layers)])
        rows.append({"layer": i, **compare(ours, reference).kl})
    return rows
