"""Plans for pairs: two rows per example, and reward models with one score instead of logits over the vocabulary."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from activation_memory import peak_tensor_bytes
from transformers import AutoConfig, AutoModelForSequenceClassification, LlamaConfig, PreTrainedConfig

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.facts.device import Device
from accel_scale.flags.parsing import parse_flags
from accel_scale.launching.environment import LaunchEnvironment
from accel_scale.launching.strategy import LaunchStrategy
from accel_scale.modeling.model_class import as_reward_model
from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.models.catalogue import catalogue_config
from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.parameters import parameter_groups
from accel_scale.planning.models.training_setup import LoraSetup, TrainingSetup
from accel_scale.recipe_specs.spec import RecipeSpec
from accel_scale.recipe_specs.trl import DPO, KTO, REWARD
from accel_scale.settings.planned_choice import resolve_planned
from accel_scale.settings.resolved import LaunchFacts, Resolved

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512, "pad_token_id": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2},
    "qwen2": {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "gemma2": {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "pad_token_id": 0},
    "gpt_neox": {**SMALL, "intermediate_size": 128},
}


def scorer(config: PreTrainedConfig, device: str = "meta") -> Any:
    as_reward_model(config, name="small")
    with torch.device(device):
        return AutoModelForSequenceClassification.from_config(config)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_parameters_of_a_reward_model_are_those_of_its_class(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, **CONFIGS[model_type])
    facts = facts_from_config(config.to_dict(), name="small").as_reward_model()
    assert facts.num_params == scorer(config).num_parameters()
    lora = TrainingSetup(method="lora", lora=LoraSetup(8, full_modules=("score",)))
    assert parameter_groups(facts, lora).full_copies == 64


def test_memory_of_a_step_is_that_of_a_real_one() -> None:
    config = LlamaConfig(**{**CONFIGS["llama"], "vocab_size": 8192})
    facts = facts_from_config(config.to_dict(), name="small")
    model = scorer(config, "cpu")
    ids = torch.randint(1, 8192, (8, 128))

    def step() -> None:
        better, worse = model(input_ids=ids, use_cache=False).logits.squeeze(-1).chunk(2)
        (-torch.nn.functional.logsigmoid(better - worse).mean()).backward()

    setup = TrainingSetup(
        precision="fp32", checkpointing="none", micro_batch_size=8, sequence_length=128, packing=False
    )
    found = predict_memory(facts.as_reward_model(), setup, is_cuda=False, is_tracked=True).step.peak_bytes
    assert found == pytest.approx(peak_tensor_bytes(step), rel=0.03)
    with_logits = predict_memory(facts, dataclasses.replace(setup, loss="full"), is_cuda=False).step.peak_bytes
    assert with_logits > found + 8 * 128 * 8192 * 4, "that many logits more"


def resolved(recipe: RecipeSpec, model: str, flags: str) -> Resolved:
    words = ["--model_name_or_path", model, "--dataset_name", "pairs", "--plan", "auto", *flags.split()]
    launch = LaunchEnvironment(LaunchStrategy("single"), None, 1, 1, 0, 0)
    facts = LaunchFacts(world_size=1, strategy=launch.strategy, device=Device(fast_bf16=False))
    parsed = parse_flags(recipe.flags, words, program=recipe.program)
    recipe.refuse(parsed)
    return resolve_planned(parsed, facts, launch, recipe=recipe.plan)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Llama 3.1 8B's configuration without weights."""
    folder: Path = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(catalogue_config("meta-llama/Llama-3.1-8B")))
    return str(folder)


@pytest.mark.parametrize("recipe", [DPO, REWARD], ids=lambda recipe: recipe.program)
def test_auto_counts_two_rows_for_each_pair(recipe: RecipeSpec, large: str) -> None:
    values = resolved(recipe, large, "--plan_gpu 48GiB --global_batch_size 16 --max_length 1024").values
    assert values["per_device_train_batch_size"] * values["gradient_accumulation_steps"] == 16
    assert values["method"] == "lora"


def test_auto_leaves_two_labelled_rows_in_a_micro_batch_for_the_kl_term(large: str) -> None:
    flags = "--global_batch_size 4 --max_length 4096 --method lora --precision bf16_true"
    values = resolved(KTO, large, f"{flags} --plan_gpu 22GiB --loss_type apo_zero_unpaired").values
    assert (values["per_device_train_batch_size"], values["gradient_accumulation_steps"]) == (1, 4)
    values = resolved(KTO, large, f"{flags} --plan_gpu 24GiB").values
    assert (values["per_device_train_batch_size"], values["gradient_accumulation_steps"]) == (2, 2)
    with pytest.raises(ConfigError, match="micro-batch 2"):
        resolved(KTO, large, f"{flags} --plan_gpu 22GiB")


def test_auto_trains_all_weights_where_no_second_model_is_kept(large: str) -> None:
    flags = "--plan_gpu B200 --global_batch_size 16 --max_length 512 --precision bf16_true"
    methods = {recipe.program: resolved(recipe, large, flags).method for recipe in (DPO, REWARD)}
    assert methods["reward.py"] == "full"
    small = resolved(REWARD, default_model_path(), "--plan_gpu 24GiB")
    assert (small.method, small.values["per_device_train_batch_size"]) == ("full", 8)
