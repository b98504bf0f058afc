# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The explorer: its numbers against the library's, choices, pictures. The browser is in test_explore_lab.py."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch

from mla_kernels import explore, metrics, model, plots, report
from mla_kernels.cases import captured_inputs, run_case
from mla_kernels.explore import compute, panels, sources
from mla_kernels.explore.compute import CAUSE_WORDS, stage_probabilities
from mla_kernels.formats import D_V, encode
from mla_kernels.model import load_capture
from mla_kernels.ops import mla_decode
from mla_kernels.reference import EXACT, KERNEL, Accumulator, attention

CAPTURE = "data/captures/tiny-mla.safetensors"
NARROW = {"fraction_bits": 13, "promote_every": 128, "narrow_qk": True}
CHOICES = [
    {}, {"format": "e4m3_group128"}, {"format": "e4m3_token"}, {"format": "e5m2"}, {"format": "bf16"}, {"scale": "1.0"},
    {"scale": "amax / 448 ÷ 8 (clips)"}, {"p_scale": 16.0}, NARROW, {"fraction_bits": 13}, {"length": 128},
    {"length": 256, "layer": 1, "fraction_bits": 10},
]  # fmt: skip


@pytest.fixture(scope="module")
def study(cpu_build):
    return compute.Study(explore.open_source(CAPTURE))


@pytest.fixture(scope="module")
def drawn(cpu_build):
    return compute.Study(explore.open_source("drawn"))


def named(options):
    return ",".join(f"{name}={value}" for name, value in options.items()) or "default"


