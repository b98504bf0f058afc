# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Train data/tiny-mla: a DeepSeek-V2-architecture language model on the generated problems of problems.py.

    python data/tiny-mla/train.py train --out OUT --seconds 360 --compile --workers 10    # OUT: shards and the rest
    python data/tiny-mla/train.py join OUT STAGE1                                         # one model.safetensors
    python data/tiny-mla/train.py train --stage 2 --init STAGE1 --out OUT2 --seconds 45 --lr 1.5e-3 --compile
    python data/tiny-mla/train.py join OUT2 data/tiny-mla
    python data/tiny-mla/train.py evaluate data/tiny-mla          # exact match through transformers, in bf16

Needs torch and transformers only. The model is written here for speed (rotary embedding in real numbers, V padded so
that flash attention takes it, compiled decoder layers) with the parameter names of transformers' DeepseekV2ForCausalLM,
which loads the result: after training, the saved checkpoint is loaded there, its logits are compared and its exact
match counted.
Seeds are fixed; the number of steps depends on the machine's speed (`--seconds`) unless `--steps` fixes it.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import problems as P

BOS, EOS, PAD, VOCAB = 256, 257, 258, 259  # tokens 0 to 255 are the bytes
ANSWER = 1 << 12  # flag on a target token: part of a worked answer
QUESTION_WEIGHT = 0.2  # loss weight of tokens outside answers: names and numbers of a question cannot be foreseen
SHORT, LONG = 1024, 2048  # row lengths; every third step trains LONG rows, which are few-shot-like documents


