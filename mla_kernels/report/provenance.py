# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Where the numbers of a report come from: `manifest.json`, and what differs between two of them."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mla_kernels.report.files import file_hash

__all__ = ["MAIN_PACKAGES", "environment", "environment_alike", "environment_differences", "gpu_profile", "seeds_of"]

# Shown on the index page; the manifest has all that are installed.
MAIN_PACKAGES = (
    "mla-kernels", "torch", "numpy", "transformers", "safetensors", "nvidia-cutlass", "vllm", "flashinfer-python",
    "pandas", "matplotlib", "papermill", "nbconvert", "ipykernel",
)  # fmt: skip


def _output(*command: str, cwd: Path | None = None) -> str:
    """What a command prints; "" if it is not there or fails."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=30, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.rstrip() if done.returncode == 0 else ""


def repository(root: Path) -> dict[str, Any]:
    """Commit and uncommitted changes of the checkout; `commit` is "" outside of one."""
    commit = _output("git", "rev-parse", "HEAD", cwd=root)
    changed = _output("git", "status", "--porcelain", cwd=root).splitlines() if commit else []
    return {"commit": commit, "dirty": bool(changed), "changed": [line[3:] for line in changed][:50]}


@functools.cache  # half a second; the workers of a sweep ask once a cell
def packages() -> Mapping[str, str]:
    """Every installed distribution and its version."""
    described = [d.metadata for d in importlib.metadata.distributions()]
    found = {m["Name"]: m["Version"] for m in described if m["Name"]}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def gpus() -> list[dict[str, str]]:
    """Name, driver and memory of each NVIDIA GPU, from nvidia-smi; empty without one."""
    fields = ("name", "driver_version", "memory.total", "compute_cap")
    text = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return [dict(zip(("name", "driver", "memory", "compute_capability"), row, strict=False)) for row in rows]


def gpu_profile() -> str:
    """The profile for the GPU of this machine; "" without one that a target of ours can be built for and run on."""
    if not any(gpu.get("compute_capability") == "9.0" for gpu in gpus()):  # Hopper: target sm90a
        return ""
    from mla_kernels import build

    rows = {row["target"]: row for row in build.capability_report()}
    return "h200" if rows["sm90a"]["can_build"] and rows["sm90a"]["can_run"] else ""


def machine() -> dict[str, Any]:
    """Processor, memory, system and GPUs."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu, "cores": cores, "memory_gib": round(memory, 1), "system": platform.platform(), "gpus": gpus(),
    }  # fmt: skip


def data_hashes(root: Path) -> dict[str, str]:
    """SHA-256 of every file under data/ that comes with the repository."""
    listed = _output("git", "ls-files", "-z", "data", cwd=root).split("\0")
    names = [name for name in listed if name] or [str(p.relative_to(root)) for p in (root / "data").rglob("*")]
    return {name: file_hash(root / name) for name in sorted(names) if (root / name).is_file()}


def environment(root: Path) -> dict[str, Any]:
    """Everything about this machine and checkout that numbers may depend on."""
    return {
        "repository": repository(root),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": dict(packages()),
        "machine": machine(),
        "data": data_hashes(root),
    }


def seeds_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are seeds, by name."""
    return {name: value for name, value in parameters.items() if "seed" in name.lower().split("_")}


def environment_differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what, recorded, now) for everything in two manifests that differs and that numbers may depend on."""
    found: list[tuple[str, str, str]] = []

    def compare(what: str, *keys: str) -> None:
        a, b = (_dig(manifest, keys) for manifest in (then, now))
        if a != b:
            found.append((what, _short(a), _short(b)))

    compare("commit", "repository", "commit")
    compare("uncommitted changes", "repository", "changed")
    compare("Python", "python", "version")
    for name in _keys(then, now, "packages"):
        compare(f"package {name}", "packages", name)
    for key, what in (("cpu", "CPU"), ("cores", "cores"), ("gpus", "GPUs"), ("system", "system")):
        compare(what, "machine", key)
    for name in _keys(then, now, "data"):
        compare(f"data {name}", "data", name)
    for name in _keys(then, now, "notebooks"):
        compare(f"source of {name}", "notebooks", name, "sha256")
        if all(_dig(manifest, ("notebooks", name, "environment")) for manifest in (then, now)):  # both finished
            compare(f"kernels in {name}", "notebooks", name, "environment", "build", "key")
            compare(f"torch threads in {name}", "notebooks", name, "environment", "torch", "threads")
    return found


def environment_alike(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What of two manifests is the same, in words: "commit", "data (12 files)", "GPUs (NVIDIA H200)"."""
    differing = [what for what, _, _ in environment_differences(then, now)]
    gpus = ", ".join(gpu["name"] for gpu in now["machine"]["gpus"]) or "none"
    commit = (now["repository"]["commit"] or "none")[:10]
    parts = (
        (f"commit ({commit})", ("commit", "uncommitted changes")),
        (f"data ({len(now['data'])} files)", ("data ",)),
        (f"notebooks ({len(now['notebooks'])})", ("source of ",)),
        ("kernels", ("kernels in ",)),
        (f"packages ({len(now['packages'])})", ("package ",)),
        (f"Python ({now['python']['version']})", ("Python",)),
        (f"processor ({now['machine']['cpu']}, {now['machine']['cores']} cores)", ("CPU", "cores", "torch threads")),
        (f"GPUs ({gpus})", ("GPUs",)),
        ("system", ("system",)),
    )
    return [name for name, starts in parts if not any(what.startswith(starts) for what in differing)]


def _keys(then: Mapping[str, Any], now: Mapping[str, Any], key: str) -> Iterable[str]:
    return dict.fromkeys([*then.get(key, {}), *now.get(key, {})])


def _dig(value: Any, keys: Iterable[str]) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _short(value: Any) -> str:
    if value in (None, "", [], {}):
        return "none"
    text = ", ".join(map(_short, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else text[:59] + "…"