class TestNumbers:
    def test_the_split_is_the_librarys(self, study):
        """The same layer, steps and scales through `cases.run_case`: every part of the error."""
        source = study.source
        activations, _ = load_capture(sources.ROOT / CAPTURE, 4)
        inputs = captured_inputs(
            activations, positions=source.steps, sm_scale=source.sm_scale, num_kv_splits=None,
            q_scale=None, kv_scale=float(encode(study._loaded(1, None)[1], "e4m3").scale),
        )  # fmt: skip
        theirs = run_case(inputs, mla_decode).split
        ours = study.split(compute.Settings(layer=1))
        for name in ("oracle", "format", "stage", "implementation", "total"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name)[:, 0], rtol=1e-12, atol=1e-13)

    @pytest.mark.parametrize("options", CHOICES, ids=named)
    def test_causes_add_up_to_the_rows_error(self, study, options):
        settings = compute.Settings(**options)
        worst = study.worst(settings).iloc[0]
        step, head = int(worst["step"]), int(worst["head"])
        causes = study.causes(settings, step, head)
        row = compute.Settings(**{**vars(settings), "step": step, "head": head})
        parts = study.parts(row).set_index("part")
        assert causes["gain"].sum() == pytest.approx(parts.loc["total", "gain"], abs=1e-10)
        assert parts.loc["total", "relative_error"] == pytest.approx(worst["total"], rel=1e-9)
        assert study.worst(row)["total"].tolist() == [pytest.approx(worst["total"])]

    @pytest.mark.parametrize(
        "options", [c for c in CHOICES if "narrow_qk" not in c and "fraction_bits" not in c], ids=named
    )
    def test_probabilities_make_the_stage(self, study, options):
        """What the row's figure shows is what the stage multiplies: Σ p_stage v = stage before its last rounding."""
        settings = compute.Settings(**options)
        step, head = 5, 2
        table = study.tokens(settings, step, head)
        held = study._stored(settings.layer, settings.length, settings.format, settings.scale)
        values = compute._real(held.kv)[table["token"].to_list(), :D_V] * held.kv_scale
        out = torch.tensor(table["p_stage"].to_numpy()) @ values
        key = (settings.layer, settings.length, settings.format, settings.scale)
        stage = study._stage(*key, compute.replace(settings.rounding, out_format=None))[step, head]
        torch.testing.assert_close(out, stage, rtol=1e-10, atol=1e-12)
        tiles = study.tiles(settings, step, head)
        assert tiles["probability"].sum() == pytest.approx(1)
        assert tiles["share"].sum() == pytest.approx(1)
        assert len(tiles) == -(-len(table) // 64)

    def test_probabilities_of_a_row_with_splits(self):
        scores = torch.linspace(-3, 9, 1300, dtype=torch.float64)
        p = stage_probabilities(scores, EXACT)
        torch.testing.assert_close(p, scores.softmax(0), rtol=1e-12, atol=0)
        kv = torch.randn(1, 1300, 576, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        q = torch.randn(1, 1, 576, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        s = 0.05 * (kv[0] @ q[0, 0])
        rounding = compute.replace(KERNEL, out_format=None)
        out, _ = attention(q, kv, [1300], sm_scale=0.05, rounding=rounding, num_kv_splits=None)
        torch.testing.assert_close(stage_probabilities(s, rounding) @ kv[0, :, :D_V], out[0, 0], rtol=1e-10, atol=1e-12)

    def test_worst_rows_are_the_worst(self, study):
        settings = compute.Settings()
        table = study.worst(settings, count=1000)
        split = study.split(settings)
        errors = (split.total.norm(dim=-1) / split.oracle.norm(dim=-1)).flatten()
        assert len(table) == errors.numel()
        assert table["total"].tolist() == pytest.approx(errors.sort(descending=True).values.tolist())

    def test_a_row_that_is_not_finite_comes_first(self, study, monkeypatch):
        kernel = study._kernel(0, None, "e4m3", "amax / 448").clone()
        kernel[3, 1, 7] = torch.nan
        monkeypatch.setattr(study, "_kernel", lambda *_: kernel)
        assert study.worst(compute.Settings()).loc[0, ["step", "head"]].tolist() == [3, 1]

    def test_length_limits_what_a_step_sees(self, study):
        _, _, first, lens = study._loaded(0, 128)
        assert lens == [128] * len(lens)
        assert [a + 128 for a in first] == [t + 1 for t in study.source.steps]
        q, kv, _, _ = study._loaded(0, None)
        step = len(lens) - 1
        out, _ = attention(
            q[step][None], kv[None, first[step] : first[step] + 128], [128], sm_scale=study.source.sm_scale
        )
        torch.testing.assert_close(study._oracle(0, 128)[step], out[0])

    def test_the_heat_map_holds_every_layer(self, study):
        table = study.layers(compute.Settings(layer=1))
        assert list(table.index) == ["1", "4"]
        assert table["format_error"].between(1e-3, 0.2).all()
        last = metrics.error_split(
            *(x[-compute.HEAT_STEPS :] for x in (study._oracle(1, None), study._format(1, None, "e4m3", "amax / 448"))),
            *[study._stage(1, None, "e4m3", "amax / 448", KERNEL)[-compute.HEAT_STEPS :]] * 2,
        )
        assert table.loc["4", "format_error"] == pytest.approx(last.relative()["format"], rel=1e-9)
        assert table.loc["4", "stage_error"] == pytest.approx(last.relative()["stage"], rel=1e-9)

    def test_a_narrow_accumulator_loses_gain_where_latents_have_a_mean(self, drawn):
        layer = drawn.source.layers.index("shifted_mean")
        exact = compute.Settings(layer=layer, length=8192)
        narrow = compute.Settings(layer=layer, length=8192, fraction_bits=13)
        assert abs(drawn.parts(exact).set_index("part").loc["stage", "gain"]) < 1e-3
        assert drawn.parts(narrow).set_index("part").loc["stage", "gain"] < -3e-3

    def test_a_kernel_part_only_where_a_kernel_rounds_so(self, study):
        assert "implementation" in set(study.parts(compute.Settings())["part"])
        assert "implementation" in set(study.parts(compute.Settings(format="bf16"))["part"])
        for options in ({"p_scale": 1.0}, {"fraction_bits": 13}, {"format": "e5m2"}):
            settings = compute.Settings(**options)
            assert "implementation" not in set(study.parts(settings)["part"])
            assert CAUSE_WORDS["kernel"] not in set(study.causes(settings, 0, 0)["cause"])


class TestSettings:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"format": "e4m4"}, "format: expected one of bf16, e4m3, .*, got 'e4m4'"),
            ({"scale": "2"}, "scale: expected one of amax / 448, .*, got '2'"),
            ({"p_scale": 3.0}, "p_scale: expected a power of two, got 3.0"),
            (
                {"fraction_bits": 13, "promote_every": 33},
                "promote_every: expected None or a multiple of k_step = 32, got 33",
            ),
        ],
    )
    def test_what_cannot_be_is_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            compute.Settings(**options)

    def test_the_accumulator_is_the_references(self):
        rounding = compute.Settings(**NARROW).rounding
        assert rounding.pv_accumulator == Accumulator(13, promote_every=128)
        assert rounding.qk_accumulator == Accumulator(13)


