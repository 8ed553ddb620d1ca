"""Fixes for Accelerate's FSDP2 preparation: buffers, shared weights, absent layers, heads, forward prefetch.

These replace four functions of `accelerate.utils.fsdp_utils` (`fsdp2_load_full_state_dict`,
`fsdp2_prepare_auto_wrap_policy`, `fsdp2_prepare_model`, `_find_final_norm`) and
`FullyShardedDataParallelPlugin.set_auto_wrap_policy` (checked on 1.15.0).
tests/distributed/test_architectures_sharded.py, tests/unit/test_fsdp2_preparation.py and
tests/recipes/test_gradient_numbers.py fail if they change.
"""

from __future__ import annotations

import functools
import itertools
import os
from typing import TYPE_CHECKING, Any

from accel_scale.modeling.gathering import broadcast_from_main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from accelerate import Accelerator
    from torch import nn
    from torch.distributed.fsdp import FSDPModule
    from transformers import PreTrainedModel


def mend_fsdp2_preparation() -> None:
    """Install the fixes, so that Accelerate can prepare every model for FSDP2. Call before; twice is harmless."""
    _name_present_layers()
    _keep_shared_weights_together()
    _send_buffers()
    _keep_head_with_norm()
    _heed_forward_prefetch()


def _name_present_layers() -> None:
    """Leave out layer classes that a model names but lacks, such as those of Gemma 4's towers in its text model.

    Accelerate requires every one of them (`Could not find the transformer layer class`).
    """
    from accelerate import FullyShardedDataParallelPlugin

    choose = FullyShardedDataParallelPlugin.set_auto_wrap_policy
    if getattr(choose, "names_present_layers", False):
        return

    @functools.wraps(choose)
    def choose_policy(plugin: FullyShardedDataParallelPlugin, model: PreTrainedModel) -> None:
        if named := getattr(model, "_no_split_modules", None):
            model._no_split_modules = {type(module).__name__ for module in model.modules()} & set(named)
        choose(plugin, model)

    choose_policy.names_present_layers = True  # type: ignore[attr-defined]
    FullyShardedDataParallelPlugin.set_auto_wrap_policy = choose_policy


def _keep_shared_weights_together() -> None:
    """Keep layers that share weights, such as Zamba2's attention blocks, in the model's own group.

    FSDP2 refuses a weight that is in two groups. Such a layer gets no group; its parts that share nothing still may.
    """
    from accelerate.utils import fsdp_utils

    prepare: Any = fsdp_utils.fsdp2_prepare_auto_wrap_policy
    if getattr(prepare, "keeps_shared_weights", False):
        return

    @functools.wraps(prepare)
    def prepare_policy(plugin: object, model: nn.Module) -> Callable[[nn.Module], bool] | None:
        policy: Callable[[nn.Module], bool] | None = prepare(plugin, model)
        sharing = modules_that_share(model)
        if policy is None or not sharing:
            return policy
        return lambda module: id(module) not in sharing and policy(module)

    prepare_policy.keeps_shared_weights = True  # type: ignore[attr-defined]
    fsdp_utils.fsdp2_prepare_auto_wrap_policy = prepare_policy


def modules_that_share(model: nn.Module) -> set[int]:
    """The `id` of every module that holds a weight also held by a module outside of it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    holders: dict[int, list[set[int]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        holders.setdefault(id(parameter), []).append(
            {id(modules[".".join(parts[:depth])]) for depth in range(len(parts))}
        )
    sharing: set[int] = set()
    for paths in holders.values():
        if len(paths) > 1:
            common = functools.reduce(set[int].intersection, paths)
            sharing |= set().union(*paths) - common
    return sharing


def _keep_head_with_norm() -> None:
    """Put a trained head into a group with the norm before it, also in Llama 4 and models with images.

    A head in its own group is gathered only when it is called. A fused loss such as TRL's uses its weight without a
    call, and gathers it in a way that leaves each rank with the gradient of its own tokens only.
    """
    from accelerate.utils import fsdp_utils

    find: Callable[[PreTrainedModel], nn.Module | None] = fsdp_utils._find_final_norm
    if getattr(find, "looks_in_decoders", False):
        return

    @functools.wraps(find)
    def find_norm(model: PreTrainedModel) -> nn.Module | None:
        norm = find(model)
        return norm if norm is not None else _before_head(model)

    find_norm.looks_in_decoders = True  # type: ignore[attr-defined]
    fsdp_utils._find_final_norm = find_norm


def _before_head(model: PreTrainedModel) -> nn.Module | None:
    """The last norm among the children of the decoder, or of the child that holds the input embeddings.

    The decoder itself if it has no norm, as in HRM or Qwen 4: weights in none of its layers' groups join the head's
    group. None if a tied head shares a group with its embeddings, which are called first.
    """
    embedding, head = (
        getattr(model, name, lambda: None)() for name in ("get_input_embeddings", "get_output_embeddings")
    )
    weight = getattr(head, "weight", None)
    if embedding is None or weight is None or not weight.requires_grad:
        return None
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    for backbone in filter(None, (decoder, *model.children())):
        inside = set(backbone.modules())
        if embedding in inside and head not in inside:
            norms = [child for child in backbone.children() if "norm" in type(child).__name__.lower()]
            alone = None if weight is embedding.weight else backbone
            return norms[-1] if norms else alone
    return None


def _heed_forward_prefetch() -> None:
    """Make a launch file's ``fsdp_forward_prefetch: true`` prefetch layers, which Accelerate does only for FSDP1."""
    from accelerate import accelerator

    prepare: Callable[[Accelerator, nn.Module], nn.Module] = accelerator.fsdp2_prepare_model
    if getattr(prepare, "heeds_forward_prefetch", False):
        return

    @functools.wraps(prepare)
    def prepare_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
        prepared = prepare(accelerator, model)
        heed_forward_prefetch(prepared)
        return prepared

    prepare_model.heeds_forward_prefetch = True  # type: ignore[attr-defined]
    accelerator.fsdp2_prepare_model = prepare_model


