# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""What `load_model` says to a checkpoint that is not there, or not whole, and to a device that torch does not have."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mla_kernels.absorbed import load_model

TINY = Path(__file__).parents[1] / "data" / "tiny-mla"


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def remove(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def index_of_two(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "checkpoint"))


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (remove("config.json"), FileNotFoundError, "expected a checkpoint folder with config.json, got .* without it"),
        (write("config.json", b'{"model_type": '), ValueError, r"expected JSON in .*config\.json, got Expecting value"),
        (write("config.json", b"\xff"), ValueError, r"expected JSON in .*config\.json, got .*codec"),
        (write("config.json", b"[1]"), ValueError, "expected an architecture of deepseek_v2.*got None as model_type"),
        (write("config.json", b"{}"), ValueError, "expected an architecture of deepseek_v2.*got None as model_type"),
        (
            write("config.json", b'{"model_type": "new"}'),
            ValueError,
            "expected an architecture .*got 'new' as model_ty",
        ),
        (
            remove("model.safetensors"),
            FileNotFoundError,
            r"expected weights \(\*\.safetensors\) in .*, got none; download",
        ),
        (
            index_of_two,
            FileNotFoundError,
            r"expected all weight files that .* names, got none called model-00002-of-00002\.safetensors \(1 missing\)",
        ),
        (
            write("model.safetensors", (TINY / "model.safetensors").read_bytes()[:200_000]),
            ValueError,
            r"expected a whole safetensors file, got .*model\.safetensors of 200000 bytes .*; download it again",
        ),
        (
            write("model.safetensors", b"abc"),
            ValueError,
            r"expected a whole safetensors file, got .*model\.safetensors of 3 bytes .*; download it again",
        ),
    ],
)
def test_damaged_checkpoint(
    checkpoint: Path, damage: Callable[[Path], object], kind: type[Exception], message: str
) -> None:
    damage(checkpoint)
    with pytest.raises(kind, match=rf"^path_or_id: {message}"):
        load_model(checkpoint)


def test_folder_without_a_tokenizer_loads_with_a_warning(checkpoint: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert load_model(checkpoint).tokenizer is not None
    remove("tokenizer.json", "tokenizer_config.json")(checkpoint)
    with pytest.warns(UserWarning, match="path_or_id: expected a tokenizer in .*; prompts must be token ids then"):
        model = load_model(checkpoint)
    assert model.tokenizer is None
    assert model.tokens([1, 2]).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "got '', which is neither"),
        ("./nope", "got './nope', which is neither"),
        ("../nope/none", "got '../nope/none', which is neither"),
        ("data/tiny-mlaa", "got 'data/tiny-mlaa', which is neither; the nearest folder beside it is 'data/tiny-mla'"),
        ("./data/tiny_mla", "the nearest folder beside it is 'data/tiny-mla'"),
        ("data/tiny-mla/config.json", "got 'data/tiny-mla/config.json', which is a file"),
        (Path("data/tiny"), "the nearest folder beside it is 'data/tiny-mla'"),
    ],
)
def test_a_path_is_never_asked_of_the_hub(name: str | Path, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.chdir(TINY.parents[1])
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("asked the hub"))
    start = "^path_or_id: expected a checkpoint folder or a hub id such as deepseek-ai/[^ ]*, got .*"
    with pytest.raises(FileNotFoundError, match=start + re.escape(message.removeprefix("got ")) + "$"):
        load_model(name)


@pytest.mark.parametrize("device", ["cuda", "cuda:3", "nope", "xpu", torch.device("cuda")])
def test_device_that_is_not_here(device: str | torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=rf"^device: expected one of those that torch has here, cpu, got '{device}'; pass"
    ):
        load_model(TINY, device=device)


def test_device_number_above_those_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"^device: expected one of .* cpu, cuda:0, cuda:1, got 'cuda:2'; pass"):
        load_model(TINY, device="cuda:2")
