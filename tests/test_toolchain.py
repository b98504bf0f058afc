# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Tools and toolkits: stub nvcc of every kind, CUDA_HOME, architectures asked for and found inside, the report."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from build_stubs import (
    FATBIN_IMAGES,
    REAL_COMPILER,
    Site,
    alive,
    child,
    fatbin_source,
    finish,
    script,
    stub_compiler,
    value_of,
)

from mla_kernels import build, toolchain
from mla_kernels.build import BuildError
from mla_kernels.toolchain import Tool, TorchFacts

CPU_TORCH = TorchFacts("/site/torch", "2.13.0+cpu", None, "abc")
CUDA_TORCH = TorchFacts("/site/torch", "2.11.0+cu130", "13.0", "abc")
BANNER = """\
nvcc: NVIDIA (R) Cuda compiler driver
Cuda compilation tools, release {version}, V{version}.88
"""


def toolkit(folder: Path, body: str, newest_gcc: int | None = None) -> Path:
    """A CUDA folder with a stub nvcc."""
    nvcc = script(folder / "bin" / "nvcc", body)
    if newest_gcc is not None:
        header = folder / "include" / "crt" / "host_config.h"
        header.parent.mkdir(parents=True)
        header.write_text(f"#if __GNUC__ > {newest_gcc}\n#error\n#endif\n")
    return nvcc


def release(version: str) -> str:
    return f"cat <<'END'\n{BANNER.format(version=version)}END\n"


def find(home: Path | str, target: str = "sm90a", facts: TorchFacts = CPU_TORCH, host: Tool | None = None) -> Tool:
    return toolchain.find_nvcc(
        [target], torch=facts, host=host, environ={"CUDA_HOME": str(home), "PATH": "/usr/bin:/bin"}
    )


# nvcc (W17)


@pytest.mark.parametrize(
    ("version", "target", "facts", "outcome"),
    [
        (
            "11.8",
            "sm90a",
            CPU_TORCH,
            r"nvcc 11\.8 at .*/bin/nvcc \(from CUDA_HOME\) is too old for target 'sm90a', .* CUDA 13\.0",
        ),
        ("12.3", "sm90a", CPU_TORCH, r"nvcc 12\.3 at .* is too old for target 'sm90a', which needs CUDA 13\.0"),
        (
            "12.3",
            "sm100a",
            CPU_TORCH,
            r"nvcc 12\.3 at .* is too old for target 'sm100a', which needs CUDA 12\.8 or newer",
        ),
        ("12.8", "sm100a", CPU_TORCH, None),
        ("12.8", "sm100f", CPU_TORCH, r"is too old for target 'sm100f', which needs CUDA 12\.9 or newer"),
        ("12.9", "sm100f", CPU_TORCH, None),
        (
            "12.9",
            "sm100a",
            CUDA_TORCH,
            r"nvcc 12\.9 at .* and torch 2\.11\.0\+cu130 at /site/torch disagree: .* CUDA 13\.0\.",
        ),
        ("13.0", "sm90a", CUDA_TORCH, None),
        ("13.0", "sm100a", CPU_TORCH, None),
    ],
)
def test_nvcc_release(tmp_path: Path, version: str, target: str, facts: TorchFacts, outcome: str | None) -> None:
    toolkit(tmp_path, release(version))
    if outcome is None:
        found = find(tmp_path, target, facts)
        assert f"{found.version[0]}.{found.version[1]}" == version
        assert found.path == str(tmp_path / "bin" / "nvcc")
        return
    with pytest.raises(BuildError, match=outcome):
        find(tmp_path, target, facts)


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("echo banana", r"exit code 0 and names no release: 'banana'; set CUDA_HOME"),
        ("printf '\\351\\000\\203'", r"exit code 0 and names no release"),
        ("exit 3", r"exit code 3 and names no release: '\(nothing\)'"),
        (release("13.0") + "exit 1", r"exit code 1 and names no release"),
        ("sleep 300", r"did not answer --version within 5 s; set CUDA_HOME"),
        ("sleep 300 & echo $! >> $pids; echo still here; wait", r"did not answer --version within 5 s"),
        ("yes", r"did not answer --version within 5 s"),
    ],
)
def test_nvcc_garbage_and_hang(tmp_path: Path, body: str, outcome: str) -> None:
    toolkit(tmp_path, f"pids={tmp_path}/pids; echo $$ > $pids\n{body}\n")
    start = time.monotonic()
    with pytest.raises(BuildError, match=f"nvcc .*/bin/nvcc .*{outcome}"):
        find(tmp_path)
    assert time.monotonic() - start < 10
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    while any(map(alive, pids)) and time.monotonic() - start < 10:  # killed; the system may take a moment to bury them
        time.sleep(0.05)
    assert not any(map(alive, pids))


