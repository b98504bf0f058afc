# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""What GPU kernels were compiled to: registers, shared memory, spills, instructions. No GPU is needed.

Registers and spills are what ptxas wrote into the build's log, shared memory of a launch is what the sources left in
the library (csrc/include/mla/facts.h), and instructions are counted in its machine code by cuobjdump.

    python -m mla_kernels.inspection --target sm90a --target sm100a --record data/measurements/compiled/kernels.json
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mla_kernels import build, toolchain
from mla_kernels.build import Built
from mla_kernels.measurements import provenance, read_measurements, write_measurements

__all__ = [
    "INSTRUCTIONS",
    "compiled_kernels",
    "instruction_counts",
    "kernel_name",
    "kernels_here_or_recorded",
    "side_by_side",
    "wrong_formats",
]

#: Columns of instruction counts, and the opcodes that start so. UTC*MMA is Blackwell's and sums in tensor memory, *GMMA
#: is Hopper's and sums in registers.
INSTRUCTIONS = {
    "fp8_mma": r"UTCQMMA|QGMMA",
    "bf16_fp16_mma": r"UTCHMMA|HGMMA",
    "tensor_memory_moves": r"LDTM|STTM|UTCCP",
    "tma_loads": r"UTMALDG",
    "tma_prefetches": r"UTMAPF",
    "exponentials": r"MUFU\.EX2",
    "spill_moves": r"STL|LDL",
    "traps": r"BPT\.TRAP",
}
_OPCODES = {name: re.compile(rf"(?:@!?U?P\w+\s+)?(?:{pattern})") for name, pattern in INSTRUCTIONS.items()}
NO_CUOBJDUMP = "no cuobjdump: python -m pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"

#: The kernel that stands for each target: e4m3, most heads.
REPRESENTATIVES = {
    "sm90a": "decode e4m3, 64 lines, TMA",
    "sm100a": "mla e4m3, individual",
    "sm100f": "mla e4m3, individual",
}

_FACT = struct.Struct("<56sq")
_CUTLASS_DTYPES = {"float_e4m3_t": "e4m3", "bfloat16_t": "bf16", "half_t": "fp16"}


def kernel_name(symbol: str) -> str:
    """A short name of a kernel from its mangled symbol, as in the sources' facts; the symbol where it is not known."""
    if found := re.search(
        r"Sm100FmhaMlaKernel.*?(float_e4m3_t|bfloat16_t|half_t).*Sm100Mla(Individual|Persistent)", symbol
    ):
        return f"mla {_CUTLASS_DTYPES[found[1]]}, {found[2].lower()}"
    if found := re.search(r"13decode_kernelI.*6TraitsILi(\d+)ELb([01])E", symbol):
        return f"decode e4m3, {found[1]} lines, {'TMA' if found[2] == '1' else 'gather'}"
    if found := re.search(r"15decode16_kernelI.*6TraitsI(13__nv_bfloat16|6__half)Lb([01])E", symbol):
        return f"decode {'bf16' if 'bf' in found[1] else 'fp16'}, {'TMA' if found[2] == '1' else 'gather'}"
    for digit in re.finditer(r"\d(?=[A-Za-z_])", symbol):
        for width in (2, 1):  # a length of one or two digits; digits before it may be of another name
            count = symbol[digit.end() - width : digit.end()]
            name = symbol[digit.end() :][: int(count)] if count.isdigit() else ""
            if name.endswith("_kernel") and len(name) == int(count):
                dtype = re.match(r"I(13__nv_bfloat16|6__half)E", symbol[digit.end() + len(name) :])
                of = {"13__nv_bfloat16": " bf16", "6__half": " fp16"}[dtype[1]] if dtype else ""
                return name.removesuffix("_kernel") + of
    return symbol


def _from_log(text: str) -> Iterator[dict[str, Any]]:
    """One row a kernel from what ``ptxas -v`` wrote: after the command line that Ninja prints."""
    file = ""
    for block in re.split(r"^(?=\[\d+/\d+\] |ptxas info\s*: Compiling entry function )", text, flags=re.M):
        if command := re.match(r"\[\d+/\d+\] .*? -c (?:\S*/)?(\w+/\w+\.cu) ", block):
            file = command[1]
        if not (entry := re.match(r"ptxas info\s*: Compiling entry function '(\w+)' for 'sm_(\w+)'", block)):
            continue
        spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block)
        used = re.search(r"Used (\d+) registers(.*)", block)
        shared = re.search(r"(\d+) bytes smem", used[2]) if used else None
        yield {
            "architecture": entry[2],
            "kernel": kernel_name(entry[1]),
            "registers": int(used[1]) if used else None,
            "spill_bytes": int(spills[2]) + int(spills[3]) if spills else None,
            "static_shared_bytes": int(shared[1]) if shared else 0,
            "file": file,
        }


