# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""`python -m mla_kernels.serving`."""

import sys

from mla_kernels.serving.cli import main

if __name__ == "__main__":
    sys.exit(main())
