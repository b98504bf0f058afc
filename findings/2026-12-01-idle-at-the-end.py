# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Asserts the recorded rows behind 2026-12-01-idle-at-the-end.md, and the arithmetic of rounds and shares."""

import json
import math
from pathlib import Path

H200 = Path(__file__).resolve().parents[1] / "data" / "measurements" / "h200"
SMS, ROWS, LAYERS, STEPS = 132, 300, 27, 160

# Rows taken in turns: the share of CTA time that is idle.
rounds = math.ceil(ROWS / SMS)
assert rounds == 3
assert 0.24 < 1 - ROWS / (rounds * SMS) < 0.25

rows = json.loads((H200 / "profile.json").read_text())["rows"]
calls = LAYERS * STEPS
for dtype, decode_us, combine_us in (("fp8", 434, 130), ("auto", 861, 292)):
    (row,) = (r for r in rows if r["kv_cache_dtype"] == dtype and r["class"] == "decode attention")
    by_name = {"combine" if "combine" in k["kernel"] else "decode": k["us"] / calls for k in row["kernels"]}
    assert abs(by_name["decode"] - decode_us) < 1, by_name
    assert abs(by_name["combine"] - combine_us) < 1, by_name
    # The table of 128 even rows, scaled by tokens, gives less; and the wait is about one round of three.
    even = next(
        r["us_median"]
        for r in json.loads((H200 / "speed.json").read_text())["rows"]
        if (r["kernel"], r.get("dtype"), r.get("h_q"), r.get("b"), r.get("s"))
        == ("mla_kernels", {"fp8": "e4m3", "auto": "bf16"}[dtype], 16, 128, 8192)
    )
    assert 1.05 < by_name["decode"] / (even * ROWS * 8350 / (128 * 8192)) < 1.2
    assert 0.25 < by_name["combine"] / by_name["decode"] < 0.4

serving = json.loads((H200 / "serving.json").read_text())["rows"]
speed = {(r["backend"], r["kv_cache_dtype"]): r["requests_per_s"] for r in serving if r["prompts"] == 512}
assert 1.08 <= speed["CUTLASS_MLA", "fp8"] / speed["FLASHMLA", "fp8"] < 1.09
print("recorded: 300 rows in turns leave", f"{1 - ROWS / (rounds * SMS):.0%}", "of the CTAs' time idle")
