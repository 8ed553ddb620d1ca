"""Facts about every optimizer (package, options, states, where it does not work) for training, planner and doctor."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.facts.strategies import Refusal, strategy_named

_Options = Mapping[str, Callable[[str], object]]
_DEFAULT = "use --optim adamw_torch_fused."


def _boolean(text: object) -> bool:
    value = str(text).lower()
    if value not in ("true", "1", "yes", "false", "0", "no"):
        raise ValueError(text)
    return value in ("true", "1", "yes")


@dataclass(frozen=True)
class OptimizerSpec:
    """What is known about one optimizer without building it.

    Attributes:
        summary: What it is, in a few words.
        package: Module that must be importable, beyond this project's own dependencies.
        install: Command that installs it.
        options: Options that `--optim_args` may set, and how each value is parsed.
        num_states: Values kept per trained parameter (in matrices; factored states count as none). None if unknown.
        state_bits: Bits of each state; None if as wide as the weight.
        block_size: Number of quantised values that share one fp32 scale.
        transient_copies: Copies of the trained parameters that exist during the step.
        is_paged: Whether states may be evicted to host memory when the card is full.
        on_host: Whether states always live in host memory.
        in_torch: Whether it needs only torch, on any device.
        widens_embeddings: Whether embeddings have 32-bit states, though other weights have 8-bit ones.
        shares_weights: Whether it is known to update weights that model-parallel ranks share.
        steps_in_backward: Whether it updates weights in the backward pass, before the step can be inspected.
        compiles: Whether torch compiles its step, so that no dispatch mode may be active.
        whole_checkpoints: Whether its states can be resumed from a whole-model FSDP checkpoint.
        compilers: Programs needed at its first use.
        zero_offload: What runs in its place when ZeRO keeps optimizer states in host memory; None if nothing can.
        zero_note: What users should know about it under ZeRO.
        refused: ``cpu``, ``cuda``, ``ddp``, ``fsdp``, ``zero`` or ``fp16`` → why it does not work there.
    """

    summary: str
    package: str | None = None
    install: str | None = None
    options: _Options = field(default_factory=dict)
    num_states: int | None = 2
    state_bits: int | None = None
    block_size: int = 256
    transient_copies: float = 0.0
    is_paged: bool = False
    on_host: bool = False
    in_torch: bool = False
    widens_embeddings: bool = False
    shares_weights: bool = False
    steps_in_backward: bool = False
    compiles: bool = False
    whole_checkpoints: bool = True
    compilers: tuple[str, ...] = ()
    zero_offload: str | None = None
    zero_note: str | None = None
    refused: Mapping[str, Refusal] = field(default_factory=dict)

    def state_bytes(self, weight_bytes: float) -> float:
        """Bytes of state per parameter, for weights of `weight_bytes`, in matrices of 4096 values or more.

        Quantised states are ``bits / 8`` bytes and one fp32 scale per block (Dettmers et al. 2022, arXiv:2110.02861,
        section 2). Smaller tensors, and embeddings under bitsandbytes, keep 32-bit states.
        """
        scales = 4 / self.block_size if self.state_bits is not None and self.state_bits < 16 else 0.0
        return (self.num_states or 0) * (self.value_bytes(weight_bytes) + scales)

    def value_bytes(self, weight_bytes: float) -> float:
        """Bytes of one state value, without its share of the block's scale."""
        return weight_bytes if self.state_bits is None else self.state_bits / 8

    def refusal(
        self, *, device_type: str | None, strategy: str, zero_offload: bool, precision: str | None
    ) -> tuple[str, Refusal] | None:
        """The condition that rules the optimizer out here, and why; None if it works.

        Args:
            device_type: Type of the device with the weights; None for an accelerator of any kind.
            strategy: A name in `facts.strategies`.
            zero_offload: Whether ZeRO keeps optimizer states in host memory.
        """
        conditions = [precision] if precision == "fp16" else []
        launched = strategy_named(strategy)
        if launched.is_deepspeed:  # DeepSpeed decides where weights and states are
            conditions += [] if zero_offload else [launched.family]
        else:
            conditions += [name for name in (device_type, launched.family) if name is not None]
        return next(((name, self.refused[name]) for name in conditions if name in self.refused), None)


