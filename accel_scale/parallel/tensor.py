"""Tensor parallelism: each matrix product of a transformers model divided over the ranks of one mesh dimension.

The model's own plan (`base_model_tp_plan` in its configuration) says which layers are divided and how; GPT-2 has none
and gets one here. Parameters become DTensors under their own names, so that `fully_shard` can divide them further on
another mesh dimension and `torch.distributed.checkpoint` can store them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.modeling.model_class import numbers_of_layers

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedConfig

PLACE = "--tp_size"
# In transformers' terms; "colwise_fused_heads" is our own style (`tensor_styles.FusedHeads`).
OWN_PLANS = {
    "gpt2": {
        "wte": "embedding_rowwise",
        "h.*.attn.c_attn": "colwise_fused_heads",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    }
}
# Missing in transformers 5.23's plans: parameters that each rank applies to its part of the activations.
ADDED_TO_PLANS = {"apertus": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}}
STYLE_NAMES = (
    "colwise",
    "colwise_gather_output",
    "colwise_rep",
    "colwise_fused_heads",
    "rowwise",
    "rowwise_rep",
    "rowwise_split_input",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
    "replicate",
)
_LARGEST_DEGREE = 64
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


def check_tensor_parallel(config: PreTrainedConfig, tp_size: int, *, method: str) -> None:
    """Refuse models that cannot be divided over `tp_size` ranks.

    Args:
        config: The model's `PreTrainedConfig`.
        method: ``full``, ``lora`` or ``qlora``.

    Raises:
        ConfigError: naming the sizes that do not divide, and the degrees that would work.
    """
    if tp_size == 1:
        return
    text_config = config.get_text_config()
    plan = _base_plan(text_config)
    if not plan:
        raise _refuse(
            f"{text_config.model_type} models have no tensor-parallel plan in transformers.",
            "use --tp_size 1, and FSDP2 to divide the weights.",
        )
    unknown = sorted({style for style in plan.values() if style not in STYLE_NAMES})
    if unknown:
        raise _refuse(
            f"the tensor-parallel plan of {text_config.model_type} models needs {', '.join(unknown)} (mixtures of "
            "experts, latent attention), which is not supported.",
            "use --tp_size 1, and FSDP2 to divide the weights.",
        )
    if METHOD_FACTS[method].trains_adapters:
        raise _refuse(
            f"--method {method} does not work with tensor parallelism: adapters would see a part of each layer.",
            "use --tp_size 1 with FSDP2, or --method full.",
        )
    sizes = _divided_sizes(text_config, plan)
    in_the_way = [name for name, value in sizes.items() if value % tp_size]
    if in_the_way:
        degrees = [d for d in range(2, _LARGEST_DEGREE + 1) if not any(value % d for value in sizes.values())]
        works = f"use --tp_size {' or '.join(str(d) for d in degrees)}." if degrees else "use --tp_size 1 and FSDP2."
        raise _refuse(f"{' and '.join(in_the_way)} cannot be divided by {tp_size} ranks.", works)


def apply_tensor_parallel(model: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Divide `model` over the ranks of `tp_mesh`, in place.

    Call it on a whole transformers model with the same weights on all ranks of the mesh, before `fully_shard`. All
    parameters become DTensors on `tp_mesh`: those of the plan sharded, the others replicated, so that optimizers see
    only one kind of tensor. Their gradients come out whole and equal on all ranks. Attention layers see the heads of
    their rank. Tied weights stay tied. If the model has dropout, the first rank's random state is copied to all ranks:
    activations between the layers are whole on every rank and must be dropped alike.

    Raises:
        ConfigError: as in `check_tensor_parallel`.
    """
    if tp_mesh.size() == 1:
        return
    config: Any = model.config
    check_tensor_parallel(config, tp_mesh.size(), method="full")
    originals = list(model.parameters())  # kept alive, so that their ids are not reused
    converted: dict[int, Any] = {}
    for module, style in _styles(model, tp_mesh):
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) in converted:
                module._parameters[name] = _same_placement(converted[id(parameter)], style.placement(module, name))
                continue
            style.shard_param(module, name, tp_mesh)
            converted[id(parameter)] = module._parameters[name]
        style.install_forward(module, tp_mesh)
    del originals
    if _has_dropout(model):
        _share_random_state(tp_mesh)


def plain_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Plain shapes of parameters that hold the plain model's numbers in another shape (`FusedHeads`)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module_name, module in model.named_modules():
        for name, shape in getattr(module, "plain_shapes", {}).items():
            shapes[f"{module_name}.{name}"] = shape
    return shapes


def _refuse(problem: str, fix: str) -> ConfigError:
    return ConfigError(problem, place=PLACE, fix=fix)


def _base_plan(config: PreTrainedConfig) -> dict[str, str]:
    """The plan of the model without its head, with ``*`` for layer numbers; empty if there is none."""
    plan = OWN_PLANS.get(config.model_type) or getattr(config, "base_model_tp_plan", None)
    return {**plan, **ADDED_TO_PLANS.get(config.model_type, {})} if plan else {}


