"""Models that are not modelled by hand: planned from a fake step of their real class."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from accel_scale.errors import ConfigError
from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.traced import facts_of_any, read_trace
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.tape import activations
from accel_scale.planning.traced.steps import step_bytes

SMALL = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 5, "vocab_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def small_config(model_type: str, **fields):
    from transformers import AutoConfig

    return json.loads(json.dumps(AutoConfig.for_model(model_type, **{**SMALL, **fields}).to_dict(), default=str))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3", "mixtral"])
def test_a_traced_model_has_the_bytes_of_the_tape(model_type):
    """Both count what transformers' class allocates, one from its source and one from its operations."""
    from accel_scale.tracing.service import facts_of

    config = small_config(model_type, **({"num_local_experts": 4} if model_type == "mixtral" else {}))
    modelled, traced = facts_from_config(config, name="modelled"), facts_of(config, name="traced", place="here")
    assert traced.num_params == modelled.num_params
    assert traced.num_active_params == pytest.approx(modelled.num_active_params, rel=0.01)
    for method, policy, is_cuda in (("full", "none", False), ("qlora", "full", True)):
        setup = TrainingSetup(
            method=method, checkpointing=policy, micro_batch_size=2, sequence_length=256, packing=False
        )  # fmt: skip
        expected = activations.step_bytes(modelled, setup, is_cuda=is_cuda)
        found = step_bytes(traced, setup, is_cuda=is_cuda)
        for name in ("peak_bytes", "saved_bytes", "gradient_bytes", "loss_bytes"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=0.02), (method, policy, name)


def test_an_unknown_model_is_planned_and_the_second_plan_needs_no_torch(tmp_path):
    """The first plan traces the class; a repeat of the same plan reads a file."""
    from accel_scale import plan

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small_config("ernie4_5")), encoding="utf-8")
    wish = {"gpu": "24GiB", "method": "full", "max_length": 256, "global_batch_size": 2, "strategy": ["one GPU"]}
    wish |= {"optim": "adamw_torch_fused", "checkpointing_policy": "none"}
    first = plan(str(folder), **wish).best
    assert first is not None
    script = (
        "import json, sys; from accel_scale import plan; "
        f"best = plan({str(folder)!r}, **json.loads({json.dumps(json.dumps(wish))})).best; "
        "print(best.memory.peak_bytes); assert 'torch' not in sys.modules"
    )
    again = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(again.stdout) == first.memory.peak_bytes


def test_a_config_with_infinity_as_transformers_saves_it_is_read(tmp_path):
    """`save_pretrained` writes {"__float__": "Infinity"}, which JSON has no number for."""
    from transformers import AutoConfig

    from accel_scale.planning.models.catalogue import load_model_facts

    config = AutoConfig.for_model("mamba2", **SMALL, num_heads=8, state_size=16)
    config.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    facts = load_model_facts(str(tmp_path))
    assert json.loads(facts.traced_config)["time_step_limit"] == [0.0, float("inf")]
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(config)
    assert facts.num_params == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
def test_a_model_of_text_and_images_without_a_text_class_is_planned_whole():
    """recipes/sft.py trains it on text with its vision tower in memory."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from accel_scale.shrinking.shrink import shrink_model_config
    from accel_scale.tracing.service import facts_of

    config = shrink_model_config(AutoConfig.for_model("qwen3_vl"), vocab_size=512)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    facts = facts_of(json.loads(json.dumps(config.to_dict(), default=str)), name="small", place="here")
    assert facts.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert facts.num_layers == config.text_config.num_hidden_layers
    assert facts.outside_params >= sum(parameter.numel() for parameter in model.model.visual.parameters())


def test_a_model_that_scores_rows_is_traced_as_its_language_model():
    from accel_scale.tracing.service import facts_of

    config = small_config("ernie4_5")
    plain, scoring = (
        facts_of(config | {"architectures": [name]}, name="small", place="here")
        for name in ("Ernie4_5ForCausalLM", "Ernie4_5ForSequenceClassification")
    )
    assert scoring.has_head
    assert scoring.num_params == plain.num_params


def test_heads_that_differ_between_layers_are_those_of_most_layers():
    from accel_scale.tracing.facts import read_facts

    kinds = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
    heads = {"head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    config = small_config("gemma4_text", **kinds, **heads, vocab_size_per_layer_input=512)
    facts = read_facts(config, name="gemma4", place="here")
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (4, 2, 32)


def test_a_config_that_builds_nothing_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="'no_such_model' is not modelled and cannot be built") as caught:
        facts_of_any({"model_type": "no_such_model"}, name="it")
    assert "\n" not in str(caught.value)


def test_a_cache_that_is_no_json_is_made_again(tmp_path):
    config = small_config("ernie4_5")
    facts = facts_of_any(config, name="it")
    (path,) = (tmp_path / "cache" / "accel-scale" / "traces").iterdir()
    path.write_text("{", encoding="utf-8")
    assert read_trace(facts.traced_config) == {}
    assert facts_of_any(config, name="it") == facts
