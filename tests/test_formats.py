# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Codes, edges, counters, rows and sizes of the cache formats. Expected bytes are written out, not computed."""

from __future__ import annotations

import dataclasses
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_kernels import formats
from mla_kernels.formats import FORMATS, Counters, decode, encode, encode_element, round_to

pytestmark = pytest.mark.usefixtures("one_thread")

INF, NAN = math.inf, math.nan


# The value of every non-negative e4m3 code, by exponent field (OFP8: bias 7, three fraction bits). Line 0 is k · 2^-9,
# line 1 is (8 + k) · 2^-9, every further line doubles; 0x7F is NaN.
E4M3 = (
    (0.0, 0.001953125, 0.00390625, 0.005859375, 0.0078125, 0.009765625, 0.01171875, 0.013671875),
    (0.015625, 0.017578125, 0.01953125, 0.021484375, 0.0234375, 0.025390625, 0.02734375, 0.029296875),
    (0.03125, 0.03515625, 0.0390625, 0.04296875, 0.046875, 0.05078125, 0.0546875, 0.05859375),
    (0.0625, 0.0703125, 0.078125, 0.0859375, 0.09375, 0.1015625, 0.109375, 0.1171875),
    (0.125, 0.140625, 0.15625, 0.171875, 0.1875, 0.203125, 0.21875, 0.234375),
    (0.25, 0.28125, 0.3125, 0.34375, 0.375, 0.40625, 0.4375, 0.46875),
    (0.5, 0.5625, 0.625, 0.6875, 0.75, 0.8125, 0.875, 0.9375),
    (1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875),
    (2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5, 3.75),
    (4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5),
    (8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0),
    (16.0, 18.0, 20.0, 22.0, 24.0, 26.0, 28.0, 30.0),
    (32.0, 36.0, 40.0, 44.0, 48.0, 52.0, 56.0, 60.0),
    (64.0, 72.0, 80.0, 88.0, 96.0, 104.0, 112.0, 120.0),
    (128.0, 144.0, 160.0, 176.0, 192.0, 208.0, 224.0, 240.0),
    (256.0, 288.0, 320.0, 352.0, 384.0, 416.0, 448.0, NAN),
)
E4M3_POSITIVE = [value for line in E4M3 for value in line]

# (value, code, what is counted). Midpoints round to the even code: 464 is halfway between 448 and what would be 480.
E4M3_EDGES = [
    (447.0, 0x7E, ""),
    (448.0, 0x7E, ""),
    (449.0, 0x7E, "saturated"),
    (464.0, 0x7E, "saturated"),
    (465.0, 0x7E, "saturated"),
    (1e4, 0x7E, "saturated"),
    (INF, 0x7E, "saturated"),
    (NAN, 0x7F, "nan"),
    (0.0, 0x00, ""),
    (2.0**-9, 0x01, ""),
    (2.0**-10, 0x00, "flushed"),  # halfway between 0 and 2^-9, to even
    (2.0**-10 * 1.0078125, 0x01, ""),
    (2.0**-11, 0x00, "flushed"),
    (1.5 * 2.0**-9, 0x02, ""),  # halfway between codes 1 and 2
    (2.5 * 2.0**-9, 0x02, ""),  # halfway between codes 2 and 3
    (2.0**-6, 0x08, ""),  # the smallest normal
    (7.5 * 2.0**-9, 0x08, ""),  # halfway between the largest subnormal and the smallest normal
    (1.0, 0x38, ""),
    (1.0625, 0x38, ""),  # halfway between 1 and 1.125
    (1.1875, 0x3A, ""),  # halfway between 1.125 and 1.25
    (432.0, 0x7E, ""),  # halfway between 416 and 448
    (431.0, 0x7D, ""),
    (256.0, 0x78, ""),
]


@pytest.mark.parametrize("code", range(256))
def test_every_e4m3_code_has_its_value(code: int) -> None:
    expected = math.copysign(E4M3_POSITIVE[code & 0x7F], -1.0 if code & 0x80 else 1.0)
    got = float(formats.decode_element(torch.tensor([code], dtype=torch.uint8), "e4m3")[0])
    assert struct.pack("d", got) == struct.pack("d", expected) or (math.isnan(got) and math.isnan(expected))
    back, counters = encode_element(torch.tensor([expected], dtype=torch.float64), "e4m3")
    assert int(back[0]) == (code if code & 0x7F != 0x7F else 0x7F)  # NaN becomes 0x7F whatever its sign
    assert counters == Counters(0, 0, int(math.isnan(expected)), 1)


