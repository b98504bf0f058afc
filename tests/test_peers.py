# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Peers without their packages: the right words where one is missing or refuses, and the right arguments where it runs.

The stand-ins have the signatures of the real functions (FlashMLA and FlashAttention 3 as in the vLLM 0.23.0 wheel,
FlashInfer 0.7.4) and compute the answer from what they are given, so an argument in the wrong place gives a wrong one.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_kernels import _vllm_cpu, peers
from mla_kernels.cases import Inputs, inputs_from
from mla_kernels.metrics import max_abs_error, relative_error
from mla_kernels.reference import attention

GPU_PEERS = ("flashmla", "fa3", "flashinfer_fa3", "flashinfer_fa2")


def inputs(
    dtype: str = "e4m3", *, s_q: int = 1, page_size: int = 64, h_q: int = 3, lens: tuple[int, ...] = ()
) -> Inputs:
    lens = lens or (130, 64, 7)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(len(lens), s_q, h_q, 576, generator=generator).bfloat16()
    kv = torch.randn(len(lens), max(lens), 576, generator=generator).bfloat16()
    scales = {"q_scale": 0.05, "kv_scale": 0.03} if dtype == "e4m3" else {}
    return inputs_from(q, kv, lens, dtype=dtype, page_size=page_size, **scales)


