"""What the planner knows about a recipe, and what a recipe needs beside a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedRecipe:
    """What the planner must know about the recipe that will run a plan.

    Attributes:
        script: Its path in the commands that are written.
        methods: The ways to train that it offers, of ``full``, ``lora`` and ``qlora``.
        shared_by: What ranks can share: ``sp`` alone (rows, where the engine has the whole model), or ``tp``, ``pp``
            and ``sp``, where the recipe divides the model itself.
        always_packs: Whether every row is filled, and no flag says otherwise.
    """

    script: str = ""
    methods: tuple[str, ...] = ("full",)
    shared_by: tuple[str, ...] = ()
    always_packs: bool = False

    @property
    def divides_model(self) -> bool:
        """Whether ranks can share the model itself."""
        return "pp" in self.shared_by


SFT_PLAN = PlannedRecipe("recipes/sft.py", ("full", "lora", "qlora"), ("sp",))
PRETRAIN_PLAN = PlannedRecipe("recipes/pretrain.py", ("full", "lora"), ("tp", "pp", "sp"), always_packs=True)


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
