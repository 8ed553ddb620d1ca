"""Pipeline parallelism on torch.distributed.pipelining: micro-batches of a step flow through stages on several ranks.

    settings = PipelineSettings("1f1b")
    check_pipeline(model.config, settings, pp_size, num_micro_batches)
    parts = split_model(model, boundaries, stages_of_rank(settings, pp_size, pp_rank))
    for part in parts: fully_shard(part, …)              # or replicate, or nothing
    pipeline = Pipeline(parts, …, group, device, settings, num_micro_batches)
    losses = pipeline.forward_backward(micro_batches, num_tokens, loss_factor)
    clip_gradients([p for part in parts for p in owned_parameters(part).values()], …)  # and the copies by that factor
    optimizer.step()

All ranks of a pipeline read the same rows: token ids, positions and labels reach every stage from its own loader, and
only hidden states and their gradients are sent between stages. Checked on torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_scale.errors import ConfigError
from accel_scale.modeling.evaluation_mode import evaluating
from accel_scale.optimization.head_loss import head_loss
from accel_scale.parallel.pipelines.evaluate import forward_through
from accel_scale.parallel.pipelines.loss import repeatable
from accel_scale.parallel.pipelines.settings import PipelineSettings, check_pipeline, stages_of_rank
from accel_scale.parallel.pipelines.split import split_model, stage_boundaries, stage_of
from accel_scale.parallel.pipelines.tied import TiedWeights

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Pipeline", "PipelineSettings", "check_pipeline", "split_model", "stage_boundaries", "stages_of_rank"]


class Pipeline:
    """Forward and backward passes of optimizer steps, over the ranks of `group`.

    torch's stages learn shapes and dtypes of their messages in the first step, and again when rows change length, by
    one additional forward and backward pass of a micro-batch; random states are restored. They keep a receive buffer
    of (batch, length, hidden size) for every micro-batch.

    Args:
        parts: This rank's stages, from `split_model`, wrapped by FSDP2's `fully_shard`, `replicate` or not at all.
            Under ``zero_bubble`` FSDP2's weights stay gathered for the step; under other schedules they are gathered
            again for each micro-batch, unless `fully_shard` was told not to reshard after forward.
        stage_indices: Indices of these stages, from `stages_of_rank`.
        num_stages: Stages of the pipeline.
        group: Ranks of the pipeline, in the order of `stages_of_rank`.
        device: Device of parameters and activations.
        settings: The schedule.
        num_micro_batches: Number in every step.
        loss: Loss of the last stage: ``(part, hidden, labels, num_items=…, shift=…)`` → sum of cross-entropies ÷
            `num_items`, where `hidden` has passed the final norm. None: the project's chunked head,
            `accel_scale.optimization.head_loss.head_loss`.
        autocast: Creates the context of every forward pass; backward passes run outside of it.

    Attributes:
        has_first_stage, has_last_stage: True if this rank holds the stage.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        stage_indices: Sequence[int],
        num_stages: int,
        group: dist.ProcessGroup,
        device: torch.device | str,
        settings: PipelineSettings,
        num_micro_batches: int,
        loss: Callable[..., torch.Tensor] | None = None,
        *,
        autocast: Callable[[], Any] = contextlib.nullcontext,
    ) -> None:
        self.parts, self.stage_indices, self.num_stages = list(parts), list(stage_indices), num_stages
        self.group, self.device, self.settings = group, torch.device(device), settings
        self.num_micro_batches = num_micro_batches
        self.has_first_stage, self.has_last_stage = 0 in stage_indices, num_stages - 1 in stage_indices
        loss = head_loss if loss is None else loss
        for part in self.parts:
            stage = stage_of(part)
            stage.autocast = autocast
            stage.loss = repeatable(loss) if settings.splits_backward else loss
            if settings.splits_backward:
                _keep_gathered(part)
        self._tied = TiedWeights(self.parts, group)
        self._schedule: Any = None
        self._shapes: Any = None
        self._loss_factor = 1.0
        self._losses: list[torch.Tensor] = []
        self._sends: list[Any] = []

    def forward_backward(
        self,
        micro_batches: Sequence[Mapping[str, torch.Tensor]],
        num_tokens: torch.Tensor | int,
        loss_factor: float = 1.0,
    ) -> list[torch.Tensor]:
        """Run all forward and backward passes of one step; leaves gradients in ``.grad``, reduced once over replicas.

        Gradients of a tied embedding and head are summed, so that both copies take the same step.

        Args:
            micro_batches: `num_micro_batches` of one shape: ``input_ids``, ``labels`` (or ``shift_labels``) and
                perhaps ``position_ids`` or other inputs of the model, each (batch, length); the same on all ranks of
                the group.
            num_tokens: Labelled tokens of the global step, the divisor of the sum of cross-entropies.
            loss_factor: Factor of the loss before the backward pass, not included in the returned losses.

        Returns:
            The loss of each micro-batch on the last stage's rank; empty elsewhere. Their sum is the step's loss.
        """
        self._wait_for_sends()
        inputs = self._stack(micro_batches)
        schedule = self._schedule_for(inputs)
        for part in self.parts:
            stage_of(part).num_items = num_tokens
        self._loss_factor, self._losses = loss_factor, []
        labels = self._labels(inputs)
        args = (inputs.pop("input_ids"),) if self.has_first_stage else ()
        inputs.pop("input_ids", None)
        held = self._tied.set_aside()
        schedule.step(*args, target=labels, return_outputs=False, **inputs)
        self._tied.sum_gradients(held)
        losses, self._losses = self._losses[-self.num_micro_batches :], []
        return losses

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Sum of the cross-entropies of `batch` on the last stage's rank; None elsewhere. Runs forward passes only.

        Ranks do not wait for later stages, so several consecutive calls keep all of them busy.
        """
        inputs = {name: tensor.to(self.device) for name, tensor in batch.items()}
        for part in self.parts:
            stage_of(part).num_items = 1
        if len(self._sends) > 2 * self.num_stages:
            self._wait_for_sends()
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(evaluating(part))
            summed = forward_through(self, inputs, self._sends)
        for part in self.parts:
            _free_gathered(part)
        return summed

    def _wait_for_sends(self) -> None:
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _stack(self, micro_batches: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Concatenate all micro-batches' rows; torch's schedules split them again."""
        if len(micro_batches) != self.num_micro_batches:
            raise ConfigError(
                f"the pipeline was made for {self.num_micro_batches} micro-batches, and got {len(micro_batches)}.",
                place="micro_batches",
                fix="give every step as many.",
            )
        shapes = [{name: tuple(tensor.shape) for name, tensor in batch.items()} for batch in micro_batches]
        if any(other != shapes[0] for other in shapes[1:]):
            raise ConfigError(
                "micro-batches of one step have different shapes or fields.",
                place="micro_batches",
                fix="pad or pack rows to one length; the pipeline's buffers are of one size.",
            )
        return {
            name: torch.cat([batch[name].to(self.device, non_blocking=True) for batch in micro_batches])
            for name in shapes[0]
        }

    def _labels(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """The labels, for the schedule; they stay in `inputs` only where the loss is computed."""
        names = [name for name in ("labels", "shift_labels") if name in inputs]
        if len(names) != 1:
            raise ConfigError("a batch needs labels or shift_labels.", place="micro_batches", fix="give one of them.")
        return inputs[names[0]] if self.has_last_stage else (inputs.pop(names[0]), None)[1]

    def _schedule_for(self, inputs: dict[str, torch.Tensor]) -> Any:
        """The schedule, recreated for other shapes, because torch's receive buffers have a fixed shape."""
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in inputs.items()}
        if shapes != self._shapes:
            self._schedule, self._shapes = self._make_schedule(), shapes
        return self._schedule

    def _make_schedule(self) -> Any:
        from torch.distributed.pipelining import PipelineStage, schedules

        stages: list[Any] = [
            PipelineStage(part, index, self.num_stages, self.device, group=self.group)
            for part, index in zip(self.parts, self.stage_indices, strict=True)
        ]
        options: dict[str, Any] = {
            "n_microbatches": self.num_micro_batches,
            "loss_fn": self._scaled,
            "scale_grads": False,
        }
        single = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}
        if self.settings.schedule in single:
            return single[self.settings.schedule](stages[0], **options)
        several = {
            "interleaved": schedules.ScheduleInterleaved1F1B,
            "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
        }
        return several[self.settings.schedule](stages, **options)

    def _scaled(self, loss: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
        """The scalar to differentiate; the last stage's output already is the loss."""
        self._losses.append(loss.detach())
        return loss * self._loss_factor


def _keep_gathered(part: nn.Module) -> None:
    """Gather FSDP2's weights once per step: weight gradients computed separately need them in place.

    Weights freed after a forward pass would silently get no gradient (torch 2.13).
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(part, FSDPModule):
        part.set_reshard_after_forward(False)


def _free_gathered(part: nn.Module) -> None:
    """Free gathered weights: without a backward pass they would stay, and a loaded checkpoint would not reach them."""
    from torch.distributed.fsdp import FSDPModule

    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
