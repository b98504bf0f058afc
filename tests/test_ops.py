# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The operator on the CPU target: against the stage reference, and bit for bit against itself."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import hostile
import pytest
import torch
from hostile import merge, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_kernels import build, ops
from mla_kernels.cases import CASES, SM_SCALE, Case, Inputs, Results, inputs_from, make_inputs, run_case
from mla_kernels.metrics import implementation_budget, relative_error
from mla_kernels.reference import attention, split_bounds

pytestmark = pytest.mark.usefixtures("cpu_build")

E4M3, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
DTYPES = {"e4m3": E4M3, "bf16": BF16, "fp16": FP16}


@pytest.fixture(autouse=True)
def _own_threads_and_isa() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.ops.mla_kernels.set_cpu_isa("auto")


def inputs(lens: list[int], h_q: int = 4, s_q: int = 1, dtype: str = "e4m3", seed: int = 0, **options: Any) -> Inputs:
    """Normal q and kv of these lengths in hostile memory; options as for `inputs_from`."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(lens), s_q, h_q, 576, generator=generator).bfloat16()
    kv = torch.randn(len(lens), max(lens), 576, generator=generator).bfloat16()
    return inputs_from(q, kv, lens, dtype=dtype, seed=seed, **options)


def decode(case: Inputs, **changes: Any) -> tuple[Tensor, Tensor]:
    return hostile.mla_decode(**{**case.args, **changes})


# --- against the stage reference ---


def check_against_stage(results: Results, dtype: str, budget: float) -> None:
    """The kernel is the stage but for fp32: `budget` bounds the rest (derived in `metrics.implementation_budget`)."""
    empty = hostile.check_empty_rows(results)
    if bool(empty.all()):
        return
    assert results.kernel is not None
    assert results.kernel_lse is not None
    assert float((results.kernel_lse.double() - results.stage_lse)[~empty].abs().max()) <= 1e-3
    error = relative_error(results.kernel, results.stage)
    assert error <= budget
    form = relative_error(results.format, results.oracle)
    if dtype == "e4m3" and form >= 2.0**-9:  # a format error that a bf16 output can show at all
        assert error <= form / 10


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.group in ("correctness", "corner")], ids=lambda case: case.name
)
def test_kernel_matches_stage(case: Case) -> None:
    results = run_case(make_inputs(case), hostile.mla_decode)
    check_against_stage(results, case.dtype, case.budget)
    if case.group == "correctness" and case.dtype == "e4m3":  # in each of these, however small the format error
        assert results.kernel is not None
        error = relative_error(results.kernel, results.stage)
        assert error < relative_error(results.format, results.oracle) / 10


SOME = [case for case in CASES if case.name in ("s_q-8", "h_q-1", "bf16-s_q", "fp16-s_q", "padded", "tail-13-of-64")]


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_every_instruction_set_matches_stage(case: Case) -> None:
    names = torch.ops.mla_kernels.available_cpu_isas().split(",")
    assert names[0] == "generic"
    for name in names:
        torch.ops.mla_kernels.set_cpu_isa(name)
        assert torch.ops.mla_kernels.cpu_isa() == name
        check_against_stage(run_case(make_inputs(case), hostile.mla_decode), case.dtype, case.budget)


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"isa: expected auto or one of generic.*, got mmx; this processor has no other"
    ):
        torch.ops.mla_kernels.set_cpu_isa("mmx")


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    lens=st.lists(st.integers(0, 260), min_size=1, max_size=3),
    h_q=st.integers(1, 21),
    s_q=st.integers(1, 8),
    page_size=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256]),
    dtype=st.sampled_from(list(DTYPES)),
    layout=st.sampled_from(["contiguous", "layers", "padded"]),
    num_kv_splits=st.one_of(st.none(), st.integers(1, 6)),
    seed=st.integers(0, 9),
)
def test_any_shape_matches_stage(
    lens: list[int],
    h_q: int,
    s_q: int,
    page_size: int,
    dtype: str,
    layout: str,
    num_kv_splits: int | None,
    seed: int,
) -> None:
    case = inputs(lens, h_q, s_q, dtype, seed, page_size=page_size, layout=layout, num_kv_splits=num_kv_splits)
    check_against_stage(run_case(case, hostile.mla_decode), dtype, implementation_budget(max(lens), dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_lse_is_natural_and_shards_merge(dtype: str) -> None:
    """lse equals float64 logsumexp; unequal shards with very different mass merge to the whole (empty ones weigh 0)."""
    case = inputs([5004], 8, dtype=dtype)
    kv = case.kv_stored.clone()
    kv[:, 3:1000] = (kv[:, 3:1000].float() * 4).clamp(-448, 448).to(kv.dtype)  # most of the mass
    whole, lse = attention(
        case.q_stored.float(),
        kv.float(),
        [5004],
        sm_scale=SM_SCALE,
        q_scale=case.q_scale,
        kv_scale=case.kv_scale,
    )
    for bounds in ([0, 0, 1, 4, 5004], [0, 5004, 5004], [0, 3, 1000, 1001, 2000, 2000, 3000, 4000, 5004]):
        parts = []
        for begin, end in itertools.pairwise(bounds):
            cache, lens = kv[:, begin : max(end, begin + 1)], torch.tensor([end - begin], dtype=torch.int32)
            n = -(-cache.shape[1] // 64)
            paged = torch.zeros(n, 64, 576, dtype=cache.dtype)
            paged.view(1, -1, 576)[:, : cache.shape[1]] = cache
            table = torch.arange(n, dtype=torch.int32)[None]
            parts.append(decode(case, kv_cache=paged, seq_lens=lens, block_table=table, num_kv_splits=None))
        out, merged_lse = merge(parts)
        torch.testing.assert_close(merged_lse, lse[:, 0], rtol=0, atol=1e-3)
        # Each part was rounded to its output format, and P inside it: the bound of a single call with some room.
        assert relative_error(out, whole[:, 0]) < {"e4m3": 4e-2, "bf16": 4e-3, "fp16": 1e-3}[dtype]
    out, merged_lse = merge([decode(case, seq_lens=torch.zeros(1, dtype=torch.int32))] * 4)
    assert bool((out == 0).all())
    assert bool((merged_lse == -math.inf).all())


# --- bit for bit against itself ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_kv_splits", [1, 8, None])
def test_empty_rows_change_nothing(dtype: str, num_kv_splits: int | None) -> None:
    case = inputs([0, 5, 0, 4096, 0], 3, dtype=dtype, num_kv_splits=num_kv_splits)
    out, lse = decode(case)
    real, empty = [1, 3], [0, 2, 4]
    assert bool((hostile.bits(out[empty]) == 0).all())
    assert bool((lse[empty] == -math.inf).all())
    for row in real:
        alone = {name: case.args[name][row : row + 1] for name in ("q_nope", "q_pe", "seq_lens", "block_table")}
        out_alone, lse_alone = decode(case, **alone)
        assert same_bits(out[row : row + 1], out_alone)
        assert same_bits(lse[row : row + 1], lse_alone)
    out, lse = decode(case, seq_lens=torch.zeros(5, dtype=torch.int32))
    assert bool((hostile.bits(out) == 0).all())
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("num_kv_splits", [1, 3, None])
@pytest.mark.parametrize("mates", [1, 2, 17, 128])
def test_batch_mates_do_not_matter(num_kv_splits: int | None, mates: int) -> None:
    lens = [1100] + [(37 * i) % 700 for i in range(1, mates)]
    case = inputs(lens, 2, seed=1, num_kv_splits=num_kv_splits)
    out, lse = decode(case)
    first = {name: case.args[name][:1] for name in ("q_nope", "q_pe", "seq_lens", "block_table")}
    out_alone, lse_alone = decode(case, **first)
    assert same_bits(out[:1], out_alone)
    assert same_bits(lse[:1], lse_alone)


@pytest.mark.parametrize("h_q", [1, 8, 12, 16, 20, 24, 64, 96, 127, 128])
def test_heads_do_not_matter_to_each_other(h_q: int) -> None:
    case = inputs([130], h_q)
    out, lse = decode(case)
    wide = hostile.poison(torch.empty(1, 160, 576, dtype=E4M3))
    wide[:, :h_q, :512], wide[:, :h_q, 512:] = case.args["q_nope"], case.args["q_pe"]
    for fill in (None, 0.0):
        if fill is not None:
            wide[:, h_q:] = torch.zeros((), dtype=E4M3)
        again = decode(case, q_nope=wide[:, :h_q, :512], q_pe=wide[:, :h_q, 512:])
        assert same_bits(again[0], out)
        assert same_bits(again[1], lse)
    for head in {0, h_q // 2, h_q - 1}:
        one = slice(head, head + 1)
        alone = decode(case, q_nope=case.args["q_nope"][:, one], q_pe=case.args["q_pe"][:, one])
        assert same_bits(alone[0], out[:, one])
        assert same_bits(alone[1], lse[:, one])


def test_threads_do_not_matter() -> None:
    case = inputs([3000, 17, 0, 1500], 5, s_q=2, num_kv_splits=None)
    torch.set_num_threads(1)
    out, lse = decode(case)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        again = decode(case)
        assert same_bits(again[0], out)
        assert same_bits(again[1], lse)

    torch.set_num_threads(2)
    results: list[tuple[Tensor, Tensor]] = []
    callers = [threading.Thread(target=lambda: results.append(decode(case))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 4
    assert all(same_bits(o, out) and same_bits(e, lse) for o, e in results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "page_size"), [(13, 64), (129, 128), (64, 64)])
def test_memory_that_no_row_owns_does_not_matter(dtype: str, length: int, page_size: int) -> None:
    case = inputs([length], 3, dtype=dtype, page_size=page_size)
    cache, table = case.args["kv_cache"], case.args["block_table"]
    owned = torch.zeros(cache.shape[:2], dtype=torch.bool)
    for i in range(length):
        owned[table[0, i // page_size], i % page_size] = True
    results = []
    for byte in (0x7F, 0xFF, 0x80, 0x00):
        filled = cache.clone()
        filled.view(torch.uint8)[~owned] = byte
        results.append(decode(case, kv_cache=filled))
    assert bool(torch.isfinite(results[0][0]).all())
    assert all(same_bits(o, results[0][0]) and same_bits(e, results[0][1]) for o, e in results)


def test_table_slots_past_the_length_are_not_used() -> None:
    case = inputs([65, 0, 128, 1], page_size=32)
    table, lens = case.args["block_table"].clone(), case.args["seq_lens"]
    used = torch.arange(table.shape[1])[None] < ((lens + 31) // 32)[:, None]
    expected = None
    for fill in (0, -1, 2**31 - 1, -(2**31)):
        table[~used] = fill
        out, lse = decode(case, block_table=table)
        expected = expected or (out, lse)
        assert same_bits(out, expected[0])
        assert same_bits(lse, expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_an_owned_row_reaches_those_who_see_it_and_nobody_else(dtype: str) -> None:
    case = inputs([70, 70, 70], 2, s_q=2, dtype=dtype, num_kv_splits=None)
    out, lse = decode(case)
    cache, table = case.args["kv_cache"].clone(), case.args["block_table"]
    nan = torch.full((), math.nan).to(cache.dtype)
    cache[table[0, 0], 3, 511] = nan  # seen by both queries of row 0
    cache[table[1, 1], 69 - 64, 5::570] = nan  # the last key of row 1, latent and rope, seen by the second query only
    poisoned, poisoned_lse = decode(case, kv_cache=cache)
    assert bool(poisoned[0].isnan().all())
    assert bool(poisoned_lse[0].isnan().all())
    assert bool(poisoned[1, 1].isnan().all())
    for part in ((1, 0), (2,)):
        assert same_bits(poisoned[part], out[part])
        assert same_bits(poisoned_lse[part], lse[part])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("s_q", [1, 2, 4, 8])
def test_query_tokens_equal_calls_of_their_own(s_q: int, dtype: str) -> None:
    case = inputs([s_q, 200, s_q - 1, 64 + s_q // 2], 3, s_q=s_q, dtype=dtype)
    q_nope, q_pe = case.q_stored[..., :512], case.q_stored[..., 512:]
    out, lse = decode(case, q_nope=q_nope, q_pe=q_pe)
    for i in range(s_q):
        lens = (case.args["seq_lens"] - s_q + i + 1).clamp(min=0)
        alone = decode(case, q_nope=q_nope[:, i], q_pe=q_pe[:, i], seq_lens=lens)
        assert same_bits(out[:, i], alone[0])
        assert same_bits(lse[:, i], alone[1])


@pytest.mark.parametrize("dtype", ["e4m3", "bf16"])
@pytest.mark.parametrize("q_std", [0.1, 1.0, 10.0, 100.0])
def test_splits_change_rounding_only(q_std: float, dtype: str) -> None:
    generator = torch.Generator().manual_seed(5)
    q = (torch.randn(1, 1, 4, 576, generator=generator) * q_std).bfloat16()
    case = inputs_from(q, torch.randn(1, 1000, 576, generator=generator).bfloat16(), [1000], dtype=dtype)
    out, lse = decode(case)
    assert bool(torch.isfinite(lse).all())
    for splits in (2, 4, 8, 16):
        again, lse_again = decode(case, num_kv_splits=splits)
        assert bool(torch.isfinite(again).all())
        torch.testing.assert_close(lse_again, lse, rtol=1e-6, atol=1e-6)
        # P is rounded against the maximum of its own split: two roundings to e4m3 (2^-4 at most, 2^-5.8 in the mean).
        assert relative_error(again, out) < (5e-2 if dtype == "e4m3" else 6e-3)


@pytest.mark.parametrize("q_scale", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("kv_scale", [0.01, 0.06, 1.0, 2.0])
def test_scales(q_scale: float, kv_scale: float) -> None:
    case = inputs([300, 70], q_scale=q_scale, kv_scale=kv_scale)
    out, lse = decode(case)
    real = attention(case.q_stored.float() * q_scale, case.kv_stored.float() * kv_scale, [300, 70], sm_scale=SM_SCALE)
    assert float((lse - real[1][:, 0]).abs().max()) < 1e-3
    assert relative_error(out, real[0][:, 0]) < 4e-2  # P in e4m3
    numbers = decode(case, q_scale=torch.tensor([q_scale]), kv_scale=torch.tensor(kv_scale))
    assert same_bits(numbers[0], out)
    assert same_bits(numbers[1], lse)
    for power in (0.25, 8.0):  # q by a power of two, its scale by the inverse: the same real values, the same bits
        scaled = decode(case, q_scale=q_scale * power, kv_scale=kv_scale, sm_scale=SM_SCALE / power)
        assert same_bits(scaled[0], out)
        assert same_bits(scaled[1], lse)


def test_scaled_data_with_the_inverse_scale_gives_the_same_bits() -> None:
    case = inputs([200], q_scale=1.0, kv_scale=1.0)
    small = ~(case.args["kv_cache"].float().abs() < 2.0**-3)  # those stay normal in e4m3 when halved three times
    cache = torch.where(small, case.args["kv_cache"].float(), torch.zeros(())).to(E4M3)
    out, lse = decode(case, kv_cache=cache)
    for power in (0.5, 0.125, 2.0, 8.0):
        again = decode(case, kv_cache=(cache.float() * power).to(E4M3), kv_scale=1 / power)
        assert same_bits(again[0], out)
        assert same_bits(again[1], lse)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_scales_of_16_bit_formats_are_ignored_with_a_warning(dtype: str) -> None:
    case = inputs([100], dtype=dtype)
    out, lse = decode(case)
    for scale in (0.06, torch.tensor([0.06])):
        with pytest.warns(UserWarning, match=r"kv_scale: expected 1.0 for \w+ inputs, got 0.0[56].*; it is ignored"):
            again = decode(case, kv_scale=scale)
        assert same_bits(again[0], out)
        assert same_bits(again[1], lse)
        with pytest.warns(UserWarning, match="q_scale"):
            decode(case, q_scale=scale)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(case, kv_scale=torch.tensor([1.0]))


def test_layouts_give_the_same_bits() -> None:
    """Strided caches, caches off every alignment, transposed and sliced queries; nothing of the caller's is changed."""
    for dtype in DTYPES:
        for layout in ("layers", "padded"):
            case = inputs([200, 90], 6, s_q=2, dtype=dtype, layout=layout)
            before = {k: hostile.bits(v) for k, v in case.args.items() if isinstance(v, Tensor)}
            assert not case.args["kv_cache"].is_contiguous()
            assert not case.args["q_nope"].is_contiguous()
            out, lse = decode(case)
            assert all(torch.equal(hostile.bits(case.args[k]), v) for k, v in before.items())
            plain = {k: v.contiguous() for k, v in case.args.items() if isinstance(v, Tensor)}
            again = decode(case, **plain)
            assert same_bits(again[0], out)
            assert same_bits(again[1], lse)
            cache = plain["kv_cache"]
            odd = torch.empty(cache.numel() + 1, dtype=cache.dtype)[1:].view(cache.shape).copy_(cache)
            assert odd.data_ptr() % 16 != 0
            wide_table = torch.nn.functional.pad(plain["block_table"], (1, 4), value=-7)[:, 1:-4]
            lens = torch.stack([plain["seq_lens"], plain["seq_lens"] * 0 - 9], 1)[:, 0]
            again = decode(case, kv_cache=odd, block_table=wide_table, seq_lens=lens)
            assert same_bits(again[0], out)
            assert same_bits(again[1], lse)


