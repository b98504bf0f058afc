# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""What the explorer looks at: activations captured from a model, or drawn ones.

A captured source is a file such as data/captures/tiny-mla.safetensors. One with all layers of a checkpoint is made on
first use (seconds for data/tiny-mla) and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
import torch
from torch import Tensor

from mla_kernels.cases import DISTRIBUTIONS, SM_SCALE
from mla_kernels.formats import D

if TYPE_CHECKING:
    from mla_kernels.model import Capture

__all__ = ["DRAWN", "Source", "captured", "drawn", "from_capture", "open_source"]

DRAWN = "drawn"  # the name of the source that has the named distributions for layers
ROOT = Path(__file__).resolve().parents[2]
STEPS = 8  # decode steps shown of a capture
DRAWN_HEADS, DRAWN_STEPS = 4, 2
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Source:
    """Queries and caches by layer.

    load(layer, length): (q [steps, h, 576], kv [n, 576], first [steps], lens [steps]) in bf16; step i sees the `lens`
    tokens of kv from `first` on, at most `length` of them (None: all there are). `unit`: what a step is called.
    """

    name: str
    what: str
    layers: tuple[str, ...]
    heads: int
    steps: tuple[int, ...]
    lengths: tuple[int, ...]
    sm_scale: float
    unit: str
    load: Callable[[int, int | None], tuple[Tensor, Tensor, list[int], list[int]]]


def open_source(name: str) -> Source:
    """`drawn`, a capture file, or a checkpoint (a folder or a hub id, as `model.load_model` takes it)."""
    if name == DRAWN:
        return drawn()
    inside = ROOT / name
    place = inside if inside.exists() else Path(name)
    if place.is_file():
        return captured(place)
    return captured(_cached_capture(str(place) if place.exists() else name), name=place.name)


def drawn(seed: int = 0) -> Source:
    """The named distributions of `mla_kernels.cases`, each in place of a layer; contexts as long as asked for."""
    names = tuple(DISTRIBUTIONS)

    def load(layer: int, length: int | None) -> tuple[Tensor, Tensor, list[int], list[int]]:
        distribution = DISTRIBUTIONS[names[layer]]
        n = length or 1024
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(DRAWN_STEPS, DRAWN_HEADS, D, generator=generator) * distribution.q_std
        kv = distribution.kv(generator, n)
        return q.to(torch.bfloat16), kv.to(torch.bfloat16), [0] * DRAWN_STEPS, [n] * DRAWN_STEPS

    return Source(
        DRAWN, "drawn at random, by named distribution", names, DRAWN_HEADS, tuple(range(DRAWN_STEPS)),
        LENGTHS, SM_SCALE, "step", load,
    )  # fmt: skip


def captured(path: str | Path, *, name: str = "", steps: int = STEPS) -> Source:
    """A capture file: its layers, and `steps` of its positions, evenly spread, the last one among them."""
    from safetensors import safe_open

    from mla_kernels.model import load_capture

    with safe_open(path, "pt") as file:
        about = json.loads((file.metadata() or {}).get("about", "{}"))
        keys = list(file.keys())
        positions = file.get_tensor("positions").long().tolist()
        layers = sorted(int(key.split(".")[1]) for key in keys if key.endswith(".q"))
        heads = file.get_slice(f"layers.{layers[0]}.q").get_shape()[1]
    every = max(1, len(positions) // steps)
    chosen = positions[::-1][::every][:steps][::-1]

    def load(layer: int, length: int | None) -> tuple[Tensor, Tensor, list[int], list[int]]:
        found, _ = load_capture(path, layers[layer])
        lens = [min(length or t + 1, t + 1) for t in chosen]
        kv = torch.cat((found["latent"], found["rope"]), -1)
        return found["q"][chosen], kv, [t + 1 - n for t, n in zip(chosen, lens, strict=True)], lens

    longest = chosen[-1] + 1
    lengths = tuple(n for n in LENGTHS if n < longest)
    return Source(
        name or Path(path).stem, f"captured, {longest} tokens", tuple(map(str, layers)), heads, tuple(chosen), lengths,
        float(about.get("sm_scale", SM_SCALE)), "step", load,
    )  # fmt: skip


def from_capture(capture: Capture, *, steps: int = STEPS) -> Source:
    """The first prompt of a capture that is in memory (`model.capture`), without loading its model again."""
    first = next(capture.prompts())
    longest, heads, _ = first.layers[0].q.shape
    chosen = list(range(longest - 1, -1, -max(1, longest // steps)))[:steps][::-1]

    def load(layer: int, length: int | None) -> tuple[Tensor, Tensor, list[int], list[int]]:
        held = first.layers[layer]
        lens = [min(length or t + 1, t + 1) for t in chosen]
        return held.q[chosen], held.kv, [t + 1 - n for t, n in zip(chosen, lens, strict=True)], lens

    return Source(
        first.model, f"captured, {longest} tokens", tuple(str(i) for i in range(len(first.layers))), heads,
        tuple(chosen), tuple(n for n in LENGTHS if n < longest), first.sm_scale, "step", load,
    )  # fmt: skip


def _cached_capture(checkpoint: str, *, documents: str = "data/gsm-tiny/documents.jsonl", tokens: int = 1024) -> Path:
    """A capture of all layers of a checkpoint, from the cache folder where it is there already."""
    text = json.loads((ROOT / documents).read_text(encoding="utf-8").splitlines()[0])["text"]
    place = _cache_folder() / f"{Path(checkpoint).name}-{_key(checkpoint, text, tokens)}.safetensors"
    if not place.is_file():
        _capture(checkpoint, text, tokens, place)
    return place


def _key(checkpoint: str, text: str, tokens: int) -> str:
    """Changes with the checkpoint's files (name, size, time), the text and what a capture file holds."""
    digest = hashlib.sha256(f"2 {checkpoint} {tokens} {text}".encode())
    for path in sorted(Path(checkpoint).glob("*")) if Path(checkpoint).is_dir() else ():
        digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    """The user's cache folder; a temporary one where that cannot be written."""
    folder = Path(platformdirs.user_cache_dir("mla-kernels", appauthor=False)) / "captures"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"mla-kernels-captures-{os.geteuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _capture(checkpoint: str, text: str, tokens: int, place: Path, positions: Sequence[int] | None = None) -> None:
    from safetensors.torch import save_file

    from mla_kernels import model as study

    model = study.load_model(checkpoint)
    ids = model.tokens(text)[:tokens]
    found = study.capture(model, [ids])
    step = max(1, len(ids) // 16)
    chosen = torch.tensor(positions or range(len(ids) - 1, -1, -step)[:16][::-1], dtype=torch.int32)
    tensors = {"positions": chosen}
    for i, layer in enumerate(found.layers):
        tensors[f"layers.{i}.q"] = layer.q[chosen.long()].contiguous()
        tensors[f"layers.{i}.latent"] = layer.latent.contiguous()
        tensors[f"layers.{i}.rope"] = layer.rope.contiguous()
    about = {"data_sha256": found.data_sha256, "sm_scale": found.sm_scale}
    part = place.with_suffix(f".{os.getpid()}")
    save_file(tensors, part, metadata={"about": json.dumps(about)})
    os.replace(part, place)
