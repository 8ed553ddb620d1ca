"""Builds every optimizer of `facts.optimizer_specs`, and refuses those that cannot work in the run's setup."""

from __future__ import annotations

import importlib.util
import inspect
import shutil
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.facts.optimizer_specs import (
    OPTIMIZER_NAMES,
    OPTIMIZERS,
    OptimizerSpec,
    optimizer_spec,
    state_bytes_per_parameter,
)
from accel_scale.facts.strategies import strategy_named

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import TrainingArguments

__all__ = [
    "OPTIMIZERS",
    "OPTIMIZER_NAMES",
    "OptimizerSpec",
    "check_optimizer",
    "create_optimizer",
    "keep_embeddings_wide",
    "optimizer_cls_and_kwargs",
    "optimizer_spec",
    "parse_optim_args",
    "state_bytes_per_parameter",
]


def create_optimizer(
    name: str,
    params_or_groups: Iterable[Any],
    *,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    optim_args: Mapping[str, Any] | str | None = None,
    device_type: str = "cpu",
    strategy: str = "single",
    offload_optimizer: bool = False,
) -> torch.optim.Optimizer:
    """Create the optimizer called `name` over parameters or parameter groups.

    Args:
        weight_decay: Weight decay of groups that do not set their own.
        betas, eps: For the Adam family; Lion takes `betas`.
        optim_args: Same as ``--optim_args``: ``"momentum=0.95,nesterov=true"`` or a mapping.
        device_type: Device type of the parameters.
        strategy: A name of `facts.strategies`.
        offload_optimizer: True if ZeRO or FSDP keeps optimizer states in host memory.

    Raises:
        ConfigError: if it is unknown, not installed, or does not work in this setup.
    """
    settings = SimpleNamespace(
        learning_rate=lr,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_epsilon=eps,
        weight_decay=weight_decay,
        warmup_steps=0,
        optim_target_modules=None,
    )
    optimizer_cls, kwargs = optimizer_cls_and_kwargs(
        name,
        settings,
        optim_args=optim_args,
        device_type=device_type,
        strategy=strategy,
        offload_optimizer=offload_optimizer,
    )
    return optimizer_cls(params_or_groups, **kwargs)


def keep_embeddings_wide(name: str, model: nn.Module) -> None:
    """Give embeddings 32-bit states under bitsandbytes' 8-bit optimizers, as transformers' trainer does.

    Call it before the first step. Other optimizers are not affected.
    """
    if not optimizer_spec(name).widens_embeddings:
        return
    import torch
    from bitsandbytes.optim import GlobalOptimManager

    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            GlobalOptimManager.get_instance().register_module_override(module, "weight", {"optim_bits": 32})


