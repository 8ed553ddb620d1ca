"""The preference recipe, `recipes/dpo.py`, as the commands see it."""

from __future__ import annotations

from dataclasses import replace

from accel_scale.flags.common import ScaleArguments
from accel_scale.flags.guard import TrainerGuardArguments
from accel_scale.flags.sft import DPO_LIBRARY_CLASSES
from accel_scale.planning.search.recipe_choices import DPO_PLAN
from accel_scale.recipe_specs.sft import SFT
from accel_scale.settings.trl_refused import refuse_dpo

DPO = replace(
    SFT,
    flags=(*DPO_LIBRARY_CLASSES, ScaleArguments, TrainerGuardArguments),
    program="dpo.py",
    refuse=refuse_dpo,
    rehearsal=replace(SFT.rehearsal, data="pairs"),
    plan=DPO_PLAN,
)
