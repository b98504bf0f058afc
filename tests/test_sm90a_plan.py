# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The automatic split plan of the Hopper target (csrc/sm90a/plan.h), on any machine."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"
MOST_CTAS, MOST_SPLITS = 144, 128
SOURCE = r"""
#include "plan.h"
using namespace mla::sm90a;
namespace {
Machine machine_of(int lines, int ctas, int wide, int gathered) {
  const int n = lines_a_tile(lines, wide, gathered);
  return machine(ctas, (lines + n - 1) / n, n, wide != 0);
}
}  // namespace
extern "C" {
int plan_share_of(long long total, int longest, int rows, int lines, int ctas, int wide, int gathered) {
  return plan_share({total, longest, rows}, machine_of(lines, ctas, wide, gathered));
}
long long most_slots_of(long long b, int lines, int ctas, int wide, int gathered) {
  return most_slots(b, machine_of(lines, ctas, wide, gathered));
}
unsigned divided_of(unsigned x, int n) { return divided(x, n, reciprocal(n)); }
}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "plan.cpp").write_text(SOURCE)
    include = [f"-I{CSRC / 'sm90a'}", f"-I{CSRC / 'include'}"]
    command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", "-fsanitize=undefined", "-fno-sanitize-recover"]
    subprocess.run([*command, *include, str(folder / "plan.cpp"), "-o", str(folder / "plan.so")], check=True)
    library = ctypes.CDLL(str(folder / "plan.so"))
    library.plan_share_of.argtypes = [ctypes.c_longlong, *[ctypes.c_int] * 6]
    library.most_slots_of.argtypes = [ctypes.c_longlong, *[ctypes.c_int] * 4]
    library.divided_of.argtypes = [ctypes.c_uint, ctypes.c_int]
    library.divided_of.restype = ctypes.c_uint
    library.most_slots_of.restype = ctypes.c_longlong
    return library


def share_of(host: ctypes.CDLL, tiles: np.ndarray, lines: int, ctas: int, wide: bool, gathered: bool) -> int:
    rows = int((tiles > 0).sum())
    return int(host.plan_share_of(int(tiles.sum()), int(tiles.max()), rows, lines, ctas, wide, gathered))


def groups_of(lines: int, ctas: int, wide: bool, gathered: bool) -> int:
    n = 64 if wide or (lines > 32 and not gathered) else 32 if lines > 16 else 16
    return max(ctas // -(-lines // n), 1)


def test_every_tile_is_in_one_share_and_all_fit(host: ctypes.CDLL) -> None:
    """Drawn batches: no more shares than groups of CTAs, at most 128 pieces a row, each with a slot of its own."""
    rng = np.random.default_rng(3)
    shared = 0
    for _ in range(4000):
        b = int(rng.integers(1, 513))
        top = int(2 ** rng.uniform(0, 17.01))
        lens = np.full(b, top) if rng.random() < 0.3 else rng.integers(0, top + 1, b)
        lines, wide = int(rng.choice([1, 16, 20, 32, 64, 127, 128, 1024])), bool(rng.random() < 0.3)
        gathered, ctas = bool(rng.random() < 0.3), int(rng.choice([1, 78, 114, 132, 144]))
        tiles = -(-lens // 64)
        share = share_of(host, tiles, lines, ctas, wide, gathered)
        assert share >= 0
        if share == 0:
            continue
        shared += 1
        ends = np.cumsum(tiles)
        begins = ends - tiles
        full = tiles > 0
        first, last = begins[full] // share, (ends[full] - 1) // share
        assert last.max() < groups_of(lines, ctas, wide, gathered)
        assert (last - first + 1).max() <= MOST_SPLITS
        slots = np.concatenate(
            [row + np.arange(f, e + 1) for row, f, e in zip(np.flatnonzero(full), first, last, strict=True)]
        )
        assert len(np.unique(slots)) == len(slots)
        assert slots.max() < host.most_slots_of(b, lines, ctas, wide, gathered)
    assert shared > 500


def test_division_by_a_reciprocal_is_never_too_small(host: ctypes.CDLL) -> None:
    rng = np.random.default_rng(4)
    for n in (1, 2, 3, 66, 78, 114, 132, 144):
        for x in [*range(300), *rng.integers(0, 1 << 25, 300).tolist()]:
            assert x // n <= host.divided_of(int(x), n) <= x // n + 1


@pytest.mark.parametrize(
    ("b", "s", "lines", "splits"),
    [
        # H200: the fastest of the pinned counts measured (csrc/sm90a/DESIGN.md)
        (128, 4096, 128, 1), (128, 8192, 128, 1), (64, 4096, 128, 1), (16, 4096, 128, 4),
        (1, 4096, 128, 32), (1, 32768, 128, 64), (1, 131072, 128, 64), (128, 4096, 16, 1),
        (16, 4096, 16, 8), (1, 4096, 16, 32), (1, 131072, 16, 128),
    ],
)  # fmt: skip
def test_even_batches_get_the_measured_best(host: ctypes.CDLL, b: int, s: int, lines: int, splits: int) -> None:
    share = share_of(host, np.full(b, s // 64), lines, 132, False, False)
    assert share == (0 if splits == 1 else s // 64 // splits)


@pytest.mark.parametrize("lines", [16, 128])
def test_uneven_batches_are_shared_out(host: ctypes.CDLL, lines: int) -> None:
    """300 rows of 8192 to 9216 tokens: row by row, few CTAs would still work at the end while the others stand."""
    tiles = -(-np.random.default_rng(0).integers(8192, 9217, 300) // 64)
    share = share_of(host, tiles, lines, 132, False, False)
    fair = tiles.sum() / groups_of(lines, 132, False, False)
    assert fair <= share <= fair + 2


def test_no_batch_overflows(host: ctypes.CDLL) -> None:
    """Undefined behaviour would abort (-fsanitize=undefined); batches too large to be planned go by rows."""
    for rows, longest in ((65535, 2048), (1, 2**25 - 1), (2**20, 2**20), (1, 1), (2**15, 2**10 - 1), (2**25 - 1, 1)):
        for lines in (1, 1024):
            share = host.plan_share_of(rows * longest, longest, rows, lines, 132, False, True)
            assert 0 <= share <= rows * longest + 1
            assert share == 0 or rows * longest < 2**25
