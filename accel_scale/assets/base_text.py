"""The plain text the base model reads: solved problems, one per line, never a chat turn or a held-out problem."""

from __future__ import annotations

from collections.abc import Collection, Iterator
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
# What fine-tuning will ask for and the base model was least sure of: read again at the end of its training.
FINAL_TASKS = ("sequence", "letter", "reverse", "date")


def _draw_family(rng: Random, often: Collection[str]) -> Family:
    """A family; each of those named in `often` three times as often as each other one."""
    return rng.choices(FAMILIES, [3 if family.name in often else 1 for family in FAMILIES])[0]


def base_documents(seed: int, often: Collection[str] = HARD_TASKS) -> Iterator[Document]:
    """Endless documents, each a list of one kind of statement or a mixture. Held-out problems never occur.

    Args:
        seed: Documents are a function of it and of `often`.
        often: Names of families that come three times as often as the others.
    """
    rng = Random(f"{seed} base")
    while True:
        is_list = rng.random() < 0.3
        family = _draw_family(rng, often)
        statement = rng.choice(family.sentences)
        text, spans = "", []
        for _ in range(rng.randint(2, 6)):
            if not is_list:
                family = _draw_family(rng, often)
                statement = rng.choice(family.sentences)
            problem = family.problem(rng, held_out=False)
            spans += [(start + len(text), end + len(text)) for start, end in problem.operand_spans(statement)]
            text += problem.render(statement) + "\n"
        yield Document(text, tuple(spans))
