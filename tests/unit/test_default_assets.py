"""The embedded model and data: rebuilt identically, correct, disjoint, not answerable from memory, small."""

from __future__ import annotations

import itertools
import lzma
import re
import sys
from collections import Counter
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from accel_scale.data.default import default_data_paths, default_dataset, default_model_path, default_pretraining_text

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "embedded"))

from base_text import base_documents, exercise_documents
from generate_data import INSTRUCTION_TASKS, SEED, write_data
from tasks import FAMILIES
from train_base import build_tokenizer, tokenizer_texts


@pytest.fixture(scope="module")
def datasets():
    train, heldout = default_dataset()
    return train.to_list(), heldout.to_list()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(default_model_path())


def question_of(row) -> str:
    return row["messages"][0]["content"]


# --- answers, recomputed from the question's text without the generator ---


def numbers(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"\d+", text)]


def solve_order(question: str) -> str:
    falling = "descending" in question or "downwards" in question
    return ", ".join(str(n) for n in sorted(numbers(question), reverse=falling))


def solve_extreme(question: str) -> str:
    pick = max if "largest" in question or "maximum" in question else min
    return str(pick(numbers(question)))


def solve_count(question: str) -> str:
    listed = re.search(r"\w+(?:, \w+)+", question.removeprefix("In the list ")).group()
    items = listed.split(", ")
    items[0] = items[0].split()[-1]
    asked = re.sub(re.escape(", ".join(items)), "", question)
    item = next(
        fruit for fruit in ("apple", "pear", "fig", "plum", "lemon", "cherry") if re.search(rf"\b{fruit}\b", asked)
    )
    return str(items.count(item))


ORDINALS = ("first", "second", "third", "fourth", "fifth")


def solve_letter(question: str) -> str:
    position = next(i for i, word in enumerate(ORDINALS) if word in question)
    return re.search(r"[A-Z]{4,}", question).group()[position]


def solve_date(question: str) -> str:
    day_first = re.search(r"(\d+) ([A-Z][a-z]+) (\d{4})", question)
    if day_first:
        return datetime.strptime(day_first.group(), "%d %B %Y").strftime("%Y-%m-%d")
    return datetime.strptime(re.search(r"[A-Z][a-z]+ \d+, \d{4}", question).group(), "%B %d, %Y").strftime("%Y-%m-%d")


def solve_sequence(question: str) -> str:
    terms = numbers(question)
    assert len({b - a for a, b in itertools.pairwise(terms)}) == 1
    return str(2 * terms[-1] - terms[-2])


def solve_convert(question: str) -> str:
    units = re.findall(r"\b(km|kg|ml|cm|m|g|l)\b", question)
    amount = Decimal(re.search(r"\d+\.\d+", question).group())
    # "How many ml are 3.50 l?" names the target first.
    source = re.search(r"\d+\.\d+ (\w+)", question).group(1)
    (target,) = [unit for unit in units if unit != source]
    factor = {("km", "m"): 1000, ("kg", "g"): 1000, ("l", "ml"): 1000, ("m", "cm"): 100}[source, target]
    return str(int(amount * factor))


SOLVERS = {
    "add": lambda q: str(sum(numbers(q))),
    "subtract": lambda q: str(max(numbers(q)) - min(numbers(q))),
    "sort": solve_order,
    "extreme": solve_extreme,
    "count": solve_count,
    "reverse": lambda q: re.search(r"[A-Z]{4,}", q).group()[::-1],
    "letter": solve_letter,
    "date": solve_date,
    "sequence": solve_sequence,
    "convert": solve_convert,
}


def test_every_answer_is_right(datasets):
    for row in itertools.chain(*datasets):
        assert row["answer"] == row["messages"][1]["content"]
        question = question_of(row).replace("YYYY-MM-DD", "that form")
        assert SOLVERS[row["task"]](question) == row["answer"], question_of(row)