def _dynamic_shared(library: Path) -> dict[str, int]:
    section = toolchain.elf_section(library.read_bytes(), b"mla_facts")
    whole = section[: len(section) // _FACT.size * _FACT.size]
    return {name.rstrip(b"\0").decode(): size for name, size in _FACT.iter_unpack(whole)}


def instruction_counts(library: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> pd.DataFrame | None:
    """A row a kernel: architecture, kernel, one column for each of INSTRUCTIONS, and instructions in all.

    None where there is no cuobjdump that can read the library. These are counts in the machine code, not of what runs.
    """
    for program in toolchain.cuobjdumps(environ):
        command = [program, "-sass", os.fspath(library)]
        counts: dict[tuple[str, str], collections.Counter[str]] = {}
        architecture, current = "", None
        # cuobjdump runs nvdisasm, which lies beside it or on PATH.
        path = os.pathsep.join([os.path.dirname(program), environ.get("PATH", "")])
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**environ, "PATH": path}
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.match(r"\s*arch = sm_(\w+)", line):
                    architecture = found[1]
                elif found := re.match(r"\s*Function : (\w+)", line):
                    current = counts.setdefault((architecture, kernel_name(found[1])), collections.Counter())
                elif current is not None and (found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*)", line)):
                    current["instructions"] += 1
                    current.update(name for name, opcode in _OPCODES.items() if opcode.match(found[1]))
        if process.returncode == 0 and counts:
            columns = [*INSTRUCTIONS, "instructions"]
            rows = [{"architecture": a, "kernel": k, **{c: n[c] for c in columns}} for (a, k), n in counts.items()]
            return pd.DataFrame(rows)
    return None


def compiled_kernels(built: Built) -> pd.DataFrame:
    """A row for each GPU kernel in a build; empty for a build of the CPU target.

    Columns: target, kernel, registers (of a thread), spill_bytes (stored and loaded), shared_bytes (of a CTA, static
    and dynamic; the dynamic part only where the sources state it), file, compile_seconds (wall time of the file), then
    the counts of INSTRUCTIONS (missing without cuobjdump).
    """
    rows = pd.DataFrame(_from_log(built.log.read_text("utf-8", "replace")))
    if rows.empty:
        return rows
    targets = {target.architecture: name for name, target in toolchain.GPU_TARGETS.items()}
    rows.insert(0, "target", rows["architecture"].map(targets))
    dynamic = rows["kernel"].map(_dynamic_shared(built.path)).fillna(0).astype(int)
    rows.insert(4, "shared_bytes", rows.pop("static_shared_bytes") + dynamic)
    rows["compile_seconds"] = rows["file"].map(built.info.get("file_seconds", {}))
    counts = instruction_counts(built.path)
    if counts is not None:
        rows = rows.merge(counts, on=["architecture", "kernel"], how="left")
    return rows.drop(columns="architecture").sort_values(["target", "kernel"], ignore_index=True)


def kernels_here_or_recorded(built: Built) -> tuple[pd.DataFrame, str]:
    """(kernels, where they come from): those of `built`, or the recorded ones where it has no GPU target.

    Recorded: data/measurements/compiled/kernels.json.
    """
    kernels = compiled_kernels(built)
    if not kernels.empty:
        missing = "" if "instructions" in kernels else f"; instructions are not counted: {NO_CUOBJDUMP}"
        return kernels, f"compiled here{missing}"
    path = Path(__file__).resolve().parents[1] / "data/measurements/compiled/kernels.json"
    told, rows = read_measurements(path)
    return pd.DataFrame(
        rows
    ), f"recorded, compiled and not run: nvcc {told['nvcc']}, CUTLASS {told['cutlass']}, {told['date']}"


def side_by_side(kernels: pd.DataFrame) -> pd.DataFrame:
    """One e4m3 kernel of each target as a column, what is known of it as rows."""
    chosen = [
        row
        for target, name in REPRESENTATIVES.items()
        for _, row in kernels[(kernels["target"] == target) & (kernels["kernel"] == name)].iterrows()
    ]
    table = pd.DataFrame({row["target"]: row.drop("target") for row in chosen})
    return table.rename_axis("what").reset_index()


def wrong_formats(kernels: pd.DataFrame) -> list[str]:
    """Decode kernels whose tensor-core instructions are not those of their inputs' format; none where not counted."""
    if "fp8_mma" not in kernels:
        return []
    decode = kernels[kernels["kernel"].str.match(r"(mla|decode) ")]
    fp8 = decode["kernel"].str.contains("e4m3")
    right = ((decode["fp8_mma"] > 0) == fp8) & ((decode["bf16_fp16_mma"] > 0) != fp8)
    return [f"{row['target']} {row['kernel']}" for _, row in decode[~right].iterrows()]


def _main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mla_kernels.inspection", description="Compile GPU targets and show what came out."
    )
    parser.add_argument("--target", action="append", choices=list(toolchain.GPU_TARGETS), help="default: sm90a, sm100a")
    parser.add_argument("--source-dir", help="folder csrc; default: this checkout's")
    parser.add_argument("--cache-dir", help="default: the user's cache folder")
    parser.add_argument("--record", type=Path, help="write the rows to this file")
    options = parser.parse_args(arguments)
    targets = options.target or ["sm90a", "sm100a"]
    try:
        built = build.build(("cpu", *targets), source_dir=options.source_dir, cache_dir=options.cache_dir)
    except (build.BuildError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    kernels = compiled_kernels(built)
    print(kernels.to_string(index=False))
    if options.record:
        facts = {
            "what": "GPU kernels as compiled, on a machine without a GPU; nothing was run",
            "nvcc": built.info["nvcc"]["version"].removeprefix("release ").split(" ")[0],
            "cutlass": built.info["cutlass"],
            "jobs": built.info["jobs"],
            "build_seconds": built.seconds,
            "build_processor_seconds": built.info.get("processor_seconds"),
            "note": "seconds are wall times of files compiled side by side, but for build_processor_seconds",
        }
        told = provenance(**facts)
        kept = {
            name: value for name, value in told.items() if name not in ("gpu", "driver", "cuda", "peers", "threads")
        }
        write_measurements(
            options.record,
            [{str(name): value for name, value in row.items()} for row in kernels.to_dict("records")],
            kept,
        )
    return 0


if __name__ == "__main__":
    sys.exit(_main())