def config(args: argparse.Namespace) -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        vocab_size=VOCAB,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        first_k_dense_replace=args.layers,  # dense MLPs only: the three expert numbers below are never used
        n_routed_experts=1,
        n_shared_experts=1,
        num_experts_per_tok=1,
        max_position_embeddings=LONG,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved rotary embedding of x[..., T, 64] with cos and sin [T, 32]."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.heads, self.nope, self.rope, self.v, self.rank = (
            c.num_attention_heads,
            c.qk_nope_head_dim,
            c.qk_rope_head_dim,
            c.v_head_dim,
            c.kv_lora_rank,
        )
        self.q_proj = nn.Linear(c.hidden_size, self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = Norm(self.rank, 1e-6)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.v), bias=False)
        self.o_proj = nn.Linear(self.heads * self.v, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, -1).transpose(1, 2)
        q = torch.cat((q[..., : self.nope], rotate(q[..., self.nope :], cos, sin)), -1)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split((self.rank, self.rope), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(b, t, self.heads, -1).transpose(1, 2)
        k_nope, v = kv.split((self.nope, self.v), -1)
        k_pe = rotate(k_pe[:, None], cos, sin).to(k_nope.dtype)
        k = torch.cat((k_nope, k_pe.expand(b, self.heads, t, self.rope)), -1)
        v = F.pad(v, (0, k.shape[-1] - self.v))  # flash attention wants one head size
        out = F.scaled_dot_product_attention(q.to(v.dtype), k, v, is_causal=True)[..., : self.v]
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """The names below are those of DeepseekV2ForCausalLM."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.model.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.model.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        half = c.qk_rope_head_dim // 2
        frequency = c.rope_parameters["rope_theta"] ** (-torch.arange(half).double() / half)
        angle = torch.arange(c.max_position_embeddings).double()[:, None] * frequency
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * c.num_hidden_layers) if last else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        t = tokens.shape[1]
        for layer in self.model.layers:
            x = layer(x, self.cos[:t], self.sin[:t])
        return self.lm_head(self.model.norm(x))


def row(parts: list[tuple[str, str]], end: list[int]) -> list[np.ndarray]:
    """Token arrays of (prompt, answer) parts, each followed by `end`; answers and their ends carry the ANSWER flag."""
    arrays = []
    for prompt, answer in parts:
        arrays.append(np.frombuffer(prompt.encode(), np.uint8).astype(np.int16))
        tail = np.concatenate((np.frombuffer(answer.encode(), np.uint8).astype(np.int16), np.array(end, np.int16)))
        arrays.append(tail | ANSWER if answer else tail)
    return arrays


def batch(split: str, index: int, rows: int, length: int, stage: int) -> np.ndarray:
    """[rows, length + 1] int16 tokens with flags; `index` is the seed."""
    mix = P.stage_mix(P.STAGES[stage])
    out = np.empty((rows, length + 1), np.int16)
    for i in range(rows):
        seed = index * rows + i
        if length == LONG:
            arrays = row(P.document_parts(split, seed, length + 1, P.STAGES[stage]), [10, 10])
        else:
            source, arrays = P.problems(split, seed, mix), []
            while sum(map(len, arrays)) <= length:
                problem = next(source)
                arrays += row([(problem.prompt, " " + problem.answer)], [EOS])
        out[i] = np.concatenate(arrays)[: length + 1]
    return out


def shape(step: int, tokens: int) -> tuple[int, int]:
    length = LONG if step % 3 == 2 else SHORT
    return max(1, tokens // length), length


def batches(pool: Any, tokens: int, stage: int, ahead: int = 48) -> Iterator[np.ndarray]:
    """Training batches in order, made by the pool's processes a little ahead of use."""
    queue: deque[Any] = deque()
    step = 0
    while True:
        while len(queue) < ahead:
            queue.append(pool.apply_async(batch, ("train", step, *shape(step, tokens), stage)))
            step += 1
        yield queue.popleft().get()


def loss_of(model: Callable[[Tensor], Tensor], flagged: Tensor) -> tuple[Tensor, Tensor]:
    """(weighted mean loss, mean loss of answer tokens), in nats a token."""
    tokens, answer = (flagged & (ANSWER - 1)).long(), (flagged[:, 1:] & ANSWER) != 0
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view_as(answer)
    weight = torch.where(answer, 1.0, QUESTION_WEIGHT)
    return (loss * weight).sum() / weight.sum(), (loss * answer).sum() / answer.sum()


def tokenizer() -> Any:
    """Byte-level tokenizer: token i is byte i, then three specials. Adds nothing to a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The ByteLevel alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocab = {alphabet[byte]: byte for byte in range(256)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>", "<pad>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        padding_side="left",
        model_max_length=LONG,
        clean_up_tokenization_spaces=False,
    )


def save(model: Model, c: Any, out: Path) -> None:
    """The checkpoint in bf16, in shards of 15 MB at the most, as transformers loads it."""
    from transformers import DeepseekV2ForCausalLM

    state = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    shell = DeepseekV2ForCausalLM(c).to(torch.bfloat16)
    shell.load_state_dict(state, strict=True)
    shell.generation_config.pad_token_id = PAD
    shell.save_pretrained(out, max_shard_size="15MB")
    tokenizer().save_pretrained(out)


def strict_match(text: str) -> str:
    found = re.search(r"#### (\-?[0-9\.\,]+)", text)
    return found.group(1) if found else ""


@torch.no_grad()
def exact_match(folder: Path, items: list[P.Problem], device: str, size: int, new_tokens: int) -> list[dict[str, Any]]:
    """Greedy answers of the saved checkpoint in bf16 through transformers, one dict a problem."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text_of = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    rows = []
    for start in range(0, len(items), size):
        part = items[start : start + size]
        inputs = text_of([p.prompt for p in part], return_tensors="pt", padding=True)
        ids, mask = inputs["input_ids"].to(device), inputs["attention_mask"].to(device)
        got = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        for problem, tokens in zip(part, got[:, ids.shape[1] :].cpu(), strict=True):
            text = text_of.decode(tokens, skip_special_tokens=True).split("\n\n")[0]
            right = strict_match(text) == strict_match(problem.answer)
            rows.append({"level": problem.level, "steps": problem.steps, "template": problem.template, "right": right})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["exact match by level (rows) and steps (columns)"]
    for level in P.LEVELS:
        cells = []
        for steps in range(1, P.MAX_STEPS + 1):
            cell = [r["right"] for r in rows if (r["level"], r["steps"]) == (level, steps)]
            cells.append(f"{sum(cell) / len(cell):5.2f}" if cell else "    -")
        lines.append(f"{level}  " + " ".join(cells))
    for template in P.TEMPLATES:
        cell = [r["right"] for r in rows if r["template"] == template]
        lines.append(f"{template:8s} {sum(cell) / max(1, len(cell)):.3f} of {len(cell)}")
    lines.append(f"all {sum(r['right'] for r in rows) / len(rows):.4f} of {len(rows)}")
    return "\n".join(lines)


def train(args: argparse.Namespace) -> None:
    pool = multiprocessing.get_context("fork").Pool(args.workers)  # before CUDA starts
    exam = pool.apply_async(P.heldout, (args.evaluate,))
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    c = config(args)
    model = Model(c).to(device)
    earlier: list[dict[str, Any]] = []
    if args.init:
        from safetensors.torch import load_file

        model.load_state_dict({k: v.float() for k, v in load_file(args.init / "model.safetensors").items()})
        earlier = json.loads((args.init / "training.json").read_text(encoding="utf-8"))["stages"]
    weights = sum(p.numel() for p in model.parameters())
    print(f"{weights / 1e6:.2f} M weights, {2 * weights / 1e6:.1f} MB in bf16, {device}", flush=True)
    if args.compile:
        torch._dynamo.config.recompile_limit = 64
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.98),
        fused=device == "cuda",
    )
    held = [
        torch.from_numpy(batch("calibration", 0, *shape(s, args.tokens // 4), args.stage)).to(device) for s in (0, 2)
    ]

    def held_losses() -> dict[str, float]:
        eager = torch.compiler.set_stance("force_eager")  # not worth a compilation of their shapes
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"), eager:
            losses = [loss_of(model, rows)[1].item() for rows in held]
        return dict(zip(("heldback_short", "heldback_long"), (round(x, 4) for x in losses), strict=True))

    begun = time.perf_counter()
    curve: list[dict[str, float]] = []
    recent: list[Tensor] = []
    start = begun
    step = seen = 0
    saved = False
    for flagged in batches(pool, args.tokens, args.stage):
        if step == args.warm:  # the clock of the schedule starts when every shape is compiled
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            print(f"ready after {start - begun:.0f} s", flush=True)
        elapsed = time.perf_counter() - start if step > args.warm else 0.0
        progress = step / args.steps if args.steps else elapsed / args.seconds
        if progress >= 1 or elapsed > args.seconds:
            break
        rate = args.lr * min(1.0, (step + 1) / 200) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        data = torch.from_numpy(flagged).to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss, answer_loss = loss_of(model, data)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(torch.stack((loss.detach(), answer_loss.detach())))
        step, seen = step + 1, seen + data.shape[0] * (data.shape[1] - 1)
        if step % args.every == 0:
            mean = torch.stack(recent).mean(0).tolist()
            recent.clear()
            point = {"step": step, "seconds": round(time.perf_counter() - start, 2), "lr": round(rate, 7)}
            point |= {"loss": round(mean[0], 4), "answer_loss": round(mean[1], 4)}
            if step % (5 * args.every) == 0:
                point |= held_losses()
                print(json.dumps(point), flush=True)
            curve.append(point)
        if not saved and progress > 0.5:
            save(model, c, args.out)
            saved = True
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    save(model, c, args.out)
    import transformers

    places = {str(args.out): "OUT", str(args.init): "STAGE1"}
    words = [places.get(word, word) for word in sys.argv[1:]]
    record: dict[str, Any] = {
        "stage": args.stage,
        "command": "python data/tiny-mla/train.py " + " ".join(words),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "weights": weights,
        "seed": args.seed,
        "steps": step,
        "tokens": seen,
        "seconds_training": round(seconds, 1),
        "seconds_before_schedule": round(start - begun, 1),
        "loss": curve,
    }

    def write() -> None:
        text = json.dumps({"stages": [*earlier, record]}, indent=1) + "\n"
        (args.out / "training.json").write_text(text, encoding="utf-8")

    write()
    print(f"{step} steps, {seen / 1e6:.1f} M tokens, {seconds:.0f} s, saved", flush=True)

    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(device).eval()
    mine = Model(c).to(device)
    mine.load_state_dict(again.state_dict())
    probe = (held[1][:2, :256] & (ANSWER - 1)).long()
    with torch.no_grad():
        torch.set_float32_matmul_precision("highest")
        record["logits_max_difference_fp32"] = (again(probe).logits - mine(probe)).abs().max().item()
    print(f"logits against transformers, float32: {record['logits_max_difference_fp32']:.2e}", flush=True)
    write()
    if args.evaluate:
        test = exam.get()
        pool.terminate()
        rows = exact_match(args.out, test, device, args.evaluate_batch, args.new_tokens)
        share = sum(r["right"] for r in rows) / len(rows)
        record["heldout_exact_match"] = {
            "n": len(rows),
            "value": share,
            "stderr": (share * (1 - share) / len(rows)) ** 0.5,
        }
        record["heldout_by_level_and_steps"] = [
            {"level": level, "steps": steps, "n": len(cell), "exact_match": sum(cell) / len(cell)}
            for level in P.LEVELS
            for steps in range(1, P.MAX_STEPS + 1)
            if (cell := [r["right"] for r in rows if (r["level"], r["steps"]) == (level, steps)])
        ]
        write()
        print(table(rows), flush=True)


def join(source: Path, target: Path) -> None:
    """Join the shards of `source` to one file in `target`, beside config, tokenizer and training record."""
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Tensor] = {}
    for shard in sorted(source.glob("model*.safetensors")):
        tensors |= load_file(shard)
    save_file(dict(sorted(tensors.items())), target / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "training.json"):
        (target / name).write_bytes((source / name).read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny MLA model, join its shards, or evaluate it.")
    commands = parser.add_subparsers(dest="command", required=True)
    t = commands.add_parser("train")
    t.add_argument("--out", type=Path, required=True)
    t.add_argument("--stage", type=int, choices=list(P.STAGES), default=1, help="which problems: see problems.STAGES")
    t.add_argument("--init", type=Path, help="folder of the joined checkpoint to go on from")
    t.add_argument("--seconds", type=float, default=330.0, help="length of the schedule, and its limit")
    t.add_argument("--steps", type=int, default=0, help="fix the number of steps (0: as many as --seconds allows)")
    t.add_argument("--warm", type=int, default=12, help="steps before the schedule's clock starts")
    t.add_argument("--tokens", type=int, default=65536, help="tokens a step")
    t.add_argument("--lr", type=float, default=2e-3)
    t.add_argument("--seed", type=int, default=20261130)
    t.add_argument("--hidden", type=int, default=256)
    t.add_argument("--layers", type=int, default=6)
    t.add_argument("--heads", type=int, default=4)
    t.add_argument("--workers", type=int, default=8)
    t.add_argument("--every", type=int, default=50)
    t.add_argument("--compile", action="store_true")
    t.add_argument("--evaluate", type=int, default=1000, help="held-out problems to answer at the end")
    t.add_argument("--evaluate-batch", type=int, default=1200)
    t.add_argument("--new-tokens", type=int, default=300)
    e = commands.add_parser("evaluate")
    e.add_argument("folder", type=Path)
    e.add_argument("--count", type=int, default=P.HELDOUT)
    e.add_argument("--batch", type=int, default=500)
    j = commands.add_parser("join")
    j.add_argument("source", type=Path)
    j.add_argument("target", type=Path)
    args = parser.parse_args()
    if args.command == "train":
        args.out.mkdir(parents=True, exist_ok=True)
        train(args)
    elif args.command == "evaluate":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        print(table(exact_match(args.folder, P.heldout(args.count), device, args.batch, 400)))
    else:
        join(args.source, args.target)


if __name__ == "__main__":
    main()
