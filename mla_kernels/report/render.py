# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Notebooks and results as self-contained pages: no network, no scripts but a few lines, light and dark, print."""

from __future__ import annotations

import base64
import functools
import io
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import nbformat
from bs4 import BeautifulSoup
from jinja2 import Environment, FileSystemLoader
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from mla_kernels.report.execute import Outcome
from mla_kernels.report.files import write_text
from mla_kernels.report.provenance import MAIN_PACKAGES
from mla_kernels.report.values import number_text

__all__ = [
    "TEMPLATES",
    "duration_text",
    "machine_text",
    "page_style",
    "provenance_rows",
    "read_results",
    "render_index",
    "render_notebook",
]

TEMPLATES = Path(__file__).parent / "templates"
THUMBNAIL = (640, 460)


def duration_text(seconds: float) -> str:
    """12.3 -> "12 s", 83 -> "1 min 23 s", 7500 -> "2 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


@functools.cache
def page_style() -> str:
    """The style sheet of every page."""
    from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]

    def rules(style: str) -> str:
        text: str = HtmlFormatter(style=style).get_style_defs(".highlight")
        kept = [line for line in text.splitlines() if line.startswith(".highlight .") and "background" not in line]
        return "\n".join(kept)

    sheet = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    ansi = "".join(
        f".ansi-{name}-fg, .ansi-{name}-intense-fg {{ color: var(--{colour}); }}\n"
        for name, colour in (
            ("red", "bad"),
            ("green", "ok"),
            ("blue", "accent"),
            ("cyan", "accent"),
            ("yellow", "muted"),
        )
    )
    dark = f"@media screen and (prefers-color-scheme: dark) {{\n{rules('github-dark')}\n}}"
    return f"{sheet}\n{ansi}.ansi-bold {{ font-weight: 600; }}\n{rules('xcode')}\n{dark}"


class _Renderer(IPythonRenderer):
    """Formulas as MathML; the title is left to the page's header, ids to `_contents`."""

    def heading(self, text: str, level: int, **attributes: Any) -> str:
        if level == 1:
            return ""
        return f"<h{level}>{text}</h{level}>\n"

    def block_math(self, body: str) -> str:
        return _mathml(body, "block")

    def inline_math(self, body: str) -> str:
        return _mathml(body, "inline")

    def latex_environment(self, name: str, body: str) -> str:
        return _mathml(rf"\begin{{{name}}}{body}\end{{{name}}}", "block")


def _mathml(tex: str, display: str) -> str:
    from latex2mathml.converter import convert

    try:
        return str(convert(tex.strip(), display=display))
    except Exception:  # a formula that the converter does not know is still readable as it was typed
        return f"<code>{escape(tex)}</code>"


def _slug(text: str) -> str:
    return re.sub(r"\W+", "-", text.lower()).strip("-") or "section"


def _markdown(source: str) -> str:
    return str(MarkdownWithMath(renderer=_Renderer(escape=False)).render(source))


class _Exporter(HTMLExporter):
    def markdown2html(self, source: str) -> str:
        return _markdown(source)


def render_notebook(
    folder: Path,
    name: str,
    *,
    outcome: Outcome,
    pages: Sequence[Mapping[str, Any]],
    machine: str,
    commit: str,
    parameters: Mapping[str, Any],
    descriptions: Mapping[str, str],
) -> None:
    """Write `<name>.html` from the executed `<name>.ipynb` in the report folder.

    Args:
        pages: `name` and `title` of every notebook of the report, in order, for the links between them.
        parameters: the values of this run.
        descriptions: parameter name -> what it is.
    """
    notebook = nbformat.read(folder / f"{name}.ipynb", as_version=4)
    here = [page["name"] for page in pages].index(name)
    results = read_results(folder, name)
    if any("injected-parameters" in _tags(cell) for cell in notebook.cells):
        notebook.cells = [cell for cell in notebook.cells if "parameters" not in _tags(cell)]  # the defaults
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata["summary"] = f"Code, {_lines(cell.source)}"
            cell.metadata["failed"] = bool(outcome.reason) and bool(cell.metadata.get("papermill", {}).get("exception"))
            for output in cell.outputs:
                if output.output_type == "stream":
                    # Control characters (a NUL from a compiler) are not HTML.
                    output.text = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]", "\ufffd", output.text)
                    output["summary"] = f"Messages, {_lines(output.text)}"
    log = f"logs/{name}.txt"
    page = {
        "name": name,
        "title": pages[here]["title"],
        "report": pages[here]["report"],
        "style": page_style(),
        "previous": pages[here - 1] if here else None,
        "next": pages[here + 1] if here + 1 < len(pages) else None,
        "reason": outcome.reason.splitlines()[0].rstrip(".:") if outcome.reason else "",
        "cell": str(outcome.cell) if outcome.cell else "",
        "claims": len(results.get("claims", [])),
        "seconds": duration_text(outcome.seconds),
        "machine": machine,
        "commit": commit,
        "log": log if (folder / log).exists() else "",
        "parameters": [
            {"name": key, "value": _value_text(value), "description": descriptions.get(key, "")}
            for key, value in parameters.items()
        ],
    }
    exporter = _Exporter(
        template_name="notebook",
        extra_template_basedirs=[str(TEMPLATES)],
        exclude_anchor_links=True,
        template_file="index.html.j2",
    )
    html, _ = exporter.from_notebook_node(notebook, resources={"page": page})
    write_text(folder / f"{name}.html", _finish_html(html, folder))


