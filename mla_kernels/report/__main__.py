# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Entry point of `python -m mla_kernels.report`."""

from mla_kernels.report.cli import main

if __name__ == "__main__":
    main(prog_name="python -m mla_kernels.report")
