# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Sending reports on and comparing them: bundles, what verify says on the other side, diff; axe-core on every page."""

import csv
import http.server
import importlib.util
import io
import json
import math
import shutil
import stat
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from browser import Browser
from click.testing import CliRunner
from report_checkout import Checkout

from mla_kernels.report import diff, engine, share
from mla_kernels.report.cli import main
from mla_kernels.report.diff import Move, compare_reports
from mla_kernels.report.diff_page import percent
from mla_kernels.report.errors import ReportError
from mla_kernels.report.files import file_hash
from mla_kernels.report.share import bundle_report, opened
from mla_kernels.report.sweep import load_sweep, run_sweep
from mla_kernels.report.verify import edited_files, why

VALUES = """import random
page.record("error", 0.5 + shift * 0.1)
page.record("counts", [1, 2, 3 + shift])
page.record("kernel", f"v{shift}")
page.record("zero", 0.0 if shift == 0 else 1e-9)
if shift:
    page.record("new", 1)"""
TIMES = """page.record("us_median", 100 * (1 + 0.3 * shift) + random.random(), unit="µs", volatile=True, key=True)
page.record("us_noisy", 50 + 20 * random.random(), unit="µs", volatile=True)
page.claim("the shift is none", shift in (0, 1) or shift < 0, detail=str(shift))"""
FIGURE = """import matplotlib.pyplot as plt
fig, ax = plt.subplots(figsize=(8.6, 4))
ax.plot([1, 2, 3], [3, 1 + shift, 2])
page.figure(fig, "line", caption="A line.", alt="A line that falls and rises.", data={"y": [3, 1 + shift, 2]})
page.table([{"a": 1.5, "b": "text"}], "rows", caption="Rows.")"""
PROSE = r"## Formula" + "\n\n" + r"$x^2$ and `code`, see [a paper](https://example.org/paper)."


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    place = Checkout(tmp_path_factory.mktemp("share"))
    integer = {"type": "integer", "minimum": 0, "description": "A shift."}
    place.notebook("01_moves", VALUES, TIMES, PROSE, FIGURE, parameters="shift = 0", schema={"shift": integer})
    (place.folder / "grid.yaml").write_text("notebook: 01\ngrid: {shift: [0, 2]}\ncompare: [error, counts, nothing]\n")
    for name, shift in (("a", 0), ("b", 1)):
        code, out, err = place.call("run", "01", "--name", name, "--repeat", "3", "-p", f"shift={shift}")
        assert code == 0, out + err
    return place


@pytest.fixture(scope="module")
def reports(checkout):
    return checkout.folder / "reports"


@pytest.fixture
def here(checkout, monkeypatch):
    """In the checkout, as a user is."""
    monkeypatch.chdir(checkout.folder)
    return checkout.folder


