# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""DeepSeek-V2/V3 checkpoints run through absorbed MLA decode: loading, absorption, attention in a cache format.

Absorption. With W = kv_b_proj split into W_UK [h, 128, 512] and W_UV [h, 128, 512], a head's logit against a token is
q_nope·(W_UK c) + q_pe·k_pe = (q_nope W_UK)·c + q_pe·k_pe, so the cache holds only c (512, after kv_a_layernorm) and
k_pe (64, after rotary), and the output is W_UV Σ p c. Every position of a prompt is then one decode row.

The layers, norms, MLPs and rotary embeddings are transformers' own; only the attention between the projections is
replaced. `formats` names what each layer's cache holds:

| name | queries | cache | attention |
| --- | --- | --- | --- |
| `exact` | model dtype | model dtype | float32 in torch, nothing rounded |
| `bf16` | bf16 | bf16 | the operator |
| `e4m3` | e4m3 | e4m3, one scale a layer | the operator |
| `e4m3_token`, `e4m3_group128`, `e5m2` | bf16 | decode(encode(x)) of formats.py | float32 in torch, output in bf16 |
"""

from __future__ import annotations

import difflib
import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_kernels.calibration import Scales
from mla_kernels.formats import D_ROPE, D_V, D, decode, encode
from mla_kernels.ops import mla_decode

__all__ = [
    "CHOICES",
    "DOCUMENTED_CHOICE",
    "PAGE_SIZE",
    "SIMULATED",
    "Kernel",
    "Model",
    "attend",
    "check_scales",
    "dense_attention",
    "format_names",
    "load_model",
    "logits_of",
    "project_out",
    "run_layers",
    "simulated_values",
    "stored_values",
]

#: The checkpoint to name where there is a network: 16 B parameters, 27 layers, 16 heads, bf16.
DOCUMENTED_CHOICE = "deepseek-ai/DeepSeek-V2-Lite-Chat"
ARCHITECTURES = ("deepseek_v2", "deepseek_v3")
SIMULATED = ("e4m3_token", "e4m3_group128", "e5m2")
CHOICES = ("exact", "bf16", "e4m3", *SIMULATED)
PAGE_SIZE = 64
Kernel = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint. `hf` is transformers' model, `tokenizer` its tokenizer (None if it has none)."""

    name: str
    hf: Any = field(repr=False)
    tokenizer: Any = field(repr=False)

    @property
    def layers(self) -> int:
        return len(self.hf.model.layers)

    @property
    def h_q(self) -> int:
        return int(self.hf.config.num_attention_heads)

    @property
    def sm_scale(self) -> float:
        """(128 + 64) ** -0.5, times mscale² of yarn where the checkpoint has it."""
        return float(self.hf.model.layers[0].self_attn.scaling)

    @property
    def device(self) -> torch.device:
        return self.hf.model.embed_tokens.weight.device

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        eos = self.hf.generation_config.eos_token_id
        return () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)

    def tokens(self, prompt: str | Sequence[int] | Tensor) -> Tensor:
        """Token ids [T] of a text, or of ids given as such."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"prompts: expected token ids, since {self.name} has no tokenizer, got a text")
            prompt = self.tokenizer(prompt)["input_ids"]
        ids = torch.as_tensor(prompt, dtype=torch.long).reshape(-1).to(self.device)
        if not ids.numel():
            raise ValueError("prompts: expected at least one token in each, got an empty one")
        return ids


def _missing_folder(name: str) -> FileNotFoundError:
    path = Path(name)
    got = f"{name!r}, which is a file" if path.is_file() else f"{name!r}, which is neither"
    folders = [x.name for x in path.parent.iterdir() if x.is_dir()] if name and path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, folders, 1)
    way_out = f"; the nearest folder beside it is {str(path.parent / near[0])!r}" if near else ""
    return FileNotFoundError(
        f"path_or_id: expected a checkpoint folder or a hub id such as {DOCUMENTED_CHOICE}, got {got}{way_out}"
    )


def _is_hub_id(path_or_id: str | Path) -> bool:
    """owner/name, unless it starts as a path does or its first part is a folder here."""
    match = re.fullmatch(r"(\w[\w.-]*)/[\w.-]+", path_or_id) if isinstance(path_or_id, str) else None
    return match is not None and not Path(match[1]).is_dir()


def _check_device(device: torch.device | str) -> torch.device:
    """ValueError for a device that torch does not have here, or that the operator does not know."""
    try:
        wanted = torch.device(device)
    except RuntimeError:
        wanted = None
    here = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    if wanted is None or (wanted.type if wanted.type != "cuda" else f"cuda:{wanted.index or 0}") not in here:
        raise ValueError(
            f"device: expected one of those that torch has here, {', '.join(here)}, got {str(device)!r}; "
            'pass device="cpu", or install a torch build for your GPU'
        )
    return wanted


def _check_config(folder: Path) -> None:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"path_or_id: expected a checkpoint folder with config.json, got {str(folder)!r} without it; "
            "pass the folder that holds config.json, the weights and the tokenizer"
        )
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"path_or_id: expected JSON in {path}, got {error}; download the file again") from error
    _check_architecture(content.get("model_type") if isinstance(content, dict) else None)


def _check_architecture(model_type: object) -> None:
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"path_or_id: expected an architecture of {', '.join(ARCHITECTURES)} (MLA), got {model_type!r} as "
            "model_type of its config.json; pass another checkpoint"
        )


def _check_weights(folder: Path) -> None:
    """All weight files are there and whole; only their headers are read."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files and not any(folder.glob("pytorch_model*.bin")):
        raise FileNotFoundError(
            f"path_or_id: expected weights (*.safetensors) in {str(folder)!r}, got none; download them into it"
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = {folder / name for name in json.loads(index.read_text("utf-8"))["weight_map"].values()}
        if lost := sorted(named - set(files)):
            raise FileNotFoundError(
                f"path_or_id: expected all weight files that {index} names, got none called {lost[0].name} "
                f"({len(lost)} missing); download them"
            )
    for path in files:
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"path_or_id: expected a whole safetensors file, got {path} of {path.stat().st_size} bytes ({error}); "
                "download it again"
            ) from error