def test_nvcc_that_is_no_program(tmp_path: Path) -> None:
    nvcc = toolkit(tmp_path, "")
    nvcc.write_bytes(b"\0\1\2\3")
    with pytest.raises(BuildError, match=r"nvcc .* cannot be started: Exec format error"):
        find(tmp_path)


@pytest.mark.parametrize(("gcc", "good"), [((12, 2), True), ((15, 1), True), ((16, 0), False)])
def test_host_compiler_too_new_for_nvcc(tmp_path: Path, gcc: tuple[int, int], good: bool) -> None:
    toolkit(tmp_path, release("13.0"), newest_gcc=15)
    host = Tool("/usr/bin/g++", gcc, "g++ (Debian)")
    if good:
        assert find(tmp_path, host=host).version == (13, 0)
    else:
        with pytest.raises(
            BuildError, match=r"takes gcc up to 15 as host compiler; /usr/bin/g\+\+ is 16\.0\. Pass compiler="
        ):
            find(tmp_path, host=host)
        assert find(tmp_path, host=Tool("/usr/bin/clang++", gcc, "clang version 16.0")).version == (13, 0)


# Where nvcc is looked for (W18)


def test_cuda_home_is_explained(tmp_path: Path) -> None:
    good = toolkit(tmp_path / "cuda", release("13.0")).parent.parent
    (tmp_path / "empty").mkdir()
    not_executable = toolkit(tmp_path / "plain", release("13.0"))
    not_executable.chmod(0o644)
    link = tmp_path / "link"
    link.symlink_to(good)
    assert find(link).version == (13, 0)
    for home, message in {
        f"{tmp_path}/a:{tmp_path}/b": r"CUDA_HOME is '.*/a:.*/b', which joins several folders with ':'; name one",
        f"{tmp_path}/nowhere": r"CUDA_HOME is '.*/nowhere', which is not a folder",
        f"{tmp_path}/empty": r"CUDA_HOME is '.*/empty', which has no bin/nvcc",
        f"{tmp_path}/plain": r"CUDA_HOME is '.*/plain', but .*/bin/nvcc is not executable; chmod \+x it",
    }.items():
        with pytest.raises(BuildError, match=message):
            find(home)


def test_nvcc_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, path, on_path, packaged = (toolkit(tmp_path / n, release(f"13.{i}")) for i, n in enumerate("abcd"))
    monkeypatch.setattr(toolchain, "_package_folder", lambda _: tmp_path / "site" / "nvidia")
    (tmp_path / "site/nvidia").mkdir(parents=True)
    (tmp_path / "site/nvidia/cu13").symlink_to(packaged.parent.parent)
    environ = {"CUDA_HOME": str(home.parent.parent), "CUDA_PATH": str(path.parent.parent), "PATH": str(on_path.parent)}
    for minor, name in enumerate(["CUDA_HOME", "CUDA_PATH", "PATH", "package nvidia-cuda-nvcc"]):
        found = toolchain.find_nvcc(
            ["sm90a"], torch=CPU_TORCH, environ={**environ, "PATH": environ["PATH"] + ":/usr/bin:/bin"}
        )
        assert found.version == (13, minor)
        assert name in found.banner
        environ.pop(name, None)
        environ.setdefault("PATH", "/usr/bin:/bin")
    (tmp_path / "site/nvidia/cu13").unlink()
    with pytest.raises(
        BuildError, match=r"no nvcc: CUDA_HOME and CUDA_PATH are not set, .*pip install nvidia-cuda-nvcc"
    ):
        toolchain.find_nvcc(["sm90a"], torch=CPU_TORCH, environ={"PATH": str(tmp_path)})
    with pytest.raises(
        BuildError, match=r"CUDA_HOME is '/x', which is not a folder \(or unset CUDA_HOME to use .*, from PATH\)"
    ):
        toolchain.find_nvcc(["sm90a"], torch=CPU_TORCH, environ={"CUDA_HOME": "/x", "PATH": str(on_path.parent)})


