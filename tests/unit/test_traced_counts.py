"""Trained, frozen and quantised weights of traced models, counted and in the real model that PEFT adapts."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_scale.modeling.adapter_targets import exclusion, freeze_other_parts, untrainable_linears
from accel_scale.modeling.loading import skeleton_of
from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.parameters import parameter_groups
from accel_scale.planning.models.traced import facts_of_any
from accel_scale.planning.models.training_setup import LoraSetup, TrainingSetup
from accel_scale.shrinking.shrink import shrink_model_config

LORA = TrainingSetup(method="lora", precision="fp32", packing=False, lora=LoraSetup(rank=4))
FULL = TrainingSetup(precision="fp32", packing=False, checkpointing="none", micro_batch_size=2, sequence_length=64)
# Shared experts and dense layers beside stacked experts, identity experts, two stacks of layers, projections outside
# the layers, towers beside the language model and within it.
FAMILIES = (
    "ernie4_5_moe", "glm4_moe", "qwen3_next", "longcat_flash", "hrm_text", "gemma3n_text", "qwen3_vl",
    "phi4_multimodal", "qwen3_vl_moe", "jetmoe", "ernie4_5", "blt",
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def small_config(family: str) -> Any:
    from transformers import AutoConfig

    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return shrink_model_config(AutoConfig.for_model(family), vocab_size=512, **special)


def facts_of(config: Any) -> ModelFacts:
    values: Mapping[str, object] = json.loads(json.dumps(config.to_dict(), default=str))
    return facts_of_any(values, name=config.model_type)


def trained(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_counted_as_peft_makes_them(family: str) -> None:
    import peft

    config = small_config(family)
    model = skeleton_of(config)
    adapters = peft.LoraConfig(
        r=LORA.lora.rank,
        target_modules="all-linear",
        exclude_modules=exclusion(untrainable_linears(model)),
        task_type="CAUSAL_LM",
    )
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(copy.deepcopy(model), adapters)
    groups = parameter_groups(facts_of(config), LORA)
    assert groups.lora == trained(adapted)
    assert groups.frozen == model.num_parameters()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["qwen3_vl", "phi4_multimodal", "ernie4_5", "blt"])
def test_full_fine_tuning_on_text_plans_no_states_for_towers(family: str) -> None:
    config = small_config(family)
    model = skeleton_of(config)
    whole = model.num_parameters()
    freeze_other_parts(model)
    facts = facts_of(config)
    groups = parameter_groups(facts, FULL)
    assert groups.trainable == trained(model)
    assert groups.frozen == whole - trained(model)
    assert (groups.frozen == 0) == (family == "ernie4_5")
    states = predict_memory(facts, replace(FULL, optimizer="adamw_torch"), is_cuda=False).states
    assert states.optimizer_bytes == pytest.approx(8 * trained(model), rel=1e-6)
    assert states.gradient_bytes == pytest.approx(4 * trained(model), rel=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_a_tower_takes_four_bits_but_no_arithmetic_of_a_text() -> None:
    """A 4-bit load replaces the linears of towers too, of which it has many of the same size."""
    config = small_config("qwen3_vl")
    model, facts = skeleton_of(config), facts_of(config)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    quantised = sum(linear.weight.numel() for name, linear in linears.items() if name != "lm_head")
    assert parameter_groups(facts, replace(LORA, method="qlora", precision="bf16")).quantised == quantised
    language = sum(linear.weight.numel() for name, linear in linears.items() if ".visual." not in name)
    assert facts.num_active_params == pytest.approx(language, rel=0.02)
    assert facts.num_heads == config.text_config.num_attention_heads


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["big_bird", "jetmoe"])
def test_steps_whose_code_asks_for_values_are_traced(family: str) -> None:
    """BigBird's head multiplies by a mask, JetMoE splits its tokens by the experts that were chosen."""
    config = small_config(family)
    config.is_decoder = True
    assert predict_memory(facts_of(config), FULL, is_cuda=False).step.saved_bytes > 0


@pytest.mark.filterwarnings("ignore")
def test_weights_that_layers_share_are_quantised_once() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("zamba2")
    facts = facts_of(config)
    groups = parameter_groups(facts, replace(LORA, method="qlora", precision="bf16"))
    assert groups.frozen == skeleton_of(config).num_parameters()
    assert 0.8 * groups.frozen < groups.quantised < groups.frozen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["glm4_moe", "ernie4_5"])
def test_adapters_of_stacked_experts_are_planned_without_dropout(family: str) -> None:
    """As in the recipes, whose default dropout PEFT refuses there; elsewhere adapters keep copies of inputs."""
    facts = facts_of(small_config(family))
    setup = replace(LORA, checkpointing="none", micro_batch_size=2, sequence_length=64)
    without, with_dropout = (
        predict_memory(facts, replace(setup, lora=LoraSetup(rank=4, dropout=share)), is_cuda=False).step.saved_bytes
        for share in (0.0, 0.05)
    )
    assert (with_dropout == without) == (family == "glm4_moe")
    assert with_dropout >= without