EDGES_BY_DTYPE = [
    (dtype, *edge)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for edge in E4M3_EDGES
    if math.isnan(edge[0]) or float(torch.tensor(edge[0], dtype=dtype)) == edge[0]  # 449 is no bf16 value
]


@pytest.mark.parametrize(("dtype", "value", "code", "counted"), EDGES_BY_DTYPE)
def test_e4m3_edges(dtype: torch.dtype, value: float, code: int, counted: str) -> None:
    x = torch.tensor([value, -value], dtype=dtype)
    codes, counters = encode_element(x, "e4m3")
    assert codes.tolist() == [code, 0x7F if math.isnan(value) else code | 0x80]
    expected = Counters(total=2)
    assert counters == (dataclasses.replace(expected, **{counted: 2}) if counted else expected)


def test_negative_zero_keeps_its_sign() -> None:
    codes, counters = encode_element(torch.tensor([-0.0, 0.0, -(2.0**-20)]), "e4m3")
    assert codes.tolist() == [0x80, 0x00, 0x80]
    assert counters == Counters(saturated=0, flushed=1, nan=0, total=3)


def test_any_nan_becomes_one_code() -> None:
    bits = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -4194304], dtype=torch.int32)
    codes, counters = encode_element(bits.view(torch.float32), "e4m3")
    assert codes.tolist() == [0x7F] * 5
    assert counters.nan == 5


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (1.0, 0x3C),
        (57344.0, 0x7B),
        (57345.0, 0x7B),
        (61440.0, 0x7B),
        (INF, 0x7B),
        (NAN, 0x7F),
        (2.0**-16, 0x01),
        (2.0**-17, 0x00),
        (2.0**-14, 0x04),
        (1.125, 0x3C),
        (1.375, 0x3E),
        (0.0, 0x00),
    ],
)
def test_e5m2_edges(value: float, code: int) -> None:
    codes, _ = encode_element(torch.tensor([value], dtype=torch.float64), "e5m2")
    assert codes.tolist() == [code]


