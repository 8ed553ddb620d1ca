"""Every optimizer: package, options and summary; its states are in `optimizer_states`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.facts.optimizer_states import OPTIMIZER_FACTS, OptimizerFacts

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
        options: What `--optim_args` may set, and how each value is read.
        facts: What it keeps, and where it does not work.
    """

    summary: str
    package: str | None = None
    install: str | None = None
    options: _Options = field(default_factory=dict)
    facts: OptimizerFacts = field(default_factory=OptimizerFacts)


_ADEMAMIX_OPTIONS: _Options = {
    **dict.fromkeys(("beta1", "beta2", "beta3", "alpha", "eps"), float),
    **dict.fromkeys(("t_alpha", "t_beta3"), int),
}
_TORCHAO_OPTIONS: _Options = {"block_size": int, "bf16_stochastic_round": _boolean}
_SGD_OPTIONS: _Options = {"momentum": float, "dampening": float, "nesterov": _boolean}
_RMSPROP_OPTIONS: _Options = {"momentum": float, "alpha": float, "eps": float}


def _torchao(summary: str, options: _Options) -> OptimizerSpec:
    return OptimizerSpec(summary, "torchao", "pip install 'accel-scale[fp8]'", options)


_SUMMARIES: dict[str, OptimizerSpec] = {
    "adamw_torch_fused": OptimizerSpec("torch AdamW, one kernel for all tensors"),
    "adamw_torch": OptimizerSpec("torch AdamW, torch picks the kernel"),
    "adamw_torch_foreach": OptimizerSpec("torch AdamW, batched kernels"),
    "sgd": OptimizerSpec("torch SGD", options=_SGD_OPTIONS),
    "sgd_momentum": OptimizerSpec("torch SGD, momentum 0.9 unless set", options=_SGD_OPTIONS),
    "adagrad": OptimizerSpec("torch Adagrad", options={"lr_decay": float, "eps": float}),
    "rmsprop": OptimizerSpec("torch RMSProp", options={**_RMSPROP_OPTIONS, "centered": _boolean}),
    "adafactor": OptimizerSpec("Adafactor with factored second moments, fixed learning rate"),
    "adamw_bnb_8bit": OptimizerSpec("bitsandbytes AdamW, 8-bit states"),
    "adamw_8bit": OptimizerSpec("the same as adamw_bnb_8bit"),
    "paged_adamw_32bit": OptimizerSpec("bitsandbytes AdamW, 32-bit states, paged"),
    "paged_adamw_8bit": OptimizerSpec("bitsandbytes AdamW, 8-bit states, paged"),
    "lion_32bit": OptimizerSpec("bitsandbytes Lion"),
    "lion_8bit": OptimizerSpec("bitsandbytes Lion, 8-bit states"),
    "paged_lion_32bit": OptimizerSpec("bitsandbytes Lion, paged"),
    "paged_lion_8bit": OptimizerSpec("bitsandbytes Lion, 8-bit states, paged"),
    "rmsprop_bnb": OptimizerSpec("bitsandbytes RMSProp", options=_RMSPROP_OPTIONS),
    "rmsprop_bnb_32bit": OptimizerSpec("bitsandbytes RMSProp", options=_RMSPROP_OPTIONS),
    "rmsprop_bnb_8bit": OptimizerSpec("bitsandbytes RMSProp, 8-bit states", options=_RMSPROP_OPTIONS),
    "ademamix": OptimizerSpec("bitsandbytes AdEMAMix", options=_ADEMAMIX_OPTIONS),
    "ademamix_8bit": OptimizerSpec("bitsandbytes AdEMAMix, 8-bit states", options=_ADEMAMIX_OPTIONS),
    "paged_ademamix_32bit": OptimizerSpec("bitsandbytes AdEMAMix, paged", options=_ADEMAMIX_OPTIONS),
    "paged_ademamix_8bit": OptimizerSpec("bitsandbytes AdEMAMix, 8-bit states, paged", options=_ADEMAMIX_OPTIONS),
    "adamw_torch_8bit": _torchao("torchao AdamW, 8-bit states", _TORCHAO_OPTIONS),
    "adamw_torch_4bit": _torchao("torchao AdamW, 4-bit states", _TORCHAO_OPTIONS),
    "adamw_cpu_offload": _torchao(
        "torchao's offload: states and step of AdamW in host memory, overlapping the backward pass",
        {"offload_gradients": _boolean, "minimal_size": int},
    ),
    "deepspeed_cpu_adam": OptimizerSpec(
        "DeepSpeed's vectorised AdamW for weights in host memory",
        package="deepspeed",
        install="pip install 'accel-scale[deepspeed]'",
        options={"fp32_optimizer_states": _boolean},
    ),
}
OPTIMIZERS: dict[str, OptimizerSpec] = {
    name: replace(_SUMMARIES[name], facts=facts) for name, facts in OPTIMIZER_FACTS.items()
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
    """Bytes of optimizer state per trained parameter, as `OptimizerFacts.state_bytes`; `None`: not known here."""
    spec = optimizer_spec(name)
    return spec.facts.state_bytes(weight_bytes) if name in OPTIMIZERS else None


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
