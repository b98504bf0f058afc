# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Argument checks of the operator, in the order arch, dtype, device, layout, shape.

They look at metadata only, so they also run while a graph is traced. Lengths and page ids are values: the CPU target
checks them when it reads them, the CUDA targets keep inside the tensors whatever they hold. Every message holds the
argument's name, what was expected, what came, and the way out.
"""

from __future__ import annotations

import math
import numbers
from typing import NoReturn

import torch
from torch import Tensor

from mla_kernels import toolchain

__all__ = [
    "CUDA_INPUT_DTYPES",
    "TARGET_OF_CAPABILITY",
    "check_decode",
    "check_outputs",
    "check_scale",
    "check_splits",
    "check_target",
]

D_NOPE, D_ROPE, D = 512, 64, 576
MAX_HEADS = 128
MAX_QUERY_TOKENS = 8
MAX_SPLITS = 128
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
INPUT_DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float16)
# What the call writes: .to() or .contiguous() would make a copy, which would be written and thrown away.
WRITTEN = ("out", "lse", "workspace")
ALLOCATE = "allocate it so"

#: What the kernels of the CUDA targets take.
CUDA_INPUT_DTYPES = INPUT_DTYPES
CUDA_STRIDE = 16  # bytes: TMA and cp.async move that many at a time

#: CUDA compute capability to the target that serves it. A pair that is not here never reaches a launch.
TARGET_OF_CAPABILITY = toolchain.DEVICE_TARGETS


def _fail(kind: type[Exception], name: str, expected: str, got: object, way_out: str) -> NoReturn:
    raise kind(f"mla_decode: {name}: expected {expected}, got {got}; {way_out}")


def check_target(device: torch.device, targets: tuple[str, ...], capability: tuple[int, int] | None = None) -> None:
    """The device has a target, and the loaded build holds it (`targets` is empty where none is loaded).

    `capability` is asked from torch where it is not given. RuntimeError or NotImplementedError otherwise.
    """
    if device.type == "cpu":
        needed: str | None = "cpu"
    elif device.type == "cuda":
        if capability is None and not torch.cuda.is_available():
            why = "finds no usable driver or GPU" if torch.version.cuda else "is built without CUDA"
            _fail(RuntimeError, "q_nope", "a CUDA device", f"none: torch {torch.__version__} {why}", "use the CPU")
        pair = capability or torch.cuda.get_device_capability(device)
        needed = TARGET_OF_CAPABILITY.get(pair)
        if needed is None:
            known = ", ".join(f"{a}.{b}" for a, b in TARGET_OF_CAPABILITY)
            _fail(
                NotImplementedError,
                "q_nope",
                f"a device of compute capability {known}, or the CPU",
                toolchain.device_choice(pair).message.removesuffix("; use the CPU"),
                "move the tensors to the CPU",
            )
    else:
        _fail(
            NotImplementedError, "q_nope", "a CPU or CUDA tensor", f"a {device.type} tensor", "move the tensors there"
        )
    if not targets:
        _fail(
            RuntimeError,
            "build",
            f"a loaded build with target {needed}",
            "none",
            f'call mla_kernels.build.load(targets=("{needed}",)) first',
        )
    if needed not in targets:
        _fail(
            NotImplementedError,
            "build",
            f"a loaded build with target {needed}",
            f"one with {', '.join(targets)}",
            f'call mla_kernels.build.load(targets=("{needed}",))',
        )


def _check_number(name: str, value: object, expected: str = "a number") -> None:
    """TypeError for what torch would not take as a number; torch's own symbols stand for numbers while it traces."""
    if not isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat)):
        way_out = f"pass float({name})" if isinstance(value, str) else f"leave {name} out for 1.0"
        if name == "sm_scale":
            way_out = "usually (128 + 64) ** -0.5 of the unabsorbed head"
        _fail(TypeError, name, expected, "None" if value is None else type(value).__name__, way_out)


def check_splits(value: object) -> None:
    """TypeError for what is neither an integer nor None. A float is refused even where it is whole."""
    if value is not None and not isinstance(value, (numbers.Integral, torch.SymInt)):
        got = f"{type(value).__name__} {value!r}"
        way_out = "pass int(num_kv_splits)" if isinstance(value, (numbers.Real, str)) else "leave it out"
        _fail(TypeError, "num_kv_splits", "an integer, or None for the automatic plan", got, way_out)
    if torch.compiler.is_compiling():
        return  # it may be a symbol now; the target checks it when it runs
    if value is not None and not 1 <= value <= MAX_SPLITS:  # type: ignore[operator]
        _fail(
            ValueError,
            "num_kv_splits",
            f"1 to {MAX_SPLITS}, or None for the automatic plan",
            value,
            "a row never gets more splits than it has tiles of 64 tokens",
        )


