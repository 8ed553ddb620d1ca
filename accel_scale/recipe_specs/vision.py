"""The recipe for rows with images, `recipes/vision.py`, as the commands see it."""

from __future__ import annotations

from dataclasses import replace

from accel_scale.flags.common import ScaleArguments
from accel_scale.flags.guard import TrainerGuardArguments
from accel_scale.flags.sft import VISION_LIBRARY_CLASSES
from accel_scale.flags.vision import VisionArguments
from accel_scale.planning.search.recipe_choices import VISION_PLAN
from accel_scale.recipe_specs.sft import SFT
from accel_scale.recipe_specs.spec import MICRO_BATCH_SIZE, TRAINER_STEPS
from accel_scale.settings.vision_refused import refuse_vision

VISION = replace(
    SFT,
    flags=(*VISION_LIBRARY_CLASSES, ScaleArguments, TrainerGuardArguments, VisionArguments),
    program="vision.py",
    refuse=refuse_vision,
    untimed={"save_strategy": "no", "eval_strategy": "no"},
    rehearsal=replace(
        SFT.rehearsal,
        data="images",
        values=TRAINER_STEPS,
        # Rows are not cut: the tokens of an image are as many as the processor makes of it.
        at_most={"per_device_train_batch_size": MICRO_BATCH_SIZE},
    ),
    plan=VISION_PLAN,
)
