# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""What one would call instead of our operator: other MLA decode kernels, each optional, behind one interface.

Nothing is imported or loaded before a peer is asked for. A peer that is not here, or that does not take a dtype, page
size or head count, says why in words (`missing`, `refuses`), and a table shows these words in place of a time.

`prepare(args)` takes the keyword arguments of `mla_decode` and does once what a serving engine does once a step or a
layer: joining or decoding queries, and the peer's own scheduling metadata. It returns a function without arguments
that makes one call and returns (out [b, s_q, h_q, 512], lse [b, s_q, h_q] natural logarithm, or None).

FlashMLA and FlashAttention 3 are taken from the libraries of the vLLM wheel: from a folder of `set_library_folder`, of
the environment variable MLA_PEERS_DIR, or of an installed vLLM, which is not imported.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_kernels import _vllm_cpu
from mla_kernels.formats import D_ROPE, D_V, D

__all__ = ["PEERS", "Peer", "PeerError", "find", "set_library_folder", "torch_path"]

Arguments = Mapping[str, Any]
Answer = tuple[Tensor, Tensor | None]
Call = Callable[[], Answer]

DTYPE_NAMES = {torch.float8_e4m3fn: "e4m3", torch.bfloat16: "bf16", torch.float16: "fp16"}
FLASHMLA_FP8 = "_flashmla_extension_C.abi3.so"
FLASHMLA_BF16 = "_flashmla_C.abi3.so"
FA3 = "_vllm_fa3_C.abi3.so"
FLASHINFER_WORKSPACE = 128 << 20  # bytes, what its documentation recommends
NOT_INSTALLED = "not installed"

_folder: Path | None = None


class PeerError(RuntimeError):
    """A peer that is not here, or that refuses these arguments; the message names peer and reason."""


def set_library_folder(folder: str | os.PathLike[str] | None) -> None:
    """Take the libraries of the vLLM wheel from `folder`, ahead of MLA_PEERS_DIR and of an installed vLLM."""
    global _folder
    _folder = None if folder is None else Path(folder)


def _vllm_folders() -> list[Path]:
    """Where vLLM is installed; it is found, not imported."""
    spec = importlib.util.find_spec("vllm")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec is not None else []
    return [folder for root in roots for folder in (root, root / "vllm_flash_attn")]


def _library(name: str) -> Path | None:
    """Path of a library of the vLLM wheel, or None."""
    asked = [_folder] if _folder is not None else []
    if os.environ.get("MLA_PEERS_DIR"):
        asked.append(Path(os.environ["MLA_PEERS_DIR"]))
    return next((folder / name for folder in (*asked, *_vllm_folders()) if (folder / name).is_file()), None)


def _load(name: str) -> Any:
    """The operators of a library of the vLLM wheel, loaded once by torch."""
    path = _library(name)
    if path is None:
        raise PeerError(f"{name}: {NOT_INSTALLED}")
    torch.ops.load_library(str(path))
    return getattr(torch.ops, name.removesuffix(".abi3.so"))


def _no_library(name: str) -> str:
    return "" if _library(name) else f"{NOT_INSTALLED} (no {name}: install vllm, or name its folder with MLA_PEERS_DIR)"


def _library_version(name: str) -> str:
    """ "vllm 0.23.0" for an installed vLLM; for a folder its file VERSION, or else the start of the library's hash."""
    path = _library(name)
    if path is None:
        return ""
    if path.parent in _vllm_folders():
        return f"vllm {_installed('vllm')}"
    note = path.parent / "VERSION"
    if note.is_file():
        return note.read_text(encoding="utf-8").strip()
    return f"{name}, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


