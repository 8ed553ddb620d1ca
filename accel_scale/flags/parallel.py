"""Flags of model parallelism, and the layout of ranks that follows from flags, launch and launch file."""

from __future__ import annotations

from dataclasses import dataclass

from accel_scale.facts.names import PIPELINE_SCHEDULES
from accel_scale.flags.common import _flag


@dataclass
class SequenceArguments:
    """How ranks share rows, if the engine (DDP, FSDP2, DeepSpeed) treats all of them as data-parallel."""

    sp_size: int | None = _flag(
        None, "Ranks that share each row (Ulysses sequence parallelism). Default: the launch file's, else 1."
    )


@dataclass
class ParallelArguments(SequenceArguments):
    """How ranks share the model. The remaining ranks are data-parallel: replicas under a DDP launch file, shards under
    an FSDP2 one."""

    tp_size: int | None = _flag(
        None, "Ranks that share each matrix product (tensor parallelism). Default: the launch file's, else 1."
    )
    pp_size: int = _flag(1, "Ranks to split the layers over (pipeline parallelism).")
    pp_schedule: str | None = _flag(
        None, "Pipeline schedule; its micro-batches are those of gradient accumulation. Default: 1f1b.",
        choices=PIPELINE_SCHEDULES,
    )  # fmt: skip
    pp_stages_per_rank: int | None = _flag(
        None, "Stages that each rank of a pipeline holds, for interleaved schedules. Default: 2 for those, else 1."
    )
