"""The settings that a search considers: strategies, methods, checkpointing, optimizers and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from accel_scale.facts.loss_chunks import card_logits
from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.facts.optimizer_specs import LEAN_OPTIMIZERS
from accel_scale.planning.cost.phases import forward_setup
from accel_scale.planning.cost.sharding import state_bytes
from accel_scale.planning.cost.strategies import ParallelChoice, choices, conflict
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.search.model_parallel import sharing_conflict
from accel_scale.planning.search.plan import Request
from accel_scale.planning.search.stacks import stack_fields
from accel_scale.planning.traced.fits import share_traces


def open_choices(request: Request, options: Iterable[ParallelChoice]) -> Iterator[tuple[ParallelChoice, str]]:
    """The strategies and methods to consider."""
    for choice in options:
        if choice.label in request.strategies if request.strategies else choice.is_open:
            yield from ((choice, method) for method in request.methods)


def _leanest(request: Request, options: Iterable[ParallelChoice]) -> Iterator[TrainingSetup]:
    """The settings that are tried first for every strategy, method and optimizer."""
    for choice, method in open_choices(request, options):
        if request.global_batch_size % choice.parallel.data_parallel == 0:
            first = None
            for setup in (sizes[0] for sizes in settings_of(request, choice, method) if sizes):
                first = first or setup.checkpointing
                if why_not(setup, request) is None and (
                    setup.checkpointing == first or not states_exceed(setup, request)
                ):
                    yield setup


def why_not(setup: TrainingSetup, request: Request) -> str | None:
    """Why the request's recipe cannot run this combination; None if it can."""
    recipe = request.recipe
    return recipe.why_not(setup) or conflict(setup, request.model) or sharing_conflict(setup, request.model, recipe)


def states_exceed(setup: TrainingSetup, request: Request) -> bool:
    """True if weights, gradients and optimizer states alone do not fit, so that no checkpointing policy helps."""
    if setup.parallel.is_divided:
        return False
    states = state_bytes(request.model, setup)
    kept = states.weight_bytes + states.master_bytes + states.optimizer_bytes
    return kept + states.gradient_bytes + states.update_bytes > request.machine.gpu.memory_bytes


def settings_of(request: Request, choice: ParallelChoice, method: str) -> Iterator[list[TrainingSetup]]:
    """All settings of one strategy, leanest first, in lists that differ only in a growing micro-batch.

    A micro-batch that is a rank's whole share has a separate list, because no gradients are kept from an earlier one.
    Where FSDP2 would keep whole gradients, reducing them after every micro-batch is an option.
    """
    fixed = {**stack_fields(request.stack, method), **request.fixed}
    per_rank = request.global_batch_size // choice.parallel.data_parallel
    policies = (fixed.pop("checkpointing"),) if "checkpointing" in fixed else ("full", "selective", "none")
    optimizers = (fixed.pop("optimizer"),) if "optimizer" in fixed else _optimizers(method, choice)
    least = 2 if fixed.get("kl_rows") else 1
    # A whole share that is too small stays, so that its reason is reported.
    divisors = tuple(size for size in _divisors(per_rank) if size >= least or size == per_rank)
    micro_batches = (fixed.pop("micro_batch_size"),) if "micro_batch_size" in fixed else divisors
    micro_batches = tuple(size for size in micro_batches if size % request.recipe.rows_per_example == 0)
    # All answers that a step is trained on are generated before it.
    if (generation := fixed.pop("generation", None)) is not None:
        generation = replace(generation, rows=generation.rows or per_rank)
    reference = fixed.pop("reference_model", request.recipe.has_reference_model)
    reference = reference and not METHOD_FACTS[method].trains_adapters
    syncs = (fixed.pop("sync_each_batch"),) if "sync_each_batch" in fixed else _syncs(method, choice)
    for policy in policies:
        for optimizer in optimizers:
            accumulating = [size for size in micro_batches if per_rank % size == 0 and size < per_rank]
            at_once = [size for size in micro_batches if size == per_rank]
            lists = [(accumulating, sync) for sync in syncs] + [(at_once, syncs[0])]
            for sizes, sync_each_batch in lists:
                yield [
                    TrainingSetup(
                        method=method,
                        checkpointing=policy,
                        optimizer=optimizer,
                        micro_batch_size=size,
                        accumulation=per_rank // size,
                        sync_each_batch=sync_each_batch,
                        sequence_length=request.sequence_length,
                        chunk_logits=card_logits(request.machine.gpu.memory_bytes),
                        parallel=choice.parallel,
                        reference_model=reference,
                        generation=generation,
                        **fixed,
                    )
                    for size in sizes
                ]


def _optimizers(method: str, choice: ParallelChoice) -> tuple[str, ...]:
    """Optimizers to choose from; 8-bit states do not support shared weights.

    States of adapters are small, but on one GPU 8-bit states may make room for a larger micro-batch, as DeepSpeed's
    offload does. bitsandbytes does not page states as small as an adapter's.
    """
    if choice.parallel.is_divided:
        return LEAN_OPTIMIZERS[:1]
    if METHOD_FACTS[method].trains_adapters:
        return LEAN_OPTIMIZERS[: 2 if choice.parallel.kind.is_single else 1]
    return LEAN_OPTIMIZERS


def _syncs(method: str, choice: ParallelChoice) -> tuple[bool, ...]:
    """Values of `sync_each_batch` to try; whole gradients of adapters are too small to matter."""
    parallel = choice.parallel
    return (False, True) if not METHOD_FACTS[method].trains_adapters and parallel.can_sync_each_batch else (False,)


def _divisors(per_rank: int) -> tuple[int, ...]:
    """Powers of two, up to 64, that divide a rank's share of the batch."""
    return tuple(size for size in (1, 2, 4, 8, 16, 32, 64) if per_rank % size == 0)


def trace_ahead(request: Request) -> None:
    """Let a second process, if one is allowed, make some of the traces that the search will need."""
    if request.model.traced_config:
        options = request.choices or choices(request.machine.num_gpus, request.machine.gpus_per_node)
        share_traces(request.model, map(forward_setup, _leanest(request, options)), is_cuda=request.is_cuda)