def test_rebuilding_gives_the_same_bytes(tmp_path):
    write_data(tmp_path)
    for committed in map(Path, default_data_paths()):
        assert (tmp_path / committed.name).read_bytes() == committed.read_bytes()
    rebuilt = lzma.decompress((tmp_path / "base_text.jsonl.xz").read_bytes())  # versions of liblzma pack differently
    assert Path(default_pretraining_text(str(tmp_path / "run"))).read_bytes() == rebuilt
    some = Path(default_pretraining_text(str(tmp_path / "run"), num_documents=100)).read_bytes()
    assert rebuilt.startswith(some)
    assert some.count(b"\n") == 100


def test_rebuilding_gives_the_same_tokenizer(tmp_path):
    """The tokenizer is trained on the base model's text, so this also pins the text the weights were trained on."""
    build_tokenizer(tokenizer_texts(SEED)).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (Path(default_model_path()) / name).read_text()


def normalized(question: str) -> str:
    """Letters and digits only, in lower case."""
    return re.sub(r"[^a-z0-9]+", " ", question.lower()).strip()


def test_held_out_questions_are_disjoint(datasets):
    train, heldout = datasets
    assert len(train) >= 4000
    assert len(heldout) >= 500
    train_questions = {normalized(question_of(row)) for row in train}
    heldout_questions = {normalized(question_of(row)) for row in heldout}
    assert len(heldout_questions) == len(heldout)
    assert not train_questions & heldout_questions


def operands(row) -> tuple:
    """The content of a question regardless of wording: its numbers, codes and fruit, in order where order matters."""
    text = question_of(row).replace("YYYY-MM-DD", "")
    found = re.findall(r"\d+(?:\.\d+)?|[A-Z]{4,}|(?:apple|pear|fig|plum|lemon|cherry)(?=,)", text)
    return row["task"], tuple(found if row["task"] == "sequence" else sorted(found))


def test_held_out_problems_are_disjoint_whatever_the_wording(datasets):
    train, heldout = datasets
    # Counted items alone do not identify a problem without their order, nor units and amounts without the unit.
    ordered = {"count", "convert", "letter", "date"}
    train_problems = {operands(row) for row in train if row["task"] not in ordered}
    heldout_problems = {operands(row) for row in heldout if row["task"] not in ordered}
    assert len(heldout_problems) > 200
    assert not train_problems & heldout_problems


# How to find a held-out problem's operands in its question, and the words of its task next to them in other text.
STATED = {
    "add": (r"\d+ \+ \d+", r""),
    "subtract": (r"\d+ - \d+", r""),
    "sort": (r"\d+(?:, \d+)+", r"ascending|descending|upwards|downwards"),
    "extreme": (r"\d+(?:, \d+)+", r"largest|smallest|maximum|minimum"),
    "count": (r"(?:\w+, ){3,}\w+", r""),
    "reverse": (r"[A-Z]{4,5}", r"[Rr]everse|backwards|<->|around"),
    "letter": (r"[A-Z]{4,5}", r"first|second|third|fourth|fifth"),
    "date": (r"\d+ [A-Z]\w+ \d{4}|[A-Z]\w+ \d+, \d{4}", r""),
    "sequence": (r"\d+(?:, \d+)+", r""),
    "convert": (r"\d+\.\d+ \w+", r""),
}


# Each wording that only held-out questions use, with anything in its gaps.
NEW_WORDINGS = [
    r"[^\n]+?".join(map(re.escape, re.split(r"{\w+}", wording.rstrip("?.:"))))
    for family in FAMILIES if family.name in INSTRUCTION_TASKS for wording in family.new_questions
]  # fmt: skip


