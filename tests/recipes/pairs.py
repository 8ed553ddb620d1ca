"""Pairs of a right and a wrong answer, and labelled single answers, as recipes/dpo.py and recipes/kto.py read them."""

from __future__ import annotations

import json
from pathlib import Path


def write_pairs(folder: Path, count: int = 40) -> Path:
    """Write `train.jsonl` to the new `folder`: `count` sums as turns; the wrong answer is one too high."""
    folder.mkdir()
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {n} plus {n % 7}?"}],
            "chosen": [{"role": "assistant", "content": str(n + n % 7)}],
            "rejected": [{"role": "assistant", "content": str(n + n % 7 + 1)}],
        }
        for n in range(count)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_labelled(folder: Path, count: int = 80) -> Path:
    """Write `train.jsonl` to the new `folder`: `count` sums as turns, right and labelled good except every third."""
    folder.mkdir()
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {n} plus {n % 7}?"}],
            "completion": [{"role": "assistant", "content": str(n + n % 7 + (n % 3 == 1))}],
            "label": n % 3 != 1,
        }
        for n in range(count)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
