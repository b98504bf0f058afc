# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Storage formats of the MLA cache: descriptors, encode, decode, counters, sizes.

A cache row is one token: 512 latent values and 64 rope values, together 576. One equation gives the direction of every
scale: `real = stored * scale`, so `stored = x / scale`, written as bits.

| name | bytes a token | latent | rope | scale |
| --- | --- | --- | --- | --- |
| `bf16` | 1152 | bf16 | bf16 | none |
| `e4m3` | 576 | e4m3 | e4m3 | one a tensor, kept outside the row |
| `e4m3_token` | 580 | e4m3 | e4m3 | one fp32 a token, the last 4 bytes of the row |
| `e4m3_group128` | 656 | e4m3 | bf16 | four fp32, one per 128 latent values |
| `e5m2` | 576 | e5m2 | e5m2 | one a tensor, kept outside the row |

Rules of the 8-bit encoder, ours and not those of a torch version:

- round to nearest, ties to even; subnormals are kept;
- a magnitude above the largest finite value (448, or 57344 for e5m2), infinity included, becomes that largest value
  with its sign. It counts as saturated, also where plain rounding would have given the same code (449);
- NaN becomes code 0x7F whatever its sign and payload, and is counted;
- zero keeps its sign, and so does a value that flushes to zero (non-zero in, zero out), which is counted.

Encodings: OCP 8-bit Floating Point Specification (OFP8), revision 1.0, 2023. The 656-byte row is the one FlashMLA and
vLLM call `fp8_ds_mla`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Literal

import torch

__all__ = [
    "D_ROPE",
    "D_V",
    "ELEMENTS",
    "FORMATS",
    "CacheFormat",
    "Counters",
    "D",
    "Element",
    "Encoded",
    "allocate",
    "amax_scale",
    "bytes_per_token",
    "cache_bytes",
    "decode",
    "decode_element",
    "encode",
    "encode_element",
    "round_to",
    "unpack",
]

D_V = 512  # latent values of a token: K's first 512 dims, and all of V
D_ROPE = 64  # rope values of a token: K's last 64 dims
D = D_V + D_ROPE
GROUP = 128  # latent values that share a scale in e4m3_group128


@dataclass(frozen=True)
class Element:
    """A binary floating-point element type.

    `fraction_bits` stored fraction bits, `min_exponent` the exponent of the smallest normal number, `max_finite` the
    largest finite value, `saturates` whether overflow gives `max_finite` (8-bit) or infinity (IEEE).
    """

    name: str
    dtype: torch.dtype
    fraction_bits: int
    min_exponent: int
    max_finite: float
    saturates: bool

    @property
    def smallest(self) -> float:
        """The smallest positive (subnormal) value: 2^-9 for e4m3."""
        return math.ldexp(1.0, self.min_exponent - self.fraction_bits)

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize


ELEMENTS: dict[str, Element] = {
    element.name: element
    for element in (
        Element("e4m3", torch.float8_e4m3fn, 3, -6, 448.0, True),
        Element("e5m2", torch.float8_e5m2, 2, -14, 57344.0, True),
        Element("fp16", torch.float16, 10, -14, 65504.0, False),
        Element("bf16", torch.bfloat16, 7, -126, (2.0 - 2.0**-7) * 2.0**127, False),
        Element("fp32", torch.float32, 23, -126, (2.0 - 2.0**-23) * 2.0**127, False),
    )
}


def _element(name: str) -> Element:
    if name not in ELEMENTS:
        raise ValueError(f"element: expected one of {', '.join(ELEMENTS)}, got {name!r}")
    return ELEMENTS[name]


@dataclass(frozen=True)
class CacheFormat:
    """How one token's 576 values lie in memory. Passed by name, never inferred from bytes.

    `latent` and `rope` name an element of `ELEMENTS`; `granularity` says what shares a scale; `bytes_per_token` counts
    everything inside the row.
    """

    name: str
    latent: str
    rope: str
    granularity: Literal["none", "tensor", "token", "group128"]
    bytes_per_token: int