class TestBundle:
    def test_one_file_the_same_bytes_each_time_and_the_report_is_untouched(self, reports, here):
        done = CliRunner().invoke(main, ["bundle", "a"])
        assert done.exit_code == 0, done.output
        bundle = reports / "a.zip"
        assert done.output.startswith(f"{bundle}: 0.")
        first = bundle.read_bytes()
        assert bundle_report(reports / "a", here) == here / "a.zip"
        assert (here / "a.zip").read_bytes() == first
        assert edited_files(reports / "a") == []
        with opened(bundle) as folder:
            assert folder.name == "a"
            assert edited_files(folder) == []
            assert not folder.is_relative_to(reports)

    def test_verify_takes_the_bundle_and_says_what_is_the_same(self, checkout, reports):
        bundle_report(reports / "a", reports / "sent.zip")
        code, out, err = checkout.call("verify", "sent.zip")
        assert code == 0, out + err
        assert "The same as in the report: commit (none), data (0 files), notebooks (1), kernels, packages (" in out
        assert "verified: " in out
        assert not list(Path("/tmp").glob("mla-bundle-*"))

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda folder: (folder / "FINISHED").unlink(), "is not finished (its run was killed"),
            (lambda folder: (folder / "index.html").write_text("x"), "index.html was changed"),
        ],
    )
    def test_only_finished_reports_are_sent(self, reports, tmp_path, change, words):
        shutil.copytree(reports / "a", tmp_path / "a")
        change(tmp_path / "a")
        with pytest.raises(ReportError) as refused:
            bundle_report(tmp_path / "a")
        assert words in str(refused.value)
        assert not (tmp_path / "a.zip").exists()

    def test_other_files_are_not_overwritten(self, reports, tmp_path):
        (tmp_path / "mine.zip").write_text("precious")
        with pytest.raises(ReportError, match="is there and is no bundle of a report: choose another name"):
            bundle_report(reports / "a", tmp_path / "mine.zip")
        with pytest.raises(ReportError, match="lies in the report, which would then be another"):
            bundle_report(reports / "a", reports / "a" / "a.zip")

    @pytest.mark.parametrize(
        ("entries", "words"),
        [
            ({"a/FINISHED": 0, "../evil": 0}, "it holds '../evil'"),
            ({"a/FINISHED": 0, "/etc/evil": 0}, "it holds '/etc/evil'"),
            ({"a/FINISHED": 0, "a/link": stat.S_IFLNK}, "it holds 'a/link'"),
            ({"a/FINISHED": 0, "b/x": 0}, "expected a bundle, with one folder that holds FINISHED, got a, b"),
            ({"x.txt": 0}, "expected a bundle, with one folder that holds FINISHED, got x.txt"),
            ({}, "expected a bundle, with one folder that holds FINISHED, got nothing"),
        ],
    )
    def test_archives_that_are_no_bundle_are_refused(self, tmp_path, entries, words):
        path = tmp_path / "sent.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for name, mode in entries.items():
                entry = zipfile.ZipInfo(name)
                entry.external_attr = (mode or stat.S_IFREG) << 16
                archive.writestr(entry, "x")
        with pytest.raises(ReportError) as refused, opened(path):
            pass
        assert words in str(refused.value)

    def test_too_much_and_damaged_files_are_refused(self, reports, tmp_path, monkeypatch):
        bundle = bundle_report(reports / "a", tmp_path / "a.zip")
        monkeypatch.setattr(share, "LIMIT", 1000)
        with pytest.raises(ReportError, match="not made by `bundle`"), opened(bundle):
            pass
        monkeypatch.undo()
        for data in (b"no zip", bundle.read_bytes()[:-100]):
            bundle.write_bytes(data)
            with pytest.raises(ReportError, match="expected a report's folder or a bundle of one"), opened(bundle):
                pass


class TestWhy:
    def test_the_causes_are_named_with_the_likeliest_first(self):
        environment = [
            ("commit", "0" * 40, "1" * 40), ("package torch", "2.11", "2.13"), ("package numpy", "1", "2"),
            ("GPUs", "NVIDIA H200", "none"), ("data data/x.json", "a" * 64, "b" * 64),
        ]  # fmt: skip
        assert why(environment, ()) == (
            "other GPU (NVIDIA H200 → none); other data (data/x.json: aaaaaaaaaa → bbbbbbbbbb); other commit "
            "(0000000000 → 1111111111); other versions (package torch: 2.11 → 2.13 and 1 more)"
        )
        assert why((), ("commit", "data")) == (
            "nothing that is recorded: commit, data are the same, so the notebook does not repeat itself here"
        )

    def test_verify_on_another_machine_says_what_differs_and_why(self, checkout, reports):
        forged = reports / "forged"
        shutil.copytree(reports / "a", forged)
        manifest = json.loads((forged / "manifest.json").read_text())
        manifest["machine"]["gpus"] = [{"name": "NVIDIA H200", "driver": "1"}]
        manifest["repository"]["commit"] = "5" * 40
        (forged / "manifest.json").write_text(json.dumps(manifest))
        results = json.loads((forged / "results.json").read_text())
        results["notebooks"]["01_moves"]["records"]["error"] = 0.25
        (forged / "results.json").write_text(json.dumps(results))
        marker = json.loads((forged / "FINISHED").read_text())
        marker["sha256"] |= {name: file_hash(forged / name) for name in ("manifest.json", "results.json")}
        (forged / "FINISHED").write_text(json.dumps(marker))
        code, out, err = checkout.call("verify", "forged")
        assert code == 1
        assert err == "not verified: the numbers differ\n"
        assert "01_moves.records.error  0.25      0.5  1.0e+00" in out
        told = out.split("Why, as far as the manifests tell: ")[1]
        assert told.startswith("other GPU (")
        assert "H200" in told
        assert "other commit (5555555555 → none)" in told
        assert "data (0 files)" in out.split("The same as in the report: ")[1].splitlines()[0]


