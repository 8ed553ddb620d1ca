"""The pipeline schedule, its requirements, and the stages that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError
from accel_scale.facts.checkpointing import SEGMENTS, kind_of
from accel_scale.facts.names import PIPELINE_SCHEDULES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PLACE, _SCHEDULE_PLACE = "--pp_size", "--pp_schedule"


@dataclass(frozen=True)
class PipelineSettings:
    """How micro-batches pass through the stages.

    Attributes:
        schedule: ``gpipe``: all forward passes, then all backward passes. ``1f1b``: as soon as it can, a rank does one
            backward pass for every forward pass, and holds activations of p instead of m micro-batches.
            ``interleaved``: 1F1B with several stages per rank, which wait less and send more. ``zero_bubble``: 1F1B in
            which gradients of weights wait for a gap (ZB1P); keeps more activations.
        stages_per_rank: 1 for ``gpipe`` and ``1f1b``, 2 or more for ``interleaved``, any for ``zero_bubble``.
    """

    schedule: str = "1f1b"
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        if self.schedule not in PIPELINE_SCHEDULES:
            raise ConfigError(
                f"{self.schedule!r} is not a pipeline schedule.",
                place=_SCHEDULE_PLACE,
                fix=f"use one of {', '.join(PIPELINE_SCHEDULES)}.",
            )
        wrong = {"gpipe": self.stages_per_rank != 1, "1f1b": self.stages_per_rank != 1}
        if wrong.get(self.schedule, False) or self.stages_per_rank < (2 if self.schedule == "interleaved" else 1):
            needs = {"interleaved": "2 or more stages", "zero_bubble": "1 or more stages"}
            raise ConfigError(
                f"the schedule {self.schedule} with {self.stages_per_rank} stages per rank does not exist.",
                place="--pp_stages_per_rank",
                fix=f"use {needs.get(self.schedule, '1 stage')} per rank.",
            )

    @property
    def splits_backward(self) -> bool:
        """True if gradients of inputs and of weights are computed separately."""
        return self.schedule == "zero_bubble"


def stages_of_rank(settings: PipelineSettings, pp_size: int, pp_rank: int) -> tuple[int, ...]:
    """Indices of the stages that a rank of the pipeline holds: every `pp_size`-th."""
    return tuple(pp_rank + pp_size * loop for loop in range(settings.stages_per_rank))


def check_pipeline(
    config: PreTrainedConfig,
    settings: PipelineSettings,
    pp_size: int,
    num_micro_batches: int,
    *,
    checkpointing: str = "none",
) -> None:
    """Refuse a pipeline that cannot run, before a model is loaded.

    `split_model` refuses what only the model itself reveals (layers that share state, modules without a place).

    Args:
        config: The model's configuration, of transformers.
        pp_size: Ranks of a pipeline.
        num_micro_batches: Number per rank and optimizer step: gradient accumulation without a pipeline.
        checkpointing: Name of the activation checkpointing policy.

    Raises:
        ConfigError: naming what to change.
    """
    text = config.get_text_config()
    num_stages = pp_size * settings.stages_per_rank
    if pp_size < 2:
        raise ConfigError(f"a pipeline of {pp_size} rank is none.", place=_PLACE, fix="use 2 or more.")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{config.model_type} has an encoder; only causal language models are split.", place=_PLACE, fix="use 1."
        )
    if getattr(text, "num_kv_shared_layers", 0):
        raise ConfigError(
            f"layers of {config.model_type} read keys and values of other layers, which other stages hold.",
            place=_PLACE,
            fix="use 1.",
        )
    num_layers = text.num_hidden_layers
    if num_layers < num_stages:
        raise ConfigError(
            f"{num_layers} layers cannot be divided among {num_stages} stages.",
            place=_PLACE,
            fix=f"use {num_layers // settings.stages_per_rank} ranks at most, or fewer stages per rank.",
        )
    if settings.splits_backward and checkpointing == "selective":
        raise ConfigError(
            "the schedule zero_bubble runs backward passes twice, which selective checkpointing does not allow.",
            place="--checkpointing_policy",
            fix="use none or full, or the schedule 1f1b.",
        )
    if kind_of(checkpointing) == SEGMENTS:
        raise ConfigError(
            "a pipeline calls the layers of its stages one by one, and segments are recomputed as a whole.",
            place="--checkpointing_policy",
            fix="use full or every_2.",
        )
    _check_micro_batches(settings, pp_size, num_micro_batches)


def _check_micro_batches(settings: PipelineSettings, pp_size: int, num_micro_batches: int) -> None:
    place, schedule = "--global_batch_size", settings.schedule
    if num_micro_batches < 1 or (schedule != "gpipe" and num_micro_batches < pp_size):
        raise ConfigError(
            f"the schedule {schedule} needs a micro-batch for each of the {pp_size} ranks, and a step has "
            f"{num_micro_batches}.",
            place=place,
            fix=f"use {pp_size} micro-batches or more, {4 * pp_size} to keep ranks busy.",
        )
    if schedule in ("interleaved", "zero_bubble"):
        rounds = num_micro_batches // pp_size
        if num_micro_batches % rounds:
            raise ConfigError(
                f"the schedule {schedule} takes {num_micro_batches} micro-batches in {rounds} rounds, which must be "
                "equal.",
                place=place,
                fix=f"use a multiple of {pp_size}, such as {pp_size * rounds}.",
            )