class TestWidgets:
    @pytest.fixture
    def explorer(self, cpu_build):
        return explore.Explorer(CAPTURE, models=("drawn",))

    def test_every_choice_of_the_issue_is_there_and_moves_something(self, explorer):
        moves = {
            "layer": 1, "head": 2, "step": 3, "format": "e5m2", "length": 128, "model": "drawn",
        }  # fmt: skip
        back = {"scale": "1.0", "p_scale": 1.0, "fraction_bits": 10, "promote_every": 32, "narrow_qk": True}
        for name, value in {**back, **moves}.items():
            before = {panel: image.value for panel, image in explorer._images.items()}
            explorer._controls[name].value = value
            after = {panel: image.value for panel, image in explorer._images.items()}
            assert "New figures" in explorer._status.value, explorer._status.value
            assert before != after, f"{name} = {value} changed no figure"

    def test_figures_whose_numbers_stay_are_left_alone(self, explorer):
        before = explorer._images["split"].value
        explorer._rows.index = 4
        assert explorer._images["split"].value == before
        assert explorer.row == explorer._rows.options[4][1]

    def test_an_error_is_shown_and_the_next_choice_works(self, explorer, monkeypatch):
        def fails(*_):
            raise ValueError("planted")

        monkeypatch.setattr(explorer.study, "layers", fails)
        explorer._controls["head"].value = 1
        assert "ValueError: planted" in explorer._status.value
        monkeypatch.undo()
        explorer._controls["head"].value = 2
        assert "New figures" in explorer._status.value

    def test_a_model_that_cannot_be_opened_says_why(self, explorer):
        explorer._controls["model"].options = [*explorer._controls["model"].options, ("x", "data/nothing-here")]
        explorer._controls["model"].value = "data/nothing-here"
        assert "path_or_id" in explorer._status.value

    def test_starting_choices_are_checked(self, cpu_build):
        with pytest.raises(TypeError, match=r"lenght: expected one of .*length"):
            explore.Explorer("drawn", lenght=3)
        with pytest.raises(ValueError, match=r"layer: expected one of .*zero mean.*, got 'no_mean'"):
            explore.Explorer("drawn", layer="no_mean")

    def test_every_picture_has_words(self, explorer):
        for panel in ("histogram", "split", "detail"):
            assert re.search(r'alt="[^"]{20,}"', explorer._images[panel].value)
        assert "<caption" in explorer._images["layers"].value

    def test_in_a_report_there_is_a_picture_and_a_table(self, cpu_build, tmp_path):
        page = report.open_page("02_error_distribution", tmp_path)
        explore.show(page, "drawn", layer="outlier_channels", length=256)
        figure, table = page._figures["explorer"], page._tables["explorer_rows"]
        assert (tmp_path / figure["png"]).stat().st_size > 20_000
        numbers = pd.read_csv(tmp_path / figure["csv"])
        assert set(numbers["panel"]) == {"split", "worst row", "layers"}
        assert table["rows"] == 8


class TestPanels:
    def test_numbers_that_are_not_finite_are_drawn_as_such(self):
        table = pd.DataFrame(
            {"part": ["format", "stage", "total"], "relative_error": [0.0, np.nan, np.inf], "gain": [0.0, np.nan, 0.0]}
        )
        assert panels.picture("split", table)[0].startswith(b"\x89PNG")
        cells = pd.DataFrame({"max": [1.0, np.nan], "format_error": [0.0, np.inf]}, index=["0", "1"])
        shown = panels.layers_html(cells, 0)
        assert ">nan<" in shown
        assert ">inf<" in shown

    def test_all_zero_errors_are_drawn(self):
        table = plots.log_histogram({"format": [0.0] * 9, "stage": [0.0] * 9, "total": [0.0] * 9})
        assert panels.picture("histogram", table)[0].startswith(b"\x89PNG")


@pytest.mark.parametrize("notebook", sorted((sources.ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_notebook_opens_it(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    assert any(cell["cell_type"] == "code" and "explore.show(" in "".join(cell["source"]) for cell in cells)


def test_a_capture_in_memory_is_a_source(cpu_build):
    generator = torch.Generator().manual_seed(0)
    q, kv = (torch.randn(n, generator=generator).to(torch.bfloat16) for n in ((90, 3, 576), (90, 576)))
    layer = model.LayerCapture(q, kv[:, :D_V], kv[:, D_V:], torch.zeros(90, 3, D_V))
    made = model.Capture((layer, layer), (torch.arange(80), torch.arange(10)), 0.1, "in-memory")
    study = compute.Study(sources.from_capture(made))
    assert study.source.layers == ("0", "1")
    assert study.source.steps[-1] == 79, "the first prompt alone"
    expected, _ = attention(q[79][None], kv[None, :80], [80], sm_scale=0.1)
    torch.testing.assert_close(study._oracle(1, None)[-1], expected[0])


def test_a_checkpoint_is_captured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_cache_folder", lambda: tmp_path)
    made = []
    monkeypatch.setattr(sources, "_capture", lambda *a: made.append(a) or a[3].write_bytes(b"x"))
    first = sources._cached_capture(str(sources.ROOT / "data" / "tiny-mla"))
    assert sources._cached_capture(str(sources.ROOT / "data" / "tiny-mla")) == first
    assert len(made) == 1


def test_an_unwritable_cache_folder_is_not_needed(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(sources.platformdirs, "user_cache_dir", lambda *a, **k: str(blocked / "under"))
    monkeypatch.setattr(sources.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = sources._cache_folder()
    assert folder.is_dir()
    assert folder.parent == tmp_path