def test_page_offsets_are_64_bit() -> None:
    """The same data in pages 0, 29200 and 59000 of a 4.4 GB cache, of which only those pages are ever committed."""
    page = torch.randn(128, 576, generator=torch.Generator().manual_seed(0)).to(E4M3)
    cache = torch.empty(60000, 128, 576, dtype=torch.uint8).view(E4M3)
    ids = [0, 29200, 59000]
    for i in ids:
        cache[i] = page
    q = torch.randn(1, 2, 576).to(E4M3).expand(3, 2, 576)
    table = torch.tensor(ids, dtype=torch.int32)[:, None]
    lens = torch.full((3,), 128, dtype=torch.int32)
    out, lse = ops.mla_decode(q[..., :512], q[..., 512:], cache, lens, table, sm_scale=SM_SCALE)
    reference = attention(q.float(), page.float().expand(3, -1, -1), lens, sm_scale=SM_SCALE)
    assert relative_error(out, reference[0]) < 4e-2
    assert same_bits(out[0], out[1])
    assert same_bits(out[0], out[2])
    assert same_bits(lse[0], lse[1])
    assert same_bits(lse[0], lse[2])


# --- in a process of their own ---


def child(code: str, timeout: float) -> str:
    """Run code in a fresh process with the library loaded; a hang is a failure after `timeout` seconds."""
    start = "import torch\nfrom mla_kernels import build, ops\nbuild.load(targets=('cpu',))\ntorch.set_num_threads(2)\n"
    command = [sys.executable, "-c", start + textwrap.dedent(code)]
    return subprocess.run(command, timeout=timeout, check=True, text=True, stdout=subprocess.PIPE).stdout


