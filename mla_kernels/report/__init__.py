# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Reports: what a notebook shows and claims (`open_page`), and the runner that makes a folder to send on.

In a notebook:

    page = report.open_page("02_error_distribution", report_dir, {"seed": seed})
    page.figure(fig, "error_histogram", caption="...", alt="...", data=df)
    page.table(df, "split", caption="...")
    page.record("relative_error_total", value)
    page.claim("the split adds up to the total", holds, detail="1e-15")
    page.finish()

On the command line: `python -m mla_kernels.report run | verify | list | schema` (see `--help`).
"""

from mla_kernels.report.errors import ReportError
from mla_kernels.report.page import Page, open_page

__all__ = ["Page", "ReportError", "open_page"]