def heed_forward_prefetch(model: nn.Module) -> None:
    """Call `gather_ahead` on a sharded model if the launch file has ``fsdp_forward_prefetch: true``."""
    if os.environ.get("FSDP_FORWARD_PREFETCH") == "true":
        gather_ahead(model)


def gather_ahead(model: nn.Module) -> None:
    """Start the all-gather of each layer's weights before the preceding layer runs, in the forward pass.

    FSDP2 starts it when the host reaches the layer, which is early enough only while the host is ahead of the device.
    In both cases two layers are whole at a time. The backward pass prefetches by default.
    """
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    for layers in model.modules():
        if isinstance(layers, nn.ModuleList):
            units = [unit for layer in layers if (unit := _first(layer.modules(), FSDPModule)) is not None]
            for below, above in itertools.pairwise(units):
                below.set_modules_to_forward_prefetch([above])


def _first(modules: Iterable[nn.Module], kind: type[FSDPModule]) -> FSDPModule | None:
    return next((module for module in modules if isinstance(module, kind)), None)


def _send_buffers() -> None:
    """Make Accelerate's RAM-efficient FSDP2 loading send persistent buffers too, such as an expert router's biases.

    It assumes that everything in a state dict is a sharded parameter (`'Tensor' object has no attribute
    'device_mesh'`). Buffers are hidden from the state dict while it loads; afterwards rank 0 broadcasts them.
    """
    from accelerate.utils import fsdp_utils

    load: Any = fsdp_utils.fsdp2_load_full_state_dict
    if getattr(load, "sends_buffers", False):
        return

    @functools.wraps(load)
    def load_all(
        accelerator: Accelerator, model: nn.Module, full_sd: dict[str, Any], *args: object, **kwargs: object
    ) -> Any:
        state = model.state_dict()
        held = {name: module for name, module in _persistent_buffers(model).items() if name in state}
        for name, module in held.items():
            module._non_persistent_buffers_set.add(name.rpartition(".")[2])
        try:
            loaded = load(accelerator, model, full_sd, *args, **kwargs)
        finally:
            for name, module in held.items():
                module._non_persistent_buffers_set.discard(name.rpartition(".")[2])
        _broadcast_buffers(held, full_sd, accelerator.device)
        return loaded

    load_all.sends_buffers = True  # type: ignore[attr-defined]
    fsdp_utils.fsdp2_load_full_state_dict = load_all


def _persistent_buffers(model: nn.Module) -> dict[str, nn.Module]:
    """The module of each buffer that belongs in a checkpoint, by the buffer's name."""
    return {
        f"{path}.{leaf}".lstrip("."): module
        for path, module in model.named_modules()
        for leaf, buffer in module._buffers.items()
        if buffer is not None and leaf not in module._non_persistent_buffers_set
    }


def _broadcast_buffers(owners: dict[str, nn.Module], full_sd: dict[str, Any], device: torch.device) -> None:
    import torch
    import torch.distributed as dist

    kinds = broadcast_from_main({name: (full_sd[name].shape, full_sd[name].dtype) for name in owners})
    for name, module in owners.items():
        shape, dtype = kinds[name]
        whole = full_sd[name].to(device) if dist.get_rank() == 0 else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(whole, src=0)
        module._buffers[name.rpartition(".")[2]] = whole
