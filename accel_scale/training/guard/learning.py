"""Raise an error if a run learned nothing: no labels, no steps, non-finite or unchanged weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel_scale.errors import ConfigError
from accel_scale.modeling.gathering import gather_values, is_partitioned, unwrap
from accel_scale.optimization.loss import IGNORED_LABEL

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn

# Rows read at once when searching for a first label.
_ROWS_PER_READ = 1000
# Values of every trained tensor that are compared before and after training.
_SAMPLED_VALUES = 256
_VALUES_PER_COUNT = 1 << 24
# After this many in a row the weights are at fault, not the rows.
_SKIPPED_AT_END = 3


class NothingLearnt(ConfigError):
    """The run would end, or has ended, without having trained the model."""


def has_labels(dataset: Dataset) -> bool:
    """True if any of the tokenised rows has a token that counts in the loss.

    Reads up to the first such token: one batch of rows in the usual case. A document's first token has no predictor.
    """
    import numpy as np
    import pyarrow as pa

    columns = [name for name in ("labels", "seq_lengths") if name in dataset.column_names]
    if "labels" not in columns:
        return len(dataset) > 0
    for table in dataset.select_columns(columns).with_format("arrow").iter(batch_size=_ROWS_PER_READ):
        labels = table.column("labels").combine_chunks()
        if not (pa.types.is_list(labels.type) or pa.types.is_large_list(labels.type)):
            return True  # one label per row, for a classifier
        packed = len(columns) > 1
        lengths = table.column("seq_lengths").combine_chunks().flatten() if packed else labels.value_lengths()
        kept = labels.flatten().to_numpy(zero_copy_only=False) != IGNORED_LABEL
        starts = np.cumsum(np.concatenate([[0], lengths.to_numpy(zero_copy_only=False)[:-1]])).astype(np.int64)
        kept[starts[starts < len(kept)]] = False
        if kept.any():
            return True
    return False


def refuse_unlabelled(dataset: Dataset, *, what: str, max_length: int | None, flag: str = "--{}") -> None:
    """Refuse tokenised rows without any token that counts in the loss; streams are checked during training.

    Args:
        dataset: Rows as the trainer feeds them.
        what: ``training`` or ``evaluation``.
        max_length: Number of tokens that rows were cut to.
        flag: Format of a setting's name where it is set.

    Raises:
        NothingLearnt: if there is no label.
    """
    from datasets import Dataset

    if isinstance(dataset, Dataset) and not has_labels(dataset):
        raise no_labels(f"no {what} row", max_length, flag)


def refuse_long_prompts(rows: Any, tokenizer: Any, values: Mapping[str, Any], *, max_length: int | None) -> None:
    """Refuse rows whose prompts fill the whole length, before the model is loaded; see `refuse_unlabelled`.

    One row that fits is enough, so this reads few; rows other than plain prompts and completions are not checked.

    Args:
        rows: Training rows in TRL's columns.
        values: The flags that are set.
        max_length: The recipe's default.

    Raises:
        NothingLearnt: if there are few rows, all were read, and none of them has room for a completion.
    """
    length = values.get("max_length", max_length)
    cut = values.get("truncation_mode", "keep_start") == "keep_start" and not values.get("chat_template_path")
    cut = cut and (not values.get("packing", True) or values.get("packing_strategy", "bfd") == "bfd")
    names = getattr(rows, "column_names", None) or ()
    if length is None or not cut or values.get("completion_only_loss") is False or not hasattr(rows, "__len__"):
        return
    if len(rows) > _ROWS_PER_READ or not {"prompt", "completion"} <= set(names):
        return
    for row in rows:
        if not isinstance(row["prompt"], str):
            return
        prompt, both = (
            tokenizer(text=text)["input_ids"] for text in (row["prompt"], row["prompt"] + row["completion"])
        )
        shared = next(
            (at for at, (one, other) in enumerate(zip(prompt, both, strict=False)) if one != other), len(prompt)
        )
        if shared < length:
            return
    raise no_labels("no training row", length, "--{}")


def no_labels(rows: str, max_length: int | None, flag: str) -> NothingLearnt:
    """Create the error for `rows` without a labelled token."""
    if max_length is None:
        place, fix = flag.format("dataset_name"), "check that completions are not empty."
    else:
        rows += f", cut to {max_length} tokens,"
        place = flag.format("max_length")
        fix = (
            f"use a larger {flag.format('max_length')}, or {flag.format('truncation_mode')} keep_end; check that "
            "completions are not empty."
        )
    return NothingLearnt(f"{rows} has a token that the loss is taken on.", place=place, fix=fix)


@dataclass(frozen=True)
class WeightsBefore:
    """A record of the trained weights at the start of training.

    Attributes:
        sample: Some values of every tensor that this process holds.
        not_finite: Number of non-finite values of each local tensor that has any.
    """

    sample: Mapping[str, torch.Tensor]
    not_finite: Mapping[str, int]

    @classmethod
    def of(cls, model: nn.Module) -> WeightsBefore:
        """Record the current weights of `model`."""
        return cls({name: _some_of(held) for name, held in _trained(model) if held.numel()}, count_not_finite(model))

    def have_changed(self, model: nn.Module) -> bool:
        """True if any value differs now, on any process, or if nothing could be sampled. Collective."""
        now = {name: _some_of(held) for name, held in _trained(model) if held.numel()}
        pairs = [(before, now[name]) for name, before in self.sample.items() if name in now]
        mine = [not torch.equal(before, after) for before, after in pairs if before.shape == after.shape]
        everyones = [flag for flags in gather_values(mine) for flag in flags]
        return any(everyones) or not everyones

    def newly_broken(self, model: nn.Module) -> str | None:
        """Name of a tensor with more non-finite values than at the start, on any process. Collective."""
        found = count_not_finite(model).items()
        mine = next((name for name, count in found if count > self.not_finite.get(name, 0)), None)
        return next((name for name in gather_values(mine) if name is not None), None)


def count_not_finite(model: nn.Module) -> dict[str, int]:
    """Number of NaN or infinite values of each trained tensor, as held here; only tensors with any.

    One pass and one wait for the device in the usual case: a sum is finite only if all its terms are.
    """
    held = {name: part for name, part in _trained(model) if part.numel()}
    if not held:
        return {}
    device = next(iter(held.values())).device
    sums = torch.stack([part.sum(dtype=torch.float32).to(device) for part in held.values()])
    suspects = [part for part, is_fine in zip(held.items(), sums.isfinite().tolist(), strict=True) if not is_fine]
    counts = {
        name: sum(int((~chunk.isfinite()).sum()) for chunk in part.reshape(-1).split(_VALUES_PER_COUNT))
        for name, part in suspects
    }
    return {name: count for name, count in counts.items() if count}


def _trained(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every trained tensor as held here: whole, or this rank's part."""
    for name, parameter in unwrap(model).named_parameters():
        if not parameter.requires_grad or not parameter.is_floating_point():
            continue
        held: Any = parameter.ds_tensor if is_partitioned(parameter) else parameter.detach()  # type: ignore[attr-defined]
        yield name, held.to_local() if hasattr(held, "to_local") else held