class TestDiff:
    def test_what_moved_is_told_and_noise_is_not(self, reports, here):
        done = CliRunner().invoke(main, ["diff", "a", "b"])
        assert done.exit_code == 0, done.output
        assert "  01_moves: error  0.5 → 0.6  +20 %\n" in done.output
        assert "  01_moves: us_median  " in done.output
        assert "us_noisy" not in done.output
        page = reports / "diff-a-b" / "index.html"
        assert done.output.endswith(f"4 of 8 values moved: {page}\n")
        rows = {row["value"]: row for row in csv.DictReader(io.StringIO((page.parent / "values.csv").read_text()))}
        moved = {name for name, row in rows.items() if row["verdict"] == "moved"}
        assert moved == {"error", "counts[2]", "zero", "us_median"}
        assert rows["us_noisy"]["verdict"] == "within the noise"
        assert float(rows["us_noisy"]["noise"]) > 0
        text = page.read_text()
        assert "What differs between them and may be why: other parameters (01_moves.shift)." in text
        assert "<td>v0</td><td>v1</td>" in text
        assert "<td>B</td><td>01_moves: new</td>" in text
        assert (page.parent / "figures" / "b-01_moves-line.csv").read_text() == "y\n3\n2\n2\n"

    def test_the_same_report_twice_moves_nothing(self, reports, here, tmp_path):
        bundle = bundle_report(reports / "a", tmp_path / "a.zip")
        done = CliRunner().invoke(main, ["diff", "a", str(bundle), "-o", str(tmp_path / "same")])
        assert done.exit_code == 0, done.output
        assert done.output == f"0 of 8 values moved: {tmp_path / 'same' / 'index.html'}\n"
        assert "Nothing moved beyond the noise." in (tmp_path / "same" / "index.html").read_text()
        assert not (tmp_path / "same" / "figures").exists()

    def test_other_folders_are_not_replaced(self, reports, here, tmp_path):
        (tmp_path / "mine").mkdir()
        done = CliRunner().invoke(main, ["diff", "a", "b", "-o", str(tmp_path / "mine")])
        assert done.exit_code == 2
        assert "--output: " in done.output
        assert "is there and is not a comparison: choose another name" in done.output

    def test_without_repeated_runs_times_are_not_judged(self, reports, tmp_path):
        copy = tmp_path / "once"
        shutil.copytree(reports / "b", copy)
        shutil.rmtree(copy / "repeats")
        marker = json.loads((copy / "FINISHED").read_text())
        marker["sha256"] = {name: value for name, value in marker["sha256"].items() if "repeats" not in name}
        (copy / "FINISHED").write_text(json.dumps(marker))
        found = compare_reports(reports / "a", copy)
        assert {value.path for value in found.unjudged} == {"us_median", "us_noisy", "seconds"}
        assert {value.path for value in found.moved} == {"error", "counts[2]", "zero"}

    def test_reports_without_a_common_notebook_are_refused(self, reports, tmp_path, monkeypatch):
        real = diff._load

        def other(report):
            loaded = real(report)
            if report.name == "b":
                loaded.results["notebooks"]["02_other"] = loaded.results["notebooks"].pop("01_moves")
            return loaded

        monkeypatch.setattr(diff, "_load", other)
        with pytest.raises(ReportError, match="have no notebook in common: 01_moves against 02_other"):
            compare_reports(reports / "a", reports / "b")

    @pytest.mark.parametrize(
        ("a", "b", "noise", "moved"),
        [
            (1.0, 1.5, 0.6, False), (1.0, 1.5, 0.4, True), (1.0, 1.5, math.nan, False), (0.0, 1e-30, 0.0, True),
            (1.0, math.inf, math.nan, True), (math.nan, math.nan, math.nan, False), (2.0, 2.0, 0.0, False),
        ],
    )  # fmt: skip
    def test_beyond_the_noise(self, a, b, noise, moved):
        assert Move("n", "p", a, b, noise, 3).moved is moved

    @pytest.mark.parametrize(("runs", "most"), [(3, 0.008), (4, 0.001)])
    def test_false_alarms_of_the_rule_are_as_rare_as_it_says(self, runs, most):
        """Times of one distribution, 20 000 pairs of reports: 0.6 % with three runs each, 0.04 % with four."""
        draw = np.random.default_rng(1).standard_normal((20_000, 2, runs)) + 100
        judged = [diff._move("n", "p", (list(x), list(y)), exact=False, unit="").moved for x, y in draw]
        assert 0 < np.mean(judged) < most

    @pytest.mark.parametrize(
        ("change", "text"), [(0.2, "+20 %"), (-0.013, "−1.3 %"), (3.4, "× 4.4"), (math.inf, "–"), (0.0, "0 %")]
    )
    def test_changes_as_text(self, change, text):
        assert percent(change) == text


