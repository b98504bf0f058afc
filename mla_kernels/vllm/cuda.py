# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""CUTLASS_MLA on Hopper (target sm90a) and Blackwell (target sm100a)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport

from mla_kernels import checks
from mla_kernels.vllm import backend
from mla_kernels.vllm.cache import quantise_queries

try:
    from mla_kernels.vllm import fused
except ImportError:  # no Triton
    fused = None  # type: ignore[assignment]

__all__ = ["CudaBackend"]


def _target() -> str | None:
    """The target of this device, asked from vLLM, which does not start CUDA for it."""
    pair = current_platform.get_device_capability()
    return None if pair is None else checks.TARGET_OF_CAPABILITY.get((pair.major, pair.minor))


class CudaMetadataBuilder(backend.MetadataBuilder):
    """Graphs of uniform batches on Hopper. The Blackwell kernel takes one query token a row."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, *args: Any):
        if _target() != "sm90a":
            self.query_len_support = QueryLenSupport.SINGLE_ONLY  # type: ignore[misc]
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *args)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        if _target() == "sm90a":
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class CudaImpl(backend.Impl):
    """Decode on the current stream, without a synchronisation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scales_on_host = _target() != "sm90a"

    def quantise_queries(self, q_nope: Tensor, q_pe: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return (fused.quantise_queries if fused else quantise_queries)(q_nope, q_pe, scale)

    def scale_arguments(self, layer: Any) -> tuple[float, float, Tensor | None, Tensor | None]:
        """Target sm100a takes numbers: a graph of it keeps the scales that it was captured with."""
        if self._scales_on_host:
            return layer._q_scale_float, layer._k_scale_float, None, None
        return super().scale_arguments(layer)


class CudaBackend(backend.Backend):
    """Pages of 64 or 128 tokens on Hopper, of 128 on Blackwell."""

    @staticmethod
    def get_impl_cls() -> type[CudaImpl]:
        return CudaImpl

    @staticmethod
    def get_builder_cls() -> type[CudaMetadataBuilder]:
        return CudaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [64, 128] if _target() in ("sm90a", None) else [128]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return (capability.major, capability.minor) in checks.TARGET_OF_CAPABILITY