def check_scale(name: str, value: float) -> None:
    """A scale is a finite number above 0 that stays so in fp32; TypeError or ValueError otherwise."""
    _check_number(name, value, "a number or a tensor of one fp32 element")
    stored = torch.tensor(value, dtype=torch.float32).item() if math.isfinite(value) else value
    if not (math.isfinite(stored) and stored > 0.0):
        _fail(
            ValueError,
            name,
            "a finite number above 0 in fp32",
            value,
            "real = stored * scale, so calibrate it or pass 1.0",
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        way_out = "allocate one" if name in WRITTEN else "convert it with torch.as_tensor"
        _fail(TypeError, name, "a torch.Tensor", "None" if value is None else type(value).__name__, way_out)


def check_outputs(out: object, lse: object) -> None:
    """What the out-variant writes are tensors: it has no place of its own to write to. TypeError otherwise."""
    for name, value in (("out", out), ("lse", lse)):
        if value is None:
            _fail(TypeError, name, "a torch.Tensor", "None", "allocate one, or call mla_decode, which does")


def _check_dtype(name: str, tensor: Tensor, dtype: torch.dtype, why: str = "") -> None:
    if tensor.dtype != dtype:
        way_out = ALLOCATE if name in WRITTEN else f"pass {name}.to(torch.{_dtype_name(dtype)})"
        if name in ("q_pe", "kv_cache"):
            way_out = _way_to_one_dtype(name, tensor.dtype, dtype)
        if tensor.dtype == torch.uint8 and dtype == torch.float8_e4m3fn:
            way_out = f"pass {name}.view(torch.float8_e4m3fn) if its bytes are e4m3 codes"
        _fail(TypeError, name, f"{_dtype_name(dtype)}{why}", _dtype_name(tensor.dtype), way_out)


def _way_to_one_dtype(name: str, got: torch.dtype, expected: torch.dtype) -> str:
    """Codes and real values differ by a scale, which .to() alone would drop."""
    scale = "kv_scale" if name == "kv_cache" else "q_scale"
    if expected == torch.float8_e4m3fn:
        return f"quantise the real values, (real / {scale}).clamp(-448, 448).to(torch.float8_e4m3fn)"
    if got.itemsize == 1:
        other = "the queries" if name == "kv_cache" else "q_nope"
        real = f"{name}.to(torch.{_dtype_name(expected)}) * {scale}"
        return f"quantise {other} to e4m3 (q / q_scale), or dequantise {name}: {real}"
    return f"pass {name}.to(torch.{_dtype_name(expected)})"


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], why: str) -> None:
    if tuple(tensor.shape) != expected:
        _fail(ValueError, name, f"shape {list(expected)}", list(tensor.shape), why)


def _check_inner_stride(name: str, tensor: Tensor) -> None:
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        way_out = ALLOCATE if name in WRITTEN else f"pass {name}.contiguous()"
        _fail(ValueError, name, "a last stride of 1", tensor.stride(-1), way_out)


def _check_written(name: str, tensor: Tensor) -> None:
    """From the smallest stride up, each must step over all that the smaller ones reach: then no two elements meet."""
    dims = list(zip(tensor.stride(), tensor.shape, strict=True))
    reached = 1
    # Symbols have no order that a trace could keep: there every stride is compared with a single element only.
    for stride, size in dims if torch.compiler.is_compiling() else sorted(dims):
        if size > 1 and stride < reached and tensor.numel():
            _fail(
                ValueError,
                name,
                "memory of its own for every element",
                f"strides {list(tensor.stride())} for shape {list(tensor.shape)}",
                "pass a real tensor, not an expanded one or one whose rows overlap",
            )
        if not torch.compiler.is_compiling():
            reached += (size - 1) * stride


