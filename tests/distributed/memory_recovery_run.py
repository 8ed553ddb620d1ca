"""A recipe on a card that is too small for one rank, which runs out of memory in passes with too many tokens.

    accelerate launch --config_file F memory_recovery_run.py PLACE RANK MAX_TOKENS RECIPE [its flags]

PLACE is the forward or backward pass of the second layer, the optimizer's step, or none.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch


def plant(place: str, rank: int, max_tokens: int) -> None:
    """Make the second decoder layer of rank `rank` fail at `place` in passes of more than `max_tokens`."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    if int(os.environ.get("RANK", "0")) != rank or place == "none":
        return
    forward = LlamaMLP.forward

    def fail(*unused: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of")

    if place == "step":
        torch.optim.AdamW.step = fail
        return

    def failing(self: LlamaMLP, hidden: torch.Tensor) -> torch.Tensor:
        is_too_large = torch.is_grad_enabled() and hidden.shape[0] * hidden.shape[1] > max_tokens
        if is_too_large and place == "forward":
            fail()
        output = forward(self, hidden)
        if is_too_large:
            output.register_hook(fail)
        return output

    LlamaMLP.forward = failing


def main() -> None:
    place, rank, max_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    plant(place, rank, max_tokens)
    recipe = Path(__file__).resolve().parents[2] / "recipes" / sys.argv[4]
    sys.argv = [str(recipe), *sys.argv[5:]]
    sys.path[0] = str(recipe.parent)
    runpy.run_path(str(recipe), run_name="__main__")


if __name__ == "__main__":
    main()