def load_model(
    path_or_id: str | Path, *, dtype: torch.dtype | str = "auto", device: torch.device | str = "cpu"
) -> Model:
    """Load a DeepSeek-V2/V3-architecture checkpoint from a local folder or a hub id.

    dtype: "auto" computes in bf16 on a GPU and in float32 on a CPU (the weights are the checkpoint's either way; many
    CPUs are slow in bf16); what the operator sees is rounded to the cache's format regardless. Hub ids need a network
    or a filled cache; see `DOCUMENTED_CHOICE`.

    owner/name is a hub id unless owner is a folder here. Without a tokenizer (UserWarning) prompts are token ids.

    Raises FileNotFoundError for a missing folder, configuration or weight file, OSError for a hub id that cannot be
    had, ValueError for a broken file, another architecture, another geometry than 512 latent and 64 rope dims, or a
    device that is not here.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    device, name = _check_device(device), str(path_or_id)
    folder = Path(name) if name and Path(name).is_dir() else None
    if folder is not None:
        _check_config(folder)
    elif not _is_hub_id(path_or_id):
        raise _missing_folder(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except OSError as error:
        if folder is not None:
            raise
        raise OSError(
            f"path_or_id: {name!r} is no folder here, and the hub did not give it ({type(error).__name__}: no network, "
            "no such name, or no permission). Use a local folder, such as data/tiny-mla, or download the checkpoint "
            f"first: hf download {name}"
        ) from error
    _check_architecture(config.model_type)
    if (config.kv_lora_rank, config.qk_rope_head_dim) != (D_V, D_ROPE):
        raise ValueError(
            f"path_or_id: expected kv_lora_rank {D_V} and qk_rope_head_dim {D_ROPE}, which the kernels are written "
            f"for, got {config.kv_lora_rank} and {config.qk_rope_head_dim}"
        )
    if folder is not None:
        _check_weights(folder)
    if dtype == "auto":
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    hf: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
    hf = hf.to(device).eval()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        warnings.warn(
            f"path_or_id: expected a tokenizer in {name!r}, got none that loads ({type(error).__name__}); prompts must "
            "be token ids then, not texts",
            UserWarning,
            stacklevel=2,
        )
        tokenizer = None
    return Model(folder.name if folder is not None else name, hf, tokenizer)


def _absorb(attention: Any, hidden: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
    """(q [b, t, h, 576] absorbed and rotated, kv [b, t, 576] normalised and rotated) of one layer."""
    b, t, _ = hidden.shape
    nope, rope = attention.qk_nope_head_dim, attention.qk_rope_head_dim
    if attention.q_lora_rank is None:
        q = attention.q_proj(hidden)
    else:
        q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(hidden)))
    q_nope, q_pe = q.view(b, t, -1, nope + rope).split((nope, rope), -1)
    latent, k_pe = attention.kv_a_proj_with_mqa(hidden).split((attention.kv_lora_rank, rope), -1)
    latent = attention.kv_a_layernorm(latent)
    q_pe, k_pe = _rotate(attention, q_pe.transpose(1, 2), k_pe.view(b, 1, t, rope), rotary)
    q_nope = torch.einsum("bthn,hnl->bthl", q_nope, _up_projection(attention)[:, :nope])
    return torch.cat((q_nope, q_pe.transpose(1, 2)), -1), torch.cat((latent, k_pe.squeeze(1)), -1)


def _up_projection(attention: Any) -> Tensor:
    """kv_b_proj as [h, 128 + 128, 512]: W_UK, then W_UV."""
    width = attention.qk_nope_head_dim + attention.v_head_dim
    return attention.kv_b_proj.weight.view(-1, width, attention.kv_lora_rank)


def _rotate(attention: Any, q_pe: Tensor, k_pe: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
    """Rotary embedding as the checkpoint's architecture does it (V2: complex; V3: cos and sin, interleaved or not)."""
    if attention.config.model_type == "deepseek_v2":
        from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb

        return apply_rotary_emb(q_pe, k_pe, rotary)
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    interleave = getattr(attention.config, "rope_interleave", True)
    return (v3.apply_rotary_pos_emb_interleave if interleave else v3.apply_rotary_pos_emb)(q_pe, k_pe, *rotary)