# torch's foreach kernels build the update's numerator and denominator for all parameters at once: one more copy, as
# measured. The fused kernel builds none; single-tensor loops build one for the largest parameter, which is ignored.
_FOREACH = 1.0
_CPU_ADAM, _CPU_LION = "DeepSpeed CPU Adam", "DeepSpeed CPU Lion"
_TORCHAO = ("torchao", "pip install 'accel-scale[fp8]'")
_NO_DTENSOR = "it cannot step the sharded tensors of FSDP2"
_ONE_PROCESS = "it holds whole parameters in host memory, for one process with one accelerator"
_OFFLOAD_BY_LAUNCH = "use the launch file zero2_offload.yaml or fsdp2_offload.yaml with --optim adamw_torch_fused."
_ZERO2_OFFLOAD = "use the launch file zero2_offload.yaml, or --optim adamw_torch_fused."
_SHARDED_8BIT = "use --optim adamw_torch_8bit with fsdp_state_dict_type: SHARDED_STATE_DICT."
_FLATTENED = Refusal(
    "ZeRO flattens weights, and torchao keeps fp32 states for every tensor that its blocks do not divide",
    "use --optim adamw_bnb_8bit, whose states have 8 bits at any size.",
)
_NO_4BIT = Refusal("torchao 0.18 cannot compile its 4-bit step for the sharded tensors of FSDP2", _SHARDED_8BIT)

_ADEMAMIX_OPTIONS: _Options = {
    **dict.fromkeys(("beta1", "beta2", "beta3", "alpha", "eps"), float),
    **dict.fromkeys(("t_alpha", "t_beta3"), int),
}
_TORCHAO_OPTIONS: _Options = {"block_size": int, "bf16_stochastic_round": _boolean}
_SGD_OPTIONS: _Options = {"momentum": float, "dampening": float, "nesterov": _boolean}
_RMSPROP_OPTIONS: _Options = {"momentum": float, "alpha": float, "eps": float}


def _bnb(summary: str, num_states: int, bits: int, *, options: _Options | None = None, zero_offload: str | None = None,
         is_paged: bool = False) -> OptimizerSpec:  # fmt: skip
    """A bitsandbytes optimizer. Its kernels do not accept DTensors (0.50.2), and embeddings keep 32-bit states."""
    refused = {"fsdp": Refusal(_NO_DTENSOR, _SHARDED_8BIT if bits == 8 else _DEFAULT)}
    return OptimizerSpec(
        f"bitsandbytes {summary}{', 8-bit states' if bits == 8 else ''}{', paged' if is_paged else ''}",
        options=options or {}, num_states=num_states, state_bits=bits, is_paged=is_paged, zero_offload=zero_offload,
        refused=refused, widens_embeddings=bits == 8,
    )  # fmt: skip


def _torch(summary: str, num_states: int, **facts: Any) -> OptimizerSpec:
    return OptimizerSpec(f"torch {summary}", num_states=num_states, in_torch=True, **facts)


def _torchao(bits: int, *, whole_checkpoints: bool = True, fsdp: Refusal | None = None) -> OptimizerSpec:
    """torchao's AdamW with quantised states."""
    refused = {"zero": _FLATTENED} | ({"fsdp": fsdp} if fsdp is not None else {})
    return OptimizerSpec(
        f"torchao AdamW, {bits}-bit states", *_TORCHAO, _TORCHAO_OPTIONS, state_bits=bits, compiles=True,
        whole_checkpoints=whole_checkpoints, refused=refused,
    )  # fmt: skip


OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw_torch_fused": _torch("AdamW, one kernel for all tensors", 2, zero_offload=_CPU_ADAM, shares_weights=True),
    "adamw_torch": _torch(
        "AdamW, torch picks the kernel", 2, transient_copies=_FOREACH, zero_offload=_CPU_ADAM, shares_weights=True
    ),
    "adamw_torch_foreach": _torch("AdamW, batched kernels", 2, transient_copies=_FOREACH, zero_offload=_CPU_ADAM),
    "sgd": _torch("SGD", 0, options=_SGD_OPTIONS),
    "sgd_momentum": _torch("SGD, momentum 0.9 unless set", 1, options=_SGD_OPTIONS),
    "adagrad": _torch("Adagrad", 1, options={"lr_decay": float, "eps": float}, transient_copies=_FOREACH),
    "rmsprop": _torch("RMSProp", 1, options={**_RMSPROP_OPTIONS, "centered": _boolean}, transient_copies=_FOREACH),
    "adafactor": OptimizerSpec(
        "Adafactor with factored second moments, fixed learning rate",
        num_states=0,
        zero_note="ZeRO flattens weights, so Adafactor cannot factor its second moment: 4 bytes per parameter.",
        refused={"fsdp": Refusal(_NO_DTENSOR, _DEFAULT)},
    ),
    "adamw_bnb_8bit": _bnb("AdamW", 2, 8),
    "adamw_8bit": _bnb("AdamW, the same as adamw_bnb_8bit", 2, 8),
    "paged_adamw_32bit": _bnb("AdamW, 32-bit states", 2, 32, is_paged=True, zero_offload=_CPU_ADAM),
    "paged_adamw_8bit": _bnb("AdamW", 2, 8, is_paged=True),
    "lion_32bit": _bnb("Lion", 1, 32, zero_offload=_CPU_LION),
    "lion_8bit": _bnb("Lion", 1, 8),
    "paged_lion_32bit": _bnb("Lion", 1, 32, is_paged=True, zero_offload=_CPU_LION),
    "paged_lion_8bit": _bnb("Lion", 1, 8, is_paged=True),
    "rmsprop_bnb": _bnb("RMSProp", 1, 32, options=_RMSPROP_OPTIONS),
    "rmsprop_bnb_32bit": _bnb("RMSProp", 1, 32, options=_RMSPROP_OPTIONS),
    "rmsprop_bnb_8bit": _bnb("RMSProp", 1, 8, options=_RMSPROP_OPTIONS),
    "ademamix": _bnb("AdEMAMix", 3, 32, options=_ADEMAMIX_OPTIONS),
    "ademamix_8bit": _bnb("AdEMAMix", 3, 8, options=_ADEMAMIX_OPTIONS),
    "paged_ademamix_32bit": _bnb("AdEMAMix", 3, 32, options=_ADEMAMIX_OPTIONS, is_paged=True),
    "paged_ademamix_8bit": _bnb("AdEMAMix", 3, 8, options=_ADEMAMIX_OPTIONS, is_paged=True),
    # Gathered states hold AsyncCollectiveTensors, which `torch.load` refuses (torch 2.13, torchao 0.18).
    "adamw_torch_8bit": _torchao(8, whole_checkpoints=False),
    # transformers asks torchao for blocks of 256 (5.23); torchao's own default for 4 bits is 128.
    "adamw_torch_4bit": _torchao(4, fsdp=_NO_4BIT),
    "adamw_cpu_offload": OptimizerSpec(
        "torchao's offload: states and step of AdamW in host memory, overlapping the backward pass",
        *_TORCHAO,
        {"offload_gradients": _boolean, "minimal_size": int},
        on_host=True,
        refused={
            "cpu": Refusal(
                "it moves states from an accelerator to host memory, and there is no accelerator here", _DEFAULT
            ),
            "ddp": Refusal(_ONE_PROCESS, _OFFLOAD_BY_LAUNCH),
            "fsdp": Refusal(_ONE_PROCESS, _OFFLOAD_BY_LAUNCH),
            "zero": Refusal(_ONE_PROCESS, _DEFAULT),
            "fp16": Refusal(
                "loss scaling would have to be undone on gradients that are already in host memory", _DEFAULT
            ),
        },
    ),
    "deepspeed_cpu_adam": OptimizerSpec(
        "DeepSpeed's vectorised AdamW for weights in host memory",
        "deepspeed",
        "pip install 'accel-scale[deepspeed]'",
        {"fp32_optimizer_states": _boolean},
        state_bits=32,
        on_host=True,
        compilers=("g++", "ninja"),
        zero_offload=_CPU_ADAM,
        refused={
            "cuda": Refusal("it steps weights in host memory only, which here are on the accelerator", _ZERO2_OFFLOAD),
            "fsdp": Refusal(_NO_DTENSOR, _DEFAULT),
            "zero": Refusal(
                "it steps weights in host memory, and this launch keeps optimizer states on the accelerator",
                _ZERO2_OFFLOAD,
            ),
        },
    ),
}
# Optimizers that `--plan auto` and `accel-scale plan` choose from, closest to the default first.
LEAN_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch_8bit", "paged_adamw_8bit")