def _tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", []))


def read_results(folder: Path, name: str) -> dict[str, Any]:
    """What `page.finish()` wrote, {} if it was not reached."""
    path = folder / "results" / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _lines(text: str) -> str:
    count = len(text.strip().splitlines())
    return f"{count} line{'' if count == 1 else 's'}"


def _finish_html(html: str, folder: Path) -> str:
    """Ids are unique; tables scroll in their own box; links lead somewhere inside of the report, or are no links."""
    soup = BeautifulSoup(html, "html.parser")
    _contents(soup)
    for table in soup.find_all("table"):
        if not any("mla-table" in (parent.get("class") or []) for parent in table.parents):
            box = {"class": "mla-table", "tabindex": "0", "role": "region", "aria-label": "Table"}
            table.wrap(soup.new_tag("div", attrs=box))
    for link in soup.select("main a[href]"):
        target = str(link["href"])
        if re.match(r"[a-z][a-z0-9+.-]*:|#", target):
            continue
        path, mark, fragment = target.partition("#")
        if path.endswith(".ipynb"):
            path = f"{Path(path).stem}.html"
        if path.endswith(".html") or (folder / path).exists():
            link["href"] = path + mark + fragment
        else:
            link.unwrap()
    return str(soup)


def _contents(soup: BeautifulSoup) -> None:
    """Give headings their own ids and list those of the second level at the top, if there are several."""
    taken = {str(element["id"]) for element in soup.find_all(id=True) if element.name not in ("h2", "h3", "h4")}
    for heading in soup.select("main h2, main h3, main h4"):
        wanted = base = _slug(heading.get_text())
        number = 1
        while wanted in taken:
            number += 1
            wanted = f"{base}-{number}"
        taken.add(wanted)
        heading["id"] = wanted
    slot = soup.find(id="toc")
    headings = soup.select("main h2")
    if slot is None or len(headings) < 3:
        if slot is not None:
            slot.decompose()
        return
    items = "".join(f'<li><a href="#{heading["id"]}">{heading.decode_contents()}</a></li>' for heading in headings)
    slot.append(BeautifulSoup(f'<ul class="toc">{items}</ul>', "html.parser"))


def _value_text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value_text, value)) or "none"
    return number_text(value) if not isinstance(value, dict) else json.dumps(value, ensure_ascii=False)


def render_index(folder: Path, manifest: Mapping[str, Any], outcomes: Sequence[Outcome], *, verify_path: str) -> None:
    """Write `index.html`: verdicts, claims, key numbers, thumbnails and provenance of the report folder."""
    pages = [_index_page(folder, manifest, outcome) for outcome in outcomes]
    claims = [claim for page in pages for claim in page["claims"]]
    template = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True).get_template("index.html.j2")
    html = template.render(
        name=manifest["name"],
        date=manifest["started"].replace("T", " ")[:16] + " UTC",
        machine=machine_text(manifest),
        duration=duration_text(manifest["seconds"]),
        finished=all(outcome.finished for outcome in outcomes),
        finished_pages=sum(outcome.finished for outcome in outcomes),
        claims_total=len(claims),
        claims_ok=sum(claim["ok"] for claim in claims),
        pages=pages,
        provenance=provenance_rows(manifest),
        details=_details(manifest),
        verify_path=verify_path,
        sweep=manifest.get("cell", {}).get("sweep", ""),
        label=manifest.get("cell", {}).get("label", ""),
        style=page_style(),
    )
    write_text(folder / "index.html", html)


def machine_text(manifest: Mapping[str, Any]) -> str:
    """The processor or GPU that a report ran on, in a few words."""
    machine = manifest["machine"]
    names = [gpu["name"] for gpu in machine["gpus"]]
    cpu = re.sub(r"\((R|TM)\)|\bCPU\b|\bProcessor\b|@.*", "", machine["cpu"])
    return (", ".join(names) if names else f"CPU: {' '.join(cpu.split())}") + (
        "" if names else f", {machine['cores']} cores"
    )