def project_out(attention: Any, out: Tensor) -> Tensor:
    """[b, t, h, 512] attention output in latent space to [b, t, hidden]."""
    weight = _up_projection(attention)[:, attention.qk_nope_head_dim :]
    values = torch.einsum("bthl,hvl->bthv", out.to(weight.dtype), weight)
    return attention.o_proj(values.flatten(-2))


@torch.no_grad()
def run_layers(
    model: Model,
    tokens: Tensor,
    positions: Tensor,
    attention: Callable[[int, Tensor, Tensor], Tensor],
    after_layer: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Hidden states [b, t, hidden] before the last norm. `attention(layer, q, kv)` gives [b, t, h, 512]."""
    body = model.hf.model
    x = body.embed_tokens(tokens)
    rotary = body.rotary_emb(x, positions)
    for i, layer in enumerate(body.layers):
        q, kv = _absorb(layer.self_attn, layer.input_layernorm(x), rotary)
        x = x + project_out(layer.self_attn, attention(i, q, kv))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        if after_layer is not None:
            after_layer(i, x)
    return x


@torch.no_grad()
def logits_of(model: Model, hidden: Tensor) -> Tensor:
    return model.hf.lm_head(model.hf.model.norm(hidden)).float()


def dense_attention(q: Tensor, kv: Tensor, sm_scale: float, *, first: int = 0, chunk: int = 256) -> Tensor:
    """Exact attention in float32: query i of q [t, h, 576] sees keys 0 … first + i of kv [n, 576]; [t, h, 512]."""
    keys, out = kv.float(), []
    for begin in range(0, q.shape[0], chunk):
        part = q[begin : begin + chunk].float()
        seen = first + begin + part.shape[0]
        scores = torch.einsum("thd,nd->thn", part, keys[:seen]) * sm_scale
        limit = torch.arange(first + begin, seen, device=q.device)
        hidden = torch.arange(seen, device=q.device)[None, :] > limit[:, None]
        scores.masked_fill_(hidden[:, None, :], float("-inf"))
        out.append(torch.einsum("thn,nl->thl", scores.softmax(-1), keys[:seen, :D_V]))
    return torch.cat(out)


def _check_format(fmt: str) -> None:
    if fmt not in CHOICES:
        raise ValueError(f"formats: expected one of {', '.join(CHOICES)}, got {fmt!r}")


def format_names(formats: str | Sequence[str], layers: int) -> tuple[str, ...]:
    names = (formats,) * layers if isinstance(formats, str) else tuple(formats)
    for name in names:
        _check_format(name)
    if len(names) != layers:
        raise ValueError(f"formats: expected one name, or one for each of {layers} layers, got {len(names)}")
    return names


def check_scales(scales: Scales | None, layers: int) -> None:
    if scales is not None and len(scales) != layers:
        raise ValueError(f"scales: expected {layers} layers, got {len(scales)}; calibrate() measures them")


def stored_values(x: Tensor, fmt: str, scale: float | None) -> tuple[Tensor, float]:
    """What the operator takes for real values x: (bf16, 1.0), or (e4m3 codes, scale)."""
    if fmt == "bf16":
        return x.to(torch.bfloat16), 1.0
    encoded = encode(x.to(torch.bfloat16), "e4m3", scale)
    assert encoded.scale is not None
    return encoded.stored, float(encoded.scale)


def simulated_values(kv: Tensor, fmt: str) -> Tensor:
    """decode(encode(x)) of the bf16 values, in float32."""
    return decode(encode(kv.to(torch.bfloat16), fmt)).float()


def attend(
    q: Tensor,
    kv: Tensor,
    *,
    sm_scale: float,
    fmt: str = "bf16",
    q_scale: float | None = None,
    kv_scale: float | None = None,
    kernel: Kernel = mla_decode,
    s_q: int = 8,
) -> Tensor:
    """Attention output of every position of one prompt as decode rows, the cache in `fmt`.

    Args:
        q [T, h, 576], kv [T, 576]: real values, as `capture` gives them. Position t sees keys 0 … t.
        q_scale, kv_scale: for `e4m3`, real = stored * scale; None: amax / 448 of what is given.
        kernel: has the signature of `mla_decode`. The T rows go in groups of `s_q` (1 to 8) query tokens which share
            their pages.

    Returns [T, h, 512], float32 values: those of bf16, except for `exact`.
    """
    _check_format(fmt)
    if fmt == "exact":
        return dense_attention(q, kv, sm_scale)
    if fmt in SIMULATED:
        return dense_attention(q.to(torch.bfloat16), simulated_values(kv, fmt), sm_scale).to(torch.bfloat16).float()
    t, h, _ = q.shape
    rows, pages = -(-t // s_q), -(-(t + s_q - 1) // PAGE_SIZE)
    q_stored, q_scale = stored_values(q, fmt, q_scale)
    kv_stored, kv_scale = stored_values(kv, fmt, kv_scale)
    queries = torch.zeros(rows * s_q, h, D, dtype=q_stored.dtype, device=q.device)
    queries[:t] = q_stored
    cache = torch.zeros(pages * PAGE_SIZE, D, dtype=kv_stored.dtype, device=q.device)
    cache[:t] = kv_stored
    queries = queries.view(rows, s_q, h, D)
    out, _ = kernel(
        queries[..., :D_V],
        queries[..., D_V:],
        cache.view(pages, PAGE_SIZE, D),
        torch.arange(1, rows + 1, dtype=torch.int32, device=q.device) * s_q,
        torch.arange(pages, dtype=torch.int32, device=q.device).expand(rows, pages).contiguous(),
        sm_scale=sm_scale,
        q_scale=q_scale,
        kv_scale=kv_scale,
    )
    return out.reshape(rows * s_q, h, D_V)[:t].float()
