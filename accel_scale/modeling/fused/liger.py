"""Liger's Triton kernels for norms, gated MLPs and rotary embeddings. The loss remains this project's own."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_scale.facts.names import FUSED_PARTS

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy

# Not to be replaced by a patch: `fast_loss` computes the loss in chunks, with its own count of tokens.
_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")


@dataclass(frozen=True)
class Fused:
    """The parts replaced in a model.

    Attributes:
        parts: Names of `FUSED_PARTS`.
        undo: Restores the functions of transformers' modules; the model itself is not changed back.
    """

    parts: tuple[str, ...]
    undo: Callable[[], object]


def why_no_kernels(
    *,
    device_type: str,
    is_installed: bool,
    compiles: bool,
    in_tiles: bool,
    divides_tensors: bool,
    of_liger: bool = False,
) -> str | None:
    """The reason why no model can have fused layers in this setup; None if it can.

    With `of_liger`, those for CPUs do not count.
    """
    if device_type != "cuda" and (of_liger or device_type != "cpu"):
        return "Liger's are Triton's and need a CUDA device"
    if device_type == "cuda" and not is_installed:
        return "liger-kernel is not installed"
    if compiles:
        return "torch.compile fuses these layers itself"
    if in_tiles:
        return "--long_rows runs these layers over slices of the rows"
    if divides_tensors:
        return "they do not run on weights that tensor parallelism divides"
    return None


def is_installed() -> bool:
    """True if Liger and Triton are installed; imports neither."""
    return all(importlib.util.find_spec(name) is not None for name in ("liger_kernel", "triton"))


def fuse_on_cpu(model: PreTrainedModel, *, keeps_products: bool) -> Fused:
    """Give `model` the layers of `fuse_own_layers`; parameters as in `fuse_layers`."""
    from accel_scale.modeling.fused.own import fuse_own_layers, restore_layers

    del keeps_products  # nothing is overwritten
    return Fused(fuse_own_layers(model), functools.partial(restore_layers, model))


def fuse_layers(model: PreTrainedModel, *, keeps_products: bool) -> Fused:
    """Give `model` Liger's layers if there is a patch for its family; otherwise nothing is replaced.

    The patch also replaces functions in transformers' modules (rotary embeddings), for all models of the family.
    Checked on liger-kernel 0.8.5.

    Args:
        keeps_products: True if selective checkpointing keeps results of matrix products: Liger's rotary kernel
            overwrites queries and keys, which would be rotated twice, so it is then left out.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    patch = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.config.model_type)
    if patch is None:
        return Fused((), lambda: None)
    known = inspect.signature(patch).parameters
    wanted = {**dict.fromkeys(_LOSSES, False), "rope": not keeps_products}
    before = _module_globals()
    patch(model=model, **{name: value for name, value in wanted.items() if name in known})
    functions = _restore(before, classes_only=True)
    names = [*functions, *(_class_of_forward(module) for module in model.modules())]
    parts = tuple(part for part in FUSED_PARTS if any(part.lower() in name.lower() for name in names))
    return Fused(parts, functools.partial(_restore, before, classes_only=False))


def fuse_agreed(
    parts: tuple[str, ...], model: PreTrainedModel, policy: CheckpointingPolicy, *, device_type: str
) -> None:
    """Patch the run's own model, if the check has agreed on any `parts`."""
    if parts and device_type == "cpu":
        from accel_scale.modeling.fused.own import fuse_own_layers

        fuse_own_layers(model)
    elif parts:
        before = _module_globals()
        fuse_layers(model, keeps_products=policy.kind == "selective")
        _keep_own_on_cpu(before)


def _module_globals() -> dict[str, dict[str, object]]:
    """The contents of transformers' model modules."""
    names = [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]
    return {name: dict(vars(sys.modules[name])) for name in names}


def _restore(before: Mapping[str, Mapping[str, object]], *, classes_only: bool) -> list[str]:
    """Undo a patch's replacements; returns the names of the functions it had put in place, in Liger's spelling."""
    functions = []
    for name, values in before.items():
        module = sys.modules[name]
        for key, value in values.items():
            now = getattr(module, key, None)
            if now is value:
                continue
            if not isinstance(value, type):
                functions.append(str(getattr(now, "__name__", key)).replace("rotary", "rope"))
            if isinstance(value, type) or not classes_only:
                setattr(module, key, value)
    return functions


def _keep_own_on_cpu(before: Mapping[str, Mapping[str, object]]) -> None:
    """Keep the original functions for tensors on the host (of another model, say), which Triton's kernels refuse."""
    for name, values in before.items():
        module = sys.modules[name]
        for key, own in values.items():
            now = getattr(module, key, None)
            if now is not own and callable(own) and callable(now):
                setattr(module, key, _by_device(now, own))


def _by_device(fused: Callable[..., object], own: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(fused)
    def chosen(first: torch.Tensor, *others: object, **named: object) -> object:
        return (own if first.device.type == "cpu" else fused)(first, *others, **named)

    return chosen


def _class_of_forward(module: object) -> str:
    """The Liger class whose forward a module was given; empty if it has its own."""
    forward = vars(module).get("forward")
    function = getattr(forward, "__func__", forward)
    is_ligers = getattr(function, "__module__", "").startswith("liger_kernel")
    return str(function.__qualname__).partition(".")[0] if is_ligers else ""  # type: ignore[union-attr]
