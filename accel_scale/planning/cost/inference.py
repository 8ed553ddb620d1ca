"""Memory for answering with a trained model: weights in 16 or 4 bits, and keys and values of the tokens so far."""

from __future__ import annotations

from dataclasses import dataclass

from accel_scale.planning.cost.generation import generation_bytes
from accel_scale.planning.cost.overheads import gpu_overhead
from accel_scale.planning.cost.sharding import frozen_weight_bytes
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.parameters import parameter_groups
from accel_scale.planning.models.training_setup import GenerationSetup, LoraSetup, TrainingSetup

WEIGHTS = ("16 bit", "4 bit")


@dataclass(frozen=True)
class InferenceEstimate:
    """Memory of one card that answers with transformers' ``generate``, with adapters merged.

    Attributes:
        weights: ``16 bit`` or ``4 bit`` (bitsandbytes' NF4 with quantised constants).
        batch: Answers generated at the same time.
        length: Tokens of prompt and answer together.
        weight_bytes: The weights.
        cache_bytes: Keys and values of all tokens.
        pass_bytes: What the forward pass needs besides them.
        device_bytes: Their sum, including the allocator's and CUDA's own memory.
    """

    weights: str
    batch: int
    length: int
    weight_bytes: float
    cache_bytes: float
    pass_bytes: float
    device_bytes: float


def inference_memory(
    model: ModelFacts, *, batch: int, length: int, prompt: int | None = None
) -> tuple[InferenceEstimate, ...]:
    """Memory for answering, by the type of the weights.

    Args:
        model: Shapes of the model.
        batch: Answers generated at the same time.
        length: Tokens of prompt and answer together.
        prompt: Tokens of the prompt; None: half of `length`.

    Raises:
        ConfigError: for a model whose cache is not modelled.
    """
    prompt = max(1, length // 2) if prompt is None else prompt
    found = []
    for weights, method in zip(WEIGHTS, ("lora", "qlora"), strict=True):
        # A frozen base without adapters.
        setup = TrainingSetup(
            method=method,
            precision="bf16_true",
            packing=False,
            lora=LoraSetup(targets=()),
            generation=GenerationSetup(batch, prompt, max(1, length - prompt)),
        )
        needs = generation_bytes(model, setup)
        held = frozen_weight_bytes(setup, parameter_groups(model, setup))
        overhead = gpu_overhead(setup)
        lost = overhead.fragmentation_share * needs.pass_bytes + overhead.fragmentation_bytes
        total = held + needs.total_bytes + lost + overhead.context_bytes
        found.append(InferenceEstimate(weights, batch, length, held, needs.cache_bytes, needs.pass_bytes, total))
    return tuple(found)
