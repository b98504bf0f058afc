# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The vLLM plugin without vLLM: what `register` changes, and what it says to versions it does not know.

Each registration runs in a process of its own, as in vLLM, with a stub of vLLM (stub_vllm.py) in front of any real one.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stub_vllm

from mla_kernels.vllm import cpu_platform

ROOT = Path(__file__).resolve().parent.parent


def child(code: str, folder: Path | None = None, **environment: str) -> Any:
    """What `code` prints last, read as JSON. An empty folder stands for a machine without vLLM."""
    path = os.pathsep.join(str(p) for p in (folder, ROOT) if p)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MLA_KERNELS_", "STUB_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


REGISTER = """
import json, logging, sys
said = []
class Keep(logging.Handler):
    def emit(self, record): said.append(record.getMessage())
logging.getLogger("vllm.mla_kernels").addHandler(Keep())
from mla_kernels.vllm import register
before = sorted(m for m in sys.modules if m.split(".")[0] in ("vllm", "torch", "triton", "numpy"))
register(); register()
try:
    from vllm.v1.attention.backends import registry
    overrides = getattr(registry, "overrides", None)
except ImportError:
    overrides = None
heavy = [m for m in ("torch", "mla_kernels.build", "mla_kernels.ops", "mla_kernels.vllm.backend") if m in sys.modules]
print(json.dumps({"before": before, "overrides": overrides, "said": said, "heavy": heavy}))
"""


def test_register_changes_one_entry_and_imports_nothing_heavy(tmp_path: Path) -> None:
    seen = child(REGISTER, stub_vllm.write(tmp_path))
    assert seen == {
        "before": [],
        "overrides": {"CUTLASS_MLA": "mla_kernels.vllm.cuda.CudaBackend"},
        "said": [],
        "heavy": [],
    }


def test_the_entry_point_is_register() -> None:
    (point,) = (p for p in importlib.metadata.entry_points(group="vllm.general_plugins") if p.name == "mla_kernels")
    assert point.value == "mla_kernels.vllm:register"
    assert callable(point.load())


@pytest.mark.parametrize("value", ["0", "off", "False", " no "])
def test_switched_off(tmp_path: Path, value: str) -> None:
    seen = child(REGISTER, stub_vllm.write(tmp_path), MLA_KERNELS_VLLM=value)
    assert seen["overrides"] == {}
    assert seen["said"] == []


RAISES = """
from mla_kernels.vllm import detect
try:
    detect.detect()
except detect.UnsupportedVllmError:
    print(1)
"""


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            "old",
            "expected a vLLM with v1/attention/backends/registry.py, got vLLM .*: the older layout with",
        ),
        ("renamed", "expected a backend named CUTLASS_MLA, got vLLM .* with FLASHMLA, BLACKWELL_MLA, CPU_MLA;"),
        ("unregistered", "expected register_backend in vllm.v1.attention.backends.registry, got vLLM .* without it;"),
        ("none", "expected an installed vLLM, got none; CUTLASS_MLA stays vLLM's own. Tested: 0.23.0 on a GPU,"),
    ],
)
def test_other_versions_are_left_alone_with_a_message(tmp_path: Path, layout: str, words: str) -> None:
    if layout != "none":
        stub_vllm.write(tmp_path, layout)
    elif child("import importlib.util as u; print(int(u.find_spec('vllm') is not None))"):
        pytest.skip("vLLM is installed in this environment; run this case in one without it")
    seen = child(REGISTER, tmp_path)
    assert seen["overrides"] in ({}, None)
    assert len(seen["said"]) == 2  # a call, a warning: vLLM calls once in a process
    assert all(re.search(words, text) for text in seen["said"]), seen["said"]
    assert child(RAISES, tmp_path) == 1
    assert child("import mla_kernels.cases, mla_kernels.reference; print(1)", tmp_path) == 1  # the rest still works


