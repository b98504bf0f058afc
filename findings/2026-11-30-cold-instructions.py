# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Reproducer of 2026-11-30-cold-instructions.md: asserts the recorded rows, on any machine, at once."""

from mla_kernels import studies

_, rows = studies.recorded("h200", "speed_plans")
row = {(r["kernel"], r["num_kv_splits"] if r["num_kv_splits"] == r["num_kv_splits"] else None, r["h_q"]): r
       for r in rows[(rows["b"] == 1) & (rows["s"] == 4096)].to_dict("records")}  # fmt: skip
after_flashmla, after_itself = row["mla_kernels", None, 128], row["mla_kernels", 32, 128]
print(f"after FlashMLA: {after_flashmla['us_median']} us; after a launch of itself: {after_itself['us_median']} us")
assert after_flashmla["us_median"] - after_itself["us_median"] > 5, "the same kernel and plan, another kernel before it"
assert after_itself["us_p90"] - after_itself["us_median"] > 4, "and in the rounds that it begins it is as slow"
flash = row["flashmla", None, 128]
assert flash["us_p90"] - flash["us_p10"] < 1, "FlashMLA, always after another kernel, has one time"
print("holds: cold instructions cost more than 5 us at b = 1")
