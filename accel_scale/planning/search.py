"""The choice: every combination that the user left open, what fits, and which of it is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.planning.hardware import Machine
from accel_scale.planning.memory import MemoryEstimate, predict_memory
from accel_scale.planning.model_facts import ModelFacts
from accel_scale.planning.strategies import Choice, choices, conflict, tensor_parallel_choices
from accel_scale.planning.timing import TimeEstimate, predict_time
from accel_scale.planning.training_setup import TrainingSetup
from accel_scale.units import format_bytes

# Predicted times closer than this are a tie, which the simpler setting wins.
_TIE = 0.03
_CHECKPOINTING = ("none", "selective", "full", "offload")
_METHODS = ("full", "lora", "qlora")
_LEAN_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch_8bit", "paged_adamw_8bit")


@dataclass(frozen=True)
class Request:
    """What is to be trained, on what, and what the user has already decided.

    Attributes:
        model: The model.
        machine: Its cards.
        global_batch_size: Sequences per optimizer step over all ranks.
        sequence_length: Tokens per row.
        methods: Ways to train that may be chosen from.
        fixed: Fields of `TrainingSetup` that are decided, by name.
        strategies: Labels of strategies to choose from; empty: all.
        document_length: Tokens per document on average where rows are packed.
        choices: Ways to spread the run to choose from, such as a launch file's; empty: all that the machine offers.
        is_cuda: Whether the kernels are CUDA's.
    """

    model: ModelFacts
    machine: Machine
    global_batch_size: int = 64
    sequence_length: int = 2048
    methods: tuple[str, ...] = ("full",)
    fixed: dict[str, Any] = field(default_factory=dict)
    strategies: tuple[str, ...] = ()
    document_length: float | None = None
    choices: tuple[Choice, ...] = ()
    is_cuda: bool = True


@dataclass(frozen=True)
class Candidate:
    """One setting with what is predicted for it; `time` is None on a card whose speed is not known."""

    choice: Choice
    setup: TrainingSetup
    memory: MemoryEstimate
    time: TimeEstimate | None

    @property
    def simplicity(self) -> tuple[int, int, int]:
        """Smaller is simpler: strategy, checkpointing, optimizer."""
        setup = self.setup
        lean = _LEAN_OPTIMIZERS.index(setup.optimizer) if setup.optimizer in _LEAN_OPTIMIZERS else 0
        policy = setup.checkpointing
        return self.choice.effort, _CHECKPOINTING.index(policy) if policy in _CHECKPOINTING else 1, lean


@dataclass(frozen=True)
class Rejection:
    """A strategy of which no setting fits, or that cannot run.

    Attributes:
        setup: Its leanest setting; None where none can run.
        memory: What is predicted for that.
    """

    label: str
    method: str
    reason: str
    setup: TrainingSetup | None = None
    memory: MemoryEstimate | None = None


@dataclass(frozen=True)
class Plan:
    """What fits, fastest first, and why the rest does not."""

    request: Request
    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    num_considered: int

    @property
    def best(self) -> Candidate | None:
        """The first choice."""
        return self.candidates[0] if self.candidates else None

    @property
    def nearest_miss(self) -> Rejection | None:
        """Of what does not fit on the cards, the setting that needs least."""
        missed = [rejection for rejection in self.rejections if rejection.memory is not None]
        return min(missed, key=lambda rejection: rejection.memory.high_bytes, default=None)  # type: ignore[union-attr]


def search(request: Request) -> Plan:
    """Every combination of strategy, method, checkpointing, optimizer and micro-batch, ranked.

    Ranked by predicted time per step at the requested global batch; settings within 3 % of each other count as
    equal, and the simplest of them comes first. Tensor parallelism is considered when nothing else fits.

    Raises:
        ConfigError: if the global batch does not divide among the ranks, or a fixed setting is not known.
    """
    machine = request.machine
    if request.choices:
        return _plan(request, *_try(request, iter(request.choices)))
    if request.global_batch_size % machine.num_gpus:
        raise ConfigError(
            f"a global batch of {request.global_batch_size} does not divide among {machine.num_gpus} ranks.",
            place="--global_batch_size",
            fix=f"use a multiple of {machine.num_gpus}.",
        )
    found, rejected, considered = _try(request, choices(machine.num_gpus, machine.gpus_per_node))
    if not found and machine.num_gpus > 1:
        more = tensor_parallel_choices(machine.num_gpus, machine.gpus_per_node, request.model.num_kv_heads)
        found, also, again = _try(request, more)
        rejected, considered = rejected + also, considered + again
    return _plan(request, found, rejected, considered)


def _plan(request: Request, found: list[Candidate], rejected: list[Rejection], considered: int) -> Plan:
    return Plan(request, tuple(_rank(found)), tuple(rejected), considered)


def _try(request: Request, options: Iterator[Choice]) -> tuple[list[Candidate], list[Rejection], int]:
    found: list[Candidate] = []
    rejected: list[Rejection] = []
    considered = 0
    for choice in options:
        if request.strategies and choice.label not in request.strategies:
            continue
        for method in request.methods:
            best, rejection, count = _fastest(request, choice, method)
            considered += count
            if best is not None:
                found.append(best)
            else:
                rejected.append(rejection)
    return found, rejected, considered


def _fastest(request: Request, choice: Choice, method: str) -> tuple[Candidate | None, Rejection, int]:
    """The fastest setting of a strategy that fits, or why the leanest does not, and how many were considered."""
    fitting: list[Candidate] = []
    rejection, count = Rejection(choice.label, method, "no micro-batch divides a rank's share of the batch"), 0
    for sizes in _settings(request, choice, method):
        count += len(sizes)
        # Memory grows with the micro-batch: after the first that does not fit no other of them can.
        for setup in sizes:
            if (why := conflict(setup, request.model)) is not None:
                rejection = rejection if rejection.memory else replace(rejection, reason=f"{why}.")
                break
            memory = predict_memory(request.model, setup, is_cuda=request.is_cuda)
            if (problem := _problem(request.machine, setup, memory)) is not None:
                if rejection.memory is None or memory.high_bytes < rejection.memory.high_bytes:
                    rejection = Rejection(choice.label, method, problem, setup, memory)
                break
            fitting.append(Candidate(choice, setup, memory, _time(request, setup)))
    ranked = _rank(fitting)
    return (ranked[0] if ranked else None), rejection, count


def _settings(request: Request, choice: Choice, method: str) -> Iterator[list[TrainingSetup]]:
    """All settings of one strategy, the leanest first, in lists that differ in nothing but a growing micro-batch.

    A micro-batch that is a rank's whole share has a list of its own: no gradients are kept from an earlier one.
    """
    fixed = dict(request.fixed)
    per_rank = request.global_batch_size // choice.parallel.data_parallel
    policies = (fixed.pop("checkpointing"),) if "checkpointing" in fixed else ("full", "selective", "none")
    optimizers = (fixed.pop("optimizer"),) if "optimizer" in fixed else _optimizers(method)
    micro_batches = (fixed.pop("micro_batch_size"),) if "micro_batch_size" in fixed else _divisors(per_rank)
    for policy in policies:
        for optimizer in optimizers:
            accumulating = [size for size in micro_batches if per_rank % size == 0 and size < per_rank]
            for sizes in (accumulating, [size for size in micro_batches if size == per_rank]):
                yield [
                    TrainingSetup(
                        method=method,
                        checkpointing=policy,
                        optimizer=optimizer,
                        micro_batch_size=size,
                        accumulation=per_rank // size,
                        sequence_length=request.sequence_length,
                        parallel=choice.parallel,
                        **fixed,
                    )
                    for size in sizes
                ]


def _optimizers(method: str) -> tuple[str, ...]:
    """Those to choose from: adapters' states are too small to matter."""
    if method != "full":
        return _LEAN_OPTIMIZERS[:1]
    return _LEAN_OPTIMIZERS


