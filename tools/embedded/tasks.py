"""The task families of the embedded base model and instruction data, with their problems and wordings.

`statements` are the sentences that the base model reads as plain text; `questions` are asked in instruction rows;
`new_questions` are wordings reserved for held-out rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import problems
from problems import Draw, Problem

# The base model reads text of all families; these can be taught within a minute on two CPU cores.
INSTRUCTION_TASKS = ("convert", "date", "letter", "reverse", "sequence")


@dataclass(frozen=True)
class Family:
    """A task family: how to draw a problem, and the sentences that state or ask it."""

    name: str
    draw: Callable[[Random], Draw]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    new_questions: tuple[str, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """Sentences for the base model: the statements, and the first three questions as lines of a solution list."""
        return self.statements + tuple(question.rstrip(".?:, ") + ": {answer}" for question in self.questions[:3])

    def problem(self, rng: Random, *, held_out: bool) -> Problem:
        """Draw problems until one is on the wanted side of the held-out split."""
        while True:
            problem = Problem(self.name, *self.draw(rng))
            if problem.held_out == held_out:
                return problem


FAMILIES: tuple[Family, ...] = (
    Family(
        "add", problems.add,
        ("{a} + {b} = {answer}", "{a} plus {b} is {answer}.", "The sum of {a} and {b} is {answer}.",
         "Adding {b} to {a} makes {answer}.", "{a} and {b} together: {answer}"),
        ("What is {a} + {b}?", "Add {a} and {b}.", "Calculate {a} plus {b}.", "Compute the sum of {a} and {b}.",
         "{a} + {b} = ?", "How much are {a} and {b} together?"),
        ("How much is {a} plus {b}?", "Give the sum of {a} and {b}."),
    ),
    Family(
        "subtract", problems.subtract,
        ("{a} - {b} = {answer}", "{a} minus {b} is {answer}.", "The difference of {a} and {b} is {answer}.",
         "Taking {b} from {a} leaves {answer}.", "{a} less {b}: {answer}"),
        ("What is {a} - {b}?", "Subtract {b} from {a}.", "Calculate {a} minus {b}.", "{a} - {b} = ?",
         "Compute the difference of {a} and {b}.", "How much is {a} less {b}?"),
        ("How much is {a} minus {b}?", "Give the difference of {a} and {b}."),
    ),
    Family(
        "sort", problems.sort,
        ("{list} in {order} order: {answer}", "The numbers {list} sorted {adverb} are {answer}.",
         "{list}: ascending {rising}; descending {falling}", "sorted {adverb}, {list} becomes {answer}"),
        ("Sort {list} in {order} order.", "Put these numbers in {order} order: {list}", "Sort {adverb}: {list}",
         "Write the numbers {list} sorted {adverb}.", "Arrange {list} in {order} order.",
         "What are {list} in {order} order?"),
        ("Give the numbers {list} in {order} order.", "Arrange these numbers {adverb}: {list}"),
    ),
    Family(
        "extreme", problems.extreme,
        ("The {which} of {list} is {answer}.", "{synonym} of {list}: {answer}", 
         "Among {list} the {which} is {answer}.", "{list}: largest {largest}, smallest {smallest}"),
        ("What is the {which} of {list}?", "Find the {synonym} of {list}.", "Which number is the {which}: {list}?",
         "Give the {which} number among {list}.", "Name the {synonym} of these numbers: {list}",
         "Of {list}, which is the {which}?"),
        ("Which of {list} is the {which}?", "What is the {synonym} among these: {list}?"),
    ),
    Family(
        "count", problems.count,
        ("In the list {list} the {item} appears {answer} times.", "{list} -> count of {item}: {answer}",
         "counts in {list}: {counts}", "The basket holds {list}. Of {item} there are {answer}."),
        ("How many times does {item} appear in {list}?", "Count {item} in this list: {list}",
         "How often is {item} in the list {list}?", "Give the count of {item} in {list}.",
         "The basket holds {list}. How many times {item}?", "What is the number of {item} in {list}?"),
        ("How many times is {item} in this list: {list}?", "In the list {list}, how often does {item} appear?"),
    ),
    Family(
        "reverse", problems.reverse,
        ("{code} backwards is {answer}.", "{code} reversed: {answer}", "The reverse of {code} is {answer}.",
         "{code} <-> {answer}"),
        ("Reverse {code}.", "Write {code} backwards.", "What is {code} reversed?", "Spell {code} backwards.",
         "What is the reverse of the code {code}?", "Turn the letters of {code} around."),
        ("Write the code {code} reversed.", "Give {code} backwards."),
    ),
    Family(
        "letter", problems.letter,
        ("The {nth} letter of {code} is {answer}.", "{code}: {positions}",
         "In {code} the {nth} letter is {answer}.", "{nth} of {code} = {answer}"),
        ("What is the {nth} letter of {code}?", "Give the {nth} letter of {code}.",
         "Which letter is {nth} in {code}?", "Name the {nth} letter in the code {code}.",
         "In {code}, which letter is the {nth}?", "Find the {nth} letter of the code {code}."),
        ("Which is the {nth} letter of the code {code}?", "Which letter of {code} comes {nth}?"),
    ),
    Family(
        "date", problems.date,
        ("{day} {month} {year} is written {answer}.", "{month} {day}, {year} = {answer}",
         "date: {day} {month} {year} | {answer}", "On {month} {day}, {year} the log says {answer}."),
        ("Write {day} {month} {year} as an ISO date.", "Convert {month} {day}, {year} to ISO format.",
         "What is {day} {month} {year} in the form YYYY-MM-DD?", "Give the ISO date of {month} {day}, {year}.",
         "Rewrite the date {day} {month} {year} as YYYY-MM-DD.", "ISO date for {month} {day}, {year}?"),
        ("Write {month} {day}, {year} as YYYY-MM-DD.", "What is the ISO date of {day} {month} {year}?"),
    ),
    Family(
        "sequence", problems.sequence,
        ("{list}, {continued}", "The sequence {list} goes on with {answer}.", "After {list} comes {answer}.",
         "series {list} | {continued}"),
        ("What comes next: {list}, ...?", "Continue the sequence {list}.", "Which number follows {list}?",
         "Give the next number after {list}.", "Find the next term of the series {list}.", "{list}, ?"),
        ("What is the next number of the sequence {list}?", "Which number comes after {list}?"),
    ),
    Family(
        "convert", problems.convert,
        ("{amount} {from} = {answer} {to}", "{amount} {from} is {answer} {to}.",
         "In {to}, {amount} {from} are {answer}.", "{amount} {from} | {to}: {answer}"),
        ("Convert {amount} {from} to {to}.", "How many {to} are {amount} {from}?", "What is {amount} {from} in {to}?",
         "Write {amount} {from} in {to}.", "{amount} {from} = ? {to}", "Express {amount} {from} in {to}."),
        ("Give {amount} {from} in {to}.", "How much is {amount} {from} in {to}?"),
    ),
)  # fmt: skip
