"""PowerSGD for DDP with state per parameter: it survives rebuilt buckets, dropped steps and a resume.

torch's hook (Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", 2019) keeps its error feedback and its factors by bucket number, and DDP rebuilds its buckets after the
first step of every process. Here torch's hook does the arithmetic; before it sees a bucket, the bucket's state is
assembled from the states of its parameters.
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
        rows, columns: Shape of the matrix that represents the gradient.
        rank: Rank of its factors; 0 if it is sent whole.
    """

    rows: int
    columns: int
    rank: int

    @property
    def sent_values(self) -> int:
        """Number of values that a rank sends: P and Q, or all."""
        return (self.rows + self.columns) * self.rank if self.rank else self.rows * self.columns


class CountedBytes:
    """Counts the bytes that this rank passes to all-reduces.

    Attributes:
        sent_bytes: In all steps so far.
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
    `q_memory_dict` (checked on torch 2.13; tests/distributed/test_ddp_hooks.py fails if they change).

    Args:
        parameters: Name → parameter, for all parameters that DDP reduces.
        rank: Rank of the factors.
        start_step: Gradients are sent whole before this step, counted from 1; at least `FIRST_POWERSGD_STEP`.

    Attributes:
        is_stateful: True: there is state to save, and to restore when a step is dropped.
    """

    is_stateful = True
    failed = False

    def __init__(self, parameters: Mapping[str, torch.Tensor], *, rank: int, start_step: int) -> None:
        self._powersgd = PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=start_step - 1, orthogonalization_epsilon=1e-8
        )
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = dict(parameters)
        # Bucket → names of its parameters, if the bucket has a state; parameter → its state, if no bucket has it.
        self._layouts: dict[int, tuple[str, ...]] = {}
        self._errors: dict[str, torch.Tensor] = {}
        self._factors: dict[str, torch.Tensor] = {}
        # For the last step: the count before it, during and after its reduction; errors and factors of its buckets.
        self._step_begun: int | None = None
        self._step_ended: int | None = None
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    # ── The hook ──

    def run(self, state, bucket):  # type: ignore[no-untyped-def]  # not annotated: DDP compares annotations
        """The hook itself, as called by DDP; returns the bucket's future gradient, averaged over the ranks."""
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
                # Its callbacks wait for collectives in one of gloo's two threads, so run one bucket at a time.
                future.wait()
        except BaseException:
            self.failed = True
            raise
        return future

    def shape_of(self, parameter: torch.Tensor) -> FactorShape:
        """Decide as torch's hook does: factors if they have less than half of the values."""
        rows = parameter.shape[0] if parameter.ndim else 1
        columns = parameter.numel() // max(1, rows)
        rank = min(rows, columns, self._powersgd.matrix_approximation_rank)
        is_worth_it = (rows + columns) * rank * self._powersgd.min_compression_rate < rows * columns
        return FactorShape(rows, columns, rank if is_worth_it else 0)

    def undo(self) -> None:
        """Restore the state from before the last step, which was dropped."""
        if self._step_ended is None:
            return
        self._powersgd.iter, self._step_ended = self._step_ended, None
        for index, (error, factors) in self._before.items():
            self._powersgd.error_dict[index], self._powersgd.q_memory_dict[index] = error, factors
        self._before = {}

    def _remember(self, index: int) -> None:
        """Keep the state: torch's hook replaces the error tensor, but changes the factors in place."""
        powersgd = self._powersgd
        self._before[index] = powersgd.error_dict[index], powersgd.q_memory_dict[index].clone()

    # ── Between buckets and parameters ──

    def _arrange(self, index: int, names: tuple[str, ...]) -> None:
        """Assemble a bucket's state from the states of its parameters."""
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
        """Compressed parameters in the order of torch's factors: parameters of the same shape are adjacent."""
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
        """Errors and factors of every parameter, as flat tensors."""
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
        """Restore a saved state.

        Args:
            states: The saved states of all ranks, in order.
            rank: This rank. If the number of ranks has changed, each gets the mean of all errors, so that the sum
                added to the averaged gradient stays the same.
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
        # Factors of another rank do not fit and start over; errors stay.
        same_rank = mine["rank"] == powersgd.matrix_approximation_rank
        self._errors = {name: tensor.to(device) for name, tensor in errors.items()}
        self._factors = {name: tensor.to(device) for name, tensor in mine["factors"].items()} if same_rank else {}
        powersgd.iter = mine["step"]


def first_factor(name: str, shape: FactorShape, like: torch.Tensor) -> torch.Tensor:
    """The initial factor of a parameter, flat: normal values from a seed derived from its name.

    torch's hook draws them bucket by bucket; these are the same on every rank and for every bucket layout.
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    values = torch.randn(shape.columns * shape.rank, generator=torch.Generator().manual_seed(seed))
    return values.to(like.device, like.dtype)