def _index_page(folder: Path, manifest: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    name = outcome.notebook
    results = read_results(folder, name)
    html = f"{name}.html" if (folder / f"{name}.html").is_file() else ""
    values = {**results.get("records", {}), **results.get("timings", {})}
    return {
        "name": name,
        "title": manifest["notebooks"][name]["title"],
        "html": html,
        "finished": outcome.finished,
        "reason": outcome.reason.splitlines()[0].rstrip(".:") if outcome.reason else "",
        "cell": str(outcome.cell) if outcome.cell else "",
        "summary": _summary(folder, name),
        "claims": results.get("claims", []),
        "numbers": [
            {
                "label": key.replace("_", " "),
                "value": number_text(values[key]),
                "unit": results["units"].get(key, ""),
                "kind": "text" if isinstance(values[key], str) else "num",
            }
            for key in results.get("key_numbers", [])
        ],
        "figures": [
            {**figure, "thumbnail": _thumbnail(folder / figure["png"])} for figure in results.get("figures", []) if html
        ],
    }


def _summary(folder: Path, name: str) -> str:
    """The first paragraph of the notebook, which says what it is about."""
    path = folder / f"{name}.ipynb"
    if not path.is_file():
        return ""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            first = BeautifulSoup(_markdown(cell.source), "html.parser").find("p")
            if first is not None:
                return _finish_html(f"<main>{first}</main>", folder).removeprefix("<main>").removesuffix("</main>")
    return ""


def _thumbnail(path: Path) -> str:
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB")
        tallest = round(small.width * THUMBNAIL[1] / THUMBNAIL[0])
        if small.height > 1.3 * tallest:
            small = small.crop((0, 0, small.width, tallest))  # the top of a tall figure; its page has all of it
        small.thumbnail(THUMBNAIL, Image.Resampling.LANCZOS)
        data = io.BytesIO()
        small = small.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        small.save(data, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def provenance_rows(manifest: Mapping[str, Any]) -> list[dict[str, str]]:
    """`what` and `value` of everything that the numbers of a report come from."""
    machine, repository = manifest["machine"], manifest["repository"]
    changed = repository["changed"]
    dirty = (
        f", with uncommitted changes in {', '.join(changed[:4])}{' and more' if len(changed) > 4 else ''}"
        if changed
        else ""
    )
    loaded = [n["environment"].get("build") for n in manifest["notebooks"].values() if "environment" in n]
    builds = {build["key"]: build for build in loaded if build}
    rows = [
        ("commit", (repository["commit"] or "not a git checkout") + dirty),
        ("processor", f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB"),
        ("GPU", "; ".join(f"{g['name']}, driver {g['driver']}" for g in machine["gpus"]) or "none"),
        ("system", machine["system"]),
        ("Python", f"{manifest['python']['version']} ({manifest['python']['executable']}), also for the notebooks"),
        ("packages", ", ".join(f"{p} {manifest['packages'][p]}" for p in MAIN_PACKAGES if p in manifest["packages"])),
        *(("kernels", _build_text(build)) for build in builds.values()),
        ("profile", manifest["profile"] or "none (the notebook's own values)"),
        ("command", manifest["command"] or "none (called from Python)"),
        ("time", f"{manifest['started']} to {manifest['ended']} (UTC)"),
    ]
    return [{"what": what, "value": value} for what, value in rows]


def _build_text(build: Mapping[str, Any]) -> str:
    """How the kernels were built, in one line; the manifest has all of it."""
    parts = [f"targets {', '.join(build['targets'])}", f"key {build['key']}"]
    for key, value in build["info"].items():
        inner = value if isinstance(value, Mapping) else {"": value}
        for name, item in inner.items():
            text = " ".join(map(str, item)) if isinstance(item, list) else str(item)
            if key not in ("targets", "key", "options") and item not in (None, "", [], {}) and len(text) <= 200:
                parts.append(f"{key} {name} {text}".replace("_", " ").replace("  ", " "))
    return "; ".join(parts)


def _details(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    notebooks = manifest["notebooks"].items()
    parameters = [
        (f"{n}: {key}", _value_text(value)) for n, entry in notebooks for key, value in entry["parameters"].items()
    ]
    hashes = [(entry["path"], entry["sha256"]) for _, entry in notebooks] + list(manifest["data"].items())
    blocks = (
        ("Parameters", parameters),
        ("SHA-256 of notebooks and data", hashes),
        (f"All {len(manifest['packages'])} packages", list(manifest["packages"].items())),
    )
    return [{"title": title, "rows": rows} for title, rows in blocks if rows]
