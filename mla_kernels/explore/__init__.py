# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The explorer: turn the knobs of a format and a kernel and see the error follow, in JupyterLab.

    from mla_kernels import explore

    explore.show()  # or explore.show(model="drawn", layer="shifted_mean", fraction_bits=13, length=8192)

In a report, where widgets do not live, `show` puts a picture of the same panels in their place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_kernels.explore.compute import Settings, Study
from mla_kernels.explore.sources import Source, open_source
from mla_kernels.explore.widgets import MODELS, Explorer

if TYPE_CHECKING:
    from mla_kernels.model import Capture
    from mla_kernels.report import Page

__all__ = ["Explorer", "Settings", "Source", "Study", "open_source", "show"]


def show(page: Page | None = None, model: str | Capture = MODELS[0], **settings: Any) -> Explorer:
    """Show the explorer, starting from `settings` (fields of `Settings`); the same starting point as a picture where
    `page` is one of a report that is run without a person. Returns the explorer."""
    explorer = Explorer(model, **settings)
    if page is not None and not page.interactive:
        page.figure(
            explorer.sheet(),
            "explorer",
            caption="The explorer, as it opens in JupyterLab, where every choice can be changed.",
            alt="Four panels: histogram of element errors, error by part, heat map of layers, and the worst row's "
            "scores, probabilities, causes and tiles.",
            data=explorer.numbers(),
        )
        page.table(
            explorer.worst_rows(), "explorer_rows", caption="Worst rows, relative errors; the first is shown above"
        )
        return explorer
    from IPython.display import display

    display(explorer.widget)
    return explorer
