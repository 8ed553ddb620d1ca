"""The plain text the base model reads: solved problems and exercises, never a chat turn or a held-out problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from problems import LETTERS
from tasks import FAMILIES, INSTRUCTION_TASKS, Family


@dataclass(frozen=True)
class Document:
    """A text and the spans of its randomly drawn operands, ``(start, end)`` in characters."""

    text: str
    operand_spans: tuple[tuple[int, int], ...]


# A small model needs many more examples to learn calculation than to learn moving symbols around.
HARD_TASKS = ("add", "subtract", "sequence", "count", "sort")


def _draw_family(rng: Random) -> Family:
    """Draw a family; each of `HARD_TASKS` is three times as likely as any other."""
    return rng.choices(FAMILIES, [3 if family.name in HARD_TASKS else 1 for family in FAMILIES])[0]


def base_documents(seed: int) -> Iterator[Document]:
    """Yield endless documents, each a list of one kind of statement or a mixture. Held-out problems never occur."""
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


# Marks before a question and between question and answer, as in many styles of exercise books.
QUESTION_MARKS = ("", "", "Q: ", "- ", "> ", "* ", "Question: ", "Exercise: ", "| ", "# ")
ANSWER_MARKS = (": ", " -> ", "\n", " = ", " | ", "\nA: ", "\n> ", "\nAnswer: ", " ... ", "\n\n", " # ", "\n- ")
# Tasks that take longest to learn get the largest weights.
EXERCISE_WEIGHTS = {"convert": 1, "date": 2, "letter": 2, "reverse": 1, "sequence": 2}


def exercise_documents(seed: int) -> Iterator[Document]:
    """Yield endless lists of solved exercises of the instruction rows' kinds, each list with its own marks.

    A model that has read many such layouts finds question and answer in a new one, such as a conversation. Everything
    except answers and the marks before them counts as random: answering is all there is to learn here.
    """
    rng = Random(f"{seed} exercises")
    families = [family for family in FAMILIES if family.name in INSTRUCTION_TASKS]
    weights = [EXERCISE_WEIGHTS[family.name] for family in families]
    while True:
        tag = "".join(rng.choices(LETTERS, k=2))
        before = rng.choice((*QUESTION_MARKS, f"{tag} "))
        between = rng.choice((*ANSWER_MARKS, f"\n{tag[::-1]} "))
        text, spans = "", []
        for _ in range(rng.randint(1, 5)):
            family = rng.choices(families, weights)[0]
            problem = family.problem(rng, held_out=False)
            question = before + problem.render(rng.choice(family.questions))
            spans.append((len(text), len(text) + len(question)))
            text += f"{question}{between}{problem.answer}\n"
        yield Document(text, tuple(spans))
