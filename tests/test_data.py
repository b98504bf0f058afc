# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The committed data: hashes, what made it, held-out problems apart from training, right answers, lm-eval's own run."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors import safe_open

from mla_kernels import model

ROOT = Path(__file__).parents[1]
DATA = ROOT / "data"
TINY, GSM = DATA / "tiny-mla", DATA / "gsm-tiny"


def load(path: Path) -> ModuleType:
    """A script beside its data, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generator() -> Iterator[ModuleType]:
    yield load(TINY / "problems.py")
    sys.modules.pop("problems", None)


@pytest.fixture(scope="module")
def test_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (GSM / "test.jsonl").read_text(encoding="utf-8").splitlines()]


# --- hashes and origin ---


def test_every_file_has_its_hash() -> None:
    """The list is that of the tree: nothing changed, nothing missing, nothing unlisted. `python data/hashes.py`."""
    listed = dict(reversed(line.split("  ", 1)) for line in (DATA / "SHA256SUMS").read_text().splitlines())
    tree = {path.relative_to(DATA).as_posix() for path in load(DATA / "hashes.py").files()}
    tracked = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--", "data"], capture_output=True, text=True, check=False
    ).stdout.split()
    if tracked:  # not where the tree was unpacked without its history
        unlisted = {name.removeprefix("data/") for name in tracked} - listed.keys() - {"README.md", "SHA256SUMS"}
        assert not unlisted
    assert tree == listed.keys()
    wrong = [
        name for name, digest in listed.items() if hashlib.sha256((DATA / name).read_bytes()).hexdigest() != digest
    ]
    assert not wrong, "changed without `python data/hashes.py`"


def test_readme_tells_of_every_file() -> None:
    text = (DATA / "README.md").read_text(encoding="utf-8")
    for line in (DATA / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ", 1)
        folder, _, leaf = name.rpartition("/")
        assert f"`{leaf}`" in text or f"`{folder}/`" in text, f"data/README.md does not mention {name}"
        if leaf.endswith((".safetensors", ".jsonl")):
            assert digest in text, f"data/README.md: the hash of {name} is missing or old"


def test_readme_states_what_the_records_say() -> None:
    text = (DATA / "README.md").read_text(encoding="utf-8")
    stages = json.loads((TINY / "training.json").read_text())["stages"]
    assert [stage["stage"] for stage in stages] == [1, 2]
    for stage in stages:
        assert stage["device"] == "NVIDIA H200"
        assert stage["command"] in text
        assert f"{stage['steps']:,}".replace(",", " ") in text
        assert stage["versions"]["torch"] in text
    evaluation = json.loads((DATA / "measurements/cpu/eval.json").read_text())
    for row in evaluation["rows"]:
        assert f"{row['exact_match']:.3f} ± {row['stderr']:.3f}" in text


def test_training_went_down_and_the_checkpoint_is_transformers() -> None:
    stages = json.loads((TINY / "training.json").read_text())["stages"]
    for stage in stages:
        assert [point["step"] for point in stage["loss"]] == sorted(point["step"] for point in stage["loss"])
        assert stage["loss"][-1]["answer_loss"] < 0.2 * stage["loss"][0]["answer_loss"]
        assert stage["logits_max_difference_fp32"] < 1e-3  # training code against transformers, float32 on the GPU


# --- the model ---


def test_model_has_the_kernels_geometry_and_size() -> None:
    config = json.loads((TINY / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV2ForCausalLM"]
    expected = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": None,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "first_k_dense_replace": 6,
        "vocab_size": 259,
    }
    assert {name: config[name] for name in expected} == expected
    path = TINY / "model.safetensors"
    assert path.stat().st_size <= 24e6
    with safe_open(path, framework="pt") as tensors:
        slices = [tensors.get_slice(name) for name in tensors.keys()]  # noqa: SIM118
        assert {part.get_dtype() for part in slices} == {"BF16"}
        assert len(slices) == 63


def test_tokenizer_is_bytes_and_nothing_else() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    assert len(tokenizer) == 259
    for text in ("Question: 3 * 14 = 42\nAnswer:", " #### 1,000.5 é 漢 \U0001f600\t  two  spaces\n\n", "a"):
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids(["<s>", "</s>", "<pad>"]) == [256, 257, 258]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.padding_side) == (257, 258, "left")


def test_model_reads_a_price_list_a_thousand_tokens_back() -> None:
    """Long contexts matter to this model: it copies prices from the top of a text and follows them when they change."""
    lm = model.load_model(TINY)
    texts = [json.loads(line)["text"] for line in (GSM / "documents.jsonl").read_text().splitlines()]
    pattern = re.compile(r"(?:Answer: |\n)a (\w+) costs (\d+) dollars\n")
    late = [(text, [m for m in pattern.finditer(text) if m.start() > 1000]) for text in texts]
    text, found = max(late, key=lambda pair: len(pair[1]))
    assert len(found) >= 5
    assert all(m.group(1) != found[0].group(1) for m in pattern.finditer(text[: found[0].start()]))  # only in the list
    price = found[0].group(2)
    other = price[:-1] + str(int(price[-1]) % 9 + 1)
    changed = text.replace(f"a {found[0].group(1)} costs {price} ", f"a {found[0].group(1)} costs {other} ", 1)
    assert changed != text
    for body, wanted in ((text, price), (changed, other)):
        start = found[0].start(2)
        (out,) = model.generate(lm, [body[:start]], max_new_tokens=len(price), formats="exact")
        assert bytes(out).decode() == wanted
    logits = model.propagated(lm, [text], "exact").logits[0]
    digits = [i for m in found for i in range(m.start(2), m.end(2))]
    right = [int(logits[i - 1].argmax()) == ord(text[i]) for i in digits]
    assert sum(right) / len(right) > 0.8


# --- the problems ---


def test_generator_writes_the_committed_files(generator: ModuleType, tmp_path: Path) -> None:
    generator.write(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        assert path.read_bytes() == (GSM / path.name).read_bytes(), path.name
    assert len(list(tmp_path.iterdir())) == 3


def test_heldout_problems_are_apart_from_training(generator: ModuleType, test_rows: list[dict[str, Any]]) -> None:
    assert len(test_rows) == len({row["question"] for row in test_rows}) == 1000
    keys = {generator.problem_key(row["template"], row["question"]) for row in test_rows}
    assert {generator.split_of(key) for key in keys} == {"heldout"}
    questions = {row["question"] for row in test_rows}
    for split, stage in (("train", 1), ("train", 2), ("calibration", 2)):
        mix = generator.stage_mix(generator.STAGES[stage])
        drawn = list(itertools.islice(generator.problems(split, 99, mix), 5000 if split == "train" else 400))
        assert {problem.split for problem in drawn} == {split}
        assert not keys & {problem.key for problem in drawn}
        assert not questions & {problem.question for problem in drawn}
    documents = [json.loads(line)["text"] for line in (GSM / "calibration.jsonl").read_text().splitlines()]
    assert not [q for q in questions for text in documents if q in text]


def test_the_split_sees_numbers_and_not_names(generator: ModuleType) -> None:
    """A held-out problem under other names is still no training problem; with other numbers it may be."""
    problem = next(generator.problems("heldout", 1))
    words = set(generator.NAMES) | set(generator.OBJECTS)
    renamed = re.sub(r"[A-Za-z]+", lambda m: "Zed" if m.group() in words else m.group(), problem.question)
    assert renamed != problem.question
    assert generator.problem_key(problem.template, renamed) == problem.key
    assert len({generator.split_of(f"shop:{i}") for i in range(100)}) == 3


def test_unknown_split_is_refused(generator: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"split: expected one of .* got 'test'"):
        next(generator.problems("test", 0))


def check_answer(row: dict[str, Any]) -> None:
    """Every step's arithmetic, the number of steps, and that the last step is the answer."""
    *lines, last = row["answer"].split("\n")
    assert len(lines) == row["steps"]
    for line in lines:
        match = re.match(r"(\d+) ([-+*/]) (\d+) = (\d+)( |$)", line)
        assert match, line
        a, b, c = int(match[1]), int(match[3]), int(match[4])
        assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[match[2]] == c, line
        assert c > 0
    assert last == f"#### {c}"
    asked = [int(number) for number in re.findall(r"\d+", row["question"])]
    assert set(asked) <= {int(n) for line in lines for n in re.findall(r"\d+", line)}  # every given number is used


