"""The recipe for rewards by RLOO, `recipes/rloo.py`, as the commands see it."""

from __future__ import annotations

from dataclasses import replace

from accel_scale.flags.common import ScaleArguments
from accel_scale.flags.guard import TrainerGuardArguments
from accel_scale.flags.rewards import RewardArguments
from accel_scale.flags.sft import RLOO_LIBRARY_CLASSES
from accel_scale.planning.search.recipe_choices import RLOO_PLAN
from accel_scale.recipe_specs.grpo import GRPO

RLOO = replace(
    GRPO,
    flags=(*RLOO_LIBRARY_CLASSES, ScaleArguments, TrainerGuardArguments, RewardArguments),
    program="rloo.py",
    plan=RLOO_PLAN,
)
