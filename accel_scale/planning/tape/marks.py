"""Memory marks of a step: what every way to predict activations gives."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class StepBytes:
    """Memory peaks of one micro-batch, without weights, optimizer states and gradients of earlier micro-batches.

    Attributes:
        saved_bytes: Kept between forward and backward pass, including the loss's tensors.
        forward_bytes: Peak during the layers' forward pass.
        loss_bytes: Peak during head and loss, including their backward.
        backward_top_bytes: Peak while the last layers, one of every kind, run backward. Gradients stay as the pass
            leaves them.
        backward_top_alone_bytes: The same, each layer without gradients of layers that ran before it.
        backward_bottom_bytes: Peak while the first layer and the embedding run backward.
        gradient_bytes: Gradients left after the pass.
    """

    saved_bytes: float
    forward_bytes: float
    loss_bytes: float
    backward_top_bytes: float
    backward_top_alone_bytes: float
    backward_bottom_bytes: float
    gradient_bytes: float

    @property
    def peak_bytes(self) -> float:
        """The highest of these peaks."""
        passes = (self.forward_bytes, self.loss_bytes, self.backward_top_bytes, self.backward_bottom_bytes)
        return max(passes)

    def with_waiting(self, num_bytes: float) -> StepBytes:
        """The same marks while `num_bytes` of other micro-batches wait for their backward pass."""
        values = {f.name: getattr(self, f.name) + num_bytes for f in fields(self) if f.name != "gradient_bytes"}
        return StepBytes(**values, gradient_bytes=self.gradient_bytes)

    def without_earlier_gradients(self) -> StepBytes:
        """The same marks if a layer's gradients are reduced, or added to earlier ones, before the next layer runs."""
        return replace(self, backward_top_bytes=self.backward_top_alone_bytes)

    def plus(self, other: StepBytes, factor: float) -> StepBytes:
        """Every field plus `factor` × that of `other`."""
        values = {f.name: getattr(self, f.name) + factor * getattr(other, f.name) for f in fields(self)}
        return StepBytes(**values)
