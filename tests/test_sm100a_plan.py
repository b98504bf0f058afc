# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The split plan and the workspace of the Blackwell target, on any machine.

What an empty split is, is taken from the kernel: it gives split i of n the tiles [i·⌈tiles/n⌉, (i+1)·⌈tiles/n⌉).
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm100a_host import REPOSITORY, compile_host

TILE, HEADS, DIM = 128, 128, 512
SMS = (132, 148, 160)
DRAWN = 400_000


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_host(tmp_path_factory.mktemp("host"))


def plan_rows(host: ctypes.CDLL, b, capacity, pinned, sms, seq_len):  # type: ignore[no-untyped-def]
    """(most, splits, bytes) of each case, from the library."""
    b, capacity, seq_len = (np.ascontiguousarray(x, np.int64) for x in (b, capacity, seq_len))
    pinned, sms = (np.ascontiguousarray(x, np.int32) for x in (pinned, sms))
    most, splits, size = np.empty(b.size, np.int32), np.empty(b.size, np.int32), np.empty(b.size, np.int64)
    arrays = [b, capacity, pinned, sms, seq_len, most, splits, size]
    host.plan_rows(b.size, *(x.ctypes.data for x in arrays))
    return most.astype(np.int64), splits.astype(np.int64), size


def faults(b, capacity, pinned, sms, seq_len, most, splits):  # type: ignore[no-untyped-def]
    """What is wrong with a plan: name to a mask over the cases."""
    tiles = -(-seq_len // TILE)
    per_split = -(-tiles // np.maximum(splits, 1))
    used = np.where(tiles > 0, -(-tiles // np.maximum(per_split, 1)), 0)
    return {
        "an empty split": (splits > 0) & ((splits - 1) * per_split >= tiles),
        "tiles that no split has": splits * per_split < tiles,
        "the kernel counts other splits": used != splits,
        "splits of a row without tokens": (tiles == 0) & (splits != 0),
        "no split for a row with tokens": (tiles > 0) & (splits == 0),
        "more than the grid is deep": splits > most,
        "more than the most that is pinned": (pinned > 0) & (splits > pinned),
        "more clusters than slots": (pinned == 0) & (most > 1) & (most * b > sms // 2),
        "out of 1 to 128": (capacity > 0) & ((most < 1) | (most > 128)),
    }


def drawn(rng: np.random.Generator, n: int):  # type: ignore[no-untyped-def]
    b = rng.integers(1, 513, n)
    # Lengths of all sizes, and often next to a boundary of tiles, where rounding shows.
    capacity = -(
        -np.where(rng.random(n) < 0.5, rng.integers(0, 131073, n), 2 ** rng.uniform(0, 17, n)).astype(int) // TILE
    )
    capacity = np.minimum(capacity * TILE, 131072)
    seq_len = np.where(
        rng.random(n) < 0.5, rng.random(n) * capacity, rng.integers(0, 20, n) * TILE + rng.integers(-1, 2, n)
    )
    seq_len = np.clip(seq_len.astype(int), 0, capacity)
    pinned = np.where(rng.random(n) < 0.5, 0, rng.integers(1, 129, n))
    return b, capacity, pinned, rng.choice(SMS, n), seq_len


def test_no_split_is_ever_empty(host: ctypes.CDLL) -> None:
    cases = drawn(np.random.default_rng(1), DRAWN)
    most, splits, _ = plan_rows(host, *cases)
    for fault, mask in faults(*cases, most, splits).items():
        worst = np.flatnonzero(mask)[:1]
        assert not mask.any(), f"{fault}: b, capacity, pinned, sms, seq_len = {[int(x[worst[0]]) for x in cases]}"
    # The draw reaches what it is for.
    assert (splits == 0).sum() > 1000
    assert (splits > 1).sum() > 10_000
    assert ((splits > 1) & (cases[2] == 0)).sum() > 1000
    assert (np.minimum(most, -(-cases[4] // TILE)) > splits).sum() > 1000  # where an empty split had to be taken away


@pytest.mark.parametrize("sms", SMS)
def test_every_batch_and_length(host: ctypes.CDLL, sms: int) -> None:
    """All b from 1 to 512 against lengths from 0 to 131072 around each power of two, automatic plan."""
    lengths = np.unique(np.clip([2**k + d for k in range(18) for d in (-1, 0, 1, 127, 128, 129)] + [0], 0, 131072))
    b, seq_len = (x.ravel() for x in np.meshgrid(np.arange(1, 513), lengths))
    cases = b, -(-seq_len // TILE) * TILE, np.zeros_like(b), np.full_like(b, sms), seq_len
    most, splits, _ = plan_rows(host, *cases)
    for fault, mask in faults(*cases, most, splits).items():
        assert not mask.any(), fault


@settings(max_examples=2000, deadline=None)
@given(
    st.integers(1, 512), st.integers(0, 1024), st.integers(0, 128), st.sampled_from(SMS), st.integers(0, 131072)
)  # fmt: skip
def test_smallest_fault_would_be_found(b: int, pages: int, pinned: int, sms: int, seq_len: int) -> None:
    host = _shared()
    case = [np.array([x]) for x in (b, pages * TILE, pinned, sms, min(seq_len, pages * TILE))]
    most, splits, _ = plan_rows(host, *case)
    assert not [fault for fault, mask in faults(*case, most, splits).items() if mask.any()]


_HOST: list[ctypes.CDLL] = []


@pytest.fixture(autouse=True)
def _shared_host(host: ctypes.CDLL) -> None:
    _HOST[:] = [host]


def _shared() -> ctypes.CDLL:
    return _HOST[0]


def test_upstreams_plan_is_caught(host: ctypes.CDLL, tmp_path: Path) -> None:
    """A split count that is only bounded by the tiles leaves splits empty: 4 splits of 5 tiles are 2, 2, 1 and none."""
    text = (REPOSITORY / "csrc/sm100a/plan.h").read_text()
    body = "return static_cast<int>((all + per_split - 1) / per_split);"
    assert text.count(body) == 1
    planted = tmp_path / "csrc"
    (planted / "sm100a").mkdir(parents=True)
    for name in ("guards.h", "merge.h", "rows.cuh", "launch_parts.h"):
        (planted / "sm100a" / name).write_text((REPOSITORY / "csrc/sm100a" / name).read_text())
    (planted / "sm100a/plan.h").write_text(text.replace(body, "return static_cast<int>(wanted + 0 * per_split);"))
    (planted / "include").symlink_to(REPOSITORY / "csrc/include")
    bad = compile_host(tmp_path, planted)
    cases = drawn(np.random.default_rng(1), 20_000)
    most, splits, _ = plan_rows(bad, *cases)
    found = {fault for fault, mask in faults(*cases, most, splits).items() if mask.any()}
    assert {"an empty split", "the kernel counts other splits"} <= found
    one = [np.array([x]) for x in (1, 5 * TILE, 4, 148, 5 * TILE)]
    assert plan_rows(bad, *one)[1] == 4
    assert plan_rows(host, *one)[1] == 3


@pytest.mark.parametrize(
    ("b", "tokens", "pinned", "sms", "most"),
    [
        (1, 131072, 0, 148, 74),  # one split a cluster, not one an SM
        (1, 131072, 0, 132, 66),
        (1, 131072, 0, 160, 80),
        (37, 131072, 0, 148, 2),
        (38, 131072, 0, 148, 1),
        (512, 131072, 0, 148, 1),
        (1, 500, 0, 148, 4),  # never more than tiles
        (512, 131072, 16, 148, 16),  # pinned is pinned: clusters queue
        (1, 256, 16, 148, 2),
        (1, 131072, 0, 1, 1),
        (4, 0, 8, 148, 0),
    ],
)
def test_depth_of_the_grid(host: ctypes.CDLL, b: int, tokens: int, pinned: int, sms: int, most: int) -> None:
    got, _, _ = plan_rows(host, [b], [tokens], [pinned], [sms], [tokens])
    assert got == most
    assert host.slots(sms) == max(1, sms // 2)


def test_rows_share_the_grid_and_not_their_plan(host: ctypes.CDLL) -> None:
    """A row's split count follows its own length; batch mates of other lengths do not change it."""
    lengths = np.array([1, 128, 129, 1000, 32768, 0])
    _, splits, _ = plan_rows(host, [6] * 6, [32768] * 6, [8] * 6, [148] * 6, lengths)
    assert splits.tolist() == [1, 1, 2, 8, 8, 0]


def test_size_asked_for_is_the_size_used(host: ctypes.CDLL) -> None:
    """One function gives both; its parts do not overlap, hold 128 heads of every row, and end inside."""
    rng = np.random.default_rng(2)
    for b, capacity, pinned, sms, _ in zip(*drawn(rng, 3000), strict=True):
        parts = np.zeros(6, np.int64)
        host.plan_parts(int(b), int(capacity), int(pinned), int(sms), parts.ctypes.data)
        most, _, size = plan_rows(host, [b], [capacity], [pinned], [sms], [capacity])
        seq_lens, splits, out, lse, partial, end = parts.tolist()
        assert end == size[0]
        assert all(x % 256 == 0 for x in parts)
        assert seq_lens == 0
        assert splits - seq_lens >= 4 * b
        assert out - splits >= 4 * b
        assert lse - out >= b * HEADS * DIM * 2
        assert partial - lse >= b * HEADS * 4
        # What CUTLASS's kernel addresses with: the last row's last head's last split, and the lse after all of them.
        needed = b * HEADS * most[0] * (DIM * 4 + 4) if most[0] > 1 else 0
        assert needed <= end - partial < needed + 256


def test_no_rows_need_no_workspace(host: ctypes.CDLL) -> None:
    assert plan_rows(host, [0], [4096], [0], [148], [0])[2] == 0


def test_scheduler_follows_the_splits(host: ctypes.CDLL) -> None:
    """The persistent scheduler hangs with splits set by hand, so it never gets more than one."""
    assert [host.persistent(n) for n in (0, 1, 2, 3, 128)] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(("pages", "tokens"), [(-1, 0), (0, 0), (1, 128), (1024, 131072), (2**40, 2**31 - 256)])
def test_capacity_leaves_room_in_32_bits(host: ctypes.CDLL, pages: int, tokens: int) -> None:
    assert host.capacity_of(pages) == tokens


def test_merge_of_splits(host: ctypes.CDLL) -> None:
    rng = np.random.default_rng(3)
    for n in (1, 2, 5, 16, 128):
        lse = (rng.normal(size=n) * 50).astype(np.float32)
        all_of = host.merged_lse(lse.ctypes.data, n)
        want = np.logaddexp.reduce(lse.astype(np.float64))
        assert abs(all_of - want) < 1e-5 * max(1, abs(want))
        weights = [host.merge_weight(float(x), all_of) for x in lse]
        assert sum(weights) == pytest.approx(1, abs=1e-4)  # 2^-24 of an lse of up to 200, in the exponent, twice


def test_merge_of_empty_splits_is_minus_infinity(host: ctypes.CDLL) -> None:
    """CUTLASS's reduction gives +inf, which would win the next merge."""
    none = np.full(5, -np.inf, np.float32)
    assert host.merged_lse(none.ctypes.data, 5) == -np.inf
    assert host.merge_weight(-np.inf, -np.inf) == 0
    some = np.array([-np.inf, 2, -np.inf], np.float32)
    assert host.merged_lse(some.ctypes.data, 3) == 2
    assert host.merge_weight(-np.inf, 2) == 0
    assert host.merge_weight(2, 2) == 1


def test_attribute_is_set_on_each_device(host: ctypes.CDLL) -> None:
    def ran(devices: list[int], fails: int = -1) -> int:
        return host.once((ctypes.c_int * len(devices))(*devices), len(devices), fails)

    assert ran([0, 0, 0]) == 1
    assert ran([0, 1, 0, 1, 2]) == 3
    assert ran([0, 0, 0], fails=0) == 2  # what failed is tried again
    assert ran([64, 64, -1]) == 3  # not remembered, so set every time