def truth(case: Inputs, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return attention(
        case.q_stored.float(), case.kv_stored.float(), case.seq_lens, sm_scale=case.sm_scale, q_scale=case.q_scale,
        kv_scale=case.kv_scale, **more,
    )  # fmt: skip


def here(name: str) -> peers.Peer:
    """A peer that may run on the CPU: its stand-in does."""
    return replace(peers.find(name), devices=("cpu",))


def paged(q: torch.Tensor, kv: torch.Tensor, lens: torch.Tensor, table: torch.Tensor, scale: float) -> Any:
    """What a dense decode kernel returns for q [b, s_q, h, 576], kv [blocks, page, 1, 576], queries at the end."""
    dense = torch.zeros(len(lens), int(lens.max()), 576)
    for i, n in enumerate(lens.tolist()):
        pages = table[i, : -(-n // kv.shape[1])].long()
        dense[i, :n] = kv[pages, :, 0].float().reshape(-1, 576)[:n]
    return attention(q.float(), dense, lens, sm_scale=scale)


# --- who is there ---


@pytest.mark.parametrize("name", GPU_PEERS)
def test_absent_peers_say_so(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLA_PEERS_DIR", str(tmp_path))
    peer = peers.find(name)
    dtype = "bf16"
    assert peer.missing("cpu", dtype) == "runs on cuda only"
    assert peer.missing("cuda", dtype).startswith("not installed")
    case = inputs(dtype)
    with pytest.raises(peers.PeerError, match=rf"^{name}: runs on cuda only$"):
        peer.prepare(case.args)
    with pytest.raises(peers.PeerError, match=rf"^{name}: not installed"):
        here(name).prepare(case.args)


def test_a_missing_library_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLA_PEERS_DIR", str(tmp_path))
    reason = peers.find("flashmla").missing("cuda", "e4m3")
    assert reason == (
        "not installed (no _flashmla_extension_C.abi3.so: install vllm, or name its folder with MLA_PEERS_DIR)"
    )
    assert peers.find("fa3").missing("cuda", "e4m3") == "takes bf16, fp16"
    assert peers.find("vllm_cpu").missing("cpu", "bf16") == "not installed"


def test_libraries_come_from_the_folder_that_was_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "_flashmla_C.abi3.so").write_bytes(folder.name.encode())
    monkeypatch.setenv("MLA_PEERS_DIR", str(second))
    flashmla = peers.find("flashmla")
    assert flashmla.missing("cuda", "bf16") == ""
    assert flashmla.missing("cuda", "e4m3").startswith("not installed")
    assert flashmla.version("bf16").startswith("_flashmla_C.abi3.so, SHA-256 ")
    (first / "VERSION").write_text("vllm 0.0\n")
    peers.set_library_folder(first)
    try:
        assert flashmla.version("bf16") == "vllm 0.0"
    finally:
        peers.set_library_folder(None)
    assert flashmla.version("e4m3") == ""


def test_libraries_of_an_installed_vllm_are_found_and_vllm_is_not_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "vllm"
    (package / "vllm_flash_attn").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('imported')\n")
    (package / "_flashmla_extension_C.abi3.so").touch()
    (package / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so").touch()
    information = tmp_path / "vllm-9.9.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: vllm\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("MLA_PEERS_DIR", raising=False)
    assert peers.find("flashmla").missing("cuda", "e4m3") == ""
    assert peers.find("flashmla").version("e4m3") == "vllm 9.9"
    assert peers.find("fa3").missing("cuda", "bf16") == ""
    assert "vllm" not in sys.modules


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"peers: expected flashmla, fa3, .*, got 'flashmlaa'"):
        peers.find("flashmlaa")


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("flashmla", {"page_size": 16}, "flashmla: page_size: takes 64, got 16"),
        ("fa3", {"page_size": 8, "dtype": "bf16"}, "fa3: page_size: takes 16, 32, 64, 128, 256, got 8"),
        ("torch_sdpa", {"s_q": 2}, "torch_sdpa: s_q: takes up to 1, got 2"),
        ("vllm_cpu", {"page_size": 64, "dtype": "bf16"}, "vllm_cpu: page_size: takes 16, got 64"),
    ],
)
def test_refusals_name_peer_argument_and_limit(name: str, more: dict[str, Any], message: str) -> None:
    peer = replace(here(name), find=lambda dtype: "")
    case = inputs(**more)
    with pytest.raises(peers.PeerError) as caught:
        peer.prepare(case.args)
    assert str(caught.value) == message
    assert peer.refuses(case.args) == message.partition(": ")[2]


def test_heads_are_limited() -> None:
    case = inputs(h_q=128, lens=(64,))
    assert replace(here("flashmla"), max_heads=64).refuses(case.args) == "h_q: takes up to 64, got 128"


# --- torch ---


@pytest.mark.parametrize("dtype", ["e4m3", "bf16", "fp16"])
@pytest.mark.parametrize(("name", "s_q"), [("torch_bmm", 1), ("torch_bmm", 3), ("torch_sdpa", 1)])
def test_torch_peers_are_attention(name: str, s_q: int, dtype: str) -> None:
    case = inputs(dtype, s_q=s_q, lens=(130, 0, 7, 64))
    out, lse = peers.find(name).prepare(case.args)()
    want, want_lse = truth(case)
    assert out.shape == want.shape
    assert out.dtype == (torch.float16 if dtype == "fp16" else torch.bfloat16)
    assert relative_error(out, want) < 2.0**-8 + 2.0**-9  # queries and output each rounded to bf16
    assert lse is None or max_abs_error(lse, want_lse) < 2e-2


# --- FlashMLA ---


class Fp8Library:
    """_flashmla_extension_C."""

    def get_mla_decoding_metadata_dense_fp8(self, seqlens: torch.Tensor, tokens_per_head: int, heads_k: int) -> Any:
        assert heads_k == 1
        return torch.tensor([tokens_per_head]), torch.tensor([len(seqlens)])

    def fwd_kvcache_mla_fp8(
        self, q: Any, kcache: Any, head_size_v: int, seqlens_k: Any, block_table: Any, softmax_scale: float,
        is_causal: bool, tile_scheduler_metadata: Any, num_splits: Any, descale_q: Any, descale_k: Any,
    ) -> Any:  # fmt: skip
        assert (head_size_v, is_causal) == (512, True)
        assert q.dtype == kcache.dtype == torch.float8_e4m3fn
        assert tile_scheduler_metadata.item() == q.shape[1] * q.shape[2]
        assert num_splits.item() == q.shape[0]
        assert descale_q.shape == descale_k.shape == (1,)
        out, lse = paged(
            q.float() * descale_q, (kcache.float() * descale_k), seqlens_k, block_table, softmax_scale
        )  # fmt: skip
        return out.bfloat16(), lse.float().transpose(1, 2).contiguous()


class DenseLibrary:
    """_flashmla_C."""

    def __init__(self) -> None:
        self.made = 0

    def dense_decode_fwd(
        self, q: Any, kcache: Any, head_size_v: int, seqlens_k: Any, block_table: Any, softmax_scale: float,
        is_causal: bool, tile_scheduler_metadata: Any, num_splits: Any, out: Any,
    ) -> Any:  # fmt: skip
        assert (head_size_v, is_causal, out) == (512, True, None)
        self.made += tile_scheduler_metadata is None
        assert (tile_scheduler_metadata is None) == (num_splits is None)
        answer, lse = paged(q, kcache, seqlens_k, block_table, softmax_scale)
        return answer.to(q.dtype), lse.float().transpose(1, 2).contiguous(), "metadata", "splits"


@pytest.mark.parametrize("s_q", [1, 2])
@pytest.mark.parametrize("dtype", ["e4m3", "bf16"])
def test_flashmla_gets_its_arguments(dtype: str, s_q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = {peers.FLASHMLA_FP8: Fp8Library(), peers.FLASHMLA_BF16: DenseLibrary()}
    monkeypatch.setattr(peers, "_library", lambda name: Path(name))
    monkeypatch.setattr(peers, "_load", libraries.__getitem__)
    case = inputs(dtype, s_q=s_q)
    call = here("flashmla").prepare(case.args)
    for _ in range(2):
        out, lse = call()
    want, want_lse = truth(case)
    assert relative_error(out, want) < 2.0**-8
    assert lse is not None
    assert max_abs_error(lse, want_lse) < 1e-4
    if dtype == "bf16":
        assert libraries[peers.FLASHMLA_BF16].made == 1  # the metadata is not part of a call


def test_flash_mla_the_package_serves_bf16_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLA_PEERS_DIR", str(tmp_path))
    package = types.ModuleType("flash_mla")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_mla", None)

    def get_mla_metadata(cache_seqlens: Any, tokens: int, heads_k: int) -> Any:
        return ("schedule", tokens, heads_k), None

    def flash_mla_with_kvcache(
        q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: int, tile_scheduler_metadata: Any,
        num_splits: Any = None, softmax_scale: float | None = None, causal: bool = False,
    ) -> Any:  # fmt: skip
        assert tile_scheduler_metadata == ("schedule", 3, 1)
        assert softmax_scale is not None
        assert (head_dim_v, num_splits, causal) == (512, None, True)
        out, lse = paged(q, k_cache, cache_seqlens, block_table, softmax_scale)
        return out.bfloat16(), lse.float().transpose(1, 2)

    monkeypatch.setattr(package, "get_mla_metadata", get_mla_metadata, raising=False)
    monkeypatch.setattr(package, "flash_mla_with_kvcache", flash_mla_with_kvcache, raising=False)
    monkeypatch.setitem(sys.modules, "flash_mla", package)
    assert here("flashmla").missing("cpu", "e4m3").startswith("not installed")
    assert here("flashmla").version("bf16").startswith("flash_mla")
    case = inputs("bf16")
    assert relative_error(here("flashmla").prepare(case.args)()[0], truth(case)[0]) < 2.0**-8


# --- FlashAttention 3 ---


class Fa3Library:
    """_vllm_fa3_C."""

    def get_scheduler_metadata(
        self, batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads: int, num_heads_k: int, headdim: int,
        headdim_v: int, qkv_dtype: Any, seqused_k: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, cu_seqlens_k_new: Any,
        seqused_q: Any, leftpad_k: Any, page_size: int, max_seqlen_k_new: int, is_causal: bool, window_left: int,
        window_right: int, has_softcap: bool, num_splits: int, pack_gqa: Any, sm_margin: int,
    ) -> Any:  # fmt: skip
        assert (num_heads_k, headdim, headdim_v, qkv_dtype) == (1, 64, 512, torch.bfloat16)
        assert cu_seqlens_q.tolist() == [i * max_seqlen_q for i in range(batch_size + 1)]
        assert max_seqlen_k == int(seqused_k.max())
        assert [cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k, pack_gqa] == [None] * 5
        assert (max_seqlen_k_new, is_causal, window_left, window_right) == (0, True, -1, -1)
        assert (has_softcap, num_splits, sm_margin, page_size) == (False, 0, 0, 64)
        return ("schedule", num_heads)

    def fwd(
        self, q: Any, k: Any, v: Any, k_new: Any, v_new: Any, q_v: Any, out: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
        cu_seqlens_k_new: Any, seqused_q: Any, seqused_k: Any, max_seqlen_q: int, max_seqlen_k: int, page_table: Any,
        kv_batch_idx: Any, leftpad_k: Any, rotary_cos: Any, rotary_sin: Any, seqlens_rotary: Any, q_descale: Any,
        k_descale: Any, v_descale: Any, softmax_scale: float, is_causal: bool, window_left: int, window_right: int,
        softcap: float, is_rotary_interleaved: bool, scheduler_metadata: Any, num_splits: int, pack_gqa: Any,
        sm_margin: int, s_aux: Any, cp_world_size: int, cp_rank: int, cp_tot_seqused_k: Any,
    ) -> Any:  # fmt: skip
        assert [k_new, v_new, out, cu_seqlens_k, cu_seqlens_k_new, seqused_q, kv_batch_idx, leftpad_k] == [None] * 8
        assert [rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale] == [None] * 6
        assert [pack_gqa, s_aux, cp_tot_seqused_k] == [None] * 3
        assert (is_causal, window_left, window_right, softcap, is_rotary_interleaved) == (True, -1, -1, 0.0, True)
        assert (num_splits, sm_margin, cp_world_size, cp_rank) == (0, 0, 1, 0)
        assert scheduler_metadata == ("schedule", q.shape[1])
        assert max_seqlen_k == int(seqused_k.max())
        b = len(cu_seqlens_q) - 1
        joined = torch.cat([q_v, q], -1).view(b, max_seqlen_q, q.shape[1], 576)
        answer, lse = paged(joined, torch.cat([v, k], -1), seqused_k, page_table, softmax_scale)
        return answer.bfloat16().flatten(0, 1), lse.float().permute(2, 0, 1).flatten(1), None, None


@pytest.mark.parametrize("s_q", [1, 2])
def test_fa3_gets_its_arguments(s_q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_library", lambda name: Path(name))
    monkeypatch.setattr(peers, "_load", lambda name: Fa3Library())
    case = inputs("bf16", s_q=s_q)
    out, lse = here("fa3").prepare(case.args)()
    want, want_lse = truth(case)
    assert relative_error(out, want) < 2.0**-8
    assert lse is not None
    assert max_abs_error(lse, want_lse) < 1e-4


# --- FlashInfer ---


class OldWrapper:
    """BatchMLAPagedAttentionWrapper before it took fp8 caches."""

    backends: list[str]

    def __init__(self, float_workspace_buffer: Any, use_cuda_graph: bool = False, backend: str = "auto") -> None:
        self.backends.append(backend)

    def plan(
        self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any, num_heads: int, head_dim_ckv: int,
        head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float, q_data_type: Any, kv_data_type: Any,
        use_profiler: bool = False,
    ) -> None:  # fmt: skip
        assert (head_dim_ckv, head_dim_kpe, q_data_type) == (512, 64, torch.bfloat16)
        self.planned = qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, page_size, sm_scale, kv_data_type
        assert causal == (int(qo_indptr[1]) > 1)

    def answer(self, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any, scales: tuple[float, float]) -> Any:
        starts, pages, indices, lens, heads, page_size, scale, dtype = self.planned
        assert ckv_cache.dtype == kpe_cache.dtype == dtype
        assert q_nope.shape[1] == heads
        assert ckv_cache.shape[1] == page_size
        table = torch.full((len(lens), int(pages.diff().max())), -1)
        for i in range(len(lens)):
            table[i, : pages[i + 1] - pages[i]] = indices[pages[i] : pages[i + 1]]
        kv = torch.cat([ckv_cache.float() * scales[0], kpe_cache.float() * scales[1]], -1).unsqueeze(2)
        q = torch.cat([q_nope, q_pe], -1).unflatten(0, (len(lens), int(starts[1])))
        out, lse = paged(q, kv, lens, table, scale)
        return out.bfloat16().flatten(0, 1), lse.float().flatten(0, 1)

    def run(
        self, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any, out: Any = None, lse: Any = None,
        return_lse: bool = False, return_lse_base_on_e: bool = False,
    ) -> Any:  # fmt: skip
        assert return_lse
        assert return_lse_base_on_e
        return self.answer(q_nope, q_pe, ckv_cache, kpe_cache, (1.0, 1.0))


class NewWrapper(OldWrapper):
    """The same, with per-tensor scales that an fp8 cache must have and another must not."""

    def run(  # type: ignore[override]
        self, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any, out: Any = None, lse: Any = None,
        return_lse: bool = False, return_lse_base_on_e: bool = False, *, ckv_scale: float | None = None,
        kpe_scale: float | None = None,
    ) -> Any:  # fmt: skip
        fp8 = ckv_cache.dtype == torch.float8_e4m3fn
        assert fp8 == (ckv_scale is not None) == (kpe_scale is not None)
        return self.answer(q_nope, q_pe, ckv_cache, kpe_cache, (ckv_scale or 1.0, kpe_scale or 1.0))


def install_flashinfer(monkeypatch: pytest.MonkeyPatch, wrapper: type[OldWrapper]) -> list[str]:
    package, module = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.mla")
    package.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    wrapper.backends = []
    monkeypatch.setattr(module, "BatchMLAPagedAttentionWrapper", wrapper, raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    monkeypatch.setattr(peers, "FLASHINFER_WORKSPACE", 16)
    return wrapper.backends


@pytest.mark.parametrize("s_q", [1, 2])
@pytest.mark.parametrize("dtype", ["e4m3", "bf16"])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_flashinfer_gets_its_arguments(backend: str, dtype: str, s_q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backends = install_flashinfer(monkeypatch, NewWrapper)
    case = inputs(dtype, s_q=s_q, page_size=32)
    out, lse = here(f"flashinfer_{backend}").prepare(case.args)()
    want, want_lse = truth(case)
    assert backends == [backend]
    assert relative_error(out, want) < 2.0**-8 + 2.0**-9  # queries and output each rounded to bf16
    assert lse is not None
    assert max_abs_error(lse, want_lse) < (2e-2 if dtype == "e4m3" else 1e-4)


def test_flashinfer_without_fp8_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    install_flashinfer(monkeypatch, OldWrapper)
    peer = here("flashinfer_fa3")
    assert peer.missing("cpu", "bf16") == ""
    assert peer.missing("cpu", "e4m3").endswith("takes no fp8 cache (its run has no ckv_scale)")
    assert relative_error(peer.prepare(inputs("bf16").args)()[0], truth(inputs("bf16"))[0]) < 2.0**-8


def test_a_package_that_does_not_import_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise OSError('libnothing.so: cannot open')\n")
    monkeypatch.syspath_prepend(tmp_path)
    reason = here("flashinfer_fa3").missing("cpu", "bf16")
    assert reason == "does not import: OSError: libnothing.so: cannot open"


# --- vllm-cpu ---


def test_vllm_cpu_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    def mla_decode_kvcache(out: Any, query: Any, kv_cache: Any, scale: float, block_tables: Any, seq_lens: Any) -> None:
        out.copy_(paged(query.unsqueeze(1), kv_cache.unsqueeze(2), seq_lens, block_tables, scale)[0].squeeze(1))

    operators = types.SimpleNamespace(_C=types.SimpleNamespace(mla_decode_kvcache=mla_decode_kvcache))
    monkeypatch.setattr(operators, "load_library", lambda path: None, raising=False)
    monkeypatch.setattr(torch, "ops", operators)
    peer = replace(peers.find("vllm_cpu"), find=lambda dtype: "")
    case = inputs("bf16", page_size=16)
    out, lse = peer.prepare(case.args)()
    assert lse is None
    assert relative_error(out, truth(case)[0]) < 2.0**-8


def test_absent_vllm_cpu_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"vllm-cpu: cannot run .*nothing"):
        _vllm_cpu.VllmCpu(tmp_path / "nothing", b=1, h_q=1, s=16)
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(FileNotFoundError, match=r"vllm-cpu: not usable with .*: vllm-cpu is not installed there"):
        _vllm_cpu.VllmCpu(bare, b=1, h_q=1, s=16)
