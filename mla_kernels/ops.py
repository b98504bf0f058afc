# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The operator: `mla_decode`, its out-variant, and what tells about a call before it is made.

The schemas of `torch.ops.mla_kernels` are defined here, once in a process. A built library (`mla_kernels.build`) only
brings implementations, so a newer build can be loaded over an older one; the newest answers.

    S[m, t] = q[m] · k[t] × sm_scale × q_scale × kv_scale,    out[m] = Σ_t softmax(S)[m, t] × v[t] × kv_scale

k[t] is a row of the cache, v[t] its first 512 dims; real = stored × scale. lse is the natural logarithm of
Σ_t exp(S[m, t]).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mla_kernels import checks

__all__ = ["BLOCK_N", "loaded_targets", "mla_decode", "mla_decode_out", "split_plan", "workspace_size"]

#: Tokens of a tile: P is rounded and the output promoted once a tile, and splits are cut at its multiples.
BLOCK_N = 64
# The automatic plan, as in csrc/include/mla/scheduler.h (a test compares the two).
AUTO_TILES_PER_SPLIT = 8
AUTO_MAX_SPLITS = 64

_ARGUMENTS = (
    "Tensor q_nope, Tensor q_pe, Tensor kv_cache, Tensor seq_lens, Tensor block_table, float sm_scale, "
    "float q_scale, float kv_scale, Tensor? q_scale_tensor, Tensor? kv_scale_tensor, int? num_kv_splits"
)
_SCHEMAS = (
    f"mla_decode({_ARGUMENTS}) -> (Tensor out, Tensor lse)",
    f"mla_decode_out({_ARGUMENTS}, Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? workspace=None) -> ()",
    "build_key() -> str",
    "compiled_targets() -> str",
    "cpu_workspace_size(int b, int s_q, int h_q, int capacity, int? num_kv_splits) -> int",
    "cuda_workspace_size(int b, int s_q, int h_q, int capacity, int? num_kv_splits) -> int",
    # For tests: the plan as the kernels have it, and which instruction set the CPU target runs.
    "split_plan(int seq_len, int? num_kv_splits) -> int[]",
    "cuda_plan_share(int[] seq_lens, int lines, bool wide, bool gathered, int sms) -> int",
    "cpu_isa() -> str",
    "available_cpu_isas() -> str",
    "set_cpu_isa(str name) -> ()",
)


def _out_dtype(q: Tensor) -> torch.dtype:
    return torch.float16 if q.dtype == torch.float16 else torch.bfloat16