def _divided_sizes(config: PreTrainedConfig, plan: dict[str, str]) -> dict[str, int]:
    """The sizes that the ranks divide among themselves, by name; if layers differ, each size separately."""
    divided = [key for key, style in plan.items() if style in ("colwise", "colwise_fused_heads")]
    fields = {"intermediate_size": "intermediate features", "n_inner": "intermediate features"}
    if any(".mlp." not in key for key in divided):
        fields["num_attention_heads"] = "attention heads"
    if any(key.rsplit(".", 1)[-1] in _KEY_PROJECTIONS for key in divided):
        fields["num_key_value_heads"] = "key-value heads"
    sizes: dict[str, int] = {}
    for field, name in fields.items():
        for number in numbers_of_layers(config, field):
            sizes[f"{number} {name}"] = number
    return sizes


def _styles(model: Any, mesh: DeviceMesh) -> list[tuple[nn.Module, Any]]:
    """(module, style) for every module that has its own parameters."""
    from accel_scale.parallel import tensor_styles as styles
    from accel_scale.parallel.tensor_collectives import SharedInput

    plan = _whole_plan(model)
    modules = dict(model.named_modules())
    _check_nothing_left_out(modules, plan, model.config.get_text_config().model_type)
    shared: dict[str, SharedInput] = {}
    found: list[tuple[nn.Module, Any]] = []

    def input_of(name: str) -> SharedInput:
        parent = name.rpartition(".")[0]
        if parent not in shared:
            shared[parent] = SharedInput(mesh.get_group())
            modules[parent].register_forward_hook(shared[parent].forget, always_call=True)
        return shared[parent]

    for name, module in modules.items():
        style = plan.get(_wildcard(name), "replicate")
        if not any(p is not None for p in module._parameters.values()):
            continue
        if style in ("colwise", "colwise_gather_output", "colwise_rep"):
            found.append((module, styles.Colwise(input_of(name), gather_output=style != "colwise")))
        elif style == "colwise_fused_heads":
            found.append((module, styles.FusedHeads(input_of(name))))
            modules[name.rpartition(".")[0]].split_size //= mesh.size()
        elif style.startswith("rowwise"):
            found.append((module, styles.Rowwise(split_input=style != "rowwise")))
        elif style == "embedding_rowwise":
            found.append((module, styles.EmbeddingRowwise()))
        elif style == "replicated_with_grad_allreduce":
            found.append((module, styles.PartialGradients()))
        else:
            found.append((module, styles.TensorStyle()))
    return found


def _whole_plan(model: Any) -> dict[str, str]:
    """The plan under the names that the modules have in `model`."""
    model_type = model.config.get_text_config().model_type
    own, added = OWN_PLANS.get(model_type, {}), ADDED_TO_PLANS.get(model_type, {})
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    plan = {key if key == "lm_head" else prefix + key: style for key, style in {**own, **added}.items()}
    return plan if own else {**model.tp_plan, **plan}


def _check_nothing_left_out(modules: dict[str, Any], plan: dict[str, str], model_type: str) -> None:
    """Refuse parameters between divided layers that the plan does not mention, such as a norm on heads.

    A rank's gradient may be for a part of the activations or for all of them: only the plan could tell.
    """
    divided = ("colwise", "colwise_fused_heads")
    parents = {name.rpartition(".")[0] for name in modules if plan.get(_wildcard(name)) in divided}
    for name, module in modules.items():
        inside = any(name.startswith(f"{parent}.") for parent in parents)
        if inside and _wildcard(name) not in plan and any(p is not None for p in module._parameters.values()):
            raise _refuse(
                f"the tensor-parallel plan of {model_type} models leaves out {name}, between layers that it divides.",
                "use --tp_size 1, and FSDP2 to divide the weights.",
            )


def _wildcard(name: str) -> str:
    """`name` as written in plans, with ``*`` for layer numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _same_placement(parameter: Any, placement: Any) -> Any:
    if parameter.placements != (placement,):
        raise RuntimeError(f"tied weights would be divided in two ways: {parameter.placements} and {placement}")
    return parameter


def _has_dropout(model: Any) -> bool:
    from torch import nn

    config = model.config.get_text_config()
    rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    return any(rates) or bool(getattr(config, "attention_dropout", 0.0))


def _share_random_state(mesh: DeviceMesh) -> None:
    import torch
    import torch.distributed as dist

    states = [torch.get_rng_state()]
    if mesh.device_type == "cuda":
        states.append(torch.cuda.get_rng_state())
    dist.broadcast_object_list(states, group_src=0, group=mesh.get_group())
    torch.set_rng_state(states[0])
    if mesh.device_type == "cuda":
        torch.cuda.set_rng_state(states[1])
