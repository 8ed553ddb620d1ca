"""Model facts against the real transformers classes on the meta device, compared group by group."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from small_models import DENSE, IN_TRANSFORMERS, build, each_family
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from accel_scale.errors import ConfigError
from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.model_facts import LayerFacts, LinearFacts

POSITION_MODULES = ("wpe", "embed_positions", "position_embeddings", "token_type_embeddings")
FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, Conv1D))


def shape(name: str, module: nn.Module) -> tuple[Any, ...]:
    rows, columns = module.weight.shape if isinstance(module, Conv1D) else module.weight.shape[::-1]
    return (name.rsplit(".", 1)[-1], rows, columns, module.bias is not None, 1)


def linears_of(layer: nn.Module) -> Counter:
    """Name, in, out, bias and number of copies of every matrix product: linears, routers and stacked experts."""
    found: Counter = Counter(shape(name, module) for name, module in layer.named_modules() if is_linear(module))
    parameters = dict(layer.named_parameters())
    for name, weight in parameters.items():
        if weight.ndim == 3:
            # gpt-oss stores its experts transposed.
            outputs, inputs = weight.shape[1:] if f"{name}_bias" not in parameters else weight.shape[:0:-1]
            found[(name.rsplit(".", 1)[-1], inputs, outputs, f"{name}_bias" in parameters, weight.shape[0])] += 1
        elif name.endswith(("mlp.gate.weight", "mlp.router.weight")):
            router = name.removesuffix(".weight")
            found[(router.rsplit(".", 1)[-1], *weight.shape[::-1], f"{router}.bias" in parameters, 1)] += 1
    return found


def stated(linears: tuple[LinearFacts, ...]) -> Counter:
    return Counter((item.name, item.in_features, item.out_features, item.bias, item.copies) for item in linears)


def layer_list(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def signature(linears: Counter, norms: int) -> tuple[Any, ...]:
    return (tuple(sorted(linears.items())), norms)


def real_layer(layer: nn.Module) -> tuple[Any, ...]:
    linears = linears_of(layer)
    weights = sum(n * copies * (rows * cols + cols * bias) for (_, rows, cols, bias, copies), n in linears.items())
    return signature(linears, count(layer) - weights)


def stated_layer(layer: LayerFacts) -> tuple[Any, ...]:
    return signature(stated(layer.linears), layer.norm_params + layer.other_params)


def real_windows(config: Any, num_layers: int) -> Counter:
    window = getattr(config, "sliding_window", None) or None
    types = getattr(config, "layer_types", None)
    if types is None:
        return Counter({window: num_layers})
    return Counter(window if kind == "sliding_attention" else None for kind in types)


@each_family(6)
def test_every_group_is_that_of_the_real_class(config: dict[str, Any]) -> None:
    model, facts = build(config), facts_from_config(config, name="small")
    layers = layer_list(model)
    assert facts.num_params == model.num_parameters()
    assert facts.embedding_params == model.get_input_embeddings().weight.numel()
    assert facts.num_layers == len(layers)
    assert Counter(map(stated_layer, facts.each_layer())) == Counter(map(real_layer, layers))
    assert Counter(layer.sliding_window for layer in facts.each_layer()) == real_windows(model.config, len(layers))
    outside = [(name.rsplit(".", 1)[-1], module) for name, module in model.named_modules() if ".0" not in name]
    assert facts.position_params == sum(count(module) for name, module in outside if name in POSITION_MODULES)
    norms = sum(count(module) for name, module in outside if name in FINAL_NORMS and not is_in(module, layers))
    assert facts.final_norm_params == norms
    head = model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    assert facts.tied_embeddings == tied
    assert facts.head_params == count(head) - (head.weight.numel() if tied else 0)


def is_in(module: nn.Module, layers: nn.ModuleList) -> bool:
    return any(module is inner for inner in layers.modules())


@pytest.mark.parametrize("model_type", IN_TRANSFORMERS)
def test_missing_fields_take_the_defaults_of_the_class(model_type: str) -> None:
    # DeepSeek V2's class has no default for the experts per token.
    given = {"num_experts_per_tok": 6} if model_type == "deepseek_v2" else {}
    whole = CONFIG_MAPPING[model_type](**given).to_dict()
    assert facts_from_config({"model_type": model_type, **given}, name="m") == facts_from_config(whole, name="m")


def test_gemma3_with_pictures_is_its_language_model() -> None:
    text = {**DENSE, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
    nested = facts_from_config({"model_type": "gemma3", "text_config": text, "vision_config": {}}, name="m")
    assert nested == facts_from_config({**text, "model_type": "gemma3_text"}, name="m")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "mamba"}, "the architecture 'mamba' is not modelled"),
        ({"model_type": "deepseek_v2"}, "num_experts_per_tok is None"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 8}, "the number of attention heads 128"),
        ({"model_type": "lama"}, "did you mean llama?"),
        ({"hidden_size": 4}, "no model_type"),
        ({"model_type": "llama", "hidden_size": -1}, "hidden_size is -1"),
        ({"model_type": "llama", "hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"model_type": "llama", "num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"model_type": "llama", "num_attention_heads": 33}, "a divisor of hidden_size 4096"),
        ({"model_type": "llama", "num_key_value_heads": 3}, "a divisor of num_attention_heads 32"),
        ({"model_type": "llama", "attention_dropout": 2}, "a number from 0 to 1"),
        ({"model_type": "llama", "tie_word_embeddings": "no"}, "true or false"),
        ({"model_type": "llama", "hidden_act": 3}, "a string"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention"]},
            "each of the 32 layers",
        ),
        ({"model_type": "phi", "partial_rotary_factor": 3}, "a number over 0"),
        ([], "not a JSON object"),
    ],
)
def test_a_bad_config_gets_one_clear_line(config: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        facts_from_config(config, name="m", place="runs/config.json")
    assert str(caught.value).startswith("runs/config.json: ")
    assert "Fix: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_architecture_like_llama_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new type in `STYLES` is read, counted, walked and divided, with its class's defaults and no other change."""
    from accel_scale.planning.cost.memory import predict_memory
    from accel_scale.planning.models.config_defaults import sizes
    from accel_scale.planning.models.styles import STYLES, ModelStyle
    from accel_scale.planning.models.training_setup import TrainingSetup
    from accel_scale.planning.search.model_parallel import divides_tensors

    entry = ModelStyle(mlp_bias="mlp_bias", defaults=sizes(32000, 4096, 32, 32, 11008, 2048))
    monkeypatch.setitem(STYLES, "alpaca2", entry)
    new, llama = (
        facts_from_config({"model_type": name, "num_hidden_layers": 2}, name="a") for name in ("alpaca2", "llama")
    )
    assert new.num_params == llama.num_params
    memory = [predict_memory(facts, TrainingSetup(checkpointing="none")).high_bytes for facts in (new, llama)]
    assert memory[0] == memory[1]
    assert divides_tensors("alpaca2")
    monkeypatch.setitem(STYLES, "alpaca3", replace(entry, layers="gemma2", tensor_parallel=False))
    assert not divides_tensors("alpaca3")


