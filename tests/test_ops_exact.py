# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Results that can be said exactly: one key gives its value back, equal keys their mean, known weights a known lse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import hostile
import pytest
import torch
from torch import Tensor

E4M3, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16

pytestmark = pytest.mark.usefixtures("cpu_build")


@pytest.fixture(autouse=True)
def _back_to_the_best_isa() -> Iterator[None]:
    yield
    torch.ops.mla_kernels.set_cpu_isa("auto")


@pytest.fixture(params=["generic", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in torch.ops.mla_kernels.available_cpu_isas().split(","):
        pytest.skip(f"this processor has no {name}; it runs on one that has")
    torch.ops.mla_kernels.set_cpu_isa(name)
    return name


def attend(
    keys: Tensor, rope: Tensor | None = None, q_rope: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """One query of one head for each row of keys [b, n, 512], in one split; scales are 1 unless given in options.

    Logits are the first rope dims [b, n, r] times q_rope [b, r] (1 by default), 0 without rope.
    """
    b, n, _ = keys.shape
    r = 1 if rope is None else rope.shape[-1]
    page = 64
    pages = -(-n // page)
    cache = torch.full((b, pages * page, 576), -1, dtype=torch.int32).to(hostile.BITS[keys.element_size()])
    if keys.element_size() == 1:
        cache.fill_(0xFF)
    cache = cache.view(keys.dtype)  # NaN past the keys
    cache[:, :n] = torch.zeros((), dtype=keys.dtype)
    cache[:, :n, :512] = keys
    q = torch.zeros(b, 1, 576, dtype=keys.dtype)
    if rope is not None:
        cache[:, :n, 512 : 512 + r] = rope.to(keys.dtype)
        q[:, 0, 512 : 512 + r] = (torch.ones(b, r) if q_rope is None else q_rope).to(keys.dtype)
    table = torch.arange(b * pages, dtype=torch.int32).view(b, pages)
    lens = torch.full((b,), n, dtype=torch.int32)
    scales = {"sm_scale": 1.0, "q_scale": 1.0, "kv_scale": 1.0, "num_kv_splits": 1, **options}
    return hostile.mla_decode(q[..., :512], q[..., 512:], cache.view(-1, page, 576), lens, table, **scales)


def every_value(dtype: torch.dtype) -> Tensor:
    """All finite values of a format, [rows, 512]; the places of NaN and infinity hold 0."""
    if dtype == E4M3:
        x = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(2).view(E4M3).view(1, 512)
        return torch.where(x.float().isfinite(), x.float(), torch.zeros(())).to(E4M3)
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(128, 512)
    return torch.where(x.isfinite(), x, torch.zeros((), dtype=dtype))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_one_key_gives_its_value_back(isa: str, dtype: torch.dtype) -> None:
    values = every_value(dtype)
    out, lse = attend(values[:, None])
    # 0 x P + 0 is +0 where the value is -0
    assert torch.equal(hostile.bits(out[:, 0]), hostile.bits(torch.where(values == 0, values.abs(), values)))
    assert bool((lse == 0).all())


@pytest.mark.parametrize("kv_scale", [1.0, 0.0625, 0.3, 7.0, 1e-30, 1e30])
def test_one_e4m3_key_gives_its_value_times_the_scale(isa: str, kv_scale: float) -> None:
    values = every_value(E4M3)
    out, lse = attend(values[:, None], kv_scale=kv_scale)
    expected = (values.float() * torch.tensor(kv_scale)).to(BF16)
    assert torch.equal(hostile.bits(out[:, 0]), hostile.bits(torch.where(expected == 0, expected.abs(), expected)))
    assert bool((lse == 0).all())


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_two_equal_weights_give_the_mean_rounded_once(isa: str, dtype: torch.dtype) -> None:
    """Every value with its neighbour: means on the rounding ties, in the subnormals and at the top of the range."""
    values = every_value(dtype).float()
    neighbours = values.view(-1).roll(1).view(values.shape)
    out, lse = attend(torch.stack([values, neighbours], 1).to(dtype))
    mean = ((values + neighbours) * 0.5).to(dtype)
    assert torch.equal(out[:, 0], mean)
    assert bool((lse == torch.tensor(2.0).log()).all())


@pytest.mark.parametrize("dtype", [E4M3, BF16, FP16])
def test_known_weights(isa: str, dtype: torch.dtype) -> None:
    """Logits -i ln 2 (the scale holds ln 2): every P is a power of two, so only fp32 and the last rounding act."""
    n = 12
    keys = torch.zeros(1, n, 512)
    keys[0, range(n), range(n)] = 1.0
    rope = -torch.arange(n, dtype=torch.float32).view(1, n, 1)
    out, lse = attend(keys.to(dtype), rope, sm_scale=math.log(2.0))
    weights = torch.exp2(rope.flatten().double())
    expected = torch.zeros(512, dtype=torch.float64)
    expected[:n] = weights / weights.sum()
    assert bool(((out[0, 0].double() - expected).abs() <= 2.0 ** (-11 if dtype == FP16 else -8) * expected).all())
    assert float((lse[0, 0].double() - weights.sum().log()).abs()) < 1e-6


@pytest.mark.parametrize("dtype", [E4M3, BF16, FP16])
def test_weights_below_the_format_leave_the_output_and_stay_in_lse(isa: str, dtype: torch.dtype) -> None:
    """4000 keys of weight e^-13 beside one of 1: under 2^-18, so P is 0 in e4m3; their mass still counts in lse."""
    n = 4000
    rope = torch.full((1, n, 1), -13.0)
    rope[0, 0] = 0.0
    keys = torch.ones(1, n, 512)
    keys[0, 0] = 0.0
    out, lse = attend(keys.to(dtype), rope)
    mass = (n - 1) * math.exp(-13.0)
    # 63 keys of the first tile, then 62 tiles, are added to a sum of 1 in fp32, each off by half of 2^-23 at the most.
    assert float((lse[0, 0].double() - math.log1p(mass)).abs()) < 125 * 2.0**-24
    share = mass / (1 + mass)
    # P itself is rounded too: relatively 2^-9 in bf16; in fp16 e^-13 is a subnormal, a multiple of 2^-24 (2^-6.2 off).
    rounding = {E4M3: 0.0, BF16: 2.0**-9 + 2.0**-8, FP16: 2.0**-6}[dtype]
    expected = 0.0 if dtype == E4M3 else share
    assert float((out[0, 0].double() - expected).abs().max()) <= rounding * share


def test_p_is_rounded_to_nearest_even_in_e4m3(isa: str) -> None:
    """Two keys of weights 1 and w: the output of the second is R(256 w) / (256 + R(256 w)), R the cast of torch."""
    generator = torch.Generator().manual_seed(0)
    coarse = (torch.rand(4096, 1, generator=generator) * 12).to(E4M3)
    fine = (torch.rand(4096, 1, generator=generator) * 0.7).to(E4M3)
    keys = torch.zeros(4096, 2, 512)
    keys[:, 1] = 1.0
    rope = torch.tensor([[0.0, 0.0], [-1.0, -1.0]]).expand(4096, 2, 2)
    out, lse = attend(keys.to(E4M3), rope, torch.cat([coarse.float(), fine.float()], 1))
    logit = -(coarse.double() + fine.double())[:, 0]
    p = (256.0 * logit.exp()).to(E4M3).double()
    assert len(p.unique()) > 100
    expected = p / (256.0 + p)
    assert bool(((out[:, 0, 0].double() - expected).abs() <= 2.0**-8 * expected).all())
    assert float((lse[:, 0].double() - logit.exp().log1p()).abs().max()) < 1e-6


@pytest.mark.parametrize("num_kv_splits", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_all_logits_minus_infinity_is_no_key_at_all(isa: str, dtype: torch.dtype, num_kv_splits: int) -> None:
    """exp(-inf) is 0 for every key: 0 and -inf, not 0/0, also where every split comes out empty."""
    rope = -torch.ones(2, 200, 1)
    out, lse = attend(
        torch.ones(2, 200, 512).to(dtype), rope, torch.tensor([[math.inf], [1.0]]), num_kv_splits=num_kv_splits
    )
    assert bool((out[0] == 0).all())
    assert float(lse[0, 0]) == -math.inf
    assert bool((out[1] == 1).all())
    assert float(lse[1, 0]) == pytest.approx(math.log(200) - 1, abs=1e-6)
