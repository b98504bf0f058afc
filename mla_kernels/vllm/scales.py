# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Scales of vLLM's MLA layers: checked once they are known, and read from a file of `mla_kernels.calibration`.

real = stored * scale. A layer holds q_scale, k_scale and v_scale, each as a tensor on the device (`_k_scale`), which
the kernels read when they run, and as a number on the host (`_k_scale_float`). MLA keeps one latent, so k_scale serves
K and V.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from mla_kernels.calibration import ScaleReport, load_scales

__all__ = ["check_layer", "is_pending", "load_into", "warn_unused"]

#: A JSON file of save_scales, a safetensors file or a checkpoint folder; with STRICT=1 anything missing is an error.
PATH = "MLA_KERNELS_SCALES"
STRICT = "MLA_KERNELS_SCALES_STRICT"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

logger = logging.getLogger("vllm.mla_kernels")


def is_pending(layer: Any) -> bool:
    """Whether vLLM will still measure this layer's scales, in its first forward pass (calculate_kv_scales)."""
    return bool(getattr(layer, "calculate_kv_scales", False))


def check_layer(name: str, layer: Any, *, same_v: bool = True) -> None:
    """ValueError, with the layer's name, for a scale that is not a finite number above 0, or a v_scale of its own.

    `same_v` is False where vLLM measured the scales: its v_scale then differs by a constant, and nothing is written or
    read with it.
    """
    values = {key: float(getattr(layer, f"_{key}_float")) for key in ("q_scale", "k_scale", "v_scale")}
    for key, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"{name}: {key}: expected a finite number above 0, got {value}; real = stored * scale, calibrate it, "
                f"or give scales with {PATH}=file"
            )
    if same_v and values["v_scale"] != values["k_scale"]:
        raise ValueError(
            f"{name}: v_scale: expected k_scale, {values['k_scale']}, got {values['v_scale']}; MLA has K and V in the "
            "same bytes: calibrate one scale for both"
        )


def _fill(layer: Any, key: str, value: float) -> None:
    getattr(layer, f"_{key}").fill_(value)
    setattr(layer, f"_{key}_float", float(value))
    on_host = getattr(layer, f"_{key}_cpu", None)
    if on_host is not None:
        on_host.fill_(value)


def load_into(layers: Mapping[str, Any], total: int) -> ScaleReport | None:
    """Put the scales of the file named by MLA_KERNELS_SCALES into `layers` (by name), of a model with `total` layers.

    Returns the report on the file, None where the variable is not set. Layers of an index past `total` (draft layers)
    keep theirs. Raises FileNotFoundError and ValueError as `load_scales` does.
    """
    path = os.environ.get(PATH, "")
    if not path:
        return None
    loaded, report = load_scales(path, total, strict=os.environ.get(STRICT, "0") == "1")
    kept = []
    for name, layer in layers.items():
        match = _LAYER.search(name)
        if match is None or int(match.group(1)) >= total:
            kept.append(name)
            continue
        index = int(match.group(1))
        for key, value in (("q_scale", loaded.q_scale), ("k_scale", loaded.kv_scale), ("v_scale", loaded.kv_scale)):
            _fill(layer, key, value[index])
        layer.calculate_kv_scales = False
    text = f"; kept as they were: {', '.join(kept)}" if kept else ""
    logger.info("%s: %s%s", os.path.basename(path), report, text)
    return report


def warn_unused(layers: Mapping[str, Any]) -> None:
    """Warn about layers with a 16-bit cache whose scales are not 1: they have no effect there."""
    unused = [name for name, layer in layers.items() if layer._k_scale_float != 1.0 or layer._q_scale_float != 1.0]
    if unused:
        logger.warning(
            "scales of %s are not used: the cache is not fp8; pass kv_cache_dtype=fp8 to use them", ", ".join(unused)
        )