FORMATS: dict[str, CacheFormat] = {
    fmt.name: fmt
    for fmt in (
        CacheFormat("bf16", "bf16", "bf16", "none", 2 * D),
        CacheFormat("e4m3", "e4m3", "e4m3", "tensor", D),
        CacheFormat("e4m3_token", "e4m3", "e4m3", "token", D + 4),
        CacheFormat("e4m3_group128", "e4m3", "bf16", "group128", D_V + 4 * (D_V // GROUP) + 2 * D_ROPE),
        CacheFormat("e5m2", "e5m2", "e5m2", "tensor", D),
    )
}


def _format(fmt: str | CacheFormat) -> CacheFormat:
    if isinstance(fmt, CacheFormat):
        return fmt
    if fmt not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {fmt!r}")
    return FORMATS[fmt]


@dataclass(frozen=True)
class Counters:
    """What encoding did to the values of one tensor. Counts of elements.

    `saturated`: |x / scale| above the largest finite value, infinity included. `flushed`: non-zero in, zero out.
    `nan`: NaN in. `total`: elements encoded to 8 bits.
    """

    saturated: int = 0
    flushed: int = 0
    nan: int = 0
    total: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            self.saturated + other.saturated,
            self.flushed + other.flushed,
            self.nan + other.nan,
            self.total + other.total,
        )

    def share(self, what: Literal["saturated", "flushed", "nan"]) -> float:
        """Count of `what` over `total`; 0 for an empty tensor."""
        return float(getattr(self, what)) / self.total if self.total else 0.0


@dataclass(frozen=True)
class Encoded:
    """Stored bits of tokens `[..., 576]` in one format.

    `data`: uint8 codes `[..., 576]` (`[..., 512]` for e4m3_group128), or bf16 values `[..., 576]` for bf16.
    `scale`: fp32, `[]` a tensor, `[..., 1]` a token, `[..., 4]` a 128-group, None for bf16. `rope`: bf16 `[..., 64]`
    for e4m3_group128, else None.
    """

    format: CacheFormat
    data: torch.Tensor
    scale: torch.Tensor | None = None
    rope: torch.Tensor | None = None
    counters: Counters = field(default_factory=Counters)

    @property
    def stored(self) -> torch.Tensor:
        """`data` in the element's own dtype (a view of the same bits): what the operator takes as `kv_cache`."""
        return self.data if self.data.dtype != torch.uint8 else self.data.view(ELEMENTS[self.format.latent].dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, `tokens * bytes_per_token`; a per-tensor scale lies outside them and is not counted."""
        return self.data.shape[:-1].numel() * self.format.bytes_per_token

    def pack(self) -> torch.Tensor:
        """Byte rows, uint8 `[..., bytes_per_token]`, in the order latent, scales, rope."""
        if self.format.granularity == "none":
            return self.data.contiguous().view(torch.uint8)
        parts = [self.data]
        if self.format.granularity in ("token", "group128"):
            assert self.scale is not None
            parts.append(self.scale.contiguous().view(torch.uint8))
        if self.rope is not None:
            parts.append(self.rope.contiguous().view(torch.uint8))
        return torch.cat(parts, dim=-1) if len(parts) > 1 else self.data


def unpack(rows: torch.Tensor, fmt: str | CacheFormat, scale: float | None = None) -> Encoded:
    """Byte rows uint8 `[..., bytes_per_token]` back to `Encoded`, as views where alignment allows.

    `scale` is needed for per-tensor formats, whose scale is not in the row, and refused for the others.
    """
    fmt = _format(fmt)
    if rows.dtype != torch.uint8 or rows.shape[-1] != fmt.bytes_per_token:
        raise ValueError(
            f"rows: expected uint8 [..., {fmt.bytes_per_token}] for format {fmt.name}, "
            f"got {rows.dtype} {list(rows.shape)}; pack() writes such rows"
        )
    if (scale is not None) != (fmt.granularity == "tensor"):
        raise ValueError(f"scale: expected {_scale_words(fmt)}, got {scale!r}")
    if fmt.granularity == "none":
        return Encoded(fmt, rows.contiguous().view(torch.bfloat16))
    if fmt.granularity == "tensor":
        return Encoded(fmt, rows, torch.tensor(scale, dtype=torch.float32, device=rows.device))
    if fmt.granularity == "token":
        return Encoded(fmt, rows[..., :D], rows[..., D:].contiguous().view(torch.float32))
    scales = rows[..., D_V : D_V + 16].contiguous().view(torch.float32)
    return Encoded(fmt, rows[..., :D_V], scales, rows[..., D_V + 16 :].contiguous().view(torch.bfloat16))


def _scale_words(fmt: CacheFormat) -> str:
    return {
        "none": "no scale for bf16",
        "tensor": f"one positive finite number for {fmt.name}",
        "token": "None (the row holds one scale a token)",
        "group128": "None (the row holds one scale per 128 values)",
    }[fmt.granularity]


def round_to(x: torch.Tensor, element: str) -> torch.Tensor:
    """Round real values to an element type, in value: float64 out, same shape, one rounding whatever the input dtype.

    Round to nearest, ties to even, subnormals kept. e4m3 and e5m2 saturate (infinity too); fp16, bf16 and fp32 overflow
    to infinity as IEEE 754 does. NaN stays NaN. Integer arithmetic on the exponent field; torch's casts are not used.
    """
    spec = _element(element)
    x = x.to(torch.float64)
    out = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    flat_in, flat_out = x.reshape(-1), out.view(-1)
    chunk = 1 << 16  # stays in cache: fresh large buffers cost more than the arithmetic
    for begin in range(0, flat_in.numel(), chunk):
        _round_chunk(flat_in[begin : begin + chunk], spec, flat_out[begin : begin + chunk])
    return out


def _round_chunk(x: torch.Tensor, spec: Element, out: torch.Tensor) -> None:
    """out = x rounded: adding and subtracting 1.5 * 2^52 * quantum rounds to a multiple of quantum, ties to even."""
    limit = spec.max_finite if spec.saturates else 2.0 * spec.max_finite
    clamped = x.clamp(-limit, limit)  # NaN passes, here and below; infinity is put back
    magic = (clamped.view(torch.int64) & 0x7FF0_0000_0000_0000).view(torch.float64)  # 2^exponent
    magic.clamp_(min=math.ldexp(1.0, spec.min_exponent), max=limit).mul_(1.5 * 2.0 ** (52 - spec.fraction_bits))
    torch.add(clamped, magic, out=out).sub_(magic)
    torch.copysign(out, clamped, out=out)  # -0 and values that flush keep their sign
    if not spec.saturates:
        out.masked_fill_(out > spec.max_finite, math.inf).masked_fill_(out < -spec.max_finite, -math.inf)


def encode_element(x: torch.Tensor, element: str) -> tuple[torch.Tensor, Counters]:
    """Codes, uint8 of x's shape, for already scaled values, and what happened to them. `element`: e4m3 or e5m2.

    float64 is rounded once from float64; other inputs are exact in fp32 and rounded from there.
    """
    spec = _element(element)
    if not spec.saturates:
        raise ValueError(f"element: expected e4m3 or e5m2, got {element!r}; bf16 is a plain cast")
    if x.dtype != torch.float64:
        x = x.to(torch.float32)
    nan = x.isnan()
    n_nan = int(torch.count_nonzero(nan))
    n_saturated = int(torch.count_nonzero(x.abs() > spec.max_finite))
    values = (
        round_to(x, element).to(torch.float32)
        if x.dtype == torch.float64
        else x.clamp(-spec.max_finite, spec.max_finite)
    )
    codes = values.to(spec.dtype).view(torch.uint8)  # in range, so the cast is only "to nearest, ties to even"
    if n_nan:
        codes = codes.masked_fill(nan, 0x7F)
    n_zero_out = int(torch.count_nonzero((codes & 0x7F) == 0))
    n_zero_in = x.numel() - int(torch.count_nonzero(x))
    return codes, Counters(n_saturated, n_zero_out - n_zero_in, n_nan, x.numel())


@functools.cache
def _code_values(element: str, device: torch.device) -> torch.Tensor:
    """float64 [256]: the value of every code of an 8-bit element type, from the definition of the encoding."""
    spec = ELEMENTS[element]
    ones = (1 << (7 - spec.fraction_bits)) - 1  # the exponent field with all bits set
    values = []
    for code in range(256):
        field, fraction = (code & 0x7F) >> spec.fraction_bits, code & ((1 << spec.fraction_bits) - 1)
        significand = fraction + ((1 << spec.fraction_bits) if field else 0)
        value = math.ldexp(significand, max(field, 1) - 1 + spec.min_exponent - spec.fraction_bits)
        if element == "e4m3" and (code & 0x7F) == 0x7F:  # e4m3 has one NaN a sign and no infinity
            value = math.nan
        if element == "e5m2" and field == ones:
            value = math.nan if fraction else math.inf
        values.append(math.copysign(value, -1.0 if code & 0x80 else 1.0))
    return torch.tensor(values, dtype=torch.float64, device=device)


def decode_element(codes: torch.Tensor, element: str) -> torch.Tensor:
    """float64 values of uint8 codes of e4m3 or e5m2, from a table of 256; same shape, NaN and infinity included."""
    if codes.dtype != torch.uint8 or not _element(element).saturates:
        raise ValueError(f"codes: expected uint8 codes of e4m3 or e5m2, got {codes.dtype} of {element}")
    table = _code_values(element, codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def amax_scale(x: torch.Tensor, element: str = "e4m3") -> float:
    """The per-tensor scale that maps the largest finite magnitude of x to the largest finite code: amax / 448.

    An fp32 number, rounded up so that nothing saturates. NaN and infinity are left out; a tensor without a finite
    non-zero value gives 1.0.
    """
    spec = _element(element)
    return float(_amax_scales(x.reshape(1, -1), spec)[0, 0])


def _amax_scales(x: torch.Tensor, spec: Element) -> torch.Tensor:
    """fp32 `[..., 1]`: per last-dim row amax / max_finite, rounded up; 1 for rows without a finite non-zero value."""
    if x.shape[-1] == 0:
        return torch.ones(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    amax = torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0).abs().amax(-1, keepdim=True).to(torch.float64)
    scale = (amax / spec.max_finite).to(torch.float32)
    low = scale.to(torch.float64) * spec.max_finite < amax  # fp32 rounded the scale down: amax / scale would saturate
    scale = torch.where(low, scale.nextafter(torch.full_like(scale, math.inf)), scale)
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(amax > 0, scale.clamp(min=tiny), torch.ones_like(scale))


def encode(x: torch.Tensor, fmt: str | CacheFormat, scale: float | None = None) -> Encoded:
    """Real values `[..., 576]` to stored bits: `stored = x / scale`.

    x: any float dtype. `scale`: for `e4m3` and `e5m2` a positive finite number, or None for `amax_scale(x)`; refused
    for the other formats, which compute theirs from amax (one a token, or one per 128 latent values). The division is
    done in fp32 (float64 for float64 input), as cache writers on a device do. Raises ValueError naming the argument.
    """
    fmt = _format(fmt)
    if x.shape[-1] != D or not x.is_floating_point():
        raise ValueError(
            f"x: expected floating-point [..., {D}] (512 latent and 64 rope values), got {x.dtype} {list(x.shape)}"
        )
    if scale is not None and (fmt.granularity != "tensor" or not (math.isfinite(scale) and scale > 0)):
        raise ValueError(f"scale: expected {_scale_words(fmt)}, got {scale!r}")
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    if fmt.granularity == "none":
        bits = round_to(wide, "bf16").to(torch.float32) if wide.dtype == torch.float64 else wide
        return Encoded(fmt, bits.to(torch.bfloat16))
    spec = ELEMENTS[fmt.latent]
    if fmt.granularity == "tensor":
        scale = amax_scale(wide, fmt.latent) if scale is None else scale
        scale32 = torch.tensor(scale, dtype=torch.float32, device=x.device)
        codes, counters = encode_element(wide / scale32, fmt.latent)
        return Encoded(fmt, codes, scale32, None, counters)
    if fmt.granularity == "token":
        scales = _amax_scales(wide, spec)
        codes, counters = encode_element(wide / scales, fmt.latent)
        return Encoded(fmt, codes, scales, None, counters)
    groups = wide[..., :D_V].unflatten(-1, (D_V // GROUP, GROUP))
    scales = _amax_scales(groups, spec)
    codes, counters = encode_element(groups / scales, fmt.latent)
    rope = wide[..., D_V:]
    rope = (round_to(rope, "bf16").to(torch.float32) if rope.dtype == torch.float64 else rope).to(torch.bfloat16)
    return Encoded(fmt, codes.flatten(-2), scales.squeeze(-1), rope, counters)


def decode(encoded: Encoded) -> torch.Tensor:
    """Real values, float64 `[..., 576]`: `stored * scale`, exact in float64."""
    fmt = encoded.format
    if fmt.granularity == "none":
        return encoded.data.to(torch.float64)
    values = decode_element(encoded.data, fmt.latent)
    assert encoded.scale is not None
    scale = encoded.scale.to(torch.float64)
    if fmt.granularity != "group128":
        return values * scale
    assert encoded.rope is not None
    latent = (values.unflatten(-1, (D_V // GROUP, GROUP)) * scale.unsqueeze(-1)).flatten(-2)
    return torch.cat([latent, encoded.rope.to(torch.float64)], dim=-1)


def bytes_per_token(fmt: str | CacheFormat) -> int:
    """Bytes of one token's row: 1152 (bf16), 576 (e4m3, e5m2), 580 (e4m3_token), 656 (e4m3_group128)."""
    return _format(fmt).bytes_per_token


def cache_bytes(fmt: str | CacheFormat, page_size: int, num_blocks: int = 1) -> int:
    """Bytes of `num_blocks` pages of `page_size` tokens of one layer; equals `allocate(...).nbytes`."""
    for name, value in (("page_size", page_size), ("num_blocks", num_blocks)):
        if value < 1:
            raise ValueError(f"{name}: expected a positive integer, got {value}")
    return num_blocks * page_size * bytes_per_token(fmt)


def allocate(
    fmt: str | CacheFormat, page_size: int, num_blocks: int = 1, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """An uninitialised cache `[num_blocks, page_size, …]`: 576 elements, or the byte row where scales lie in it."""
    fmt = _format(fmt)
    cache_bytes(fmt, page_size, num_blocks)  # checks the sizes
    packed = fmt.granularity in ("token", "group128")
    width, dtype = (fmt.bytes_per_token, torch.uint8) if packed else (D, ELEMENTS[fmt.latent].dtype)
    return torch.empty(num_blocks, page_size, width, dtype=dtype, device=device)