def _installed(*distributions: str) -> str:
    """Version of the first distribution that is installed; "" if none is."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@dataclass(frozen=True)
class Peer:
    """Another MLA decode kernel.

    `name` as in speed.json; `what` in words; `dtypes` of the cache; `devices` it runs on; `page_sizes` it takes (None:
    any); `max_heads`; `max_s_q`. The functions take the dtype's name, e4m3, bf16 or fp16.
    """

    name: str
    what: str
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    find: Callable[[str], str]
    build: Callable[[Arguments], Call]
    versioned: Callable[[str], str]
    page_sizes: tuple[int, ...] | None = None
    max_heads: int = 128
    max_s_q: int = 8

    def missing(self, device: torch.device | str, dtype: str) -> str:
        """Why this peer cannot run here, whatever the shape: "not installed", another device, dtype; "" if it can."""
        kind = torch.device(device).type
        if dtype not in self.dtypes:
            return f"takes {', '.join(self.dtypes)}"
        if kind not in self.devices:
            return f"runs on {', '.join(self.devices)} only"
        return self.find(dtype)

    def refuses(self, args: Arguments) -> str:
        """Why this peer does not take these arguments of `mla_decode`; "" if it does."""
        page_size, q = args["kv_cache"].shape[1], args["q_nope"]
        s_q = q.shape[1] if q.dim() == 4 else 1
        if self.page_sizes is not None and page_size not in self.page_sizes:
            return f"page_size: takes {', '.join(map(str, self.page_sizes))}, got {page_size}"
        if q.shape[-2] > self.max_heads:
            return f"h_q: takes up to {self.max_heads}, got {q.shape[-2]}"
        if s_q > self.max_s_q:
            return f"s_q: takes up to {self.max_s_q}, got {s_q}"
        return ""

    def version(self, dtype: str) -> str:
        """Version of what would run."""
        return self.versioned(dtype)

    def prepare(self, args: Arguments) -> Call:
        """A function that makes one call. PeerError where the peer is not here or refuses; else what it raises."""
        cache = args["kv_cache"]
        reason = self.missing(cache.device, DTYPE_NAMES[cache.dtype]) or self.refuses(args)
        if reason:
            raise PeerError(f"{self.name}: {reason}")
        return self.build(args)


def _four(q: Tensor) -> Tensor:
    """[b, s_q, h_q, …]: a query token's dimension where there is none."""
    return q if q.dim() == 4 else q.unsqueeze(1)


def _joined(args: Arguments) -> Tensor:
    """q [b, s_q, h_q, 576]."""
    halves = [_four(args[name]) for name in ("q_nope", "q_pe")]
    if halves[0].dtype == torch.float8_e4m3fn:  # not every torch joins fp8
        return torch.cat([half.view(torch.uint8) for half in halves], -1).view(torch.float8_e4m3fn)
    return torch.cat(halves, -1)


def _decoded(x: Tensor, scale: Any) -> Tensor:
    """Queries in bf16 (fp16 stay); e4m3 ones with their scale."""
    return (x.to(torch.float32) * scale).to(torch.bfloat16) if x.dtype == torch.float8_e4m3fn else x


# --- FlashMLA ---


def _find_flashmla(dtype: str) -> str:
    if dtype == "e4m3":
        return _no_library(FLASHMLA_FP8)
    return "" if _has_module("flash_mla") else _no_library(FLASHMLA_BF16)


def _flashmla_version(dtype: str) -> str:
    if dtype == "e4m3":
        return _library_version(FLASHMLA_FP8)
    return f"flash_mla {_installed('flash_mla')}" if _has_module("flash_mla") else _library_version(FLASHMLA_BF16)


def _prepare_flashmla(args: Arguments) -> Call:
    q, kv = _joined(args), args["kv_cache"].unsqueeze(2)
    lens, table, scale = args["seq_lens"].contiguous(), args["block_table"].contiguous(), float(args["sm_scale"])
    run: Callable[[], Any]
    if q.dtype == torch.float8_e4m3fn:
        ops = _load(FLASHMLA_FP8)
        descale = [torch.full((1,), float(args[f"{x}_scale"]), device=q.device) for x in ("q", "kv")]
        meta, splits = ops.get_mla_decoding_metadata_dense_fp8(lens, q.shape[1] * q.shape[2], 1)

        def run() -> Any:
            return ops.fwd_kvcache_mla_fp8(q, kv, D_V, lens, table, scale, True, meta, splits, *descale)

    elif _has_module("flash_mla"):
        package = importlib.import_module("flash_mla")
        meta, splits = package.get_mla_metadata(lens, q.shape[1] * q.shape[2], 1)

        def run() -> Any:
            return package.flash_mla_with_kvcache(
                q, kv, table, lens, D_V, meta, splits, softmax_scale=scale, causal=True
            )

    else:
        dense = _load(FLASHMLA_BF16).dense_decode_fwd
        # The first call makes the metadata; a serving engine keeps them for all layers of a step, and so do we.
        _, _, meta, splits = dense(q, kv, D_V, lens, table, scale, True, None, None, None)

        def run() -> Any:
            return dense(q, kv, D_V, lens, table, scale, True, meta, splits, None)

    def call() -> Answer:
        out, lse = run()[:2]
        return out, lse.transpose(1, 2)  # [b, h_q, s_q] comes

    return call


