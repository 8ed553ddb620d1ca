"""What a recipe needs in addition to a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RecipeChoices:
    """What a recipe needs beside the plan.

    Attributes:
        model: A folder or a hub name.
        dataset: What to train on; None: an example that runs.
        columns: ``role=column`` items of ``--columns``.
        tokens: To train on, without padding; None: one epoch.
        max_length: Where rows are cut, if that is not the length planned for.
    """

    model: str
    dataset: str | None = None
    columns: tuple[str, ...] = ()
    tokens: float | None = None
    max_length: int | None = None