def test_short_rows_beside_long_ones_with_many_splits_end() -> None:
    code = """
    import random
    lengths, page = (1, 128, 129, 1000, 32768), 128
    cache = torch.randn(32768 // page, page, 576).to(torch.float8_e4m3fn)
    q = torch.randn(1, 1, 576).to(torch.float8_e4m3fn)
    order = torch.randperm(len(cache), dtype=torch.int32)[None]
    def run(lens, splits):
        b = len(lens)
        return ops.mla_decode(q[..., :512].expand(b, 1, 512), q[..., 512:].expand(b, 1, 64), cache,
                              torch.tensor(lens, dtype=torch.int32), order.expand(b, -1), sm_scale=0.07,
                              num_kv_splits=splits)
    for splits in (2, 5, 8, 16):
        alone = {n: run([n], splits) for n in lengths}
        for b in (1, 2, 8, 37, 148, 300):
            lens = [random.Random(b * i).choice(lengths) for i in range(b)]
            out, lse = run(lens, splits)
            for i, n in enumerate(lens):
                assert torch.equal(out[i], alone[n][0][0]) and torch.equal(lse[i], alone[n][1][0]), (splits, b, i, n)
    print("done")
    """
    assert child(code, timeout=60) == "done\n"


def test_extra_memory_stays_under_64_mb() -> None:
    """A cache of 4.2 GB in memory that is never committed, then the widest call: resident memory may not follow."""
    code = """
    import resource
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pages = 28672
    cache = torch.empty(pages, 256, 576, dtype=torch.uint8).view(torch.float8_e4m3fn)
    table = torch.arange(pages, dtype=torch.int32).view(2, -1)
    lens = torch.full((2,), pages * 128, dtype=torch.int32)
    q = torch.zeros(2, 8, 128, 576).to(torch.float8_e4m3fn)
    before = peak()
    ops.mla_decode(q[:, 0, :1, :512], q[:, 0, :1, 512:], cache, lens, table, sm_scale=0.07)
    lens.fill_(128 * 64)
    out, lse = ops.mla_decode(q[..., :512], q[..., 512:], cache, lens, table, sm_scale=0.07, num_kv_splits=128)
    print(peak() - before - out.nbytes - lse.nbytes)
    """
    assert int(child(code, timeout=120)) < 64e6


