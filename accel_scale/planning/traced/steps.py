"""Memory marks of a step for every model: from the tape if its layers are modelled, otherwise from a trace."""

from __future__ import annotations

import functools
from dataclasses import replace

from accel_scale.errors import ConfigError
from accel_scale.facts.checkpointing import SEGMENTS, kind_of
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.parameters import parameter_groups
from accel_scale.planning.models.traced import Document
from accel_scale.planning.models.training_setup import TrainingSetup, check_policy, period_of
from accel_scale.planning.tape import activations
from accel_scale.planning.tape.families import FAMILIES
from accel_scale.planning.tape.head import Head, logits_loss, scores_loss
from accel_scale.planning.tape.linears import Weights
from accel_scale.planning.tape.marks import StepBytes
from accel_scale.planning.tape.ops import Ops
from accel_scale.planning.tape.tape import Tape
from accel_scale.planning.tape.tensors import Parameter, Tensor
from accel_scale.planning.traced.fits import fit_of
from accel_scale.planning.traced.polynomials import value_of


def step_bytes(
    model: ModelFacts, setup: TrainingSetup, *, is_cuda: bool = True, is_tracked: bool = False
) -> StepBytes:
    """Memory marks of one forward and backward pass on one rank; see `activations.step_bytes`.

    Raises:
        ConfigError: as there, and if a traced model's class cannot run the step.
    """
    if not model.traced_config:
        return _on_tape(model, setup, is_cuda, is_tracked)
    check_policy(setup)
    if kind_of(setup.checkpointing) == SEGMENTS and (reason := division_conflict(model, setup)):
        raise ConfigError(f"{reason}.", place="checkpointing", fix="use full or every_2.")
    return _traced(model, setup, is_cuda, is_tracked)


@functools.lru_cache(maxsize=4096)
def _on_tape(model: ModelFacts, setup: TrainingSetup, is_cuda: bool, is_tracked: bool) -> StepBytes:
    return activations.step_bytes(model, setup, is_cuda=is_cuda, is_tracked=is_tracked)


@functools.lru_cache(maxsize=4096)
def _traced(model: ModelFacts, setup: TrainingSetup, is_cuda: bool, is_tracked: bool) -> StepBytes:
    fit = fit_of(model, setup, is_cuda, is_tracked)
    rows, length = setup.micro_batch_size, setup.sequence_length
    peaks, nets = marks_of(fit, rows, length)
    live = 0.0

    def through(name: str) -> float:
        """The peak of a segment; what it leaves is live afterwards."""
        nonlocal live
        peak = live + max(0.0, peaks.get(name, 0.0))
        live += nets.get(name, 0.0)
        return peak

    stands_for: list[int] = fit["stands_for"]
    forward = max(through(name) for name in ["embed", *(f"forward {index}" for index in stands_for), "finish"])
    hidden = rows * length * fit["hidden_size"] * fit["hidden_bytes"]
    at_head, kept, left = _head(model, setup, fit, is_cuda, is_tracked)
    loss = live + at_head
    through("leave")
    saved = live + kept
    if setup.checkpointing == "offload":
        # Traced as full checkpointing; here the layers' inputs are kept in host memory.
        held = (len(stands_for) - 1) * hidden
        live, saved = live - held, saved - held
        loss -= held
        forward = max(live, forward - held)
    live += left
    loss = max(loss, through("top"))
    passes: list[float] = []
    alone: list[float] = []
    earlier = 0.0  # gradients of layers that have run
    casts = nets.get("leave", 0.0) / max(1, len(stands_for))  # freed between the passes
    for index in reversed(stands_for):
        if setup.checkpointing == "offload" and len(passes) < len(stands_for) - 1:
            live += hidden
        passes.append(through(f"backward {index}"))
        alone.append(passes[-1] - earlier)
        earlier += max(0.0, nets.get(f"forward {index}", 0.0) + casts + nets.get(f"backward {index}", 0.0))
    passes.append(through("bottom"))
    alone.append(passes[-1] - earlier)
    edge = _edge(fit["kinds"], period_of(setup))
    top, top_alone, bottom = max(passes[:edge]), max(alone[:edge]), max(passes[-edge - 1 :])
    # Some layers keep the state of their last pass, and with it what was recomputed for it (RecurrentGemma's).
    gradients = min(live, parameter_groups(model, setup).trainable * setup.trained_bytes)
    return StepBytes(saved, forward, loss, top, top_alone, bottom, gradients)


