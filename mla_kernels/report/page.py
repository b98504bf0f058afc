# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The notebook side of a report: figures, tables, recorded numbers and claims, written where the runner finds them.

Works the same in JupyterLab, under plain papermill and under `python -m mla_kernels.report run`.
"""

from __future__ import annotations

import base64
import os
import re
import sys
import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_kernels.report.figures import SCREEN_DPI, png
from mla_kernels.report.files import repository_root, write_bytes, write_json, write_text
from mla_kernels.report.values import number_text, plain, truth

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["Page", "open_page"]

SHOWN_ROWS = 60  # of a table in the page; the CSV has all


def open_page(notebook: str, report_dir: str | Path = "", parameters: Mapping[str, Any] | None = None) -> Page:
    """Open the page of a notebook.

    Args:
        notebook: file name of the notebook without `.ipynb`, for instance "02_error_distribution".
        report_dir: folder to write into; "" means reports/interactive/<notebook> in the checkout. The runner sets it.
        parameters: the notebook's parameters as they are in this run, for the record.
    """
    return Page(notebook, report_dir, parameters or {})


class Page:
    """What one notebook shows, records and claims.

    Writes `figures/<notebook>/<name>.png` and `.csv`, `tables/<notebook>/<name>.csv` and, in `finish`,
    `results/<notebook>.json` under `folder`.
    """

    def __init__(self, notebook: str, report_dir: str | Path, parameters: Mapping[str, Any]) -> None:
        self.notebook = _slug(notebook, "notebook")
        self.interactive = str(report_dir) == ""
        root = repository_root()
        self.folder = root / "reports" / "interactive" / notebook if self.interactive else Path(report_dir).resolve()
        self.root = root
        self.parameters = plain(dict(parameters), "parameters")
        self._figures: dict[str, dict[str, Any]] = {}
        self._tables: dict[str, dict[str, Any]] = {}
        self._records: dict[str, Any] = {}
        self._units: dict[str, str] = {}
        self._keys: dict[str, bool | None] = {}
        self._timings: dict[str, Any] = {}
        self._claims: dict[str, dict[str, Any]] = {}
        self._start = time.perf_counter()
        self._finished = False
        self._results = self.folder / "results" / f"{self.notebook}.json"
        self._results.unlink(missing_ok=True)  # of a page that was opened before: this one has yet to finish

    def figure(
        self, fig: Figure, name: str, *, caption: str, alt: str, data: pd.DataFrame | Mapping[str, Any] | list[Any]
    ) -> None:
        """Save a figure and the numbers behind it, show it, and close it.

        Args:
            fig: a matplotlib Figure.
            name: file name without ending; letters, digits, "_" and "-".
            caption: what to see in it, one or two sentences; stands under the figure.
            alt: what the figure shows, for a reader who does not see it.
            data: the numbers behind the figure, saved as CSV: a DataFrame, or what a DataFrame is made from.

        Raises:
            RuntimeError: after `finish`; the same holds for `table`, `record` and `claim`.
        """
        self._new(self._figures, name, "figure")
        for argument, text in (("caption", caption), ("alt", alt)):
            if not text.strip():
                raise ValueError(f"{argument}: expected a sentence on what figure {name!r} shows, got an empty text")
        place = f"figures/{self.notebook}/{name}"
        csv = self._csv(data, f"{place}.csv")
        image = png(fig)
        write_bytes(self.folder / f"{place}.png", image)
        width, height = (round(inches * SCREEN_DPI) for inches in fig.get_size_inches())
        self._figures[name] = {
            "name": name, "caption": caption, "alt": alt, "png": f"{place}.png", "csv": f"{place}.csv",
            "width": width, "height": height, "rows": len(csv),
        }  # fmt: skip
        _close(fig)
        encoded = base64.b64encode(image).decode()
        _show(
            f'<figure class="mla-figure" id="fig-{name}"><img alt="{escape(alt)}" width="{width}" height="{height}" '
            f'style="max-width:100%;height:auto" src="data:image/png;base64,{encoded}">'
            f"<figcaption>{escape(caption)} {self._link(f'{place}.csv', 'Numbers (CSV)')}</figcaption></figure>",
            f"[figure {name}] {caption}\n{alt}",
        )

    def table(
        self,
        df: pd.DataFrame | Mapping[str, Any] | list[Any],
        name: str,
        *,
        caption: str,
        columns: Mapping[str, str] | None = None,
        digits: int = 4,
    ) -> None:
        """Save a table as CSV, in full precision, and show it.

        Args:
            df: a DataFrame, or what one is made from.
            name: file name without ending.
            caption: what the table holds; stands above it.
            columns: headings to show instead of column names, with units: {"us_median": "median, µs"}.
            digits: significant digits to show.
        """
        self._new(self._tables, name, "table")
        place = f"tables/{self.notebook}/{name}.csv"
        frame = self._csv(df, place)
        self._tables[name] = {"name": name, "caption": caption, "csv": place, "rows": len(frame)}
        headings = {str(key): text for key, text in (columns or {}).items()}
        unknown = sorted(set(headings) - {str(column) for column in frame.columns})
        if unknown:
            raise ValueError(
                f"columns: table {name!r} has no column {unknown[0]!r}; it has {', '.join(map(str, frame))}"
            )
        more = "" if len(frame) <= SHOWN_ROWS else f" The first {SHOWN_ROWS} of {len(frame)} rows."
        _show(
            f'<p class="mla-caption" id="table-{name}">{escape(caption)}{more} {self._link(place, "Numbers (CSV)")}</p>'
            f'<div class="mla-table" tabindex="0" role="region" aria-label="{escape(caption)}">'
            + _table_html(frame.head(SHOWN_ROWS), headings, digits)
            + "</div>",
            f"[table {name}] {caption}\n{frame.head(SHOWN_ROWS).to_string()}",
        )

    def record(self, name: str, value: Any, *, unit: str = "", volatile: bool = False, key: bool | None = None) -> None:
        """Write a value into results.json.

        Args:
            name: its name in results.json, with the unit in it if it has one (`us_median`, `relative_error`).
            value: number, string, or a list or dict of those; numpy and torch scalars become numbers. A float that
                is not finite is written as "nan", "inf" or "-inf".
            unit: shown behind the value on the index page.
            volatile: for what no second run repeats (seconds, paths, dates): kept apart under `timings`, which
                `verify` does not compare.
            key: show it among the key numbers of the index page. Default: the first scalars are.
        """
        store = self._timings if volatile else self._records
        self._new(self._timings if name in self._timings else self._records, name, "record")
        store[name] = plain(value, name)
        self._units[name] = unit
        self._keys[name] = key

    def claim(self, text: str, holds: Any, *, detail: str = "") -> None:
        """State something that this notebook shows. `finish` fails when one does not hold.

        Args:
            text: the claim as a sentence that can be true or false: "the split adds up to the total".
            holds: True or False (a numpy or torch bool will do).
            detail: the figure it rests on: "1.1e-16 of the total".
        """
        self._refuse_after_finish(f"claim {text!r}")
        if not text.strip():
            raise ValueError("text: expected the claim as a sentence, got an empty text")
        if text in self._claims and not self.interactive:
            raise ValueError(f"text: {text!r} is claimed twice on this page: say it once, or say what differs")
        self._claims[text] = {"claim": text, "ok": truth(holds, f"claim {text!r}"), "detail": str(detail)}

    def finish(self) -> None:
        """Show the verdicts, write results/<notebook>.json, and fail if a claim does not hold.

        Raises:
            AssertionError: naming every claim that does not hold.
            ValueError: when the page claims nothing: a notebook that claims nothing cannot fail.
        """
        if not self._claims:
            raise ValueError(
                "finish: this page claims nothing: add page.claim(text, holds) for what the notebook shows"
            )
        claims = list(self._claims.values())
        failed = [claim for claim in claims if not claim["ok"]]
        _show(
            _verdict_html(claims),
            "\n".join(f"{'ok  ' if c['ok'] else 'FAIL'} {c['claim']}  {c['detail']}" for c in claims),
        )
        write_json(
            self._results,
            {
                "notebook": self.notebook,
                "parameters": self.parameters,
                "claims": claims,
                "records": self._records,
                "units": {name: unit for name, unit in self._units.items() if unit},
                "key_numbers": self._key_numbers(),
                "figures": list(self._figures.values()),
                "tables": list(self._tables.values()),
                "timings": {**self._timings, "seconds": round(time.perf_counter() - self._start, 3)},
                "environment": _environment(),
            },
        )
        self._finished = True
        if failed:
            lines = [f"  - {claim['claim']}" + (f" ({claim['detail']})" if claim["detail"] else "") for claim in failed]
            raise AssertionError(
                f"{len(failed)} of {len(claims)} claims of {self.notebook} do not hold:\n" + "\n".join(lines)
            )

    def _refuse_after_finish(self, what: str) -> None:
        """What comes after `finish` would be in no results file, and a claim of it could not fail."""
        if self._finished:
            raise RuntimeError(
                f"{what}: expected before page.finish(), which has written the results: make page.finish() the last "
                "cell; to start anew, run the notebook from its report.open_page cell"
            )

    def _new(self, store: dict[str, Any], name: str, what: str) -> None:
        """Refuse names that cannot be file names and, in a run without a person, names that were used before."""
        self._refuse_after_finish(f"{what} {name!r}")
        _slug(name, "name")
        if name in store and not self.interactive:
            raise ValueError(f"name: {what} {name!r} is there already: every {what} of a page needs its own name")

    def _csv(self, data: Any, place: str) -> pd.DataFrame:
        import pandas as pd

        if not isinstance(data, (pd.DataFrame, pd.Series, Mapping, list)):
            raise TypeError(f"data: expected a DataFrame, or a dict or list that makes one, got {type(data).__name__}")
        frame = data.to_frame() if isinstance(data, pd.Series) else pd.DataFrame(data)
        if not isinstance(frame.index, pd.RangeIndex) and any(name is not None for name in frame.index.names):
            frame = frame.reset_index()
        write_text(self.folder / place, frame.to_csv(index=False))
        return frame

    def _link(self, place: str, text: str) -> str:
        """A link in a report; the path as text in JupyterLab, whose server may not reach it."""
        if self.interactive:
            return f"<code>{escape(os.path.relpath(self.folder / place, self.root))}</code>"
        return f'<a href="{escape(place)}">{text}</a>'

    def _key_numbers(self) -> list[str]:
        scalars = [
            name for name, value in {**self._records, **self._timings}.items() if not isinstance(value, (list, dict))
        ]
        asked = [name for name in scalars if self._keys[name]]
        return asked or [name for name in scalars if name in self._records and self._keys[name] is None][:8]


def _slug(name: str, argument: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ValueError(f'{argument}: expected letters, digits, "_", "-" and ".", got {name!r}')
    return name


def _show(html: str, text: str) -> None:
    """Display in a notebook; print the text elsewhere."""
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        print(text)
    else:
        display({"text/html": html, "text/plain": text}, raw=True)


def _close(fig: Figure) -> None:
    """Take the figure from pyplot, or the inline backend would show it once more at the end of the cell."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(fig)