@pytest.mark.parametrize("num_kv_splits", [1, 2, 128, None])
def test_workspace_is_bounded(num_kv_splits: int | None) -> None:
    sizes = [
        ops.workspace_size(b, s_q, h_q, capacity, num_kv_splits)
        for b, s_q, h_q, capacity in itertools.product((0, 1, 7, 4096), (1, 8), (1, 128), (0, 64, 10**4, 10**7))
    ]
    assert max(sizes) <= 24 << 20
    assert (max(sizes) == 0) == (num_kv_splits == 1)


def test_waves_give_the_same_bits() -> None:
    """A batch whose partials do not fit in the workspace at once runs in waves, with the results of single rows."""
    case = inputs([1100] * 3, 128, s_q=4, num_kv_splits=16)
    sizes = {"s_q": 4, "h_q": 128, "capacity": 1280, "num_kv_splits": 16}
    assert ops.workspace_size(b=3, **sizes) < 3 * ops.workspace_size(b=1, **sizes)
    out, lse = decode(case)
    for row in range(3):
        one = {k: case.args[k][row : row + 1] for k in ("q_nope", "q_pe", "seq_lens", "block_table")}
        alone = decode(case, **one)
        assert same_bits(alone[0][0], out[row])
        assert same_bits(alone[1][0], lse[row])


