# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The notebooks: form (thin, prose first, no stored outputs) and function (all run with the smoke parameters)."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest

from mla_kernels.report.share import bundle_report

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert NAMES[:4] == ["01_build_and_load", "02_error_distribution", "03_layer_outputs", "04_error_at_length"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
class TestForm:
    def test_no_stored_outputs(self, path):
        for cell in code_cells(path):
            assert not cell.outputs
            assert cell.execution_count is None

    def test_valid_and_on_the_plain_kernel(self, path):
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert notebook.metadata.kernelspec.name == "python3"

    def test_prose_first(self, path):
        cells = nbformat.read(path, as_version=4).cells
        assert cells[0].cell_type == "markdown"
        assert cells[0].source.startswith("# ")
        kinds = [cell.cell_type for cell in cells]
        longest = max(len(run) for run in "".join("c" if k == "code" else " " for k in kinds).split())
        assert longest <= 2, "more than two code cells in a row without a word"

    def test_no_functions_or_classes_and_short_cells(self, path):
        for cell in code_cells(path):
            tree = ast.parse(cell.source)
            forbidden = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
            assert not [node for node in ast.walk(tree) if isinstance(node, forbidden)]
            assert len(cell.source.splitlines()) <= 26

    def test_one_parameters_cell_of_literals(self, path):
        tagged = [cell for cell in code_cells(path) if "parameters" in cell.metadata.get("tags", [])]
        assert len(tagged) == 1
        for node in ast.parse(tagged[0].source).body:
            assert isinstance(node, ast.Assign)
            ast.literal_eval(node.value)

    def test_last_cell_asserts_and_writes(self, path):
        assert "page.finish()" in code_cells(path)[-1].source
        assert sum("page.claim(" in cell.source for cell in code_cells(path))


@pytest.fixture(scope="session")
def smoke(tmp_path_factory):
    """A smoke report of all notebooks."""
    reports = tmp_path_factory.mktemp("reports")
    done = subprocess.run(
        [sys.executable, "-m", "mla_kernels.report", "run", "--profile", "smoke", "--name", "smoke",
         "--reports-dir", str(reports)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return reports / "smoke"


def test_smoke_report_is_finished_with_all_claims_met(smoke):
    assert (smoke / "FINISHED").exists()
    results = json.loads((smoke / "results.json").read_text())
    for name in NAMES:
        claims = results["notebooks"][name]["claims"]
        assert claims
        assert all(claim["ok"] for claim in claims)


def test_a_bundle_of_all_notebooks_is_small_enough_to_mail(smoke, tmp_path):
    """Under 10 MB. A full report has more numbers in it than this one, but no more figures, which are most of it."""
    assert bundle_report(smoke, tmp_path).stat().st_size < 10_000_000


def test_smoke_report_verifies(smoke):
    done = subprocess.run(
        [sys.executable, "-m", "mla_kernels.report", "verify", str(smoke)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_plain_papermill_works(tmp_path):
    name = "02_error_distribution"
    output = tmp_path / "out.ipynb"
    parameters = json.loads(
        subprocess.run(
            [sys.executable, "-m", "mla_kernels.report", "schema", name, "--profile", "smoke", "--json"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout
    )  # fmt: skip
    papermill.execute_notebook(
        ROOT / "notebooks" / f"{name}.ipynb",
        output,
        parameters={**parameters, "report_dir": str(tmp_path / "page")},
        cwd=ROOT / "notebooks",
        progress_bar=False,
    )
    assert output.exists()
    assert list((tmp_path / "page").rglob("*.json"))
