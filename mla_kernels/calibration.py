# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Per-layer scales of queries and cache: kept in a JSON file, read back with an account of what was found.

real = stored * scale. One `kv_scale` a layer serves K and V, which are the same bytes. Scales are also read from a
checkpoint's safetensors, under the names that checkpoints use for a per-layer cache scale.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["ScaleReport", "Scales", "load_scales", "save_scales", "uniform_scales"]

FORMAT = "mla_kernels scales 1"
#: Names of a layer's scales after `model.layers.<i>.`: ours first, then those that checkpoints carry.
KV_NAMES = (
    "self_attn.kv_scale",
    "self_attn.k_scale",
    "self_attn.attn.k_scale",
    "self_attn.mla_attn.k_scale",
    "self_attn.k_proj.k_scale",
)
Q_NAMES = ("self_attn.q_scale", "self_attn.attn.q_scale", "self_attn.mla_attn.q_scale")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
_SCALE_LIKE = re.compile(r"(?:^|[._])(q|k|v|kv|key|query|value|cache)[a-z_]*_?scale$")


@dataclass(frozen=True)
class Scales:
    """Scales of each layer, in order, and what they were measured on.

    `data_sha256` is the hash of the calibration tokens (empty where the scales come from a checkpoint), `model` the
    name that they were measured on.
    """

    q_scale: tuple[float, ...]
    kv_scale: tuple[float, ...]
    data_sha256: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        if len(self.q_scale) != len(self.kv_scale):
            raise ValueError(
                f"q_scale: expected one a layer as kv_scale has, {len(self.kv_scale)}, got {len(self.q_scale)}"
            )
        for name, values in (("q_scale", self.q_scale), ("kv_scale", self.kv_scale)):
            for layer, value in enumerate(values):
                if not _usable(value):
                    raise ValueError(f"{name}: expected a positive finite number in layer {layer}, got {value!r}")

    def __len__(self) -> int:
        return len(self.kv_scale)


@dataclass(frozen=True)
class ScaleReport:
    """What a scale file held, for `layers` layers.

    `found` counts layers with a usable kv_scale; `missing` names the expected keys that are not there (kv_scale; and
    q_scale where some layers have one); `unknown` names scale-like keys that no name here matches; `flags` are
    sentences about suspicious contents.
    """

    found: int
    layers: int
    missing: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.found == self.layers and not self.missing and not self.flags

    def __str__(self) -> str:
        text = f"kv_scale found for {self.found} of {self.layers} layers"
        if self.missing:
            text += f"; missing: {', '.join(self.missing)}"
        if self.unknown:
            text += f"; not understood: {', '.join(self.unknown)}"
        return text + "".join(f"; {flag}" for flag in self.flags)


def uniform_scales(layers: int, q_scale: float = 1.0, kv_scale: float = 1.0) -> Scales:
    """The same scales in every layer."""
    return Scales((q_scale,) * layers, (kv_scale,) * layers)


def _usable(value: float) -> bool:
    return math.isfinite(value) and value > 0