def _table_html(frame: pd.DataFrame, headings: Mapping[str, str], digits: int) -> str:
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    numeric = [
        is_numeric_dtype(frame.dtypes.iloc[i]) and not is_bool_dtype(frame.dtypes.iloc[i])
        for i in range(frame.shape[1])
    ]
    kinds = [' class="num"' if is_number else "" for is_number in numeric]
    head = "".join(
        f'<th scope="col"{kind}>{escape(headings.get(str(column), str(column)))}</th>'
        for column, kind in zip(frame.columns, kinds, strict=True)
    )
    rows = []
    for row in frame.itertuples(index=False, name=None):
        texts = [_cell_text(value, digits) for value in row]
        cells = [
            f"<td{kind or _SHORT * (len(text) <= 28)}>{escape(text)}</td>"
            for text, kind in zip(texts, kinds, strict=True)
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


_SHORT = ' class="short"'  # not broken into lines


def _cell_text(value: Any, digits: int) -> str:
    try:
        value = plain(value, "cell")
    except TypeError:
        return str(value)
    if value in ("nan", None):
        return "–"
    return number_text(
        {"inf": float("inf"), "-inf": float("-inf")}.get(value, value) if isinstance(value, str) else value, digits
    )


def _verdict_html(claims: list[dict[str, Any]]) -> str:
    rows = "".join(
        f'<tr><td class="{"ok" if c["ok"] else "failed"}">{"✓ holds" if c["ok"] else "✗ does not hold"}</td>'
        f"<td>{escape(c['claim'])}</td><td>{escape(c['detail'])}</td></tr>"
        for c in claims
    )
    head = '<tr><th scope="col">verdict</th><th scope="col">claim</th><th scope="col">evidence</th></tr>'
    return (
        '<p class="mla-caption">Claims of this page</p>'
        '<div class="mla-table" tabindex="0" role="region" aria-label="Claims of this page">'
        f"<table><thead>{head}</thead><tbody>{rows}</tbody></table></div>"
    )


def _environment() -> dict[str, Any]:
    """What only the notebook's own process knows: the loaded kernels, and the GPU that torch sees."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "executable": sys.executable}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = {"version": torch.__version__, "threads": torch.get_num_threads()}
        if torch.cuda.is_initialized():
            found["torch"]["gpu"] = torch.cuda.get_device_name()
            found["torch"]["cuda"] = torch.version.cuda
    build = sys.modules.get("mla_kernels.build")
    built = build.loaded() if build is not None else None
    if built is not None:
        found["build"] = {"key": built.key, "targets": list(built.targets), "info": plain(dict(built.info), "build")}
    return found
