# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""environment.yml (and through it the extras of pyproject.toml): every import is listed, every name listed is used."""

import ast
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
SOURCES = [name for name in TRACKED if name.endswith((".py", ".ipynb"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# What is used without an import: a pattern of files, and what a look finds in one of them.
USED_IN = {
    "python": ("pyproject.toml", "requires-python"),
    "pip": ("environment.yml", "- pip:"),
    "cuda-nvcc": ("mla_kernels/toolchain.py", "nvcc"),
    "cuda-cudart-dev": ("csrc/sm90a/CMakeLists.txt", "CUDA::cudart_static"),
    "cuda-driver-dev": ("csrc/sm90a/traits.h", "<cuda.h>"),
    "gxx-linux-64": ("mla_kernels/toolchain.py", "g++"),
    "cmake": ("mla_kernels/toolchain.py", "cmake"),
    "ninja": ("mla_kernels/toolchain.py", "ninja"),
    "make": ("README.md", "make report"),
    "git": ("mla_kernels/report/provenance.py", '"git"'),
    "nvidia-cutlass": ("mla_kernels/toolchain.py", "nvidia-cutlass"),
    "vllm": ("mla_kernels/peers.py", "vllm"),
    "jupyterlab": ("Makefile", "jupyter lab"),
    "pytest-benchmark": ("benchmarks/test_speed.py", "benchmark"),
    "pytest-timeout": ("pyproject.toml", "timeout = "),
    "pytest-xdist": ("Makefile", "-n 2"),
    "lm-eval": ("data/README.md", "lm_eval --model hf"),
    "datasets": ("data/gsm-tiny/gsm_tiny.yaml", "dataset_path"),  # lm-eval's reader of it
    "accelerate": ("data/README.md", "lm_eval --model hf"),  # lm-eval's hf model imports it
    "axe-playwright-python": ("tests/test_*.py", "axe_playwright"),
}
# Not installed with the environment's packages by name: they come with another one.
COMES_WITH = {"triton": "torch"}
GPU_ONLY = {"vllm"}  # not installed where there is no GPU
GPU_EXTRA = {"nvidia-cutlass"}  # headers: compiling for a GPU needs them, running on a CPU does not


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def expanded(requirement, seen=()):
    """Distributions that a requirement names; mla-kernels with extras stands for what they name, and its own."""
    if canonical(requirement.name) != "mla-kernels":
        return {canonical(requirement.name)}
    lists = [PROJECT["dependencies"]]
    lists += [PROJECT["optional-dependencies"][extra] for extra in requirement.extras if extra not in seen]
    inner = (Requirement(entry) for entries in lists for entry in entries)
    return {name for one in inner for name in expanded(one, (*seen, *requirement.extras))}


def listed(text):
    """(conda names, pip names) of an environment file."""
    entries = yaml.safe_load(text)["dependencies"]
    conda = {canonical(re.split(r"[=<>]", entry)[0]) for entry in entries if isinstance(entry, str)}
    pip = set()
    for entry in next(entry["pip"] for entry in entries if isinstance(entry, dict)):
        pip |= expanded(Requirement(re.sub(r"^-e \.", "mla-kernels", entry)))
    return conda, pip


def imported(sources):
    """Third-party modules that the files import, anywhere in them: module -> a file."""
    own = {Path(name).stem for name in SOURCES} | {"mla_kernels"}
    found = {}
    for name in sources:
        text = (ROOT / name).read_text()
        if name.endswith(".ipynb"):
            cells = json.loads(text)["cells"]
            text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        for node in ast.walk(ast.parse(text)):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            for module in (dotted.split(".")[0] for dotted in modules):
                if module not in sys.stdlib_module_names and module not in own:
                    found.setdefault(module, name)
    return found


DISTRIBUTIONS = importlib.metadata.packages_distributions()  # module -> distributions; reads every package's record


def distribution_of(module):
    names = DISTRIBUTIONS.get(module)
    return COMES_WITH.get(module) or (canonical(names[0]) if names else canonical(module))


CONDA, PIP = listed((ROOT / "environment.yml").read_text())
IMPORTS = imported(SOURCES)
MODULES = {distribution_of(module) for module in IMPORTS}


@pytest.mark.parametrize("module", sorted(IMPORTS))
def test_every_import_is_listed(module):
    assert distribution_of(module) in CONDA | PIP, (
        f"{IMPORTS[module]} imports {module}: name {distribution_of(module)} in an extra of pyproject.toml"
    )


@pytest.mark.parametrize("name", sorted(CONDA | PIP))
def test_every_name_is_used(name):
    if name in MODULES:
        return
    assert name in USED_IN, f"environment.yml or an extra names {name}, which nothing imports: remove it"
    pattern, words = USED_IN[name]
    places = list(ROOT.glob(pattern))
    assert places, f"{name}: {pattern} is not there"
    assert any(words in path.read_text() for path in places), f"{name}: {pattern} no longer has {words!r}"


@pytest.mark.parametrize("name", sorted(PIP - GPU_ONLY))
def test_every_python_package_is_importable(name):
    """Here, where the same extras are installed: the name is that of a distribution, and its modules are found."""
    if name in GPU_EXTRA and not list(importlib.metadata.distributions(name=name)):
        pytest.skip(f"{name} is of the extra `gpu`, which make env does not install")
    importlib.metadata.distribution(name)
    modules = [m for m, names in DISTRIBUTIONS.items() if name in map(canonical, names)]
    assert any(importlib.util.find_spec(module) for module in modules if module.isidentifier()) or name in USED_IN


def test_nothing_is_excused_that_is_not_listed():
    assert set(USED_IN) <= CONDA | PIP


class TestOfTheTest:
    """The checks fail where they should."""

    ENVIRONMENT = (
        "dependencies:\n  - python=3.12\n  - requests>=2\n  - pip:\n      - torch==2.11.0\n      - -e .[build]\n"
    )

    def test_names_are_read_from_conda_pip_and_extras(self):
        conda, pip = listed(self.ENVIRONMENT)
        assert conda == {"python", "requests"}
        assert pip == {"torch", "numpy", "platformdirs", "cmake", "ninja"}

    def test_an_import_that_is_missing_and_a_name_that_is_unused_are_seen(self):
        conda, pip = listed(self.ENVIRONMENT)
        assert "transformers" not in conda | pip
        assert "transformers" in MODULES
        assert "requests" not in MODULES
        assert "requests" not in USED_IN

    def test_imports_inside_functions_and_notebooks_count(self):
        assert imported(["mla_kernels/explore/panels.py"])["PIL"] == "mla_kernels/explore/panels.py"
        assert "pandas" in imported(["notebooks/07_published_failure.ipynb"])
