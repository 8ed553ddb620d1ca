"""Activation checkpointing: policies parse, gradients stay the same, and saved bytes match the policies' promises."""

from __future__ import annotations

import copy

import pytest
import torch
from activation_memory import saved_activation_bytes
from torch import nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from accel_scale.errors import ConfigError
from accel_scale.modeling.activation_checkpointing import (
    CheckpointingPolicy,
    apply_checkpointing,
    find_blocks,
)
from accel_scale.modeling.activation_offload import offload_stats

POLICIES = ["full", "every_2", "every_3", "selective", "attention", "mlp", "segments", "segments_3", "offload"]
NUM_LAYERS, HIDDEN, BATCH, LENGTH = 4, 64, 2, 128


def tiny_model(family: str) -> nn.Module:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 96,
        "hidden_size": HIDDEN,
        "intermediate_size": 160,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "pad_token_id": 0,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    if family == "gpt_neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(**shape)).train()
    config, model = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    extra = {"head_dim": 16} if family == "qwen3" else {}
    return model(config(**shape, num_key_value_heads=2, **extra)).train()


def batch() -> torch.Tensor:
    return torch.randint(1, 96, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    ids = batch()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", CheckpointingPolicy("none")),
        ("full", CheckpointingPolicy("full")),
        ("every_1", CheckpointingPolicy("full")),
        ("every_2", CheckpointingPolicy("every_n", 2)),
        ("Every-12", CheckpointingPolicy("every_n", 12)),
        ("selective", CheckpointingPolicy("selective")),
        ("offload", CheckpointingPolicy("offload")),
        ("segments", CheckpointingPolicy("segments")),
        ("segments_1", CheckpointingPolicy("full")),
        ("Segments-3", CheckpointingPolicy("segments", 3)),
    ],
)
def test_policies_parse(text, expected):
    assert CheckpointingPolicy.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("selectve", "selective"),
        ("every2", "every_2"),
        ("ofload", "offload"),
        ("every_0", "every_"),
        ("every_n", "every_"),
        ("segment_2", "segments_2"),
        ("segments_0", "segments_2"),
    ],
)
def test_bad_policy_names_the_nearest(text, nearest):
    with pytest.raises(ConfigError, match=f"did you mean {nearest}"):
        CheckpointingPolicy.parse(text)


def test_policy_prints_as_it_is_written():
    for text in ("none", "full", "every_3", "selective", "segments", "segments_3", "offload"):
        assert str(CheckpointingPolicy.parse(text)) == text


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_gradients_are_those_without_checkpointing(family):
    model = tiny_model(family)
    expected = gradients(model)
    assert len(expected) == len(list(model.parameters()))
    for text in [*POLICIES, "none"]:
        apply_checkpointing(model, CheckpointingPolicy.parse(text))
        assert model.is_activation_checkpointing == (text in ("full", "every_2", "every_3", "selective", "offload"))
        actual = gradients(model)
        assert all(torch.equal(actual[name], grad) for name, grad in expected.items()), text
    for text in ("full", "every_2", "offload"):
        apply_checkpointing(model, CheckpointingPolicy.parse(text), use_reentrant=True)
        actual = gradients(model)
        assert all(torch.equal(actual[name], grad) for name, grad in expected.items()), f"{text}, reentrant"