def test_cpu_target_needs_no_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path)
    monkeypatch.setenv("CUDA_HOME", "/a:/b")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "nonsense")
    monkeypatch.setattr(toolchain, "find_nvcc", None)
    monkeypatch.setattr(toolchain, "find_cutlass", None)
    assert value_of(site.build().path) == 1


# Compilers, CMake, Ninja, torch, CUTLASS


def test_compiler_faults(tmp_path: Path) -> None:
    cases = {
        "exit 4": "--version ended with exit code 4",
        "echo no version here": None,
    }
    for body, message in cases.items():
        stub = script(tmp_path / "c++", body + "\n")
        if message is None:
            assert toolchain.find_compiler(stub).version == (0, 0)
        else:
            with pytest.raises(BuildError, match=message):
                toolchain.find_compiler(stub)
    (tmp_path / "binary").write_bytes(b"\0\1")
    (tmp_path / "binary").chmod(0o755)
    with pytest.raises(BuildError, match="cannot be started: Exec format error"):
        toolchain.find_compiler(tmp_path / "binary")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: CXX='ccache g\+\+' is not an executable file"):
        toolchain.find_compiler(None, {"CXX": "ccache g++", "PATH": os.environ["PATH"]})
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: c\+\+, g\+\+ or clang\+\+ is not"):
        toolchain.find_compiler(None, {"PATH": str(tmp_path / "empty")})
    named = toolchain.find_compiler(None, {"CXX": REAL_COMPILER, "PATH": ""})
    assert named.path == REAL_COMPILER
    assert named.version >= (9, 0)


def test_compiler_is_called_by_the_name_of_its_link(tmp_path: Path) -> None:
    """Compiler caches are links that go by the name they are called with."""
    (tmp_path / "g++").symlink_to(stub_compiler(tmp_path / "ccache"))
    assert toolchain.find_compiler(tmp_path / "g++").path == str(tmp_path / "g++")


