"""What is known of every optimizer: package, options, bytes of state, and where it does not work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_scale.errors import ConfigError

_Options = Mapping[str, Callable[[Any], Any]]


def _boolean(text: Any) -> bool:
    value = str(text).lower()
    if value not in ("true", "1", "yes", "false", "0", "no"):
        raise ValueError(text)
    return value in ("true", "1", "yes")


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer.

    Attributes:
        summary: What it is, in a few words.
        package: Module that must be importable, beyond this project's own dependencies.
        install: What to type to get it.
        num_states: Values kept per trained parameter (in matrices; factored states count as none).
        state_bits: Bits of each; `None`: as wide as the weight.
        block_size: Values that share one fp32 scale, where states are quantised.
        options: What `--optim_args` may set, and how each value is read.
        paged: Whether states may be evicted to host memory when the card is full.
        zero_offload: What runs in its place when ZeRO keeps optimizer states in host memory; `None`: nothing can.
        refused: ``cpu``, ``cuda``, ``ddp``, ``fsdp``, ``zero`` or ``fp16`` → why it does not work there.
    """

    summary: str
    package: str | None = None
    install: str | None = None
    num_states: int = 2
    state_bits: int | None = None
    block_size: int = 256
    options: _Options = field(default_factory=dict)
    paged: bool = False
    zero_offload: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)


_CPU_ADAM = "DeepSpeed CPU Adam"
_ADEMAMIX_OPTIONS: _Options = {
    **dict.fromkeys(("beta1", "beta2", "beta3", "alpha", "eps"), float),
    **dict.fromkeys(("t_alpha", "t_beta3"), int),
}
_TORCHAO_OPTIONS: _Options = {"block_size": int, "bf16_stochastic_round": _boolean}
_SGD_OPTIONS: _Options = {"momentum": float, "dampening": float, "nesterov": _boolean}
_RMSPROP_OPTIONS: _Options = {"momentum": float, "alpha": float, "eps": float}
_ONE_PROCESS = "it holds whole parameters in host memory, for one process with one accelerator"
_FLATTENED = "ZeRO flattens weights, and torchao keeps fp32 states for every tensor that its blocks do not divide"
_NOT_FSDP = "it cannot step the sharded tensors of FSDP2"


def _bnb(summary: str, bits: int, num_states: int = 2, **kwargs: Any) -> OptimizerSpec:
    """An optimizer of bitsandbytes, whose kernels take no DTensor (0.50.2); embeddings keep 32-bit states."""
    return OptimizerSpec(summary, num_states=num_states, state_bits=bits, refused={"fsdp": _NOT_FSDP}, **kwargs)


OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw_torch_fused": OptimizerSpec("torch AdamW, one kernel for all tensors", zero_offload=_CPU_ADAM),
    "adamw_torch": OptimizerSpec("torch AdamW, torch picks the kernel", zero_offload=_CPU_ADAM),
    "adamw_torch_foreach": OptimizerSpec("torch AdamW, batched kernels", zero_offload=_CPU_ADAM),
    "sgd": OptimizerSpec("torch SGD", num_states=0, options=_SGD_OPTIONS),
    "sgd_momentum": OptimizerSpec("torch SGD, momentum 0.9 unless set", num_states=1, options=_SGD_OPTIONS),
    "adagrad": OptimizerSpec("torch Adagrad", num_states=1, options={"lr_decay": float, "eps": float}),
    "rmsprop": OptimizerSpec("torch RMSProp", num_states=1, options={**_RMSPROP_OPTIONS, "centered": _boolean}),
    "adafactor": OptimizerSpec(
        "Adafactor with factored second moments, fixed learning rate", num_states=0, refused={"fsdp": _NOT_FSDP}
    ),
    "adamw_bnb_8bit": _bnb("bitsandbytes AdamW, 8-bit states", 8),
    "adamw_8bit": _bnb("the same as adamw_bnb_8bit", 8),
    "paged_adamw_32bit": _bnb("bitsandbytes AdamW, 32-bit states, paged", 32, paged=True, zero_offload=_CPU_ADAM),
    "paged_adamw_8bit": _bnb("bitsandbytes AdamW, 8-bit states, paged", 8, paged=True),
    "lion_32bit": _bnb("bitsandbytes Lion", 32, 1, zero_offload="DeepSpeed CPU Lion"),
    "lion_8bit": _bnb("bitsandbytes Lion, 8-bit states", 8, 1),
    "paged_lion_32bit": _bnb("bitsandbytes Lion, paged", 32, 1, paged=True, zero_offload="DeepSpeed CPU Lion"),
    "paged_lion_8bit": _bnb("bitsandbytes Lion, 8-bit states, paged", 8, 1, paged=True),
    "rmsprop_bnb": _bnb("bitsandbytes RMSProp", 32, 1, options=_RMSPROP_OPTIONS),
    "rmsprop_bnb_32bit": _bnb("bitsandbytes RMSProp", 32, 1, options=_RMSPROP_OPTIONS),
    "rmsprop_bnb_8bit": _bnb("bitsandbytes RMSProp, 8-bit states", 8, 1, options=_RMSPROP_OPTIONS),
    "ademamix": _bnb("bitsandbytes AdEMAMix", 32, 3, options=_ADEMAMIX_OPTIONS),
    "ademamix_8bit": _bnb("bitsandbytes AdEMAMix, 8-bit states", 8, 3, options=_ADEMAMIX_OPTIONS),
    "paged_ademamix_32bit": _bnb("bitsandbytes AdEMAMix, paged", 32, 3, options=_ADEMAMIX_OPTIONS, paged=True),
    "paged_ademamix_8bit": _bnb(
        "bitsandbytes AdEMAMix, 8-bit states, paged", 8, 3, options=_ADEMAMIX_OPTIONS, paged=True
    ),
    "adamw_torch_8bit": OptimizerSpec(
        "torchao AdamW, 8-bit states",
        package="torchao",
        install="pip install 'accel-scale[fp8]'",
        state_bits=8,
        options=_TORCHAO_OPTIONS,
        refused={"zero": _FLATTENED},
    ),
    "adamw_torch_4bit": OptimizerSpec(
        "torchao AdamW, 4-bit states",
        package="torchao",
        install="pip install 'accel-scale[fp8]'",
        state_bits=4,
        options=_TORCHAO_OPTIONS,
        refused={
            "fsdp": "torchao 0.18 cannot compile its 4-bit step for the sharded tensors of FSDP2",
            "zero": _FLATTENED,
        },
    ),
    "adamw_cpu_offload": OptimizerSpec(
        "torchao's offload: states and step of AdamW in host memory, overlapping the backward pass",
        package="torchao",
        install="pip install 'accel-scale[fp8]'",
        options={"offload_gradients": _boolean, "minimal_size": int},
        refused={
            "cpu": "it moves states from an accelerator to host memory, and there is no accelerator here",
            "ddp": _ONE_PROCESS,
            "fsdp": _ONE_PROCESS,
            "zero": _ONE_PROCESS,
            "fp16": "loss scaling would have to be undone on gradients that are already in host memory",
        },
    ),
    "deepspeed_cpu_adam": OptimizerSpec(
        "DeepSpeed's vectorised AdamW for weights in host memory",
        package="deepspeed",
        install="pip install 'accel-scale[deepspeed]'",
        state_bits=32,
        options={"fp32_optimizer_states": _boolean},
        zero_offload=_CPU_ADAM,
        refused={
            "cuda": "it steps weights in host memory only, which here are on the accelerator",
            "fsdp": _NOT_FSDP,
            "zero": "it steps weights in host memory, and this launch keeps optimizer states on the accelerator",
        },
    ),
}

