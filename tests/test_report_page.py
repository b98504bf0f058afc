# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Pages: what the notebook side writes, and what a reader sees of it in a browser, opened from a file path."""

import json
import math
import re
import subprocess
import sys
from urllib.parse import unquote, urlparse

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from browser import MISSING, Browser
from report_checkout import ROOT, Checkout

from mla_kernels import report
from mla_kernels.report.values import number_text

FIGURE = """import pandas as pd, matplotlib.pyplot as plt
fig, ax = plt.subplots(figsize=(8.6, {height}))
ax.plot([1, 2, 3], [3, 1, 2])
data = pd.DataFrame({{"x": [1.5]}})
page.figure(fig, {name!r}, caption="A line & its turn.", alt="A line that falls and rises.", data=data)"""
TABLE = """wide = pd.DataFrame({f"a_long_column_{i}": [0.1 * i, 1.25e-12] for i in range(16)})
page.table(wide, "wide", caption="Many columns.", columns={"a_long_column_0": "error, %"})
pd.DataFrame({"x": [1, 2]})"""
PROSE = r"""## Formulas & links

Real is $x = s \cdot \mathrm{stored}$, and

$$ e = \frac{\sum_i (o_i - \hat{o}_i)^2}{\sum_i o_i^2} $$

| part | bytes |
| --- | ---: |
| `e4m3` | 576 |

See [the other page](02_second.ipynb#fig-heat), [a file of the checkout](../data/README.md) and
[a paper](https://example.org/paper).
`a_very_long_name_that_no_line_of_a_phone_can_hold_because_it_has_no_space_in_it_at_all`"""
PAGES = ("index.html", "01_first.html", "02_second.html")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A finished report of two notebooks."""
    place = Checkout(tmp_path_factory.mktemp("page") / "höm e#1")
    records = "page.record('relative_error', 0.0267)\npage.record('long', 'x' * 300)"
    records += "\npage.record('speed', 1.5e6, unit='tokens/s')"
    place.notebook(
        "01_first", FIGURE.format(name="line", height=4), PROSE, TABLE, records, "print('y' * 400)\nprint('a\\rb')",
        parameters="seed = 0", schema={"seed": {"type": "integer", "description": "Seed of all."}},
    )  # fmt: skip
    place.notebook(
        "02_second", "## Heat", FIGURE.format(name="heat", height=3), FIGURE.format(name="tall", height=24),
        "page.claim('sums of parts & total < 1e-12', True, detail='1e-16')",
    )  # fmt: skip
    code, out, err = place.call("run", "01", "02", "--name", "page")
    assert code == 0, out + err
    return place.folder / "reports" / "page"


@pytest.fixture(scope="session")
def browser():
    with Browser() as started:
        yield started


class TestInTheBrowser:
    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    @pytest.mark.parametrize("width", [1280, 390])
    @pytest.mark.parametrize("name", PAGES)
    def test_page_is_whole(self, folder, browser, name, width, dark):
        """No complaint, no network, every figure visible with its alt text, nothing wider than the window."""
        browser.viewport(width, dark=dark)
        browser.open(folder / name)
        assert browser.errors == []
        others = [url for url in browser.requests if not url.startswith("data:")]
        assert [unquote(urlparse(url).path) for url in others] == [str(folder / name)]
        images = browser.evaluate(
            "[...document.images].map(i => [i.complete, i.naturalWidth, i.naturalHeight, i.alt.trim().length,"
            " i.getBoundingClientRect().width, i.getBoundingClientRect().right])"
        )
        assert len(images) == {"index.html": 3, "01_first.html": 1, "02_second.html": 2}[name]
        for complete, natural_width, natural_height, alt, shown, right in images:
            assert complete
            assert min(natural_width, natural_height) > 0
            assert alt > 0
            assert shown > 100
            assert right <= width
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        # What is wider than the window lies in a box of its own that scrolls.
        outside = browser.evaluate(
            f"[...document.body.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > {width} + 1"
            " && !e.closest('.mla-table, math') && getComputedStyle(e).display != 'none')"
            ".map(e => e.outerHTML.slice(0, 80))"
        )
        assert outside == []

    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    @pytest.mark.parametrize("name", PAGES)
    def test_text_is_readable(self, folder, browser, name, dark):
        """Contrast of at least 4.5 to 1 (WCAG AA) for every piece of text, code included."""
        browser.viewport(1280, dark=dark)
        browser.open(folder / name)
        browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        poor = browser.evaluate(CONTRAST)
        assert poor == []
        background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == dark

    @pytest.mark.parametrize("name", PAGES)
    def test_structure(self, folder, browser, name):
        browser.viewport(1280)
        browser.open(folder / name)
        assert browser.evaluate("document.documentElement.lang") == "en"
        assert browser.evaluate("document.compatMode") == "CSS1Compat"
        assert browser.evaluate("document.querySelectorAll('h1').length") == 1
        assert browser.evaluate("document.querySelectorAll('main, header').length") == 2
        ids = browser.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
        assert len(ids) == len(set(ids))
        assert browser.evaluate("document.title")

    @pytest.mark.parametrize("name", PAGES)
    def test_links_lead_somewhere(self, folder, browser, name):
        browser.open(folder / name)
        links = browser.evaluate("[...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))")
        assert links
        for link in links:
            if link.startswith("https:"):
                assert link == "https://example.org/paper"
                continue
            path, _, fragment = link.partition("#")
            target = folder / (path or name)
            assert target.is_file(), link
            if fragment:
                assert f'id="{fragment}"' in target.read_text(), link

    def test_code_is_folded_and_opens(self, folder, browser):
        browser.viewport(1280)
        browser.open(folder / "01_first.html")
        count = "[...document.querySelectorAll('details.source')].filter(d => d.open).length"
        assert browser.evaluate(count) == 0
        browser.evaluate("document.getElementById('toggle-code').click()")
        assert browser.evaluate(count) >= 5
        assert "page.figure(" in browser.evaluate("document.querySelector('.highlight').closest('main').innerText")
        browser.evaluate("document.getElementById('toggle-code').click()")
        assert browser.evaluate(count) == 0

    def test_formulas_and_tables(self, folder, browser):
        browser.open(folder / "01_first.html")
        assert browser.evaluate("document.querySelectorAll('math').length") == 2
        assert (
            browser.evaluate("document.querySelector('math[display=block] mfrac').getBoundingClientRect().height") > 20
        )
        assert "$" not in browser.evaluate("document.querySelector('main').innerText")
        assert browser.evaluate("[...document.querySelectorAll('table')].every(t => t.closest('.mla-table'))")
        text = browser.evaluate("document.querySelector('main').innerText")
        assert "error, %" in text
        assert "1.25 × 10⁻¹²" in text.replace("\u00a0", " ")
        assert "\na_long_column_15" not in text
        browser.viewport(390)
        browser.open(folder / "01_first.html")
        scrolls = "(b => b.scrollWidth > b.clientWidth && getComputedStyle(b).overflowX == 'auto')"
        assert browser.evaluate(f"[...document.querySelectorAll('.mla-table')].some({scrolls})")

    @pytest.mark.parametrize("width", [1280, 390])
    def test_provenance_is_not_cut_by_a_long_hash(self, folder, browser, tmp_path, width):
        """As in a git checkout, whose commit is a word of 40 characters; the SHA-256 are words of 64."""
        text = (folder / "index.html").read_text()
        assert text.count("not a git checkout") == 1
        (tmp_path / "index.html").write_text(text.replace("not a git checkout", "0123456789" * 4))
        browser.viewport(width)
        browser.open(tmp_path / "index.html")
        browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        boxes = "[...document.querySelectorAll('.provenance .mla-table')]"
        assert browser.evaluate(f"{boxes}.length") == 4
        assert browser.evaluate(f"{boxes}.filter(b => b.scrollWidth > b.clientWidth).map(b => b.ariaLabel)") == []

    @pytest.mark.parametrize("width", [1280, 390])
    def test_all_parameters_are_in_sight(self, folder, browser, tmp_path, width):
        text = (folder / "01_first.html").read_text()
        row = re.search(r"<tr><td><code>seed</code>.*?</tr>", text).group()
        (tmp_path / "page.html").write_text(text.replace(row, row.replace("Seed of all.", "What it is. " * 12) * 20))
        browser.viewport(width)
        browser.open(tmp_path / "page.html")
        box = "document.querySelector('.mla-table[aria-label=Parameters]')"
        assert browser.evaluate(f"{box}.scrollHeight") > 600
        assert browser.evaluate(f"{box}.scrollHeight - {box}.clientHeight") == 0

    def test_print_leaves_out_what_paper_cannot_do(self, folder, browser):
        browser.viewport(800, dark=True, printed=True)
        browser.open(folder / "01_first.html")
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        hidden = "[...document.querySelectorAll('details.source, #toggle-code')].every(e => e.offsetHeight == 0)"
        assert browser.evaluate(hidden)
        assert browser.evaluate("document.images[0].offsetHeight") > 0
        browser.viewport(1280)

    def test_index_says_what_holds(self, folder, browser):
        browser.viewport(1280)
        browser.open(folder / "index.html")
        text = browser.evaluate("document.body.innerText").replace("\u00a0", " ")
        assert "All 3 claims hold in 2 notebooks" in text
        assert "sums of parts & total < 1e-12" in text
        assert re.search(r"relative error\s+0\.0267", text)
        assert re.search(r"speed\s+1\.5 × 10⁶ tokens/s", text)
        assert "A line & its turn." in text
        assert sys.executable in text

    def test_a_click_on_a_thumbnail_leads_to_the_figure(self, folder, browser):
        browser.open(folder / "index.html")
        assert (
            browser.evaluate("document.querySelectorAll('.thumbs a')[2].getAttribute('href')")
            == "02_second.html#fig-tall"
        )
        browser.open(f"{(folder / '02_second.html').as_uri()}#fig-tall")
        assert abs(browser.evaluate("document.getElementById('fig-tall').getBoundingClientRect().top")) < 100


CONTRAST = """(() => {
  const parse = (c) => { const n = c.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const poor = new Set(), walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement, text = walk.currentNode.textContent.trim();
    if (!text || !e.getClientRects().length || e.closest('script, style')) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.add(`${ratio.toFixed(2)} ${e.tagName}.${e.className} ${text.slice(0, 20)}`);
  }
  return [...poor];
})()"""


class TestFiles:
    def test_pages_are_small_and_ask_for_nothing(self, folder):
        for name in PAGES:
            text = (folder / name).read_text()
            assert len(text) < 2_000_000
            assert not re.search(r"""(?:src|href)=["'](?:https?:)?//(?!example\.org)""", text)
            assert "@import" not in text
            assert "url(" not in text

    def test_figures_are_sharp_and_their_numbers_lie_beside_them(self, folder):
        data = (folder / "figures" / "01_first" / "line.png").read_bytes()
        assert int.from_bytes(data[16:20]) == int(2 * 8.6 * 96)
        assert (folder / "figures" / "01_first" / "line.csv").read_text() == "x\n1.5\n"
        assert (folder / "tables" / "01_first" / "wide.csv").read_text().startswith("a_long_column_0,a_long_column_1,")

    def test_progress_lines_keep_their_last_state(self, folder):
        cell = next(c for c in nbformat.read(folder / "01_first.ipynb", as_version=4).cells if "'y' * 400" in c.source)
        assert cell.outputs[0].text == "y" * 400 + "\nb\n"

    def test_without_chromium_the_tests_fail_and_say_how_to_install_it(self, tmp_path):
        script = "import browser; browser.find_chromium()"
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT / "tests",
            env={"PATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert f"AssertionError: {MISSING}" in done.stderr
        assert "apt-get install chromium" in MISSING


@pytest.fixture
def page(tmp_path):
    return report.open_page("01_unit", tmp_path / "out", {"seed": np.int64(1), "lens": (1, 2)})


def results(page):
    return json.loads((page.folder / "results" / "01_unit.json").read_text())


class TestPage:
    def test_records_become_plain_json(self, page):
        page.record(
            "all",
            {
                "numpy": np.float32(0.5), "int": np.int8(3), "bool": np.bool_(True),
                "torch": torch.tensor(2, dtype=torch.bfloat16),
                "nan": math.nan, "inf": torch.tensor(math.inf), "-inf": -np.inf, "array": np.array([[1, 2]]), 7: None,
                "dtype": torch.float8_e4m3fn, "tuple": (1, "x"),
            },
        )  # fmt: skip
        page.record("seconds", 1.5, unit="s", volatile=True)
        page.claim("fine", True)
        page.finish()
        written = results(page)
        assert written["records"]["all"] == {
            "numpy": 0.5, "int": 3, "bool": True, "torch": 2.0, "nan": "nan", "inf": "inf", "-inf": "-inf",
            "array": [[1, 2]], "7": None, "dtype": "float8_e4m3fn", "tuple": [1, "x"],
        }  # fmt: skip
        assert written["parameters"] == {"seed": 1, "lens": [1, 2]}
        assert written["timings"]["seconds"] > 0
        assert written["environment"]["torch"]["version"] == torch.__version__

    def test_finish_names_every_failed_claim_and_still_writes(self, page, capsys):
        page.claim("one", True)
        page.claim("two", np.bool_(False), detail="0.5 > 0.1")
        page.claim("three", torch.tensor(False))
        with pytest.raises(AssertionError) as failed:
            page.finish()
        assert str(failed.value) == "2 of 3 claims of 01_unit do not hold:\n  - two (0.5 > 0.1)\n  - three"
        assert [claim["ok"] for claim in results(page)["claims"]] == [True, False, False]
        assert "FAIL two" in capsys.readouterr().out

    def test_a_page_without_claims_cannot_finish(self, page):
        with pytest.raises(ValueError, match=r"this page claims nothing: add page\.claim"):
            page.finish()
        assert not (page.folder / "results").exists()

    @pytest.mark.parametrize(
        ("call", "error", "words"),
        [
            (lambda p: p.claim("x", 0.3), TypeError, "claim 'x': expected True or False, got float 0.3: write"),
            (lambda p: p.claim("x", math.nan), TypeError, "expected True or False, got float nan"),
            (lambda p: p.claim("x", np.array([True])), TypeError, "expected True or False, got ndarray"),
            (lambda p: p.claim(" ", True), ValueError, "expected the claim as a sentence"),
            (lambda p: [p.claim("x", True), p.claim("x", True)], ValueError, "'x' is claimed twice"),
            (lambda p: p.record("a b", 1), ValueError, "name: expected letters, digits"),
            (lambda p: [p.record("a", 1), p.record("a", 1)], ValueError, "record 'a' is there already"),
            (lambda p: [p.record("a", 1), p.record("a", 1, volatile=True)], ValueError, "record 'a' is there already"),
            (lambda p: p.record("a", {"b": [object()]}), TypeError, r"a\['b'\]\[0\]: expected a number, a string"),
            (lambda p: p.record("a", np.zeros(20_000)), TypeError, "an array of 20000 elements is too much"),
            (lambda p: p.table([{"x": 1}], "t", caption="c", columns={"y": "Y"}), ValueError, "'t' has no column 'y'"),
            (lambda p: p.figure(plt.figure(), "f", caption="c", alt="", data=[]), ValueError, "alt: expected a sent"),
            (lambda p: p.figure(plt.figure(), "f", caption="c", alt="a", data=3), TypeError, "data: expected a Data"),
            (lambda p: report.open_page("a/b", "x"), ValueError, "notebook: expected letters, digits"),
        ],
    )  # fmt: skip
    def test_wrong_use_is_refused(self, page, call, error, words):
        with pytest.raises(error, match=words):
            call(page)
        plt.close("all")

    def test_figure_is_closed_so_that_the_inline_backend_does_not_show_it_again(self, page):
        fig, _ = plt.subplots()
        page.figure(fig, "f", caption="c", alt="a", data={"x": [1, 2]})
        assert fig.number not in plt.get_fignums()

    def test_named_index_goes_into_the_numbers(self, page):
        page.table(pd.DataFrame({"x": [1.0]}, index=pd.Index([3], name="layer")), "t", caption="c")
        assert (page.folder / "tables/01_unit/t.csv").read_text() == "layer,x\n3,1.0\n"

    def test_interactive_pages_go_to_the_checkout_and_cells_can_be_run_again(self, tmp_path, monkeypatch):
        place = Checkout(tmp_path / "checkout")
        monkeypatch.chdir(place.notebooks)
        page = report.open_page("01_unit")
        assert page.folder == place.folder / "reports" / "interactive" / "01_unit"
        for holds in (False, True):
            page.claim("x", holds)
            page.record("a", int(holds))
        page.finish()
        assert results(page)["claims"] == [{"claim": "x", "ok": True, "detail": ""}]
        assert results(page)["records"] == {"a": 1}

    @pytest.mark.parametrize("interactive", [False, True])
    @pytest.mark.parametrize(
        ("what", "call"),
        [
            ("claim 'late'", lambda p: p.claim("late", False)),
            ("record 'late'", lambda p: p.record("late", 1)),
            ("record 'late'", lambda p: p.record("late", 1, volatile=True)),
            ("table 'late'", lambda p: p.table([{"x": 1}], "late", caption="c")),
            ("figure 'late'", lambda p: p.figure(plt.figure(), "late", caption="c", alt="a", data=[1])),
        ],
    )
    def test_nothing_can_be_added_after_finish(self, tmp_path, monkeypatch, interactive, what, call):
        """It would be in no results file, and the report would count as finished."""
        place = Checkout(tmp_path / "checkout")
        monkeypatch.chdir(place.notebooks)
        page = report.open_page("01_unit", "" if interactive else tmp_path / "out")
        page.claim("early", True)
        page.finish()
        with pytest.raises(RuntimeError, match=rf"{what}: expected before page\.finish\(\), .*open_page"):
            call(page)
        plt.close("all")
        page.finish()  # the last cell run again says the same again
        assert [claim["claim"] for claim in results(page)["claims"]] == ["early"]
        assert not list(page.folder.glob("*/*/late*"))

    def test_a_page_opened_again_starts_anew_and_has_to_finish_itself(self, page):
        page.claim("early", True)
        page.finish()
        again = report.open_page("01_unit", page.folder)
        assert not (page.folder / "results" / "01_unit.json").exists()
        again.claim("late", True)
        again.finish()
        assert [claim["claim"] for claim in results(again)["claims"]] == ["late"]

    def test_key_numbers_are_the_first_scalars_or_those_asked_for(self, page):
        page.record("a", 1)
        page.record("list", [1])
        page.record("b", "text")
        page.record("seconds", 2.0, volatile=True)
        assert page._key_numbers() == ["a", "b"]
        page.record("c", 3, key=True)
        assert page._key_numbers() == ["c"]

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (1152, "1152"), (1_000_000, "1\u202f000\u202f000"), (-3, "−3"), (0.026789, "0.02679"), (0.5, "0.5"),
            (0.0, "0"), (1.25e-16, "1.25\u00a0×\u00a010⁻¹⁶"), (-2e-5, "−2\u00a0×\u00a010⁻⁵"),
            (1.5e6, "1.5\u00a0×\u00a010⁶"), (1e-3, "0.001"), (math.inf, "∞"), (True, "yes"), (None, "none"),
            ("sm90a", "sm90a"),
        ],
    )  # fmt: skip
    def test_numbers_as_text(self, value, text):
        assert number_text(value) == text