def test_old_cmake_on_path_gives_way_to_the_package(tmp_path: Path) -> None:
    script(tmp_path / "cmake", "echo cmake version 3.10.2\n")
    found = toolchain.find_tool("cmake", (3, 25), {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert found.path != str(tmp_path / "cmake")
    assert found.version >= (3, 25)
    with pytest.raises(BuildError, match=r"cmake 99\.0 or newer is needed; found .*/cmake: cmake version 3\.10\.2"):
        toolchain.find_tool("cmake", (99, 0), {"PATH": f"{tmp_path}:/usr/bin:/bin"})


def test_torch_facts_agree_with_torch() -> None:
    facts = toolchain.torch_facts()
    assert facts == TorchFacts(
        str(Path(torch.__file__).parent), torch.__version__, torch.version.cuda, torch.version.git_version
    )


def test_import_and_plan_leave_torch_alone(tmp_path: Path) -> None:
    site = Site(tmp_path)
    out, err = finish(child("build.plan(source_dir=sys.argv[1])\nprint('torch' in sys.modules)", site.tree))
    assert (out, err) == ("False\n", "")


def test_missing_torch_and_cutlass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_package_folder", lambda _: None)
    with pytest.raises(BuildError, match="torch is not installed in this Python environment"):
        toolchain.torch_facts()
    with pytest.raises(
        BuildError, match=r"no CUTLASS headers; install them with: python -m pip install 'mla-kernels\[gpu\]'"
    ):
        toolchain.find_cutlass()


def test_cutlass_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tmp_path / "source/include/cutlass/version.h"
    header.parent.mkdir(parents=True)
    header.write_text("")
    monkeypatch.setattr(toolchain, "_package_folder", lambda _: tmp_path)
    assert toolchain.find_cutlass()[0] == str(tmp_path / "source")


# Architectures (W15)


@pytest.mark.parametrize(
    ("arch_list", "targets", "flags", "notes"),
    [
        ("", ("sm90a",), ["90a-real"], []),
        ("9.0", ("sm90a",), ["90a-real"], ["entry 9.0 is compiled as 9.0a, without PTX"]),
        ("9.0+PTX", ("sm90a",), ["90a-real"], ["entry 9.0+PTX is compiled as 9.0a, without PTX"]),
        ("9.0a", ("sm90a",), ["90a-real"], []),
        ("9.0a+PTX", ("sm90a",), ["90a-real"], ["entry 9.0a+PTX is compiled as 9.0a, without PTX"]),
        ("10.0", ("sm100a",), ["100a-real"], ["entry 10.0 is compiled as 10.0a, without PTX"]),
        ("10.0f", ("sm100a",), ["100a-real"], ["entry 10.0f is compiled as 10.0a, without PTX"]),
        ("10.3", ("sm100a",), ["100a-real"], ["entry 10.3 is left out: no asked target has it"]),
        ("10.0f", ("sm100f",), ["100f-real"], []),
        ("10.3", ("sm100f",), ["100f-real"], ["entry 10.3 is compiled as 10.0f, without PTX"]),
        ("10.0", ("sm100a", "sm100f"), ["100a-real", "100f-real"], ["compiled as 10.0a and 10.0f, without PTX"]),
        ("10.0", ("sm90a",), ["90a-real"], ["entry 10.0 is left out: no asked target has it"]),
        ("8.0;9.0", ("sm90a",), ["90a-real"], ["entry 8.0 is left out", "entry 9.0 is compiled as 9.0a"]),
        (
            "8.0 9.0 10.0",
            ("sm100a", "sm90a"),
            ["100a-real", "90a-real"],
            ["8.0 is left", "9.0 is comp", "10.0 is comp"],
        ),
        ("Hopper", ("sm90a",), ["90a-real"], ["entry Hopper is left out"]),
        ("nonsense", ("cpu",), [], []),
    ],
)
def test_architectures_follow_the_targets(
    arch_list: str, targets: tuple[str, ...], flags: list[str], notes: list[str]
) -> None:
    got, said = toolchain.cuda_architectures(targets, arch_list)
    assert got == flags
    assert len(said) == len(notes)
    assert all(note in line for note, line in zip(notes, said, strict=True))


def test_malformed_architecture_list_is_refused() -> None:
    with pytest.raises(BuildError, match=r"TORCH_CUDA_ARCH_LIST holds '90a'; expected entries such as 9\.0a"):
        toolchain.cuda_architectures(["sm90a"], "8.0;90a")


def library_with(tmp_path: Path, *images: str) -> Path:
    source, library = tmp_path / "fatbin.cpp", tmp_path / "library.so"
    source.write_text(fatbin_source(*images) if images else "int nothing;\n")
    subprocess.run([REAL_COMPILER, "-shared", "-fPIC", source, "-o", library], check=True)
    return library


NO_CUOBJDUMP = {"PATH": ""}


@pytest.mark.parametrize(
    "images", [(), ("sm_90",), ("sm_90a",), ("sm_80", "sm_90a", "compute_90a"), tuple(FATBIN_IMAGES)]
)
def test_embedded_architectures_are_read_from_the_file(tmp_path: Path, images: tuple[str, ...]) -> None:
    assert toolchain.embedded_architectures(library_with(tmp_path, *images), NO_CUOBJDUMP) == frozenset(images)


def test_embedded_architectures_unknown(tmp_path: Path) -> None:
    library = library_with(tmp_path, "sm_90a")
    block = library.read_bytes()
    library.write_bytes(block.replace(bytes.fromhex(FATBIN_IMAGES["sm_90a"])[:4], bytes.fromhex("77000101")))
    assert toolchain.embedded_architectures(library, NO_CUOBJDUMP) is None  # an image kind that nobody knows
    library.write_bytes(block[: len(block) // 2])
    assert toolchain.embedded_architectures(library, NO_CUOBJDUMP) is None
    library.write_bytes(b"no ELF file")
    assert toolchain.embedded_architectures(library, NO_CUOBJDUMP) is None
    assert toolchain.embedded_architectures(tmp_path / "none", NO_CUOBJDUMP) is None


def test_cuobjdump_is_asked_where_present(tmp_path: Path) -> None:
    cuobjdump = """
case $1 in
  --list-elf) echo 'ELF file    1: kernels.1.sm_90a.cubin'; echo 'ELF file    2: kernels.2.sm_100a.cubin';;
  --list-ptx) echo 'PTX file    1: kernels.1.sm_90a.ptx';;
esac
"""
    script(tmp_path / "cuda/bin/cuobjdump", cuobjdump)
    environ = {"CUDA_HOME": str(tmp_path / "cuda"), "PATH": "/usr/bin:/bin"}
    found = toolchain.embedded_architectures(library_with(tmp_path), environ)
    assert found == {"sm_90a", "sm_100a", "compute_90a"}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="compiles one line of CUDA: needs nvcc on PATH")
@pytest.mark.parametrize("form", ["90", "90a"])
def test_embedded_architectures_of_real_nvcc(tmp_path: Path, form: str) -> None:
    (tmp_path / "kernel.cu").write_text("__global__ void kernel(float* x) { x[threadIdx.x] = 0; }\n")
    flags = ["-shared", "-Xcompiler", "-fPIC", f"-gencode=arch=compute_{form},code=sm_{form}"]
    subprocess.run(["nvcc", *flags, tmp_path / "kernel.cu", "-o", tmp_path / "k.so"], check=True)
    assert toolchain.embedded_architectures(tmp_path / "k.so", NO_CUOBJDUMP) == {f"sm_{form}"}


@pytest.mark.parametrize(
    ("images", "outcome"),
    [
        (("sm_90a",), None),
        (("sm_90a", "sm_80"), None),
        (("sm_90",), r"holds sm_90 and not sm_90a: on the device such a kernel returns with its output unwritten"),
        (("compute_90a",), r"holds compute_90a and not sm_90a"),
        ((), r"holds no GPU code and not sm_90a"),
    ],
)
def test_built_file_is_checked_before_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: tuple[str, ...], outcome: str | None
) -> None:
    """A target sm90a in the stand-in tree, whose library carries the images given."""
    site = Site(tmp_path)
    (site.tree / "sm90a").mkdir()
    if images:
        with open(site.tree / "cpu/probe.cpp", "a") as source:
            source.write(fatbin_source(*images))
    toolkit(tmp_path / "cuda", release("13.0"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: ("/cutlass", "4.2.0.0"))
    if outcome:
        with pytest.raises(BuildError, match=outcome):
            site.build(targets=("sm90a",))
        assert not list(site.cache.rglob("*.so"))
        return
    built = site.build(targets=("sm90a",))
    assert built.info["architectures"] == sorted(images)
    assert built.info["cutlass"] == "4.2.0.0"
    assert built.info["options"]["CMAKE_CUDA_ARCHITECTURES"] == "90a-real"
    assert built.info["notes"] == ["TORCH_CUDA_ARCH_LIST entry 9.0 is compiled as 9.0a, without PTX"]
    monkeypatch.setattr(toolchain, "find_cutlass", lambda: ("/cutlass", "4.3.0.0"))
    assert site.plan(targets=("sm90a",)).key != built.key


# What can be done here (B32, B33)


def rows(**options: object) -> dict[str, dict[str, object]]:
    return {str(row["target"]): row for row in build.capability_report(**options)}  # type: ignore[arg-type]


def test_report_without_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    site = Site(tmp_path)
    report = rows(source_dir=site.tree)
    assert report["cpu"] == {"target": "cpu", "can_build": True, "can_load": True, "can_run": True, "why": ""}
    for target in ("sm90a", "sm100a"):
        row = report[target]
        assert (row["can_build"], row["can_load"], row["can_run"]) == (False, True, False)
        assert f"build: targets: {target} is not implemented in" in str(row["why"])
        assert f"run: no CUDA: torch {torch.__version__} is built without it" in str(row["why"])
    assert build.available_targets(source_dir=site.tree) == ("cpu",)


def test_report_without_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device: torch" in str(rows(source_dir=Site(tmp_path).tree)["sm90a"]["why"])


def test_report_without_compiler_or_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path)
    row = rows(source_dir=site.tree, compiler="/no/compiler")["cpu"]
    assert (row["can_build"], row["can_load"], row["can_run"]) == (False, True, True)
    assert "build: no C++ compiler" in str(row["why"])
    monkeypatch.setattr(toolchain, "_package_folder", lambda _: None)
    row = rows(source_dir=site.tree)["cpu"]
    assert (row["can_build"], row["can_load"], row["can_run"]) == (False, False, False)
    assert build.available_targets(source_dir=site.tree) == ()


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((8, 9), None),
        ((9, 0), "sm90a"),
        ((10, 0), "sm100a"),
        ((10, 3), "sm100f"),
        *((c, None) for c in [(10, 1), (11, 0), (12, 0), (12, 1)]),
    ],
)
def test_capability_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], target: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capability)
    report = rows(source_dir=Site(tmp_path).tree)
    assert [name for name, row in report.items() if row["can_run"]] == ["cpu", *([target] if target else [])]
    for name in {"sm90a", "sm100a", "sm100f"} - {target}:
        assert f"here: compute capability {capability[0]}.{capability[1]}" in str(report[name]["why"])
