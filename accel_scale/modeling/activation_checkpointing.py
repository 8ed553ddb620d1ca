"""Activation checkpointing by policy: the layers to recompute, and the activations to keep."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError, NotRunError
from accel_scale.facts.checkpointing import NOT_REENTRANT, SEGMENTS, SUBLAYERS, layers_at_once, refuse_too_few_layers
from accel_scale.modeling.activation_offload import checkpoint_with_offload
from accel_scale.modeling.recomputing.policies import CheckpointingPolicy as CheckpointingPolicy
from accel_scale.modeling.recomputing.segments import release_segments, split_into_segments

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def apply_checkpointing(
    model: nn.Module,
    policy: CheckpointingPolicy,
    *,
    use_reentrant: bool = False,
    blocks: str | None = None,
    tile_rows: int | None = None,
) -> None:
    """Switch `model` to activation checkpointing by `policy`; gradients are unchanged, memory and time change.

    Replaces any earlier policy of the model. Layers are recomputed in training mode only.

    Args:
        model: An HF `PreTrainedModel` or `PeftModel` (its own layers are used, and adapters on a frozen or 4-bit base
            get gradients), or any module with a stack of blocks.
        use_reentrant: DeepSpeed ZeRO-3 with PEFT needs True; ``selective``, parts of layers and segments do not work
            with it.
        blocks: Dotted name of the `ModuleList`/`Sequential` of blocks in a plain module; None searches for it.
        tile_rows: Tokens per tile of an MLP, for a policy in tiles; None uses the hidden size.

    Raises:
        ConfigError: if the model or the combination cannot be checkpointed this way.
    """
    if use_reentrant and policy.kind in NOT_REENTRANT:
        raise ConfigError(
            f"checkpointing policy {policy} does not work with reentrant checkpointing, which DeepSpeed "
            "ZeRO-3 with PEFT requires.",
            place="--checkpointing_policy",
            fix="use full, every_n or offload, or another strategy than ZeRO-3.",
        )
    from accel_scale.modeling.tiling.layers import tile_layers, untile_layers  # which imports torch

    untile_layers(model)
    hf_model = _hf_model(model)
    if hf_model is not None and blocks is None:
        layers: Sequence[nn.Module] = _apply_to_hf(hf_model, policy, use_reentrant)
    else:
        layers = _apply_to_plain(model, policy, use_reentrant, blocks)
    if policy.in_tiles:
        tile_layers(model, layers, name=type(hf_model or model).__name__, rows=tile_rows)
    if hf_model is not None:
        hf_model._has_long_rows = policy.in_tiles  # `head_loss` then uses smaller chunks


def _hf_model(model: nn.Module) -> Any:
    """The `PreTrainedModel` in `model` (itself, or the base of a `PeftModel`), or None."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return model
    base = model.get_base_model() if hasattr(model, "get_base_model") else None  # type: ignore[operator]
    return base if isinstance(base, PreTrainedModel) else None


def _checkpoint_kwargs(policy: CheckpointingPolicy, use_reentrant: bool) -> dict[str, Any]:
    if policy.kind != "selective":
        return {"use_reentrant": use_reentrant}
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    context_fn = functools.partial(create_selective_checkpoint_contexts, keep_attention_and_matmuls)
    return {"use_reentrant": False, "context_fn": context_fn}


