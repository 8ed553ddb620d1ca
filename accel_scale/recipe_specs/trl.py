"""Declarations of the recipes on TRL's trainers for the commands: sft, dpo, kto, reward, grpo, rloo and vision."""

from __future__ import annotations

from dataclasses import replace

from accel_scale.flags import sft as flags
from accel_scale.flags.common import ScaleArguments
from accel_scale.flags.guard import TrainerGuardArguments
from accel_scale.flags.parallel import SequenceArguments
from accel_scale.flags.rewards import RewardArguments
from accel_scale.flags.vision import VisionArguments
from accel_scale.planning.search import recipe_choices as plans
from accel_scale.recipe_specs.spec import MICRO_BATCH_SIZE, TRAINER_STEPS, RecipeSpec, RehearsalSpec
from accel_scale.settings import trl_refused as refused
from accel_scale.settings.vision_refused import refuse_vision
from accel_scale.settings.vllm_flags import VLLM_FLAGS

_SHARED = (ScaleArguments, TrainerGuardArguments)

SFT = RecipeSpec(
    flags=(*flags.LIBRARY_CLASSES, *_SHARED, SequenceArguments),
    program="sft.py",
    refuse=refused.refuse_contradictions,
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
    plan=plans.SFT_PLAN,
)  # fmt: skip

DPO = replace(
    SFT,
    flags=(*flags.DPO_LIBRARY_CLASSES, *_SHARED),
    program="dpo.py",
    refuse=refused.refuse_dpo,
    rehearsal=replace(SFT.rehearsal, data="pairs"),
    plan=plans.DPO_PLAN,
)

KTO = replace(
    SFT,
    flags=(*flags.KTO_LIBRARY_CLASSES, *_SHARED),
    program="kto.py",
    refuse=refused.refuse_kto,
    rehearsal=replace(SFT.rehearsal, data="labels"),
    plan=plans.KTO_PLAN,
)

REWARD = replace(
    DPO,
    flags=(*flags.REWARD_LIBRARY_CLASSES, *_SHARED),
    program="reward.py",
    refuse=refused.refuse_reward,
    untimed={**DPO.untimed, "eval_on_start": "false"},
    rehearsal=replace(DPO.rehearsal, dropped=(*DPO.rehearsal.dropped, "eval_on_start")),
    plan=plans.REWARD_PLAN,
)

GRPO = replace(
    SFT,
    flags=(*flags.GRPO_LIBRARY_CLASSES, *_SHARED, RewardArguments),
    program="grpo.py",
    refuse=refused.refuse_grpo,
    rehearsal=replace(
        SFT.rehearsal,
        # vLLM needs a GPU. The two rows of a rank are answers to the same prompt.
        values={**SFT.rehearsal.values, "num_generations": MICRO_BATCH_SIZE},
        at_most={**SFT.rehearsal.at_most, "max_completion_length": 16},
        dropped=(*SFT.rehearsal.dropped, "steps_per_generation", "generation_batch_size", *VLLM_FLAGS),
    ),
    plan=plans.GRPO_PLAN,
)

RLOO = replace(
    GRPO,
    flags=(*flags.RLOO_LIBRARY_CLASSES, *_SHARED, RewardArguments),
    program="rloo.py",
    plan=plans.RLOO_PLAN,
)

VISION = replace(
    SFT,
    flags=(*flags.VISION_LIBRARY_CLASSES, *_SHARED, VisionArguments),
    program="vision.py",
    refuse=refuse_vision,
    untimed={"save_strategy": "no", "eval_strategy": "no"},
    rehearsal=replace(
        SFT.rehearsal,
        data="images",
        values=TRAINER_STEPS,
        # Rows are not truncated: the number of tokens of an image is set by the processor.
        at_most={"per_device_train_batch_size": MICRO_BATCH_SIZE},
    ),
    plan=plans.VISION_PLAN,
)