def _divisors(per_rank: int) -> tuple[int, ...]:
    """Powers of two, up to 64, that divide a rank's share."""
    return tuple(size for size in (1, 2, 4, 8, 16, 32, 64) if per_rank % size == 0)


def _problem(machine: Machine, setup: TrainingSetup, memory: MemoryEstimate) -> str | None:
    """Why a setting does not fit; None if it does."""
    # The estimate holds the context and NCCL too, so the limit is all that CUDA reports.
    limit = machine.gpu.memory_bytes
    if memory.high_bytes > limit:
        name, size = max(memory.peak_phase.terms, key=lambda term: term[1])
        return (
            f"{format_bytes(memory.high_bytes)} > {format_bytes(limit)}: {name} {format_bytes(size)} "
            f"({setup.checkpointing} checkpointing, micro-batch {setup.micro_batch_size}, {setup.optimizer})"
        )
    ranks = min(machine.num_gpus, machine.gpus_per_node)
    host = memory.host_bytes * (1 if setup.parallel.strategy.startswith("fsdp") and not _offloads(setup) else ranks)
    if machine.host_memory_bytes is not None and host > machine.host_memory_bytes:
        return f"{format_bytes(host)} of host memory > {format_bytes(machine.host_memory_bytes)}"
    return None


def _offloads(setup: TrainingSetup) -> bool:
    return setup.parallel.offload_optimizer != "none" or setup.parallel.offload_params != "none"


