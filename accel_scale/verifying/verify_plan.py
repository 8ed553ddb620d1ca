"""``accel-scale plan --verify``: compares one real step, or a traced one without a GPU, with its prediction."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.facts.optimizer_specs import optimizer_spec
from accel_scale.planning.cost.memory import MemoryEstimate, predict_memory
from accel_scale.planning.models.catalogue import catalogue_config
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.traced import facts_of_any
from accel_scale.planning.models.training_setup import TrainingSetup

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Layers of a traced model: enough to cover the first, the last and the ones between.
TRACED_LAYERS = 4
_MAX_ACCUMULATION = 2


@dataclass(frozen=True)
class Verification:
    """Predicted and measured memory.

    Attributes:
        what: One sentence on what was run.
        rows: (part, predicted bytes, measured bytes); the last is the peak.
    """

    what: str
    rows: tuple[tuple[str, float, float], ...]


def verify_plan(model: str, facts: ModelFacts, setup: TrainingSetup, *, device: str | None = None) -> Verification:
    """Run a step of `model` with random weights in one process and compare it with its prediction.

    On CUDA, the whole model at `setup`'s sizes. Without CUDA, four layers of the real width whose operations are
    traced but not computed, which takes seconds at any size.

    Args:
        model: Model as for `load_model_facts`.
        facts: Its shapes.
        setup: Training setup; what one process on `device` cannot run is replaced, as stated in `what`.
        device: ``cuda`` or ``cpu``; None uses CUDA if available.

    Raises:
        ConfigError: for a model that transformers cannot build from its config, or with experts and no GPU.
    """
    if facts.num_scores:
        raise ConfigError(
            "steps of reward models are not tried.",
            place="--verify",
            fix="verify with --recipe sft, whose layers are the same.",
        )
    from accel_scale.quiet import quiet_imports

    quiet_imports()
    import torch

    from accel_scale.verifying.trial_step import measure_step

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    is_cuda = device == "cuda"
    config, runnable = _config(model), _runnable(setup, device)
    if not is_cuda:
        if any(layer.mixture for layer in facts.layers):
            raise ConfigError(
                "which experts a token passes through is not known without computing.",
                place="--verify",
                fix="verify on a machine with a GPU.",
            )
        config = _shallow(config, TRACED_LAYERS)
        facts = facts_of_any(config.to_dict(), name=facts.name)
    measured = measure_step(config, runnable, device=device, is_fake=not is_cuda, num_steps=3 if is_cuda else 2)
    memory = predict_memory(facts, runnable, is_cuda=is_cuda, is_tracked=not is_cuda)
    states = memory.states
    rows = [
        ("weights", states.weight_bytes, measured.weight_bytes),
        ("gradients", states.gradient_bytes, measured.gradient_bytes),
        ("optimizer states", states.optimizer_bytes, measured.optimizer_bytes),
        ("forward and backward pass", pass_bytes(memory), measured.pass_bytes),
    ]
    if measured.reserved_bytes is not None:
        rows.append(("reserved", memory.reserved_bytes, measured.reserved_bytes))
    rows.append(("peak", memory.peak_bytes, measured.peak_bytes))
    return Verification(_what(facts, setup, runnable, device), tuple(rows))


def pass_bytes(memory: MemoryEstimate) -> float:
    """Peak of the forward and backward pass, without weights and optimizer states."""
    passes = [phase for phase in memory.phases if phase.name.startswith(("forward", "backward"))]
    return max(p.total_bytes for p in passes) - memory.states.weight_bytes - memory.states.optimizer_bytes


def _config(model: str) -> Any:
    """The transformers configuration of a model's text part."""
    from transformers import AutoConfig

    from accel_scale.modeling.loading import load_config

    values = catalogue_config(model)
    if values is None or (Path(model) / "config.json").is_file():
        return load_config(model).get_text_config()
    try:
        return AutoConfig.for_model(**values).get_text_config()
    except ValueError as error:
        raise ConfigError(
            f"transformers has no {values['model_type']!r} models.", place="--verify", fix="verify another model."
        ) from error


def _shallow(config: PreTrainedConfig, num_layers: int) -> Any:
    """`config` with at most `num_layers` layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = min(num_layers, config.num_hidden_layers)
    for name in ("layer_types", "no_rope_layers"):
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[: config.num_hidden_layers])
    return config


def _runnable(setup: TrainingSetup, device: str) -> TrainingSetup:
    """`setup` adapted to a trial step on `device`."""
    from accel_scale.verifying.trial_step import one_process

    found = replace(one_process(setup), accumulation=min(setup.accumulation, _MAX_ACCUMULATION))
    if found.loss == "liger":
        found = replace(found, loss="chunked")
    if found.precision == "fp8":
        found = replace(found, precision="bf16")
    if device == "cpu":
        attention = found.attention if found.attention == "eager" else "sdpa"
        optimizer = found.optimizer if optimizer_spec(found.optimizer).in_torch else "adamw_torch_fused"
        found = replace(found, attention=attention, optimizer=optimizer)
    return found


def _what(facts: ModelFacts, setup: TrainingSetup, ran: TrainingSetup, device: str) -> str:
    how = "one step on this GPU" if device == "cuda" else f"one step traced over {facts.num_layers} layers"
    text = f"{how}: {ran.method}, {ran.micro_batch_size} × {ran.sequence_length} tokens"
    names = ("attention", "loss", "precision", "optimizer", "accumulation")
    replaced = [f"{n} {getattr(ran, n)}" for n in names if getattr(ran, n) != getattr(setup, n)]
    if setup.parallel.num_gpus > 1:
        replaced.append("one process")
    return f"{text}, with {', '.join(replaced)}" if replaced else text
