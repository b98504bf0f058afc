# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The kernels as vLLM's CUTLASS_MLA attention backend, with kv_cache_dtype auto and fp8.

vLLM finds `register` through the entry point group vllm.general_plugins and calls it in each of its processes. It
imports no kernel, starts no build and touches no device. MLA_KERNELS_VLLM=0 switches it off.
"""

from __future__ import annotations

import logging
import os

__all__ = ["register"]

SWITCH = "MLA_KERNELS_VLLM"
_OFF = ("0", "off", "false", "no")


def register() -> None:
    """Make CUTLASS_MLA of the installed vLLM ours: no other entry of its registry changes, and calls may be repeated.

    On vLLM's CPU platform also let MLA models choose it (see `mla_kernels.vllm.cpu_platform`). A vLLM that is not
    understood is left as it is, with a warning that says what was expected and what was found.
    """
    if os.environ.get(SWITCH, "1").strip().lower() in _OFF:
        return
    from mla_kernels.vllm import detect

    try:
        found = detect.detect()
    except detect.UnsupportedVllmError as error:
        logging.getLogger("vllm.mla_kernels").warning("%s", error)
        return
    if found.is_cpu:
        from mla_kernels.vllm.cpu_platform import install

        install(found.platform_class)
    found.register_backend(found.member, detect.CPU_BACKEND if found.is_cpu else detect.CUDA_BACKEND)