def _new_outputs(q_nope: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty(q_nope.shape, dtype=_out_dtype(q_nope), device=q_nope.device)
    return out, torch.empty(q_nope.shape[:-1], dtype=torch.float32, device=q_nope.device)


def _mla_decode_impl(q_nope: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out, lse = _new_outputs(q_nope)
    torch.ops.mla_kernels.mla_decode_out(q_nope, *rest, out, lse, None)
    return out, lse


def _mla_decode_fake(q_nope: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _new_outputs(q_nope)


def _mla_decode_out_fake(*args: object, **kwargs: object) -> None:
    return None


def _no_backward(ctx: object, *grads: Tensor) -> None:
    raise NotImplementedError("mla_decode: decode has no backward; call it under torch.no_grad()")


def _define() -> torch.library.Library:
    library = torch.library.Library("mla_kernels", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    library.impl("mla_decode", _mla_decode_impl, "CompositeExplicitAutograd")
    torch.library.register_fake("mla_kernels::mla_decode", _mla_decode_fake, lib=library)
    torch.library.register_fake("mla_kernels::mla_decode_out", _mla_decode_out_fake, lib=library)
    torch.library.register_autograd("mla_kernels::mla_decode", _no_backward, lib=library)
    return library


# importlib.reload (and a notebook's autoreload) runs this module again in the same namespace: the definitions stay.
_LIBRARY = globals().get("_LIBRARY") or _define()


def loaded_targets() -> tuple[str, ...]:
    """Targets of the build loaded last, such as ("cpu",); empty where none is loaded."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("mla_kernels::compiled_targets", "CompositeExplicitAutograd"):
        return ()
    return tuple(torch.ops.mla_kernels.compiled_targets().split(","))


def _scale_arguments(name: str, scale: float | Tensor, q: Tensor) -> tuple[float, Tensor | None]:
    """A scale as (number, tensor); for bf16 and fp16 it is dropped, with a warning where it says anything but 1."""
    number, tensor = (1.0, scale) if isinstance(scale, Tensor) else (float(scale), None)
    if q.dtype == torch.float8_e4m3fn:
        return number, tensor
    if tensor is not None and tensor.device.type == "cpu" and not torch.compiler.is_compiling():
        number = tensor.item()  # on a GPU the value stays unread: a scale must not cost a synchronisation
        checks.check_scale(name, number)
    if number != 1.0:
        warnings.warn(
            f"mla_decode: {name}: expected 1.0 for {checks._dtype_name(q.dtype)} inputs, got {number}; "
            "it is ignored, since scales belong to float8_e4m3fn",
            UserWarning,
            stacklevel=4,
        )
    return 1.0, None


def _arguments(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    sm_scale: float,
    q_scale: float | Tensor,
    kv_scale: float | Tensor,
    num_kv_splits: int | None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[object, ...]:
    """Checked arguments of the torch ops, queries with four dimensions."""
    if isinstance(q_nope, Tensor) and not torch.compiler.is_compiling():
        checks.check_target(q_nope.device, loaded_targets())
    checks.check_decode(
        q_nope,
        q_pe,
        kv_cache,
        seq_lens,
        block_table,
        sm_scale,
        q_scale,
        kv_scale,
        num_kv_splits,
        out,
        lse,
        workspace,
    )
    q_number, q_tensor = _scale_arguments("q_scale", q_scale, q_nope)
    kv_number, kv_tensor = _scale_arguments("kv_scale", kv_scale, q_nope)
    if q_nope.dim() == 3:
        q_nope, q_pe = q_nope.unsqueeze(1), q_pe.unsqueeze(1)
    return (
        q_nope,
        q_pe,
        kv_cache,
        seq_lens,
        block_table,
        sm_scale,
        q_number,
        kv_number,
        q_tensor,
        kv_tensor,
        num_kv_splits,
    )


def mla_decode(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    sm_scale: float,
    q_scale: float | Tensor = 1.0,
    kv_scale: float | Tensor = 1.0,
    num_kv_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Absorbed MLA decode over a paged cache.

    Args:
        q_nope, q_pe: [b, h_q, 512] and [b, h_q, 64], or [b, s_q, h_q, …] with s_q up to 8; e4m3 (torch.float8_e4m3fn),
            bf16 or fp16; h_q from 1 to 128; last stride 1, other strides free.
        kv_cache: [num_blocks, page_size, 576], dtype of the queries; page_size a power of two up to 256; last stride 1,
            page and token strides free. Latent (512) first, then rope (64).
        seq_lens: [b] int32, tokens of each row, at most max_blocks × page_size. With s_q > 1 query token i sees the
            first seq_len − s_q + i + 1 keys.
        block_table: [b, max_blocks] int32. Slots past a row's length are never read.
        sm_scale: multiplies the logits; usually 192 ** −0.5, the head dimension before absorption.
        q_scale, kv_scale: real = stored × scale, a number or one fp32 element on the device of the queries. For bf16
            and fp16 they are ignored, with a warning. An element on the GPU is read when the kernel runs, so a replayed
            CUDA graph sees new values; one on the CPU is read at the call, like a number.
        num_kv_splits: pins the number of splits of each row (1 to 128, never more than its tiles of 64 tokens). By
            default the plan is a function of the row's length on the CPU, of all lengths on a GPU; see `split_plan`.

    Returns:
        out [b, (s_q,) h_q, 512] in bf16 (fp16 for fp16), and lse [b, (s_q,) h_q] in fp32, natural logarithm. A query
        without keys gives 0 and −inf.

    Raises:
        TypeError, ValueError, NotImplementedError: from metadata, before anything runs; the message names the argument.
        RuntimeError: no build is loaded.
        On the CPU also ValueError for a length, page id or scale that is out of range.

    On a CUDA device (target sm90a: compute capability 9.0, sm_scale above 0, cache address and its page and token
    strides multiples of 16 bytes) the call is queued on the current stream and nothing is synchronised, so the
    values of seq_lens, block_table and scales on the device cannot be refused. They never lead out of the tensors: a
    length counts as 0 below 0 and as max_blocks × page_size above it, and a page id outside the cache stands for a page
    of zeros. A CUDA graph may be captured, and replayed with other lengths.

    On compute capability 10.0 (target sm100a: CUTLASS's kernel, compiled and not run by us) e4m3, bf16 and fp16 are
    taken, s_q is 1, pages have 128 tokens, scales are numbers or CPU tensors, and queries are aligned as the cache is.
    The automatic plan then follows b and the number of SMs, and what stands after a row's last token on its last page
    has to be finite.
    """
    arguments = _arguments(q_nope, q_pe, kv_cache, seq_lens, block_table, sm_scale, q_scale, kv_scale, num_kv_splits)
    out, lse = torch.ops.mla_kernels.mla_decode(*arguments)
    return (out.squeeze(1), lse.squeeze(1)) if q_nope.dim() == 3 else (out, lse)


def mla_decode_out(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    sm_scale: float,
    out: Tensor,
    lse: Tensor,
    q_scale: float | Tensor = 1.0,
    kv_scale: float | Tensor = 1.0,
    num_kv_splits: int | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla_decode` into `out` and `lse`, which it returns. No tensor is allocated where `workspace` is given.

    Args:
        out, lse: shapes and dtypes as returned by `mla_decode`; strides free, except that the last of out is 1.
        workspace: 1-D, any dtype, at least `workspace_size(…)` bytes for the device (on CUDA at an address that is a
            multiple of 256, as torch allocates it); its contents before the call do not matter. One call at a time.
    """
    checks.check_outputs(out, lse)
    arguments = _arguments(
        q_nope,
        q_pe,
        kv_cache,
        seq_lens,
        block_table,
        sm_scale,
        q_scale,
        kv_scale,
        num_kv_splits,
        out,
        lse,
        workspace,
    )
    three = q_nope.dim() == 3
    torch.ops.mla_kernels.mla_decode_out(
        *arguments, out.unsqueeze(1) if three else out, lse.unsqueeze(1) if three else lse, workspace
    )
    return out, lse


def workspace_size(
    b: int,
    s_q: int,
    h_q: int,
    capacity: int,
    num_kv_splits: int | None = None,
    device: torch.device | str = "cpu",
) -> int:
    """Bytes of workspace for a call with any lengths up to `capacity` = max_blocks × page_size tokens.

    The same function of the loaded build sizes and runs. On the CPU it is 24 MiB at the most, whatever the shape. On
    CUDA it holds fp32 partials, 2056 bytes for each line (s_q × h_q) of each split, and 0 bytes in all where no row can
    have two. Pinned, there are b × min(num_kv_splits, ⌈capacity / 64⌉) splits at most; the automatic plan makes at most
    b + 288 / ⌈lines / 64⌉, so the table's width does not matter. Target sm100a needs
    about b × 131592 bytes and 262656 for each row and split, padded to 128 heads; it is enough for every device here.
    """
    on = torch.device(device)
    checks.check_target(on, loaded_targets())
    checks.check_splits(num_kv_splits)
    sized = torch.ops.mla_kernels.cuda_workspace_size if on.type == "cuda" else torch.ops.mla_kernels.cpu_workspace_size
    return sized(b, s_q, h_q, capacity, num_kv_splits)


def split_plan(
    seq_lens: Tensor | Sequence[int],
    num_kv_splits: int | None = None,
    *,
    sms: int = 0,
    lines: int = 1,
    dtype: torch.dtype = torch.float8_e4m3fn,
    page_size: int = 64,
) -> list[list[int]]:
    """Token boundaries of each row's splits: [0, …, seq_len], so a row has len(boundaries) − 1 of them; [0] if empty.

    Split i of n holds tiles ⌊i·tiles/n⌋ to ⌊(i+1)·tiles/n⌋, with tiles = ⌈seq_len / 64⌉. Pinned: n = min(num_kv_splits,
    tiles), on every target: the row's own length decides. Automatic (None): on the CPU (`sms` 0) n = min(⌈tiles / 8⌉,
    64). Target sm90a on a GPU of `sms` multiprocessors looks at the whole batch (csrc/sm90a/plan.h): either no row is
    cut, or the tiles of all rows, one row after the other, are cut at multiples of one number. `lines` (s_q × h_q),
    `dtype` and `page_size` count; it needs a loaded build with sm90a.
    TypeError or ValueError for a num_kv_splits that `mla_decode` refuses.
    """
    checks.check_splits(num_kv_splits)
    lengths = [int(x) for x in (seq_lens.tolist() if isinstance(seq_lens, Tensor) else seq_lens)]
    share = -1
    if sms and num_kv_splits is None:
        gathered, wide = page_size < BLOCK_N, dtype != torch.float8_e4m3fn
        share = torch.ops.mla_kernels.cuda_plan_share(lengths, lines, wide, gathered, sms)
    plan = []
    before = 0  # tiles of the rows before
    for length in lengths:
        tiles = -(-length // BLOCK_N)
        if share > 0:
            cuts = [*range(share - before % share, tiles, share), tiles] if tiles else []
        else:
            automatic = 1 if share == 0 else min(-(-tiles // AUTO_TILES_PER_SPLIT), AUTO_MAX_SPLITS)
            n = min(num_kv_splits or automatic, tiles)
            cuts = [(i + 1) * tiles // n for i in range(n)]
        plan.append([0] + [min(cut * BLOCK_N, length) for cut in cuts])
        before += tiles
    return plan
