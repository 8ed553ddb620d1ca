"""A fake step's adapters: PEFT's, on layers that run as bitsandbytes' 4-bit layers do if the base is quantised."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING

import torch
from torch import nn

from accel_scale.errors import ConfigError
from accel_scale.modeling.adapter_targets import exclusion, untrainable_linears
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.tracing.skeletons import Skeleton

if TYPE_CHECKING:
    import peft
    from transformers import PreTrainedModel

# Dtypes by bytes per value.
DTYPES = {2: torch.bfloat16, 4: torch.float32}


def adapted(skeleton: Skeleton, setup: TrainingSetup, *, is_cuda: bool) -> nn.Module:
    """The model with PEFT's adapters, in the dtype used in training; without targets, only frozen.

    Raises:
        ConfigError: if PEFT cannot adapt it.
    """
    if not setup.lora.targets and not setup.lora.full_modules:
        return _frozen(skeleton.model, setup)
    import peft
    from peft.tuners.lora.layer import ParamWrapper

    lora = setup.lora
    targets = "all-linear" if lora.targets == ("all-linear",) else list(lora.targets)

    def with_adapters(base: PreTrainedModel, dropout: float) -> peft.PeftModel:
        adapters = peft.LoraConfig(
            r=lora.rank,
            use_dora=lora.dora,
            lora_dropout=dropout,
            target_modules=targets,
            exclude_modules=exclusion(untrainable_linears(base)),
            modules_to_save=list(lora.full_modules) or None,
            task_type="CAUSAL_LM",
        )
        return peft.get_peft_model(base, adapters, autocast_adapter_dtype=False)

    dropout = lora.dropout
    try:
        if dropout and any(parameter.dim() == 3 for parameter in skeleton.model.parameters()):
            # No input passes through adapters of stacked experts; with them, the recipes drop none at all.
            trial = with_adapters(copy.deepcopy(skeleton.model), 0.0)
            dropout = 0.0 if any(isinstance(module, ParamWrapper) for module in trial.modules()) else dropout
        model = with_adapters(skeleton.model, dropout)
    except ValueError as error:
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"PEFT cannot adapt the model: {reason}.", place="lora targets", fix="name others."
        ) from None
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(DTYPES[setup.trained_bytes])
    if setup.quantises_base:
        _quantise(model, DTYPES[setup.compute_bytes], leaves_casts=setup.autocast and is_cuda)
    return model.train()


def _frozen(model: PreTrainedModel, setup: TrainingSetup) -> nn.Module:
    """The model as it answers: nothing is trained, and all linears but the head are quantised if the base is."""
    model.requires_grad_(False)
    head, compute = model.get_output_embeddings(), DTYPES[setup.compute_bytes]
    for module in model.modules() if setup.quantises_base else ():
        if isinstance(module, nn.Linear) and module is not head:
            vars(module)["forward"] = functools.partial(_nf4_product, module, compute)
    return model.train()


def _quantise(model: nn.Module, compute: torch.dtype, *, leaves_casts: bool) -> None:
    """Make adapted linears run like bitsandbytes' 4-bit layers, which dequantise their weights when needed."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        base = module.get_base_layer() if isinstance(module, LoraLayer) else None
        if isinstance(base, nn.Linear):
            # PEFT's 4-bit layers leave casts to CUDA's autocast.
            vars(module)["cast_input_dtype_enabled"] = not leaves_casts
            vars(base)["forward"] = functools.partial(_nf4_forward, base, compute)


class _Nf4Product(torch.autograd.Function):
    """A product with a weight that is dequantised in the forward pass and again in the backward pass."""

    @staticmethod
    def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
        ctx.weight = weight
        return nn.functional.linear(x, torch.empty_like(weight, dtype=x.dtype), bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad @ torch.empty_like(ctx.weight, dtype=grad.dtype), None, None


def _nf4_product(base: nn.Linear, compute: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    bias = None if base.bias is None else base.bias.to(compute)
    result: torch.Tensor = _Nf4Product.apply(x.to(compute), base.weight, bias)
    return result.to(x.dtype)


def _nf4_forward(base: nn.Linear, compute: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    # PEFT copies a 4-bit layer's output before it adds the adapter's.
    return _nf4_product(base, compute, x).clone()
