"""fp8 matrix products by torchao: the conversion of a model's linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


def convert_to_fp8(model: nn.Module, *, emulate: bool = False) -> list[str]:
    """Replace linear layers by torchao's, which multiply in fp8 forward and backward; weights keep their dtype.

    As in Accelerate's fp8 recipe, the first and last linear layers, and sizes that are not multiples of 16, are left
    alone. Adapter matrices also stay in bf16. Call before the model is sharded; parameters keep their identity.

    Returns:
        Names of the converted layers.

    Raises:
        ConfigError: if no layer qualifies: the run would be bf16 training under another name.
    """
    import torch
    from accelerate.utils.ao import filter_linear_layers
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Exactly nn.Linear: quantised layers are subclasses of it.
    candidates = [
        name
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and ".lora_" not in f".{name}"
    ]
    inner = set(candidates[1:-1])
    converted: list[str] = []

    def qualifies(module: nn.Module, name: str) -> bool:
        good = name in inner and filter_linear_layers(module, name, layers_to_filter=[])
        if good:
            converted.append(name)
        return good

    # Weights are gathered in their own dtype: torchao's fp8 all-gather replaces parameters in the model, and an
    # optimizer created earlier would not train the new ones.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True, enable_fsdp_float8_all_gather=False)
    convert_to_float8_training(model, module_filter_fn=qualifies, config=config)
    if not converted:
        raise ConfigError(
            "no layer of this model can multiply in fp8: sizes must be multiples of 16, and the first and last linear "
            "layers stay in bf16.",
            place="--precision",
            fix="use --precision bf16.",
        )
    return converted