def test_smollm_3_leaves_every_fourth_layer_without_rotation() -> None:
    from accel_scale.planning.models.attention_windows import has_rope

    assert [has_rope(layer, {}) for layer in range(8)] == [True, True, True, False] * 2
    assert [has_rope(layer, {"no_rope_layer_interval": 2}) for layer in range(4)] == [True, False] * 2
    assert [has_rope(layer, {"no_rope_layers": [0, 1, 1]}) for layer in range(3)] == [False, True, True]


# ── Windows by the fields of a configuration ─────────────────────────────────────────────────────────────────────────


def fields(defaults: dict[str, Any] | None = None, **values: Any):
    from accel_scale.planning.models.config_fields import ConfigFields

    return ConfigFields({"num_hidden_layers": 6, **values}, defaults or {}, "config.json")


def test_windows_of_all_layers_of_none_and_of_those_that_slide() -> None:
    from accel_scale.planning.models import attention_windows as windows

    assert windows.all_windows(fields(sliding_window=8)) == (8,) * 6
    assert windows.all_windows(fields()) == windows.no_windows(fields(sliding_window=8)) == (None,) * 6
    on = {"use_sliding_window": False}
    assert windows.switched_windows(fields(on, sliding_window=8)) == (None,) * 6
    assert windows.switched_windows(fields(on, sliding_window=8, use_sliding_window=True)) == (8,) * 6
    every_third = windows.typed_windows(windows.pattern(3))
    assert every_third(fields(sliding_window=8)) == (8, 8, None, 8, 8, None)
    assert every_third(fields(sliding_window=8, sliding_window_pattern=2)) == (8, None) * 3
    types = ["full_attention", "sliding_attention"] * 3
    assert every_third(fields(sliding_window=8, layer_types=types)) == (None, 8) * 3
    for switched_off in (fields(), fields(sliding_window=0), fields(on, sliding_window=8)):
        assert every_third(switched_off) == (None,) * 6
    for bad in (["full_attention"] * 5, "sliding_attention"):
        with pytest.raises(ConfigError, match="one entry for each of the 6 layers"):
            every_third(fields(layer_types=bad))
    late = windows.typed_windows(windows.late_layers)
    assert late(fields(sliding_window=8, max_window_layers=4)) == (None,) * 4 + (8,) * 2
    assert [windows.has_rope(i, fields()) for i in range(4)] == [True, True, True, False]
    assert [windows.has_rope(i, fields(no_rope_layer_interval=2)) for i in range(2)] == [True, False]
    assert [windows.has_rope(i, fields(no_rope_layers=[0, 1])) for i in range(2)] == [False, True]
