"""The recipe for rewards, `recipes/grpo.py`, as the commands see it."""

from __future__ import annotations

from dataclasses import replace

from accel_scale.flags.common import ScaleArguments
from accel_scale.flags.guard import TrainerGuardArguments
from accel_scale.flags.rewards import RewardArguments
from accel_scale.flags.sft import GRPO_LIBRARY_CLASSES
from accel_scale.planning.search.recipe_choices import GRPO_PLAN
from accel_scale.recipe_specs.sft import SFT
from accel_scale.settings.trl_refused import refuse_grpo

GRPO = replace(
    SFT,
    flags=(*GRPO_LIBRARY_CLASSES, ScaleArguments, TrainerGuardArguments, RewardArguments),
    program="grpo.py",
    refuse=refuse_grpo,
    rehearsal=replace(SFT.rehearsal, data="own"),
    plan=GRPO_PLAN,
)
