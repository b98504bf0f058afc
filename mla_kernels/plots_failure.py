# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Figures of notebook 07: a table (DataFrame) in, a matplotlib Figure out, as in `mla_kernels.plots`."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

__all__ = ["hidden_rows"]

_COLOURS = sns.color_palette("colorblind", 10).as_hex()
_HATCHES = ("", "///", "...")


def hidden_rows(table: pd.DataFrame) -> Figure:
    """Most wrong rows that pass the published limit, a bar per fault and batch.

    Columns: batch, fault, rows, hidden_rows, rows_changed.
    """
    faults = list(dict.fromkeys(table["fault"]))
    names = list(dict.fromkeys(table["batch"]))
    figure, axis = plt.subplots(figsize=(8.6, 1.6 + 0.42 * len(faults)))
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        rows = table[table["batch"] == name].set_index("fault").reindex(faults)
        y = np.arange(len(faults)) + (i - (len(names) - 1) / 2) * height
        axis.barh(
            y, rows["hidden_rows"], height=height * 0.9, color=_COLOURS[i], hatch=_HATCHES[i % 3], edgecolor="white",
            linewidth=0, label=name,
        )  # fmt: skip
        for at, row in zip(y, rows.itertuples(), strict=True):
            text = f"{row.hidden_rows:,.0f} of {row.rows:,.0f}" + (": no bit differs" if row.rows_changed == 0 else "")
            inside = row.hidden_rows > row.rows / 4
            axis.text(
                row.hidden_rows * 0.85 if inside else row.hidden_rows + 0.15, at, text if row.hidden_rows else "none",
                va="center", ha="right" if inside else "left", fontsize=8.5, color="white" if inside else "#333333",
                backgroundcolor=_COLOURS[i] if inside else "none",
            )  # fmt: skip
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xlim(0, float(table["rows"].max()) * 1.6)
    axis.set_yticks(range(len(faults)), faults)
    axis.invert_yaxis()
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("most rows (sequence × head) with the fault that still pass the limit of 1e-4")
    axis.grid(axis="y", visible=False)
    axis.set_title("How many wrong rows the whole-tensor number hides")
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure
