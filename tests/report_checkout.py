# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""A small checkout with notebooks of its own, for the tests of the report runner."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parents[1]
OPEN = "from mla_kernels import report\npage = report.open_page({name!r}, report_dir)"
FINISH = "page.claim('it ran to its end', True)\npage.finish()"


def _listen_to_interrupts():
    """A shell starts background jobs deaf to Ctrl-C, and what they start inherits it: not what is tested here."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Checkout:
    """A folder with `pyproject.toml`, `notebooks/` and `notebooks/params/`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.notebooks = folder / "notebooks"
        (self.notebooks / "params").mkdir(parents=True)
        (folder / "pyproject.toml").touch()

    def notebook(self, name, *sources, parameters="", schema=None, kernelspec="python3", finish=True):
        """A notebook: title, parameters cell, page, then a cell for each source ("# ..." makes prose), and the end."""
        tag = {"tags": ["parameters"]}
        cells = [
            new_markdown_cell(f"# The page {name}\n\nWhat it is about."),
            new_code_cell(f'{parameters}\nreport_dir = ""'.strip(), metadata=tag),
            new_code_cell(OPEN.format(name=name)),
            *(new_markdown_cell(text) if text.startswith("#") else new_code_cell(text) for text in sources),
        ]
        if finish:
            cells.append(new_code_cell(FINISH))
        spec = {"name": kernelspec, "display_name": kernelspec, "language": "python"}
        nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": spec}), self.notebooks / f"{name}.ipynb")
        properties = {**(schema or {}), "report_dir": {"type": "string"}}
        path = self.notebooks / "params" / f"{name}.schema.json"
        path.write_text(json.dumps({"type": "object", "properties": properties}))
        return name

    def profile(self, name, text):
        (self.notebooks / "params" / f"{name}.yaml").write_text(text)

    def start(self, *arguments, variables=None, script="", **options):
        """Start the command line, or a script, in this checkout, with more variables in its environment."""
        command = [sys.executable, *(["-c", script] if script else ["-m", "mla_kernels.report"]), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **(variables or {})}
        return subprocess.Popen(
            command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment, preexec_fn=_listen_to_interrupts, **options,
        )  # fmt: skip

    def call(self, *arguments, **options):
        """Run the command line; (exit code, stdout, stderr)."""
        return ended(self.start(*arguments, **options))

    def executed(self, report, name):
        return nbformat.read(self.folder / "reports" / report / f"{name}.ipynb", as_version=4)

    def results(self, report):
        return json.loads((self.folder / "reports" / report / "results.json").read_text())

    def timings(self, report):
        return json.loads((self.folder / "reports" / report / "timings.json").read_text())

    def manifest(self, report):
        return json.loads((self.folder / "reports" / report / "manifest.json").read_text())


def ended(process, timeout=240):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def wait_for(condition, what, timeout=120):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not after {timeout} s"
        time.sleep(0.1)


def alive(pid):
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def interrupt(process):
    process.send_signal(signal.SIGINT)
