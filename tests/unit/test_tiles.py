"""MLPs computed over slices of the rows: the plain model's gradients, fewer bytes, and names for unsupported cases."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from activation_memory import peak_tensor_bytes, saved_activation_bytes
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaForCausalLM,
    LlamaModel,
    Qwen3MoeForCausalLM,
)

from accel_scale.errors import ConfigError
from accel_scale.flags.common import ScaleArguments
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.modeling.tiling import tiles

HIDDEN, LENGTH, LAYERS = 32, 75, 2
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},  # a norm after the MLP needs the MLP's result again
    "phi3": {},  # gate and up in one matrix
    "gpt_neox": {},  # a plain MLP parallel to the attention
}


def tiny(family: str = "llama", **fields: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**SIZES, **FAMILIES.get(family, {}), **fields})
    return AutoModelForCausalLM.from_config(config).train()


def with_adapters(model: Any) -> Any:
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")).train()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # initially zero, which would make lora_A's gradients zero
            nn.init.normal_(parameter, std=0.1)
    return adapted


def batch() -> torch.Tensor:
    return torch.randint(3, 96, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def gradients(model: Any, *, autocast: bool = False) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(7)  # for dropout
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=batch(), labels=batch()).loss
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def in_tiles(text: str = "none") -> CheckpointingPolicy:
    policy = CheckpointingPolicy.parse(text)
    return CheckpointingPolicy(policy.kind, policy.every_n, in_tiles=True)


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        assert grad.abs().max() > 0, name
        assert (actual[name] - grad).abs().max() <= tolerance * max(1.0, grad.abs().max()), name


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_plain_model(family: str, adapters: bool) -> None:
    model = with_adapters(tiny(family)) if adapters else tiny(family)
    expected = gradients(model)
    for text in ("none", "full", "every_2", "offload"):
        for use_reentrant in {False, text != "none"}:
            apply_checkpointing(model, in_tiles(text), use_reentrant=use_reentrant)
            assert_equal(gradients(model), expected)
    apply_checkpointing(model, CheckpointingPolicy("none"))
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_adapters_on_a_4_bit_base(tmp_path: Any) -> None:
    tiny().save_pretrained(tmp_path)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=quantization, dtype=torch.float32)
    model = with_adapters(base)
    expected = gradients(model)
    assert len(expected) == 2 * 7 * LAYERS
    for text, use_reentrant in (("none", False), ("full", True), ("offload", False)):
        apply_checkpointing(model, in_tiles(text), use_reentrant=use_reentrant)
        assert_equal(gradients(model), expected)


@pytest.mark.parametrize("text", ["none", "full"])
def test_sums_over_tiles_round_once(text: str) -> None:
    """16-bit gradients are summed in fp32 and differ from the plain model's by at most their last bit."""
    model = tiny()
    expected = gradients(model, autocast=True)
    apply_checkpointing(model, in_tiles(text))
    assert_equal(gradients(model, autocast=True), expected, 2**-7)
    model = tiny().to(torch.bfloat16)
    expected = gradients(model)
    apply_checkpointing(model, in_tiles(text), tile_rows=3)  # fifty tiles
    for name, grad in gradients(model).items():
        assert (grad - expected[name]).norm() <= 0.01 * expected[name].norm(), name


@pytest.mark.parametrize("text", ["none", "full"])
def test_dropout_draws_the_same_in_both_passes(text: str) -> None:
    """With a different mask in the backward pass, the directional derivative would not match the loss's difference."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING["gpt2"](n_embd=HIDDEN, n_head=4, n_layer=LAYERS, vocab_size=96, resid_pdrop=0.5)
    model = AutoModel.from_config(config).double().train()
    apply_checkpointing(model, in_tiles(text))
    parameters = dict(model.named_parameters())

    def loss() -> torch.Tensor:
        torch.manual_seed(7)
        return model(batch(), use_cache=False).last_hidden_state.pow(3).mean()

    loss().backward()
    direction = {name: torch.randn_like(p) for name, p in parameters.items() if "mlp" in name}

    def loss_at(step: float) -> float:
        with torch.no_grad():
            for name, towards in direction.items():
                parameters[name] += step * towards
            return float(loss())

    slope = (loss_at(1e-6) - loss_at(-2e-6)) / 2e-6
    expected = sum(float((parameters[name].grad * towards).sum()) for name, towards in direction.items())
    assert slope == pytest.approx(expected, rel=1e-5)


def test_the_forward_pass_runs_once_more_and_not_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under checkpointing, a layer's recomputation stops before the MLP, whose tiles recompute themselves."""
    model = tiny()
    apply_checkpointing(model, in_tiles("full"))
    counted = []
    whole = tiles._forward_in_tiles
    monkeypatch.setattr(tiles, "_forward_in_tiles", lambda run, *args: counted.append(run) or whole(run, *args))
    gradients(model)
    names = [type(run.__self__.module).__name__ for run in counted]
    assert (names.count("LlamaMLP"), names.count("LlamaRMSNorm")) == (LAYERS, 4 * LAYERS + 1)


