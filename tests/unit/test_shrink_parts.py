"""Shrinking checked by hand: which layers of each kind stay, how wide the rest becomes, and a twin's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_shrink import REAL
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, LlamaConfig, PreTrainedConfig

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.shrinking import rotation, shrink, widths
from accel_scale.shrinking.layers import _is_dense, chosen_layers, first_of, num_layers, set_all, shrink_layers
from accel_scale.start_check import twin

S, F = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("old", "chosen", "changes"),
    [
        ({"num_hidden_layers": 8}, [0, 1], {"num_hidden_layers": 2}),
        ({"n_layer": 1}, [0], {"n_layer": 1}),
        ({"num_layers": 5, "num_hidden_layers": 5}, [0, 1], {"num_layers": 2, "num_hidden_layers": 2}),
        # Kinds by name: the first of each, in order, and every list with one entry per layer follows.
        ({"num_hidden_layers": 4, "layer_types": [S, S, F, S]}, [0, 2], {"layer_types": [S, F]}),
        ({"layer_types": [S, F, F]}, [0, 1], {"layer_types": [S, F]}),
        ({"num_hidden_layers": 4, "widths": [1, 1, 2, 3]}, [0, 2, 3], {"widths": [1, 2, 3]}),
        ({"num_hidden_layers": 4, "names": [5, 5, 5]}, [0, 1], {"names": [5, 5, 5]}),  # not one entry per layer
        # Blocks that share weights come in pairs.
        ({"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"]}, [0, 1, 3],
         {"layers_block_type": ["mamba", "hybrid", "hybrid"]}),
        # Qwen's experts: every second layer except the listed ones; DeepSeek's: after the first few.
        ({"num_hidden_layers": 6, "decoder_sparse_step": 2}, [0, 1],
         {"decoder_sparse_step": 1, "mlp_only_layers": [0]}),
        ({"num_hidden_layers": 6, "decoder_sparse_step": 1, "mlp_only_layers": [3]}, [0, 3],
         {"decoder_sparse_step": 1, "mlp_only_layers": [1]}),
        ({"num_hidden_layers": 8, "first_k_dense_replace": 3}, [0, 3], {"first_k_dense_replace": 1}),
        ({"num_hidden_layers": 8, "first_k_dense_replace": 0}, [0, 1], {"first_k_dense_replace": 0}),
        ({"num_hidden_layers": 8, "num_dense_layers": 2}, [0, 2], {"num_dense_layers": 1}),
        # Periods as in Jamba and others, and lists of layers as in Falcon.
        ({"num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 2}, [0, 2],
         {"attn_layer_period": 2, "attn_layer_offset": 1}),
        ({"num_hidden_layers": 8, "expert_layer_period": 2, "expert_layer_offset": 0}, [0, 1],
         {"expert_layer_period": 2, "expert_layer_offset": 0}),
        ({"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 2, "layer_types": [S, F, F]}, [0, 1],
         {"attn_layer_period": 3, "attn_layer_offset": 2}),
        ({"num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": None}, [0, 1],
         {"attn_layer_period": 4}),
        ({"num_hidden_layers": 4, "attn_layer_period": 8, "attn_layer_offset": 6}, [0, 1],  # no attention layer is due
         {"attn_layer_period": 8, "attn_layer_offset": 6}),
        ({"num_hidden_layers": 6, "moe_layers": [2, 4]}, [0, 2], {"moe_layers": [1]}),
        ({"num_hidden_layers": 6, "num_kv_shared_layers": 2}, [0, 4], {"num_kv_shared_layers": 1}),
        ({"num_hidden_layers": 6, "max_window_layers": 1}, [0, 1], {"max_window_layers": 1}),
        ({"num_hidden_layers": 6, "max_window_layers": 6}, [0, 1], {"max_window_layers": 2}),
        ({"num_hidden_layers": 4, "per_layer_config": {"0": {"a": 1}, "2": {"a": 2}}}, [0, 1, 2],
         {"per_layer_config": {"0": {"a": 1}, "2": {"a": 2}}}),
        ({"num_hidden_layers": 5, "per_layer_config": {"3": {"a": 1}}}, [0, 3], {"per_layer_config": {"1": {"a": 1}}}),
        ({"num_layers": 4, "attention_types": [[["g", "l"], 2]], "attention_layers": ["g", "l", "g", "l"]}, [0, 1],
         {"attention_types": [[["g"], 1], [["l"], 1]], "attention_layers": ["g", "l"]}),
    ],
)  # fmt: skip
def test_the_layers_that_stay(old: dict[str, Any], chosen: list[int], changes: dict[str, Any]) -> None:
    assert chosen_layers(old) == chosen
    new = dict(old)
    shrink_layers(old, new, 2)
    assert {name: new[name] for name in changes} == changes
    assert set(new) - set(old) <= {"mlp_only_layers"}


def test_at_least_as_many_as_were_asked_for() -> None:
    types = {"num_hidden_layers": 5, "layer_types": [S, S, S, F, F]}
    assert [chosen_layers(types, least) for least in (1, 2, 3, 4, 9)] == [
        [0, 3], [0, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4],
    ]  # fmt: skip
    assert num_layers({"num_blocks": 7}) == 7
    with pytest.raises(ConfigError, match="has none of num_hidden_layers"):
        num_layers({"model_type": "x"})
    assert first_of({"b": 2, "a": None}, ("a", "b")) == 2
    assert first_of({}, ("a",), default=0) == 0
    values = {"a": 1, "b": None}
    set_all(values, ("a", "b", "c"), 9)
    assert values == {"a": 9, "b": None}


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        # Groups of at most eight heads, 16 wide; the hidden size equals their width or is two heads apart from it.
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128, "intermediate_size": 448}),
        ("qwen2", {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 224,
                   "intermediate_size": 1216}),
        ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 96, "head_dim": 16,
                   "intermediate_size": 288}),
        ("gemma3_text", {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 96, "head_dim": 16,
                         "sliding_window": 32}),
        ("gpt2", {"n_head": 4, "n_embd": 64, "n_layer": 2, "n_inner": None}),
        ("deepseek_v3", {"num_attention_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 32,
                         "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4,
                         "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)  # fmt: skip
def test_sizes_of_a_shrunken_configuration(family: str, expected: dict[str, Any]) -> None:
    tiny = shrink.shrink_config(REAL[family])
    assert {name: getattr(tiny, name) for name in expected} == expected
    assert tiny.vocab_size == REAL[family].vocab_size


def test_widths_are_whole_heads_and_tables_of_frequencies_are_cut() -> None:
    assert [widths._scaled(width, 0.1) for width in (1, 160, 230, 250)] == [16, 16, 16, 32]
    rope = {
        "type": "longrope",
        "short": [1.0] * 48,
        "deep": {"long": [2] * 48, "names": ["a"]},
        "one": [3.0],
        "no": [],
    }
    cut = rotation.shrink_rope(rope, {"head_dim": 96}, 64)
    assert (len(cut["short"]), len(cut["deep"]["long"]), cut["one"]) == (8, 8, [3.0])
    assert (cut["type"], cut["deep"]["names"], cut["no"]) == ("longrope", ["a"], [])
    assert len(rotation.shrink_rope({"f": [1.0] * 48}, {}, 64)["f"]) == 12
    assert rotation.shrink_rope(None, {}, 64) is None


def test_state_spaces_keep_their_ratio_to_the_hidden_size() -> None:
    new = {"mamba_expand": 2, "mamba_n_heads": 64, "mamba_d_head": 64, "hidden_size": 128, "mamba_d_ssm": 4096}
    widths.shrink_states(new)
    assert (new["mamba_n_heads"], new["mamba_d_head"], new["mamba_d_ssm"]) == (16, 16, 256)
    other = {"expand": 1, "num_heads": 8, "head_dim": 64, "hidden_size": 64}
    widths.shrink_states(other)
    assert other == {"expand": 1, "num_heads": 4, "head_dim": 16, "hidden_size": 64}
    plain = {"num_heads": 8, "head_dim": 64, "hidden_size": 64}
    widths.shrink_states(plain)
    assert plain == {"num_heads": 8, "head_dim": 64, "hidden_size": 64}


def test_special_tokens_and_a_vocabulary_of_whole_blocks() -> None:
    tiny = shrink.shrink_config(REAL["llama"], vocab_size=320, eos_token_id=5, min_layers=4)
    assert (tiny.vocab_size, tiny.eos_token_id, tiny.num_hidden_layers) == (320, 5, 4)
    assert shrink.shrink_config(REAL["llama"], vocab_size=321).vocab_size == 384
    assert REAL["llama"].num_hidden_layers == 32, "the real one stays"


def test_a_model_with_a_tokenizer_of_its_own_keeps_it(tmp_path: Path) -> None:
    made = shrink.write_shrunken_model(
        default_model_path(), tmp_path / "tiny", fallback_tokenizer="nobody/nothing", min_layers=3
    )
    assert made.own_tokenizer
    assert made.has_chat_template
    assert made.num_layers[1] == min(3, made.num_layers[0])
    assert made.folder == tmp_path / "tiny"


def test_a_model_that_stays_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink, "MAX_BODY_PARAMETERS", 1000)
    with pytest.raises(ConfigError, match="parameters after shrinking") as refused:
        shrink.write_shrunken_model(default_model_path(), tmp_path / "tiny", fallback_tokenizer="x")
    assert refused.value.place == default_model_path()
    assert not (tmp_path / "tiny").exists()


# ── The twin's weights ───────────────────────────────────────────────────────────────────────────────────────────────


class Odd(nn.Module):
    """One parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Parameter(torch.zeros(400))
        self.scale = nn.Parameter(torch.linspace(1, 2, 8))
        self.A_log = nn.Parameter(torch.rand(4, 4))
        self.time_decay = nn.Parameter(torch.rand(4, 4))
        self.small = nn.Parameter(torch.randn(64, 16) * 0.01)
        self.large = nn.Parameter(torch.randn(64, 16) * 3)
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.codes = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
        self.one = nn.Parameter(torch.ones(1))


