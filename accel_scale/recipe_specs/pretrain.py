"""Declaration of the pretraining recipe, `recipes/pretrain.py`, for the commands."""

from __future__ import annotations

from accel_scale.flags.guard import GuardArguments
from accel_scale.flags.parallel import ParallelArguments
from accel_scale.flags.pretraining import PretrainArguments, PretrainDataArguments, PretrainModelArguments
from accel_scale.planning.search.recipe_choices import PRETRAIN_PLAN
from accel_scale.pretraining.resolve import refuse_contradictions
from accel_scale.recipe_specs.spec import (
    CHECKPOINT_STEP,
    MICRO_BATCH_SIZE,
    NUM_STEPS,
    RecipeSpec,
    RehearsalSpec,
)

PRETRAIN = RecipeSpec(
    flags=(PretrainModelArguments, PretrainDataArguments, PretrainArguments, ParallelArguments, GuardArguments),
    program="pretrain.py",
    refuse=refuse_contradictions,
    resume_flag="resume",
    untimed={"save_steps": "0", "eval_steps": "0", "sample_tokens": "0", "resume": "no"},
    rehearsal=RehearsalSpec(
        config_flag="model_config",
        size_flag="num_params",
        data="text",
        data_flag="data",
        data_flags=("data", "text_column", "text_documents", "validation_data", "validation_share"),
        values={
            "max_steps": NUM_STEPS,
            "save_steps": CHECKPOINT_STEP,
            "keep_last": NUM_STEPS,
            "logging_steps": 1,
            "eval_steps": 0,
            "eval_rows": 2 * MICRO_BATCH_SIZE,
        },
        dropped=(
            "max_tokens", "max_train_time", "warmup_steps", "decay_from", "decay_steps", "keep_every", "resume",
            "report_to", "run_name", "profile_steps", "memory_summary", "device_memory", "torch_compile", "plan",
            "model_name_or_path", "model_revision", "model_config", "num_params", "tokenizer", "train_tokenizer",
            "vocab_size", "plan_gpu",
        ),
        batch_flag="global_batch_size",
        complete_file="manifest.json",
        runs_on_cpu=True,
    ),
    plan=PRETRAIN_PLAN,
)  # fmt: skip