# --- FlashInfer ---


def _flashinfer() -> Any:
    return importlib.import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper


def _flashinfer_version(dtype: str) -> str:
    return f"flashinfer {_installed('flashinfer-python', 'flashinfer')}"


def _find_flashinfer(dtype: str) -> str:
    if not _has_module("flashinfer"):
        return NOT_INSTALLED
    try:
        wrapper = _flashinfer()
    except Exception as error:  # what a foreign package does at import is its own affair
        return f"does not import: {type(error).__name__}: {error}"
    if dtype == "e4m3" and "ckv_scale" not in inspect.signature(wrapper.run).parameters:
        return f"{_flashinfer_version(dtype)} takes no fp8 cache (its run has no ckv_scale)"
    return ""


def _prepare_flashinfer(backend: str) -> Callable[[Arguments], Call]:
    def prepare(args: Arguments) -> Call:
        cache, lens, table = args["kv_cache"], args["seq_lens"], args["block_table"]
        fp8 = cache.dtype == torch.float8_e4m3fn
        q_nope, q_pe = (_decoded(_four(args[name]), args["q_scale"]).contiguous() for name in ("q_nope", "q_pe"))
        b, s_q, h_q, _ = q_nope.shape
        page_size, device = cache.shape[1], cache.device
        pages = (lens + page_size - 1) // page_size
        owned = torch.arange(table.shape[1], device=device)[None] < pages[:, None]
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        wrapper = _flashinfer()(torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device), backend=backend)
        wrapper.plan(
            qo_indptr=torch.arange(0, b * s_q + 1, s_q, dtype=torch.int32, device=device),
            kv_indptr=torch.cat([zero, pages.cumsum(0, dtype=torch.int32)]),
            kv_indices=table[owned],
            kv_len_arr=lens,
            num_heads=h_q,
            head_dim_ckv=D_V,
            head_dim_kpe=D_ROPE,
            page_size=page_size,
            causal=s_q > 1,
            sm_scale=float(args["sm_scale"]),
            q_data_type=q_nope.dtype,
            kv_data_type=cache.dtype,
        )
        given = {
            "q_nope": q_nope.view(b * s_q, h_q, D_V),
            "q_pe": q_pe.view(b * s_q, h_q, D_ROPE),
            "ckv_cache": cache[..., :D_V],
            "kpe_cache": cache[..., D_V:],
            "return_lse": True,
            "return_lse_base_on_e": True,
        }
        if fp8:
            given |= {"ckv_scale": float(args["kv_scale"]), "kpe_scale": float(args["kv_scale"])}

        def call() -> Answer:
            out, lse = wrapper.run(**given)
            return out.view(b, s_q, h_q, D_V), lse.view(b, s_q, h_q)

        return call

    return prepare


# --- FlashAttention 3, as vLLM's FLASH_ATTN_MLA calls it ---


def _fa3_version(dtype: str) -> str:
    return _library_version(FA3)