@pytest.mark.parametrize("documents", [base_documents, exercise_documents])
def test_base_text_contains_no_held_out_problem_and_no_conversation(datasets, documents):
    _, heldout = datasets
    text = "".join(document.text for document in itertools.islice(documents(SEED), 4_000))
    assert "<|" not in text
    assert not re.search(r"\b(user|assistant|system)\b", text)
    lines_by_operands: dict[str, list[str]] = {}
    for line in text.splitlines():
        for pattern in {pattern for pattern, _ in STATED.values()}:
            for found in re.findall(pattern, line):
                lines_by_operands.setdefault(found, []).append(line)
    checked = 0
    for row in heldout:
        pattern, words = STATED[row["task"]]
        found = re.search(pattern, question_of(row).replace("YYYY-MM-DD", ""))
        if found:
            checked += 1
            clashes = [line for line in lines_by_operands.get(found.group(), []) if re.search(words, line)]
            assert not clashes, question_of(row)
    assert checked > 500


def test_exercises_are_learnt_by_their_answers_and_in_no_held_out_wording(datasets):
    """With the questions taken out, only a mark and an answer are left, and each answer is right."""
    train, _ = datasets
    answers = {row["answer"] for row in train if row["task"] == "letter"}
    layouts = set()
    for document in itertools.islice(exercise_documents(SEED), 300):
        assert not any(re.search(pattern, document.text) for pattern in NEW_WORDINGS)
        pieces = []
        for (start, end), (following, _) in itertools.pairwise((*document.operand_spans, (len(document.text), 0))):
            question, solved = document.text[start:end], document.text[end:following]
            assert solved.endswith("\n")
            layouts.add(re.sub(r"[A-Z]{2}|\w", "", solved.rstrip("\n"))[:3])
            if "letter" in question:
                pieces.append(solved.rstrip("\n")[-1])
        assert set(pieces) <= answers
    assert len(layouts) > 8


@pytest.mark.slow
def test_memory_cannot_answer(datasets):
    """The answer of the most similar training question, and the commonest answer of the task, are mostly wrong."""
    train, heldout = datasets
    questions = heldout[:130]

    def pieces(question: str) -> set[str]:
        words = re.findall(r"\w+|\W", question)
        return set(words) | set(itertools.pairwise(words)) | set(itertools.pairwise(question))

    by_task: dict[str, list] = {}
    for row in train:
        by_task.setdefault(row["task"], []).append((pieces(question_of(row)), row["answer"]))
    nearest = commonest = 0
    for row in questions:
        mine, candidates = pieces(question_of(row)), by_task[row["task"]]
        _, answer = max(candidates, key=lambda c: len(mine & c[0]) / len(mine | c[0]))
        nearest += answer == row["answer"]
        commonest += Counter(a for _, a in candidates).most_common(1)[0][0] == row["answer"]
    assert nearest / len(questions) < 0.25
    assert commonest / len(questions) < 0.15


def test_any_prefix_is_balanced(datasets):
    for rows in datasets:
        counts = Counter(row["task"] for row in rows[:200])
        assert set(counts) == set(INSTRUCTION_TASKS)
        assert max(counts.values()) - min(counts.values()) <= 1


def test_new_wordings_are_asked_only_of_held_out_problems(datasets):
    train, heldout = datasets
    assert {row["wording"] for row in train} == {"seen"}
    share = sum(row["wording"] == "new" for row in heldout) / len(heldout)
    assert 0.2 < share < 0.3
    for family in FAMILIES:
        assert not set(family.questions) & set(family.new_questions)


def test_assets_are_small():
    folder = Path(default_model_path()).parent
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 8 * 2**20


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_tokenizer_round_trip(tokenizer, text):
    if "<|" not in text:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_and_code_letters_are_single_tokens(tokenizer):
    for text in ("823", "QXKD", "07:25", "1961-08-28"):
        assert tokenizer.tokenize(text) == list(text)
    assert len({tokenizer.eos_token_id, tokenizer.pad_token_id, None}) == 3


def test_generation_mask_covers_answer_and_end_of_turn(tokenizer, datasets):
    for row in Random(0).sample(datasets[0], 50):
        encoded = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        trained = [t for t, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
        assert tokenizer.decode(trained) == row["answer"] + tokenizer.eos_token
        prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=True)
        assert encoded["input_ids"][: len(prompt["input_ids"])] == prompt["input_ids"]
