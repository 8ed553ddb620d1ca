"""Joint decisions of all ranks in a save or load: an error on one rank is raised on all, so that none hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from accel_scale.errors import ConfigError, first_line

T = TypeVar("T")


class FailedSomewhere(Exception):
    """Work that failed on one or more ranks; raised on all of them, with the reason of the first."""


class Meeting:
    """Small collectives over the hosts, separate from those of the training.

    Args:
        separate: Use a separate process group, for a thread that communicates concurrently with the main program.
    """

    def __init__(self, *, separate: bool = False) -> None:
        self.is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group: Any = None
        # Over the hosts, so that a collective does not wait for the accelerators' queues.
        if self.is_distributed and (separate or "gloo" not in str(dist.get_backend())):
            self.group = dist.new_group(backend="gloo")

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return dist.get_rank() if self.is_distributed else 0

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return dist.get_world_size() if self.is_distributed else 1

    def gather(self, value: T) -> list[T]:
        """All ranks' picklable `value`s, by rank."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_main(self, value: T) -> T:
        """Rank 0's `value`."""
        if not self.is_distributed:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def largest(self, number: int) -> int:
        """The largest `number` of all ranks: one all-reduce of one number."""
        if not self.is_distributed:
            return number
        reduced = torch.tensor(number)
        dist.all_reduce(reduced, dist.ReduceOp.MAX, group=self.group)
        return int(reduced.item())

    def together(self, work: Callable[[], T]) -> list[T]:
        """Run `work`, which must not be collective, on every rank; returns all ranks' results.

        Raises:
            ConfigError: on all ranks, if any rank raised it.
            FailedSomewhere: on all ranks, if it failed otherwise on any rank.
        """
        result, failure, cause = None, None, None
        try:
            result = work()
        except ConfigError as error:
            failure = ("config", error.problem, error.place, error.fix)
        except Exception as error:
            failure, cause = ("other", first_line(error), None, None), error
        try:
            outcomes = self.gather((failure, result))
            for rank, (problem, _) in enumerate(outcomes):
                if problem is None:
                    continue
                kind, text, place, fix = problem
                if kind == "config":
                    raise ConfigError(text, place=place, fix=fix)
                raise FailedSomewhere(text if self.world_size == 1 else f"rank {rank}: {text}") from cause
            return [value for _, value in outcomes]  # type: ignore[misc]
        finally:
            # The traceback keeps half-written files open, and their disk space taken; it also refers to this frame.
            del cause

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 only and return its result on all ranks; fails as `together` does."""
        return self.together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]
