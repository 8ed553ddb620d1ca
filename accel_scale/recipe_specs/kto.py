"""The recipe for labelled answers, `recipes/kto.py`, as the commands see it."""

from __future__ import annotations

from dataclasses import replace

from accel_scale.flags.common import ScaleArguments
from accel_scale.flags.guard import TrainerGuardArguments
from accel_scale.flags.sft import KTO_LIBRARY_CLASSES
from accel_scale.planning.search.recipe_choices import KTO_PLAN
from accel_scale.recipe_specs.sft import SFT
from accel_scale.settings.trl_refused import refuse_kto

KTO = replace(
    SFT,
    flags=(*KTO_LIBRARY_CLASSES, ScaleArguments, TrainerGuardArguments),
    program="kto.py",
    refuse=refuse_kto,
    rehearsal=replace(SFT.rehearsal, data="labels"),
    plan=KTO_PLAN,
)
