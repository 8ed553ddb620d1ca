"""Load training rows: lanes divided among ranks and workers, with their state next to the rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_scale.data.loaders import outlive_signals
from accel_scale.data.pretraining.encoding import Encoder, one_thread_tokenizers
from accel_scale.data.pretraining.lanes import LaneSet, LaneState, TrainingSource
from accel_scale.data.pretraining.states import STATE_VERSION, check_state
from accel_scale.errors import ConfigError

_PREFETCHED_STEPS = 4


@dataclass
class TrainStep:
    """One optimizer step's rows of this rank.

    Args:
        micro_batches: Dicts of int64 tensors (micro-batch size, row length): `input_ids`, `labels` (-100 where a
            document begins) and, if documents are isolated, `position_ids`.
        row_ids: For each micro-batch, its rows' ids; `PretrainingData.row_text` shows what they mean.
        num_predicted: Labels in all micro-batches that are predicted from a token before them.
    """

    micro_batches: list[dict[str, torch.Tensor]]
    row_ids: list[list[str]]
    num_predicted: int


@dataclass(frozen=True)
class _Part:
    """One worker's part of one step: its lanes' rows and their state afterwards.

    Rows are an array, not a tensor: tensors travel through /dev/shm, which is small in many containers, and take a
    file descriptor each.
    """

    rows: np.ndarray
    row_ids: list[str]
    state: dict[str, LaneState]


class _LaneRows(IterableDataset[Any]):
    """Yields parts of steps endlessly; each worker has its own lanes."""

    def __init__(
        self,
        sources: Sequence[TrainingSource],
        encoder: Encoder,
        lanes: Sequence[Sequence[int]],
        run: Mapping[str, Any],
        states: Mapping[str, LaneState] | None,
        *,
        positions: bool,
    ) -> None:
        super().__init__()
        self._sources, self._encoder, self._lanes = sources, encoder, lanes
        self._run, self._states, self._positions = run, states, positions

    def __iter__(self) -> Iterator[_Part | ConfigError]:
        info = get_worker_info()
        lanes = LaneSet(
            self._sources,
            self._encoder,
            self._lanes[info.id if info else 0],
            num_lanes=self._run["global_batch_size"],
            row_length=self._run["row_length"],
            states=self._states,
        )
        try:
            while True:
                rows = lanes.step()
                yield _Part(rows.stacked(positions=self._positions), rows.row_ids, lanes.state())
        except ConfigError as error:
            yield error  # raised on receipt: torch would raise another, with a traceback as its message


class TrainLoader:
    """An endless iterator of `TrainStep`s that resumes where it stopped, in this process or another.

    Workers run ahead of training; `state_dict` is the position after the last step that was handed out. To skip a
    step, take it and do not train on it. Made by `PretrainingData.train_loader`.

    Attributes:
        wait_seconds: Total time spent waiting for steps so far, in seconds.
        last_wait_seconds: The same for the last step.
        step: Steps handed out since the beginning of the run.
    """

    def __init__(
        self,
        sources: Sequence[TrainingSource],
        encoder: Encoder,
        run: Mapping[str, Any],
        *,
        isolate_documents: bool,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        num_workers: int,
        state: Mapping[str, Any] | None,
        pin_memory: bool,
    ) -> None:
        check_shape(run["global_batch_size"], micro_batch_size, rank, world_size, num_workers)
        per_rank = run["global_batch_size"] // world_size
        self._lanes = list(range(rank * per_rank, (rank + 1) * per_rank))
        self._run, self._micro_batch_size, self._pin_memory = dict(run), micro_batch_size, pin_memory
        if state is not None:
            check_state(state, run, self._lanes)
        self.step = 0 if state is None else int(state["step"])
        self.wait_seconds = self.last_wait_seconds = 0.0
        self._states = None if state is None else {str(lane): state["lanes"][str(lane)] for lane in self._lanes}
        self._num_workers = min(num_workers, per_rank)
        shares = max(1, self._num_workers)
        bounds = [per_rank * index // shares for index in range(shares + 1)]
        dataset = _LaneRows(
            sources,
            encoder,
            [self._lanes[start:end] for start, end in pairwise(bounds)],
            run,
            self._states,
            positions=isolate_documents,
        )
        if self._states is None:
            self._states = LaneSet(
                sources,
                encoder,
                self._lanes,
                num_lanes=run["global_batch_size"],
                row_length=run["row_length"],
            ).state()
        self._loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            prefetch_factor=_PREFETCHED_STEPS if self._num_workers else None,
            worker_init_fn=outlive_signals,
            generator=torch.Generator(),  # else a seed would be drawn from the run's random numbers
        )
        self._parts: Iterator[_Part | ConfigError] | None = None
        self._closed = False

    def __enter__(self) -> TrainLoader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> TrainLoader:
        return self

    def __next__(self) -> TrainStep:
        started = time.perf_counter()
        if self._parts is None:
            with one_thread_tokenizers(self._num_workers > 0):
                self._parts = iter(self._loader)
        parts = [self._received() for _ in range(max(1, self._num_workers))]
        step = self._assembled(parts)
        assert self._states is not None
        for part in parts:
            self._states.update(part.state)
        self.step += 1
        self.last_wait_seconds = time.perf_counter() - started
        self.wait_seconds += self.last_wait_seconds
        return step

    def _received(self) -> _Part:
        assert self._parts is not None
        part = next(self._parts)
        if isinstance(part, ConfigError):
            self.close()
            raise part
        return part

    def _assembled(self, parts: Sequence[_Part]) -> TrainStep:
        rows = torch.from_numpy(np.concatenate([part.rows for part in parts], axis=1)).long()
        if self._pin_memory:
            rows = rows.pin_memory()
        names = ("input_ids", "labels", "position_ids")[: len(rows)]
        row_ids = [name for part in parts for name in part.row_ids]
        size = self._micro_batch_size
        starts = range(0, len(row_ids), size)
        return TrainStep(
            micro_batches=[
                {name: values[start : start + size] for name, values in zip(names, rows, strict=True)}
                for start in starts
            ],
            row_ids=[row_ids[start : start + size] for start in starts],
            num_predicted=int((rows[1][:, 1:] != -100).sum()),
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's position after the last step handed out; JSON-able. `merge_states` joins all ranks'."""
        assert self._states is not None
        return {"version": STATE_VERSION, "step": self.step, "run": dict(self._run), "lanes": dict(self._states)}

    def close(self) -> None:
        """End the worker processes. A closed loader cannot be used again; make another one from its state."""
        parts, self._parts = self._parts, iter(())
        was_closed, self._closed = self._closed, True
        if parts is not None and self._num_workers and not was_closed:
            # torch (checked on 2.13) has no public way to end the workers of an endless iterator at once.
            parts._shutdown_workers()  # type: ignore[attr-defined]


def check_shape(global_batch_size: int, micro_batch_size: int, rank: int, world_size: int, num_workers: int) -> None:
    """Raise a ConfigError unless whole micro-batches on all ranks make up the global batch."""
    for name, value, least in (
        ("global_batch_size", global_batch_size, 1),
        ("micro_batch_size", micro_batch_size, 1),
        ("world_size", world_size, 1),
        ("num_workers", num_workers, 0),
    ):
        if value < least:
            raise ConfigError(f"{value} is below {least}.", place=name, fix=f"give a whole number of {least} or more.")
    if not 0 <= rank < world_size:
        raise ConfigError(f"there is no rank {rank} of {world_size}.", place="rank", fix="give 0 to world_size - 1.")
    if global_batch_size % (micro_batch_size * world_size):
        raise ConfigError(
            f"a global batch of {global_batch_size} rows is not a multiple of {micro_batch_size} rows on each of "
            f"{world_size} ranks.",
            place="global_batch_size",
            fix=f"use a multiple of {micro_batch_size * world_size}, or another micro-batch.",
        )


def _as_it_is(part: object) -> object:
    return part