@pytest.mark.parametrize(("element", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_all_codes_agree_with_torch(element: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    ours, theirs = formats.decode_element(codes, element), codes.view(dtype).to(torch.float64)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    assert torch.equal(ours.signbit() | ours.isnan(), theirs.signbit() | theirs.isnan())


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_midpoints_round_to_even_codes(element: str) -> None:
    limit = 0x7F if element == "e4m3" else 0x7C
    values = formats.decode_element(torch.arange(limit, dtype=torch.uint8), element)
    middle = (values[:-1] + values[1:]) / 2
    index = torch.arange(limit - 1)
    even = index + index % 2
    tiny = 2.0**-40
    for factor, expected in ((1.0, even), (1.0 - tiny, index), (1.0 + tiny, index + 1)):
        for sign, bit in ((1.0, 0), (-1.0, 0x80)):
            codes, _ = encode_element(sign * factor * middle, element)
            assert torch.equal(codes.to(torch.int64), expected | bit)


def test_rounds_once_from_float64() -> None:
    """1 + 2^-4 is a midpoint of e4m3; a hair above it rounds up, unless the hair is first lost in fp32."""
    x = torch.tensor([1.0625 + 2.0**-40, 1.0625], dtype=torch.float64)
    assert encode_element(x, "e4m3")[0].tolist() == [0x39, 0x38]
    assert round_to(x, "e4m3").tolist() == [1.125, 1.0]
    bf16 = torch.tensor([1.0 + 2.0**-8 + 2.0**-40, 1.0 + 2.0**-8], dtype=torch.float64)
    assert round_to(bf16, "bf16").tolist() == [1.0078125, 1.0]


@pytest.mark.parametrize(
    ("element", "cases"),
    [
        ("bf16", {1.0: 1.0, 1.00390625: 1.0, 1.01171875: 1.015625, 3.4e38: INF, 2.0**-133: 2.0**-133, 2.0**-135: 0.0}),
        ("fp16", {65504.0: 65504.0, 65519.0: 65504.0, 65520.0: INF, -1e9: -INF, 2.0**-24: 2.0**-24, 2.0**-25: 0.0}),
        ("fp32", {16777217.0: 16777216.0, 16777219.0: 16777220.0, 1e39: INF, 2.0**-149: 2.0**-149}),
        ("e4m3", {1e30: 448.0, -INF: -448.0, 0.3: 0.3125}),
    ],
)
def test_round_to_by_hand(element: str, cases: dict[float, float]) -> None:
    assert round_to(torch.tensor(list(cases), dtype=torch.float64), element).tolist() == list(cases.values())


def test_round_to_keeps_nan_and_the_sign_of_zero() -> None:
    for element in formats.ELEMENTS:
        out = round_to(torch.tensor([NAN, -0.0, -1e-300], dtype=torch.float64), element)
        assert math.isnan(out[0])
        assert torch.signbit(out[1:]).all()
        assert (out[1:] == 0).all()


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays = st.lists(floats, min_size=1, max_size=64)


@settings(max_examples=60, deadline=None)
@given(arrays, st.sampled_from(["bf16", "fp16", "fp32", "e4m3", "e5m2"]))
def test_round_to_agrees_with_torch_in_range(values: list[float], element: str) -> None:
    spec = formats.ELEMENTS[element]
    x = torch.tensor(values, dtype=torch.float32)
    if spec.saturates:
        x = x.clamp(-spec.max_finite, spec.max_finite)
    assert torch.equal(round_to(x, element), x.to(spec.dtype).to(torch.float64))


@settings(max_examples=60, deadline=None)
@given(arrays, st.sampled_from(["bf16", "fp16", "e4m3", "e5m2"]))
def test_rounding_is_within_half_a_step_monotone_idempotent_and_odd(values: list[float], element: str) -> None:
    spec = formats.ELEMENTS[element]
    x = torch.tensor(values, dtype=torch.float64).clamp(-spec.max_finite, spec.max_finite).sort().values
    y = round_to(x, element)
    exponent = (torch.frexp(x.abs())[1] - 1).clamp(min=spec.min_exponent)
    step = torch.ldexp(torch.ones_like(x), exponent - spec.fraction_bits)
    assert ((y - x).abs() <= step / 2).all()
    assert (y.diff() >= 0).all()
    assert torch.equal(round_to(y, element), y)
    assert torch.equal(round_to(-x, element), -y)


@settings(max_examples=40, deadline=None)
@given(arrays)
def test_counters_count(values: list[float]) -> None:
    x = torch.tensor([*values, NAN], dtype=torch.float32)
    codes, counters = encode_element(x, "e4m3")
    out = formats.decode_element(codes, "e4m3")
    assert counters.total == x.numel()
    assert counters.nan == 1
    assert counters.saturated == sum(abs(v) > 448 for v in x.tolist())
    assert counters.flushed == sum(a != 0 and b == 0 for a, b in zip(x.tolist(), out.tolist(), strict=True))
    assert counters + counters == Counters(
        2 * counters.saturated, 2 * counters.flushed, 2 * counters.nan, 2 * counters.total
    )


def test_shares() -> None:
    counters = Counters(saturated=1, flushed=2, nan=3, total=8)
    assert [counters.share(what) for what in ("saturated", "flushed", "nan")] == [0.125, 0.25, 0.375]
    assert Counters().share("nan") == 0.0


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, 576, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("scale", [0.25, 4.0, 0.06, 1.0])
def test_scale_direction(scale: float) -> None:
    """real = stored * scale and stored = x / scale, as bits: the other way round would be off by scale²."""
    x = torch.logspace(-3, 2, 576, dtype=torch.float64).view(1, 576)
    encoded = encode(x, "e4m3", scale)
    stored = x / float(encoded.scale)
    assert torch.equal(encoded.data, encode_element(stored, "e4m3")[0])
    assert torch.equal(
        encoded.data, stored.clamp(-448, 448).to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)
    )
    assert encoded.data.dtype == torch.uint8
    assert encoded.stored.dtype == torch.float8_e4m3fn
    assert encoded.stored.data_ptr() == encoded.data.data_ptr()
    normal = (stored >= 2.0**-6) & (stored <= 448)
    error = ((decode(encoded) - x).abs() / x)[normal]
    assert normal.sum() > 100
    assert error.max() <= 2.0**-4
    assert error.max() > 2.0**-6


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(min_value=2.0**-100, max_value=2.0**100, width=32), min_size=1, max_size=8))
def test_amax_scale_saturates_nothing_and_wastes_nothing(values: list[float], element: str) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    scale = formats.amax_scale(x, element)
    assert scale == float(torch.tensor(scale, dtype=torch.float32))  # an fp32 number: what the operator sees
    codes, counters = encode_element(x / torch.tensor(scale), element)
    assert counters.saturated == 0
    assert int((codes & 0x7F).max()) == (0x7E if element == "e4m3" else 0x7B)


