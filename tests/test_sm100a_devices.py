# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Which target serves which device, with which toolkit: faked capabilities, compilers and libraries."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from build_stubs import FATBIN_IMAGES, REAL_COMPILER, Site, fatbin_source, script
from test_toolchain import BANNER

from mla_kernels import build, checks, studies, toolchain
from mla_kernels.build import BuildError
from mla_kernels.toolchain import TorchFacts

CSRC = Path(__file__).resolve().parents[1] / "csrc"


@pytest.mark.parametrize(
    ("capability", "cuda", "outcome", "target", "message"),
    [
        ((9, 0), None, "target", "sm90a", r"9\.0 \(Hopper: H100, H200, GH200\) is served by target sm90a"),
        ((10, 0), None, "target", "sm100a", r"10\.0 \(Blackwell: B200, GB200\) is served by target sm100a"),
        ((10, 3), None, "target", "sm100f", r"10\.3 \(Blackwell Ultra: B300, GB300\) is served by target sm100f"),
        ((10, 0), (12, 8), "target", "sm100a", "served by target sm100a"),
        ((10, 0), (12, 6), "cpu", "cpu", r"target sm100a needs nvcc 12\.8 or newer, not 12\.6; update nvcc, or use"),
        ((10, 3), (12, 9), "target", "sm100f", "served by target sm100f"),
        ((10, 3), (12, 8), "cpu", "cpu", r"target sm100f needs nvcc 12\.9 or newer, not 12\.8; update nvcc, or use"),
        ((9, 0), (12, 9), "cpu", "cpu", r"target sm90a needs nvcc 13\.0 or newer, not 12\.9"),
        ((11, 0), None, "refused", "cpu", r"11\.0 \(Thor\) is refused: .* give NaN there \(CUTLASS issue 3128\); use"),
        (
            (12, 0),
            None,
            "refused",
            "cpu",
            r"12\.0 \(.*\) is refused: it has no tensor memory and 99 KiB .*; use the CPU",
        ),
        ((12, 1), (13, 0), "refused", "cpu", r"12\.1 \(.*\) is refused"),
        ((12, 7), None, "refused", "cpu", r"12\.7 \(.*\) is refused"),
        ((8, 0), None, "cpu", "cpu", r"8\.0: no target serves it, there are some for 9\.0, 10\.0, 10\.3; use the CPU"),
        ((8, 9), None, "cpu", "cpu", r"8\.9: no target serves it"),
        ((9, 1), None, "cpu", "cpu", r"9\.1: no target serves it"),
        ((10, 1), None, "cpu", "cpu", r"10\.1: no target serves it"),
        ((13, 0), (13, 0), "cpu", "cpu", r"13\.0: no target serves it"),
    ],
)
def test_device_table(
    capability: tuple[int, int], cuda: tuple[int, int] | None, outcome: str, target: str, message: str
) -> None:
    choice = toolchain.device_choice(capability, cuda)
    assert (choice.outcome, choice.target) == (outcome, target)
    assert re.search("compute capability .*" + message, choice.message)


@pytest.mark.parametrize("capability", [(11, 0), (12, 0), (12, 1), (8, 9)])
def test_operator_says_why_a_device_is_refused(capability: tuple[int, int]) -> None:
    reason = {11: "give NaN there", 12: "no tensor memory", 8: "no target serves it"}[capability[0]]
    with pytest.raises(NotImplementedError, match=rf"q_nope: expected .*{reason}.*; move the tensors to the CPU"):
        checks.check_target(torch.device("cuda"), ("cpu", *toolchain.GPU_TARGETS), capability)


@pytest.mark.parametrize(
    ("capability", "loaded", "device"),
    [
        ((9, 0), ("cpu", "sm90a"), "cuda"),
        ((9, 0), ("cpu", "sm90a", "sm100a"), "cuda"),
        ((9, 0), ("cpu", "sm100a"), "cpu"),  # compiled to be looked at
        ((10, 0), ("cpu", "sm90a", "sm100a"), "cpu"),  # the notebooks' cases are not what its kernel takes
        ((12, 0), ("cpu", "sm90a"), "cpu"),
    ],
)
def test_device_of_the_notebooks(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], loaded: tuple[str, ...], device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capability)
    monkeypatch.setattr(studies, "loaded_targets", lambda: loaded)
    assert studies.pick_device("auto") == device
    assert studies.pick_device("cpu") == "cpu"
    if device == "cpu":
        with pytest.raises(ValueError, match=r'device: "cuda" needs a GPU and a library with .* \(sm90a\), loaded: '):
            studies.pick_device("cuda")


