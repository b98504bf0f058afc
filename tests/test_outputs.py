# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Outputs that the caller lays out himself, and the questions asked before a call: the plan and the workspace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_checks import good

from mla_kernels import ops

BF16 = torch.bfloat16


@pytest.mark.usefixtures("cpu_build")
@pytest.mark.parametrize("value", [-3, 0, 129, 2.0, "3"])
def test_plan_and_workspace_refuse_the_splits_that_the_call_refuses(value: Any) -> None:
    kind = ValueError if type(value) is int else TypeError
    for ask in (lambda: ops.split_plan([100], value), lambda: ops.workspace_size(1, 1, 1, 100, value)):
        with pytest.raises(kind, match=rf"^mla_decode: num_kv_splits: expected .* got .*{value}"):
            ask()
    assert ops.split_plan([100], 128) == [[0, 64, 100]]


@pytest.mark.usefixtures("cpu_build")
def test_strided_outputs_without_overlap_are_written() -> None:
    """Gaps, permuted dims, steps, and dims of one element whose stride says nothing."""
    expected = ops.mla_decode_out(**good())
    outs = (
        torch.empty(3, 4, 600, dtype=BF16).transpose(0, 1)[..., :512],
        torch.empty(8, 3, 512, dtype=BF16)[::2],
        torch.empty(9999, dtype=BF16).as_strided((4, 3, 512), (515 * 3, 514, 1)),
    )
    lses = (torch.empty(3, 4).T, torch.empty(8, 6)[::2, ::2], torch.empty(99).as_strided((4, 3), (5, 2)))
    for out, lse in zip(outs, lses, strict=True):
        ops.mla_decode_out(**{**good(), "out": out, "lse": lse})
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
    one = {k: v[:1] if k in ("q_nope", "q_pe", "seq_lens", "block_table") else v for k, v in good().items()}
    out, lse = torch.empty(1, 3, 512, dtype=BF16).as_strided((1, 3, 512), (0, 512, 1)), torch.empty(1, 3)
    ops.mla_decode_out(**{**one, "out": out, "lse": lse})
    assert torch.equal(out, expected[0][:1])
