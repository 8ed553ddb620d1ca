"""Replace a script's optimizer or its learning rates; everything else stays as the script has it.

A schedule continues from its position, over the new optimizer. Groups keep their parameters, their keys and the
settings chosen for them, if the new optimizer has such a setting.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler

# These change how a step is computed, not its result.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
_CARRIED_OTHERWISE = {"params", "lr", "weight_decay"}
# Attributes in which schedules keep a value per parameter group, and those that are learning rates (torch 2.13).
_RATES = ("base_lrs", "max_lrs", "_last_lr")
_PER_GROUP = (*_RATES, "lr_lambdas", "min_lrs", "base_momentums", "max_momentums")
_GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")


def replace_optimizer(
    optimizer: torch.optim.Optimizer,
    name: str,
    *,
    schedules: Iterable[Any] = (),
    adapter_parameters: Sequence[torch.nn.Parameter] = (),
    optim_args: Any = None,
    device_type: str,
    strategy: str,
    offload_optimizer: bool = False,
    say: Callable[[str], None] = print,
) -> torch.optim.Optimizer:
    """Create the optimizer called `name` over the groups of `optimizer`, keeping the settings chosen for them.

    Args:
        schedules: Schedules of `optimizer`; from now on they change the learning rate of the new one.
        adapter_parameters: An adapter's parameters, which are in no group yet: they join the first group, and the
            parameters that the adapter has frozen are removed. Empty: each group keeps exactly its parameters.
        say: Prints one line about settings that the new optimizer does not have.

    Raises:
        ConfigError: if the optimizer does not work here, or lacks a required feature of the script's.
    """
    from accel_scale.optimization.optimizers import create_optimizer, parse_optim_args

    old = optimizer.param_groups
    kept = [index for index, group in enumerate(old) if not adapter_parameters or _trained(group)] or [0]
    groups = [_without_settings(old[index], optimizer) for index in kept]
    if adapter_parameters:
        for group, index in zip(groups, kept, strict=True):
            group["params"] = _trained(old[index])
            group.pop("param_names", None)
        groups[0]["params"] += adapter_parameters
    replaced = create_optimizer(
        name,
        groups,
        lr=groups[0]["lr"],
        weight_decay=groups[0]["weight_decay"],
        optim_args=optim_args,
        device_type=device_type,
        strategy=strategy,
        offload_optimizer=offload_optimizer,
    )
    said = parse_optim_args(name, optim_args)
    lost: dict[str, Any] = {}
    for index, group in zip(kept, replaced.param_groups, strict=True):
        for key, value in _chosen(optimizer, old[index]).items():
            if not any(option == key or option.rstrip("0123456789") + "s" == key for option in said):
                lost.update(_carry(key, value, group, replaced))
    if lost.pop("maximize", False):
        raise ConfigError(
            f"the script's optimizer maximizes, and {name} cannot.",
            place="ScalePlugin(optimizer=)",
            fix="train on the negative loss, or name an optimizer of torch.",
        )
    if lost:
        listed = ", ".join(f"{key}={value}" for key, value in lost.items())
        say(f"warning: {name} has no {listed} of the script's {type(optimizer).__name__}; it uses its own.")
    schedules = list(schedules)
    for schedule in schedules:
        _move_schedule(schedule, optimizer, replaced, kept)
    if schedules:
        _let_schedules_watch(replaced)
    return replaced


def _let_schedules_watch(optimizer: torch.optim.Optimizer) -> None:
    """Mark the optimizer's `step` as watched, as creating a schedule does.

    On its first step a schedule checks that its optimizer's `step` is wrapped, and warns otherwise. The wrapper is
    installed when a schedule is created (torch 2.13).
    """
    from torch.optim.lr_scheduler import LambdaLR

    rates = [float(group["lr"]) for group in optimizer.param_groups]
    LambdaLR(optimizer, lambda step: 1.0)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        _set_rate(group, "lr", rate)


def _trained(group: dict[str, Any]) -> list[Any]:
    return [parameter for parameter in group["params"] if parameter.requires_grad]


def _without_settings(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a group with its parameters, its rates, and keys that are no optimizer settings: names, a schedule's."""
    own = {key: value for key, value in group.items() if key not in optimizer.defaults}
    return {**own, "params": list(group["params"]), "lr": group["lr"], "weight_decay": group.get("weight_decay", 0.0)}


