"""The plain text the base model reads: solved problems, one per line, never a chat turn or a held-out problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from accel_scale.assets.tasks import FAMILIES, Family


@dataclass(frozen=True)
class Document:
    """A text and where in it randomly drawn operands stand, ``(start, end)`` in characters."""

    text: str
    operand_spans: tuple[tuple[int, int], ...]


# Calculating takes a small model many more examples to learn than moving symbols around does.
HARD_TASKS = ("add", "subtract", "sequence", "count", "sort")


def _draw_family(rng: Random) -> Family:
    """A family; each of `HARD_TASKS` three times as often as each other one."""
    return rng.choices(FAMILIES, [3 if family.name in HARD_TASKS else 1 for family in FAMILIES])[0]


def base_documents(seed: int) -> Iterator[Document]:
    """Endless documents, each a list of one kind of statement or a mixture. Held-out problems never occur."""
    rng = Random(f"{seed} base")
    while True:
        is_list = rng.random() < 0.3
        family = _draw_family(rng)
        statement = rng.choice(family.sentences)
        text, spans = "", []
        for _ in range(rng.randint(2, 6)):
            if not is_list:
                family = _draw_family(rng)
                statement = rng.choice(family.sentences)
            problem = family.problem(rng, held_out=False)
            spans += [(start + len(text), end + len(text)) for start, end in problem.operand_spans(statement)]
            text += problem.render(statement) + "\n"
        yield Document(text, tuple(spans))
