"""One step of the twin, its loss and gradients, and the difference between two such steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel_scale.modeling.packing.row_facts import ROW_FACTS, RowFacts
from accel_scale.optimization.loss import count_loss_tokens
from accel_scale.optimization.router_loss import router_coefficient

if TYPE_CHECKING:
    from torch import nn

# Two equivalent computations in fp32 differ by 1e-6 of the loss and about 1e-5 of a weight's gradient. A logit scale
# of 0.98 instead of 1, or a missing cap at 50, changes either by more than 1e-3.
LOSS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 2e-3
# Gradients smaller than this fraction of the largest are rounding, as for biases that a softmax cancels.
_NEGLIGIBLE = 1e-5

LossOf = Callable[[Any, Mapping[str, Any]], torch.Tensor]


@dataclass(frozen=True)
class Step:
    """Loss and gradients of a forward and backward pass.

    Attributes:
        loss: In nats.
        gradients: Gradient of every trainable weight; None if it got none.
    """

    loss: float
    gradients: dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Difference:
    """Difference between a step and the one that it should equal.

    Attributes:
        losses: The two losses.
        gradient: Largest distance between gradients of a weight, relative to the gradient's norm.
        weight: Name of that weight.
    """

    losses: tuple[float, float]
    gradient: float
    weight: str

    @property
    def is_small(self) -> bool:
        """True if rounding explains the difference; NaN is not small."""
        loss, expected = self.losses
        near = abs(loss - expected) <= LOSS_TOLERANCE * max(1.0, abs(expected))
        return near and self.gradient <= GRADIENT_TOLERANCE

    def __str__(self) -> str:
        loss, expected = self.losses
        return f"loss {loss:.4f} against {expected:.4f}, gradients {self.gradient:.0%} apart ({self.weight})"


def take_step(model: nn.Module, inputs: Mapping[str, Any], loss_of: LossOf) -> Step:
    """Run forward and backward of `model` in training mode; its gradients are reset to None afterwards."""
    model.train()
    same_draws()
    model.zero_grad()
    loss = loss_of(model, dict(inputs))
    loss.backward()
    gradients = {
        name: None if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    model.zero_grad()
    return Step(float(loss.detach()), gradients)


def same_draws() -> None:
    """Make random draws other than dropout, such as a router's noise, the same in every step."""
    torch.default_generator.manual_seed(0)


def difference(step: Step, expected: Step) -> Difference:
    """The distance of `step` from `expected`, weight by weight."""
    lengths = {name: 0.0 if g is None else g.float().norm().item() for name, g in expected.gradients.items()}
    floor = _NEGLIGIBLE * max(lengths.values(), default=0.0)
    worst, weight = 0.0, "none"
    for name, length in lengths.items():
        mine, theirs = step.gradients.get(name), expected.gradients[name]
        if mine is None and theirs is None:
            continue
        gap = (_or_zero(mine, theirs) - _or_zero(theirs, mine)).norm().item()
        ratio = gap / max(length, floor, 1e-30)
        if not ratio <= worst and gap > floor:
            worst, weight = ratio, name
    return Difference((step.loss, expected.loss), worst, weight)


def _or_zero(gradient: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor:
    if gradient is not None:
        return gradient.float()
    return torch.zeros_like(other).float()  # type: ignore[arg-type]


def untrained_weights(step: Step) -> list[str]:
    """Trainable weights that no gradient reaches, except those of experts that got no token in the step."""
    trained = {_without_expert(name) for name, gradient in step.gradients.items() if _is_there(gradient)}
    return [
        name
        for name, gradient in step.gradients.items()
        if not _is_there(gradient) and _without_expert(name) not in trained
    ]


def _is_there(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(gradient.ne(0).any())


def _without_expert(name: str) -> str:
    """`name` without the expert's number, so that ``…experts.3.w1`` and ``…experts.0.w1`` are the same."""
    parts = name.split(".")
    return ".".join(
        "*" if i and part.isdigit() and "experts" in parts[i - 1] else part for i, part in enumerate(parts)
    )


def recipe_loss(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The loss of both recipes: the sum over labelled tokens ÷ their number in the global batch."""
    num_items, coefficient = count_loss_tokens(inputs["labels"]), router_coefficient(model.config)
    outputs = model(**inputs, num_items_in_batch=num_items, fast_lm_head=True, router_loss=bool(coefficient))
    return outputs.loss + coefficient * outputs.aux_loss if coefficient else outputs.loss  # type: ignore[no-any-return]


def loader_loss(model: nn.Module, inputs: Mapping[str, object]) -> torch.Tensor:
    """`recipe_loss` with the loaders' facts about the rows, which decide which tokens attend to each other."""
    return recipe_loss(model, {**inputs, ROW_FACTS: RowFacts(inputs)})


def log_prob_loss(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The log-probabilities behind TRL's preference losses, as a negative mean over labelled tokens."""
    outputs = model(**inputs, use_cache=False, fused_lm_head=True)
    return -outputs.log_probs.sum() / count_loss_tokens(inputs["labels"])  # type: ignore[no-any-return]
