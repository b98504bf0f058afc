# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The GPU targets compiled on a machine without a GPU: one instantiation of each here and in CI, all by `make build`.

Needs nvcc and CUTLASS, which `make env` does not install: python -m pip install -e '.[gpu,nvcc]'.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mla_kernels import build, inspection, toolchain

CSRC = Path(__file__).resolve().parents[1] / "csrc"
NEEDS = "needs nvcc and CUTLASS: python -m pip install -e '.[gpu,nvcc]'"


def missing() -> str:
    """What keeps the GPU targets from being compiled here; empty if nothing does."""
    return build._reasons(lambda: build.plan(("sm90a", "sm100a")))


needs_nvcc = pytest.mark.skipif(bool(missing()), reason=f"{NEEDS} ({missing()[:100]})")


@needs_nvcc
@pytest.mark.slow
@pytest.mark.timeout(1200)  # six minutes on two cores that six others use
def test_blackwell_library_compiles_loads_and_tells(tmp_path: Path) -> None:
    """About 110 seconds of a core: CPU target, launcher, and one instantiation of CUTLASS's kernel."""
    built = build.build(("cpu", "sm100a"), first_only=True, jobs=2)
    assert built.info["architectures"] == ["sm_100a"]
    assert built.info["file_seconds"]["sm100a/mla_e4m3_individual.cu"] > 0
    assert not [name for name in built.info["file_seconds"] if "persistent" in name]
    kernels = inspection.compiled_kernels(built).set_index("kernel")
    assert set(kernels.index) == {"finish bf16", "finish fp16", "mla e4m3, individual", "prepare"}
    assert (kernels["spill_bytes"] == 0).all()
    mla = kernels.loc["mla e4m3, individual"]
    assert 150_000 < mla["shared_bytes"] <= 232_448
    if "fp8_mma" in kernels:  # cuobjdump is in the extra too
        assert mla["fp8_mma"] >= 26
        assert mla["bf16_fp16_mma"] == mla["spill_moves"] == 0
    # No name of CUDA is looked up when it loads, and it loads where there is no driver.
    symbols = subprocess.run(["nm", "-D", "--undefined-only", built.path], capture_output=True, text=True, check=True)
    assert not re.search(r"\b(cuda[A-Z]|cu[A-Z]|__cuda|nvrtc)\w*", symbols.stdout)
    code = (
        "import sys, torch; from mla_kernels import build, ops\n"
        "built = build.load(targets=('cpu', 'sm100a'), first_only=True)\n"
        "print(ops.loaded_targets(), built.rebuilt, built.info['self_test'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("('cpu', 'sm100a') False {'cpu': 'passed on cpu', 'sm100a': ")


@needs_nvcc
@pytest.mark.slow
def test_hopper_instantiation_compiles(tmp_path: Path) -> None:
    """One of the Hopper files, with the flags of the table, as machine code by itself."""
    row = toolchain.GPU_TARGETS["sm90a"]
    plan = build.plan(("sm90a",))
    include = [f"-I{CSRC / 'include'}", f"-I{plan.paths['cutlass']}/include"]
    command = [plan.paths["nvcc"], "-ccbin", plan.paths["cxx"], "-std=c++20", "-O3", *row.flags, "-Xptxas=-v", *include]
    command += ["-cubin", str(CSRC / row.folder / row.first), "-o", str(tmp_path / "first.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = list(inspection._from_log(done.stderr + done.stdout))
    assert {k["architecture"] for k in kernels} == {"90a"}
    assert {k["kernel"] for k in kernels} == {"decode e4m3, 16 lines, TMA", "decode e4m3, 16 lines, gather"}
    assert all(0 < k["registers"] <= 255 for k in kernels)


@needs_nvcc
def test_plain_architecture_is_refused(tmp_path: Path) -> None:
    """What a real nvcc makes of a plain sm_100: read from the file by us, and refused."""
    source = tmp_path / "empty.cu"
    source.write_text("__global__ void empty() {}\n")
    plan = build.plan(("sm100a",))
    for architecture, good in (("100", False), ("100a", True), ("100f", False)):
        library = tmp_path / f"lib{architecture}.so"
        flags = [f"-gencode=arch=compute_{architecture},code=sm_{architecture}", "-shared", "-Xcompiler=-fPIC"]
        cudart = plan.paths.get("cudart")
        environment = {**os.environ, **({"LIBRARY_PATH": os.path.dirname(cudart)} if cudart else {})}
        command = [plan.paths["nvcc"], "-ccbin", plan.paths["cxx"], *flags, str(source), "-o", str(library)]
        subprocess.run(command, check=True, env=environment)
        assert toolchain.embedded_architectures(library, {"PATH": ""}) == {f"sm_{architecture}"}
        if good:
            assert build._checked_architectures(library, ("sm100a",)) == [f"sm_{architecture}"]
        else:
            with pytest.raises(build.BuildError, match=f"holds sm_{architecture} and not sm_100a"):
                build._checked_architectures(library, ("sm100a",))


def test_packaged_toolkit_is_told_to_cmake_and_linker(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvidia/cu13/bin/nvcc"
    library = tmp_path / "nvidia/cu13/lib/libcudart.so.13"
    for path in (nvcc, library):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    assert toolchain.packaged_cudart(str(nvcc)) == str(library)
    (tmp_path / "nvidia/cu13/lib64").mkdir()
    assert toolchain.packaged_cudart(str(nvcc)) is None


def test_first_only_is_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda *_, **__: toolchain.Tool("/cuda/bin/nvcc", (13, 0), "nvcc 13.0"))
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: ("/cutlass", "4.2.0.0"))
    whole, first = build.plan(("sm100a",)), build.plan(("sm100a",), first_only=True)
    assert whole.key != first.key
    assert "MLA_SM100A_FIRST" not in whole.options
    assert first.options["MLA_SM100A_FIRST"] == "ON"


def test_page_for_a_b200_names_commands_and_options_that_exist() -> None:
    text = (CSRC.parent / "docs/b200.md").read_text()
    commands = re.findall(r"^python -m (mla_kernels\.\w+) (\w+) (.*)$", text, flags=re.M)
    assert [(module, command) for module, command, _ in commands] == [
        ("mla_kernels.bench", "gpu"),
        ("mla_kernels.bench", "accuracy"),
    ]
    for module, command, options in commands:
        shown = subprocess.run([sys.executable, "-m", module, command, "--help"], capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr
        for option in re.findall(r"--[\w-]+", options):
            assert option in shown.stdout
        assert "--page-size 128" in options  # the only one that the target takes
    for row in toolchain.DEVICES:
        if row.major > 10 or row.minor == 3:
            assert f"| {row.major}.{'x' if row.minor is None else row.minor} |" in text
