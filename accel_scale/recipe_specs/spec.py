"""What the commands know about a recipe. A script declares it once, as `RECIPE` at its top level."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from accel_scale.errors import ConfigError
from accel_scale.flags.library import FlagClass
from accel_scale.flags.parsing import ParsedFlags
from accel_scale.planning.search.recipe_choices import PlannedRecipe

# A rehearsal's length, checkpoint, row length and rows per rank.
NUM_STEPS, CHECKPOINT_STEP = 4, 2
MAX_LENGTH, MICRO_BATCH_SIZE = 256, 2

DATA_KINDS = ("own", "rows", "pairs", "labels", "images", "text")

# Flags of transformers' `TrainingArguments` that keep a rehearsal short and make it save a checkpoint.
TRAINER_STEPS: Mapping[str, object] = {
    "max_steps": NUM_STEPS,
    "save_strategy": "steps",
    "save_steps": CHECKPOINT_STEP,
    "save_total_limit": NUM_STEPS,
    "save_only_model": "false",
    "logging_strategy": "steps",
    "logging_steps": 1,
}
# Flags with effects outside the rehearsal's folder, or with minutes of work that do not test the launch.
TRAINER_DROPPED = (
    "global_batch_size", "push_to_hub", "hub_model_id", "report_to", "eval_strategy", "do_eval",
    "load_best_model_at_end", "resume_from_checkpoint", "device_memory", "torch_compile", "max_memory", "plan",
    "profile_steps", "memory_summary",
)  # fmt: skip


def _refuse_nothing(parsed: ParsedFlags) -> None:
    """Default of `RecipeSpec.refuse` that accepts all flags."""


@dataclass(frozen=True)
class RehearsalSpec:
    """What `accel-scale rehearse` changes on a recipe's command line, and what it expects in the output folder.

    The defaults fit a script that uses transformers' `Trainer` and parses its `TrainingArguments`.

    Attributes:
        model_flag: Flag of the model, which is replaced by a shrunken one; None if the script trains its own model.
        config_flag: Flag of a configuration to train from scratch, if the recipe has one.
        size_flag: Flag for the size of a model to train from scratch, if the recipe has one.
        data: Kind of data: ``own`` (given by the flags), ``rows`` (questions and answers), ``pairs`` (with a rejected
            answer each), ``labels`` (labelled right and wrong answers), ``images`` (questions on images) or ``text``
            (plain text). All but ``own`` are replaced by embedded data if they are not on this machine.
        data_flag: Flag of the data.
        data_flags: Flags that describe the data; they are dropped when the data are replaced.
        values: Values of flags in a rehearsal.
        at_most: Largest values of flags in a rehearsal.
        dropped: Flags that a rehearsal leaves out.
        batch_flag: Flag that sets accumulation: ``gradient_accumulation_steps`` or ``global_batch_size``.
        checkpoint: Folder of the checkpoint after `CHECKPOINT_STEP` steps.
        complete_file: The file that is written last into the checkpoint.
        runs_on_cpu: Whether the script calls `enable_rehearsal_if_needed`; otherwise the rehearsal calls it first.
    """

    model_flag: str | None = "model_name_or_path"
    config_flag: str | None = None
    size_flag: str | None = None
    data: str = "own"
    data_flag: str | None = "dataset_name"
    data_flags: tuple[str, ...] = ("dataset_name",)
    values: Mapping[str, object] = field(default_factory=lambda: TRAINER_STEPS)
    at_most: Mapping[str, int] = field(
        default_factory=lambda: {"max_length": MAX_LENGTH, "per_device_train_batch_size": MICRO_BATCH_SIZE}
    )
    dropped: tuple[str, ...] = TRAINER_DROPPED
    batch_flag: str = "gradient_accumulation_steps"
    checkpoint: str = f"checkpoint-{CHECKPOINT_STEP}"
    complete_file: str = "trainer_state.json"
    runs_on_cpu: bool = False

    def __post_init__(self) -> None:
        if self.data not in DATA_KINDS:
            raise ConfigError(
                f"{self.data!r} is no kind of data.", place="RECIPE", fix=f"use {', '.join(DATA_KINDS)}."
            )


@dataclass(frozen=True)
class RecipeSpec:
    """A training script as doctor, plan, rehearse, scaling-test, launch-script and tune see it.

    A script assigns one to `RECIPE` at its top level. The commands import the script to read it, so slow imports such
    as torch belong inside functions, and training below ``if __name__ == "__main__"``. Flags with the same names as
    the package's own (``--precision``, ``--optim``, …) must have the same meaning.

    Attributes:
        flags: The dataclasses of the recipe's flags, as for `parse_flags`.
        program: The recipe's name in messages and summaries; empty uses the script's file name.
        refuse: Called with the parsed flags; raises `ConfigError` if they cannot work together.
        resume_flag: Flag of the checkpoint to continue from; None if the recipe cannot resume.
        resume_auto: The value of `resume_flag` with which the same command continues from the last checkpoint, if it
            must be given; None if the recipe resumes by itself, or cannot.
        untimed: Values of flags that turn off what `accel-scale scaling-test` must not time.
        rehearsal: What a rehearsal changes, a `RecipeSpec.Rehearsal`.
        plan: What the planner counts and writes, a `RecipeSpec.Plan`.
    """

    Rehearsal: ClassVar = RehearsalSpec
    Plan: ClassVar = PlannedRecipe

    flags: tuple[FlagClass, ...] = ()
    program: str = ""
    refuse: Callable[[ParsedFlags], None] = _refuse_nothing
    resume_flag: str | None = "resume_from_checkpoint"
    resume_auto: str | None = None
    untimed: Mapping[str, str] = field(default_factory=lambda: {"save_strategy": "no", "eval_strategy": "no"})
    rehearsal: RehearsalSpec = RehearsalSpec()
    plan: PlannedRecipe = field(default_factory=PlannedRecipe)

    @property
    def divides_model(self) -> bool:
        """True if ranks can share the model itself, not only rows."""
        return self.plan.divides_model

    def name_of(self, script: Path) -> str:
        """The recipe's name in messages, given the file that declares it."""
        return self.program or script.name