def test_each_kind_of_weight_is_moved_as_it_should_be() -> None:
    model, before = Odd(), dict(Odd().named_parameters())
    twin.stir(model, 1)
    assert model.bias.std().item() == pytest.approx(0.1, rel=0.15), "zeros get noise"
    assert not model.one.equal(before["one"])
    assert not model.frozen.equal(before["frozen"])
    for name in ("scale", "A_log", "time_decay", "large", "codes"):
        assert getattr(model, name).equal(before[name]), name
    # A vector's length is preserved: a standard deviation of 1/√16 where it was smaller.
    assert model.small.std().item() == pytest.approx(16**-0.5, rel=0.01)
    assert (model.small / before["small"]).std().item() < 1e-4, "times a number"
    again = Odd()
    twin.stir(again, 2, only_trainable=True)
    assert not again.bias.equal(model.bias), "of another seed"
    assert again.frozen.equal(before["frozen"])


def test_noise_in_modules_and_configurations_is_switched_off() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_dropout, self.resid_pdrop, self.layerdrop, self.drop_path_rate = 0.1, 0.2, 0.3, 0.4
            self.scaling, self.dropout_kind, self.num_dropouts = 0.5, "usual", 3
            self.drop = nn.Dropout2d(0.6)
            self.config = LlamaConfig(attention_dropout=0.7, rms_norm_eps=0.8)

    layer = Layer()
    twin.without_dropout(layer)
    assert (layer.attention_dropout, layer.resid_pdrop, layer.layerdrop, layer.drop_path_rate) == (0, 0, 0, 0)
    assert (layer.scaling, layer.dropout_kind, layer.num_dropouts, layer.drop.p) == (0.5, "usual", 3, 0.0)
    assert (layer.config.attention_dropout, layer.config.rms_norm_eps) == (0.0, 0.8)