# --- torch's machinery ---


def op_arguments(case: Inputs, **changes: Any) -> tuple[Any, ...]:
    """Positional arguments of torch.ops.mla_kernels.mla_decode."""
    a = {**case.args, **changes}
    return (
        *(case.q_stored[..., :512], case.q_stored[..., 512:], a["kv_cache"], a["seq_lens"], a["block_table"]),
        *(a["sm_scale"], a["q_scale"], a["kv_scale"], None, None, a["num_kv_splits"]),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("s_q", [1, 3])
def test_opcheck(dtype: str, s_q: int) -> None:
    names = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if dtype != "e4m3":  # test_schema compares inputs before and after by arithmetic, which torch lacks for e4m3
        names.append("test_schema")
    arguments = op_arguments(inputs([70, 3], 2, s_q=s_q, dtype=dtype))
    torch.library.opcheck(torch.ops.mla_kernels.mla_decode, arguments, test_utils=names)
    out = torch.zeros(2, s_q, 2, 512, dtype=FP16 if dtype == "fp16" else BF16)
    lse = torch.zeros(2, s_q, 2)
    scales = (torch.ones(1), torch.ones(()))
    with_tensors = (*arguments[:8], *scales, *arguments[10:], out, lse)
    for workspace in (None, torch.zeros(1 << 20, dtype=torch.uint8)):
        torch.library.opcheck(torch.ops.mla_kernels.mla_decode_out, (*with_tensors, workspace), test_utils=names)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dtype: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    case = inputs([130, 20], 4, dtype=dtype)
    compiled = torch.compile(
        lambda **args: ops.mla_decode(**args), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    out, lse = compiled(**case.args)
    expected = decode(case)
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])


