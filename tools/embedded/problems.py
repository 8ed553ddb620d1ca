"""Problems with one right answer: how each kind is drawn and solved, and which problems are held out.

Whether a problem is held out is decided by a hash of its operands alone, so neither the base model's text nor the
instruction rows ever contain it, whatever the wording and whatever is asked about those operands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from string import Formatter
from typing import Any

# (key, operands, results): the fields of a `Problem`.
Draw = tuple[str, dict[str, Any], dict[str, str]]

HELD_OUT_SHARE = 8  # one problem in eight is kept for held-out questions

MONTHS = (
    "January February March April May June July August September October November December".split()  # noqa: SIM905
)
ORDINALS = ("first", "second", "third", "fourth", "fifth")
FRUITS = ("apple", "pear", "fig", "plum", "lemon", "cherry")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# (from, to, factor): the answer is the number with its decimal point shifted.
UNITS = (("km", "m", 1000), ("kg", "g", 1000), ("l", "ml", 1000), ("m", "cm", 100))


@dataclass(frozen=True)
class Problem:
    """One problem of a family; `key` identifies its operands, whatever the question and its wording.

    `operands` are drawn at random; `results` follow from them, and `results["answer"]` is the answer to a question.
    """

    task: str
    key: str
    operands: dict[str, Any]
    results: dict[str, str]

    @property
    def answer(self) -> str:
        """The expected answer."""
        return self.results["answer"]

    @property
    def held_out(self) -> bool:
        """True if no training text may contain this problem."""
        digest = hashlib.blake2b(f"{self.task}:{self.key}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0

    def render(self, template: str) -> str:
        """The template with operands and results filled in."""
        return template.format(**self.operands, **self.results)

    def operand_spans(self, template: str) -> list[tuple[int, int]]:
        """Spans of the operands in the rendered template, ``(start, end)`` in characters."""
        spans, length = [], 0
        for literal, name, _, _ in Formatter().parse(template):
            length += len(literal)
            if name:
                start, length = length, length + len(str({**self.operands, **self.results}[name]))
                if name in self.operands:
                    spans.append((start, length))
        return spans


def _join(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def _code(rng: Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(4, 5)))


def add(rng: Random) -> Draw:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return f"{min(a, b)} {max(a, b)}", {"a": a, "b": b}, {"answer": str(a + b)}


def subtract(rng: Random) -> Draw:
    b, a = sorted(rng.sample(range(10, 100), 2))
    return f"{a} {b}", {"a": a, "b": b}, {"answer": str(a - b)}


def sort(rng: Random) -> Draw:
    numbers = rng.sample(range(10, 100), rng.randint(3, 4))
    rising, falling = _join(sorted(numbers)), _join(sorted(numbers, reverse=True))
    order, adverb = rng.choice((("ascending", "upwards"), ("descending", "downwards")))
    results = {"answer": rising if order == "ascending" else falling, "rising": rising, "falling": falling}
    return rising, {"list": _join(numbers), "order": order, "adverb": adverb}, results


def extreme(rng: Random) -> Draw:
    numbers = rng.sample(range(10, 100), rng.randint(3, 4))
    which, synonym = rng.choice((("largest", "maximum"), ("smallest", "minimum")))
    largest, smallest = str(max(numbers)), str(min(numbers))
    results = {"answer": largest if which == "largest" else smallest, "largest": largest, "smallest": smallest}
    return _join(sorted(numbers)), {"list": _join(numbers), "which": which, "synonym": synonym}, results


def count(rng: Random) -> Draw:
    pool = rng.sample(FRUITS, 3)
    items = [rng.choice(pool) for _ in range(rng.randint(4, 7))]
    item = rng.choice(items)
    counts = _join(f"{fruit} {items.count(fruit)}" for fruit in pool)
    results = {"answer": str(items.count(item)), "counts": counts}
    return _join(items), {"list": _join(items), "item": item}, results


def reverse(rng: Random) -> Draw:
    code = _code(rng)
    return min(code, code[::-1]), {"code": code}, {"answer": code[::-1]}


def letter(rng: Random) -> Draw:
    code = _code(rng)
    position = rng.randrange(len(code))
    positions = _join(f"{nth} {letter}" for nth, letter in zip(ORDINALS, code, strict=False))
    return code, {"code": code, "nth": ORDINALS[position]}, {"answer": code[position], "positions": positions}


def date(rng: Random) -> Draw:
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1900, 2099)
    iso = f"{year}-{month:02d}-{day:02d}"
    return iso, {"day": day, "month": MONTHS[month - 1], "year": year}, {"answer": iso}


def sequence(rng: Random) -> Draw:
    start, step = rng.randint(100, 500), rng.choice((-1, 1)) * rng.randint(2, 9)
    terms = [start + i * step for i in range(9)]
    results = {"answer": str(terms[4]), "continued": _join(terms[4:])}
    # The key is the whole progression, so that a longer stretch of it cannot contain a held-out one.
    return f"{step} {start % step}", {"list": _join(terms[:4])}, results


def convert(rng: Random) -> Draw:
    source, target, factor = rng.choice(UNITS)
    hundredths = rng.randint(101, 9999)
    amount = f"{hundredths // 100}.{hundredths % 100:02d}"
    operands = {"amount": amount, "from": source, "to": target}
    return f"{source} {amount}", operands, {"answer": str(hundredths * factor // 100)}
