"""recipes/grpo.py with answers that depend only on the prompt and their index, so that all ranks draw the same."""

from __future__ import annotations

import random
import runpy
from collections import Counter
from pathlib import Path

from trl import GRPOTrainer


def drawn_answers(prompt_ids: list[list[int]], ends: list[int]) -> list[list[int]]:
    seen: Counter[tuple[int, ...]] = Counter()
    drawn = []
    for prompt in map(tuple, prompt_ids):
        seed = random.Random(f"{prompt} {seen[prompt]}")
        seen[prompt] += 1
        drawn.append([seed.randrange(40, 120) for _ in range(seed.randrange(7, 11))] + ends[:1])
    return drawn


def answers(
    trainer: GRPOTrainer, prompt_ids: list[list[int]], *unused: object, **more: object
) -> tuple[list[list[int]], None]:
    return drawn_answers(prompt_ids, trainer.eos_token_ids), None


GRPOTrainer._generate_single_turn = answers  # type: ignore[method-assign]
if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "grpo.py"), run_name="__main__")
