"""Names that flags, plans and training share: methods, precisions, schedules."""

from __future__ import annotations

from typing import Literal, TypeAlias

from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.facts.precisions import PRECISION_FACTS

# The first is the default.
PIPELINE_SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
# Stages per rank of the schedules that need more than one.
STAGES_PER_RANK = {"interleaved": 2, "zero_bubble": 2}


SCHEDULE_ALIASES = {"wsd": "warmup_stable_decay"}
DECAYING_SCHEDULES = ("cosine", "linear", "warmup_stable_decay")
OWN_SCHEDULES = (*DECAYING_SCHEDULES, "constant", "constant_with_warmup")
# Every value of transformers' `SchedulerType` (5.23), spelled out so that flags are parsed without importing it.
SCHEDULE_NAMES = (
    *OWN_SCHEDULES,
    *SCHEDULE_ALIASES,
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "greedy",
)


# What a column of the data can hold. `answer` is kept for exact match and `tools` for the chat template.
COLUMN_ROLES = (
    "messages", "prompt", "completion", "text", "system", "answer", "tools", "chosen", "rejected", "label", "images",
)  # fmt: skip
# What rows hold besides questions: `pairs` of a better and a worse answer, single answers with `labels` (good or bad),
# or `images`.
RowsWith: TypeAlias = Literal["pairs", "labels", "images"]
METHODS = tuple(METHOD_FACTS)
FUSED_KERNELS = ("auto", "on", "off")
# Layers of a model that fused kernels can replace, and the label of Liger's.
FUSED_PARTS = ("RMSNorm", "LayerNorm", "RoPE", "SwiGLU", "GEGLU")
FUSED_LABEL = "Liger's"
# Activation checkpointing left to the plan: the fastest of `AUTO_POLICIES` that fits. They are ordered from the least
# recomputation to the most.
AUTO_POLICY = "auto"
AUTO_POLICIES = ("none", "selective", "every_2", "full")
PRECISIONS = tuple(PRECISION_FACTS)
DDP_HOOKS = ("none", "bf16", "fp16", "powersgd")
POWERSGD_RANK, POWERSGD_STEP = 4, 100  # by default
# torch's hook refuses to start before two steps are done, because DDP rebuilds its buckets after the first.
FIRST_POWERSGD_STEP = 3
DECAY_SHAPES = ("1-sqrt", "linear", "cosine")
