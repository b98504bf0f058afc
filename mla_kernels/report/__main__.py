# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Entry point of `python -m mla_kernels.report`."""

import sys

if __name__ == "__main__":
    # jsonschema's optional checker of IRIs takes over a second to import, and no schema here has an IRI.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    from mla_kernels.report.cli import main

    main(prog_name="python -m mla_kernels.report")
