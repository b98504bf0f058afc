# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The vLLM backend's own work, on a stub of vLLM: decode through the real operator, cache rows, scales, workspace."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stub_vllm
import torch
from hostile import merge, same_bits
from torch import Tensor

from mla_kernels import build, ops
from mla_kernels.calibration import Scales, save_scales
from mla_kernels.formats import encode_element
from mla_kernels.metrics import relative_error
from mla_kernels.reference import attention
from mla_kernels.vllm import cache, scales

pytestmark = pytest.mark.usefixtures("cpu_build", "one_thread")

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
SM_SCALE = 192**-0.5
PAGE = 64


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """`mla_kernels.vllm`'s backend, cpu and cuda modules over the stub; a real vLLM is put aside meanwhile."""
    root = str(stub_vllm.write(tmp_path_factory.mktemp("stub")))
    names = ("backend", "cpu", "cuda", "fused")

    def forget() -> dict[str, Any]:
        ours = tuple(f"mla_kernels.vllm.{name}" for name in names)
        gone = [m for m in sys.modules if m == "vllm" or m.startswith("vllm.") or m in ours]
        return {name: sys.modules.pop(name) for name in gone}

    kept = forget()
    sys.path.insert(0, root)
    try:
        yield SimpleNamespace(
            **{n: importlib.import_module(f"mla_kernels.vllm.{n}") for n in ("backend", "cpu", "cuda")}
        )
    finally:
        sys.path.remove(root)
        forget()
        sys.modules.update(kept)


def layer_of(q_scale: float = 1.0, k_scale: float = 1.0, v_scale: float | None = None, **more: Any) -> Any:
    values = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": k_scale if v_scale is None else v_scale}
    tensors = {f"_{name}": torch.tensor(value) for name, value in values.items()}
    return SimpleNamespace(**tensors, **{f"_{name}_float": value for name, value in values.items()}, **more)


def impl_of(modules: Any, kv_cache_dtype: str = "fp8", dtype: torch.dtype = BF16, h_q: int = 4, **changes: Any) -> Any:
    asked = {
        "num_heads": h_q, "head_size": 576, "scale": SM_SCALE, "num_kv_heads": 1, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": kv_cache_dtype, "logits_soft_cap": None, "attn_type": "decoder",
        "kv_sharing_target_layer_name": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    }  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return modules.cpu.CpuImpl(**asked | changes)
    finally:
        torch.set_default_dtype(before)


