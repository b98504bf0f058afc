# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Models to serve without their weights: a published geometry, and a tokenizer whose texts keep their token counts."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["BACKENDS", "CONFIGS", "KV_CACHE_DTYPES", "nearest", "read_config", "write_model"]

ROOT = Path(__file__).resolve().parents[2]
#: Names of `--config`, and the files of their geometry.
CONFIGS = {name: ROOT / "data" / "configs" / f"{name}.json" for name in ("deepseek-v2-lite", "deepseek-v2")}
#: MLA decode backends by vLLM's names; CUTLASS_MLA is ours where the plugin is installed.
BACKENDS = (
    "CUTLASS_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "TRITON_MLA", "AMX_MLA", "CPU_MLA",
)  # fmt: skip
KV_CACHE_DTYPES = ("auto", "fp8")
WORDS = 100_000


def nearest(argument: str, name: str, known: Iterable[str]) -> str:
    """The message of a name that is not known, with the nearest one that is."""
    listed = list(known)
    close = difflib.get_close_matches(name, listed, n=1, cutoff=0.4)
    folded = [entry for entry in listed if entry.lower() == name.lower().replace("-", "_")]
    hint = f"; did you mean {(folded or close)[0]}?" if folded or close else ""
    return f"{argument}: expected {', '.join(listed)}, got {name!r}{hint}"


def read_config(name: str) -> dict[str, Any]:
    """A model's config.json, by a name of `CONFIGS` or the path of a JSON file.

    Raises:
        ValueError: for an unknown name, or a file that is no configuration with MLA.
    """
    path = CONFIGS.get(name, Path(name))
    if not path.is_file():
        if name in CONFIGS:
            raise ValueError(f"config: {path} is not there: bring data/configs beside the package, or give a path")
        raise ValueError(f"{nearest('config', name, CONFIGS)} (or the path of a config.json)")
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"config: {path.name} is no JSON: {error}") from None
    missing = [key for key in ("kv_lora_rank", "num_hidden_layers", "vocab_size") if key not in config]
    if missing:
        raise ValueError(f"config: {path.name} has no {missing[0]}: expected the config.json of a model with MLA")
    return dict(config)


def write_model(folder: str | os.PathLike[str], config: dict[str, Any]) -> Path:
    """Write `config` and a tokenizer into a folder that vLLM takes as a model with `--load-format dummy`.

    The tokenizer knows the words w0 to w99999, a token each, with blanks between: a random prompt is decoded and read
    again as exactly as many tokens, and prompts share no prefix. (Random prompts of the 256 tokens of a byte tokenizer
    repeat each other, so prefix caching would answer for the prefill.)
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    special = {"<s>": int(config.get("bos_token_id") or 0), "</s>": int(config.get("eos_token_id") or 1)}
    ids = [i for i in range(WORDS + 2) if i not in special.values()][:WORDS]
    words = {f"w{i}": i for i in ids if i < int(config["vocab_size"])}
    last = max(words, key=lambda word: words[word])
    words["w" * 32] = words.pop(last)  # vLLM refuses texts of more characters a token than the longest token has
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for text, i in special.items()
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {**words, **special}, "unk_token": "<s>"},
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>",
        "model_max_length": sys.maxsize, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    contents = {"config.json": config, "tokenizer.json": tokenizer, "tokenizer_config.json": settings}
    for name, content in contents.items():
        (target / name).write_text(json.dumps(content), encoding="utf-8")
    return target