def test_a_twin_of_a_seed_is_small_and_the_same() -> None:
    config = REAL["llama"]
    with twin.undisturbed():
        one, same, other = (twin.build_twin(config, attention="eager", seed=seed) for seed in (0, 0, 1))
    assert one.config._attn_implementation == "eager"
    assert one.config.use_cache is False
    assert (one.config.vocab_size, one.config.pad_token_id, one.config.eos_token_id) == (512, 0, 2)
    assert one.num_parameters() < twin.MAX_PARAMETERS
    weights = [model.model.layers[0].mlp.up_proj.weight for model in (one, same, other)]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])
    assert all(parameter.dtype == torch.float32 for parameter in one.parameters())
    assert config.use_cache, "the run's own configuration stays"


@pytest.mark.parametrize(
    ("config", "dense"),
    [
        ({}, []),
        ({"decoder_sparse_step": 3}, [0, 1, 3, 4]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, [0, 1, 2, 3, 4]),
        ({"decoder_sparse_step": 0, "first_k_dense_replace": 2, "num_dense_layers": 1}, [0, 1]),
        ({"num_dense_layers": 3, "mlp_only_layers": None}, [0, 1, 2]),
    ],
)
def test_layers_without_experts_are_known_by_their_numbers(config: dict[str, Any], dense: list[int]) -> None:
    assert [index for index in range(6) if _is_dense(config, index)] == dense


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "paligemma", "llava", "idefics3", "gemma3"])
def test_what_a_shrunken_tower_gives_fits_the_shrunken_language_model(family):
    """Image sizes stay unchanged, so that the processor's inputs fit."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    config = CONFIG_MAPPING[family]()
    width = config.get_text_config().hidden_size
    if family.startswith("qwen"):  # as in published models; the class's defaults do not fit together
        config.vision_config.update({"hidden_size" if family == "qwen2_vl" else "out_hidden_size": width})
    if family in ("gemma3", "idefics3"):
        config.vision_config.update({"image_size": 896 if family == "gemma3" else 364, "patch_size": 14})
    side, patch = getattr(config.vision_config, "image_size", 0), config.vision_config.patch_size
    tiny = shrink.shrink_model_config(config, vocab_size=128)
    assert (getattr(tiny.vision_config, "image_size", 0), tiny.vision_config.patch_size) == (side, patch)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(tiny)
    if family.startswith("qwen"):
        pixels = torch.randn(16, 3 * tiny.vision_config.temporal_patch_size * patch**2)
        inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    else:
        inputs = {"pixel_values": torch.randn(*((1, 1) if family == "idefics3" else (1,)), 3, side, side)}
    with torch.no_grad():
        found = model.model.get_image_features(**inputs).pooler_output
    features = found if isinstance(found, torch.Tensor) else found[0]
    assert features.shape[-1] == tiny.get_text_config().hidden_size < width


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "glm4v", "glm4v_moe", "qwen3_vl", "mistral4"])
@pytest.mark.parametrize("sections", [None, [16, 24, 24]])
def test_what_is_rotated_fits_the_smaller_head(family: str, sections: list[int] | None) -> None:
    """Sections of time, height and width add up to half of it; Mistral 4's heads have parts with and without."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(family)
    text = config.get_text_config(decoder=True)
    if sections is not None:
        text.rope_parameters = {**text.rope_parameters, "mrope_section": sections}
    tiny = shrink.shrink_model_config(config, vocab_size=512, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = AutoModelForImageTextToText.from_config(tiny)
    tokens = torch.arange(3, 19)[None]
    assert torch.isfinite(model(input_ids=tokens, labels=tokens).loss)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "glm4v", "mistral4", "dots3_note"])