class Batch:
    """Rows of tokens in a paged cache that the implementation itself wrote, and queries in vLLM's layout."""

    def __init__(
        self, impl: Any, lens: list[int], layer: Any, s_q: int = 1, dtype: torch.dtype = BF16, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        b, h_q = len(lens), impl.num_heads
        blocks = max(1, -(-max(lens) // PAGE))
        self.kv = torch.randn(b, blocks * PAGE, 576, generator=generator).to(dtype)
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.table = torch.randperm(b * blocks, generator=generator).to(torch.int32).view(b, blocks)
        bytes_ = torch.full((b * blocks, 3, PAGE, 576), 0x7F, dtype=torch.uint8)  # NaN where nothing is written
        pages = bytes_ if impl.is_fp8 else torch.full(bytes_.shape, math.nan, dtype=dtype)
        self.cache = pages[:, 1]  # a layer's slice of a block-major tensor
        for row, length in enumerate(lens):
            at = torch.arange(length)
            slots = self.table[row, at // PAGE].long() * PAGE + at % PAGE
            rows = self.kv[row, :length]
            impl.do_kv_cache_update(
                rows[:, :512], rows[:, 512:].unsqueeze(1), self.cache, slots, impl.kv_cache_dtype, layer._k_scale
            )
        if impl.is_fp8:
            self.cache = self.cache.view(E4M3)
        # As the layer hands it over: q_nope out of a batched matmul per head, q_pe a slice of a wider tensor.
        self.q_nope = torch.randn(h_q, b * s_q, 512, generator=generator).to(dtype).transpose(0, 1)
        self.q_pe = torch.randn(b * s_q, h_q, 192, generator=generator).to(dtype)[..., 128:]
        workspace = torch.empty(ops.workspace_size(b, s_q, h_q, blocks * PAGE), dtype=torch.uint8)
        self.metadata = SimpleNamespace(
            decode=SimpleNamespace(seq_lens=self.lens, block_table=self.table, workspace=workspace)
        )
        self.q = torch.cat([self.q_nope, self.q_pe], dim=-1).view(b, s_q, h_q, 576)

    def expected(self, layer: Any, quantised: bool) -> tuple[Tensor, Tensor]:
        q, kv = self.q.float(), self.kv.float()
        if quantised:
            q = cache.quantise(q, layer._q_scale).float() * layer._q_scale
            kv = cache.quantise(kv, layer._k_scale).float() * layer._k_scale
        out, lse = attention(q, kv, self.lens.tolist(), sm_scale=SM_SCALE)
        return out.flatten(0, 1), lse.flatten(0, 1)


@pytest.mark.parametrize("q_scale", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("k_scale", [0.01, 0.06, 1.0, 2.0])
def test_scales_are_honoured_once(modules: Any, q_scale: float, k_scale: float) -> None:
    """Cache written with k_scale, query divided by q_scale: out and lse are those of the real values."""
    impl, layer = impl_of(modules), layer_of(q_scale, k_scale)
    impl.need_to_return_lse_for_decode = True
    batch = Batch(impl, [200, 64, 1, 0], layer)
    before = batch.q_nope.clone(), batch.q_pe.clone()
    out, lse = impl.forward_mqa((batch.q_nope, batch.q_pe), batch.cache, batch.metadata, layer)
    want, want_lse = batch.expected(layer, quantised=True)
    assert out.dtype == BF16
    assert relative_error(out, want) < 4e-2  # P in e4m3
    assert float((lse[:3] - want_lse[:3]).abs().max()) < 1e-3
    assert float(out[3].abs().max()) == 0.0
    assert bool((lse[3] == -math.inf).all())
    assert same_bits(before[0], batch.q_nope)
    assert same_bits(before[1], batch.q_pe)


def test_a_whole_query_is_the_same_as_two_parts(modules: Any) -> None:
    impl, layer = impl_of(modules), layer_of(0.5, 0.25)
    batch = Batch(impl, [130, 70], layer)
    parts, lse = impl.forward_mqa((batch.q_nope, batch.q_pe), batch.cache, batch.metadata, layer)
    whole, _ = impl.forward_mqa(batch.q.flatten(0, 1), batch.cache, batch.metadata, layer)
    assert same_bits(parts, whole)
    assert lse is None  # nobody asked


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize("s_q", [2, 4])
def test_several_query_tokens(modules: Any, kv_cache_dtype: str, s_q: int) -> None:
    """Token i of a row sees length − s_q + i + 1 keys; a padded row has none."""
    impl, layer = impl_of(modules, kv_cache_dtype), layer_of(0.5, 0.25)
    batch = Batch(impl, [s_q, 150, 0], layer, s_q)
    out, _ = impl.forward_mqa((batch.q_nope, batch.q_pe), batch.cache, batch.metadata, layer)
    want, _ = batch.expected(layer, impl.is_fp8)
    assert out.shape == (3 * s_q, 4, 512)
    assert relative_error(out, want) < (4e-2 if impl.is_fp8 else 6e-3)
    assert float(out[2 * s_q :].abs().max()) == 0.0


def test_uneven_query_tokens_are_refused(modules: Any) -> None:
    impl, layer = impl_of(modules), layer_of()
    batch = Batch(impl, [10, 20], layer, 2)
    with pytest.raises(NotImplementedError, match="s_q: expected one number of query tokens in all 2 rows, got 3"):
        impl.forward_mqa((batch.q_nope[:3], batch.q_pe[:3]), batch.cache, batch.metadata, layer)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_scales_do_nothing_to_a_16_bit_cache(modules: Any, dtype: torch.dtype) -> None:
    impl = impl_of(modules, "auto", dtype)
    batch = Batch(impl, [100, 40], layer_of(), dtype=dtype)
    outs = [
        impl.forward_mqa((batch.q_nope, batch.q_pe), batch.cache, batch.metadata, layer)[0]
        for layer in (layer_of(), layer_of(3.0, 0.06))
    ]
    assert outs[0].dtype == dtype
    assert same_bits(outs[0], outs[1])
    assert relative_error(outs[0], batch.expected(layer_of(), quantised=False)[0]) < 6e-3


def test_an_fp16_model_gets_fp16_from_an_fp8_cache(modules: Any) -> None:
    impl, layer = impl_of(modules, "fp8", torch.float16), layer_of(1.0, 0.5)
    batch = Batch(impl, [90], layer, dtype=torch.float16)
    out, _ = impl.forward_mqa((batch.q_nope, batch.q_pe), batch.cache, batch.metadata, layer)
    assert out.dtype == torch.float16
    assert relative_error(out, batch.expected(layer, quantised=True)[0]) < 4e-2


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_shards_merge_to_the_whole_even_empty_ones(modules: Any, shards: int) -> None:
    """Decode context parallel: each rank holds some tokens of a row, or none; lse weighs them."""
    impl, layer = impl_of(modules), layer_of(1.0, 0.5)
    impl.need_to_return_lse_for_decode = True
    lens = ([0, 1, 3, 1500] * 2)[:shards]
    whole = Batch(impl, [sum(lens)], layer)
    want, want_lse = whole.expected(layer, quantised=True)
    parts, start = [], 0
    for length in lens:
        shard = Batch(impl, [max(length, 1)], layer)
        shard.lens.fill_(length)
        slots = torch.arange(length)
        slots = shard.table[0, slots // PAGE].long() * PAGE + slots % PAGE
        rows = whole.kv[0, start : start + length]
        impl.do_kv_cache_update(rows[:, :512], rows[:, 512:], shard.cache, slots, "fp8", layer._k_scale)
        parts.append(impl.forward_mqa((whole.q_nope, whole.q_pe), shard.cache, shard.metadata, layer))
        start += length
    out, lse = merge(parts)
    assert relative_error(out, want) < 4e-2
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-3)
    nothing, minus = merge(parts[:1] * 2)
    assert float(nothing.abs().max()) == 0.0
    assert bool((minus == -math.inf).all())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype: expected auto, bfloat16, fp8 or fp8_e4m3, got fp8_e5m2"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype: expected bfloat16 as the model, auto or fp8, got float16"),
        ({"dtype": torch.float32}, "dtype: expected bfloat16 or float16, got float32"),
        ({"alibi_slopes": [1.0], "logits_soft_cap": 30.0}, "alibi_slopes, logits_soft_cap: expected none"),
        ({"sliding_window": 128}, "sliding_window: expected none"),
        ({"attn_type": "encoder"}, "attn_type: expected decoder, got encoder"),
        ({"kv_lora_rank": 256}, "kv_lora_rank, qk_rope_head_dim: expected 512, 64, got 256, 64"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_by_name(modules: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises((NotImplementedError, ValueError, TypeError), match=words):
        impl_of(modules, **changes)


def test_one_normaliser_of_dtype_names() -> None:
    for name in ("fp8", "fp8_e4m3", "float8_e4m3fn", "e4m3", E4M3):
        assert cache.cache_dtype(name, BF16) is E4M3
    for name in ("auto", None, "bfloat16", "bf16", BF16):
        assert cache.cache_dtype(name, BF16) is BF16
    for name in ("auto", None, "float16", "half", "fp16", torch.float16):
        assert cache.cache_dtype(name, torch.float16) is torch.float16
    for name in ("fp8_e5m2", "fp8_ds_mla", "nvfp4", "int8", "", torch.float8_e5m2, torch.uint8):
        with pytest.raises(ValueError, match="the kernels multiply e4m3, pass fp8"):
            cache.cache_dtype(name, BF16)


def test_codes_are_those_of_the_encoder() -> None:
    x = torch.tensor([447, 448, 449, 464, 465, 1e4, math.inf, math.nan, -0.0, 2**-9, 2**-10, 0.3, 17.3, -1e9])
    for scale in (1.0, 0.37, 3.0):
        codes, _ = encode_element(x / torch.tensor(scale), "e4m3")
        assert torch.equal(cache.quantise(x, torch.tensor(scale)).view(torch.uint8), codes)
    assert bool(cache.quantise(torch.tensor([math.nan]), torch.tensor(1.0)).isnan())


@pytest.mark.parametrize("dtype", [torch.uint8, BF16])
def test_rows_land_in_their_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    """Padding slots are −1, and a padded batch has fewer slots than rows."""
    pages = torch.zeros(5, 2, 16, 576, dtype=dtype)
    one = pages[:, 1]
    kv_c, k_pe = torch.randn(6, 512).to(BF16), torch.randn(6, 1, 64).to(BF16)
    slots = torch.tensor([33, -1, 0, 79, 17])
    cache.write_rows(kv_c, k_pe, one, slots, torch.tensor(0.5))
    want = torch.zeros_like(pages)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            values = torch.cat([kv_c[row], k_pe[row, 0]])
            stored = cache.quantise(values, 0.5).view(torch.uint8) if dtype == torch.uint8 else values
            want[slot // 16, 1, slot % 16] = stored
    assert torch.equal(pages, want)


@dataclasses.dataclass
class Prefill:
    block_table: Tensor


@dataclasses.dataclass
class Metadata:
    prefill: Prefill


def test_pages_are_read_back_with_k_scale(modules: Any) -> None:
    """Prefill with context: vLLM gathers from pages of real values, through a table of their new places."""
    impl, layer = impl_of(modules), layer_of(1.0, 0.25)
    batch = Batch(impl, [150, 100], layer)

    metadata = Metadata(Prefill(batch.table))
    pages, table, asked = impl._compute_prefill_context(torch.empty(0), batch.cache, metadata, layer._k_scale)
    assert asked == "auto"
    assert impl.kv_cache_dtype == "fp8"
    assert pages.dtype == BF16
    for row, length in enumerate(batch.lens.tolist()):
        got = pages[table[row].long()].flatten(0, 1)[:length]
        want = (cache.quantise(batch.kv[row, :length], 0.25).float() * 0.25).to(BF16)
        assert same_bits(got, want)


def builder_of(
    modules: Any, layers: dict[str, Any], speculative: int = 0, *, kind: Any = None, captured: int | None = None,
    **more: Any,
) -> Any:  # fmt: skip
    sizes = {} if captured is None else {"max_cudagraph_capture_size": captured}
    config = SimpleNamespace(
        num_heads=4,
        dcp_world_size=1,
        speculative_tokens=speculative,
        compilation_config=SimpleNamespace(static_forward_context=layers, **sizes),
        cache_config=SimpleNamespace(**more),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=3)),
    )
    spec = SimpleNamespace(block_size=PAGE)
    return (kind or modules.backend.MetadataBuilder)(spec, list(layers), config, torch.device("cpu"))


def layers_of(count: int = 3, kv_cache_dtype: str = "fp8", **more: Any) -> dict[str, Any]:
    impl = SimpleNamespace(is_fp8=kv_cache_dtype == "fp8")
    return {f"model.layers.{i}.self_attn.attn": layer_of(impl=impl, **more) for i in range(count)}


def test_graphs_that_are_too_small_are_spoken_of_when_the_engine_starts(
    modules: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = sys.modules["mla_kernels.vllm.graphs"]
    monkeypatch.setattr(graphs, "_said", False)
    caplog.set_level(logging.INFO, logger="vllm.mla_kernels")
    builder_of(modules, layers_of())  # a vLLM whose configuration does not say
    builder_of(modules, layers_of(), captured=8)
    assert caplog.messages == []
    builder_of(modules, layers_of(), 1, captured=8)  # 8 rows of 2 tokens
    builder_of(modules, layers_of(), 1, captured=8)
    assert [m for m in caplog.messages if "pass --max-cudagraph-capture-size 16 " in m] == caplog.messages
    assert len(caplog.messages) == 1


def decode_of(builder: Any, lens: list[int], blocks: int = 4) -> Any:
    return builder._build_decode(
        block_table_tensor=torch.zeros(len(lens), blocks, dtype=torch.int32),
        seq_lens_device=torch.tensor(lens, dtype=torch.int32),
        max_seq_len=max(lens),
    )


def test_the_workspace_stays_where_it_is(modules: Any) -> None:
    """A captured graph holds its address: lengths and batch size change, it does not, and it fits the largest batch."""
    builder = builder_of(modules, layers_of(), speculative=1)
    first = decode_of(builder, [1]).workspace
    assert first.numel() >= ops.workspace_size(8, 2, 4, 4 * PAGE)
    for lens in ([256, 3, 0], [5] * 8, [1, 1]):
        assert decode_of(builder, lens).workspace is first
    wide = decode_of(builder, [1], blocks=32).workspace
    assert wide is not first
    assert decode_of(builder, [9], blocks=4).workspace is first


def test_too_many_speculative_tokens_are_refused(modules: Any) -> None:
    assert builder_of(modules, layers_of(), speculative=7).reorder_batch_threshold == 8
    with pytest.raises(NotImplementedError, match="s_q: expected at most 8 query tokens in a decode step, got 9"):
        builder_of(modules, layers_of(), speculative=8)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("key", ["q_scale", "k_scale"])
def test_bad_scales_are_refused_with_the_layers_name(modules: Any, key: str, value: float) -> None:
    layers = layers_of()
    layers["model.layers.1.self_attn.attn"] = layer_of(**{key: value}, impl=SimpleNamespace(is_fp8=True))
    with pytest.raises(ValueError, match=rf"layers\.1\.self_attn\.attn: {key}: expected a finite number above 0, got"):
        builder_of(modules, layers)


def test_a_v_scale_of_its_own_is_refused(modules: Any) -> None:
    layers = layers_of(k_scale=0.5, v_scale=1.0)
    with pytest.raises(ValueError, match=r"layers\.0\.\S+: v_scale: expected k_scale, 0.5, got 1.0; MLA has K and V"):
        builder_of(modules, layers)
    builder_of(modules, layers_of(k_scale=0.5, v_scale=1.0, kv_cache_dtype="auto"))  # nothing is scaled there


def test_scales_that_vllm_measures_are_checked_when_they_are_known(modules: Any) -> None:
    layers = layers_of(calculate_kv_scales=True)
    builder = builder_of(modules, layers, calculate_kv_scales=True)
    decode_of(builder, [1])
    for layer in layers.values():
        layer.calculate_kv_scales, layer._k_scale_float, layer._v_scale_float = False, 0.25, 0.5
    decode_of(builder, [1])  # v_scale has another constant in it, and is not used
    layers = layers_of(calculate_kv_scales=True)
    builder = builder_of(modules, layers, calculate_kv_scales=True)
    for layer in layers.values():
        layer.calculate_kv_scales, layer._k_scale_float = False, 0.0
    with pytest.raises(ValueError, match=r"k_scale: expected a finite number above 0, got 0\.0"):
        decode_of(builder, [1])


def test_unused_scales_are_warned_of(modules: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm.mla_kernels"):
        builder_of(modules, layers_of(kv_cache_dtype="auto"))
        assert not caplog.records
        builder_of(modules, layers_of(1, kv_cache_dtype="auto", k_scale=0.06))
    assert "scales of model.layers.0.self_attn.attn are not used: the cache is not fp8" in caplog.text


def test_scales_from_a_file(modules: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any) -> None:
    """Notebook 03's file: each layer gets its own, a draft layer past the model's keeps what it has."""
    caplog.set_level(logging.INFO, logger="vllm.mla_kernels")
    monkeypatch.setenv(scales.PATH, str(save_scales(Scales((0.5, 0.6, 0.7), (0.1, 0.2, 0.3)), tmp_path / "s.json")))
    layers = layers_of(4)
    builder_of(modules, layers)
    got = [(x._q_scale_float, x._k_scale_float, x._v_scale_float) for x in layers.values()]
    assert got == [(0.5, 0.1, 0.1), (0.6, 0.2, 0.2), (0.7, 0.3, 0.3), (1.0, 1.0, 1.0)]
    for layer, (q_scale, k_scale, v_scale) in zip(layers.values(), got, strict=True):
        tensors = [float(layer._q_scale), float(layer._k_scale), float(layer._v_scale)]
        assert tensors == pytest.approx([q_scale, k_scale, v_scale], rel=1e-7)
    assert "s.json: kv_scale found for 3 of 3 layers; kept as they were: model.layers.3.self_attn.attn" in caplog.text


def test_a_file_without_some_scales(modules: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = save_scales(Scales((0.5, 0.6, 0.7), (0.1, 0.2, 0.3)), tmp_path / "s.json")
    path.write_text(path.read_text().replace("layers.1.self_attn.kv_scale", "layers.1.self_attn.cache_scale"))
    monkeypatch.setenv(scales.PATH, str(path))
    layers = layers_of(3)
    with pytest.warns(UserWarning, match=r"found for 2 of 3 layers; missing: model.layers.1.self_attn.kv_scale"):
        builder_of(modules, layers)
    assert [x._k_scale_float for x in layers.values()] == [0.1, 1.0, 0.3]
    monkeypatch.setenv(scales.STRICT, "1")
    with pytest.raises(ValueError, match="2 of 3 layers"):
        builder_of(modules, layers)
    monkeypatch.setenv(scales.PATH, str(tmp_path / "absent.json"))
    with pytest.raises(FileNotFoundError, match=r"absent\.json is not there"):
        builder_of(modules, layers)


def capability(pair: str) -> Any:
    major, minor = map(int, pair.split("."))
    return SimpleNamespace(major=major, minor=minor)


def test_what_each_gpu_gets(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs, pages and query tokens by compute capability; a pair without a kernel is refused before any launch."""
    backend, builder = modules.cuda.CudaBackend, modules.cuda.CudaBackend.get_builder_cls()
    table = {"9.0": ("UNIFORM_BATCH", [64, 128]), "10.0": ("UNIFORM_SINGLE_TOKEN_DECODE", [128])}
    for pair, (graphs, pages) in table.items():
        monkeypatch.setenv("STUB_CAPABILITY", pair)
        assert backend.supports_compute_capability(capability(pair))
        assert builder.get_cudagraph_support(None, None).name == graphs
        assert backend.get_supported_kernel_block_sizes() == pages
    for pair in ("8.0", "8.9", "11.0", "12.0", "12.1"):
        assert not backend.supports_compute_capability(capability(pair)), pair
    assert backend.get_name() == "CUTLASS_MLA"
    assert backend.get_supported_head_sizes() == [576]


def test_blackwell_takes_single_tokens_and_numbers(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(0.5, 0.25)
    monkeypatch.setattr(modules.backend, "ensure_loaded", lambda device: None)
    for pair, single in (("9.0", False), ("10.0", True)):
        monkeypatch.setenv("STUB_CAPABILITY", pair)
        impl = object.__new__(modules.cuda.CudaImpl)
        impl._scales_on_host = modules.cuda._target() != "sm90a"
        numbers = impl.scale_arguments(layer)
        assert numbers[:2] == ((0.5, 0.25) if single else (1.0, 1.0))
        assert (numbers[2] is None) == single
        builder = builder_of(modules, layers_of(), 3, kind=modules.cuda.CudaMetadataBuilder)
        assert builder.reorder_batch_threshold == (1 if single else 4)  # the stub raises it for UNIFORM, as vLLM does


def test_combinations_are_refused_in_words(modules: Any) -> None:
    backend = modules.cuda.CudaBackend
    assert backend.supports_combination(576, BF16, "fp8", 64, True, False, False, None) is None
    assert backend.supports_combination(576, BF16, "auto", 64, True, False, False, False, None) is None
    assert "got fp8_e5m2" in backend.supports_combination(576, BF16, "fp8_e5m2", 64, True, False, False, None)


def test_the_library_is_loaded_once(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Any] = []
    monkeypatch.setattr(build, "load", lambda **options: loads.append(options))
    modules.backend.ensure_loaded(torch.device("cpu"))
    assert loads == []  # loaded by the fixture
    monkeypatch.setattr(ops, "loaded_targets", lambda: ())
    with pytest.raises(RuntimeError, match="expected a loaded build with target cpu, got none"):
        modules.backend.ensure_loaded(torch.device("cpu"))
    assert loads == [{"targets": ("cpu",)}]
    named: list[str] = []
    monkeypatch.setenv(modules.backend.LIBRARY, "/somewhere/lib.so")
    monkeypatch.setattr(torch.ops, "load_library", named.append)
    with pytest.raises(RuntimeError, match="got none"):
        modules.backend.ensure_loaded(torch.device("cpu"))
    assert named == ["/somewhere/lib.so"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: the Triton kernel is compiled for it")
def test_fused_codes_are_those_of_torch() -> None:
    fused = pytest.importorskip("mla_kernels.vllm.fused")
    base = (torch.randn(16, 33, 512, device="cuda") * 300).to(BF16)
    base[0, 0, :4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    q_nope, q_pe = base.transpose(0, 1), torch.randn(33, 16, 192, device="cuda").to(BF16)[..., 128:]
    for value in (1.0, 0.37, 3.0):
        scale = torch.tensor(value, device="cuda")
        for got, want in zip(
            fused.quantise_queries(q_nope, q_pe, scale), cache.quantise_queries(q_nope, q_pe, scale), strict=True
        ):
            assert same_bits(got, want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: a graph is captured on it")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_captured_step_follows_lengths_tables_and_scales(modules: Any, kv_cache_dtype: str) -> None:
    """Captured at lengths of 100, replayed at others, with other pages and scales: each replay is the eager call."""
    modules.backend.ensure_loaded(torch.device("cuda"))
    impl = object.__new__(modules.cuda.CudaImpl)
    impl.is_fp8, impl.scale, impl.model_dtype, impl._scales_on_host = kv_cache_dtype == "fp8", SM_SCALE, BF16, False
    b, h_q, blocks = 4, 16, 64
    layer = layer_of(0.5, 0.25)
    layer._q_scale, layer._k_scale = layer._q_scale.cuda(), layer._k_scale.cuda()
    pages = torch.randn(b * blocks, PAGE, 576, device="cuda").to(E4M3 if impl.is_fp8 else BF16)
    q_nope = torch.randn(h_q, b, 512, device="cuda").to(BF16).transpose(0, 1)
    q_pe = torch.randn(b, h_q, 192, device="cuda").to(BF16)[..., 128:]
    decode = SimpleNamespace(
        seq_lens=torch.full((b,), 100, dtype=torch.int32, device="cuda"),
        block_table=torch.randperm(b * blocks, device="cuda").int().view(b, blocks),
    )
    size = ops.workspace_size(b, 1, h_q, blocks * PAGE, device="cuda")
    decode.workspace = torch.empty(size, dtype=torch.uint8, device="cuda")

    def step() -> Tensor:
        return impl.forward_mqa((q_nope, q_pe), pages, SimpleNamespace(decode=decode), layer)[0]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lens, k_scale in (([1, 0, 64, 4096], 0.25), ([4096] * 4, 0.25), ([0, 0, 0, 5], 1.5), ([100, 3000, 7, 0], 0.06)):
        decode.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        decode.block_table.copy_(torch.randperm(b * blocks).int().view(b, blocks))
        layer._k_scale.fill_(k_scale)
        q_nope.normal_()
        graph.replay()
        replayed = captured.clone()
        assert same_bits(replayed, step())
        empty = torch.tensor(lens) == 0
        assert float(replayed[empty.cuda()].abs().sum()) == 0.0
