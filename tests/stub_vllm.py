# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""A stub of vLLM on disk, with just the parts that `mla_kernels.vllm` builds on, laid out as a given version has it.

STUB_CPU=1 makes its platform a CPU, STUB_CAPABILITY=9.0 gives its GPU's compute capability.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

LAYOUTS = ("new", "old", "renamed", "unregistered")

_FILES = {
    "__init__.py": "",
    "platforms/__init__.py": """
        import os
        from types import SimpleNamespace

        class Platform:
            @classmethod
            def is_cpu(cls):
                return os.environ.get("STUB_CPU") == "1"

            @classmethod
            def get_device_capability(cls):
                text = os.environ.get("STUB_CAPABILITY", "")
                return SimpleNamespace(**dict(zip(("major", "minor"), map(int, text.split("."))))) if text else None

            @classmethod
            def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
                return f"vllm's own, {num_heads} heads"

            @classmethod
            def check_and_update_config(cls, vllm_config):
                vllm_config.cache_config.block_size = 16
                vllm_config.cache_config.enable_prefix_caching = False
                vllm_config.scheduler_config.enable_chunked_prefill = False
                vllm_config.scheduler_config.max_num_batched_tokens = 99999
                vllm_config.seen = cls

        class SubPlatform(Platform):
            pass

        current_platform = SubPlatform()
    """,
    "v1/attention/backends/registry.py": """
        from enum import Enum

        class AttentionBackendEnum(Enum):
            FLASHMLA = "vllm.flashmla"
            CUTLASS_MLA = "vllm.cutlass_mla"
            CPU_MLA = "vllm.cpu_mla"

        overrides = {}

        def register_backend(backend, class_path=None, is_mamba=False):
            overrides[backend.name] = class_path
            return lambda x: x
    """,
    "v1/attention/backend.py": """
        from enum import Enum

        class AttentionCGSupport(Enum):
            UNIFORM_BATCH = 2
            UNIFORM_SINGLE_TOKEN_DECODE = 1
    """,
    "model_executor/layers/attention/mla_attention.py": """
        from enum import Enum
        from types import SimpleNamespace

        class QueryLenSupport(Enum):
            SINGLE_ONLY = 1
            UNIFORM = 2

        class MLACommonBackend:
            pass

        class MLACommonMetadataBuilder:
            reorder_batch_threshold = 1

            def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
                self.kv_cache_spec, self.device = kv_cache_spec, device
                self.num_heads, self.dcp_world_size = vllm_config.num_heads, vllm_config.dcp_world_size
                if self.query_len_support != QueryLenSupport.SINGLE_ONLY:
                    self.reorder_batch_threshold = 1 + vllm_config.speculative_tokens

            def _build_decode(self, block_table_tensor, seq_lens_device, **more):
                return SimpleNamespace(block_table=block_table_tensor, seq_lens=seq_lens_device)

        class MLACommonImpl:
            need_to_return_lse_for_decode = False

            def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
                         logits_soft_cap, attn_type, kv_sharing_target_layer_name, *, kv_lora_rank, qk_rope_head_dim):
                self.num_heads, self.scale, self.kv_cache_dtype = num_heads, scale, kv_cache_dtype
                self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
                self.supports_quant_query_input = True

            def _compute_prefill_context(self, q, cache, metadata, k_scale):
                return cache, metadata.prefill.block_table, self.kv_cache_dtype
    """,
}


def write(root: Path, layout: str = "new") -> Path:
    """Write the package `vllm` under `root`, which belongs on sys.path, and return `root`."""
    files = dict(_FILES)
    if layout == "old":
        files["attention/backends/registry.py"] = files.pop("v1/attention/backends/registry.py")
        files["v1/attention/backends/mla/common.py"] = files.pop("model_executor/layers/attention/mla_attention.py")
    elif layout == "renamed":
        files["v1/attention/backends/registry.py"] = files["v1/attention/backends/registry.py"].replace(
            "CUTLASS_MLA", "BLACKWELL_MLA"
        )
    elif layout == "unregistered":
        files["v1/attention/backends/registry.py"] = files["v1/attention/backends/registry.py"].replace(
            "def register_backend", "def enlist"
        )
    elif layout != "new":
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout}")
    for name, text in files.items():
        file = root / "vllm" / name
        for folder in (file.parent, *file.parent.parents):
            if folder == root:
                break
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").touch()
        file.write_text(textwrap.dedent(text))
    return root
