"""Apply accel-scale's settings to a model, optimizer and schedule that somebody else's script has made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.training.checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.training.gathering import is_partitioned

if TYPE_CHECKING:
    import torch
    from torch import nn

    from accel_scale.training.precision import Precision


def strategy_of(accelerator: Any) -> str:
    """How `accelerator` splits the run: ``single``, ``ddp``, ``fsdp2``, ``zero3`` …, or ``model_parallel``."""
    from accelerate.utils import DistributedType

    from accel_scale.training.model_parallel import model_parallel_of

    if model_parallel_of(accelerator) is not None:
        return "model_parallel"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    if accelerator.distributed_type == DistributedType.FSDP:
        return "fsdp2" if accelerator.is_fsdp2 else "fsdp1"
    return "ddp" if accelerator.num_processes > 1 else "single"


def prepare_model(
    model: nn.Module,
    *,
    strategy: str,
    device_type: str,
    precision: Precision | None = None,
    policy: CheckpointingPolicy | None = None,
    attention: str | None = None,
    adapter: Any = None,
) -> nn.Module:
    """Attention, adapter, dtypes, fp8 and activation checkpointing, in the order in which they depend on each other.

    Call before the model is sharded. Parameters keep their identity, so an optimizer made before still trains them.

    Args:
        strategy: As from `strategy_of`.
        device_type: Where it trains: ``cuda``, ``cpu`` …
        precision: None leaves the dtypes as they are.
        policy: None leaves activation checkpointing as it is.
        attention: An implementation's name; None leaves it.
        adapter: A PEFT configuration; the base is frozen. None trains what the script trains.

    Returns:
        The model, inside a `PeftModel` if an adapter was asked for.

    Raises:
        ConfigError: if the model cannot be prepared so.
    """
    if attention is not None:
        _set_attention(model, attention, device_type, precision)
    if adapter is not None:
        from peft import get_peft_model

        model = get_peft_model(model, adapter)  # type: ignore[arg-type]
    if precision is not None:
        cast_parameters(model, precision)
        if precision.fp8:
            from accel_scale.training.precision import convert_to_fp8

            convert_to_fp8(model, emulate=precision.fp8_emulate)
    if policy is not None:
        # Reentrant checkpointing is the only one that ZeRO-3's partitioned frozen weights survive.
        use_reentrant = strategy == "zero3" and hasattr(model, "peft_config")
        apply_checkpointing(model, policy, use_reentrant=use_reentrant)
    return model


def _set_attention(model: Any, name: str, device_type: str, precision: Precision | None) -> None:
    from accel_scale.launching.machine import detect_device
    from accel_scale.training.attention import resolve_attention

    if not hasattr(model, "set_attn_implementation"):
        raise ConfigError(
            f"{type(model).__name__} is not a transformers model, so its attention cannot be chosen.",
            place="attention",
            fix="remove it.",
        )
    dtype = precision.compute_dtype if precision is not None else model.dtype
    device, config = detect_device(device_type), model.config
    model.set_attn_implementation(
        resolve_attention(name, device=device, dtype=dtype, packing=False, model_config=config)
    )


def cast_parameters(model: nn.Module, precision: Precision) -> None:
    """Trained weights to the dtype they are trained in, frozen ones to what is computed in; quantised ones stay."""
    for parameter in model.parameters():
        if not parameter.is_floating_point() or is_partitioned(parameter) or hasattr(parameter, "quant_state"):
            continue
        dtype = precision.model_dtype if parameter.requires_grad else precision.frozen_dtype
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def replace_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module | None,
    name: str,
    *,
    learning_rate: float | None = None,
    weight_decay: float | None = None,
    optim_args: Any = None,
    device_type: str,
    strategy: str,
    offload_optimizer: bool = False,
) -> torch.optim.Optimizer:
    """Another optimizer over the same parameter groups, with their own learning rates and weight decays.

    Parameters that are frozen by now are left out; trained ones that no group has, an adapter's, join the first.

    Args:
        model: Where new parameters are looked for; None keeps the groups as they are.
        learning_rate, weight_decay: Replace those of every group; None keeps them. No decay stays none.

    Raises:
        ConfigError: if the optimizer does not work here.
    """
    from accel_scale.training.optimizers import create_optimizer

    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        decay = group.get("weight_decay", 0.0)
        groups.append(
            {
                "params": [parameter for parameter in group["params"] if parameter.requires_grad],
                # What a schedule made before has done to the learning rate does not count.
                "lr": learning_rate if learning_rate is not None else group.get("initial_lr", group["lr"]),
                "weight_decay": weight_decay if weight_decay is not None and decay else decay,
            }
        )
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if model is not None:
        groups[0]["params"] += [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    groups = [group for group in groups if group["params"]]
    return create_optimizer(
        name,
        groups,
        lr=groups[0]["lr"],
        weight_decay=groups[0]["weight_decay"],
        optim_args=optim_args,
        device_type=device_type,
        strategy=strategy,
        offload_optimizer=offload_optimizer,
    )


def adjust_groups(
    optimizer: torch.optim.Optimizer, *, learning_rate: float | None = None, weight_decay: float | None = None
) -> None:
    """Set an optimizer's peak learning rate and decay; None keeps them, undoing what an earlier schedule did."""
    for group in optimizer.param_groups:
        initial = group.pop("initial_lr", group["lr"])
        group["lr"] = learning_rate if learning_rate is not None else initial
        if weight_decay is not None and group.get("weight_decay"):
            group["weight_decay"] = weight_decay


def step_once_per_update(scheduler: Any) -> None:
    """Let a prepared scheduler step once per optimizer step, as its length was counted.

    Accelerate steps it once per process, because ordinary scripts count in micro-batches of one process; with
    `split_batches` it does not (`AcceleratedScheduler.step`, 1.15.0).
    """
    scheduler.split_batches = True
