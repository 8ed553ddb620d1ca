"""Split a micro-batch into halves with the same loss and gradients: by rows, or between packed documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from accel_scale.modeling.packing.row_facts import ROW_FACTS

IGNORED_LABEL = -100
# What a mean loss averages over; "sum": the loss is a sum over tokens or rows ÷ a number that splitting keeps.
LossKind = Literal["sum", "token_mean", "row_mean"]
_SEQUENCE_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")


@dataclass(frozen=True)
class Part:
    """A piece of a micro-batch.

    Args:
        inputs: Keyword arguments of the model, or whatever the loop uses as a micro-batch.
        factor: Factor of its loss. 0 marks a repetition that only keeps this process in step with the others.
    """

    inputs: Any
    factor: float = 1.0


def split(inputs: Any, level: int, *, loss_kind: LossKind = "sum") -> list[Part]:
    """Halve `inputs` `level` times: always 2 ** `level` parts, so that every process makes the same number of passes.

    At level 0 the one part is `inputs` itself, of any type: GRPO's micro-batches are lists of rows.

    The parts' losses, each times its factor, add up to the whole's, in the order of the samples. If a part cannot be
    halved any further, it is followed by itself with factor 0.
    """
    parts = [Part(inputs)]
    for _ in range(level):
        finer: list[Part] = []
        for part in parts:
            halves = halve(part.inputs) if part.factor else None
            finer += [Part(half) for half in halves] if halves else [part, Part(part.inputs, 0.0)]
        parts = finer
    if loss_kind == "sum" or level == 0:
        return parts
    weights = [_weight(part.inputs, loss_kind) if part.factor else 0 for part in parts]
    total = max(sum(weights), 1)
    return [Part(part.inputs, weight / total) for part, weight in zip(parts, weights, strict=True)]


def halve(inputs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The first and second half of a micro-batch; None if a cut would change its loss, or there is no place to cut.

    Several rows are cut between rows. One row is cut between two of its packed documents, at the cut nearest to its
    middle, where `position_ids` restart and the first token of a document has no label.
    """
    rows = num_rows(inputs)
    if rows:  # the counts are not valid for a half
        inputs = {name: value for name, value in inputs.items() if name != ROW_FACTS}
    if rows > 1:
        return _halve_rows(inputs, rows)
    return _halve_documents(inputs) if rows == 1 else None


def num_rows(inputs: object) -> int:
    """Rows of a micro-batch: the first dimension of its `input_ids`, or else of its first tensor; 0 if it has none."""
    if not isinstance(inputs, Mapping):
        return 0
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor) and value.ndim]
    first = inputs.get("input_ids", tensors[0] if tensors else None)
    return len(first) if isinstance(first, torch.Tensor) else 0


def _halve_rows(inputs: Mapping[str, Any], rows: int) -> tuple[dict[str, Any], dict[str, Any]] | None:
    middle = (rows + 1) // 2
    first, second = dict(inputs), dict(inputs)
    for name, value in inputs.items():
        is_tensor = isinstance(value, torch.Tensor) and value.ndim > 0
        if not is_tensor and not isinstance(value, (list, tuple)):
            continue
        if len(value) != rows:
            return None  # not one entry per row: image patches, sequence bounds
        first[name], second[name] = value[:middle], value[middle:]
    return first, second


def _halve_documents(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    positions = inputs.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2:
        return None
    length = positions.shape[1]
    cut = _middle_start(positions[0], inputs.get("labels"))
    if cut is None:
        return None
    first, second = dict(inputs), dict(inputs)
    for name, value in inputs.items():
        if name in _SEQUENCE_BOUNDS or name in _LONGEST or not isinstance(value, torch.Tensor) or not value.ndim:
            continue
        if tuple(value.shape[:2]) != (1, length):
            return None
        first[name], second[name] = value[:, :cut], value[:, cut:]
        if name == "seq_idx":
            second[name] = second[name] - second[name][:, :1]
    for half in (first, second):
        _set_bounds(half)
    return first, second


def _middle_start(positions: torch.Tensor, labels: object) -> int | None:
    """Index of the document start nearest to the middle at which the row can be cut. Reads once from the device."""
    can_cut = positions == 0
    if isinstance(labels, torch.Tensor):
        can_cut = can_cut & (labels[0] == IGNORED_LABEL)
    starts = [start for start in can_cut.nonzero().flatten().tolist() if start > 0]
    return min(starts, key=lambda start: abs(2 * start - len(positions)), default=None)


def _set_bounds(half: dict[str, Any]) -> None:
    """Set sequence bounds for variable-length kernels from the half's own positions."""
    positions = half["position_ids"][0]
    given = [name for name in _SEQUENCE_BOUNDS if half.get(name) is not None]
    if not given:
        return
    starts = (positions == 0).nonzero().flatten()
    end = starts.new_tensor([len(positions)])
    bounds = torch.cat([starts, end]).to(half[given[0]])
    for name in given:
        half[name] = bounds
    for name in _LONGEST:
        if half.get(name) is not None:
            half[name] = int(bounds.diff().max())


def _weight(inputs: object, loss_kind: LossKind) -> int:
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if loss_kind == "row_mean" or not isinstance(labels, torch.Tensor) or labels.ndim < 2:
        return num_rows(inputs)
    return int(labels[..., 1:].ne(IGNORED_LABEL).sum())