CHOOSE = """
import json
from types import SimpleNamespace as N
from mla_kernels.vllm import register
register(); register()
from vllm.platforms import Platform, SubPlatform, current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum as E, overrides
rows = []
for name in (None, "CUTLASS_MLA", "CPU_MLA"):
    for dtype in ("auto", "fp8", "fp8_e4m3"):
        for mla, sparse in ((True, False), (False, False), (True, True)):
            config = N(use_mla=mla, use_sparse=sparse, kv_cache_dtype=dtype)
            path = current_platform.get_attn_backend_cls(E[name] if name else None, config, num_heads=8)
            rows.append([name, dtype, mla, sparse, path])
def configure(backend, dtype, mla=True, block_size=None, custom_ops=()):
    c = N(model_config=N(use_mla=mla), attention_config=N(backend=E[backend] if backend else None),
          cache_config=N(cache_dtype=dtype, block_size=block_size or 1, enable_prefix_caching=True,
                         user_specified_block_size=block_size is not None),
          scheduler_config=N(enable_chunked_prefill=True, max_num_batched_tokens=512),
          compilation_config=N(custom_ops=list(custom_ops)), seen=None)
    current_platform.check_and_update_config(c)
    return [c.cache_config.block_size, c.cache_config.enable_prefix_caching, c.scheduler_config.enable_chunked_prefill,
            c.scheduler_config.max_num_batched_tokens, c.compilation_config.custom_ops, c.seen.__name__]
print(json.dumps({
    "rows": rows, "overrides": overrides, "base": hasattr(Platform.get_attn_backend_cls.__func__, "__wrapped__"),
    "twice": hasattr(SubPlatform.get_attn_backend_cls.__func__.__wrapped__, "__wrapped__"),
    "ours": configure("CUTLASS_MLA", "auto"), "by_dtype": configure(None, "fp8"),
    "named": configure(None, "fp8", block_size=128, custom_ops=["+rotary_embedding"]),
    "theirs": configure("CPU_MLA", "fp8"), "dense": configure(None, "fp8", mla=False), "auto": configure(None, "auto"),
}))
"""


def test_the_cpu_platform_chooses_ours_for_mla_that_asks_for_it(tmp_path: Path) -> None:
    seen = child(CHOOSE, stub_vllm.write(tmp_path), STUB_CPU="1")
    assert seen["overrides"] == {"CUTLASS_MLA": "mla_kernels.vllm.cpu.CpuBackend"}
    for name, dtype, mla, sparse, path in seen["rows"]:
        ours = mla and not sparse and (name == "CUTLASS_MLA" or (name is None and dtype != "auto"))
        assert path == ("mla_kernels.vllm.cpu.CpuBackend" if ours else "vllm's own, 8 heads"), (
            name,
            dtype,
            mla,
            sparse,
        )
    assert not seen["base"], "another platform's class was changed"
    assert not seen["twice"], "a second call wrapped the wrapper"
    off = [64, True, True, 512, ["-rotary_embedding"], "SubPlatform"]
    assert seen["ours"] == seen["by_dtype"] == off
    assert seen["named"] == [128, True, True, 512, ["+rotary_embedding"], "SubPlatform"]
    for case in ("theirs", "dense", "auto"):
        assert seen[case] == [16, False, False, 99999, [], "SubPlatform"], case


def test_a_gpu_platform_is_not_wrapped(tmp_path: Path) -> None:
    code = """
import json
from mla_kernels.vllm import register
register()
from vllm.platforms import current_platform as p
print(json.dumps([hasattr(f, "__wrapped__") for f in (p.get_attn_backend_cls, p.check_and_update_config)]))
"""
    assert child(code, stub_vllm.write(tmp_path)) == [False, False]


def test_without_a_model_the_configuration_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    class Platform:
        @classmethod
        def get_attn_backend_cls(cls, *args: Any) -> str:
            return "own"

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            vllm_config.seen = True

    cpu_platform.install(Platform)
    config = SimpleNamespace(model_config=None, cache_config=None, scheduler_config=None, seen=False)
    Platform.check_and_update_config(config)
    assert config.seen
