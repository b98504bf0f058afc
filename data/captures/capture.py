# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Write data/captures/tiny-mla.safetensors: real activations for the `captured` input distribution.

    python data/captures/capture.py

The first 1024 tokens of the first price-list document of data/gsm-tiny through data/tiny-mla, layers 1 and 4, in bf16:
`layers.<i>.latent` [1024, 512] and `layers.<i>.rope` [1024, 64] of every position, `layers.<i>.q` [64, 4, 576]
(absorbed) of every 16th, `positions` [64]. `mla_kernels.model.load_capture` reads it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from mla_kernels import model as study

HERE = Path(__file__).parent
LAYERS = (1, 4)
TOKENS = 1024


def main() -> None:
    model = study.load_model(HERE.parent / "tiny-mla")
    lines = (HERE.parent / "gsm-tiny" / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    index, text = next((i, t) for i, line in enumerate(lines) if (t := json.loads(line)["text"]).startswith("Prices:"))
    captured = study.capture(model, [model.tokens(text)[:TOKENS]])
    positions = torch.arange(15, TOKENS, 16, dtype=torch.int32)
    tensors = {"positions": positions}
    for i in LAYERS:
        layer = captured.layers[i]
        tensors[f"layers.{i}.q"] = layer.q[positions.long()].contiguous()
        tensors[f"layers.{i}.latent"] = layer.latent
        tensors[f"layers.{i}.rope"] = layer.rope
    about = {"document": index, "data_sha256": captured.data_sha256, "sm_scale": captured.sm_scale}
    # One metadata entry: safetensors writes several in any order, and the file would not be the same twice.
    save_file(tensors, HERE / "tiny-mla.safetensors", metadata={"about": json.dumps(about)})


if __name__ == "__main__":
    main()