def test_one_part_of_each_layer_is_recomputed_where_it_has_a_module_of_its_own():
    model, ids = tiny_model("llama"), batch()

    def saved(text: str) -> int:
        apply_checkpointing(model, CheckpointingPolicy.parse(text))
        return saved_activation_bytes(lambda: model.model(input_ids=ids).last_hidden_state)

    none, attention, mlp, full = (saved(text) for text in ("none", "attention", "mlp", "full"))
    assert full < mlp < none
    assert full < attention < none
    # Each keeps what the other one drops; both keep the layer's norms and sums.
    assert (none - attention) + (none - mlp) < none - full
    with pytest.raises(ConfigError, match="only transformers' models"):
        apply_checkpointing(PlainStack(), CheckpointingPolicy("mlp"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_saved_bytes_are_what_each_policy_promises(family):
    model, ids = tiny_model(family), batch()
    backbone = model.get_decoder() if family == "llama" else model.gpt_neox

    def saved(text: str) -> int:
        apply_checkpointing(model, CheckpointingPolicy.parse(text))
        offload_stats.reset()
        return saved_activation_bytes(lambda: backbone(input_ids=ids).last_hidden_state)

    bytes_of = {text: saved(text) for text in ("none", "every_3", "every_2", "selective", "full", "offload")}
    layer_inputs_bytes = NUM_LAYERS * BATCH * LENGTH * HIDDEN * 4
    # Outside the layers: the embeddings' output is layer 0's input, and the final norm keeps about three more tensors.
    outside_bytes = 4 * BATCH * LENGTH * HIDDEN * 4
    assert layer_inputs_bytes <= bytes_of["full"] <= layer_inputs_bytes + outside_bytes
    assert bytes_of["offload"] <= outside_bytes
    assert offload_stats.num_tensors == NUM_LAYERS
    assert offload_stats.num_bytes == layer_inputs_bytes
    assert bytes_of["full"] < bytes_of["every_2"] < bytes_of["none"]
    assert bytes_of["full"] < bytes_of["selective"] < bytes_of["none"]
    assert bytes_of["none"] > 5 * bytes_of["full"]
    # every_n keeps layers 0, n, 2n, … as `full` does (ceil(4/n) of the 4) and the others as `none` does.
    for text, num_checkpointed in (("every_2", 2), ("every_3", 2)):
        share = num_checkpointed / NUM_LAYERS
        expected = share * bytes_of["full"] + (1 - share) * bytes_of["none"]
        assert bytes_of[text] == pytest.approx(expected, rel=0.05)


def test_selective_does_not_run_matrix_products_again():
    from torch.utils.flop_counter import FlopCounterMode

    model, ids = tiny_model("llama"), batch()

    def flops(text: str) -> int:
        apply_checkpointing(model, CheckpointingPolicy.parse(text))
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, labels=ids).loss.backward()
        return counter.get_total_flops()

    none, selective, full = flops("none"), flops("selective"), flops("full")
    assert selective == none
    # Recomputing every layer adds one forward pass to three (forward, and two in backward), less the output head.
    assert 1.15 < full / none < 1.34


def test_checkpointing_is_off_in_evaluation():
    model = tiny_model("llama")
    apply_checkpointing(model, CheckpointingPolicy.parse("offload"))
    offload_stats.reset()
    model.eval()(input_ids=batch())
    assert offload_stats.num_tensors == 0


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("in_4bit", [False, True])
def test_adapters_learn_on_a_frozen_base(text, in_4bit, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = tiny_model("llama")
    if in_4bit:
        from transformers import BitsAndBytesConfig

        model.save_pretrained(tmp_path)
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=quantization, dtype=torch.float32)
    peft_model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])).train()
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:  # initialised to zero, which would make lora_A's gradients zero
            nn.init.normal_(parameter, std=0.1)
    expected = gradients(peft_model)
    apply_checkpointing(peft_model, CheckpointingPolicy.parse(text))
    actual = gradients(peft_model)
    assert actual.keys() == expected.keys()
    assert len(actual) == 2 * 3 * NUM_LAYERS
    for name, grad in expected.items():
        assert grad.abs().max() > 0
        assert torch.allclose(actual[name], grad, rtol=0, atol=1e-6), name
    if text in ("full", "every_2", "every_3", "offload"):
        apply_checkpointing(peft_model, CheckpointingPolicy.parse(text), use_reentrant=True)
        reentrant = gradients(peft_model)
        assert all(torch.allclose(reentrant[name], grad, rtol=0, atol=1e-6) for name, grad in expected.items())


def test_reentrant_refuses_what_it_cannot_do():
    with pytest.raises(ConfigError, match="reentrant"):
        apply_checkpointing(tiny_model("llama"), CheckpointingPolicy.parse("selective"), use_reentrant=True)


@pytest.mark.parametrize("kind", ["every", "segments"])
def test_more_distance_than_layers_is_refused(kind):
    with pytest.raises(ConfigError, match=f"{kind}_4 at most"):
        apply_checkpointing(tiny_model("llama"), CheckpointingPolicy.parse(f"{kind}_9"))