def test_no_backward() -> None:
    case = inputs([70], dtype="bf16")
    q_nope = case.args["q_nope"].clone().requires_grad_()
    with pytest.raises(
        ValueError, match=r"q_nope: expected a tensor without gradient.*call it under torch.no_grad\(\)"
    ):
        decode(case, q_nope=q_nope)
    with torch.no_grad():
        assert not decode(case, q_nope=q_nope)[0].requires_grad
    arguments = op_arguments(case)
    out, _ = torch.ops.mla_kernels.mla_decode(arguments[0].clone().requires_grad_(), *arguments[1:])
    with pytest.raises(NotImplementedError, match="decode has no backward"):
        out.sum().backward()


def test_empty_batch() -> None:
    case = inputs([5], 2)
    none = {name: case.args[name][:0] for name in ("q_nope", "q_pe", "seq_lens", "block_table")}
    out, lse = decode(case, **none)
    assert out.shape == (0, 2, 512)
    assert lse.shape == (0, 2)


def test_split_plan_is_that_of_the_kernels_and_of_the_reference() -> None:
    lengths = [*range(0, 700), 4095, 4096, 4097, 32767, 32768, 32769, 131072, 2**31 - 1]
    for splits in (None, 1, 2, 3, 5, 8, 16, 64, 127, 128):
        plan = ops.split_plan(torch.tensor(lengths), splits)
        assert plan == ops.split_plan(lengths, splits)
        for length, bounds in zip(lengths, plan, strict=True):
            assert bounds == list(torch.ops.mla_kernels.split_plan(length, splits))
            assert list(itertools.pairwise(bounds)) == split_bounds(length, splits)
            assert all(a < b for a, b in itertools.pairwise(bounds)), "an empty split"
            assert len(bounds) - 1 <= (splits or 64)
            assert bounds[-1] == length


def test_fast_math_build_keeps_the_contract(cpu_build: build.Built) -> None:
    """-ffast-math may move last bits; empty rows, NaN and the error budget stay."""
    fast = build.load(targets=("cpu",), fast_math=True)
    try:
        assert fast.key != cpu_build.key
        for case in SOME:
            check_against_stage(run_case(make_inputs(case), hostile.mla_decode), case.dtype, case.budget)
        test_empty_rows_change_nothing("e4m3", 8)
        test_nan_in_an_owned_row_reaches_those_who_see_it_and_nobody_else("e4m3")
    finally:
        build.load(targets=("cpu",))
    assert torch.ops.mla_kernels.build_key() == cpu_build.key


def test_case_table_reaches_several_splits() -> None:
    """Some of the cases above do split; otherwise they would not see the combine at all."""
    plans = {c.name: ops.split_plan(c.seq_lens, c.num_kv_splits) for c in CASES if c.group == "correctness"}
    assert sum(max(len(bounds) for bounds in plan) > 2 for plan in plans.values()) >= 5
