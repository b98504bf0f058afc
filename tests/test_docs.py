# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""README and the other documents are executed: links, paths, commands and examples."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
MARKDOWN = [name for name in TRACKED if name.endswith(".md")]


# `make test` leaves words for the makes below it, which would then print "Entering directory".
PLAIN = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


def shell_lines() -> list[str]:
    return [line.strip() for block in code_blocks(README, "sh") for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("name", MARKDOWN)
def test_relative_links_resolve(name):
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (ROOT / name).parent.joinpath(target).exists(), f"{name} links to {target}, which is not there"


def test_paths_named_in_the_readme_exist():
    named = re.findall(r"`((?:[\w.-]+/)+[\w.*-]*)`", README)
    assert named, "README names no path: is the pattern right?"
    for path in named:
        if not path.startswith(("reports/", "build/", "report/")):
            assert list(ROOT.glob(path)), f"README names {path}, which is not there"


def test_make_help_lists_every_target():
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.M).group(1).split()
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, env=PLAIN).stdout
    assert [line.split()[1] for line in shown.splitlines()] == phony


def test_readme_commands_exist():
    lines = shell_lines()
    assert "make report" in lines
    assert "make test" in lines
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            dry = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, env=PLAIN)
            assert dry.returncode == 0, f"README: {line}: {dry.stderr}"
        elif "mla_kernels.report" in words:
            command = words[words.index("mla_kernels.report") + 1]
            shown = subprocess.run(
                [sys.executable, "-m", "mla_kernels.report", command, "--help"],
                cwd=ROOT,
                capture_output=True,
                text=True,
            )
            assert shown.returncode == 0, f"README: {line}: {shown.stderr}"
            for option in [w.split("=")[0] for w in words if w.startswith("-") and w != "-m"]:
                assert re.search(rf"(^|\s|,){re.escape(option)}\b", shown.stdout), f"README: {line}: no option {option}"


@pytest.mark.parametrize("block", code_blocks(README, "python"))
def test_readme_example_runs(block, tmp_path):
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_readme_has_an_example():
    assert code_blocks(README, "python")


@pytest.mark.slow
@pytest.mark.parametrize("memo", sorted((ROOT / "findings").glob("*.md")), ids=lambda path: path.stem)
def test_finding_has_a_reproducer_that_holds(memo):
    reproducer = memo.with_suffix(".py")
    assert "assert " in reproducer.read_text()
    done = subprocess.run([sys.executable, str(reproducer)], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_environment_yml_agrees_with_the_package():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    project = (ROOT / "pyproject.toml").read_text()
    python = next(entry.split("=")[1] for entry in conda if entry.startswith("python="))
    wanted = re.search(r'requires-python = "([^"]+)"', project).group(1)
    assert python in SpecifierSet(wanted)
    pins = {Requirement(entry).name: Requirement(entry) for entry in pip if not entry.startswith("-e")}
    torch_range = re.search(r'"torch([^"]+)"', project).group(1)
    assert next(iter(pins["torch"].specifier)).version in SpecifierSet(torch_range)
    assert {"torch", "vllm", "nvidia-cutlass"} <= set(pins)
    cutlass = re.search(r'"nvidia-cutlass==([^"]+)"', project).group(1)
    assert next(iter(pins["nvidia-cutlass"].specifier)).version == cutlass


def test_constraints_pin_every_direct_dependency():
    pinned = {
        Requirement(line).name.lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = [
        *project["dependencies"],
        *(r for name in extras if name not in ("vllm", "gpu", "nvcc") for r in extras[name]),
    ]
    for entry in used:
        name = Requirement(entry).name.lower().replace("_", "-")
        assert name == "mla-kernels" or name in pinned, f"constraints.txt has no pin for {name}"


def test_lab_comes_up_on_another_port_on_loopback_only(tmp_path):
    """JupyterLab with port 8888 taken, as the user that runs the tests (root included)."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 8888))
            taken.listen()
        except OSError:
            pass  # somebody else holds it: just as good
        log = (tmp_path / "lab.log").open("w+")
        server = subprocess.Popen(
            ["make", "lab", "ARGS=--no-browser"], cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
            env={**PLAIN, "JUPYTER_RUNTIME_DIR": str(tmp_path / "run"), "HOME": str(tmp_path)},
        )  # fmt: skip
        try:
            record = None
            for _ in range(900):  # three minutes: a busy machine starts it slowly
                files = list((tmp_path / "run").glob("jpserver-*.json"))
                if files and files[0].read_text():
                    record = json.loads(files[0].read_text())
                    break
                assert server.poll() is None, (tmp_path / "lab.log").read_text()
                time.sleep(0.2)
            assert record, (tmp_path / "lab.log").read_text()
            assert record["port"] != 8888
            assert record["hostname"] == "127.0.0.1"
            assert record["token"], "the server must keep its token"
            api = f"http://127.0.0.1:{record['port']}/api/kernelspecs"
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(api, timeout=20)
            with urllib.request.urlopen(f"{api}?token={record['token']}", timeout=20) as answer:
                specs = json.load(answer)["kernelspecs"]
            assert "python3" in specs
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=30)
