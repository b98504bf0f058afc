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
extern "C" {
int tiles_per_split_of(long long total, int longest, int rows, int lines, int ctas, int wide, int gathered) {
  const int n = lines_a_tile(lines, wide, gathered);
  return tiles_per_split({total, longest, rows}, {ctas, (lines + n - 1) / n, n, wide != 0, per_cta_of(ctas)});
}
long long most_slots_of(long long rows, int lines) { return most_slots(rows, {144, (lines + 63) / 64, 64, false, per_cta_of(144)}); }
int row_splits_of(int tiles, int pinned, int most) { return row_splits(tiles, pinned, most); }
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
    library.tiles_per_split_of.argtypes = [ctypes.c_longlong, *[ctypes.c_int] * 6]
    library.most_slots_of.argtypes = [ctypes.c_longlong, ctypes.c_int]
    library.most_slots_of.restype = ctypes.c_longlong
    return library


def splits_of(host: ctypes.CDLL, lens: np.ndarray, lines: int, ctas: int, wide: bool, gathered: bool) -> np.ndarray:
    tiles = -(-lens // 64)
    most = host.tiles_per_split_of(
        int(tiles.sum()), int(tiles.max()), int((tiles > 0).sum()), lines, ctas, wide, gathered
    )
    assert most >= 1
    return -(-tiles // most)


def test_no_empty_split_and_room_for_all(host: ctypes.CDLL) -> None:
    """Drawn batches: every row with tokens has 1 to 128 splits, none more than tiles, and all fit the workspace."""
    rng = np.random.default_rng(3)
    for _ in range(4000):
        b = int(rng.integers(1, 513))
        top = int(2 ** rng.uniform(0, 17.01))
        lens = np.full(b, top) if rng.random() < 0.3 else rng.integers(0, top + 1, b)
        lines, wide = int(rng.choice([1, 16, 20, 32, 64, 127, 128, 1024])), bool(rng.random() < 0.3)
        gathered, ctas = bool(rng.random() < 0.3), int(rng.choice([1, 78, 114, 132, 144]))
        splits = splits_of(host, lens, lines, ctas, wide, gathered)
        tiles = -(-lens // 64)
        assert ((splits > 0) == (tiles > 0)).all()
        assert (splits <= np.minimum(tiles, MOST_SPLITS)).all()
        assert splits.sum() <= host.most_slots_of(b, lines)


def test_pinned_is_a_function_of_the_row(host: ctypes.CDLL) -> None:
    for tiles in (0, 1, 5, 64, 2048):
        for pinned in (1, 3, 128):
            assert host.row_splits_of(tiles, pinned, 7) == min(pinned, tiles)


@pytest.mark.parametrize(
    ("b", "s", "lines", "splits"),
    [
        # H200: the fastest of the pinned counts measured (csrc/sm90a/DESIGN.md)
        (128, 4096, 128, 1), (128, 8192, 128, 1), (64, 4096, 128, 1), (16, 4096, 128, 4), (32, 32768, 128, 2),
        (1, 4096, 128, 32), (1, 32768, 128, 64), (1, 131072, 128, 64), (128, 4096, 16, 1), (32, 32768, 16, 4),
        (16, 4096, 16, 8), (1, 4096, 16, 32), (1, 131072, 16, 128),
    ],
)  # fmt: skip
def test_even_batches_get_the_measured_best(host: ctypes.CDLL, b: int, s: int, lines: int, splits: int) -> None:
    assert set(splits_of(host, np.full(b, s), lines, 132, False, False)) == {splits}


def test_no_batch_overflows(host: ctypes.CDLL) -> None:
    """Undefined behaviour would abort (-fsanitize=undefined); sums beyond what 32 bits hold are clamped before."""
    for rows, longest in ((65535, 2048), (1, 2**25 - 1), (2**20, 2**20), (1, 1)):
        for lines in (1, 1024):
            assert 1 <= host.tiles_per_split_of(rows * longest, longest, rows, lines, 132, False, True) <= longest
