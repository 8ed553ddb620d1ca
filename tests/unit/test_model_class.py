"""Vision-language checkpoints train their language model on text; models that decode no text are refused by name."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BartConfig,
    CLIPConfig,
    T5Config,
    WhisperConfig,
)
from trl import ModelConfig

from accel_scale.errors import ConfigError
from accel_scale.facts.device import CPU, Device
from accel_scale.merging.adapter import merge_adapter
from accel_scale.modeling.adapter_targets import parts_beside_language, train_vision_parts, unquantised_modules
from accel_scale.modeling.adapters import lora_config
from accel_scale.modeling.attention import resolve_attention, score_matrix_note
from accel_scale.modeling.loading import load_config, load_model, skeleton_of
from accel_scale.modeling.model_class import as_image_model, language_model_class, numbers_of_layers
from accel_scale.parallel.sequence_checks import _check_heads
from accel_scale.shrinking.model_source import load_model_config
from accel_scale.shrinking.shrink import write_shrunken_model
from accel_scale.training.checkpoints.settings import model_record
from accel_scale.training.saving.verification import CheckpointMismatch, verify_checkpoint

IDS = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(0))
TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "intermediate_size": 48, "head_dim": 8,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
PARTS = {
    "gemma3": {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 60},
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **VISION},
        "image_token_index": 60,
    },
}


@pytest.fixture(scope="module", params=PARTS)
def base(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(CONFIG_MAPPING[request.param](**PARTS[request.param])).save_pretrained(
        folder
    )
    return folder


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def test_text_trains_the_language_model_alone(base, tmp_path):
    model = load_model(str(base), dtype=torch.float32)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    assert all("vision_tower" in name or "multi_modal_projector" in name for name in frozen)
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == frozen
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    model.save_pretrained(tmp_path / "trained")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "trained")
    torch.testing.assert_close(logits(again), logits(model))


def test_what_was_saved_is_verified_with_its_ties(base, tmp_path):
    model = load_model(str(base), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert verify_checkpoint(model, tmp_path).max_abs_diff == 0
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != embedding}, file)
    with pytest.raises(CheckpointMismatch, match=r"embed_tokens\.weight is missing"):
        verify_checkpoint(model, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_adapters_stay_off_the_vision_tower_and_merge(base, tmp_path):
    model = load_model(str(base), dtype=torch.float32)
    config = lora_config(ModelConfig(lora_r=2), skeleton_of(load_config(str(base))), dropout_is_set=False)
    adapted = get_peft_model(model, config)
    names = [name for name, _ in adapted.named_parameters() if "lora_A" in name]
    assert len(names) == 2 * 7
    assert not any("vision" in name or "projector" in name for name in names)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", check=False)
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=1e-4)
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if "vision" in name)


def test_a_rehearsed_model_has_the_same_parts(base, tmp_path):
    from accel_scale.data.default import default_model_path

    shrunken = write_shrunken_model(str(base), tmp_path / "tiny", fallback_tokenizer=default_model_path())
    assert shrunken.architecture == type(load_model(str(base), dtype=torch.float32)).__name__


@pytest.mark.parametrize("config", [BartConfig(), T5Config(), WhisperConfig()], ids=lambda config: config.model_type)
def test_encoder_decoders_are_refused_before_anything_is_loaded(tmp_path, config):
    config.save_pretrained(tmp_path)
    for load in (load_config, load_model_config):
        with pytest.raises(ConfigError, match=f"is an encoder-decoder .{config.model_type}.") as error:
            load(str(tmp_path))
        assert error.value.place == "--model_name_or_path"


def test_models_of_other_kinds_are_refused(tmp_path):
    CLIPConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="not a causal language model: transformers has none of the type clip"):
        load_config(str(tmp_path))


def test_text_models_keep_their_class():
    assert language_model_class(CONFIG_MAPPING["llama"]()) is AutoModelForCausalLM


def gemma4(**sizes):
    """A Gemma 4: its full-attention layers have wider heads, and its configuration refuses to give a single size."""
    from transformers import Gemma4TextConfig

    layers = ["sliding_attention", "full_attention"] * 2
    wide = {"num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64, "global_head_dim": 128}
    return Gemma4TextConfig(**wide, layer_types=layers, attention_k_eq_v=True, **sizes)


def test_numbers_that_differ_between_layers_are_read_of_each():
    config = gemma4(num_key_value_heads=4, num_global_key_value_heads=2)
    with pytest.raises(RuntimeError, match="per-layer"):
        config.head_dim  # noqa: B018
    assert numbers_of_layers(config, "head_dim") == [64, 128, 64, 128]
    assert numbers_of_layers(config, "num_key_value_heads") == [4, 2, 4, 2]
    assert numbers_of_layers(config, "num_attention_heads") == [8]
    assert numbers_of_layers(config, "no_such_thing") == []
    named = SimpleNamespace(heads=[4, 0, None, 2], width=8, none=0, word="8", per_layer_attributes=None)
    found = [numbers_of_layers(named, name) for name in ("heads", "width", "none", "word")]
    assert found == [[4, 2], [8], [], []]
    assert model_record(config, None)["head_dim"] == [64, 128, 64, 128]


def test_sequence_parallel_ranks_need_whole_heads_of_every_layer():
    layers = gemma4(num_key_value_heads=4, num_global_key_value_heads=3)
    with pytest.raises(ConfigError, match="3 key heads"):
        _check_heads(layers, 2, 1)
    _check_heads(gemma4(num_key_value_heads=4, num_global_key_value_heads=2), 2, 1)


@pytest.mark.slow
def test_every_configuration_whose_layers_differ_can_be_resolved():
    """Covers what the recipes ask of a configuration before loading a model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found = []
    for config_class in dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING):
        with contextlib.suppress(Exception):  # the class has no defaults
            config = config_class()
            if config.get_text_config().is_heterogeneous:
                found.append(config)
    assert {"gemma4", "gemma4_text"} <= {config.model_type for config in found}
    card = Device("cuda", "H100", capability=(9, 0))
    for config in found:
        assert resolve_attention(None, device=CPU, dtype=torch.bfloat16, packing=True, model_config=config)
        score_matrix_note("sdpa", device=card, dtype=torch.bfloat16, model_config=config)
        assert model_record(config, None)["hidden_size"]


