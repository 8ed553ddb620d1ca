"""The recipe for rewards, `recipes/grpo.py`, as the commands see it."""

from __future__ import annotations

from dataclasses import replace

from accel_scale.flags.common import ScaleArguments
from accel_scale.flags.guard import TrainerGuardArguments
from accel_scale.flags.rewards import RewardArguments
from accel_scale.flags.sft import GRPO_LIBRARY_CLASSES
from accel_scale.planning.search.recipe_choices import GRPO_PLAN
from accel_scale.recipe_specs.sft import SFT
from accel_scale.recipe_specs.spec import MICRO_BATCH_SIZE
from accel_scale.settings.trl_refused import refuse_grpo
from accel_scale.settings.vllm_flags import VLLM_FLAGS

GRPO = replace(
    SFT,
    flags=(*GRPO_LIBRARY_CLASSES, ScaleArguments, TrainerGuardArguments, RewardArguments),
    program="grpo.py",
    refuse=refuse_grpo,
    rehearsal=replace(
        SFT.rehearsal,
        # vLLM needs a GPU. Each of the two rows of a rank is an answer to the same prompt.
        values={**SFT.rehearsal.values, "num_generations": MICRO_BATCH_SIZE},
        at_most={**SFT.rehearsal.at_most, "max_completion_length": 16},
        dropped=(*SFT.rehearsal.dropped, "steps_per_generation", "generation_batch_size", *VLLM_FLAGS),
    ),
    plan=GRPO_PLAN,
)
