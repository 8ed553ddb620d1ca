"""Tensors that all layers of a model share: cosines and sines of positions, and masks."""

from __future__ import annotations

from dataclasses import dataclass, field

from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.tape.families import Family
from accel_scale.planning.tape.ops import FP32, Ops
from accel_scale.planning.tape.tensors import Tensor


@dataclass
class Tables:
    """Cosines and sines of positions, and a mask for each window."""

    cos: Tensor
    sin: Tensor
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def of_window(self, window: int | None) -> Tables:
        """The tables passed to a layer with `window`, which it keeps if it is checkpointed."""
        return Tables(self.cos, self.sin, {window: self.masks[window]})


def make_tables(ops: Ops, model: ModelFacts, family: Family, setup: TrainingSetup, hidden_bytes: int) -> Tables:
    """The tables of one micro-batch; all rows share one row of positions, unless they are packed."""
    rows = setup.micro_batch_size if setup.packing else 1
    positions = rows * setup.sequence_length / setup.parallel.sequence_parallel
    itemsize = FP32 if family.rotation_type == "tables" else hidden_bytes
    sizes = [positions * model.rotary_dims] * 2
    if family.attention == "falcon":
        # Also made with ALiBi, which has one row for each head.
        sizes = [positions * model.head_dim] * 2
        if not model.rotary_dims:
            sizes[0] += setup.micro_batch_size * model.num_heads * setup.sequence_length
    elif model.model_type == "deepseek_v2":
        # Cosine and sine are one complex number for each pair.
        sizes[1] = 0
    elif family.rotation == "halves":
        sizes = [positions * model.rotary_dims / 2] * 2
    elif family.attention == "gptj":
        # Its layers make their own tables.
        sizes = [0, 0]
    elif family.attention == "bloom":
        sizes = [setup.micro_batch_size * model.num_heads * setup.sequence_length, 0]
    tables = Tables(ops.new(sizes[0], itemsize), ops.new(sizes[1], itemsize))
    for layer in model.layers:
        window = layer.sliding_window
        if window not in tables.masks:
            tables.masks[window] = make_mask(ops, model, family, setup, window, hidden_bytes)
    return tables


def make_mask(
    ops: Ops, model: ModelFacts, family: Family, setup: TrainingSetup, window: int | None, hidden_bytes: int
) -> Tensor | None:
    """The mask of all layers with `window`: numbers for eager attention, booleans for sdpa if it needs a mask."""
    square, rows = setup.sequence_length**2, setup.micro_batch_size
    if family.attention == "falcon" and not model.rotary_dims and setup.attention in ("eager", "sdpa"):
        # ALiBi is part of the mask, which differs for each head.
        return ops.new(square * rows * model.num_heads, hidden_bytes)
    if setup.attention == "eager":
        return ops.new(square * rows, hidden_bytes)
    slides = window is not None and window <= setup.sequence_length
    if setup.attention == "sdpa" and not setup.packing and (slides or setup.is_padded or family.always_masks):
        # Without padding, all rows share one mask.
        return ops.new(square * (rows if setup.is_padded else 1), 1).view(square * rows)
    return None
