# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Every message of the argument checks, in Python and in the library: one thing broken at a time, a good call after."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_kernels import checks, ops
from mla_kernels.cases import inputs_from

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
Change = Callable[[dict[str, Any]], None]
ROOT = Path(__file__).resolve().parents[1]


def good(dtype: str = "e4m3", s_q: int = 1) -> dict[str, Any]:
    """Arguments of a right call of the out-variant: 4 rows, 3 heads, pages of 16, 9 slots each."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, s_q, 3, 576, generator=generator).bfloat16()
    case = inputs_from(q, torch.randn(4, 90, 576, generator=generator).bfloat16(), [90, 0, 1, 64], page_size=16)
    a = {name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in case.args.items()}
    if dtype != "e4m3":
        for name in ("q_nope", "q_pe", "kv_cache"):
            a[name] = a[name].to(getattr(torch, dtype))
        a["q_scale"] = a["kv_scale"] = 1.0
    a["out"] = torch.empty(a["q_nope"].shape, dtype=torch.float16 if dtype == "float16" else BF16)
    a["lse"] = torch.empty(a["q_nope"].shape[:-1])
    a["workspace"] = None
    return a


def put(name: str, value: Any) -> Change:
    def change(a: dict[str, Any]) -> None:
        a[name] = value(a[name]) if callable(value) else value

    return change


def put_two(first: str, second: str, value: Callable[[Any], Any]) -> Change:
    def change(a: dict[str, Any]) -> None:
        a[first], a[second] = value(a[first]), value(a[second])

    return change


def all_tensors(value: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(a: dict[str, Any]) -> None:
        for name in ("q_nope", "q_pe"):
            a[name] = value(a[name])

    return change


def wide(x: torch.Tensor) -> torch.Tensor:
    """The same values with a last stride of 2."""
    return (
        torch.stack([x, x], -1)[..., 0]
        if x.dtype != E4M3
        else torch.stack([x.view(torch.uint8)] * 2, -1).view(E4M3)[..., 0]
    )


META = torch.device("meta")
#: name: (change, exception, message). The message is matched from its start, after "mla_decode: ".
PYTHON: dict[str, tuple[Change, type[Exception], str]] = {
    "q not a tensor": (
        put("q_nope", [1.0]),
        TypeError,
        "q_nope: expected a torch.Tensor, got list; convert it with torch.as_tensor",
    ),
    "q float32": (
        all_tensors(lambda x: x.float()),
        TypeError,
        "q_nope: expected one of float8_e4m3fn, bfloat16, float16, got float32; convert it",
    ),
    "q uint8": (
        put("q_nope", lambda x: x.view(torch.uint8)),
        TypeError,
        "q_nope: expected one of float8_e4m3fn, bfloat16, float16, got uint8; pass q_nope.view(torch.float8_e4m3fn) if",
    ),
    "q_pe bf16": (
        put("q_pe", lambda x: x.to(BF16)),
        TypeError,
        "q_pe: expected float8_e4m3fn as q_nope, got bfloat16; quantise the real values, (real / q_scale).clamp(",
    ),
    "bf16 q with e4m3 cache": (
        all_tensors(lambda x: x.to(BF16)),
        TypeError,
        "kv_cache: expected bfloat16 as q_nope, got float8_e4m3fn; quantise the queries to e4m3 (q / q_scale), or "
        "dequantise kv_cache: kv_cache.to(torch.bfloat16) * kv_scale",
    ),
    "cache uint8": (
        put("kv_cache", lambda x: x.view(torch.uint8)),
        TypeError,
        "kv_cache: expected float8_e4m3fn as q_nope, got uint8; pass kv_cache.view(torch.float8_e4m3fn) if its bytes",
    ),
    "int64 lengths": (
        put("seq_lens", lambda x: x.long()),
        TypeError,
        "seq_lens: expected int32, got int64; pass seq_lens.to(torch.int32)",
    ),
    "int64 table": (
        put("block_table", lambda x: x.long()),
        TypeError,
        "block_table: expected int32, got int64; pass block_table.to(torch.int32)",
    ),
    "out fp16": (put("out", lambda x: x.half()), TypeError, "out: expected bfloat16, got float16; allocate it so"),
    "lse fp64": (put("lse", lambda x: x.double()), TypeError, "lse: expected float32, got float64; allocate it so"),
    "scale fp64": (
        put("kv_scale", torch.ones(1, dtype=torch.float64)),
        TypeError,
        "kv_scale: expected float32, got float64; pass kv_scale.to(torch.float32)",
    ),
    "cache elsewhere": (
        put("kv_cache", lambda x: x.to(META)),
        ValueError,
        'kv_cache: expected device cpu as q_nope, got meta; pass kv_cache.to("cpu")',
    ),
    "scale elsewhere": (
        put("q_scale", torch.ones(1, device=META)),
        ValueError,
        'q_scale: expected device cpu as q_nope, got meta; pass q_scale.to("cpu")',
    ),
    "q strided inside": (
        put("q_nope", wide),
        ValueError,
        "q_nope: expected a last stride of 1, got 2; pass q_nope.contiguous()",
    ),
    "cache strided inside": (
        put("kv_cache", wide),
        ValueError,
        "kv_cache: expected a last stride of 1, got 2; pass kv_cache.contiguous()",
    ),
    "table strided inside": (
        put("block_table", wide),
        ValueError,
        "block_table: expected a last stride of 1, got 2; pass block_table.contiguous()",
    ),
    "out strided inside": (put("out", wide), ValueError, "out: expected a last stride of 1, got 2; allocate it so"),
    "out expanded": (
        put("out", lambda x: x[:1].expand(x.shape)),
        ValueError,
        "out: expected memory of its own for every element, got strides [0, 512, 1] for shape [4, 3, 512]; pass a real",
    ),
    "rows of out overlap": (
        put("out", lambda x: x.as_strided((4, 3, 512), (16, 16, 1))),
        ValueError,
        "out: expected memory of its own for every element, got strides [16, 16, 1] for shape [4, 3, 512]; pass a real",
    ),
    "heads of out meet": (
        put("out", torch.empty(20480, dtype=BF16).as_strided((4, 3, 512), (511, 4096, 1))),
        ValueError,
        "out: expected memory of its own for every element, got strides [511, 4096, 1] for shape [4, 3, 512]; pass",
    ),
    "rows of lse overlap": (
        put("lse", lambda x: x.as_strided((4, 3), (2, 1))),
        ValueError,
        "lse: expected memory of its own for every element, got strides [2, 1] for shape [4, 3]; pass a real tensor",
    ),
    "no out": (put("out", None), TypeError, "out: expected a torch.Tensor, got None; allocate one, or call mla_decode"),
    "no lse": (put("lse", None), TypeError, "lse: expected a torch.Tensor, got None; allocate one, or call mla_decode"),
    "list as out": (put("out", [1.0]), TypeError, "out: expected a torch.Tensor, got list; allocate one"),
    **{
        f"{name} elsewhere": (
            put(name, torch.empty(shape, dtype=dtype, device=META)),
            ValueError,
            f"{name}: expected device cpu as q_nope, got meta; allocate it so",
        )
        for name, shape, dtype in (
            ("out", (4, 3, 512), BF16),
            ("lse", (4, 3), torch.float32),
            ("workspace", (9999,), torch.uint8),
        )
    },
    "bf16 q_nope with e4m3 q_pe": (
        put_two("q_nope", "kv_cache", lambda x: x.to(BF16)),
        TypeError,
        "q_pe: expected bfloat16 as q_nope, got float8_e4m3fn; quantise q_nope to e4m3 (q / q_scale), or dequantise "
        "q_pe: q_pe.to(torch.bfloat16) * q_scale",
    ),
    "bf16 cache with e4m3 q": (
        put("kv_cache", lambda x: x.to(BF16)),
        TypeError,
        "kv_cache: expected float8_e4m3fn as q_nope, got bfloat16; quantise the real values, (real / kv_scale).clamp(",
    ),
    "fp16 cache with bf16 q": (
        lambda a: a.update({k: a[k].to(BF16) for k in ("q_nope", "q_pe")}, kv_cache=a["kv_cache"].half()),
        TypeError,
        "kv_cache: expected bfloat16 as q_nope, got float16; pass kv_cache.to(torch.bfloat16)",
    ),
    **{
        f"{name} {value!r}": (
            put(name, value),
            TypeError,
            f"{name}: expected a number or a tensor of one fp32 element, got {got}; {way_out}",
        )
        for name in ("q_scale", "kv_scale")
        for value, got, way_out in (
            ("2", "str", f"pass float({name})"),
            (None, "None", f"leave {name} out for 1.0"),
            ([1.0], "list", f"leave {name} out for 1.0"),
        )
    },
    **{
        f"sm_scale {value!r}": (
            put("sm_scale", value),
            TypeError,
            f"sm_scale: expected a number, got {got}; usually (128 + 64) ** -0.5",
        )
        for value, got in (("x", "str"), (None, "None"), (torch.ones(2), "Tensor"))
    },
    **{
        f"num_kv_splits {value!r}": (
            put("num_kv_splits", value),
            TypeError,
            f"num_kv_splits: expected an integer, or None for the automatic plan, got {got}; {way_out}",
        )
        for value, got, way_out in (
            (2.0, "float 2.0", "pass int(num_kv_splits)"),
            ("3", "str '3'", "pass int(num_kv_splits)"),
            ([2], "list [2]", "leave it out"),
        )
    },
    "q wants a gradient": (
        lambda a: a.update({k: a[k].to(BF16).requires_grad_(k == "q_pe") for k in ("q_nope", "q_pe", "kv_cache")}),
        ValueError,
        "q_pe: expected a tensor without gradient, got requires_grad=True; decode has no backward",
    ),
    "q of 2 dimensions": (
        put("q_nope", lambda x: x[0]),
        ValueError,
        "q_nope: expected shape [b, h_q, 512] or [b, s_q, h_q, 512], got [3, 512]; view it so",
    ),
    "9 query tokens": (
        put("q_nope", lambda x: x[:, None].expand(4, 9, 3, 512)),
        ValueError,
        "q_nope: expected s_q from 1 to 8, got 9; split the query tokens over calls",
    ),
    "129 heads": (
        put("q_nope", lambda x: x[:, :1].expand(4, 129, 512)),
        ValueError,
        "q_nope: expected h_q from 1 to 128, got 129; split the heads over calls",
    ),
    "no heads": (
        put("q_nope", lambda x: x[:, :0]),
        ValueError,
        "q_nope: expected h_q from 1 to 128, got 0; split the heads over calls",
    ),
    "q of 511 dims": (
        put("q_nope", lambda x: x[..., :511]),
        ValueError,
        "q_nope: expected shape [4, 3, 512], got [4, 3, 511]; q_nope holds the 512 latent dims",
    ),
    "heads of q_pe": (
        put("q_pe", lambda x: x[:, :2]),
        ValueError,
        "q_pe: expected shape [4, 3, 64], got [4, 2, 64]; q_pe holds the 64 rotary dims of the same queries",
    ),
    "batch of q_pe": (put("q_pe", lambda x: x[:3]), ValueError, "q_pe: expected shape [4, 3, 64], got [3, 3, 64]"),
    "cache of 2 dimensions": (
        put("kv_cache", lambda x: x[0]),
        ValueError,
        "kv_cache: expected shape [num_blocks, page_size, 576], got [16, 576]; view it so",
    ),
    **{
        f"pages of {size}": (
            put("kv_cache", torch.empty(20, size, 576, dtype=E4M3)),
            ValueError,
            f"kv_cache: expected page_size one of 1, 2, 4, 8, 16, 32, 64, 128, 256, got {size}; repack the cache",
        )
        for size in (0, 3, 48, 96, 512)
    },
    "575 wide cache": (
        put("kv_cache", lambda x: x[..., :575]),
        ValueError,
        re.compile(r"kv_cache: expected shape \[\d+, 16, 576\], got \[\d+, 16, 575\]; a row is 512 latent and 64"),
    ),
    "batch of lengths": (
        put("seq_lens", lambda x: x[:3]),
        ValueError,
        "seq_lens: expected shape [4], got [3]; one length for each row of q_nope",
    ),
    "table of 1 dimension": (
        put("block_table", lambda x: x[0]),
        ValueError,
        "block_table: expected shape [b, max_blocks], got [9]; one table row for each row of q_nope",
    ),
    "batch of table": (
        put("block_table", lambda x: x[:3]),
        ValueError,
        "block_table: expected shape [4, 9], got [3, 9]; one table row for each row of q_nope",
    ),
    "shape of out": (
        put("out", lambda x: x[:, :2]),
        ValueError,
        "out: expected shape [4, 3, 512], got [4, 2, 512]; allocate it so",
    ),
    "shape of lse": (
        put("lse", lambda x: x[:, :2]),
        ValueError,
        "lse: expected shape [4, 3], got [4, 2]; allocate it so",
    ),
    "two scales": (
        put("kv_scale", torch.ones(2)),
        ValueError,
        "kv_scale: expected one element, got [2]; one scale serves the whole tensor",
    ),
    "no splits": (
        put("num_kv_splits", 0),
        ValueError,
        "num_kv_splits: expected 1 to 128, or None for the automatic plan, got 0; a row never gets more splits than",
    ),
    "129 splits": (put("num_kv_splits", 129), ValueError, "num_kv_splits: expected 1 to 128, or None for the aut"),
    "sm_scale": (put("sm_scale", math.nan), ValueError, "sm_scale: expected a finite number, got nan; usually"),
    **{
        f"{name} {value}": (
            put(name, value),
            ValueError,
            f"{name}: expected a finite number above 0 in fp32, got {value}; real = stored * scale, so calibrate it",
        )
        for name in ("q_scale", "kv_scale")
        for value in (0.0, -1.0, math.nan, math.inf, 1e-60, 1e60)
    },
}
#: What only the target can see: values in memory, the workspace it needs.
VALUES: dict[str, tuple[Change, type[Exception], str]] = {
    "negative length": (
        put("seq_lens", lambda x: x - 1),
        ValueError,
        "seq_lens[1]: expected 0 or more, got -1; a row without tokens has length 0",
    ),
    "length above capacity": (
        put("seq_lens", lambda x: x + 80),
        ValueError,
        "seq_lens[0]: expected at most max_blocks * page_size = 144, got 170; widen block_table",
    ),
    "page id": (
        put("block_table", lambda x: torch.where(torch.arange(9) == 5, -1, x).int()),
        ValueError,
        re.compile(
            r"block_table\[0, 5\]: expected a page id from 0 to \d+, got -1; seq_lens\[0\] = 90 needs this page"
        ),
    ),
    "page id past the cache": (
        put("kv_cache", lambda x: x[:1]),
        ValueError,
        re.compile(r"block_table\[\d, \d\]: expected a page id from 0 to 0, got \d+; seq_lens"),
    ),
    **{
        f"scale tensor of {value}": (
            put("kv_scale", torch.tensor([value])),
            ValueError,
            f"kv_scale: expected a finite number above 0 in fp32, got {value:g}; real = stored * scale",
        )
        for value in (0.0, -1.0, math.nan, math.inf)
    },
    "scales too large together": (
        lambda a: a.update(q_scale=1e30, kv_scale=1e30),
        ValueError,
        "sm_scale: expected sm_scale * q_scale * kv_scale finite in fp32, got 7.2",
    ),
    "small workspace": (
        lambda a: a.update(num_kv_splits=2, workspace=torch.empty(99, dtype=torch.uint8)),
        ValueError,
        re.compile(
            r"workspace: expected a 1-D contiguous tensor of at least \d+ bytes, got \[99\] of 1 bytes each; ask"
        ),
    ),
    "workspace of 2 dimensions": (
        lambda a: a.update(num_kv_splits=2, workspace=torch.empty(99, 9999)),
        ValueError,
        re.compile(r"workspace: expected a 1-D contiguous tensor of at least \d+ bytes, got \[99, 9999\] of 4 bytes"),
    ),
    "workspace off 4 bytes": (
        lambda a: a.update(num_kv_splits=2, workspace=torch.empty(999_999, dtype=torch.uint8)[1:]),
        ValueError,
        "workspace: expected an address that is a multiple of 4, got another; pass the tensor as it was allocated",
    ),
}
#: The same faults through torch.ops, which meets the library's own checks; None where torch itself or Python answers.
LIBRARY: dict[str, str | re.Pattern[str] | None] = {
    "q float32": "q_nope: expected float8_e4m3fn, bfloat16 or float16, got float32; convert it",
    "q uint8": "q_nope: expected float8_e4m3fn, bfloat16 or float16, got another dtype; convert it",
    "q_pe bf16": "q_pe: expected float8_e4m3fn as q_nope, got bfloat16; convert it",
    "bf16 q with e4m3 cache": "kv_cache: expected bfloat16 as q_nope, got float8_e4m3fn; convert it",
    "cache uint8": "kv_cache: expected float8_e4m3fn as q_nope, got another dtype; convert it",
    "int64 lengths": "seq_lens: expected int32, got another dtype; convert it",
    "int64 table": "block_table: expected int32, got another dtype; convert it",
    "out fp16": "out: expected bfloat16, got float16; convert it",
    "lse fp64": "lse: expected float32, got another dtype; convert it",
    "scale fp64": "kv_scale: expected float32, got another dtype; convert it",
    "q strided inside": "q_nope: expected a last stride of 1, got 2; pass .contiguous()",
    "cache strided inside": "kv_cache: expected a last stride of 1, got 2; pass .contiguous()",
    "table strided inside": "block_table: expected a last stride of 1, got 2; pass .contiguous()",
    "out strided inside": "out: expected a last stride of 1, got 2; pass .contiguous()",
    "out expanded": "out: expected memory of its own for every element, got a stride of 0; pass a real tensor",
    "9 query tokens": "q_nope: expected s_q from 1 to 8, got 9; split the query tokens over calls",
    "129 heads": "q_nope: expected h_q from 1 to 128, got 129; split the heads over calls",
    "no heads": "q_nope: expected h_q from 1 to 128, got 0; split the heads over calls",
    "q of 511 dims": "q_nope: expected shape [4, 1, 3, 512], got [4, 1, 3, 511]; q_nope holds the 512 latent dims",
    "heads of q_pe": "q_pe: expected shape [4, 1, 3, 64], got [4, 1, 2, 64]; q_pe holds the 64 rotary dims",
    "batch of q_pe": "q_pe: expected shape [4, 1, 3, 64], got [3, 1, 3, 64]",
    "cache of 2 dimensions": "kv_cache: expected shape [num_blocks, page_size, 576], got [16, 576]; view it so",
    "pages of 0": "kv_cache: expected page_size one of 1, 2, 4, 8, 16, 32, 64, 128, 256, got 0; repack the cache",
    "pages of 48": "kv_cache: expected page_size one of 1, 2, 4, 8, 16, 32, 64, 128, 256, got 48; repack the cache",
    "575 wide cache": re.compile(r"kv_cache: expected shape \[\d+, 16, 576\], got \[\d+, 16, 575\]; a row is 512"),
    "batch of lengths": "seq_lens: expected shape [4], got [3]; one length for each row of q_nope",
    "table of 1 dimension": "block_table: expected shape [b, max_blocks], got [9]; pass one table row for each row",
    "batch of table": "block_table: expected shape [4, 9], got [3, 9]; one table row for each row of q_nope",
    "shape of out": "out: expected shape [4, 1, 3, 512], got [4, 1, 2, 512]; allocate it so",
    "shape of lse": "lse: expected shape [4, 1, 3], got [4, 1, 2]; allocate it so",
    "two scales": "kv_scale: expected one element, got [2]; one scale serves the whole tensor",
    "129 splits": "num_kv_splits: expected 1 to 128, or None for the automatic plan, got 129; a row never gets more",
    "sm_scale": "sm_scale: expected a finite number, got nan; usually (192) ** -0.5",
    "kv_scale 0.0": "kv_scale: expected a finite number above 0 in fp32, got 0; real = stored * scale",
    "q_scale inf": "q_scale: expected a finite number above 0 in fp32, got inf; real = stored * scale",
}


def matches(error: BaseException, message: str | re.Pattern[str]) -> bool:
    text = str(error).removeprefix("mla_decode: ")
    return bool(message.match(text)) if isinstance(message, re.Pattern) else text.startswith(message)


def through_library(a: dict[str, Any]) -> None:
    """A call of torch.ops, with four dimensions."""
    queries = [a[k].unsqueeze(1) if a[k].dim() == 3 else a[k] for k in ("q_nope", "q_pe")]
    scales = [a["q_scale"], a["kv_scale"]]
    numbers = [1.0 if isinstance(s, torch.Tensor) else s for s in scales]
    tensors = [s if isinstance(s, torch.Tensor) else None for s in scales]
    torch.ops.mla_kernels.mla_decode_out(
        *(*queries, a["kv_cache"], a["seq_lens"], a["block_table"], a["sm_scale"], *numbers, *tensors),
        *(a["num_kv_splits"], a["out"].unsqueeze(1), a["lse"].unsqueeze(1), a["workspace"]),
    )


@pytest.mark.usefixtures("cpu_build")
@pytest.mark.parametrize("fault", [*PYTHON, *VALUES])
def test_python_message(fault: str) -> None:
    change, kind, message = {**PYTHON, **VALUES}[fault]
    a = good()
    change(a)
    with pytest.raises(kind) as caught:
        ops.mla_decode_out(**a)
    assert matches(caught.value, message), str(caught.value)
    out, lse = ops.mla_decode_out(**good())
    assert bool(torch.isfinite(out).all())
    assert bool((lse[1] == -math.inf).all())


@pytest.mark.usefixtures("cpu_build")
@pytest.mark.parametrize("fault", [*LIBRARY, *VALUES])
def test_library_message(fault: str) -> None:
    change, _, message = {**PYTHON, **VALUES}[fault]
    a = good()
    change(a)
    with pytest.raises(ValueError, match="mla_decode: ") as caught:
        through_library(a)
    assert matches(caught.value, LIBRARY.get(fault) or message), str(caught.value)
    a = good()
    through_library(a)
    assert bool(torch.isfinite(a["out"]).all())


@pytest.mark.usefixtures("cpu_build")
def test_library_messages_that_the_wrapper_cannot_provoke() -> None:
    for change, message in (
        (put_two("q_nope", "q_pe", lambda x: x[:, :, None, None]), "q_nope: expected at most 4 dimensions, got 5"),
        (put("num_kv_splits", -1), "num_kv_splits: expected 1 to 128, or None for the automatic plan, got -1"),
    ):
        a = good()
        change(a)
        with pytest.raises(ValueError, match="mla_decode: ") as caught:
            through_library(a)
        assert matches(caught.value, message), str(caught.value)
    a = good()
    with pytest.raises(ValueError, match=re.escape("q_nope: expected shape [b, s_q, h_q, 512], got [4, 3, 512]")):
        torch.ops.mla_kernels.mla_decode_out(
            *(a[k] for k in ("q_nope", "q_pe", "kv_cache", "seq_lens", "block_table")),
            *(1.0, 1.0, 1.0, None, None, None, a["out"], a["lse"], None),
        )


def test_no_message_of_the_library_is_untested() -> None:
    """Each fail(…) of the headers, the CPU launcher and the binding has its words in a message matched above."""
    tested = [m.pattern.replace("\\", "") if isinstance(m, re.Pattern) else m for m in LIBRARY.values() if m]
    tested += [m.pattern.replace("\\", "") if isinstance(m, re.Pattern) else m for _, _, m in VALUES.values()]
    tested += ["expected at most 4 dimensions", "expected shape [b, s_q, h_q, 512]", "this processor has no other"]
    names = ("include/mla/checks.h", "include/mla/make_params.h", "cpu/launch.cpp", "torch/view.h", "torch/ops.cpp")
    sources = [ROOT / "csrc" / name for name in names]
    calls = [call for path in sources for call in re.findall(r"\bfail\(\s*(.*?)\);", path.read_text("utf-8"), re.S)]
    calls = [call for call in calls if not call.startswith("const Name&")]  # the definition
    assert len(calls) >= 24
    elsewhere = ("the device of q_nope",)  # needs two devices
    for call in calls:
        literals = [text for text in re.findall(r'"([^"]*)"', call) if text not in ("seq_lens[", "block_table[")]
        if any(text in elsewhere for text in literals):
            continue
        longest = max(literals, key=len).strip()[:16]  # the table cuts long messages short
        assert any(longest in message for message in tested), call


def test_order_is_arch_dtype_device_layout_shape() -> None:
    """With everything wrong at once the earliest kind is named; mended one by one, the next."""
    cpu = ("cpu",)
    a = good()
    broken = {
        **a,
        "kv_cache": wide(a["kv_cache"].to(BF16)).to(META)[..., :575],
        "num_kv_splits": 0,
    }
    arguments = {name: value for name, value in broken.items() if name not in ("out", "lse", "workspace")}

    def message() -> str:
        with pytest.raises((TypeError, ValueError)) as caught:
            checks.check_decode(**arguments)
        return str(caught.value)

    with pytest.raises(NotImplementedError, match="q_nope: expected a CPU or CUDA tensor, got a meta tensor"):
        checks.check_target(META, cpu)
    assert "expected float8_e4m3fn as q_nope" in message()
    arguments["kv_cache"] = torch.empty(9, 16, 576, 2, dtype=E4M3, device=META)[:, :, :575, 0]
    assert "expected device cpu" in message()
    arguments["kv_cache"] = torch.empty(9, 16, 576, 2, dtype=E4M3)[:, :, :575, 0]
    assert "expected a last stride of 1" in message()
    arguments["kv_cache"] = torch.empty(9, 16, 575, dtype=E4M3)
    assert "expected shape [9, 16, 576]" in message()
    arguments["kv_cache"] = torch.empty(9, 16, 576, dtype=E4M3)
    assert "num_kv_splits" in message()
    arguments["num_kv_splits"] = None
    checks.check_decode(**arguments)


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        *(((9, 0), "sm90a"), ((10, 0), "sm100a"), ((10, 3), "sm100f")),
        *(((major, minor), None) for major, minor in ((8, 0), (8, 9), (9, 1), (10, 1), (11, 0), (12, 0), (12, 1))),
    ],
)
def test_capability_table(capability: tuple[int, int], target: str | None) -> None:
    """An explicit table: a pair that is not in it never reaches a launch, not even with every target built."""
    assert checks.TARGET_OF_CAPABILITY.get(capability) == target
    cuda = torch.device("cuda:0")
    every = ("cpu", "sm90a", "sm100a", "sm100f")
    if target is None:
        major, minor = capability
        with pytest.raises(
            NotImplementedError,
            match=r"expected a device of compute capability 9\.0, 10\.0, 10\.3, or the CPU, "
            rf"got compute capability {major}\.{minor}.*; move the tensors to the CPU",
        ):
            checks.check_target(cuda, every, capability)
        return
    checks.check_target(cuda, every, capability)
    with pytest.raises(
        NotImplementedError, match=rf"build: expected a loaded build with target {target}, got one with cpu;"
    ):
        checks.check_target(cuda, ("cpu",), capability)
    with pytest.raises(
        RuntimeError,
        match=rf"build: expected a loaded build with target {target}, got none; "
        rf'call mla_kernels.build.load\(targets=\("{target}",\)\)',
    ):
        checks.check_target(cuda, (), capability)


def test_disagreeing_v_scale_has_no_way_in() -> None:
    """K and V are the same bytes, so there is one kv_scale; a second scale is refused by name."""
    with pytest.raises(TypeError, match="v_scale"):
        ops.mla_decode(*(torch.empty(0) for _ in range(5)), sm_scale=1.0, v_scale=2.0)  # type: ignore[call-arg]
