"""recipes/rloo.py with the answers of `fixed_answers`, so that all ranks draw the same."""

from __future__ import annotations

import runpy
from pathlib import Path

from fixed_answers import drawn_answers
from trl import RLOOTrainer


def answers(trainer: RLOOTrainer, prompt_ids: list[list[int]], *unused: object) -> list[list[int]]:
    return drawn_answers(prompt_ids, trainer.eos_token_ids)


RLOOTrainer._generate_single_turn = answers  # type: ignore[method-assign]
if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "rloo.py"), run_name="__main__")
