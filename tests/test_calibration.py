# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Scale files: the same bytes twice, read back, counted, missing ones named, suspicious ones flagged."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mla_kernels import model as study
from mla_kernels.calibration import Scales, load_scales, save_scales, uniform_scales
from mla_kernels.model import Capture, LayerCapture


def source(seed: int = 0, layers: int = 3, zero: int = -1) -> Capture:
    """A capture of random layers, `zero` one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(layers):
        q = torch.randn(70, 4, 576, generator=generator).bfloat16()
        kv = (torch.randn(70, 576, generator=generator) * (0.0 if i == zero else i + 1.0)).bfloat16()
        made.append(LayerCapture(q, kv[:, :512], kv[:, 512:], torch.zeros(70, 4, 512)))
    return Capture(tuple(made), (torch.arange(70) + seed,), 192**-0.5, "random")


def test_same_data_gives_the_same_bytes(tmp_path: Path) -> None:
    first = save_scales(study.calibrate(source(5)), tmp_path / "a.json").read_bytes()
    assert save_scales(study.calibrate(source(5)), tmp_path / "b.json").read_bytes() == first
    assert save_scales(study.calibrate(source(6)), tmp_path / "c.json").read_bytes() != first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json", "c.json"]  # nothing left behind


@pytest.mark.usefixtures("cpu_build")
def test_reloaded_scales_give_the_same_outputs(tmp_path: Path) -> None:
    data = source()
    scales = study.calibrate(data)
    again, report = load_scales(save_scales(scales, tmp_path / "scales.json"), 3, strict=True)
    assert again == scales
    assert again.data_sha256 == data.data_sha256
    assert report.ok
    assert str(report) == "kv_scale found for 3 of 3 layers"
    rows = study.teacher_forced(data, "e4m3", scales)
    assert study.teacher_forced(data, "e4m3", again) == rows
    assert study.teacher_forced(data, "e4m3", uniform_scales(3, 0.1, 0.1)) != rows


def test_scales_are_amax_over_448_and_finite_for_zeros() -> None:
    data = source(zero=1)
    scales = study.calibrate(data)
    for layer, (q_scale, kv_scale) in enumerate(zip(scales.q_scale, scales.kv_scale, strict=True)):
        q, kv = data.layers[layer].q, data.layers[layer].kv
        assert q_scale == pytest.approx(float(q.abs().max()) / 448.0, rel=1e-6)
        assert kv_scale == (1.0 if layer == 1 else pytest.approx(float(kv.abs().max()) / 448.0, rel=1e-6))
        assert math.isfinite(kv_scale)


@pytest.mark.parametrize(("value", "said"), [(1.0, "every kv_scale is 1.0"), (0.0, "every kv_scale is 0")])
def test_uncalibrated_files_are_flagged(tmp_path: Path, value: float, said: str) -> None:
    path = save_scales(study.calibrate(source()), tmp_path / "scales.json")
    content = json.loads(path.read_text())
    content["scales"] = {name: value if "kv" in name else 0.03 for name in content["scales"]}
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match=f"{said}: nothing was calibrated"):
        scales, report = load_scales(path, 3)
    assert not report.ok
    assert scales.kv_scale == (1.0, 1.0, 1.0)
    assert scales.q_scale == (0.03, 0.03, 0.03)
    with pytest.raises(ValueError, match=said):
        load_scales(path, 3, strict=True)


def checkpoint(folder: Path, names: dict[str, float]) -> Path:
    folder.mkdir()
    tensors = {name: torch.tensor([value]) for name, value in names.items()}
    tensors["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(2, 2)
    tensors["model.layers.0.mlp.down_proj.weight_scale"] = torch.ones(1)  # a weight's scale is not ours
    save_file(tensors, folder / "model-00001-of-00001.safetensors")
    return folder


@pytest.mark.parametrize("suffix", ["self_attn.k_scale", "self_attn.kv_scale", "self_attn.attn.k_scale"])
def test_scales_of_a_checkpoint_are_all_found(tmp_path: Path, suffix: str) -> None:
    """B48, first of three."""
    values = {f"model.layers.{i}.{suffix}": 0.01 * (i + 1) for i in range(3)}
    scales, report = load_scales(checkpoint(tmp_path / "c", values), 3, strict=True)
    assert (report.found, report.layers) == (3, 3)
    assert scales.kv_scale == pytest.approx((0.01, 0.02, 0.03))
    assert scales.q_scale == (1.0, 1.0, 1.0)


def test_renamed_scales_are_named(tmp_path: Path) -> None:
    """B48, second: no name is understood."""
    values = {f"model.layers.{i}.self_attn.key_scale": 0.01 * (i + 1) for i in range(3)}
    folder = checkpoint(tmp_path / "c", values)
    with pytest.warns(UserWarning, match="0 of 3") as caught:
        scales, report = load_scales(folder, 3)
    assert report.found == 0
    assert report.missing == tuple(f"model.layers.{i}.self_attn.kv_scale" for i in range(3))
    assert report.unknown == tuple(sorted(values))
    assert "not understood: model.layers.0.self_attn.key_scale" in str(caught[0].message)
    assert scales.kv_scale == (1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"0 of 3 layers; missing: model\.layers\.0\.self_attn\.kv_scale"):
        load_scales(folder, 3, strict=True)


def test_a_missing_layer_is_named(tmp_path: Path) -> None:
    """B48, third."""
    folder = checkpoint(tmp_path / "c", {f"model.layers.{i}.self_attn.k_scale": 0.01 * (i + 1) for i in (0, 2)})
    with pytest.warns(UserWarning, match=r"2 of 3 layers; missing: model\.layers\.1\.self_attn\.kv_scale"):
        scales, report = load_scales(folder, 3)
    assert (report.found, report.missing) == (2, ("model.layers.1.self_attn.kv_scale",))
    assert scales.kv_scale == pytest.approx((0.01, 1.0, 0.03))
    with pytest.raises(ValueError, match="2 of 3"):
        load_scales(folder, 3, strict=True)


def test_a_value_scale_of_its_own_is_flagged(tmp_path: Path) -> None:
    values = {"model.layers.0.self_attn.k_scale": 0.01, "model.layers.0.self_attn.v_scale": 0.02}
    with pytest.warns(UserWarning, match=r"v_scale differs from k_scale in layers \[0\]"):
        load_scales(checkpoint(tmp_path / "c", values), 1)
    values["model.layers.0.self_attn.v_scale"] = 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_scales(checkpoint(tmp_path / "d", values), 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.5, 0.0])
def test_unusable_scales_count_as_missing(tmp_path: Path, bad: float) -> None:
    values = {f"model.layers.{i}.self_attn.k_scale": 0.02 for i in range(3)} | {"model.layers.1.self_attn.k_scale": bad}
    with pytest.warns(UserWarning, match="unusable kv_scale in layer 1"):
        scales, report = load_scales(checkpoint(tmp_path / "c", values), 3)
    assert report.found == 2
    assert scales.kv_scale[1] == 1.0
    with pytest.raises(ValueError, match="kv_scale: expected a positive finite number in layer 0"):
        Scales((1.0,), (bad,))


def test_files_that_are_no_scale_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="path: expected a scale file or a checkpoint folder"):
        load_scales(tmp_path / "none.json", 3)
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r'other\.json: expected a file with "format"'):
        load_scales(tmp_path / "other.json", 3)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: expected safetensors files in the folder, got none"):
        load_scales(tmp_path / "empty", 3)
    with pytest.raises(ValueError, match="q_scale: expected one a layer as kv_scale has, 2, got 1"):
        Scales((1.0,), (1.0, 1.0))