def optimizer_cls_and_kwargs(
    name: str,
    training_args: Any,
    *,
    optim_args: Mapping[str, Any] | str | None = None,
    model: Any = None,
    device_type: str = "cpu",
    strategy: str = "single",
    offload_optimizer: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Class and keyword arguments for transformers' ``Trainer(optimizer_cls_and_kwargs=…)``.

    Args:
        training_args: `TrainingArguments`, or anything with its learning rate, betas, epsilon and weight decay.
        optim_args: `None` uses those of `training_args`.
        model: Needed by optimizers that inspect layers (GaLore, APOLLO, LOMO).

    Raises:
        ConfigError: as in `create_optimizer`.
    """
    if optim_args is None:
        optim_args = getattr(training_args, "optim_args", None)
    options = parse_optim_args(name, optim_args)
    check_optimizer(name, device_type=device_type, strategy=strategy, offload_optimizer=offload_optimizer)
    adam = {
        "lr": training_args.learning_rate,
        "betas": (training_args.adam_beta1, training_args.adam_beta2),
        "eps": training_args.adam_epsilon,
    }
    if name in _OWN:
        optimizer_cls, kwargs = _OWN[name](adam, options, strategy)
    else:
        optimizer_cls, kwargs = _from_transformers(name, training_args, options, model)
    if "weight_decay" in inspect.signature(optimizer_cls).parameters:
        kwargs.setdefault("weight_decay", training_args.weight_decay)
    return optimizer_cls, kwargs


def parse_optim_args(name: str, optim_args: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Parse ``--optim_args``; every key must be known to the optimizer, and every value gets its type.

    transformers ignores keys that an optimizer does not read, and passes some values on as text.

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
        return dict(optim_args or {})  # from another package, whose options transformers checks
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


def check_optimizer(
    name: str,
    *,
    device_type: str,
    strategy: str = "single",
    offload_optimizer: bool = False,
    precision: str | None = None,
    max_grad_norm: float | None = None,
    gradient_accumulation_steps: int = 1,
    optim_args: Mapping[str, Any] | str | None = None,
    place: str = "--optim",
) -> list[str]:
    """Refuse an optimizer that cannot work here; returns notes for the user about an accepted one.

    Raises:
        ConfigError: if a package is missing, or device, strategy, precision or gradient handling rule it out.
    """
    spec = optimizer_spec(name)
    if spec.package is not None and importlib.util.find_spec(spec.package) is None:
        raise ConfigError(f"{name} needs {spec.package}.", place=place, fix=f"{spec.install}.")
    zero_offload = strategy_named(strategy).is_deepspeed and offload_optimizer
    if zero_offload and spec.zero_offload is None:
        raise ConfigError(
            f"ZeRO with optimizer offload would silently run DeepSpeed CPU Adam in place of {name}.",
            place=place,
            fix="use --optim adamw_torch_fused, or a launch file without optimizer offload.",
        )
    refusal = spec.refusal(device_type=device_type, strategy=strategy, zero_offload=zero_offload, precision=precision)
    if refusal is not None:
        reason, fix = refusal[1]
        raise ConfigError(f"{name} does not work here: {reason}.", place=place, fix=fix)
    _check_compilers(spec, place)
    options = parse_optim_args(name, optim_args)
    if options.get("offload_gradients") and (max_grad_norm or gradient_accumulation_steps > 1):
        raise ConfigError(
            "offload_gradients frees every gradient in the backward pass, so none can be clipped or accumulated.",
            place="--optim_args",
            fix="remove offload_gradients, or use --max_grad_norm 0 --gradient_accumulation_steps 1.",
        )
    return _notes(name, spec, device_type, strategy, zero_offload)


def _check_compilers(spec: OptimizerSpec, place: str) -> None:
    missing = [tool for tool in spec.compilers if shutil.which(tool) is None]
    if missing:
        raise ConfigError(
            f"DeepSpeed compiles its CPU Adam at the first run and needs {' and '.join(missing)}.",
            place=place,
            fix=f"apt install {' '.join(missing).replace('ninja', 'ninja-build')}.",
        )


def _notes(name: str, spec: OptimizerSpec, device_type: str, strategy: str, zero_offload: bool) -> list[str]:
    notes = []
    if zero_offload and spec.package != "deepspeed":
        notes.append(f"ZeRO with optimizer offload runs {spec.zero_offload} in place of {name}.")
    if spec.is_paged and device_type != "cuda":
        notes.append(f"{name} pages its states on CUDA only; here they are ordinary memory.")
    if spec.zero_note is not None and strategy_named(strategy).is_deepspeed:
        notes.append(spec.zero_note)
    return notes


def _from_transformers(
    name: str, training_args: TrainingArguments, options: Mapping[str, Any], model: nn.Module
) -> tuple[Any, dict[str, Any]]:
    from transformers import Trainer

    settings = _Overlay(
        training_args,
        optim=name,
        optim_args=",".join(f"{key}={value}" for key, value in options.items()) or None,
    )
    try:
        optimizer_cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(settings, model)  # type: ignore[arg-type]
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{name} cannot be made: {error}", place="--optim", fix="see its documentation.") from error
    # transformers 5.23 passes some options on as text (block_size, bitsandbytes' RMSProp); here they keep their type.
    return optimizer_cls, {key: options.get(key, value) for key, value in kwargs.items()}


class _Overlay:
    """Overrides some attributes of another object."""

    def __init__(self, base: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes, _base=base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


_Kwargs = dict[str, Any]


def _adamw_foreach(adam: _Kwargs, options: Mapping[str, Any], strategy: str) -> tuple[Any, _Kwargs]:
    import torch

    return torch.optim.AdamW, {**adam, "foreach": True}


def _sgd_momentum(adam: _Kwargs, options: Mapping[str, Any], strategy: str) -> tuple[Any, _Kwargs]:
    import torch

    return torch.optim.SGD, {"lr": adam["lr"], "momentum": 0.9, **options}


def _adamw_cpu_offload(adam: _Kwargs, options: Mapping[str, Any], strategy: str) -> tuple[Any, _Kwargs]:
    from accel_scale.optimization.offload_optimizer import offload_optimizer_class

    return offload_optimizer_class(), {**adam, "fused": True, **options}


def _deepspeed_cpu_adam(adam: _Kwargs, options: Mapping[str, Any], strategy: str) -> tuple[Any, _Kwargs]:
    if strategy_named(strategy).is_deepspeed:
        if options:
            raise ConfigError(
                "ZeRO with optimizer offload builds DeepSpeed CPU Adam itself and takes no options for it.",
                place="--optim_args",
                fix="remove them.",
            )
        import torch

        # Accelerate replaces torch's AdamW by DeepSpeed CPU Adam in AdamW mode. For a DeepSpeedCPUAdam it would build
        # another one in Adam mode, whose weight decay is L2 (`map_pytorch_optim_to_deepspeed`, 1.15.0).
        return torch.optim.AdamW, adam
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam, {**adam, **options}


_OWN = {
    "adamw_torch_foreach": _adamw_foreach,
    "sgd_momentum": _sgd_momentum,
    "adamw_cpu_offload": _adamw_cpu_offload,
    "deepspeed_cpu_adam": _deepspeed_cpu_adam,
}