def test_answers_are_right(test_rows: list[dict[str, Any]]) -> None:
    for row in test_rows:
        check_answer(row)
    wrong = dict(test_rows[0])
    wrong["answer"] = re.sub(r"= (\d+)", lambda m: f"= {int(m[1]) + 1}", wrong["answer"], count=1)
    with pytest.raises(AssertionError):
        check_answer(wrong)


def test_the_mix_leaves_room_below_and_above() -> None:
    """Exact match on all 1000 in bf16, as recorded, lies between 0.5 and 0.9 by two standard errors."""
    rows = json.loads((DATA / "measurements/cpu/eval.json").read_text())["rows"]
    (bf16,) = [row for row in rows if row["kv_cache_dtype"] == "bf16" and row["filter"] == "strict-match"]
    assert bf16["n"] == 1000
    assert bf16["exact_match"] - 2 * bf16["stderr"] > 0.5
    assert bf16["exact_match"] + 2 * bf16["stderr"] < 0.9


# --- lm-eval ---


@pytest.mark.slow
def test_lm_eval_runs_the_task(test_rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """lm_eval's command line on the shortest problems of levels 1 and 5: its filters, and its numbers against ours."""
    order = sorted(range(len(test_rows)), key=lambda i: len(test_rows[i]["question"]) + len(test_rows[i]["answer"]))
    chosen = [i for i in order if test_rows[i]["level"] == 1][:2] + [i for i in order if test_rows[i]["level"] == 5][:2]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "--model",
        "hf",
        "--model_args",
        "pretrained=data/tiny-mla,dtype=float32",
    ]
    command += ["--tasks", "gsm_tiny", "--include_path", "data/gsm-tiny", "--device", "cpu", "--batch_size", "4"]
    command += ["--samples", json.dumps({"gsm_tiny": chosen}), "--log_samples", "--output_path", str(tmp_path / "out")]
    environment = {**os.environ, **offline, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_gsm_tiny_*.jsonl")
    logged = [json.loads(line) for line in samples.read_text().splitlines()]
    assert {sample["filter"] for sample in logged} == {"strict-match", "flexible-extract"}
    assert len(logged) == 2 * len(chosen)

    answers = model.answer_problems(model.load_model(TINY), [test_rows[i] for i in chosen], formats="exact")
    ours = dict(zip([test_rows[i]["question"] for i in chosen], answers, strict=True))
    for sample in logged:
        answer, name = ours[sample["doc"]["question"]], sample["filter"].replace("-", "_")
        assert sample["resps"][0][0].strip() == answer["text"].strip()
        assert bool(sample["exact_match"]) == answer[name], sample["filter"]
    assert {bool(sample["exact_match"]) for sample in logged} == {True, False}  # some right, some wrong


# --- the training script ---


def test_training_code_is_the_same_model(generator: ModuleType) -> None:
    """The network that train.py trains, with the committed weights, against transformers' DeepseekV2ForCausalLM."""
    import torch
    from transformers import AutoModelForCausalLM

    train = load(TINY / "train.py")
    theirs = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    ours = train.Model(theirs.config)
    ours.load_state_dict(theirs.state_dict())
    ids = torch.tensor([list(generator.document("train", 5, 128).encode()[:128])])
    with torch.no_grad():
        # float32 in another order; logits reach 40, and 2^-24 × √(10 products × 6 layers × 2048) × 40 = 8e-4
        assert torch.allclose(ours(ids), theirs(ids).logits, rtol=0.0, atol=8e-4)


def test_training_rows_flag_answers_and_come_from_training(generator: ModuleType) -> None:
    train = load(TINY / "train.py")
    for length in (train.SHORT, train.LONG):
        rows = train.batch("train", 3, 2, length, 2)
        assert rows.shape == (2, length + 1)
        assert (rows == train.batch("train", 3, 2, length, 2)).all()
        for row in rows:
            tokens, flags = row & (train.ANSWER - 1), (row & train.ANSWER) != 0
            text = bytes(int(t) if t < 256 else 0 for t in tokens).decode()
            answers = re.findall(r"Answer:([^\0]*?#### \d+)(?:\0|\n\n)", text)
            assert len(answers) >= 2
            flagged = "".join(chr(t) if t < 256 else "\0" for t in tokens[flags])
            assert all(answer in flagged for answer in answers)
            assert "Question" not in flagged
