"""The recipe for reward models, `recipes/reward.py`, as the commands see it."""

from __future__ import annotations

from dataclasses import replace

from accel_scale.flags.common import ScaleArguments
from accel_scale.flags.guard import TrainerGuardArguments
from accel_scale.flags.sft import REWARD_LIBRARY_CLASSES
from accel_scale.planning.search.recipe_choices import REWARD_PLAN
from accel_scale.recipe_specs.dpo import DPO
from accel_scale.settings.trl_refused import refuse_reward

REWARD = replace(
    DPO,
    flags=(*REWARD_LIBRARY_CLASSES, ScaleArguments, TrainerGuardArguments),
    program="reward.py",
    refuse=refuse_reward,
    untimed={**DPO.untimed, "eval_on_start": "false"},
    rehearsal=replace(DPO.rehearsal, dropped=(*DPO.rehearsal.dropped, "eval_on_start")),
    plan=REWARD_PLAN,
)
