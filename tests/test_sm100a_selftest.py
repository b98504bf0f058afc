# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The self-test as it will run on a Blackwell GPU, here on the CPU target: what it asks, and what it finds."""

from __future__ import annotations

import math
import re

import pytest
import torch

from mla_kernels import _selftest, build, toolchain

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    build.load(targets=("cpu",))


@pytest.mark.parametrize("target", ["sm100a", "sm100f"])
@pytest.mark.parametrize("name", _selftest.FORMATS)
def test_the_case_is_one_that_the_target_takes(target: str, name: str) -> None:
    shape = _selftest.SHAPES[target]
    tensors, q, kv = _selftest._inputs(_selftest.FORMATS[name], CPU, shape)
    assert tensors["kv_cache"].shape[1] == 128
    assert tensors["q_nope"].shape[1] == 1
    assert set(shape.splits) == {None, 1}  # two splits for the long row, so the individual scheduler; and persistent
    assert [-(-n // 128) for n in shape.lengths] == [2, 0, 1]
    # Every P is a power of two that e4m3 holds unscaled: 2⁰ to 2⁻⁸.
    exponents = q @ kv[: shape.lengths[0]].T
    below = exponents.max(-1, keepdim=True).values - exponents
    assert torch.equal(torch.exp2(-below), torch.exp2(-below).to(torch.float8_e4m3fn).double())
    # Pages of rows are finite to their end, all others are not.
    owned = tensors["block_table"][0, :2].tolist() + tensors["block_table"][2, :1].tolist()
    cache = tensors["kv_cache"].float()
    assert cache[owned].isfinite().all()
    assert cache[[i for i in range(len(cache)) if i not in owned]].isnan().all()


@pytest.mark.parametrize("name", _selftest.FORMATS)
@pytest.mark.parametrize("splits", [None, 1])
def test_a_right_kernel_passes(name: str, splits: int | None) -> None:
    assert list(_selftest._faults(name, CPU, _selftest.SHAPES["sm100a"], splits)) == []


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (lambda out, lse: (out.fill_(math.nan), lse.fill_(math.nan)), "outputs are NaN: not written"),
        (lambda out, lse: out[0].mul_(1.02), r"out\(.*\) \(head, dim\) is .* is right"),
        (lambda out, lse: lse[1].fill_(math.inf), r"row of 0 tokens: lse\(0,\) is inf, -inf is right"),
        (lambda out, lse: out[1].fill_(1e-3), r"row of 0 tokens: out"),
        (lambda out, lse: lse[0].add_(math.log(2.0)), r"row of 200 tokens: lse"),
    ],
    ids=["unwritten", "scaled", "empty row +inf", "empty row not 0", "lse without a scale"],
)
def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch, plant, found: str) -> None:  # type: ignore[no-untyped-def]
    right = torch.ops.mla_kernels.mla_decode_out

    class Planted:
        @staticmethod
        def mla_decode_out(*arguments: object) -> None:
            right(*arguments)
            plant(arguments[11][:, 0], arguments[12][:, 0])  # type: ignore[index]

    monkeypatch.setattr(torch.ops, "mla_kernels", Planted)
    faults = list(_selftest._faults("e4m3", CPU, _selftest.SHAPES["sm100a"], None))
    assert any(re.search(found, fault) for fault in faults), faults


def test_both_schedulers_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_selftest, "_faults", lambda name, device, shape, splits: [f"{shape.page}, {splits}"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (10, 0))
    assert _selftest.self_test(("sm100a",), toolchain.DEVICE_TARGETS) == [
        "cuda:0, bf16: 128, None",
        "cuda:0, bf16, num_kv_splits=1: 128, 1",
        "cuda:0, e4m3: 128, None",
        "cuda:0, e4m3, num_kv_splits=1: 128, 1",
    ]