def check_decode(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    sm_scale: float,
    q_scale: float | Tensor = 1.0,
    kv_scale: float | Tensor = 1.0,
    num_kv_splits: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Check what metadata tells, for queries of 3 or 4 dimensions: TypeError for dtypes, ValueError for the rest."""
    tensors = {"q_nope": q_nope, "q_pe": q_pe, "kv_cache": kv_cache, "seq_lens": seq_lens, "block_table": block_table}
    tensors |= {k: v for k, v in (("out", out), ("lse", lse), ("workspace", workspace)) if v is not None}
    tensors |= {k: v for k, v in (("q_scale", q_scale), ("kv_scale", kv_scale)) if isinstance(v, Tensor)}

    for name, value in tensors.items():
        _check_tensor(name, value)
    for name, scale in (("q_scale", q_scale), ("kv_scale", kv_scale)):
        if not isinstance(scale, Tensor):
            _check_number(name, scale, "a number or a tensor of one fp32 element")
    if not (isinstance(sm_scale, Tensor) and sm_scale.dim() == 0):
        _check_number("sm_scale", sm_scale)
    if q_nope.dtype not in INPUT_DTYPES:
        allowed = ", ".join(_dtype_name(d) for d in INPUT_DTYPES)
        way_out = "convert it"
        if q_nope.dtype == torch.uint8:
            way_out = "pass q_nope.view(torch.float8_e4m3fn) if its bytes are e4m3 codes"
        _fail(TypeError, "q_nope", f"one of {allowed}", _dtype_name(q_nope.dtype), way_out)
    _check_dtype("q_pe", q_pe, q_nope.dtype, " as q_nope")
    _check_dtype("kv_cache", kv_cache, q_nope.dtype, " as q_nope")
    _check_dtype("seq_lens", seq_lens, torch.int32)
    _check_dtype("block_table", block_table, torch.int32)
    if out is not None:
        _check_dtype("out", out, torch.float16 if q_nope.dtype == torch.float16 else torch.bfloat16)
    if lse is not None:
        _check_dtype("lse", lse, torch.float32)
    for name, scale in (("q_scale", q_scale), ("kv_scale", kv_scale)):
        if isinstance(scale, Tensor):
            _check_dtype(name, scale, torch.float32)

    for name, tensor in tensors.items():
        if name in ("q_scale", "kv_scale") and tensor.device.type == "cpu" and q_nope.device.type == "cuda":
            continue  # read as a number
        if tensor.device != q_nope.device:
            _fail(
                ValueError,
                name,
                f"device {q_nope.device} as q_nope",
                tensor.device,
                ALLOCATE if name in WRITTEN else f'pass {name}.to("{q_nope.device}")',
            )

    for name in ("q_nope", "q_pe", "kv_cache", "block_table", "out"):
        if name in tensors:
            _check_inner_stride(name, tensors[name])
    if kv_cache.device.type == "cuda" and not torch.compiler.is_compiling():
        strides = [kv_cache.stride(i) for i in range(kv_cache.dim() - 1)]
        elements = CUDA_STRIDE // kv_cache.element_size()
        if any(stride % elements for stride in strides):
            _fail(
                ValueError,
                "kv_cache",
                f"page and token strides that are multiples of {elements} elements on a CUDA device",
                strides,
                "pad the rows, or pass kv_cache.contiguous()",
            )
    for name in ("out", "lse"):
        if name in tensors:
            _check_written(name, tensors[name])
    for name, tensor in tensors.items():
        if tensor.requires_grad and torch.is_grad_enabled():
            _fail(
                ValueError,
                name,
                "a tensor without gradient",
                "requires_grad=True",
                "decode has no backward: call it under torch.no_grad()",
            )

    _check_shapes(tensors)
    for name, scale in (("q_scale", q_scale), ("kv_scale", kv_scale)):
        if isinstance(scale, Tensor) and scale.numel() != 1:
            _fail(ValueError, name, "one element", list(scale.shape), "one scale serves the whole tensor")
    check_splits(num_kv_splits)
    if torch.compiler.is_compiling():
        return  # numbers may be symbols now; the target checks them when it runs
    for name, scale in (("q_scale", q_scale), ("kv_scale", kv_scale)):
        if not isinstance(scale, Tensor):
            check_scale(name, scale)
    if not math.isfinite(sm_scale):
        _fail(ValueError, "sm_scale", "a finite number", sm_scale, "usually (128 + 64) ** -0.5 of the unabsorbed head")


def _check_shapes(tensors: dict[str, Tensor]) -> None:
    q_nope = tensors["q_nope"]
    if q_nope.dim() not in (3, 4):
        _fail(
            ValueError,
            "q_nope",
            "shape [b, h_q, 512] or [b, s_q, h_q, 512]",
            list(q_nope.shape),
            "view it so",
        )
    *lead, h_q, _ = q_nope.shape
    b = lead[0]
    if len(lead) == 2 and not 1 <= lead[1] <= MAX_QUERY_TOKENS:
        _fail(ValueError, "q_nope", f"s_q from 1 to {MAX_QUERY_TOKENS}", lead[1], "split the query tokens over calls")
    if not 1 <= h_q <= MAX_HEADS:
        _fail(ValueError, "q_nope", f"h_q from 1 to {MAX_HEADS}", h_q, "split the heads over calls")
    rows = (*lead, h_q)
    _check_shape("q_nope", q_nope, (*rows, D_NOPE), "q_nope holds the 512 latent dims")
    _check_shape("q_pe", tensors["q_pe"], (*rows, D_ROPE), "q_pe holds the 64 rotary dims of the same queries")
    cache = tensors["kv_cache"]
    if cache.dim() != 3:
        _fail(ValueError, "kv_cache", "shape [num_blocks, page_size, 576]", list(cache.shape), "view it so")
    if cache.shape[1] not in PAGE_SIZES:
        allowed = ", ".join(map(str, PAGE_SIZES))
        _fail(ValueError, "kv_cache", f"page_size one of {allowed}", cache.shape[1], "repack the cache")
    _check_shape("kv_cache", cache, (*cache.shape[:2], D), "a row is 512 latent and 64 rotary dims")
    _check_shape("seq_lens", tensors["seq_lens"], (b,), "one length for each row of q_nope")
    table = tensors["block_table"]
    if table.dim() != 2:
        _fail(
            ValueError,
            "block_table",
            "shape [b, max_blocks]",
            list(table.shape),
            "one table row for each row of q_nope",
        )
    _check_shape("block_table", table, (b, table.shape[1]), "one table row for each row of q_nope")
    if "out" in tensors:
        _check_shape("out", tensors["out"], (*rows, D_NOPE), "allocate it so")
    if "lse" in tensors:
        _check_shape("lse", tensors["lse"], rows, "allocate it so")