def test_report_says_why_a_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: [(12, 0), (10, 0)][index])
    report = {row["target"]: row for row in build.capability_report(source_dir=Site(tmp_path).tree)}
    assert report["sm100a"]["can_run"]
    assert re.search(
        r"run: it runs on compute capability 10\.3 only; here: .*12\.0 \(.*\) is refused: .*; use the CPU; .*10\.0",
        report["sm100f"]["why"],
    )


@pytest.mark.parametrize(("capability", "wanted"), [((10, 0), False), ((10, 3), True)])
def test_family_code_is_built_where_its_device_is(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], wanted: bool
) -> None:
    monkeypatch.setattr(build, "plan", lambda targets, **_: targets)  # all can be built
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capability)
    assert ("sm100f" in build.available_targets()) == wanted
    assert {"cpu", "sm90a", "sm100a"} <= set(build.available_targets())


@pytest.mark.parametrize("target", toolchain.GPU_TARGETS)
def test_flags_of_the_table_are_those_of_the_sources(target: str) -> None:
    row = toolchain.GPU_TARGETS[target]
    text = (CSRC / row.folder / "CMakeLists.txt").read_text()
    assert all(flag in text for flag in row.flags)
    major, minor = row.oldest_cuda
    assert re.search(rf"VERSION_LESS {major}\.{minor}\)\s+message\(FATAL_ERROR \"{target}: expected nvcc", text)
    assert (CSRC / row.folder / row.first).is_file()
    assert re.search(rf"MATCHES \"\^\(.*\b{target}\b.*\)\$\"", (CSRC / "CMakeLists.txt").read_text())


@pytest.mark.parametrize("release", ["12.6", "12.8", "12.9", "13.0"])
def test_plan_by_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    """Real sources, a stub nvcc: what is planned or refused, and the command line."""
    script(tmp_path / "cuda/bin/nvcc", f"cat <<'END'\n{BANNER.format(version=release)}END\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(toolchain, "torch_facts", lambda: TorchFacts("/site/torch", "2.13.0+cpu", None, "abc"))
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: ("/cutlass", "4.2.0.0"))
    version = tuple(map(int, release.split(".")))
    for target, row in toolchain.GPU_TARGETS.items():
        if version < row.oldest_cuda:
            with pytest.raises(BuildError, match=rf"nvcc {release} at .* is too old for target '{target}'"):
                build.plan((target,))
            continue
        options = build.plan(("cpu", target)).options
        assert options["MLA_TARGETS"] == f"cpu;{target}"
        assert options["CMAKE_CUDA_ARCHITECTURES"] == f"{row.architecture}-real"


@pytest.mark.parametrize(
    ("target", "images", "good"),
    [
        ("sm100a", ("sm_100a",), True),
        ("sm100a", ("sm_90a", "sm_100a"), True),
        ("sm100a", ("sm_100f",), False),  # would run on 10.0 too; but it is not what was asked for
        ("sm100a", ("sm_90a",), False),
        ("sm100a", ("compute_90a",), False),
        ("sm100a", (), False),
        ("sm100f", ("sm_100f",), True),
        ("sm100f", ("sm_100a",), False),
    ],
)
def test_library_without_the_right_code_is_refused(
    tmp_path: Path, target: str, images: tuple[str, ...], good: bool
) -> None:
    """Built without the "a" or "f", the kernel prints a line, writes nothing and reports no error."""
    import subprocess

    assert set(images) <= set(FATBIN_IMAGES)
    source, library = tmp_path / "fatbin.cpp", tmp_path / "library.so"
    source.write_text(fatbin_source(*images) if images else "int nothing;\n")
    subprocess.run([REAL_COMPILER, "-shared", "-fPIC", source, "-o", library], check=True)
    if good:
        assert f"sm_{toolchain.TARGETS[target]}" in (build._checked_architectures(library, ("cpu", target)) or ())
        return
    with pytest.raises(
        BuildError, match=rf"holds .* and not sm_{toolchain.TARGETS[target]}: .* output unwritten and no error"
    ):
        build._checked_architectures(library, ("cpu", target))