def test_amax_scale_leaves_out_what_is_not_finite() -> None:
    assert formats.amax_scale(torch.tensor([NAN, 896.0, INF, -1.0])) == 2.0
    for nothing in (torch.zeros(4), torch.tensor([NAN, INF]), torch.zeros(0)):
        assert formats.amax_scale(nothing) == 1.0


def test_bf16_is_exact_on_bf16() -> None:
    x = tokens(3, 5)
    encoded = encode(x, "bf16")
    assert torch.equal(decode(encoded), x.to(torch.float64))
    assert encoded.scale is None
    assert encode(tokens(1, dtype=torch.float64), "bf16").data.dtype == torch.bfloat16


def test_token_scales_stay_with_their_token() -> None:
    x = tokens(4, dtype=torch.float32)
    quiet = encode(x, "e4m3_token")
    x[2] *= 1000.0
    x[3] = 0.0
    loud = encode(x, "e4m3_token")
    assert loud.scale is not None
    assert quiet.scale is not None
    assert torch.equal(loud.data[:2], quiet.data[:2])
    assert torch.equal(loud.scale[:2], quiet.scale[:2])
    assert float(loud.scale[3]) == 1.0
    assert loud.counters.saturated == 0
    assert ((decode(loud) - x)[2].norm() / x[2].norm()) < 0.04


def test_group_scales_stay_with_their_128_values_and_rope_stays_bf16() -> None:
    x = tokens(2)
    quiet = encode(x, "e4m3_group128")
    x[0, 130] = 5e4
    loud = encode(x, "e4m3_group128")
    same = [
        g
        for g in range(4)
        if torch.equal(loud.data[0, 128 * g : 128 * g + 128], quiet.data[0, 128 * g : 128 * g + 128])
    ]
    assert same == [0, 2, 3]
    assert torch.equal(loud.data[1], quiet.data[1])
    assert torch.equal(decode(loud)[:, 512:], x[:, 512:].to(torch.float64))
    assert loud.counters.total == 2 * 512


def test_the_656_byte_row() -> None:
    """512 codes, four little-endian fp32 scales, 64 little-endian bf16 values."""
    x = torch.zeros(1, 576, dtype=torch.float64)
    x[0, 0], x[0, 1] = 448.0, -1.0  # group 0: scale 1
    x[0, 128] = 224.0  # group 1: scale 0.5
    x[0, 511] = 896.0  # group 3: scale 2
    x[0, 512], x[0, 575] = 1.0, -2.0
    row = encode(x, "e4m3_group128").pack()
    assert row.shape == (1, 656)
    assert row.dtype == torch.uint8
    raw = bytes(row[0].tolist())
    assert (raw[0], raw[1], raw[2], raw[128], raw[511]) == (0x7E, 0xB8, 0x00, 0x7E, 0x7E)
    assert struct.unpack("<4f", raw[512:528]) == (1.0, 0.5, 1.0, 2.0)
    assert raw[528:530] == b"\x80\x3f"
    assert raw[654:656] == b"\x00\xc0"