def _apply_to_hf(model: Any, policy: CheckpointingPolicy, use_reentrant: bool) -> Sequence[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in model.modules():
        _release(module)
        release_segments(module)
    if policy.kind in ("none", *SUBLAYERS, SEGMENTS) and model.is_activation_checkpointing:
        model.activation_checkpointing_disable()
    if policy.kind == "none":
        return layers
    name = type(model).__name__
    if not model.supports_gradient_checkpointing or not layers:
        raise NotRunError(
            f"{name} does not support activation checkpointing in transformers.",
            place="--checkpointing_policy",
            fix="use none, or name the stack of blocks: apply_checkpointing(…, blocks='…').",
        )
    refuse_too_few_layers(str(policy), len(layers), name, place="--checkpointing_policy")
    if policy.kind == SEGMENTS:
        _split(model, layers, policy)
        return layers
    if policy.kind in SUBLAYERS:
        from accel_scale.modeling.tiling.layers import part_of

        for layer in layers:
            _recompute(part_of(layer, policy.kind), functools.partial(_checkpoint, use_reentrant=False))
        return layers
    model.activation_checkpointing_enable(_checkpoint_kwargs(policy, use_reentrant), every_n_layers=policy.every_n)
    _copy_changed_embeddings(model)
    if policy.kind == "offload":
        # transformers' own `offload=True` fails without an accelerator, so only the function called by each layer is
        # replaced. Checked on transformers 5.23; a test counts the moved bytes.
        run = functools.partial(checkpoint_with_offload, use_reentrant=use_reentrant)
        for layer in layers:
            layer._gradient_checkpointing_func = run  # type: ignore[assignment]
    return layers


def _copy_changed_embeddings(model: PreTrainedModel) -> None:
    """Let BLT add to its byte embeddings in place although transformers makes them require gradients (5.23)."""
    if any(name.endswith("encoder_hash_tok_embedding") for name, _ in model.named_modules()):
        model.get_input_embeddings().register_forward_hook(lambda module, args, output: output.clone())


def _split(model: nn.Module, layers: Sequence[nn.Module], policy: CheckpointingPolicy) -> None:
    """Split `layers` into segments, separately for each list of layers."""
    from torch import nn

    found = set(layers)
    owned = [
        (module, [layer for layer in child if layer in found])
        for module in model.modules()
        for child in module.children()
        if isinstance(child, nn.ModuleList)
    ]
    stacks = [(owner, stack) for owner, stack in owned if stack]
    if sum(len(stack) for _, stack in stacks) != len(layers):
        raise ConfigError(
            f"layers of {type(model).__name__} are not in lists, one after the other.",
            place="--checkpointing_policy",
            fix="use full or every_2.",
        )
    for owner, stack in stacks:
        split_into_segments(owner, stack, layers_at_once(str(policy), len(stack)))


def _recompute(module: nn.Module, run: Callable[..., object]) -> None:
    # A partial of a bound method, not a closure: it survives deepcopy, and hooks (FSDP2's) stay outside of it.
    module.forward = functools.partial(_checkpointed_forward, module.forward, run)


def _release(module: nn.Module) -> None:
    forward = module.__dict__.get("forward")
    if isinstance(forward, functools.partial) and forward.func is _checkpointed_forward:
        del module.forward


def _apply_to_plain(
    model: nn.Module, policy: CheckpointingPolicy, use_reentrant: bool, blocks: str | None
) -> Sequence[nn.Module]:
    if policy.kind in SUBLAYERS:
        raise ConfigError(
            f"only transformers' models say which part of a block is its {policy.kind}.",
            place="--checkpointing_policy",
            fix="use full, every_2 or selective.",
        )
    from torch import nn

    stack: Any = find_blocks(model, blocks)
    for module in model.modules():
        release_segments(module)
    if policy.kind == SEGMENTS:
        # A list has no forward pass.
        owner = stack if isinstance(stack, nn.Sequential) else _parent(model, stack)
        split_into_segments(owner, stack, layers_at_once(str(policy), len(stack)))
    for index, block in enumerate(stack):
        _release(block)
        if policy.kind in ("none", SEGMENTS) or index % policy.every_n:
            continue
        run = checkpoint_with_offload if policy.kind == "offload" else _checkpoint
        _recompute(block, functools.partial(run, **_checkpoint_kwargs(policy, use_reentrant)))
    return list(stack)


def _parent(model: nn.Module, child: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if any(part is child for part in module.children()))


def _checkpointed_forward(forward: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    import torch

    if not forward.__self__.training or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return run(functools.partial(forward, **kwargs), *args)


def _checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, *args, **kwargs)


def find_blocks(model: nn.Module, name: str | None = None) -> nn.Module:
    """The stack of blocks called `name`, or the largest stack of two or more modules of one class.

    Raises:
        ConfigError: if there is no such stack.
    """
    from torch import nn

    modules = dict(model.named_modules())
    if name is not None:
        if not isinstance(modules.get(name), nn.ModuleList | nn.Sequential):
            stacks = [key for key, module in modules.items() if isinstance(module, nn.ModuleList | nn.Sequential)]
            raise ConfigError(
                f"{type(model).__name__} has no ModuleList or Sequential called {name!r}.",
                place="blocks",
                fix=f"use one of {', '.join(stacks)}." if stacks else "name a stack of blocks.",
            )
        return modules[name]

    def num_parameters(stack: nn.Module) -> int:
        return sum(parameter.numel() for parameter in stack.parameters())

    stacks = [
        module
        for module in modules.values()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) > 1
        and len({type(child) for child in module}) == 1
    ]
    if not stacks or num_parameters(max(stacks, key=num_parameters)) == 0:
        raise ConfigError(
            f"{type(model).__name__} has no stack of blocks of one class to checkpoint.",
            place="--checkpointing_policy",
            fix="name it: apply_checkpointing(…, blocks='…').",
        )
    return max(stacks, key=num_parameters)


@functools.cache
def _kept_operators() -> frozenset[Any]:
    """Attention kernels (CUDA's, and the CPU's flash kernel) and matrix products, as dispatcher overloads."""
    import torch

    names = (
        "_scaled_dot_product_flash_attention.default", "_scaled_dot_product_flash_attention_for_cpu.default",
        "_scaled_dot_product_efficient_attention.default", "_scaled_dot_product_cudnn_attention.default",
        "_scaled_dot_product_fused_attention_overrideable.default",
        "_flash_attention_forward.default", "_efficient_attention_forward.default",
        "mm.default", "mm.dtype", "addmm.default", "addmm.dtype", "bmm.default", "bmm.dtype", "baddbmm.default",
        "_scaled_mm.default", "_grouped_mm.default", "_scaled_grouped_mm.default",
    )  # fmt: skip
    overloads = (_overload(torch.ops.aten, *name.split(".")) for name in names)
    return frozenset(overload for overload in overloads if overload is not None)


def _overload(namespace: object, packet: str, overload: str) -> Any:
    """An operator of this torch build; None if the build lacks it."""
    return getattr(getattr(namespace, packet, None), overload, None)


def keep_attention_and_matmuls(context: object, operator: object, *args: object, **kwargs: object) -> Any:
    """Policy for `torch.utils.checkpoint`: keep expensive results, recompute the rest.

    flash-attn packages register their kernels under hashed names, so those are matched by name, as TRL does.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    if operator in _kept_operators() or "flash_attn" in str(operator):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