def _some_of(held: torch.Tensor) -> torch.Tensor:
    flat = held.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED_VALUES)][:_SAMPLED_VALUES].clone()


def refuse_unlearnt(
    model: nn.Module,
    *,
    before: WeightsBefore,
    num_steps: int,
    must_change: bool = True,
    num_skipped: int = 0,
    skipped_at_end: int = 0,
    why_skipped: str = "",
    last_loss: float | None = None,
    flag: str = "--{}",
) -> None:
    """At the end of a run, refuse a model that has not been trained. Call it on every process.

    Args:
        before: The weights at the start of training.
        num_steps: Optimizer steps that this process has seen since then, including skipped ones.
        must_change: True if unchanged weights are an error.
        num_skipped, skipped_at_end: Steps that the guard did not take, in all and at the end.
        why_skipped: The guard's reason for the last skipped step.
        last_loss: Loss of the last step that was taken.
        flag: Format of a setting's name where it is set.

    Raises:
        NothingLearnt: naming the problem and the setting to change.
    """
    rate, guard = flag.format("learning_rate"), flag.format("guard")
    if num_steps < 1:
        raise NothingLearnt(
            "training ended without a step: the data gave no batch.",
            place=flag.format("dataset_name"),
            fix=f"check that rows are left after filtering and cutting to {flag.format('max_length')}.",
        )
    broken = before.newly_broken(model)
    if broken is not None:
        raise NothingLearnt(
            f"training has left weights that are not finite ({broken}); they are not saved as the result.",
            place=rate,
            fix=f"lower it, train in bf16 in place of fp16, and use {guard} skip.",
        )
    if 2 * num_skipped > num_steps or skipped_at_end >= _SKIPPED_AT_END:
        at_end = f", nor any of the last {skipped_at_end}" if skipped_at_end > 1 else ""
        raise NothingLearnt(
            f"the guard did not take {num_skipped} of the {num_steps} steps{at_end}: {why_skipped}.",
            place=guard,
            fix=f"look at guard_events.jsonl: is it all rows, lower {rate} or look at the weights it began with.",
        )
    if last_loss is not None and not math.isfinite(last_loss):
        raise NothingLearnt(f"the last loss was {last_loss}.", place=rate, fix=f"lower it, and use {guard} skip.")
    if last_loss == 0 and must_change:
        raise no_labels("the last loss was exactly 0: no row", None, flag)
    if must_change and not before.have_changed(model):
        raise NothingLearnt(
            f"no weight has changed in {num_steps} steps.",
            place=rate,
            fix="raise it, shorten the warm-up or train longer; bf16_true rounds small steps away, fp16 overflows.",
        )
