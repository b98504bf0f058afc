# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Generated arithmetic word problems with worked steps, in three disjoint splits. Standard library only.

A problem has a question, a worked answer (one step a line, such as `3 * 14 = 42 apples`) that ends in `#### 42`, a
number of steps (1 to 10), a level (1 to 5: how large the numbers are) and a template. Its key is the template and every
number of the question in order; the key's SHA-256 decides its split, so no problem of one split has the template
and the numbers of a problem of another, whatever the names and objects are.

    python data/tiny-mla/problems.py data/gsm-tiny     # writes test.jsonl, calibration.jsonl and documents.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = words(
    "Mia Leo Ava Noah Zoe Omar Ines Hugo Nora Amir Lena Ravi Tara Ivan Yuki Sami Elsa Otto Rosa Finn Mei Kofi Anna "
    "Jude Lila Marc Dina Paul Sara Theo Vera Carl Nina Ben Aya Tom Emma Luis Kira Max"
)
OBJECTS = words(
    "apples pencils stickers marbles coins cards shells buttons stamps books candles cookies beads tickets plums "
    "stones balloons ribbons erasers lemons badges keys bottles carrots tiles spoons muffins pins nuts eggs"
)
GOODS = words("pen mug hat coat lamp kite bowl drum vase belt toy map cake pie rope jar fan bell plant rug")
BOXES = words("boxes bags packs baskets crates jars")
PLACES = words("market school library harbour museum station farm lake castle mill")
BAKES = words("rolls pies cakes buns tarts muffins loaves scones")

SPLITS = ("train", "calibration", "heldout")
LEVELS = (1, 2, 3, 4, 5)
ADDEND = {1: (2, 30), 2: (10, 200), 3: (50, 2000), 4: (200, 9000), 5: (1000, 90000)}  # added or taken away
FACTOR = {  # multiplied
    1: ((2, 9), (2, 9)),
    2: ((2, 9), (11, 99)),
    3: ((11, 39), (11, 59)),
    4: ((11, 79), (12, 99)),
    5: ((11, 99), (101, 999)),
}
CAP = {1: 150, 2: 1500, 3: 9999, 4: 30000, 5: 999999}  # no number of a problem exceeds this


@dataclass(frozen=True)
class Stage:
    """What a stage of training draws: the weight of each level, 1 to `max_steps` steps alike, and whether answers to
    a price list repeat the price before they use it."""

    levels: dict[int, float]
    max_steps: int
    price_lines: bool


STAGES = {
    1: Stage({1: 1.0, 2: 1.0, 3: 1.0}, 8, False),
    2: Stage({1: 1.0, 2: 1.0, 3: 1.5, 4: 2.5, 5: 1.5}, 10, True),
}
LAST = STAGES[2]
MAX_STEPS = LAST.max_steps


class Redo(Exception):
    """The draw left the range of its level: draw again."""


@dataclass(frozen=True)
class Problem:
    """One problem. `answer` is the worked answer with its last line `#### <final>`."""

    question: str
    answer: str
    template: str
    level: int
    steps: int

    @property
    def key(self) -> str:
        return problem_key(self.template, self.question)

    @property
    def split(self) -> str:
        return split_of(self.key)

    @property
    def prompt(self) -> str:
        return f"Question: {self.question}\nAnswer:"

    @property
    def text(self) -> str:
        return f"{self.prompt} {self.answer}"


def problem_key(template: str, question: str) -> str:
    """The template and all numbers of the question, in order."""
    return template + ":" + ",".join(re.findall(r"\d+", question))


def split_of(key: str) -> str:
    """The split that a key belongs to: heldout 1 in 16, calibration 1 in 16, train the rest."""
    bucket = hashlib.sha256(key.encode()).digest()[0] % 16
    return {0: "heldout", 1: "calibration"}.get(bucket, "train")


class Work:
    """The worked steps of one problem, and the random draws that make it."""

    def __init__(self, rng: random.Random, level: int, steps: int) -> None:
        self.rng, self.level, self.steps, self.lines = rng, level, steps, list[str]()

    @property
    def left(self) -> int:
        return self.steps - len(self.lines)

    def addend(self) -> int:
        return self.rng.randint(*ADDEND[self.level])

    def factors(self) -> tuple[int, int]:
        a, b = (self.rng.randint(*bounds) for bounds in FACTOR[self.level])
        return a, b

    def step(self, a: int, sign: str, b: int, what: str) -> int:
        """Write one step, such as `3 * 14 = 42 apples`, and return its result."""
        if sign == "/":
            if b == 0 or a % b:
                raise Redo
            value = a // b
        else:
            value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        if not 0 < value <= CAP[self.level]:
            raise Redo
        self.lines.append(f"{a} {sign} {b} = {value} {what}".rstrip())
        return value

    def names(self, count: int) -> list[str]:
        return self.rng.sample(NAMES, count)