def _time(request: Request, setup: TrainingSetup) -> TimeEstimate | None:
    if request.machine.gpu.peak_flops is None:
        return None
    try:
        return predict_time(request.model, setup, request.machine, document_length=request.document_length)
    except ConfigError:
        # A speed that is not known: said in the table by a missing time.
        return None


def _rank(found: list[Candidate]) -> list[Candidate]:
    """Fastest first, the simpler of two that are about as fast; those of unknown speed by simplicity."""
    timed = sorted((c for c in found if c.time is not None), key=lambda c: c.time.step_seconds)  # type: ignore[union-attr]
    ordered: list[Candidate] = []
    while timed:
        bound = timed[0].time.step_seconds * (1 + _TIE)  # type: ignore[union-attr]
        tied = [c for c in timed if c.time.step_seconds <= bound]  # type: ignore[union-attr]
        first = min(tied, key=lambda c: c.simplicity)
        ordered.append(first)
        timed.remove(first)
    unknown = [c for c in found if c.time is None]
    return ordered + sorted(unknown, key=lambda c: (c.simplicity, c.setup.accumulation))


def cheapest_changes(request: Request, setup: TrainingSetup, count: int = 3) -> list[tuple[str, TrainingSetup]]:
    """Up to `count` single changes to `setup` that would make it fit, cheapest in time first."""
    changes = [
        ("--per_device_train_batch_size", _smaller_batches(setup)),
        ("--checkpointing_policy", [replace(setup, checkpointing=p) for p in ("selective", "full", "offload")]),
        ("--optim", [replace(setup, optimizer=o) for o in ("paged_adamw_8bit", "adamw_torch_8bit")]),
        ("--method", [replace(setup, method=m) for m in ("lora", "qlora") if m != setup.method]),
    ]
    options = choices(request.machine.num_gpus, request.machine.gpus_per_node)
    launch = [replace(setup, parallel=c.parallel) for c in options if c.parallel != setup.parallel]
    fitting: list[tuple[float, int, str, TrainingSetup]] = []
    for flag, setups in [*changes, ("launch file", launch)]:
        for changed in setups:
            if changed == setup or conflict(changed, request.model) is not None:
                continue
            memory = predict_memory(request.model, changed, is_cuda=request.is_cuda)
            if _problem(request.machine, changed, memory) is None:
                time = _time(request, changed)
                fitting.append((time.step_seconds if time else 0.0, len(fitting), flag, changed))
                break
    fitting.sort(key=lambda item: item[:2])
    return [(flag, changed) for _, _, flag, changed in fitting[:count]]


def _smaller_batches(setup: TrainingSetup) -> list[TrainingSetup]:
    sizes = []
    size = setup.micro_batch_size
    while size > 1 and size % 2 == 0:
        size //= 2
        accumulation = setup.accumulation * setup.micro_batch_size // size
        sizes.append(replace(setup, micro_batch_size=size, accumulation=accumulation))
    return sizes