def test_a_segment_keeps_the_input_of_its_first_layer_alone():
    model, ids = tiny_model("llama"), batch()
    input_bytes = BATCH * LENGTH * HIDDEN * 4

    def saved(text: str) -> int:
        apply_checkpointing(model, CheckpointingPolicy.parse(text))
        return saved_activation_bytes(lambda: model.model(input_ids=ids).last_hidden_state)

    full = saved("full")
    # Segments of 2 and 2, 3 and 1, and all 4 layers.
    assert {text: full - saved(text) for text in ("segments", "segments_3", "segments_4")} == {
        "segments": 2 * input_bytes,
        "segments_3": 2 * input_bytes,
        "segments_4": 3 * input_bytes,
    }


def test_a_forward_pass_that_fails_in_a_segment_leaves_no_hooks():
    model, ids = tiny_model("llama"), batch()
    expected = gradients(model)
    apply_checkpointing(model, CheckpointingPolicy.parse("segments_4"))
    weight = model.model.layers[2].mlp.up_proj.weight
    weight.data, whole = weight.data[:, :1], weight.data
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(input_ids=ids, labels=ids)
    x = torch.ones(3, requires_grad=True)
    assert x.exp().grad_fn._saved_result.shape == (3,), "saved as it is, under no hook of a segment"
    weight.data = whole
    assert all(torch.equal(gradients(model)[name], grad) for name, grad in expected.items())


class Reordered(nn.Module):
    """Adds an offset to hidden states between its blocks, skips a block, or calls the blocks in another order."""

    def __init__(self, order: tuple[int, ...], offset: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.order, self.offset = order, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
            x = x + self.offset if self.offset else x
        return x


@pytest.mark.parametrize("model", [Reordered((0, 1, 2, 3), 0.5), Reordered((0, 1, 2)), Reordered((0, 2, 1, 3))])
def test_layers_that_are_no_chain_are_not_recomputed_together(model):
    apply_checkpointing(model.train(), CheckpointingPolicy.parse("segments_2"))
    with pytest.raises(ConfigError, match="from layer to layer"):
        model(torch.ones(1, 4)).sum().backward()
    apply_checkpointing(model, CheckpointingPolicy.parse("full"))
    model(torch.ones(1, 4)).sum().backward()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.drop(self.down(torch.nn.functional.gelu(self.up(x))))


class PlainStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(96, HIDDEN), nn.Embedding(LENGTH, HIDDEN)])
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_LAYERS)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embeddings[0](ids) + self.embeddings[1](torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def plain_gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(7)  # for dropout: the recomputation must draw the same mask
    model(batch()).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("text", [policy for policy in POLICIES if policy not in ("attention", "mlp")])
def test_plain_module(text):
    torch.manual_seed(0)
    model = PlainStack().train()
    expected = plain_gradients(model)
    names = list(model.state_dict())
    none_bytes = saved_activation_bytes(lambda: model(batch()))
    apply_checkpointing(model, CheckpointingPolicy.parse(text))
    assert all(torch.equal(a, b) for a, b in zip(plain_gradients(model), expected, strict=True))
    assert list(model.state_dict()) == names
    assert saved_activation_bytes(lambda: model(batch())) < none_bytes
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.blocks[0].up.weight.zero_()
    assert not all(torch.equal(a, b) for a, b in zip(plain_gradients(twin), expected, strict=True))
    apply_checkpointing(model, CheckpointingPolicy.parse("none"))
    assert saved_activation_bytes(lambda: model(batch())) == none_bytes


def test_blocks_are_found_or_named():
    model = PlainStack()
    assert find_blocks(model) is model.blocks
    assert find_blocks(model, "embeddings") is model.embeddings
    with pytest.raises(ConfigError, match="embeddings, blocks"):
        find_blocks(model, "layers")
    with pytest.raises(ConfigError, match="no stack of blocks"):
        apply_checkpointing(nn.Linear(2, 2), CheckpointingPolicy.parse("full"))
