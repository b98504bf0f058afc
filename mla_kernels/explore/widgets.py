# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The explorer's widgets: choices on top, figures below, in JupyterLab through ipywidgets."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets
import pandas as pd
from matplotlib.figure import Figure

from mla_kernels import build, ops
from mla_kernels.explore import panels
from mla_kernels.explore.compute import P_SCALES, SCALES, Settings, Study, has_kernel
from mla_kernels.explore.sources import DRAWN, Source, from_capture, open_source
from mla_kernels.formats import FORMATS

if TYPE_CHECKING:
    from mla_kernels.model import Capture

__all__ = ["MODELS", "Explorer"]

MODELS = ("data/tiny-mla", DRAWN)
WIDTHS = (8, 10, 11, 12, 13, 14, 16, 20, 23)
INTERVALS = (32, 64, 128, 256, 512, 2048)
ALTS = {
    "histogram": "Histogram of the absolute errors of output elements, a line for each part of the error.",
    "split": "Bars: relative error of the output by part, with numbers.",
    "detail": "One row: scores and probabilities of its tokens, causes of its error, share of the error by tile.",
}


class Explorer:
    """Choices, and the figures that follow them. `widget` is what to display; `settings` and `row` what is chosen.

    model, models: names for the first choice: "drawn", a capture file, or a checkpoint (folder or hub id); `model` may
    also be a capture in memory (`model.capture`), of which the first prompt is shown. The rest are fields of
    `Settings`; `layer` may also be a layer's name, `head` and `step` start as all.
    """

    def __init__(self, model: str | Capture = MODELS[0], *, models: Sequence[str] = MODELS, **settings: Any) -> None:
        known = {field.name for field in fields(Settings)}
        for name in settings:
            if name not in known:
                raise TypeError(f"{name}: expected one of {', '.join(sorted(known))} as a setting of the explorer")
        self._studies: dict[str, Study] = {}
        if not isinstance(model, str):
            self._studies[model.model] = Study(from_capture(model))
            model = model.model
        self._models = list(dict.fromkeys([model, *models]))
        self._filling = False
        self._shown: dict[str, Any] = {}
        self.row = (0, 0)
        self.note = _kernel_note()
        self._make_controls(model)
        self._fill(model, settings)
        self.widget = self._layout()
        self.update()
        for control in self._controls.values():
            control.observe(self._changed, names="value")
        self._rows.observe(self._row_changed, names="value")

    @property
    def source(self) -> Source:
        return self.study.source

    @property
    def settings(self) -> Settings:
        """What is chosen now."""
        c = self._controls
        return Settings(
            layer=c["layer"].value, head=c["head"].value, step=c["step"].value, format=c["format"].value,
            scale=c["scale"].value, p_scale=c["p_scale"].value, fraction_bits=c["fraction_bits"].value,
            promote_every=c["promote_every"].value, narrow_qk=c["narrow_qk"].value, length=c["length"].value,
        )  # fmt: skip

    def update(self) -> None:
        """Draw what the choices ask for; figures whose numbers stay are left alone."""
        start = time.perf_counter()
        settings, study = self.settings, self.study
        tensor = FORMATS[settings.format].granularity == "tensor"
        self._controls["scale"].disabled = not tensor
        for name in ("p_scale", "fraction_bits", "promote_every", "narrow_qk"):
            self._controls[name].disabled = settings.format != "e4m3"
        self._show("split", study.parts(settings))
        self._show("histogram", study.histogram(settings))
        self._list_rows(study.worst(settings))
        self._show_row()
        self._show_layers(study.layers(settings), settings.layer)
        self._say(f"{self._words()}. New figures in {time.perf_counter() - start:.2f} s.")

    def sheet(self) -> Figure:
        """All panels as one figure, for pages without widgets."""
        return panels.sheet(self._shown, self._words())

    def numbers(self) -> pd.DataFrame:
        """The split of the chosen rows and of every layer, the numbers behind `sheet` in one table."""
        layers = self._shown["layers"].reset_index().melt(id_vars="layer", var_name="measure")
        parts = self._shown["split"].rename(columns={"part": "measure", "relative_error": "value"})
        causes = self._shown["detail"]["causes"].rename(columns={"cause": "measure", "relative_error": "value"})
        columns = ["panel", "layer", "measure", "value"]
        tables = [parts.assign(panel="split"), causes.assign(panel="worst row"), layers.assign(panel="layers")]
        return pd.concat([table.reindex(columns=columns) for table in tables], ignore_index=True)

    def worst_rows(self) -> pd.DataFrame:
        """The rows of the list: step (its position), head, tokens, and relative errors by part."""
        table = self.study.worst(self.settings)
        table["step"] = [self.source.steps[i] for i in table["step"]]
        return table

    def _make_controls(self, model: str) -> None:
        def choice(label: str, options: Any, value: Any = None) -> Any:
            made = ipywidgets.Dropdown(description=label, options=options, layout={"width": "260px"})
            made.style.description_width = "90px"
            if value is not None:
                made.value = value
            return made

        widths = [("fp32 and wider", None), *((f"{n} bits{' (Hopper fp8)' * (n == 13)}", n) for n in WIDTHS)]
        every = [("in place", None), *((f"every {n} tokens", n) for n in INTERVALS)]
        self._controls = {
            "model": choice("model", [(name.split("/")[-1], name) for name in self._models], model),
            "layer": choice("layer", [("", 0)]),
            "head": choice("head", [("all", None)]),
            "step": choice("step", [("all", None)]),
            "length": choice("length", [("all", None)]),
            "format": choice("format", list(FORMATS), "e4m3"),
            "scale": choice("scale", list(SCALES)),
            "p_scale": choice("P scale", [(f"{p:g}", p) for p in P_SCALES], 256.0),
            "fraction_bits": choice("accumulator", widths),
            "promote_every": choice("promotion", every),
            "narrow_qk": ipywidgets.Checkbox(description="accumulator in q · k too", indent=False),
        }
        self._rows = ipywidgets.Select(rows=10, layout={"width": "100%"})
        self._images = {name: ipywidgets.HTML() for name in panels.PANELS}
        self._status = ipywidgets.HTML()

    def _layout(self) -> Any:
        wrap = {"flex_flow": "row wrap"}
        head = ipywidgets.HTML("<b>Worst rows</b> (total = format + stage + kernel as vectors); choose one")
        return ipywidgets.VBox(
            [
                ipywidgets.Box(list(self._controls.values()), layout=wrap),
                self._status,
                ipywidgets.Box([self._images["histogram"], self._images["split"]], layout=wrap),
                self._images["layers"],
                head,
                self._rows,
                self._images["detail"],
            ]
        )

    def _fill(self, model: str, settings: dict[str, Any]) -> None:
        """Offer what the source has, keeping what is chosen where the new source has it too."""
        if model not in self._studies:
            self._studies[model] = Study(open_source(model))
        self.study = self._studies[model]
        source, c = self.source, self._controls
        kept = {name: c[name].value for name in ("layer", "head", "step", "length")}
        self._filling = True
        try:
            c["layer"].options = [(name.replace("_", " "), i) for i, name in enumerate(source.layers)]
            c["head"].options = [("all", None), *((str(i), i) for i in range(source.heads))]
            c["step"].description = source.unit
            c["step"].options = [("all", None), *((str(t), i) for i, t in enumerate(source.steps))]
            lengths = [(f"{n} tokens", n) for n in source.lengths]
            c["length"].options = [("all", None), *lengths] if model != DRAWN else lengths
            wanted = {"length": 1024 if model == DRAWN else None, **{k: v for k, v in kept.items() if v is not None}}
            for name, value in {**wanted, **settings}.items():
                if name == "layer" and isinstance(value, str):
                    value = source.layers.index(value) if value in source.layers else value
                offered = [v for _, v in c[name].options] if name in kept else None
                if offered is not None and value not in offered:
                    if name in settings:
                        raise ValueError(f"{name}: expected one of {[k for k, _ in c[name].options]}, got {value!r}")
                    continue
                c[name].value = value
        finally:
            self._filling = False

    def _changed(self, change: dict[str, Any]) -> None:
        if self._filling:
            return
        try:
            if change["owner"] is self._controls["model"]:
                self._say(f"opening {escape(change['new'])}: a new checkpoint is captured first, which takes seconds")
                self._fill(change["new"], {})
            self.update()
        except Exception as error:  # an exception in a callback would reach nobody
            self._say(f'<span style="color:#b00020">{escape(f"{type(error).__name__}: {error}")}</span>')

    def _row_changed(self, change: dict[str, Any]) -> None:
        if not self._filling and change["new"] is not None:
            self._show_row()

    def _list_rows(self, table: pd.DataFrame) -> None:
        def words(row: Any) -> str:
            place = f"{self.source.unit} {self.source.steps[row.step]}, head {row.head}, {row.tokens} tokens"
            parts = ", ".join(
                f"{name} {100 * getattr(row, part):.3g} %"
                for name, part in (("format", "format"), ("stage", "stage"), ("kernel", "implementation"))
            )
            return f"{place}: {100 * row.total:.3g} %  ({parts})"

        listed: list[Any] = list(table.itertuples())
        options = [(words(row), (int(row.step), int(row.head))) for row in listed]
        if options == list(self._rows.options):
            return
        self._filling = True
        try:
            self._rows.options = options
            self._rows.value = options[0][1]
        finally:
            self._filling = False

    def _show_row(self) -> None:
        self.row = self._rows.value
        s = self.settings
        self._show("detail", {name: getattr(self.study, name)(s, *self.row) for name in ("tokens", "causes", "tiles")})

    def _show(self, panel: str, data: Any) -> None:
        if panel in self._shown and _same(self._shown[panel], data):
            return
        self._shown[panel] = data
        png, width, height = panels.picture(panel, data)
        self._images[panel].value = (
            f'<img class="mla-explore-{panel}" alt="{escape(ALTS[panel])}" width="{width}" height="{height}" '
            f'style="max-width:100%;height:auto" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        )

    def _show_layers(self, table: pd.DataFrame, chosen: int) -> None:
        self._shown["layers"] = table
        self._images["layers"].value = panels.layers_html(table, chosen)

    def _words(self) -> str:
        s, source = self.settings, self.source
        rows = (
            ("all heads" if s.head is None else f"head {s.head}")
            + ", "
            + (f"all {source.unit}s" if s.step is None else f"{source.unit} {source.steps[s.step]}")
        )
        kernel = "" if has_kernel(s) else self.note or "; no kernel here rounds so, hence no kernel part"
        return f"{source.name} ({source.what}), layer {source.layers[s.layer]}, {rows}, {s.format}{kernel}"

    def _say(self, words: str) -> None:
        self._status.value = f'<span class="mla-explore-status">{words}</span>'


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return all(_same(a[name], b[name]) for name in a)
    return bool(a.equals(b))


def _kernel_note() -> str:
    """Load the CPU kernel where it is not; what to say where that fails."""
    if "cpu" in ops.loaded_targets():
        return ""
    try:
        build.load(targets=("cpu",))
    except build.BuildError as error:
        return f"; no kernel part: {str(error).splitlines()[0]}"
    return ""