@pytest.mark.parametrize("name", list(FORMATS))
def test_rows_pack_and_unpack(name: str) -> None:
    encoded = encode(tokens(3, 7), name)
    rows = encoded.pack()
    assert rows.dtype == torch.uint8
    assert rows.shape == (3, 7, FORMATS[name].bytes_per_token)
    assert rows.nbytes == encoded.nbytes == 21 * formats.bytes_per_token(name)
    per_tensor = FORMATS[name].granularity == "tensor"
    again = formats.unpack(rows, name, float(encoded.scale) if per_tensor and encoded.scale is not None else None)
    assert torch.equal(decode(again), decode(encoded))
    assert torch.equal(again.pack(), rows)


@pytest.mark.parametrize(
    ("name", "expected"), [("bf16", 1152), ("e4m3", 576), ("e5m2", 576), ("e4m3_group128", 656), ("e4m3_token", 580)]
)
@pytest.mark.parametrize("page_size", [64, 128])
def test_bytes_are_those_of_a_real_allocation(name: str, expected: int, page_size: int) -> None:
    assert formats.bytes_per_token(name) == expected
    cache = formats.allocate(name, page_size, num_blocks=3)
    assert cache.shape[:2] == (3, page_size)
    assert formats.cache_bytes(name, page_size, 3) == cache.nbytes == 3 * page_size * expected
    assert encode(tokens(3, page_size), name).pack().nbytes == cache.nbytes


def test_finer_scales_help_an_outlier_and_e5m2_is_coarser() -> None:
    x = tokens(64, dtype=torch.float32)
    x[5, 40] = 3e4
    errors = {}
    for name in FORMATS:
        gap = decode(encode(x, name)) - x.to(torch.float64)
        gap[5] = 0.0
        errors[name] = float(gap.norm())
    assert errors["bf16"] < errors["e4m3_group128"] < errors["e4m3_token"] < errors["e4m3"]
    plain = {name: float((decode(encode(tokens(64), name)) - tokens(64).double()).norm()) for name in ("e4m3", "e5m2")}
    assert 1.5 < plain["e5m2"] / plain["e4m3"] < 2.5  # one fraction bit fewer


def test_descriptors_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["e4m3"].bytes_per_token = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: encode(tokens(1), "fp8"), r"format: expected one of bf16, e4m3, .*got 'fp8'"),
        (lambda: encode(tokens(1)[:, :575], "e4m3"), r"x: expected floating-point \[\.\.\., 576\].*\[1, 575\]"),
        (lambda: encode(torch.zeros(1, 576, dtype=torch.int32), "e4m3"), r"x: expected floating-point.*int32"),
        (lambda: encode(tokens(1), "e4m3", 0.0), r"scale: expected one positive finite number for e4m3, got 0\.0"),
        (lambda: encode(tokens(1), "e4m3", NAN), r"scale: expected one positive finite number for e4m3, got nan"),
        (lambda: encode(tokens(1), "e4m3", -1.0), r"scale: expected one positive finite"),
        (lambda: encode(tokens(1), "bf16", 1.0), r"scale: expected no scale for bf16, got 1\.0"),
        (lambda: encode(tokens(1), "e4m3_token", 1.0), r"scale: expected None \(the row holds one scale a token\)"),
        (lambda: encode_element(tokens(1), "bf16"), r"element: expected e4m3 or e5m2, got 'bf16'"),
        (lambda: round_to(tokens(1), "e3m4"), r"element: expected one of e4m3, .*got 'e3m4'"),
        (lambda: formats.decode_element(tokens(1), "e4m3"), r"codes: expected uint8 codes"),
        (
            lambda: formats.unpack(torch.zeros(2, 576, dtype=torch.uint8), "e4m3_group128"),
            r"rows: expected uint8 \[\.\.\., 656\] for format e4m3_group128, got torch\.uint8 \[2, 576\]; pack\(\)",
        ),
        (
            lambda: formats.unpack(torch.zeros(2, 576, dtype=torch.uint8), "e4m3"),
            r"scale: expected one positive finite",
        ),
        (lambda: formats.cache_bytes("e4m3", 0), r"page_size: expected a positive integer, got 0"),
        (lambda: formats.allocate("e4m3", 64, 0), r"num_blocks: expected a positive integer, got 0"),
    ],
)
def test_messages_name_the_argument(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
