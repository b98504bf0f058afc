# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Reproducer of 2026-11-30-promotion-on-hopper.md: the recorded rows against the model, on any machine, in a minute."""

from mla_kernels import studies
from mla_kernels.reference import Accumulator

_, rows = studies.recorded("h200", "accuracy_kernels")
e4m3 = rows[(rows["dtype"] == "e4m3") & (rows["b"] > 1) & (rows["s"] <= 32768)]
gain = {
    kernel: e4m3[e4m3["kernel"] == kernel].set_index(["q_std", "s"])["gain_minus_1"] for kernel in set(e4m3["kernel"])
}
series = {"in place": Accumulator(13), "promoted": Accumulator(13, promote_every=128)}
for q_std, s in gain["mla_kernels"].index:
    model = studies.accumulator_table([s], series, q_std=q_std, h_q=2).set_index("series")["gain_minus_1"]
    ours, flash = gain["mla_kernels"][q_std, s], gain["flashmla"][q_std, s]
    print(
        f"q_std {q_std}, s {s}: ours {100 * ours:+.3f} %, model promoted {100 * model['promoted']:+.3f} %; "
        f"FlashMLA {100 * flash:+.2f} %, model in place {100 * model['in place']:+.2f} %"
    )
    assert abs(ours) <= 0.001, "promotion every 128 tokens keeps the output's length within 0.1 %"
    assert abs(ours - model["promoted"]) <= 0.001, "and as the model says"
    assert abs(flash - model["in place"]) <= 0.02, "the accumulator in place loses what the model says"

everything = rows[(rows["dtype"] == "e4m3") & (rows["kernel"] == "mla_kernels")]
stage = rows[rows["kernel"] == "stage"].set_index(["q_std", "b", "s"])["relative_error"]
ratio = max(r["relative_error"] / stage[r["q_std"], r["b"], r["s"]] for r in everything.to_dict("records"))
worst = everything["gain_minus_1"].abs().max()
print(f"ours to 131072 tokens: |gain - 1| at most {worst:.1e}, error at most {ratio:.2f} times that of the fp32 stage")
assert worst <= 0.003
assert ratio <= 1.3
print("holds: with promotion every 128 tokens an fp8 kernel is right at length")
