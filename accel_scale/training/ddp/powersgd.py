"""PowerSGD for DDP with a state that belongs to parameters: it survives new buckets, dropped steps and a resume.

torch's hook (Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", 2019) keeps its error feedback and its factors by the number of a bucket, and DDP puts its buckets
together again after the first step of every process. Here torch's hook does the arithmetic; before it sees a bucket,
the bucket's part of the state is put together from that of its parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook


@dataclass(frozen=True)
class FactorShape:
    """How torch's hook treats one parameter's gradient.

    Attributes:
        rows, columns: Of the matrix it is seen as.
        rank: Of its factors; 0: it is sent whole.
    """

    rows: int
    columns: int
    rank: int

    @property
    def sent_values(self) -> int:
        """Values that a rank sends: P and Q, or all."""
        return (self.rows + self.columns) * self.rank if self.rank else self.rows * self.columns


class CountedBytes:
    """What this rank gives to all-reduces.

    Attributes:
        sent_bytes: In all steps.
        step_bytes: In the last step.
    """

    sent_bytes = 0
    step_bytes = 0
    _before_step = 0

    def count(self, bucket: Any, num_bytes: int) -> None:
        """Call once for each bucket."""
        self.sent_bytes += num_bytes
        if bucket.is_last():
            self.step_bytes, self._before_step = self.sent_bytes - self._before_step, self.sent_bytes


class PowerSgd(CountedBytes):
    """A DDP communication hook; register `run`.

    Attributes of torch's `PowerSGDState` that are touched here: ``iter``, ``error_dict``, ``p_memory_dict``,
    ``q_memory_dict`` (checked on torch 2.13; tests/distributed/test_ddp_hooks.py fails when they move).

    Args:
        parameters: Name → parameter, of all that DDP reduces.
        rank: Of the factors.
        start_step: Gradients travel whole before this optimizer step, counted from 1; at least `FIRST_POWERSGD_STEP`.

    Attributes:
        is_stateful: There is something to save, and to take back when a step is dropped.
    """

    is_stateful = True
    failed = False

    def __init__(self, parameters: Mapping[str, torch.Tensor], *, rank: int, start_step: int) -> None:
        self._powersgd = PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=start_step - 1, orthogonalization_epsilon=1e-8
        )
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = dict(parameters)
        # Bucket → names of its parameters, where the bucket has a state; parameter → its part, where no bucket has it.
        self._layouts: dict[int, tuple[str, ...]] = {}
        self._errors: dict[str, torch.Tensor] = {}
        self._factors: dict[str, torch.Tensor] = {}
        # Of the last step: the count before it while it is reduced and afterwards, errors and factors of its buckets.
        self._step_begun: int | None = None
        self._step_ended: int | None = None
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    # ── The hook ──

    def run(self, state, bucket):  # type: ignore[no-untyped-def]  # not annotated: DDP compares annotations
        """As DDP calls it: the bucket's future gradient, averaged over the ranks."""
        powersgd = self._powersgd
        if self._step_begun is None:
            self._before, self._step_begun = {}, powersgd.iter
        compresses = powersgd.iter >= powersgd.start_powerSGD_iter
        names = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        shapes = [self.shape_of(self._parameters[name]) for name in names]
        if compresses:
            self._arrange(bucket.index(), names)
            self._remember(bucket.index())
        values = sum(s.sent_values if compresses else s.rows * s.columns for s in shapes)
        self.count(bucket, values * bucket.buffer().element_size())
        if bucket.is_last():
            self._step_ended, self._step_begun = self._step_begun, None
        try:
            future = powerSGD_hook(powersgd, bucket)
            if bucket.buffer().device.type == "cpu":
                # Its callbacks wait for collectives in one of gloo's two threads: one bucket at a time.
                future.wait()
        except BaseException:
            self.failed = True
            raise
        return future

    def shape_of(self, parameter: torch.Tensor) -> FactorShape:
        """As torch's hook decides: factors where they have less than half of the values."""
        rows = parameter.shape[0] if parameter.ndim else 1
        columns = parameter.numel() // max(1, rows)
        rank = min(rows, columns, self._powersgd.matrix_approximation_rank)
        is_worth_it = (rows + columns) * rank * self._powersgd.min_compression_rate < rows * columns
        return FactorShape(rows, columns, rank if is_worth_it else 0)

    def undo(self) -> None:
        """The state before the last step, which was dropped."""
        if self._step_ended is None:
            return
        self._powersgd.iter, self._step_ended = self._step_ended, None
        for index, (error, factors) in self._before.items():
            self._powersgd.error_dict[index], self._powersgd.q_memory_dict[index] = error, factors
        self._before = {}

    def _remember(self, index: int) -> None:
        """torch's hook puts a new error into its place, and changes the factors where they are."""
        powersgd = self._powersgd
        self._before[index] = powersgd.error_dict[index], powersgd.q_memory_dict[index].clone()

    # ── Between buckets and parameters ──

    def _arrange(self, index: int, names: tuple[str, ...]) -> None:
        """Make the state of a bucket that of its parameters."""
        if self._layouts.get(index) == names:
            return
        if index in self._layouts or any(set(names) & set(other) for other in self._layouts.values()):
            self._take_apart()
        self._layouts[index] = names
        powersgd, order = self._powersgd, self._in_order(names)
        errors = [self._errors.pop(name, None) for name in names]
        powersgd.error_dict[index] = torch.cat(
            [
                self._parameters[name].detach().new_zeros(self._parameters[name].numel()) if error is None else error
                for name, error in zip(names, errors, strict=True)
            ]
        )
        empty = powersgd.error_dict[index].new_empty(0)
        factors = [self._factors.pop(name, None) for name, _ in order]
        pairs = zip(order, factors, strict=True)
        filled = [first_factor(name, shape, empty) if q is None else q for (name, shape), q in pairs]
        powersgd.q_memory_dict[index] = torch.cat(filled) if filled else empty
        powersgd.p_memory_dict[index] = empty.new_empty(sum(shape.rows * shape.rank for _, shape in order))

    def _in_order(self, names: Sequence[str]) -> list[tuple[str, FactorShape]]:
        """Compressed parameters as torch's hook lays out their factors: those of one shape side by side."""
        groups: dict[tuple[int, int], list[tuple[str, FactorShape]]] = {}
        for name in names:
            shape = self.shape_of(self._parameters[name])
            if shape.rank:
                groups.setdefault((shape.rows, shape.columns), []).append((name, shape))
        return [entry for group in groups.values() for entry in group]

    def _take_apart(self) -> None:
        self._errors, self._factors = self._by_parameter()
        self._layouts.clear()
        for kept in (self._powersgd.error_dict, self._powersgd.p_memory_dict, self._powersgd.q_memory_dict):
            kept.clear()

    def _by_parameter(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Errors and factors of every parameter, flat."""
        errors, factors = dict(self._errors), dict(self._factors)
        for index, names in self._layouts.items():
            sizes = [self._parameters[name].numel() for name in names]
            errors.update(zip(names, self._powersgd.error_dict[index].split(sizes), strict=True))
            order = self._in_order(names)
            parts = self._powersgd.q_memory_dict[index].split([s.columns * s.rank for _, s in order])
            factors.update(zip((name for name, _ in order), parts, strict=True))
        return errors, factors

    # ── Saving ──

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values; the errors are this rank's own, everything else is the same on all ranks."""
        errors, factors = self._by_parameter()
        return {
            "step": self._powersgd.iter,
            "rank": self._powersgd.matrix_approximation_rank,
            "errors": {name: tensor.clone() for name, tensor in errors.items()},
            "factors": {name: tensor.clone() for name, tensor in factors.items()},
        }

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], rank: int) -> None:
        """Take up a state.

        Args:
            states: What every rank had saved, in order.
            rank: This one. Where the number of ranks has changed, each gets the mean of all errors: what is added
                to the averaged gradient stays the same.
        """
        powersgd = self._powersgd
        self._layouts.clear()
        for kept in (powersgd.error_dict, powersgd.p_memory_dict, powersgd.q_memory_dict):
            kept.clear()
        world = torch.distributed.get_world_size()
        mine = states[rank] if len(states) == world else states[0]
        errors = mine["errors"]
        if len(states) != world:
            errors = {name: torch.stack([s["errors"][name] for s in states]).mean(0) for name in errors}
        device = next(iter(self._parameters.values())).device
        # Factors of another rank do not fit: they start over, errors stay.
        same_rank = mine["rank"] == powersgd.matrix_approximation_rank
        self._errors = {name: tensor.to(device) for name, tensor in errors.items()}
        self._factors = {name: tensor.to(device) for name, tensor in mine["factors"].items()} if same_rank else {}
        powersgd.iter = mine["step"]


def first_factor(name: str, shape: FactorShape, like: torch.Tensor) -> torch.Tensor:
    """The factor that a parameter begins with, flat: normal values from a seed made of its name.

    torch's hook draws them bucket by bucket; these are the same on every rank and for every layout of the buckets.
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    values = torch.randn(shape.columns * shape.rank, generator=torch.Generator().manual_seed(seed))
    return values.to(like.device, like.dtype)