def marks_of(fit: Document, rows: int, length: int) -> tuple[dict[str, float], dict[str, float]]:
    """The highest point of each segment of a fit, and what it leaves, in bytes."""
    segments = fit["one_row"] if rows == 1 and fit["one_row"] else fit["segments"]
    peaks = {name: max(value_of(p, rows, length) for p in part["peaks"]) for name, part in segments.items()}
    return peaks, {name: value_of(part["net"], rows, length) for name, part in segments.items()}


def _edge(kinds: list[int], period: int) -> int:
    """Number of layers from either end that contain every kind of layer, `period` at least."""
    everything = set(kinds)
    counts = (n for n in range(1, len(kinds)) if set(kinds[:n]) == everything == set(kinds[-n:]))
    return max(next(counts, len(kinds)), period)


def _head(
    model: ModelFacts, setup: TrainingSetup, fit: Document, is_cuda: bool, is_tracked: bool
) -> tuple[float, float, float]:
    """Bytes of head and loss on the tape, relative to what the trace ends with (the last hidden states or the logits):
    the peak, what waits for the backward pass, and what is left."""
    autocast = setup.compute_bytes if setup.autocast else None
    tape = Tape(autocast_bytes=autocast, adds_in_place=not is_tracked, is_cuda=is_cuda)
    ops = Ops(tape)
    x = given_tensor(ops, model, setup, fit)
    given = x.numel * x.itemsize
    x = tape.record(x, [Parameter(x.numel, x.itemsize)], [], lambda grad: [grad.view()])
    loss = traced_loss(ops, model, setup, fit, x)
    del x
    tape.leave_autocast()
    kept = tape.meter.live_bytes
    tape.backward(loss)
    return tape.meter.peak_bytes - given, kept - given, tape.meter.live_bytes - given


def given_tensor(ops: Ops, model: ModelFacts, setup: TrainingSetup, fit: Document) -> Tensor:
    """The tensor that a trace ends with and the loss takes: the last hidden states, or the logits."""
    width = model.vocab_size if fit["takes_logits"] else fit["hidden_size"]
    return ops.new(setup.micro_batch_size * setup.sequence_length * width, fit["given_bytes"])


def traced_loss(ops: Ops, model: ModelFacts, setup: TrainingSetup, fit: Document, x: Tensor) -> Tensor:
    """Run head and loss on what a trace ends with."""
    weights = Weights(setup, frozenset())
    if fit["takes_logits"]:
        return logits_loss(ops, setup, x)
    if model.num_scores:
        return scores_loss(ops, x, weights.base("score", model.head_params), model.num_scores)
    weight = weights.base("embed_tokens" if model.tied_embeddings else "lm_head", model.embedding_params)
    bias = weights.base("lm_head.bias", model.vocab_size) if model.head_bias else None
    family = replace(FAMILIES["llama"], scales_logits="scaled" in model.layer_variant)
    return Head(ops, model, family, setup, weight, bias)(x)


def division_conflict(model: ModelFacts, setup: TrainingSetup) -> str | None:
    """Why a traced model cannot be run this way; None if it can."""
    if not model.traced_config:
        return None
    if setup.parallel.model_parallel > 1:
        return f"layers of {model.model_type} models are traced whole and are not divided"
    if kind_of(setup.checkpointing) == SEGMENTS:
        return f"layers of {model.model_type} models are traced one by one, not in segments"
    if setup.long_rows:
        return f"layers of {model.model_type} models are not traced in tiles"
    return None