def _prepare_fa3(args: Arguments) -> Call:
    ops = _load(FA3)
    cache, lens, table = args["kv_cache"], args["seq_lens"].contiguous(), args["block_table"].contiguous()
    q_nope, q_pe = _four(args["q_nope"]).contiguous(), _four(args["q_pe"]).contiguous()
    b, s_q, h_q, _ = q_nope.shape
    page_size, longest, device = cache.shape[1], int(lens.max()), cache.device
    starts = torch.arange(0, b * s_q + 1, s_q, dtype=torch.int32, device=device)
    k, v = cache[..., D_V:].unsqueeze(2), cache[..., :D_V].unsqueeze(2)
    rope, latent = q_pe.view(b * s_q, h_q, D_ROPE), q_nope.view(b * s_q, h_q, D_V)
    scale = float(args["sm_scale"])
    # fmt: off
    meta = ops.get_scheduler_metadata(
        b, s_q, longest, h_q, 1, D_ROPE, D_V, cache.dtype, lens,
        starts, None, None,  # cu_seqlens of q, k, new k
        None, None,  # seqused_q, leftpad_k
        page_size, 0,  # of new k
        True, -1, -1, False,  # causal, window, softcap
        0, None, 0,  # num_splits, pack_gqa, sm_margin: as it likes
    )

    def call() -> Answer:
        out, lse, *_ = ops.fwd(
            rope, k, v, None, None,  # new k, v
            latent, None,  # out
            starts, None, None,  # cu_seqlens of q, k, new k
            None, lens, s_q, longest,
            table, None, None,  # kv_batch_idx, leftpad_k
            None, None, None,  # rotary
            None, None, None,  # descale of q, k, v
            scale, True, -1, -1, 0.0, True,  # causal, window, softcap, rotary_interleaved
            meta, 0, None, 0,  # num_splits, pack_gqa, sm_margin
            None, 1, 0, None,  # sinks, context parallelism
        )
        return out.view(b, s_q, h_q, D_V), lse.view(h_q, b, s_q).permute(1, 2, 0)  # [h_q, b · s_q] comes
    # fmt: on

    return call


# --- torch ---