def test_a_model_of_text_and_images_is_written_from_its_configuration(family: str, tmp_path: Path) -> None:
    """Qwen2.5-VL's text configuration does not say whether weights are tied."""
    from transformers import AutoConfig

    AutoConfig.for_model(family).save_pretrained(tmp_path / "real")
    tiny = shrink.write_shrunken_model(
        str(tmp_path / "real"), tmp_path / "tiny", fallback_tokenizer=str(default_model_path())
    )
    assert tiny.num_parameters < shrink.MAX_BODY_PARAMETERS
    assert (tmp_path / "tiny" / "model.safetensors").is_file()


# ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_again(config: PreTrainedConfig) -> None:
    stored = json.loads(json.dumps(config.to_dict(), default=str))
    AutoConfig.for_model(stored.pop("model_type"), **stored)


@pytest.mark.parametrize("config_class", dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING), ids=lambda found: found.__name__)
def test_a_smaller_configuration_can_be_read_again(config_class: type[PreTrainedConfig]) -> None:
    """The rehearsal and the planner read it; rotary parameters may be stated for each type of layer."""
    try:
        config = config_class()
        read_again(config)
        small = shrink.shrink_model_config(config, vocab_size=512, min_layers=4)
    except Exception as error:
        pytest.skip(f"its own default cannot be read or shrunk: {error}")
    read_again(small)