@pytest.mark.slow
def test_one_tile_lives_at_a_time() -> None:
    config = CONFIG_MAPPING["llama"](**{**SIZES, "intermediate_size": 16 * HIDDEN})
    torch.manual_seed(0)
    model, ids = LlamaModel(config).train(), torch.randint(3, 96, (1, 12 * HIDDEN))

    def step() -> None:
        model(ids, use_cache=False).last_hidden_state.square().mean().backward()

    def saved_bytes(policy: CheckpointingPolicy) -> int:
        apply_checkpointing(model, policy)
        return saved_activation_bytes(lambda: model(ids, use_cache=False).last_hidden_state)

    def peak_bytes(policy: CheckpointingPolicy) -> int:
        apply_checkpointing(model, policy)
        model.zero_grad()
        return peak_tensor_bytes(step)

    widest = 4 * ids.numel() * config.intermediate_size  # bytes of one MLP tensor
    # Gate, its activation, up, and their product are not kept.
    assert saved_bytes(CheckpointingPolicy("none")) - saved_bytes(in_tiles()) >= 0.99 * LAYERS * 4 * widest
    assert peak_bytes(CheckpointingPolicy("full")) > 5 * widest
    assert peak_bytes(in_tiles("full")) < 2 * widest


def test_copies_and_evaluation() -> None:
    model = tiny()
    with torch.no_grad():
        expected = model(batch()).logits
    apply_checkpointing(model, in_tiles())
    assert list(model.state_dict()) == list(tiny().state_dict())
    with torch.no_grad():
        assert torch.allclose(model.eval()(batch()).logits, expected, atol=1e-5)
        twin = copy.deepcopy(model)
        twin.model.layers[0].mlp.down_proj.weight.zero_()
        assert not torch.allclose(twin(batch()).logits, expected, atol=1e-5)
        assert torch.allclose(model(batch()).logits, expected, atol=1e-5)


@pytest.mark.slow
def test_compiled_layers_compute_the_same() -> None:
    model = tiny()
    expected = gradients(model)
    apply_checkpointing(model, in_tiles("full"))
    for layer in model.model.layers:
        layer.compile(backend="eager")
    assert_equal(gradients(model), expected)


def test_layers_with_experts_are_left_alone() -> None:
    sizes = {**SIZES, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
    model = Qwen3MoeForCausalLM(CONFIG_MAPPING["qwen3_moe"](**sizes, head_dim=8)).train()
    expected = gradients(model)
    apply_checkpointing(model, in_tiles("full"))
    tiled = ["forward" in layer.mlp.__dict__ for layer in model.model.layers]
    assert tiled == [True, False]
    assert_equal(gradients(model), expected)


def test_what_cannot_be_served_is_refused_by_name() -> None:
    opt = tiny("opt", ffn_dim=64, word_embed_proj_dim=HIDDEN)
    with pytest.raises(ConfigError, match=r"--long_rows: .* OPTForCausalLM have no module of its own for the MLP"):
        apply_checkpointing(opt, in_tiles())
    with pytest.raises(ConfigError, match=r"BloomForCausalLM have an MLP \(BloomMLP\) that takes more"):
        apply_checkpointing(tiny("bloom"), in_tiles())
    with pytest.raises(ConfigError, match="selective checkpointing keeps what"):
        in_tiles("selective")
    assert ScaleArguments().long_rows is False


def test_zero3_gathers_the_weights_of_a_tiled_mlp_at_once_and_of_no_other_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ZeRO-3, DeepSpeed is not even imported."""
    pytest.importorskip("deepspeed")
    from deepspeed.utils import z3_leaf_module

    for is_on in (False, True):
        monkeypatch.setattr("transformers.integrations.is_deepspeed_zero3_enabled", lambda is_on=is_on: is_on)
        model = tiny()
        apply_checkpointing(model, in_tiles())
        leaves = [name for name, module in model.named_modules() if z3_leaf_module(module)]
        assert leaves == ([f"model.layers.{index}.mlp" for index in range(LAYERS)] if is_on else [])
