# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The kernels before and after CUTLASS's own, run on the host: empty rows, padded heads, the merge of splits."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from sm100a_host import compile_host

HEADS, DIM = 128, 512
POINTERS = ("lengths", "splits", "padded_out", "padded_lse", "partial")


class Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("b", "h_q", "most", "capacity", "fp16", "direct")),
        ("seq_lens", ctypes.c_void_p),
        ("seq_lens_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64 * 3),
        ("lse", ctypes.c_void_p),
        ("lse_stride", ctypes.c_int64 * 3),
        *((name, ctypes.c_void_p) for name in POINTERS),
    ]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_host(tmp_path_factory.mktemp("host"))


class Call:
    """Outputs and workspace, poisoned with NaN; outputs are every second element of larger ones, which stays poison."""

    def __init__(self, lengths: list[int], h_q: int, most: int, capacity: int, dtype: torch.dtype = torch.bfloat16):
        b = len(lengths)
        self.seq_lens = torch.full((b, 3), -77, dtype=torch.int32)
        self.seq_lens[:, 0] = torch.tensor(lengths, dtype=torch.int32)
        self.wide_out = torch.full((b, 2, h_q + 1, DIM), torch.nan, dtype=dtype)
        self.wide_lse = torch.full((b, 2, h_q, 2), torch.nan)
        self.out, self.lse = self.wide_out[:, 0, :h_q], self.wide_lse[:, 0, :, 0]
        self.lengths, self.splits = (torch.full((b,), -9, dtype=torch.int32) for _ in range(2))
        self.padded_out = torch.full((b, HEADS, DIM), torch.nan, dtype=dtype)
        self.padded_lse = torch.full((b, HEADS), torch.nan)
        self.partial = torch.full((b * HEADS * most * (DIM + 1),), torch.nan)
        self.partial_out = self.partial[: b * HEADS * most * DIM].view(b, HEADS, most, DIM)
        self.partial_lse = self.partial[b * HEADS * most * DIM :].view(b, most, HEADS)
        strides = ctypes.c_int64 * 3
        out, lse = self.out.stride(), self.lse.stride()
        self.rows = Rows(
            b, h_q, most, capacity, dtype == torch.float16, 0,
            self.seq_lens.data_ptr(), 3,
            self.out.data_ptr(), strides(out[0], 0, out[1]),
            self.lse.data_ptr(), strides(lse[0], 0, lse[1]),
            *(getattr(self, name).data_ptr() for name in POINTERS),
        )  # fmt: skip

    def run(self, host: ctypes.CDLL, step: int) -> None:
        host.rows(ctypes.byref(self.rows), step)

    def check_surroundings(self) -> None:
        """Nothing but the outputs was written."""
        assert self.wide_out[:, 1].isnan().all()
        assert self.wide_out[:, :, -1].isnan().all()
        assert self.wide_lse[:, 1].isnan().all()
        assert self.wide_lse[..., 1].isnan().all()


LENGTHS = [0, 5, 0, 4096, -3, 10**6, 640]  # on 40 pages: two empty rows, one below 0, one above the table


def test_prepare_bounds_lengths_and_writes_empty_rows(host: ctypes.CDLL) -> None:
    call = Call(LENGTHS, h_q=5, most=4, capacity=5120)
    call.run(host, 0)
    assert call.lengths.tolist() == [0, 5, 0, 4096, 0, 5120, 640]
    assert call.splits.tolist() == [0, 1, 0, 4, 0, 4, 3]  # 5 tiles in 4 splits would leave the last one empty
    empty = torch.tensor([length <= 0 for length in LENGTHS])
    assert (call.out[empty] == 0).all()
    assert (call.lse[empty] == -torch.inf).all()
    assert call.out[~empty].isnan().all()  # rows with tokens are the kernel's
    assert call.lse[~empty].isnan().all()
    call.check_surroundings()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("h_q", [1, 12, 128])
def test_finish_merges_and_copies_real_heads(host: ctypes.CDLL, dtype: torch.dtype, h_q: int) -> None:
    """Partials as the kernel leaves them: splits past a row's own, and padded heads, hold whatever."""
    lengths, most = [640, 100, 0, 5120], 4
    call = Call(lengths, h_q, most, 5120, dtype)
    call.run(host, 0)
    generator = torch.Generator().manual_seed(h_q)
    want, want_lse = (
        torch.zeros(4, h_q, DIM, dtype=torch.float64),
        torch.full((4, h_q), -torch.inf, dtype=torch.float64),
    )
    for row, n in enumerate(call.splits.tolist()):
        if n == 0:
            continue
        values = torch.randn(n, h_q, DIM, generator=generator)
        lse = torch.randn(n, h_q, generator=generator) * 20
        if n == 1:
            call.padded_out[row, :h_q], call.padded_lse[row, :h_q] = values[0].to(dtype), lse[0]
            want[row], want_lse[row] = values[0].to(dtype), lse[0]
            continue
        call.partial_out[row, :h_q, :n] = values.transpose(0, 1)
        call.partial_lse[row, :n, :h_q] = lse
        want_lse[row] = torch.logsumexp(lse.double(), 0)
        want[row] = (torch.exp(lse.double() - want_lse[row])[..., None] * values.double()).sum(0)
    call.run(host, 1)
    assert (call.lse[2] == -torch.inf).all()
    assert torch.allclose(call.lse.double(), want_lse, atol=1e-4)
    # One rounding to 8 or 11 bits; weights in fp32 from an lse of up to 100 are off by 100 · 2⁻²³.
    bound = want.abs() * 2.0 ** (-8 if dtype == torch.bfloat16 else -11) + 1e-4
    assert ((call.out.double() - want).abs() <= bound).all()
    call.check_surroundings()


def test_finish_leaves_what_the_kernel_stored(host: ctypes.CDLL) -> None:
    call = Call([100, 0, 640], h_q=128, most=4, capacity=5120)
    call.rows.direct = 1
    call.run(host, 0)
    call.out[0], call.lse[0] = 3, 4
    call.partial_out[2], call.partial_lse[2] = 5, 0
    call.run(host, 1)
    assert (call.out[0] == 3).all()
    assert (call.lse[0] == 4).all()
    assert (call.out[1] == 0).all()
    assert (call.out[2] == 5).all()
    assert np.allclose(call.lse[2], np.log(3), atol=1e-6)