_GALORE, _APOLLO = ("galore_torch", "pip install galore-torch"), ("apollo_torch", "pip install apollo-torch")
_LOMO, _SCHEDULE_FREE = ("lomo_optim", "pip install lomo-optim"), ("schedulefree", "pip install schedulefree")
_IN_BACKWARD = ("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise",
                "apollo_adamw_layerwise", "lomo", "adalomo")  # fmt: skip
# transformers' other optimizers, each built by transformers from a separate package. Their states are unknown.
_EXTERNAL: dict[str, OptimizerSpec] = {
    name: OptimizerSpec(
        f"{name}, as transformers builds it", *package, num_states=None, steps_in_backward=name in _IN_BACKWARD
    )
    for name, package in {
        "adamw_torch_xla": ("torch_xla", "pip install torch_xla"),
        "adamw_torch_npu_fused": ("torch_npu", "pip install torch_npu"),
        "adamw_anyprecision": ("torchdistx", "pip install git+https://github.com/pytorch/torchdistx"),
        "galore_adamw": _GALORE,
        "galore_adamw_8bit": _GALORE,
        "galore_adafactor": _GALORE,
        "galore_adamw_layerwise": _GALORE,
        "galore_adamw_8bit_layerwise": _GALORE,
        "galore_adafactor_layerwise": _GALORE,
        "lomo": _LOMO,
        "adalomo": _LOMO,
        "grokadamw": ("grokadamw", "pip install grokadamw"),
        "schedule_free_radam": _SCHEDULE_FREE,
        "schedule_free_adamw": _SCHEDULE_FREE,
        "schedule_free_sgd": _SCHEDULE_FREE,
        "apollo_adamw": _APOLLO,
        "apollo_adamw_layerwise": _APOLLO,
        "stable_adamw": ("optimi", "pip install torch-optimi"),
    }.items()
}
OPTIMIZER_NAMES: tuple[str, ...] = (*OPTIMIZERS, *_EXTERNAL)


def optimizer_spec(name: str) -> OptimizerSpec:
    """The spec of the optimizer called `name`.

    Raises:
        ConfigError: if there is no such optimizer.
    """
    spec = OPTIMIZERS.get(name) or _EXTERNAL.get(name)
    if spec is None:
        raise ConfigError(
            f"{name!r} is not an optimizer.", place="--optim", fix=f"use one of {', '.join(OPTIMIZERS)}."
        )
    return spec


def modelled_optimizer(name: str) -> OptimizerSpec:
    """The spec of ``--optim name``, whose states the planner can count.

    Raises:
        ConfigError: for an optimizer that is not modelled, naming the nearest.
    """
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(name, OPTIMIZERS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"The planner does not know the optimizer {name!r}.",
            place="--optim",
            fix=f"{hint}use one of {', '.join(OPTIMIZERS)}.",
        )
    return OPTIMIZERS[name]


def steps_in_backward(name: str) -> bool:
    """True if `name`, which may be a script's own optimizer, is known to update weights in the backward pass."""
    spec = OPTIMIZERS.get(name) or _EXTERNAL.get(name)
    return spec is not None and spec.steps_in_backward


def state_bytes_per_parameter(name: str, *, weight_bytes: float = 4.0) -> float | None:
    """Bytes of optimizer state per trained parameter, as in `OptimizerSpec.state_bytes`; None if unknown."""
    spec = optimizer_spec(name)
    return None if spec.num_states is None else spec.state_bytes(weight_bytes)