@pytest.fixture(scope="module")
def pages(checkout, reports):
    """Every kind of page: index, notebook, a sweep of which one cell failed, that cell, and a comparison."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "has_ray", lambda: False)
        patch.chdir(checkout.folder)
        done = run_sweep(load_sweep(checkout.folder / "grid.yaml"), "grid", workers=1)
        assert [ending.finished for ending in done.endings.values()] == [True, False]
        assert CliRunner().invoke(main, ["diff", "a", "b", "-o", "reports/compared"]).exit_code == 0
    failed = next((done.folder / "cells").glob("shift-2-*"))
    return {
        "index": reports / "a" / "index.html", "notebook": reports / "a" / "01_moves.html",
        "sweep": done.folder / "index.html", "failed cell": failed / "01_moves.html",
        "failed index": failed / "index.html", "diff": reports / "compared" / "index.html",
    }  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    with Browser() as started:
        yield started


PAGES = ("index", "notebook", "sweep", "failed cell", "failed index", "diff")
AXE = Path(importlib.util.find_spec("axe_playwright_python").origin).with_name("axe.min.js").read_text()
RUN_AXE = """axe.run(document, {resultTypes: ["violations"]}).then((found) => found.violations.map(
  (v) => [v.impact, v.id, v.nodes.map((n) => n.html.slice(0, 120)).slice(0, 4)]))"""


class TestAccessible:
    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    @pytest.mark.parametrize("name", PAGES)
    def test_axe_finds_nothing(self, pages, browser, name, dark):
        """Not only nothing serious: no violation of any rule of axe-core, with everything unfolded."""
        browser.viewport(1280, dark=dark)
        browser.open(pages[name])
        browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        browser.evaluate(AXE + "; 0")
        assert browser.evaluate(RUN_AXE) == []

    def test_axe_finds_what_is_wrong(self, pages, browser, tmp_path):
        """Or the test above would pass on any page."""
        text = pages["index"].read_text()
        text = text.replace('alt="', 'data-alt="').replace('lang="en"', "").replace("#5b6169", "#c8c8c8")
        (tmp_path / "bad.html").write_text(text)
        browser.viewport(1280)
        browser.open(tmp_path / "bad.html")
        browser.evaluate(AXE + "; 0")
        found = {rule: impact for impact, rule, _ in browser.evaluate(RUN_AXE)}
        assert {
            "image-alt": "critical",
            "html-has-lang": "serious",
            "color-contrast": "serious",
        }.items() <= found.items()

    @pytest.mark.parametrize("name", PAGES)
    def test_pages_ask_for_nothing_outside_fit_a_phone_and_link_to_their_numbers(self, pages, browser, name):
        browser.viewport(390)
        browser.open(pages[name])
        assert browser.errors == []
        root = pages[name].parent.as_uri()
        assert [url for url in browser.requests if not url.startswith(("data:", root))] == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        figures = browser.evaluate(
            "[...document.querySelectorAll('figure')].map(f => [f.querySelector('img').alt.length > 20,"
            " f.querySelector('a[href$=\".csv\"]').getAttribute('href')])"
        )
        assert all(described and (pages[name].parent / link).is_file() for described, link in figures)
        assert figures or "index" in name

    @pytest.mark.parametrize("name", PAGES)
    def test_print_is_black_on_white_and_cuts_nothing(self, pages, browser, name):
        browser.viewport(700, dark=True, printed=True)
        browser.open(pages[name])
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        boxes = "[...document.querySelectorAll('.mla-table')]"
        assert browser.evaluate(f"{boxes}.filter(b => getComputedStyle(b).overflow != 'visible').length") == 0
        assert browser.evaluate("[...document.images].every(i => i.offsetHeight > 0)")

    def test_a_sweep_says_what_no_cell_recorded(self, pages):
        assert "No cell recorded nothing." in pages["sweep"].read_text()

    def test_a_report_opens_from_a_web_server_in_a_folder_of_any_name(self, reports, browser):
        class Quiet(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *arguments, **options):
                super().__init__(*arguments, directory=str(reports), **options)

            def log_message(self, *_):
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            host = f"http://127.0.0.1:{server.server_port}"
            browser.viewport(1280)
            browser.open(f"{host}/a/index.html")
            assert browser.errors == []
            browser.evaluate("document.querySelector('main h2 a').click()")
            browser.open(f"{host}/a/01_moves.html")
            assert browser.errors == []
            assert browser.evaluate("document.images.length && [...document.images].every(i => i.naturalWidth > 0)")
            server.shutdown()