def _chosen(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Settings of a group that its optimizer class accepts and that differ from the defaults of the class."""
    taken = inspect.signature(type(optimizer).__init__).parameters
    names = taken.keys() & optimizer.defaults.keys() - _CARRIED_OTHERWISE - _IMPLEMENTATION
    return {name: group[name] for name in sorted(names) if group[name] != taken[name].default}


def _carry(key: str, value: object, group: dict[str, Any], replaced: torch.optim.Optimizer) -> dict[str, Any]:
    """Set `key` if the new optimizer has it; returns the setting if it does not."""
    default: Any = replaced.defaults.get(key)
    if key not in replaced.defaults or isinstance(default, (tuple, list)) != isinstance(value, (tuple, list)):
        return {key: value}
    if isinstance(value, (tuple, list)) and len(value) != len(default):
        if len(value) > len(default):
            return {key: value}
        value = (*value, *default[len(value) :])  # AdEMAMix has a third beta
    group[key] = value
    return {}


def schedules_of(optimizer: torch.optim.Optimizer, parts: Iterable[Any], *, place: str = "prepare") -> list[Any]:
    """Return those of `parts`, of any class, that change the learning rate of `optimizer`.

    Raises:
        ConfigError: if its schedule is not among `parts` and would keep changing the old optimizer's rates.
    """
    found = [part for part in parts if getattr(part, "optimizer", None) is optimizer]
    if not found and any("initial_lr" in group for group in optimizer.param_groups):
        raise ConfigError(
            "the optimizer has a schedule that was not given: it would lose hold of the learning rate.",
            place=place,
            fix="pass the script's learning-rate scheduler there too, together with its optimizer.",
        )
    return found


def _move_schedule(
    schedule: LRScheduler, old: torch.optim.Optimizer, new: torch.optim.Optimizer, kept: list[int]
) -> None:
    """Move `schedule` to `new`, whose groups are those of `old` at `kept`; it continues from its position."""
    for inner in getattr(schedule, "_schedulers", ()):
        _move_schedule(inner, old, new, kept)
    schedule.optimizer = new
    for name in _PER_GROUP:
        values = getattr(schedule, name, None)
        if isinstance(values, list) and len(values) == len(old.param_groups):
            setattr(schedule, name, [values[index] for index in kept])
    momentum = "betas" if getattr(schedule, "use_beta1", False) else "momentum"
    if getattr(schedule, "cycle_momentum", False) and momentum not in new.defaults:
        raise ConfigError(
            f"the script's {type(schedule).__name__} also moves {momentum}, which {type(new).__name__} does not have.",
            place="ScalePlugin(optimizer=)",
            fix="make the schedule with cycle_momentum=False, or name another optimizer.",
        )


def forget_schedules(optimizer: torch.optim.Optimizer) -> None:
    """Undo the effect of schedules that are being replaced: each group returns to its peak."""
    for group in optimizer.param_groups:
        peak = group.pop("initial_lr", float(group["lr"]))
        _set_rate(group, "lr", group.pop("max_lr", peak))
        group.pop("min_lr", None)


def scale_rates(optimizer: torch.optim.Optimizer, schedules: Iterable[Any], factors: Sequence[float]) -> None:
    """Multiply each group's learning rate, and the values its schedules derive from it, by its factor."""
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        for key in _GROUP_RATES:
            if key in group:
                _set_rate(group, key, float(group[key]) * factor)
    for schedule in schedules:
        _scale_schedule(schedule, factors)


def _set_rate(group: dict[str, Any], key: str, value: float) -> None:
    """Set a rate in place if it is a tensor: torchao steps with the tensor it was given."""
    if hasattr(group.get(key), "fill_"):
        group[key].fill_(value)
    else:
        group[key] = value


def _scale_schedule(schedule: LRScheduler, factors: Sequence[float]) -> None:
    for inner in getattr(schedule, "_schedulers", ()):
        _scale_schedule(inner, factors)
    for name in _RATES:
        values = getattr(schedule, name, None)
        if isinstance(values, list) and len(values) == len(factors):
            setattr(schedule, name, [float(value) * factor for value, factor in zip(values, factors, strict=True)])


def set_peak(optimizer: torch.optim.Optimizer, schedules: Iterable[Any], learning_rate: float) -> None:
    """Set every group's peak to `learning_rate`, under the existing schedules."""
    peaks = [float(group.get("max_lr", group.get("initial_lr", group["lr"]))) for group in optimizer.param_groups]
    if not all(peaks):
        raise ConfigError(
            "a parameter group of the script has a learning rate of 0, which cannot be scaled to another peak.",
            place="ScalePlugin(learning_rate=)",
            fix="give the group a learning rate, or set it in the script.",
        )
    scale_rates(optimizer, schedules, [learning_rate / peak for peak in peaks])


def set_weight_decay(optimizer: torch.optim.Optimizer, weight_decay: float) -> None:
    """Set `weight_decay` on the groups that already decay.

    Raises:
        ConfigError: if no group decays.
    """
    groups = [group for group in optimizer.param_groups if group.get("weight_decay")]
    if not groups and weight_decay:
        raise ConfigError(
            "no parameter group of the script decays, so there is nothing to set.",
            place="ScalePlugin(weight_decay=)",
            fix="give the groups that should decay a weight_decay above 0 in the script.",
        )
    for group in groups:
        group["weight_decay"] = weight_decay