def test_models_that_are_trained_on_images_are_loaded_with_the_parts_that_see(base):
    """Some types also have a text-only model, which is trained on plain text."""
    config = load_config(str(base), images=True)
    assert language_model_class(config) is AutoModelForImageTextToText
    plain, with_images = CONFIG_MAPPING["llama4"](), CONFIG_MAPPING["llama4"]()
    as_image_model(with_images, name="m")
    assert language_model_class(plain) is AutoModelForCausalLM
    assert language_model_class(with_images) is AutoModelForImageTextToText
    with pytest.raises(ConfigError, match=r"takes no images: it is a model of text \(llama\)"):
        as_image_model(CONFIG_MAPPING["llama"](), name="m")


def test_the_parts_that_see_are_trained_by_name(base):
    model = load_model(str(base), dtype=torch.float32, images=True)
    parts = parts_beside_language(model)
    assert sorted(parts) == ["model.multi_modal_projector", "model.vision_tower"]
    skipped = unquantised_modules(skeleton_of(load_config(str(base), images=True)))
    assert {"lm_head", *parts} <= set(skipped)
    assert not any("layers" in name for name in skipped)

    def trained():
        return [part for part, weights in parts.items() if all(w.requires_grad for w in weights)]

    assert trained() == []
    train_vision_parts(model, "projector")
    assert trained() == ["model.multi_modal_projector"]
    train_vision_parts(model, "all")
    assert sorted(trained()) == sorted(parts)


def test_a_model_without_a_projector_says_which_parts_it_has():
    text = CONFIG_MAPPING["llama"](**{**TEXT, "head_dim": 8})
    model = AutoModelForCausalLM.from_config(text)
    with pytest.raises(ConfigError, match="llama has no projector among"):
        train_vision_parts(model, "projector")
