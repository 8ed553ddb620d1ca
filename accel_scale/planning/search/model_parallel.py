"""Candidates for tensor, pipeline and sequence parallelism, for runs that do not fit with data parallelism alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from accel_scale.facts.names import STAGES_PER_RANK
from accel_scale.facts.optimizer_specs import modelled_optimizer
from accel_scale.planning.cost.strategies import ParallelChoice
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.styles import STYLES
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup
from accel_scale.planning.search.recipe_choices import PRETRAIN_PLAN, PlannedRecipe

# Types that `accel_scale.parallel` divides besides `STYLES` with `tensor_parallel`; a test compares with its checks.
_DIVIDED = frozenset(("gemma3", "gpt2", "gpt_neox", "phi"))
NO_SEQUENCE_PARALLEL_TYPES = frozenset(("bloom", "falcon", "gptj", "stablelm"))
_MOST_STAGES = 64
# Effort per combined kind of parallelism: after data parallelism in the decision tree.
_EFFORT = 20


@dataclass(frozen=True)
class Degrees:
    """Numbers of ranks that share each matrix product, the layers, and each row. All None: open; else None is 1."""

    tensor: int | None = None
    pipeline: int | None = None
    sequence: int | None = None

    @property
    def is_open(self) -> bool:
        """True if no degree was requested."""
        return self.tensor is None and self.pipeline is None and self.sequence is None


def families(
    model: ModelFacts,
    num_gpus: int,
    gpus_per_node: int,
    asked: Degrees,
    schedule: str = "1f1b",
    *,
    long_rows: bool,
    recipe: PlannedRecipe = PRETRAIN_PLAN,
) -> list[list[list[ParallelChoice]]]:
    """Choices grouped by the kinds of parallelism that they combine, each family in steps of growing degree.

    Tensor and sequence parallelism stay inside a server. A requested degree is the only one of its kind.

    Args:
        schedule: Schedule of pipelines.
        long_rows: Whether to try sequence parallelism even if it was not requested.
        recipe: The recipe that will run the plan.
    """
    inside = _powers(min(num_gpus, gpus_per_node))
    tensor, sequence = (1, *inside), (1, *inside) if long_rows else (1,)
    pipeline: tuple[int, ...] = (1, *_stages(model, num_gpus, gpus_per_node))
    if not asked.is_open:
        tensor, pipeline, sequence = ((size or 1,) for size in (asked.tensor, asked.pipeline, asked.sequence))
    if not recipe.divides_model:
        tensor = pipeline = (1,)
    if "sp" not in recipe.shared_by:
        sequence = (1,)
    by_kinds: dict[tuple[bool, ...], dict[int, list[ParallelChoice]]] = {}
    for tp, pp, sp in itertools.product(tensor, pipeline, sequence):
        degree = tp * pp * sp
        spans = tp * sp > gpus_per_node and asked.is_open
        if (degree == 1 and asked.is_open) or num_gpus % degree or spans:
            continue
        kinds = (tp > 1, pp > 1, sp > 1)
        by_kinds.setdefault(kinds, {}).setdefault(degree, []).extend(
            _choices(tp, pp, sp, num_gpus, gpus_per_node, schedule, in_engine=not recipe.divides_model)
        )
    ordered = sorted(by_kinds, key=lambda kinds: (sum(kinds), kinds))
    return [[by_kinds[kinds][degree] for degree in sorted(by_kinds[kinds])] for kinds in ordered]


def labels(model: ModelFacts, num_gpus: int, gpus_per_node: int, recipe: PlannedRecipe = PRETRAIN_PLAN) -> list[str]:
    """Labels of all available choices."""
    found = families(model, num_gpus, gpus_per_node, Degrees(), long_rows=True, recipe=recipe)
    return [choice.label for family in found for level in family for choice in level]


def _powers(most: int) -> tuple[int, ...]:
    return tuple(2**n for n in range(1, most.bit_length()) if 2**n <= most)


def _stages(model: ModelFacts, num_gpus: int, gpus_per_node: int) -> tuple[int, ...]:
    """Numbers of stages to try: powers of two, and the number of servers."""
    most = min(model.num_layers, num_gpus, _MOST_STAGES)
    nodes = num_gpus // gpus_per_node
    return tuple(sorted({*_powers(most), *([nodes] if 1 < nodes <= most else [])}))


def _choices(
    tp: int, pp: int, sp: int, num_gpus: int, gpus_per_node: int, schedule: str, *, in_engine: bool
) -> Iterator[ParallelChoice]:
    """One combination with each way to use the other ranks, from the simplest to the leanest."""
    data = num_gpus // (tp * pp * sp)
    shared = " × ".join(f"{name}{size}" for name, size in (("TP", tp), ("PP", pp), ("SP", sp)) if size > 1)
    kinds: tuple[tuple[str, str, bool], ...]
    if data * sp == 1:
        kinds = (("", "single", True),)
    elif pp > 1:
        # Stages gather their weights once per step, whatever is requested.
        kinds = (("DDP", "ddp", True), ("FSDP2", "fsdp2", False))
    else:
        kinds = (("DDP", "ddp", True), ("FSDP2 SHARD_GRAD_OP", "fsdp2", False), ("FSDP2", "fsdp2", True))
    effort = _EFFORT * sum(size > 1 for size in (tp, pp, sp)) + (tp * pp * sp).bit_length()
    for position, (name, strategy, reshard) in enumerate(kinds):
        parallel = ParallelSetup(
            strategy,
            num_gpus,
            gpus_per_node,
            reshard_after_forward=reshard,
            tensor_parallel=tp,
            pipeline_parallel=pp,
            sequence_parallel=sp,
            pipeline_schedule=schedule,
            stages_per_rank=STAGES_PER_RANK.get(schedule, 1) if pp > 1 else 1,
            in_engine=in_engine,
        )
        label = " × ".join(part for part in (name, shared) if part) or strategy
        yield ParallelChoice(label, parallel, effort + position)


def sharing_conflict(setup: TrainingSetup, model: ModelFacts, recipe: PlannedRecipe = PRETRAIN_PLAN) -> str | None:
    """Why ranks cannot share the model or rows this way; None if they can, or do not.

    The rules are those of `accel_scale.parallel.tensor.check_tensor_parallel`, `check_sequence_parallel` and
    `check_pipeline`, and of the recipe's `accel_scale.pretraining.parallel.check_layout`.
    """
    parallel = setup.parallel
    if parallel.model_parallel == 1:
        return None
    if setup.compile:
        return "layers that ranks share, or that see parts of rows, are not compiled"
    if not recipe.divides_model:
        return _sequence(setup, model)
    if setup.precision in ("fp16", "fp8"):
        return f"{setup.precision} is not available where ranks share the model"
    if setup.trains_adapters and parallel.tensor_parallel * parallel.pipeline_parallel > 1:
        return "adapters are not divided by tensor or pipeline parallelism"
    if setup.quantises_base:
        return "4-bit weights are not shared between ranks"
    if not modelled_optimizer(setup.optimizer).shares_weights:
        return f"{setup.optimizer} is not known to step weights that ranks share"
    return _tensor(setup, model) or _sequence(setup, model) or _pipeline(setup, model)


def divides_tensors(model_type: str) -> bool:
    """True if tensor parallelism divides models of this type."""
    style = STYLES.get(model_type)
    return model_type in _DIVIDED if style is None else style.tensor_parallel


def _tensor(setup: TrainingSetup, model: ModelFacts) -> str | None:
    degree = setup.parallel.tensor_parallel
    if degree == 1:
        return None
    if not divides_tensors(model.model_type):
        return f"{model.model_type} models are not divided by tensor parallelism"
    if degree > setup.parallel.gpus_per_node:
        return f"{degree} tensor-parallel ranks do not fit into a server of {setup.parallel.gpus_per_node}"
    sizes = {"attention heads": model.num_heads, "key-value heads": model.num_kv_heads}
    sizes |= {"intermediate features": model.intermediate_size}
    problem = next((f"{size} {name}" for name, size in sizes.items() if size % degree), None)
    return f"{problem} cannot be divided by {degree} ranks" if problem else None


def _sequence(setup: TrainingSetup, model: ModelFacts) -> str | None:
    degree, tensor = setup.parallel.sequence_parallel, setup.parallel.tensor_parallel
    if degree == 1:
        return None
    if model.model_type in NO_SEQUENCE_PARALLEL_TYPES:
        return f"{model.model_type} models are not divided along their sequences"
    heads, keys = model.num_heads // tensor, max(1, model.num_kv_heads // tensor)
    if heads % degree or (keys % degree and degree % keys):
        return f"{heads} attention heads with {keys} key heads cannot be divided among {degree} ranks of a sequence"
    if setup.sequence_length % degree:
        return f"rows of {setup.sequence_length} tokens cannot be cut into {degree} equal parts"
    return None


def _pipeline(setup: TrainingSetup, model: ModelFacts) -> str | None:
    parallel, num = setup.parallel, setup.accumulation
    ranks, schedule = parallel.pipeline_parallel, parallel.pipeline_schedule
    if ranks == 1:
        return None
    if ranks * parallel.stages_per_rank > model.num_layers:
        return f"{model.num_layers} layers cannot be divided among {ranks * parallel.stages_per_rank} stages"
    if schedule != "gpipe" and num < ranks:
        return f"a pipeline of {ranks} ranks needs as many micro-batches, and a step has {num}"
    if schedule in ("interleaved", "zero_bubble") and num % (num // ranks):
        return f"the schedule {schedule} needs a multiple of {ranks} micro-batches, and a step has {num}"
    return None
