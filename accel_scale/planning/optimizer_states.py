"""Bytes that an optimizer keeps per trained parameter, and what its step needs for a moment."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from accel_scale.errors import ConfigError


@dataclass(frozen=True)
class OptimizerBytes:
    """What one optimizer costs.

    Attributes:
        num_states: Values kept per parameter.
        state_bits: Bits of each; None: as wide as the weight.
        block_size: Quantised values that share one fp32 scale.
        transient_copies: Copies of the trained parameters that exist during the step.
        is_paged: Whether states may be evicted to host memory when the card is full.
        on_host: Whether states always live in host memory.
    """

    num_states: int = 2
    state_bits: int | None = None
    block_size: int = 256
    transient_copies: float = 0.0
    is_paged: bool = False
    on_host: bool = False

    def state_bytes(self, weight_bytes: int) -> float:
        """Bytes of states per parameter, for weights of `weight_bytes`."""
        if self.state_bits is None:
            return self.num_states * weight_bytes
        scales = 4 / self.block_size if self.state_bits < 16 else 0.0
        return self.num_states * (self.state_bits / 8 + scales)


# torch's foreach kernels make the update's numerator and denominator for all parameters at once: measured one more
# copy. The fused kernel makes none; single-tensor loops make one for the largest parameter, which is left out.
_FOREACH = 1.0

OPTIMIZER_BYTES: dict[str, OptimizerBytes] = {
    "adamw_torch_fused": OptimizerBytes(),
    "adamw_torch": OptimizerBytes(transient_copies=_FOREACH),
    "adamw_torch_foreach": OptimizerBytes(transient_copies=_FOREACH),
    "sgd": OptimizerBytes(0),
    "sgd_momentum": OptimizerBytes(1),
    "adagrad": OptimizerBytes(1, transient_copies=_FOREACH),
    "rmsprop": OptimizerBytes(1, transient_copies=_FOREACH),
    "adafactor": OptimizerBytes(0),
    "adamw_bnb_8bit": OptimizerBytes(2, 8),
    "adamw_8bit": OptimizerBytes(2, 8),
    "paged_adamw_32bit": OptimizerBytes(2, 32, is_paged=True),
    "paged_adamw_8bit": OptimizerBytes(2, 8, is_paged=True),
    "lion_32bit": OptimizerBytes(1, 32),
    "lion_8bit": OptimizerBytes(1, 8),
    "paged_lion_32bit": OptimizerBytes(1, 32, is_paged=True),
    "paged_lion_8bit": OptimizerBytes(1, 8, is_paged=True),
    "rmsprop_bnb": OptimizerBytes(1, 32),
    "rmsprop_bnb_32bit": OptimizerBytes(1, 32),
    "rmsprop_bnb_8bit": OptimizerBytes(1, 8),
    "ademamix": OptimizerBytes(3, 32),
    "ademamix_8bit": OptimizerBytes(3, 8),
    "paged_ademamix_32bit": OptimizerBytes(3, 32, is_paged=True),
    "paged_ademamix_8bit": OptimizerBytes(3, 8, is_paged=True),
    "adamw_torch_8bit": OptimizerBytes(2, 8),
    "adamw_torch_4bit": OptimizerBytes(2, 4, block_size=128),
    "adamw_cpu_offload": OptimizerBytes(on_host=True),
    "deepspeed_cpu_adam": OptimizerBytes(2, 32, on_host=True),
}


def optimizer_bytes(name: str) -> OptimizerBytes:
    """The costs of ``--optim name``.

    Raises:
        ConfigError: for an optimizer that is not modelled, naming the nearest.
    """
    if name not in OPTIMIZER_BYTES:
        near = difflib.get_close_matches(name, OPTIMIZER_BYTES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"The planner does not know the optimizer {name!r}.",
            place="--optim",
            fix=f"{hint}use one of {', '.join(OPTIMIZER_BYTES)}.",
        )
    return OPTIMIZER_BYTES[name]
