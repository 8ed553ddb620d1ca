"""Model parallelism in a plain loop: tensor, pipeline and sequence parallelism together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_scale.parallel.layout import ParallelLayout, build_mesh

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

_MARK = "_accel_scale_model_parallel"


@dataclass
class ModelParallel:
    """The part of a shared model that one rank holds, and the ranks that it shares it with.

    Attributes:
        layout, mesh: Layout and mesh of all ranks.
        parts: This rank's stages; without a pipeline, the model itself.
        pipeline: Runs the stages' schedule; None without a pipeline.
        undecayed: Names of parameters without weight decay, determined from whole shapes.
    """

    layout: ParallelLayout
    mesh: DeviceMesh
    parts: list[Any]
    pipeline: Any = None
    undecayed: frozenset[str] = field(default_factory=frozenset)

    @property
    def has_loss(self) -> bool:
        """True if this rank computes the loss: it holds the last stage."""
        return bool(self.mesh["pp"].get_local_rank() == self.layout.pp - 1)

    @property
    def speaks_for_rows(self) -> bool:
        """True if this rank reports the rows of its micro-batches, which others read too."""
        return self.has_loss and self.mesh["tp"].get_local_rank() == 0

    @property
    def pp_group(self) -> Any:
        """Process group over the stages; None without a pipeline."""
        return self.mesh["pp"].get_group() if self.layout.pp > 1 else None

    def local(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """This rank's part of a micro-batch's rows."""
        if self.layout.sp == 1:
            return batch
        from accel_scale.parallel.sequence import cut_batch

        return cut_batch(batch, self.mesh["sp"].get_local_rank(), self.layout.sp)

    def evaluate(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Sum of cross-entropies of this rank's part of a micro-batch; None if another stage computes it."""
        from accel_scale.optimization.fast_loss import language_model_loss

        if self.pipeline is None:
            return language_model_loss(model, batch, 1)
        summed: torch.Tensor | None = self.pipeline.evaluate(batch)
        return summed

    def sync_gradients(self, enabled: bool) -> None:
        """Set whether the next backward passes reduce gradients over the data-parallel ranks."""
        from torch.distributed.fsdp import FSDPModule

        for part in self.parts:
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(enabled)

    def counted_parameters(self) -> list[torch.Tensor]:
        """This rank's parameters that count in the global gradient norm: not copies of another stage's."""
        if self.pipeline is None:
            return list(self.parts[0].parameters())
        from accel_scale.parallel.pipelines.split import owned_parameters

        return [parameter for part in self.parts for parameter in owned_parameters(part).values()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """(name in the plain model, parameter or persistent buffer, True if it is a copy of another stage's).

        A copy has the name of its original.
        """
        from accel_scale.parallel.pipelines.split import owned_parameters, stage_of

        seen: set[int] = set()  # weights that are tied within a part have two names
        for part in self.parts:
            owned = owned_parameters(part) if self.pipeline is not None else None
            copies = set(dict(part.named_parameters())) - set(owned) if owned is not None else set()
            for name, tensor in part.state_dict(keep_vars=True).items():
                if hasattr(tensor, "shape") and id(tensor) not in seen:
                    seen.add(id(tensor))
                    is_copy = name in copies
                    yield stage_of(part).embedding if is_copy else name, tensor, is_copy


def model_parallel_of(accelerator: Accelerator) -> ModelParallel | None:
    """The result of `parallelize` for this accelerator's run; None in an ordinary run."""
    found: ModelParallel | None = getattr(accelerator, _MARK, None)
    return found


def parallelize(
    accelerator: Accelerator,
    model: nn.Module,
    layout: ParallelLayout,
    *,
    reshard_after_forward: bool = True,
    compute_dtype: torch.dtype | None = None,
    pipeline: object = None,
    num_micro_batches: int = 1,
    row_length: int = 1024,
) -> ModelParallel:
    """Split `model`, identical on every rank, over the ranks of `layout`; its parameters are replaced by new ones.

    Args:
        accelerator: Keeps the result for the guard and checkpoints; do not pass the model to its `prepare`.
        model: In host memory, whole.
        layout: Layout of all ranks.
        reshard_after_forward: Same as FSDP2's.
        compute_dtype: Dtype of gathered weights; None: their own.
        pipeline: `accel_scale.parallel.pipelines.pipeline.PipelineSettings`; only read if ``layout.pp > 1``.
        num_micro_batches: Number per optimizer step on each rank.
        row_length: Tokens per row, for balancing a pipeline's stages.

    Raises:
        ConfigError: if the model cannot be split this way.
    """
    from accel_scale.parallel.data_parallel import apply_data_parallel

    mesh: Any = build_mesh(layout, accelerator.device.type)
    undecayed = undecayed_names(model)
    if layout.tp > 1:
        from accel_scale.parallel.tensor import apply_tensor_parallel

        apply_tensor_parallel(model, mesh["tp"])
    parts: list[Any] = [model]
    stages: Sequence[int] = ()
    if layout.pp > 1:
        parts, stages = _split(model, layout, mesh, pipeline, row_length)
    if layout.sp > 1:
        from accel_scale.parallel.sequence import enable_ulysses

        for part in parts:
            enable_ulysses(part, mesh["sp"].get_group())
    for part in parts:
        part.to(accelerator.device)
        apply_data_parallel(
            part, mesh, layout, reshard_after_forward=reshard_after_forward, compute_dtype=compute_dtype
        )
    shared = ModelParallel(layout, mesh, parts, undecayed=undecayed)
    if layout.pp > 1:
        shared.pipeline = _runner(accelerator, shared, stages, pipeline, num_micro_batches)
    setattr(accelerator, _MARK, shared)
    return shared


def undecayed_names(model: Any) -> frozenset[str]:
    """Names of parameters without weight decay: norms, biases and embeddings, including tied heads."""
    embeddings = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None}
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, p in named if p.ndim < 2 or id(p) in embeddings)


def decay_groups_of(shared: ModelParallel, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups over this rank's parts, like those of `pretraining.resolve.decay_groups` for a whole model."""
    groups: dict[bool, dict[int, Any]] = {True: {}, False: {}}
    for part in shared.parts:
        for name, parameter in part.named_parameters():
            if parameter.requires_grad:
                groups[name not in shared.undecayed][id(parameter)] = parameter
    decays = {True: weight_decay, False: 0.0}
    return [{"params": list(held.values()), "weight_decay": decays[key]} for key, held in groups.items() if held]


def _split(
    model: Any, layout: ParallelLayout, mesh: Any, settings: Any, row_length: int
) -> tuple[list[Any], Sequence[int]]:
    from accel_scale.parallel.pipelines.pipeline import split_model, stage_boundaries, stages_of_rank
    from accel_scale.parallel.pipelines.split import costs_of

    num_stages = layout.pp * settings.stages_per_rank
    boundaries = stage_boundaries(costs_of(model, row_length), num_stages)
    stages = stages_of_rank(settings, layout.pp, mesh["pp"].get_local_rank())
    return split_model(model, boundaries, stages), stages


def _runner(accelerator: Any, shared: ModelParallel, stages: Sequence[int], settings: Any, micro_batches: int) -> Any:
    from accel_scale.parallel.pipelines.pipeline import Pipeline

    return Pipeline(
        shared.parts,
        stages,
        shared.layout.pp * settings.stages_per_rank,
        shared.pp_group,
        accelerator.device,
        settings,
        micro_batches,
        autocast=accelerator.autocast,
    )