def torch_path(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    sm_scale: float,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
    num_kv_splits: int | None = None,
) -> Tensor:
    """What one writes without a kernel: gather and decode each row's cache to fp32, then scaled_dot_product_attention.

    Queries [b, h_q, …]; returns out [b, h_q, 512] in bf16 (fp16 for fp16). The heads are the query positions of a
    single kv head, the form in which the products are plain matrix multiplications.
    """
    q = torch.cat([q_nope, q_pe], -1).to(torch.float32) * q_scale
    rows = []
    for i, length in enumerate(seq_lens.tolist()):
        if length == 0:
            rows.append(torch.zeros_like(q[i, :, :D_V]))
            continue
        pages = block_table[i, : -(-length // kv_cache.shape[1])].long()
        kv = kv_cache[pages].view(-1, D)[:length].to(torch.float32) * kv_scale
        kv = kv[None, None]
        out = torch.nn.functional.scaled_dot_product_attention(q[None, None, i], kv, kv[..., :D_V], scale=sm_scale)
        rows.append(out[0, 0])
    return torch.stack(rows).to(torch.float16 if q_nope.dtype == torch.float16 else torch.bfloat16)


def _here(dtype: str) -> str:
    return ""


def _torch_version(dtype: str) -> str:
    return f"torch {torch.__version__}"


def _prepare_sdpa(args: Arguments) -> Call:
    named = dict(args)
    for name in ("q_nope", "q_pe"):
        named[name] = named[name].squeeze(1) if named[name].dim() == 4 else named[name]
    return lambda: (torch_path(**named).unsqueeze(1), None)


def _prepare_bmm(args: Arguments) -> Call:
    """All rows at once: the cache gathered and decoded, two batched products, a softmax in fp32.

    In bf16 (fp16 for fp16), on the CPU in fp32, which is faster there.
    """
    cache, lens, scale = args["kv_cache"], args["seq_lens"], float(args["sm_scale"])
    width = -(-int(lens.max()) // cache.shape[1])
    pages = args["block_table"][:, :width].clamp(0, cache.shape[0] - 1).long()
    q = _decoded(_joined(args), args["q_scale"])
    out_dtype = q.dtype
    if q.device.type == "cpu":
        q = q.to(torch.float32)
    b, s_q, h_q, _ = q.shape
    position = torch.arange(width * cache.shape[1], device=cache.device)
    seen = lens[:, None] - s_q + 1 + torch.arange(s_q, device=cache.device)[None]  # keys that token i sees
    hidden = (position[None, None] >= seen[..., None]).repeat_interleave(h_q, 1)  # [b, s_q · h_q, tokens]
    tail = position[None] >= lens[:, None]
    ragged, masked = bool(tail.any()), bool(hidden.any())

    def call() -> Answer:
        kv = cache[pages].view(b, -1, D).to(q.dtype)
        if args["kv_scale"] != 1.0:
            kv = kv * args["kv_scale"]
        if ragged:  # what nobody owns may be NaN
            kv = kv.masked_fill(tail[..., None], 0)
        logits = torch.bmm(q.view(b, s_q * h_q, D), kv.mT).to(torch.float32).mul_(scale)
        if masked:
            logits.masked_fill_(hidden, -torch.inf)
        lse = torch.logsumexp(logits, -1)
        weights = logits.sub_(lse.clamp_min(torch.finfo(torch.float32).min)[..., None]).exp_()
        out = torch.bmm(weights.to(q.dtype), kv[..., :D_V])
        return out.to(out_dtype).view(b, s_q, h_q, D_V), lse.view(b, s_q, h_q)

    return call


# --- vLLM on the CPU ---


def _find_vllm_cpu(dtype: str) -> str:
    return "" if _installed("vllm-cpu") and _vllm_cpu.library() else NOT_INSTALLED


def _vllm_cpu_version(dtype: str) -> str:
    return f"vllm-cpu {_installed('vllm-cpu')} ({Path(_vllm_cpu.library()).name})"


def _prepare_vllm_cpu(args: Arguments) -> Call:
    torch.ops.load_library(_vllm_cpu.library())
    q, cache, scale = _joined(args)[:, 0].contiguous(), args["kv_cache"], float(args["sm_scale"])
    lens, table = args["seq_lens"], args["block_table"]
    out = torch.empty(*q.shape[:2], D_V, dtype=q.dtype)

    def call() -> Answer:
        torch.ops._C.mla_decode_kvcache(out, q, cache, scale, table, lens)
        return out.unsqueeze(1), None

    return call


_GPU = ("cuda",)
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

#: Every peer, in the order of the tables.
PEERS: tuple[Peer, ...] = (
    Peer(
        "flashmla", "FlashMLA's dense decode; e4m3: the kernel of vLLM's FlashMLA extension", ("e4m3", "bf16", "fp16"),
        _GPU, _find_flashmla, _prepare_flashmla, _flashmla_version, page_sizes=(64,),
    ),
    Peer(
        "fa3", "FlashAttention 3 with q_v, as vLLM's FLASH_ATTN_MLA", ("bf16", "fp16"),
        _GPU, lambda dtype: _no_library(FA3), _prepare_fa3, _fa3_version, page_sizes=(16, 32, 64, 128, 256),
    ),
    Peer(
        "flashinfer_fa3", "FlashInfer, Hopper kernel; with an e4m3 cache bf16 queries and bf16 products",
        ("e4m3", "bf16", "fp16"), _GPU, _find_flashinfer, _prepare_flashinfer("fa3"), _flashinfer_version,
        page_sizes=_POWERS,
    ),
    Peer(
        "flashinfer_fa2", "FlashInfer, Ampere kernel; with an e4m3 cache bf16 queries and bf16 products",
        ("e4m3", "bf16", "fp16"), _GPU, _find_flashinfer, _prepare_flashinfer("fa2"), _flashinfer_version,
        page_sizes=_POWERS,
    ),
    Peer(
        "torch_bmm", "torch: cache gathered and decoded, two batched products", ("e4m3", "bf16", "fp16"),
        ("cpu", "cuda"), _here, _prepare_bmm, _torch_version,
    ),
    Peer(
        "torch_sdpa", "torch: row by row, decoded to fp32, scaled_dot_product_attention", ("e4m3", "bf16", "fp16"),
        ("cpu",), _here, _prepare_sdpa, _torch_version, max_s_q=1,
    ),
    Peer(
        "vllm_cpu", "vllm-cpu's mla_decode_kvcache", ("bf16",),
        ("cpu",), _find_vllm_cpu, _prepare_vllm_cpu, _vllm_cpu_version, page_sizes=(16,), max_s_q=1,
    ),
)  # fmt: skip


def find(name: str) -> Peer:
    """The peer of that name; ValueError with all names where there is none."""
    found = next((peer for peer in PEERS if peer.name == name), None)
    if found is None:
        raise ValueError(f"peers: expected {', '.join(peer.name for peer in PEERS)}, got {name!r}")
    return found
