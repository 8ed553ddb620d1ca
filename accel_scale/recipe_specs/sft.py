"""The fine-tuning recipe, `recipes/sft.py`, as the commands see it."""

from __future__ import annotations

from accel_scale.flags.common import ScaleArguments
from accel_scale.flags.guard import TrainerGuardArguments
from accel_scale.flags.parallel import SequenceArguments
from accel_scale.flags.sft import LIBRARY_CLASSES
from accel_scale.planning.search.recipe_choices import SFT_PLAN
from accel_scale.recipe_specs.spec import TRAINER_STEPS, RecipeSpec, RehearsalSpec
from accel_scale.settings.trl_refused import refuse_contradictions

SFT = RecipeSpec(
    flags=(*LIBRARY_CLASSES, ScaleArguments, TrainerGuardArguments, SequenceArguments),
    program="sft.py",
    refuse=refuse_contradictions,
    resume_auto="auto",
    untimed={"save_strategy": "no", "eval_strategy": "no", "exact_match_samples": "0"},
    rehearsal=RehearsalSpec(
        data="rows",
        data_flags=(
            "dataset_name", "dataset_config", "dataset_mixture", "dataset_train_split", "dataset_test_split",
            "dataset_streaming", "columns",
        ),
        values={**TRAINER_STEPS, "exact_match_samples": 0},
        runs_on_cpu=True,
    ),
    plan=SFT_PLAN,
)  # fmt: skip