def save_scales(scales: Scales, path: str | os.PathLike[str]) -> Path:
    """Write the scales as JSON: the same bytes for the same scales, whole or not at all."""
    target = Path(path)
    content = {
        "format": FORMAT,
        "equation": "real = stored * scale",
        "model": scales.model,
        "data_sha256": scales.data_sha256,
        "scales": {
            f"model.layers.{i}.self_attn.{name}": value
            for i, pair in enumerate(zip(scales.q_scale, scales.kv_scale, strict=True))
            for name, value in zip(("q_scale", "kv_scale"), pair, strict=True)
        },
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8", newline="\n")
    os.replace(part, target)
    return target


def load_scales(path: str | os.PathLike[str], layers: int, *, strict: bool = False) -> tuple[Scales, ScaleReport]:
    """Scales for `layers` layers from a JSON file of `save_scales`, a safetensors file, or a checkpoint folder.

    A missing or unusable scale (not positive, not finite) counts as missing and is served as 1.0. Anything wrong is
    warned about, with names; with `strict` it raises ValueError instead. Files that hold 1.0, or 0, in every layer are
    flagged: calibration tools write them where nothing was measured. FileNotFoundError if `path` does not exist.
    """
    source = Path(path)
    if not source.exists():
        raise FileNotFoundError(
            f"path: expected a scale file or a checkpoint folder, {source} is not there; save_scales writes one"
        )
    values, header = _read(source)
    scales, report = _assign(values, layers, header)
    if not report.ok:
        message = f"{source.name}: {report}"
        if strict:
            raise ValueError(f"{message}. Measure scales with calibrate() and save_scales(), or drop strict")
        warnings.warn(f"{message}; what is missing is served as 1.0", UserWarning, stacklevel=2)
    return scales, report


def _read(source: Path) -> tuple[dict[str, float], dict[str, Any]]:
    if source.suffix == ".json":
        content = json.loads(source.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f'{source.name}: expected a file with "format": "{FORMAT}", as save_scales writes it')
        return {name: float(value) for name, value in content["scales"].items()}, content
    from safetensors import safe_open

    files = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{source.name}: expected safetensors files in the folder, got none")
    values: dict[str, float] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (no mapping: iterating it is not supported)
                if _SCALE_LIKE.search(name):
                    tensor = tensors.get_tensor(name)
                    if tensor.numel() == 1:
                        values[name] = float(tensor.to(torch.float64))
    return values, {"model": source.name}


def _assign(values: Mapping[str, float], layers: int, header: Mapping[str, Any]) -> tuple[Scales, ScaleReport]:
    found: dict[tuple[int, str], float] = {}
    shared_v: dict[int, float] = {}
    unknown = []
    for name, value in values.items():
        match = _LAYER.fullmatch(name)
        layer, rest = (int(match.group(1)), match.group(2)) if match else (-1, name)
        kind = "kv_scale" if rest in KV_NAMES else "q_scale" if rest in Q_NAMES else ""
        if kind and 0 <= layer < layers:
            found[layer, kind] = value
        elif rest.replace("v_scale", "k_scale") in KV_NAMES and 0 <= layer < layers:
            shared_v[layer] = value
        else:
            unknown.append(name)
    flags = []
    for kind in ("kv_scale", "q_scale"):
        held = [value for (_, k), value in found.items() if k == kind]
        if held and all(value == 1.0 for value in held):
            flags.append(f"every {kind} is 1.0: nothing was calibrated")
        elif held and all(value == 0.0 for value in held):
            flags.append(f"every {kind} is 0: nothing was calibrated")
        elif bad := [f"layer {i}: {v}" for (i, k), v in sorted(found.items()) if k == kind and not _usable(v)]:
            flags.append(f"unusable {kind} in {', '.join(bad)}")
    other = [i for i, value in sorted(shared_v.items()) if found.get((i, "kv_scale"), value) != value]
    if other:
        flags.append(f"v_scale differs from k_scale in layers {other}: MLA has one cache, k_scale is used for both")
    missing = []
    for kind in ("kv_scale", "q_scale"):
        if kind == "kv_scale" or any(k == kind for _, k in found):
            missing += [f"model.layers.{i}.self_attn.{kind}" for i in range(layers) if (i, kind) not in found]

    def column(kind: str) -> tuple[float, ...]:
        got = (found.get((i, kind), 1.0) for i in range(layers))
        return tuple(value if _usable(value) else 1.0 for value in got)

    count = sum(_usable(found.get((i, "kv_scale"), math.nan)) for i in range(layers))
    scales = Scales(
        column("q_scale"), column("kv_scale"), str(header.get("data_sha256", "")), str(header.get("model", ""))
    )
    return scales, ScaleReport(count, layers, tuple(missing), tuple(unknown), tuple(flags))
