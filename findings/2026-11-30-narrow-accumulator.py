# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Reproducer of 2026-11-30-narrow-accumulator.md: asserts its table on any machine, in about a minute."""

from mla_kernels import studies
from mla_kernels.reference import Accumulator

_, flash = studies.recorded("h200", "accuracy")
flash = flash[(flash["kernel"] == "flashmla") & (flash["dtype"] == "e4m3") & (flash["distribution"] == "shifted_mean")]
flash = flash[(flash["b"] > 1) & (flash["s"] <= 32768)]

gap = {12: 0.0, 13: 0.0, 14: 0.0}
for row in flash.to_dict("records"):
    series = {"promoted": Accumulator(13, promote_every=128)}
    series |= {str(bits): Accumulator(bits) for bits in gap if bits == 13 or row["s"] <= 8192}
    table = studies.accumulator_table([row["s"]], series, q_std=row["q_std"], h_q=2)
    model = table.set_index("series")["gain_minus_1"]
    shown = ", ".join(f"{name} {100 * value:.2f} %" for name, value in model.items())
    print(f"s {row['s']}, q_std {row['q_std']}: recorded {100 * row['gain_minus_1']:.1f} %; model: {shown}")
    assert abs(model["promoted"]) <= 0.003, "promotion every 128 tokens must keep the output's length"
    for bits in gap:
        if str(bits) in model:
            gap[bits] = max(gap[bits], abs(model[str(bits)] - row["gain_minus_1"]))

assert gap[13] <= 0.015, f"13 bits: expected within 1.5 points of every recorded loss, got {gap[13]:.3f}"
assert gap[12] > 0.025, f"12 bits: expected to be ruled out, is within {gap[12]:.3f}"
assert gap[14] > 0.025, f"14 bits: expected to be ruled out, is within {gap[14]:.3f}"
print("holds: 13 fraction bits explain the recorded losses, 12 and 14 do not")
