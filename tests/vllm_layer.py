# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""One MLA layer of the installed vLLM with our backend, driven step by step, and what it should give in float64.

vLLM's own layer, metadata and prefill are used; only scheduler and model are left out. Imported by tests that have
made sure that vLLM is there.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata

from mla_kernels.vllm import cache, register

NOPE, ROPE, V, LATENT = 128, 64, 128, 512
SM_SCALE = (NOPE + ROPE) ** -0.5
CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": False, "bos_token_id": 0,
    "eos_token_id": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 512,
    "initializer_range": 0.02, "kv_lora_rank": LATENT, "max_position_embeddings": 8192, "moe_intermediate_size": 128,
    "n_routed_experts": 1, "n_shared_experts": 1, "norm_topk_prob": False, "num_attention_heads": 4,
    "num_experts_per_tok": 1, "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": None,
    "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_method": "greedy", "torch_dtype": "bfloat16",
    "v_head_dim": V, "vocab_size": 512,
}  # fmt: skip
_numbers = itertools.count()


def write_config(folder: Path) -> Path:
    """DeepSeek-V2's attention geometry, 3 layers of 4 heads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def start(store: Path) -> torch.device:
    """Distributed state of one rank, once in a process; the device that this vLLM is for."""
    register()
    kind = "cuda" if current_platform.is_cuda() else "cpu"
    if not torch.distributed.is_initialized():
        backend = "nccl" if kind == "cuda" else "gloo"
        init_distributed_environment(1, 0, f"file://{store}", 0, backend)
        ensure_model_parallel_initialized(1, 1)
    return torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")


class Layer:
    """A layer, its paged cache and rows of tokens; `step` lets rows go on by some tokens."""

    def __init__(
        self,
        model: Path,
        device: torch.device,
        kv_cache_dtype: str,
        *,
        rows: int = 3,
        tokens: int = 640,
        scales: tuple[float, float] = (1.0, 1.0),
        v_scale: float | None = None,
        block_size: int = 64,
        seed: int = 0,
        **engine: Any,
    ) -> None:
        asked = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=8192,
            max_num_seqs=8,
            block_size=block_size,
            enforce_eager=True,
            attention_config={"backend": "CUTLASS_MLA"},
            **engine,
        )
        self.config, self.device, self.block_size = asked.create_engine_config(), device, block_size
        self.name = f"model.layers.{next(_numbers) % 3}.self_attn.attn"
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            h, generator = CONFIG["num_attention_heads"], torch.Generator().manual_seed(seed)
            weight = torch.randn(h * (NOPE + V), LATENT, generator=generator) * LATENT**-0.5
            self.weight = weight.bfloat16().double().view(h, NOPE + V, LATENT)
            with set_current_vllm_config(self.config), device:
                start(model / "store")
                kv_b = ColumnParallelLinear(LATENT, h * (NOPE + V), bias=False)
                kv_b.weight.data.copy_(weight)
                self.layer = MLAAttention(
                    num_heads=h,
                    scale=SM_SCALE,
                    qk_nope_head_dim=NOPE,
                    qk_rope_head_dim=ROPE,
                    v_head_dim=V,
                    q_lora_rank=None,
                    kv_lora_rank=LATENT,
                    kv_b_proj=kv_b,
                    cache_config=self.config.cache_config,
                    prefix=self.name,
                )
                kv_b.quant_method.process_weights_after_loading(kv_b)
                self.layer.process_weights_after_loading(torch.bfloat16)
            self.set_scales(*scales, v_scale)
            self._allocate(rows, tokens, generator)
            with set_current_vllm_config(self.config):
                spec = self.layer.get_kv_cache_spec(self.config)
                kind = self.layer.get_attn_backend().get_builder_cls()
                self.builder = kind(spec, [self.name], self.config, device)
        finally:
            torch.set_default_dtype(before)

    def set_scales(self, q_scale: float, k_scale: float, v_scale: float | None = None) -> None:
        """As vLLM leaves them after loading a calibrated checkpoint."""
        values = {"q": q_scale, "k": k_scale, "v": k_scale if v_scale is None else v_scale}
        for key, value in values.items():
            getattr(self.layer, f"_{key}_scale").fill_(value)
            setattr(self.layer, f"_{key}_scale_float", value)

    def _allocate(self, rows: int, tokens: int, generator: torch.Generator) -> None:
        h = CONFIG["num_attention_heads"]
        self.q = torch.randn(rows, tokens, h, NOPE + ROPE, generator=generator).bfloat16()
        self.kv_c = torch.randn(rows, tokens, LATENT, generator=generator).bfloat16()
        self.k_pe = torch.randn(rows, tokens, ROPE, generator=generator).bfloat16()
        blocks = -(-tokens // self.block_size)
        fp8 = self.layer.impl.is_fp8
        shape = (rows * blocks + 1, self.block_size, 576)
        pages = torch.full(shape, 0x7F if fp8 else float("nan"), dtype=torch.uint8 if fp8 else torch.bfloat16)
        self.pages = pages.to(self.device)
        if hasattr(self.layer, "bind_kv_cache"):
            self.layer.bind_kv_cache(self.pages.unsqueeze(1))
        else:
            self.layer.kv_cache = self.pages
        order = torch.randperm(rows * blocks, generator=generator) + 1
        self.table = torch.zeros(rows, self.config.model_config.max_model_len // self.block_size, dtype=torch.int32)
        self.table[:, :blocks] = order.view(rows, blocks).int()
        self.done = [0] * rows

    def step(self, chunks: Sequence[tuple[int, int]], *, padding: int = 0) -> list[Tensor]:
        """Rows and how many tokens each goes on by, those with few tokens first; `padding` empty rows after them.

        Returns each row's new outputs [tokens, h, 128], then those of the padding.
        """
        rows = [row for row, _ in chunks]
        starts = [self.done[row] for row in rows]
        counts = [count for _, count in chunks] + [1] * padding
        lens = [start + count for start, (_, count) in zip(starts, chunks, strict=True)] + [0] * padding
        at = [torch.arange(start, start + count) for start, (_, count) in zip(starts, chunks, strict=True)]

        def packed(x: Tensor) -> Tensor:
            parts = [x[row, where] for row, where in zip(rows, at, strict=True)]
            return torch.cat([*parts, torch.ones(padding, *x.shape[2:], dtype=x.dtype)]).to(self.device)

        slots = [
            self.table[row, where // self.block_size].long() * self.block_size + where % self.block_size
            for row, where in zip(rows, at, strict=True)
        ]
        slot_mapping = torch.cat([*slots, torch.full((padding,), -1)]).to(self.device)
        bounds = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        seq_lens = torch.tensor(lens, dtype=torch.int32)
        table = torch.cat([self.table[rows], torch.full((padding, self.table.shape[1]), 10**6, dtype=torch.int32)])
        common = CommonAttentionMetadata(
            query_start_loc=bounds.to(self.device),
            query_start_loc_cpu=bounds,
            seq_lens=seq_lens.to(self.device),
            num_reqs=len(counts),
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=max(lens),
            block_table_tensor=table.to(self.device),
            slot_mapping=slot_mapping,
            seq_lens_cpu_upper_bound=seq_lens,
        )
        with set_current_vllm_config(self.config), torch.no_grad():
            metadata = self.builder.build(0, common)
            with set_forward_context(
                {self.name: metadata},
                self.config,
                num_tokens=sum(counts),
                slot_mapping={self.name: slot_mapping},
            ):
                q, kv_c, k_pe = packed(self.q), packed(self.kv_c), packed(self.k_pe).unsqueeze(1)
                out = self.layer(q, kv_c, k_pe, output_shape=torch.Size((sum(counts), q.shape[1] * V)))
        for row, count in chunks:
            self.done[row] += count
        return list(
            out.cpu().view(sum(counts), -1, V).split([count for _, count in chunks] + [padding] * bool(padding))
        )

    def stored(self, row: int, end: int) -> Tensor:
        """What the cache keeps of a row's first tokens, as real values [end, 576], float64."""
        kv = torch.cat([self.kv_c, self.k_pe], dim=-1)[row, :end]
        if not self.layer.impl.is_fp8:
            return kv.double()
        scale = self.layer._k_scale.cpu()
        return cache.quantise(kv, scale).double() * scale.double()

    def expected(self, row: int, first: int, end: int, *, decode: bool, chunk: int | None = None) -> Tensor:
        """Outputs of tokens first … end − 1 [tokens, h, 128], float64.

        A decode reads all of them from the cache, with a rounded query; a prefill whose first token is `chunk`
        (default: `first`) reads what was there before it, and attends to its own tokens unrounded.
        """
        chunk = first if chunk is None else chunk
        up, down = self.weight[:, :NOPE], self.weight[:, NOPE:]
        kv = self.stored(row, end)
        if not decode:
            kv = torch.cat([kv[:chunk], torch.cat([self.kv_c, self.k_pe], dim=-1)[row, chunk:end].double()])
        q = self.q[row, first:end].double()
        q_nope = torch.einsum("thn,hnl->thl", q[..., :NOPE], up)
        q_all = torch.cat([q_nope, q[..., NOPE:]], dim=-1)
        if decode and self.layer.impl.is_fp8:
            scale = self.layer._q_scale.cpu()
            q_all = cache.quantise(q_all.bfloat16(), scale).double() * scale.double()
        logits = torch.einsum("thd,sd->ths", q_all, kv) * SM_SCALE
        later = torch.arange(end)[None] > torch.arange(first, end)[:, None]
        weights = logits.masked_fill(later[:, None], -torch.inf).softmax(-1)
        return torch.einsum("ths,sl,hvl->thv", weights, kv[:, :LATENT], down)
