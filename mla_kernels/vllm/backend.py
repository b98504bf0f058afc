# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""What the backends for CUDA and CPU share: configuration, metadata builder, decode.

vLLM's own MLA layer writes the cache, absorbs the query and projects the output; a backend decodes in between:

    q (bf16 or fp16) ── quantise ÷ q_scale ──▶ e4m3 ─┐
    paged cache, e4m3, written ÷ k_scale ────────────┴─▶ mla_decode_out ─▶ out bf16, lse fp32

The query is quantised here and nowhere else (`supports_quant_query_input` is False), logits get q_scale × k_scale and
the output k_scale inside the kernel. With kv_cache_dtype auto nothing is quantised and no scale is used.

This module imports vLLM, so it is imported by vLLM alone, through the class paths in `mla_kernels.vllm.detect`.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from mla_kernels import build, checks, ops
from mla_kernels.vllm import graphs, scales
from mla_kernels.vllm.cache import E4M3, cache_dtype
from mla_kernels.vllm.detect import NAME

__all__ = ["Backend", "Impl", "MetadataBuilder"]

LIBRARY = "MLA_KERNELS_LIBRARY"


def ensure_loaded(device: torch.device) -> None:
    """Load the kernels for the device, once in a process: the library MLA_KERNELS_LIBRARY names, else a build."""
    target = (
        "cpu" if device.type == "cpu" else checks.TARGET_OF_CAPABILITY.get(torch.cuda.get_device_capability(device))
    )
    if target is not None and target not in ops.loaded_targets():
        if path := os.environ.get(LIBRARY):
            torch.ops.load_library(path)
        else:
            build.load(targets=(target,))
    checks.check_target(device, ops.loaded_targets())


class Backend(MLACommonBackend):
    """Configuration as vLLM asks for it; `CudaBackend` and `CpuBackend` fill in the rest."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return NAME

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [checks.D]

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *rest: Any, **more: Any
    ) -> str | None:
        try:
            cache_dtype(kv_cache_dtype, dtype)
        except (TypeError, ValueError) as error:
            return str(error)
        return None


class MetadataBuilder(MLACommonMetadataBuilder):
    """vLLM's metadata, and with it the workspace of the decode calls: one for all layers, at a fixed address.

    Nothing here depends on lengths, and nothing is read back from the device, so a captured graph replays with the
    lengths and pages of its day.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, *args: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *args)
        ensure_loaded(device)
        if not 1 <= self.reorder_batch_threshold <= checks.MAX_QUERY_TOKENS:
            raise NotImplementedError(
                f"{NAME}: s_q: expected at most {checks.MAX_QUERY_TOKENS} query tokens in a decode step, got "
                f"{self.reorder_batch_threshold}; use fewer speculative tokens"
            )
        self._layers = {name: vllm_config.compilation_config.static_forward_context[name] for name in layer_names}
        self._unchecked = {name: layer for name, layer in self._layers.items() if layer.impl.is_fp8}
        if self._unchecked:
            scales.load_into(self._unchecked, int(vllm_config.model_config.hf_text_config.num_hidden_layers))
        scales.warn_unused({name: layer for name, layer in self._layers.items() if name not in self._unchecked})
        self._same_v = not getattr(vllm_config.cache_config, "calculate_kv_scales", False)
        self._check_scales()
        self._rows = int(vllm_config.scheduler_config.max_num_seqs)
        self._heads = self.num_heads * max(1, int(self.dcp_world_size))
        self._workspaces: dict[int, Tensor] = {}
        graphs.advise(vllm_config, self.reorder_batch_threshold)

    def _check_scales(self) -> None:
        """Check the layers whose scales are known by now; those that vLLM still measures wait for a later step."""
        for name in [name for name, layer in self._unchecked.items() if not scales.is_pending(layer)]:
            scales.check_layer(name, self._unchecked.pop(name), same_v=self._same_v)

    def _workspace(self, b: int, block_table: Tensor) -> Tensor:
        """For tables of this width: made for the largest batch, and kept, since graphs hold its address."""
        capacity = block_table.shape[1] * self.kv_cache_spec.block_size
        kept = self._workspaces.get(capacity)
        if kept is None or b > self._rows:
            self._rows = max(b, self._rows)
            size = ops.workspace_size(
                self._rows, self.reorder_batch_threshold, self._heads, capacity, device=self.device
            )
            kept = torch.empty(max(size, 1), dtype=torch.uint8, device=self.device)
            self._workspaces[capacity] = kept
        return kept

    def _build_decode(self, **arguments: Any) -> Any:
        decode = super()._build_decode(**arguments)
        if self._unchecked:
            self._check_scales()
        decode.workspace = self._workspace(decode.seq_lens.shape[0], decode.block_table)
        return decode


