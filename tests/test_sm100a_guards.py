# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""What the Blackwell target refuses before it launches anything, by name, on any machine."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

import pytest
from sm100a_host import compile_host

E4M3, BF16, FP32, INT32 = 0, 1, 3, 4
CPU, CUDA = 0, 1
NAMES = ("q_nope", "q_pe", "kv_cache", "seq_lens", "block_table", "out", "lse", "q_scale")


class View(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("device", ctypes.c_int64),
        ("ndim", ctypes.c_int64),
        ("size", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
        ("element_size", ctypes.c_int64),
    ]


def view(*size: int, dtype: int = E4M3, device: int = CUDA) -> View:
    """A contiguous tensor at an address that nothing reads."""
    strides, step = [], 1
    for n in reversed(size):
        strides.insert(0, step)
        step *= n
    pad = [0] * (4 - len(size))
    width = {E4M3: 1, BF16: 2, FP32: 4, INT32: 4}[dtype]
    four = ctypes.c_int64 * 4
    return View(1 << 20, dtype, device, len(size), four(*size, *pad), four(*strides, *pad), width)


def call(b: int = 4, h_q: int = 16, pages: int = 40, blocks: int = 8, dtype: int = E4M3) -> dict[str, View]:
    none = View()
    none.ndim = -1
    return {
        "q_nope": view(b, 1, h_q, 512, dtype=dtype),
        "q_pe": view(b, 1, h_q, 64, dtype=dtype),
        "kv_cache": view(pages, 128, 576, dtype=dtype),
        "seq_lens": view(b, dtype=INT32),
        "block_table": view(b, blocks, dtype=INT32),
        "out": view(b, 1, h_q, 512, dtype=BF16),
        "lse": view(b, 1, h_q, dtype=FP32),
        "q_scale": none,
    }


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_host(tmp_path_factory.mktemp("host"))


def refusal(host: ctypes.CDLL, views: dict[str, View], logit_scale: float = 0.1, splits: int = 0) -> str:
    array = (View * len(NAMES))(*(views[name] for name in NAMES))
    return str(host.guard(array, logit_scale, splits).decode())


Change = Callable[[dict[str, View]], object]


def change(name: str, field: str, at: int, value: int) -> Change:
    def apply(views: dict[str, View]) -> None:
        getattr(views[name], field)[at] = value

    return apply


def misplace(name: str) -> Change:
    return lambda views: setattr(views[name], "address", (1 << 20) + 8)


def replace(name: str, new: View) -> Change:
    return lambda views: views.__setitem__(name, new)


REFUSALS: list[tuple[Change, str]] = [
    (
        change("q_nope", "size", 1, 4),
        r"q_nope: expected s_q = 1 on compute capability 10\.x, got s_q = 4; call once for each query token",
    ),
    *(
        (
            change("kv_cache", "size", 1, page),
            rf"kv_cache: expected page_size 128 on compute capability 10\.x, got {page}; repack the cache",
        )
        for page in (1, 2, 16, 32, 64, 256)
    ),
    (
        replace("q_scale", view(1, dtype=FP32)),
        r"q_scale: expected a number or a CPU tensor on compute capability 10\.x, got a tensor on the GPU; .* by value",
    ),
    (misplace("q_nope"), "q_nope: expected an address that is a multiple of 16 .*, got another; copy it"),
    (misplace("q_pe"), "q_pe: expected an address that is a multiple of 16"),
    (misplace("kv_cache"), "kv_cache: expected an address that is a multiple of 16"),
    (
        change("q_nope", "stride", 2, 520),
        r"q_nope: expected strides that are multiples of 16 bytes, .* got 520 elements of 1 bytes; pass \.contig",
    ),
    (
        change("q_pe", "stride", 0, 0),
        "q_pe: expected strides that are multiples of 16 bytes, above 0, .* got 0 elements",
    ),
    (change("kv_cache", "stride", 1, 585), "kv_cache: expected strides .* got 585 elements"),
    (change("kv_cache", "stride", 0, 2**41), "kv_cache: expected strides .* got 2199023255552 elements"),
    (change("kv_cache", "size", 0, 2**31), "kv_cache: expected num_blocks up to 2147483647, got 2147483648"),
    (change("kv_cache", "size", 0, 0), "kv_cache: expected at least one page, got none; pass a block_table of width 0"),
    (
        change("block_table", "stride", 0, 2**30),
        r"block_table: expected b \* stride\(0\) up to 2147483647 .*, got 4 \* 1073741824; pass \.contiguous\(\)",
    ),
    (change("q_nope", "size", 0, 65536), "q_nope: expected b up to 65535, got 65536; split the batch over calls"),
]


@pytest.mark.parametrize(("broken", "message"), REFUSALS)
def test_refused_by_name(host: ctypes.CDLL, broken: Change, message: str) -> None:
    views = call()
    assert refusal(host, views) == ""
    broken(views)
    assert re.match("mla_decode: " + message, refusal(host, views))


@pytest.mark.parametrize("scale", [0.0, -0.1, float("nan")])
def test_scale_of_the_logits_is_positive(host: ctypes.CDLL, scale: float) -> None:
    assert re.match(
        r"mla_decode: sm_scale: expected sm_scale \* q_scale \* kv_scale above 0 in fp32 on a CUDA .*, got .*; negate",
        refusal(host, call(), scale),
    )


def test_what_is_taken(host: ctypes.CDLL) -> None:
    for b, h_q, dtype in ((1, 1, E4M3), (128, 16, E4M3), (512, 128, BF16), (65535, 128, E4M3)):
        assert refusal(host, call(b, h_q, dtype=dtype)) == ""
    wide = call()  # queries as a slice of a 576-wide tensor, heads in front of rows
    wide["q_nope"].stride[:3] = (576, 576, 4 * 576)
    wide["q_pe"].stride[:3] = (576, 576, 4 * 576)
    wide["kv_cache"].stride[:2] = (3 * 128 * 576, 576)  # one layer out of three
    assert refusal(host, wide) == ""
    single = call(b=1, h_q=1, pages=1)  # strides of dimensions of size 1 are never used
    for name in ("q_nope", "q_pe"):
        single[name].stride[:3] = (7, 7, 7)
    single["kv_cache"].stride[0] = 7
    single["block_table"].stride[0] = 2**40
    assert refusal(host, single) == ""
    assert refusal(host, call(pages=0, blocks=0)) == ""  # no row can have a token
    scaled = call()
    scaled["q_scale"] = view(1, dtype=FP32, device=CPU)
    assert refusal(host, scaled) == ""


def test_partial_results_stay_within_32_bits(host: ctypes.CDLL) -> None:
    """CUTLASS computes 128 · 512 · splits · b in an int."""
    assert refusal(host, call(b=255, blocks=1024), splits=128) == ""
    assert re.match(
        r"mla_decode: num_kv_splits: expected b \* num_kv_splits up to 32767 .*, got 256 \* 128; pin fewer splits",
        refusal(host, call(b=256, blocks=1024), splits=128),
    )
    assert refusal(host, call(b=256, blocks=127), splits=128) == ""  # never more than tiles
    assert refusal(host, call(b=40000, blocks=1024), splits=0) == ""  # the automatic plan splits no such batch


def test_outputs_with_room_for_128_heads(host: ctypes.CDLL) -> None:
    """The kernel stores 128 heads whatever h_q is: into the caller's tensors only where they have as many."""

    def direct(out: View, lse: View) -> bool:
        return bool(host.direct(ctypes.byref(out), ctypes.byref(lse)))

    def pair(h_q: int = 128, b: int = 3) -> tuple[View, View]:
        return view(b, 1, h_q, 512, dtype=BF16), view(b, 1, h_q, dtype=FP32)

    assert direct(*pair())
    for h_q in (1, 16, 127):
        assert not direct(*pair(h_q))
    out, lse = pair()
    out.address += 2
    assert not direct(out, lse)
    out, lse = pair()
    out.stride[2] = 516
    assert not direct(out, lse)
    out, lse = pair()
    out.stride[0] = 128 * 512 + 4
    assert not direct(out, lse)
    out, lse = pair()
    lse.stride[2] = 2
    assert not direct(out, lse)
    out, lse = pair()
    lse.stride[0] = 2**31
    assert not direct(out, lse)
    out, lse = pair(b=1)
    out.stride[0] = lse.stride[0] = 2**41 + 1
    assert direct(out, lse)
