"""BLT, whose largest stack of layers runs on patches of bytes: what is trained, planned and rehearsed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, BltConfig

from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.modeling.adapter_targets import exclusion, freeze_other_parts, untrainable_linears
from accel_scale.modeling.loading import skeleton_of
from accel_scale.planning.cost.flops import attention_flops, linear_flops
from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.traced import facts_of_any
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.rehearsing.reload import compare_final_folders
from accel_scale.shrinking.shrink import shrink_model_config

SETUP = TrainingSetup(precision="fp32", packing=False, checkpointing="none", micro_batch_size=2, sequence_length=256)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def small(**changes: Any) -> Any:
    tiny = shrink_model_config(BltConfig(**changes), vocab_size=128, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    tiny.use_cache = False
    return tiny


def facts_of(config: Any) -> ModelFacts:
    return facts_of_any(json.loads(json.dumps(config.to_dict(), default=str)), name="blt")


@pytest.mark.parametrize("width", [2048, 4096])
def test_the_smaller_model_projects_patches_if_the_real_one_does(width: int) -> None:
    config = BltConfig(global_config={"hidden_size": width})
    tiny = shrink_model_config(config, vocab_size=128)
    pair = [skeleton_of(given).model.global_transformer.token_embedding_projection for given in (config, tiny)]
    assert type(pair[0]) is type(pair[1]) is (torch.nn.Identity if width == 2048 else torch.nn.Linear)


def test_all_but_the_patcher_is_trained() -> None:
    model = skeleton_of(small())
    freeze_other_parts(model)
    frozen = {name.split(".")[1] for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"patcher"}
    bare = untrainable_linears(skeleton_of(small()))
    assert bare
    assert all(name.startswith("model.patcher.") for name in bare)


def test_adapters_learn_with_checkpointing() -> None:
    """transformers makes the embeddings require gradients, to which the model then adds in place."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(small())
    adapters = peft.LoraConfig(
        r=4, target_modules="all-linear", exclude_modules=exclusion(untrainable_linears(base)), init_lora_weights=False
    )
    model = peft.get_peft_model(base, adapters).train()
    ids = torch.randint(3, 128, (2, 32))

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}

    expected = gradients()
    apply_checkpointing(model, CheckpointingPolicy.parse("full"))
    found = gradients()
    assert found.keys() == expected.keys()
    assert len(found) == sum(value.requires_grad for value in model.parameters())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6)


def test_layers_of_patches_cost_a_share_of_those_of_bytes() -> None:
    by_byte, by_patch = (facts_of(small(patch_size=size)) for size in (1, 4))
    assert [layer.position_share for layer in by_patch.layers] == [0.25]
    (layers, outside), (quarter, same) = linear_flops(by_byte), linear_flops(by_patch)
    assert (layers, outside) == (4 * quarter, same)
    # A patch sees the patches before it: a quarter of the positions, of a quarter of the context.
    full = [attention_flops(facts, 256, scores="full") for facts in (by_byte, by_patch)]
    assert full[0] == 16 * full[1]


@pytest.mark.parametrize(("given", "longest"), [(4, None), (8, 4)])
def test_patches_of_the_size_in_the_config_are_planned(given: int, longest: int | None) -> None:
    """Measured peaks are in the table of plans; between 1 byte and 4 it is the stack of patches that shrinks."""
    tiny = small(patch_size=given, max_patch_length=longest)
    saved, most = (
        predict_memory(facts_of(config), SETUP, is_cuda=False).step.saved_bytes
        for config in (tiny, small(patch_size=1))
    )
    whole = predict_memory(facts_of(small(patch_size=4)), SETUP, is_cuda=False).step.saved_bytes
    assert saved == whole
    assert 0.4 < saved / most < 0.7


def test_a_class_that_makes_no_cache_is_reloaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small())
    model.config.use_cache = True  # as published
    model.save_pretrained(tmp_path / "start")
    with torch.no_grad():
        model.lm_head.weight += 0.1
    model.save_pretrained(tmp_path / "end")
    end = tmp_path / "end"
    said = compare_final_folders(start=tmp_path / "start", uninterrupted=end, resumed=end)
    assert said.endswith("1 trained; logits equal after both runs")