class Impl(MLACommonImpl):
    """Decode through the operator; prefill as vLLM does it, with the cache read back by k_scale."""

    can_return_lse_for_decode: bool = True
    kv_cache_dtype: str

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        asked = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
        if named := [name for name, value in asked.items() if value]:
            raise NotImplementedError(f"{NAME}: {', '.join(named)}: expected none, the kernels have no such option")
        if attn_type != "decoder":
            raise NotImplementedError(f"{NAME}: attn_type: expected decoder, got {attn_type}; choose another backend")
        if (self.kv_lora_rank, self.qk_rope_head_dim) != (checks.D_NOPE, checks.D_ROPE):
            raise NotImplementedError(
                f"{NAME}: kv_lora_rank, qk_rope_head_dim: expected {checks.D_NOPE}, {checks.D_ROPE}, got "
                f"{self.kv_lora_rank}, {self.qk_rope_head_dim}; choose another backend"
            )
        self.model_dtype = torch.get_default_dtype()
        self.is_fp8 = cache_dtype(kv_cache_dtype, self.model_dtype) == E4M3
        self.supports_quant_query_input = False  # the layer hands over q_nope and q_pe as they are

    def quantise_queries(self, q_nope: Tensor, q_pe: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def scale_arguments(self, layer: Any) -> tuple[float, float, Tensor | None, Tensor | None]:
        """q_scale, kv_scale, q_scale_tensor, kv_scale_tensor of the operator: tensors, which it reads when it runs."""
        return 1.0, 1.0, layer._q_scale, layer._k_scale

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """One decode step of one layer: q [tokens, h_q, 576], whole or as q_nope and q_pe; tokens = b × s_q.

        Returns out [tokens, h_q, 512] in the model's dtype, and lse [tokens, h_q] where vLLM merges shards.
        """
        q_nope, q_pe = q if isinstance(q, tuple) else q.split([checks.D_NOPE, checks.D_ROPE], dim=-1)
        decode = attn_metadata.decode
        b, (tokens, h_q, _) = decode.seq_lens.shape[0], q_nope.shape
        s_q = tokens // b
        if s_q * b != tokens:
            raise NotImplementedError(
                f"{NAME}: s_q: expected one number of query tokens in all {b} rows, got {tokens} tokens in all"
            )
        numbers: tuple[Any, ...] = (1.0, 1.0, None, None)
        out_dtype = q_nope.dtype
        if self.is_fp8:
            numbers = self.scale_arguments(layer)
            q_nope, q_pe = self.quantise_queries(q_nope, q_pe, layer._q_scale)
            out_dtype = torch.bfloat16
        out = torch.empty((tokens, h_q, checks.D_NOPE), dtype=out_dtype, device=q_nope.device)
        lse = torch.empty((tokens, h_q), dtype=torch.float32, device=q_nope.device)
        # The operator checks dtypes, shapes and strides in C++; the checks in Python would only cost host time.
        torch.ops.mla_kernels.mla_decode_out(
            q_nope.view(b, s_q, h_q, checks.D_NOPE),
            q_pe.view(b, s_q, h_q, checks.D_ROPE),
            kv_c_and_k_pe_cache,
            decode.seq_lens,
            decode.block_table,
            self.scale,
            *numbers,
            None,
            out.view(b, s_q, h_q, checks.D_NOPE),
            lse.view(b, s_q, h_q),
            decode.workspace,
        )
        if out_dtype != self.model_dtype:
            out = out.to(self.model_dtype)
        return out, lse if self.need_to_return_lse_for_decode else None