# transformers' other optimizers: built by transformers, each from a package of its own.
_EXTERNAL = {
    "adamw_torch_xla": ("torch_xla", "pip install torch_xla"),
    "adamw_torch_npu_fused": ("torch_npu", "pip install torch_npu"),
    "adamw_anyprecision": ("torchdistx", "pip install git+https://github.com/pytorch/torchdistx"),
    "galore_adamw": ("galore_torch", "pip install galore-torch"),
    "galore_adamw_8bit": ("galore_torch", "pip install galore-torch"),
    "galore_adafactor": ("galore_torch", "pip install galore-torch"),
    "galore_adamw_layerwise": ("galore_torch", "pip install galore-torch"),
    "galore_adamw_8bit_layerwise": ("galore_torch", "pip install galore-torch"),
    "galore_adafactor_layerwise": ("galore_torch", "pip install galore-torch"),
    "lomo": ("lomo_optim", "pip install lomo-optim"),
    "adalomo": ("lomo_optim", "pip install lomo-optim"),
    "grokadamw": ("grokadamw", "pip install grokadamw"),
    "schedule_free_radam": ("schedulefree", "pip install schedulefree"),
    "schedule_free_adamw": ("schedulefree", "pip install schedulefree"),
    "schedule_free_sgd": ("schedulefree", "pip install schedulefree"),
    "apollo_adamw": ("apollo_torch", "pip install apollo-torch"),
    "apollo_adamw_layerwise": ("apollo_torch", "pip install apollo-torch"),
    "stable_adamw": ("optimi", "pip install torch-optimi"),
}
OPTIMIZER_NAMES: tuple[str, ...] = (*OPTIMIZERS, *_EXTERNAL)


def optimizer_spec(name: str) -> OptimizerSpec:
    """What is known of `name`.

    Raises:
        ConfigError: if there is no such optimizer.
    """
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if name in _EXTERNAL:
        package, install = _EXTERNAL[name]
        return OptimizerSpec(f"{name}, as transformers builds it", package=package, install=install)
    raise ConfigError(f"{name!r} is not an optimizer.", place="--optim", fix=f"use one of {', '.join(OPTIMIZERS)}.")


def steps_in_backward(name: str) -> bool:
    """Whether `name` changes weights in the backward pass, before anybody can look at the step as a whole."""
    return "layerwise" in name or "lomo" in name


def state_bytes_per_parameter(name: str, *, weight_bytes: float = 4.0) -> float | None:
    """Bytes of optimizer state per trained parameter, in matrices of 4096 values and more.

    Quantised states are ``bits / 8`` bytes and one fp32 scale per block (Dettmers et al. 2022, arXiv:2110.02861,
    section 2). Smaller tensors, and embeddings under bitsandbytes, keep 32-bit states. `None`: not known here.
    """
    if name not in OPTIMIZERS:
        optimizer_spec(name)
        return None
    spec = OPTIMIZERS[name]
    if spec.state_bits is None:
        return spec.num_states * weight_bytes
    scale_bytes = 4.0 / spec.block_size if spec.state_bits < 32 else 0.0
    return spec.num_states * (spec.state_bits / 8 + scale_bytes)


def parse_optim_args(name: str, optim_args: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """``--optim_args`` with every key known to the optimizer and every value of its type.

    transformers drops what an optimizer does not read, and passes some values on as text.

    Raises:
        ConfigError: for an unknown key or a value of the wrong type.
    """
    if isinstance(optim_args, str):
        pairs = [part.strip() for part in optim_args.split(",") if part.strip()]
        if bad := [pair for pair in pairs if pair.count("=") != 1]:
            raise ConfigError(f"{bad[0]!r} is not key=value.", place="--optim_args", fix="write key=value,key=value.")
        optim_args = dict(pair.split("=") for pair in pairs)
    spec = optimizer_spec(name)
    if name not in OPTIMIZERS:
        return dict(optim_args or {})  # of another package, whose options transformers checks
    parsed = {}
    for key, value in (optim_args or {}).items():
        if key not in spec.options:
            known = ", ".join(spec.options) or "nothing"
            raise ConfigError(f"{name} has no option {key!r}.", place="--optim_args", fix=f"it takes {known}.")
        try:
            parsed[key] = spec.options[key](value)
        except ValueError:
            raise ConfigError(
                f"{value!r} is not a value for {key} of {name}.", place="--optim_args", fix="write a plain number."
            ) from None
    return parsed
