# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""CUTLASS_MLA on a CPU (target cpu), where the cache may be fp8 as well, which no CPU backend of vLLM has."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from mla_kernels import checks
from mla_kernels.vllm import backend, cache

__all__ = ["CpuBackend"]


class CpuImpl(backend.Impl):
    """Decode through the operator; the cache is written and, for prefill with context, read with torch operations."""

    def quantise_queries(self, q_nope: Tensor, q_pe: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return cache.quantise_queries(q_nope, q_pe, scale)

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        if kv_cache.numel():
            cache.write_rows(kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale)

    def _compute_prefill_context(
        self, q: Tensor, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, k_scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention to what is in the cache already: vLLM's, on pages of real values for an fp8 cache."""
        if not self.is_fp8:
            return super()._compute_prefill_context(q, kv_c_and_k_pe_cache, attn_metadata, k_scale)
        prefill = attn_metadata.prefill
        pages, table = cache.dequantise_pages(kv_c_and_k_pe_cache, prefill.block_table, k_scale, self.model_dtype)
        readable = dataclasses.replace(attn_metadata, prefill=dataclasses.replace(prefill, block_table=table))
        asked, self.kv_cache_dtype = self.kv_cache_dtype, "auto"
        try:
            return super()._compute_prefill_context(q, pages, readable, k_scale)
        finally:
            self.kv_cache_dtype = asked


class CpuMetadataBuilder(backend.MetadataBuilder):
    """Metadata as elsewhere. Made once the weights are loaded, it also lays out those that precede each decode."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for layer in self._layers.values():
            # [h_q, 128, 512]: where AVX-512 is missing, torch's bf16 product reads it four times slower by rows than by
            # columns (10 ms against 2.7 for 16 heads and 8 rows).
            absorbing = layer.W_UK_T.data
            layer.W_UK_T.data = absorbing.transpose(1, 2).contiguous().transpose(1, 2)


class CpuBackend(backend.Backend):
    """Pages of any size that the operator takes."""

    @staticmethod
    def get_impl_cls() -> type[CpuImpl]:
        return CpuImpl

    @staticmethod
    def get_builder_cls() -> type[CpuMetadataBuilder]:
        return CpuMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return list(checks.PAGE_SIZES)

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size in checks.PAGE_SIZES
