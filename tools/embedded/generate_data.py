"""Write the embedded instruction data and the base text: `python tools/embedded/generate_data.py [--out DIR]`.

Deterministic: the same seed gives the same bytes on every Python the package supports.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
from pathlib import Path
from random import Random
from typing import Any

from base_text import base_documents
from tasks import FAMILIES, INSTRUCTION_TASKS, Family

from accel_scale.data.default import default_data_paths

SEED = 2026
TRAIN_ROWS_PER_FAMILY = 1200
HELD_OUT_ROWS_PER_FAMILY = 120
NEW_WORDING_SHARE = 0.25  # share of held-out rows with a wording that no training row uses
BASE_DOCUMENTS = 40_000
DATA_FOLDER = Path(default_data_paths()[0]).parent


def instruction_row(family: Family, rng: Random, *, held_out: bool) -> dict[str, Any]:
    """One row: ``messages`` (user, assistant), ``answer``, ``task`` and ``wording`` (seen or new)."""
    problem = family.problem(rng, held_out=held_out)
    new_wording = held_out and rng.random() < NEW_WORDING_SHARE
    question = problem.render(rng.choice(family.new_questions if new_wording else family.questions))
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": problem.answer}]
    return {
        "messages": messages,
        "answer": problem.answer,
        "task": family.name,
        "wording": "new" if new_wording else "seen",
    }


def instruction_rows(rows_per_family: int, *, held_out: bool, seed: int = SEED) -> list[dict[str, Any]]:
    """Rows of every family in equal numbers, interleaved: any prefix is balanced to within one row per family.

    No question occurs twice.
    """
    rng = Random(f"{seed} {'held-out' if held_out else 'train'}")
    seen: set[str] = set()
    rows = []
    for _ in range(rows_per_family):
        order = [family for family in FAMILIES if family.name in INSTRUCTION_TASKS]
        rng.shuffle(order)
        for family in order:
            row = instruction_row(family, rng, held_out=held_out)
            while row["messages"][0]["content"] in seen:
                row = instruction_row(family, rng, held_out=held_out)
            seen.add(row["messages"][0]["content"])
            rows.append(row)
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one JSON object per line, in UTF-8 and newline-terminated."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8", newline="\n")


def write_data(folder: Path = DATA_FOLDER, *, seed: int = SEED) -> None:
    """Write ``train.jsonl``, ``heldout.jsonl`` and the base model's text, ``base_text.jsonl.xz``."""
    write_jsonl(folder / "train.jsonl", instruction_rows(TRAIN_ROWS_PER_FAMILY, held_out=False, seed=seed))
    write_jsonl(folder / "heldout.jsonl", instruction_rows(HELD_OUT_ROWS_PER_FAMILY, held_out=True, seed=seed))
    documents = itertools.islice(base_documents(seed), BASE_DOCUMENTS)
    text = "".join(json.dumps({"text": document.text}) + "\n" for document in documents)
    (folder / "base_text.jsonl.xz").write_bytes(lzma.compress(text.encode(), preset=9))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DATA_FOLDER, help="Folder to write (default: the package's own).")
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    write_data(arguments.out, seed=arguments.seed)


if __name__ == "__main__":
    main()
