"""Bytes of tensors in forward passes without gradients: a reference's, and the one over a generation's prompts."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from accel_scale.errors import NotRunError
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.tape.activations import ShadowModel, walked_layers
from accel_scale.planning.tape.ops import FP32, Ops
from accel_scale.planning.tape.tape import Tape
from accel_scale.planning.tape.tensors import Tensor
from accel_scale.planning.traced.fits import fit_of
from accel_scale.planning.traced.steps import given_tensor, marks_of, traced_loss

# fp32 copies of a step's logits while a token is drawn: the model's output, `generate`'s copy, their probabilities,
# and the random numbers of `torch.multinomial`.
_DRAWING = 4


@dataclass(frozen=True)
class ForwardBytes:
    """High-water marks of one forward pass that keeps only its result.

    Attributes:
        layers_bytes: Highest during embedding and layers.
        head_bytes: Highest during norm and head.
    """

    layers_bytes: float
    head_bytes: float

    @property
    def peak_bytes(self) -> float:
        """The higher of the two."""
        return max(self.layers_bytes, self.head_bytes)


@functools.lru_cache(maxsize=1024)
def forward_bytes(
    model: ModelFacts, setup: TrainingSetup, *, is_cuda: bool = True, adapters: bool = True, draws: bool = False
) -> ForwardBytes:
    """Memory marks of one forward pass of `setup`'s micro-batch without gradients.

    Args:
        model: Shapes of the model.
        setup: How it is trained; activation checkpointing is off without gradients.
        is_cuda: Whether CUDA's kernels run.
        adapters: Whether adapters are on; without them only the base runs.
        draws: Whether the next token of each row is drawn from the logits of its last position; otherwise the head
            is the setup's own.

    Raises:
        ConfigError: as for `step_bytes`.
    """
    setup = replace(setup, checkpointing="none")
    if model.traced_config:
        return _of_trace(model, setup, is_cuda, draws)
    ends, extras = walked_layers(model, setup)
    if not extras:
        return _walk(model, setup, is_cuda, adapters, draws)
    base = _walk(replace(model, layers=ends), setup, is_cuda, adapters, draws)
    layers, head = base.layers_bytes, base.head_bytes
    for layer, factor in extras:
        # Only the weights cast for autocast grow with the number of layers.
        more = _walk(replace(model, layers=(*ends, layer)), setup, is_cuda, adapters, draws)
        layers += factor * (more.layers_bytes - base.layers_bytes)
        head += factor * (more.head_bytes - base.head_bytes)
    return ForwardBytes(layers, head)


def _walk(model: ModelFacts, setup: TrainingSetup, is_cuda: bool, adapters: bool, draws: bool) -> ForwardBytes:
    tape = Tape(autocast_bytes=setup.compute_bytes if setup.autocast else None, is_cuda=is_cuda)
    tape.keeps_casts = True
    ops = Ops(tape)
    with tape.muted():
        shadow = ShadowModel(ops, model, setup)
        shadow.adapted = shadow.adapted if adapters else frozenset()
        x = shadow.run_layers(shadow.embed(), lambda: None)
        layers = tape.meter.peak_bytes
        tape.meter.reset_peak()
        x = shadow.finish(x)
        if draws:
            _draw(ops, model, setup, x)
        else:
            shadow.loss(x)
    return ForwardBytes(layers, tape.meter.peak_bytes)


def _draw(ops: Ops, model: ModelFacts, setup: TrainingSetup, x: Tensor) -> None:
    """Logits of the last positions, and the copies that `generate` makes of them."""
    values = setup.micro_batch_size * model.vocab_size
    compute = ops.tape.autocast_bytes or x.itemsize
    weight = ops.new(model.embedding_params if setup.autocast and setup.trains_all else 0, compute)
    logits = ops.new(values, compute)
    del weight, x
    drawing = ops.new(values * _DRAWING, FP32)
    del logits, drawing


def _of_trace(model: ModelFacts, setup: TrainingSetup, is_cuda: bool, draws: bool) -> ForwardBytes:
    """Marks from a trace with all layers recomputed, whose forward pass keeps only the layers' inputs.

    Of a class that is not recomputed, every layer keeps for a moment what its backward pass would need.
    """
    try:
        fit, is_kept = fit_of(model, replace(setup, checkpointing="full"), is_cuda, False), False
    except NotRunError:
        fit, is_kept = fit_of(model, setup, is_cuda, False), True
    rows, length = setup.micro_batch_size, setup.sequence_length
    peaks, nets = marks_of(fit, rows, length)
    hidden = rows * length * fit["hidden_size"] * fit["hidden_bytes"]
    live, layers = nets["embed"], peaks["embed"]
    for place, index in enumerate(fit["stands_for"]):
        layers = max(layers, live + peaks[f"forward {index}"])
        # A layer's input is freed, but for the embeddings, which the model holds; weights cast for autocast stay.
        live += (hidden if is_kept else nets[f"forward {index}"]) - (hidden if place else 0.0)
    live -= hidden if fit["stands_for"] else 0.0  # the embeddings: the layers have run
    tape = Tape(autocast_bytes=setup.compute_bytes if setup.autocast else None, is_cuda=is_cuda)
    ops = Ops(tape)
    with tape.muted():
        if draws:
            states = ops.new(hidden / fit["hidden_bytes"], fit["hidden_bytes"])
            _draw(ops, model, setup, states)
        else:
            traced_loss(ops, model, setup, fit, given_tensor(ops, model, setup, fit))
    head = tape.meter.peak_bytes
    if fit["takes_logits"] and not draws:
        head = max(head, hidden + peaks["finish"])
    return ForwardBytes(layers, live + head)
