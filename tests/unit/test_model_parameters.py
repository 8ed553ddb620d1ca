"""Adapter counts against PEFT, quantised linears against the 4-bit loader, parameter groups against their sum."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from small_models import SMALL, build, each_family
from transformers import BitsAndBytesConfig
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from accel_scale.errors import ConfigError
from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.parameters import lora_params, parameter_groups, quantised_linears
from accel_scale.planning.models.training_setup import LoraSetup, TrainingSetup


@each_family(3)
def test_a_4bit_load_replaces_the_quantised_linears(config: dict[str, Any]) -> None:
    model, facts = build(config), facts_from_config(config, name="small")
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), BitsAndBytesConfig(load_in_4bit=True))
    real = Counter(
        (name.rsplit(".", 1)[-1], module.in_features, module.out_features)
        for name, module in model.named_modules()
        if type(module).__name__ == "Linear4bit"
    )
    ours: Counter = Counter()
    for item, number in quantised_linears(facts):
        ours[(item.name, item.in_features, item.out_features)] += number
    assert ours == real


@each_family(3)
def test_adapters_of_all_linears_are_pefts(config: dict[str, Any]) -> None:
    facts = facts_from_config(config, name="small")
    setup = LoraSetup(rank=3)
    assert lora_params(facts, setup) == peft_trainable(config, setup)


def peft_trainable(config: dict[str, Any], setup: LoraSetup) -> int:
    targets = "all-linear" if setup.targets == ("all-linear",) else list(setup.targets)
    lora = LoraConfig(
        r=setup.rank,
        target_modules=targets,
        use_dora=setup.dora,
        modules_to_save=list(setup.full_modules) or None,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(build(config), lora)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(
    ("model_type", "setup"),
    [
        ("llama", LoraSetup(4, ("q_proj", "v_proj"))),
        ("llama", LoraSetup(4, ("q_proj", "down_proj"), dora=True)),
        ("llama", LoraSetup(4, ("all-linear",), dora=True)),
        ("llama", LoraSetup(4, ("q_proj", "lm_head"))),
        ("llama", LoraSetup(4, ("q_proj", "embed_tokens"))),
        ("llama", LoraSetup(4, ("q_proj", "embed_tokens", "lm_head"), dora=True)),
        ("llama", LoraSetup(4, ("q_proj",), full_modules=("embed_tokens", "lm_head"))),
        ("llama", LoraSetup(4, ("q_proj",), full_modules=("o_proj",))),
        ("gpt2", LoraSetup(4, ("c_attn",))),
        ("gpt2", LoraSetup(4, ("c_proj",), dora=True)),
        ("gpt2", LoraSetup(4, ("c_attn",), full_modules=("wte",))),
        ("opt", LoraSetup(4, ("fc1", "project_in"))),
        ("mixtral", LoraSetup(4, ("q_proj", "w1", "w2", "w3"))),
        ("mixtral", LoraSetup(4, ("gate", "k_proj"))),
        ("qwen2_moe", LoraSetup(4, ("gate_proj", "up_proj", "down_proj", "shared_expert_gate"))),
        ("qwen3_moe", LoraSetup(4, ("v_proj", "gate_proj", "up_proj"))),
        ("qwen3_moe", LoraSetup(4, ("down_proj",))),
        ("deepseek_v3", LoraSetup(4, ("q_b_proj", "gate_proj", "up_proj"))),
        ("deepseek_v3", LoraSetup(4, ("kv_a_proj_with_mqa", "down_proj", "gate"))),
        ("gpt_oss", LoraSetup(4, ("q_proj", "o_proj"))),
    ],
)
def test_adapters_of_named_linears_are_pefts(model_type: str, setup: LoraSetup) -> None:
    config = SMALL[model_type]
    facts = facts_from_config(config, name="small")
    assert parameter_groups(facts, TrainingSetup(method="lora", lora=setup)).trainable == peft_trainable(config, setup)


@pytest.mark.parametrize(
    ("model_type", "setup", "says"),
    [
        ("llama", LoraSetup(4, ("q_prj",)), "did you mean q_proj?"),
        ("mixtral", LoraSetup(4, ("w1",)), "target w3 too"),
        ("mixtral", LoraSetup(4, ("all-linear",), dora=True), "DoRA"),
        ("qwen2_moe", LoraSetup(4, ("gate",)), "has no linear 'gate'"),
    ],
)
def test_what_peft_cannot_adapt_is_refused(model_type: str, setup: LoraSetup, says: str) -> None:
    config = SMALL[model_type]
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        parameter_groups(facts_from_config(config, name="small"), TrainingSetup(method="lora", lora=setup))
    assert "\n" not in str(caught.value)
    with pytest.raises((ValueError, AttributeError)):
        peft_trainable(config, setup)


def test_a_misspelt_module_to_train_whole_is_refused() -> None:
    facts = facts_from_config(SMALL["llama"], name="small")
    lora = LoraSetup(4, ("q_proj",), full_modules=("embed_token",))
    with pytest.raises(ConfigError, match=r"did you mean embed_tokens\?"):
        parameter_groups(facts, TrainingSetup(method="lora", lora=lora))


def test_a_quantised_module_cannot_be_trained_whole() -> None:
    facts = facts_from_config(SMALL["llama"], name="small")
    lora = LoraSetup(4, ("q_proj",), full_modules=("o_proj",))
    with pytest.raises(ConfigError, match="o_proj is quantised"):
        parameter_groups(facts, TrainingSetup(method="qlora", lora=lora))


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("model_type", sorted(SMALL))
def test_groups_add_up(model_type: str, method: str) -> None:
    facts = facts_from_config(SMALL[model_type], name="small")
    groups = parameter_groups(facts, TrainingSetup(method=method))
    assert groups.base == facts.num_params
    assert groups.trainable + groups.frozen == groups.base + groups.lora + groups.full_copies
    assert (groups.quantised > 0) == (method == "qlora")
    assert groups.quantised <= groups.layer_linears + groups.other
    assert groups.largest_layer == max(layer.num_params for layer in facts.layers)