def collect(w: Work) -> tuple[str, int]:
    """A running total through buying, giving, boxes, doubling and sharing."""
    rng, (who, other), things = w.rng, w.names(2), w.rng.choice(OBJECTS)
    total = w.addend()
    text = [rng.choice([f"{who} has {total} {things}.", f"{who} starts with {total} {things}."])]
    while w.left:
        kind = rng.choice(words("gain gain loss loss box box share double"))
        if kind == "gain":
            k = w.addend()
            text.append(
                rng.choice(
                    [
                        f"{who} buys {k} more.",
                        f"{other} gives {who} {k} more.",
                        f"{who} finds {k} more.",
                        f"Then {who} gets {k} {things} from {other}.",
                    ]
                )
            )
            total = w.step(total, "+", k, things)
        elif kind == "loss":
            k = w.addend()
            text.append(
                rng.choice([f"{who} gives {k} to {other}.", f"{who} loses {k} of them.", f"{who} sells {k} {things}."])
            )
            total = w.step(total, "-", k, things)
        elif kind == "box" and w.left > 1:
            m, k = w.factors()
            box = rng.choice(BOXES)
            if rng.random() < 0.5:
                text.append(f"{who} buys {m} {box} with {k} {things} each.")
                total = w.step(total, "+", w.step(m, "*", k, f"in the {box}"), things)
            else:
                text.append(f"{who} fills {m} {box} with {k} {things} each and sells them.")
                total = w.step(total, "-", w.step(m, "*", k, f"in the {box}"), things)
        elif kind == "share":
            divisors = [g for g in range(2, 10) if total % g == 0]
            if divisors:
                g = rng.choice(divisors)
                text.append(f"{who} splits them equally into {g} piles and keeps one pile.")
                total = w.step(total, "/", g, things)
        elif kind == "double":
            g = rng.choice((2, 3))
            text.append(f"Then {who} wins so many that there are {g} times as many {things} as before.")
            total = w.step(total, "*", g, things)
    text.append(rng.choice([f"How many {things} does {who} have now?", f"How many {things} are left with {who}?"]))
    return " ".join(text), total


