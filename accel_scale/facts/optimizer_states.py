"""Every optimizer's states and where it does not work: the one table that planning, checks and training read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from accel_scale.errors import ConfigError


@dataclass(frozen=True)
class OptimizerFacts:
    """What is known of one optimizer without building it.

    Attributes:
        num_states: Values kept per trained parameter (in matrices; factored states count as none).
        state_bits: Bits of each; None: as wide as the weight.
        block_size: Quantised values that share one fp32 scale.
        transient_copies: Copies of the trained parameters that exist during the step.
        is_paged: Whether states may be evicted to host memory when the card is full.
        on_host: Whether states always live in host memory.
        zero_offload: What runs in its place when ZeRO keeps optimizer states in host memory; None: nothing can.
        refused: ``cpu``, ``cuda``, ``ddp``, ``fsdp``, ``zero`` or ``fp16`` → why it does not work there.
    """

    num_states: int = 2
    state_bits: int | None = None
    block_size: int = 256
    transient_copies: float = 0.0
    is_paged: bool = False
    on_host: bool = False
    zero_offload: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    def state_bytes(self, weight_bytes: float) -> float:
        """Bytes of states per parameter, for weights of `weight_bytes`, in matrices of 4096 values and more.

        Quantised states are ``bits / 8`` bytes and one fp32 scale per block (Dettmers et al. 2022, arXiv:2110.02861,
        section 2). Smaller tensors, and embeddings under bitsandbytes, keep 32-bit states.
        """
        if self.state_bits is None:
            return self.num_states * weight_bytes
        scales = 4 / self.block_size if self.state_bits < 16 else 0.0
        return self.num_states * (self.state_bits / 8 + scales)

    def refusal(
        self, *, device_type: str | None, strategy: str, zero_offload: bool, precision: str | None
    ) -> tuple[str, str] | None:
        """(condition, why) where it does not work; None where it does.

        Args:
            device_type: Where the weights are; None: on an accelerator of any kind.
            strategy: ``single``, ``ddp``, ``fsdp2``, ``zero1`` …
            zero_offload: Whether ZeRO keeps optimizer states in host memory.
        """
        conditions = [precision] if precision == "fp16" else []
        if strategy.startswith("zero"):  # DeepSpeed decides where weights and states are
            conditions += [] if zero_offload else ["zero"]
        else:
            kind = "fsdp" if strategy.startswith("fsdp") else strategy
            conditions += [name for name in (device_type, kind) if name is not None]
        return next(((name, self.refused[name]) for name in conditions if name in self.refused), None)


# torch's foreach kernels make the update's numerator and denominator for all parameters at once: measured one more
# copy. The fused kernel makes none; single-tensor loops make one for the largest parameter, which is left out.
_FOREACH = 1.0
_CPU_ADAM, _CPU_LION = "DeepSpeed CPU Adam", "DeepSpeed CPU Lion"
_NOT_FSDP = {"fsdp": "it cannot step the sharded tensors of FSDP2"}
_ONE_PROCESS = "it holds whole parameters in host memory, for one process with one accelerator"
_FLATTENED = "ZeRO flattens weights, and torchao keeps fp32 states for every tensor that its blocks do not divide"


def _bnb(num_states: int, bits: int, *, is_paged: bool = False, zero_offload: str | None = None) -> OptimizerFacts:
    """An optimizer of bitsandbytes, whose kernels take no DTensor (0.50.2); embeddings keep 32-bit states."""
    return OptimizerFacts(num_states, bits, is_paged=is_paged, zero_offload=zero_offload, refused=_NOT_FSDP)


OPTIMIZER_FACTS: dict[str, OptimizerFacts] = {
    "adamw_torch_fused": OptimizerFacts(zero_offload=_CPU_ADAM),
    "adamw_torch": OptimizerFacts(transient_copies=_FOREACH, zero_offload=_CPU_ADAM),
    "adamw_torch_foreach": OptimizerFacts(transient_copies=_FOREACH, zero_offload=_CPU_ADAM),
    "sgd": OptimizerFacts(0),
    "sgd_momentum": OptimizerFacts(1),
    "adagrad": OptimizerFacts(1, transient_copies=_FOREACH),
    "rmsprop": OptimizerFacts(1, transient_copies=_FOREACH),
    "adafactor": OptimizerFacts(0, refused=_NOT_FSDP),
    "adamw_bnb_8bit": _bnb(2, 8),
    "adamw_8bit": _bnb(2, 8),
    "paged_adamw_32bit": _bnb(2, 32, is_paged=True, zero_offload=_CPU_ADAM),
    "paged_adamw_8bit": _bnb(2, 8, is_paged=True),
    "lion_32bit": _bnb(1, 32, zero_offload=_CPU_LION),
    "lion_8bit": _bnb(1, 8),
    "paged_lion_32bit": _bnb(1, 32, is_paged=True, zero_offload=_CPU_LION),
    "paged_lion_8bit": _bnb(1, 8, is_paged=True),
    "rmsprop_bnb": _bnb(1, 32),
    "rmsprop_bnb_32bit": _bnb(1, 32),
    "rmsprop_bnb_8bit": _bnb(1, 8),
    "ademamix": _bnb(3, 32),
    "ademamix_8bit": _bnb(3, 8),
    "paged_ademamix_32bit": _bnb(3, 32, is_paged=True),
    "paged_ademamix_8bit": _bnb(3, 8, is_paged=True),
    "adamw_torch_8bit": OptimizerFacts(2, 8, refused={"zero": _FLATTENED}),
    # transformers asks torchao for blocks of 256 (5.23); torchao's own default for 4 bits is 128.
    "adamw_torch_4bit": OptimizerFacts(
        2,
        4,
        refused={
            "fsdp": "torchao 0.18 cannot compile its 4-bit step for the sharded tensors of FSDP2",
            "zero": _FLATTENED,
        },
    ),
    "adamw_cpu_offload": OptimizerFacts(
        on_host=True,
        refused={
            "cpu": "it moves states from an accelerator to host memory, and there is no accelerator here",
            "ddp": _ONE_PROCESS,
            "fsdp": _ONE_PROCESS,
            "zero": _ONE_PROCESS,
            "fp16": "loss scaling would have to be undone on gradients that are already in host memory",
        },
    ),
    "deepspeed_cpu_adam": OptimizerFacts(
        2,
        32,
        on_host=True,
        zero_offload=_CPU_ADAM,
        refused={
            "cuda": "it steps weights in host memory only, which here are on the accelerator",
            "fsdp": "it cannot step the sharded tensors of FSDP2",
            "zero": "it steps weights in host memory, and this launch keeps optimizer states on the accelerator",
        },
    ),
}


def optimizer_facts(name: str) -> OptimizerFacts:
    """What is known of ``--optim name``.

    Raises:
        ConfigError: for an optimizer that is not modelled, naming the nearest.
    """
    if name not in OPTIMIZER_FACTS:
        near = difflib.get_close_matches(name, OPTIMIZER_FACTS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"The planner does not know the optimizer {name!r}.",
            place="--optim",
            fix=f"{hint}use one of {', '.join(OPTIMIZER_FACTS)}.",
        )
    return OPTIMIZER_FACTS[name]