def shop(w: Work) -> tuple[str, int]:
    """Several goods at a price each, their sum, perhaps paid from a larger sum."""
    rng, (who,) = w.rng, w.names(1)
    pays = w.steps % 2 == 0
    goods = rng.sample(GOODS, (w.steps + 1) // 2)
    bought, prices = [], []
    for good in goods:
        n, price = w.factors()
        bought.append(f"{n} {good}s at {price} dollars each")
        prices.append((n, price, good))
    total = 0
    for n, price, good in prices:
        cost = w.step(n, "*", price, f"dollars for the {good}s")
        total = w.step(total, "+", cost, "dollars") if total else cost
    listing = ", ".join(bought[:-1]) + (" and " if len(bought) > 1 else "") + bought[-1]
    if not pays:
        return f"At the {rng.choice(PLACES)} {who} buys {listing}. How many dollars does {who} pay?", total
    purse = total + w.addend()
    rest = w.step(purse, "-", total, "dollars left")
    return f"{who} has {purse} dollars and buys {listing}. How many dollars does {who} have left?", rest


def compare(w: Work) -> tuple[str, int]:
    """A chain of people, each compared with the one before; then the last one, or the sum."""
    rng, things = w.rng, w.rng.choice(OBJECTS)
    chain = w.steps if w.steps < 3 else rng.choice([w.steps, (w.steps + 1) // 2] if w.steps % 2 == 0 else [w.steps])
    if chain > 5:
        raise Redo
    sums = w.steps - chain
    if sums not in (0, chain):
        raise Redo
    people = w.names(chain + 1)
    amounts = [w.addend()]
    text = [f"{people[0]} has {amounts[0]} {things}."]
    for before, who in itertools.pairwise(people):
        kind = rng.choice(("more", "fewer", "times"))
        if kind == "times":
            g = rng.randint(2, 5)
            text.append(f"{who} has {g} times as many {things} as {before}.")
            amounts.append(w.step(amounts[-1], "*", g, f"for {who}"))
        else:
            k = w.addend()
            text.append(f"{who} has {k} {kind} {things} than {before}.")
            amounts.append(w.step(amounts[-1], "+" if kind == "more" else "-", k, f"for {who}"))
    if not sums:
        return " ".join([*text, f"How many {things} does {people[-1]} have?"]), amounts[-1]
    total = amounts[0]
    for amount in amounts[1:]:
        total = w.step(total, "+", amount, "together")
    return " ".join([*text, f"How many {things} do they have together?"]), total


def travel(w: Work) -> tuple[str, int]:
    """Legs of a trip by speed and hours; the sum, or what remains of the whole way."""
    rng, (who,) = w.rng, w.names(1)
    rests = w.steps % 2 == 0
    legs = [w.factors() for _ in range((w.steps + 1) // 2)]
    if len(legs) > 3:
        raise Redo
    ways = rng.sample(("by bike", "by bus", "by train", "by boat", "by car"), len(legs))
    text, total = [], 0
    for i, ((hours, speed), way) in enumerate(zip(legs, ways, strict=True)):
        text.append(f"{'Then ' if i else ''}{who} goes {way} for {hours} hours at {speed} km an hour.")
        way_km = w.step(hours, "*", speed, f"km {way}")
        total = w.step(total, "+", way_km, "km") if total else way_km
    if not rests:
        return " ".join([*text, f"How many km does {who} go in all?"]), total
    whole = total + w.addend()
    text.insert(0, f"The {rng.choice(PLACES)} is {whole} km away.")
    return " ".join([*text, "How many km remain?"]), w.step(whole, "-", total, "km remain")


def bake(w: Work) -> tuple[str, int]:
    """Trays times pieces, some sold, the rest packed; then the price of the packs."""
    rng, (who,), things = w.rng, w.names(1), w.rng.choice(BAKES)
    if not 2 <= w.steps <= 5:
        raise Redo
    trays, each = w.factors()
    total = w.step(trays, "*", each, things)
    text = [f"{who} bakes {trays} trays of {each} {things}."]
    if w.steps >= 3:
        sold = w.addend()
        total = w.step(total, "-", sold, things)
        text.append(f"{who} sells {sold} of them.")
    size = rng.choice([g for g in range(2, 10) if total % g == 0] or [0])
    packs = w.step(total, "/", size, "packs")
    text.append(f"The {'rest' if w.steps >= 3 else 'whole lot'} goes into packs of {size}.")
    if w.steps < 4:
        return " ".join([*text, "How many packs are there?"]), packs
    price = rng.randint(2, 9)
    money = w.step(packs, "*", price, "dollars")
    text.append(f"A pack costs {price} dollars.")
    if w.steps == 4:
        return " ".join([*text, "How many dollars do all packs bring?"]), money
    cost = w.addend()
    text.append(f"The flour costs {cost} dollars.")
    return " ".join([*text, "How many dollars are left after paying the flour?"]), w.step(money, "-", cost, "dollars")


def wages(w: Work) -> tuple[str, int]:
    """Hours a day times days times pay, then spending and saving."""
    rng, (who,) = w.rng, w.names(1)
    if w.steps > 5:
        raise Redo
    hours, pay = w.factors()
    money = w.step(hours, "*", pay, "dollars")
    text = [f"{who} works {hours} hours for {pay} dollars an hour."]
    while w.left:
        kind = rng.choice(("spends", "earns", "shares"))
        if kind == "shares":
            divisors = [g for g in range(2, 10) if money % g == 0]
            if divisors:
                g = rng.choice(divisors)
                text.append(f"{who} shares the money equally among {g} people, {who} being one of them.")
                money = w.step(money, "/", g, "dollars each")
        else:
            k = w.addend()
            text.append(f"{who} {kind} {k} dollars{' on food' if kind == 'spends' else ' more'}.")
            money = w.step(money, "-" if kind == "spends" else "+", k, "dollars")
    return " ".join([*text, f"How many dollars does {who} have?"]), money


TEMPLATES: dict[str, Callable[[Work], tuple[str, int]]] = {
    "collect": collect,
    "shop": shop,
    "compare": compare,
    "travel": travel,
    "bake": bake,
    "wages": wages,
}


def draw(rng: random.Random, level: int, steps: int) -> Problem:
    """One problem of any split with exactly `steps` steps."""
    while True:
        template = rng.choice(list(TEMPLATES))
        for _ in range(20):
            work = Work(rng, level, steps)
            try:
                question, final = TEMPLATES[template](work)
            except Redo:
                continue
            assert len(work.lines) == steps
            return Problem(question, "\n".join([*work.lines, f"#### {final}"]), template, level, steps)


def stage_mix(stage: Stage) -> dict[tuple[int, int], float]:
    """Weights of (level, steps) pairs of a stage."""
    return {(level, steps): weight for level, weight in stage.levels.items() for steps in range(1, stage.max_steps + 1)}


def problems(split: str, seed: int, mix: dict[tuple[int, int], float] | None = None) -> Iterator[Problem]:
    """Endless problems of one split. `mix` weighs (level, steps) pairs; None: as in the last stage of training."""
    if split not in SPLITS:
        raise ValueError(f"split: expected one of {SPLITS}, got {split!r}")
    pairs = mix or stage_mix(LAST)
    rng = random.Random(f"{split}-{seed}")
    choices, weights = list(pairs), list(pairs.values())
    while True:
        level, steps = rng.choices(choices, weights)[0]
        problem = draw(rng, level, steps)
        while problem.split != split:
            problem = draw(rng, level, steps)
        yield problem


def catalogue(rng: random.Random, level: int) -> tuple[str, list[tuple[str, int]]]:
    """A price list that later problems of the same document ask about."""
    prices = [(good, rng.randint(*FACTOR[level][1])) for good in rng.sample(GOODS, rng.randint(6, 12))]
    return "Prices: " + "; ".join(f"a {good} costs {price} dollars" for good, price in prices) + ".", prices


def catalogue_problem(rng: random.Random, level: int, prices: list[tuple[str, int]], price_lines: bool) -> Problem:
    """A problem that can be solved only by reading the price list at the top of its document."""
    while True:
        work, (who,) = Work(rng, level, 0), rng.sample(NAMES, 1)
        chosen = rng.sample(prices, rng.randint(1, 2))
        try:
            total, bought = 0, []
            for good, price in chosen:
                n = rng.randint(*FACTOR[level][0])
                bought.append(f"{n} {good}s")
                if price_lines:
                    work.lines.append(f"a {good} costs {price} dollars")
                cost = work.step(n, "*", price, f"dollars for the {good}s")
                total = work.step(total, "+", cost, "dollars") if total else cost
        except Redo:
            continue
        question = f"{who} buys {' and '.join(bought)} at the listed prices. How many dollars does {who} pay?"
        return Problem(question, "\n".join([*work.lines, f"#### {total}"]), "catalogue", level, len(work.lines))


def document_parts(split: str, seed: int, length: int, stage: Stage = LAST) -> list[tuple[str, str]]:
    """The (prompt, answer) pairs of one document: problems of one split, joined at least `length` bytes.

    Every second document opens with a price list, and half of its problems can be solved only by reading it. Those
    problems are drawn freely, not by split: they serve long documents only, never the problems of data/gsm-tiny/test.
    """
    rng = random.Random(f"document-{split}-{seed}")
    source = problems(split, rng.randrange(2**40), stage_mix(stage))
    parts: list[tuple[str, str]] = []
    level, prices = rng.choice(tuple(stage.levels)), list[tuple[str, int]]()
    if rng.random() < 0.5:
        opening, prices = catalogue(rng, level)
        parts.append((opening, ""))
    while sum(len(prompt) + len(answer) + 2 for prompt, answer in parts) < length:
        ask = prices and rng.random() < 0.5
        problem = catalogue_problem(rng, level, prices, stage.price_lines) if ask else next(source)
        parts.append((problem.prompt, " " + problem.answer))
    return parts


def document(split: str, seed: int, length: int) -> str:
    """One document as text: its problems with their answers, a blank line between them."""
    return "\n\n".join(prompt + answer for prompt, answer in document_parts(split, seed, length))


HELDOUT = 1000
HELDOUT_SEED = 2026
# Shares of the levels, chosen after training: enough of level 5, whose products the model finds hard, to leave room
# below and above its score.
HELDOUT_MIX = stage_mix(Stage({1: 0.5, 2: 1.0, 3: 2.0, 4: 3.0, 5: 4.5}, MAX_STEPS, True))


def heldout(count: int = HELDOUT) -> list[Problem]:
    """The held-out problems of data/gsm-tiny: distinct questions, in the order of the file."""
    found: dict[str, Problem] = {}
    for problem in problems("heldout", HELDOUT_SEED, HELDOUT_MIX):
        found.setdefault(problem.question, problem)
        if len(found) == count:
            return list(found.values())
    raise AssertionError("problems() is endless")


DOCUMENTS = 16
DOCUMENT_BYTES = 2048  # and tokens: the model's longest context


def write(folder: Path) -> None:
    """Write the files of data/gsm-tiny that are generated: same bytes every time."""

    def documents(split: str) -> list[dict[str, str]]:
        return [{"text": document(split, seed, DOCUMENT_BYTES)[:DOCUMENT_BYTES]} for seed in range(DOCUMENTS)]

    files = {
        "test.jsonl": [asdict(problem) for problem in heldout()],
        "documents.jsonl": documents("heldout"),
        "calibration.jsonl": documents("calibration"),
    }
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the generated files of data/gsm-tiny.")
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
