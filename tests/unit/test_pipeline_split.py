"""Models of many architectures, split into parts and run one part after another, give the same results as whole."""

from __future__ import annotations

import copy
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from accel_scale.errors import ConfigError
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.optimization.head_loss import head_loss
from accel_scale.parallel.pipelines import evaluate
from accel_scale.parallel.pipelines.loss import repeatable
from accel_scale.parallel.pipelines.split import (
    _skeleton,
    costs_of,
    owned_parameters,
    split_model,
    stage_layers,
    stage_of,
)

BASE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32, "pad_token_id": 0, "head_dim": 8,
}  # fmt: skip
GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32, "vocab_size": 64}
EAGER = {"_attn_implementation": "eager"}
ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma": {},
    "gemma2": {"sliding_window": 5, **EAGER},
    "gemma3_text": {"sliding_window": 5},
    "cohere": {},
    "olmo2": {},
    "phi3": {},
    "stablelm": {},
    "granite": {"logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt2": GPT,
    "gptj": {**GPT, "rotary_dim": 4, **EAGER},
    "bloom": {"hidden_size": 32, "n_layer": 4, "n_head": 4, "vocab_size": 64, **EAGER},
    "falcon": {"head_dim": None},
    "ctrl": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32, "vocab_size": 64, "dff": 48, **EAGER},
}


def build(model_type: str):
    own = dict(ARCHITECTURES[model_type])
    attention = own.pop("_attn_implementation", "sdpa")
    fields = own if "n_layer" in own else {**BASE, **own}
    fields = {name: value for name, value in fields.items() if value is not None}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():  # norms of ones and biases of zeros would hide that they are missing
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_parts_one_after_the_other_are_the_model(model_type):
    model = build(model_type)
    ids = torch.randint(1, 64, (2, 12))
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, 12)
    extra = {} if model_type == "bloom" else {"position_ids": positions}
    with torch.no_grad():
        wanted = model.base_model(ids, use_cache=False, **extra).last_hidden_state
        loss = head_loss(model, wanted, ids, num_items=3)
    names = {name: parameter.shape for name, parameter in model.named_parameters()}
    parts = split_model(model, [range(1), range(1, 3), range(3, 4)], [0, 1, 2])
    stage_of(parts[-1]).loss, stage_of(parts[-1]).num_items = head_loss, 3
    hidden = ids
    with torch.no_grad():
        for part in parts[:-1]:
            hidden = part(hidden, **extra)
        assert torch.equal(parts[-1](hidden, **extra), wanted)
        assert torch.equal(parts[-1](hidden, labels=ids, **extra), loss)
    held = [owned_parameters(part) for part in parts]
    assert {name: p.shape for part in held for name, p in part.items()} == names
    assert sum(len(part) for part in held) == len(names)
    assert [len(stage_layers(part)) for part in parts] == [1, 2, 1]


def test_architectures_that_the_planner_does_not_know_are_balanced_by_parameters():
    model = build("ctrl")
    layer = sum(p.numel() for p in model.transformer.h[0].parameters())
    assert costs_of(model, 16) == (layer, layer, layer, layer + 64 * 32)


def test_a_tied_head_becomes_a_copy_that_nobody_owns():
    model = build("gemma")
    weight = model.get_input_embeddings().weight
    first, last = split_model(model, [range(2), range(2, 4)], [0, 1])
    assert first.get_input_embeddings().weight is weight
    head = last.get_output_embeddings().weight
    assert head is not weight
    assert torch.equal(head, weight)
    assert stage_of(first).tied_weight == "model.embed_tokens.weight"
    assert stage_of(last).tied_weight == "lm_head.weight"
    assert "lm_head.weight" not in owned_parameters(last)
    assert "lm_head.weight" in dict(last.named_parameters())


def test_other_stages_weights_are_freed():
    model = build("llama")
    part = split_model(model, [range(2), range(2, 4)], [1])[0]
    assert part is model
    assert {name.split(".")[2] for name in owned_parameters(part) if "layers" in name} == {"2", "3"}
    assert not any(name.startswith("model.embed_tokens") for name in owned_parameters(part))


def test_checkpointed_layers_are_still_recomputed():
    model = build("llama").train()
    apply_checkpointing(model, CheckpointingPolicy.parse("full"))
    plain = copy.deepcopy(build("llama")).train()
    counts = []
    for candidate in (model, plain):
        part = split_model(candidate, [range(2), range(2, 4)], [1])[0]
        calls = []
        stage_layers(part)[0].self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        part(torch.randn(1, 6, 32, requires_grad=True)).sum().backward()
        counts.append(len(calls))
    assert counts == [2, 1]


def test_dropout_of_embeddings_happens_on_the_first_stage_only():
    model = build("gpt2")
    first, last = split_model(model, [range(2), range(2, 4)], [0, 1])
    assert isinstance(first.transformer.drop, nn.Dropout)
    assert not isinstance(last.transformer.drop, nn.Dropout)


def test_what_cannot_be_split_is_refused():
    from peft import LoraConfig, get_peft_model

    with pytest.raises(ConfigError, match="adapters are not supported"):
        split_model(
            get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"])), [range(2), range(2, 4)], [0]
        )
    with pytest.raises(ConfigError, match="do not divide 4 layers"):
        split_model(build("llama"), [range(2), range(3, 4)], [0])
    config = AutoConfig.for_model(
        "gemma3n_text", **{**BASE, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8, "layer_types": ["full_attention"] * 4, "activation_sparsity_pattern": None},
    )  # fmt: skip
    with pytest.raises(ConfigError, match="cannot be split into pipeline stages"):
        split_model(AutoModelForCausalLM.from_config(config), [range(2), range(2, 4)], [0])


@pytest.mark.parametrize(
    ("boundaries", "stages", "says"),
    [
        ([range(4)], [0], "among two or more stages"),
        ([range(2), range(2, 2), range(2, 4)], [0], "do not divide 4 layers"),
        ([range(2), range(1, 4)], [0], "do not divide 4 layers"),
        ([range(2), range(2, 4)], [], "no stages"),
        ([range(2), range(2, 4)], [2], "no stages"),
        ([range(2), range(2, 4)], [-1], "no stages"),
    ],
)
def test_stages_that_are_not_there_are_refused(boundaries, stages, says):
    with pytest.raises(ConfigError, match=says):
        split_model(build("llama"), boundaries, stages)


def test_a_part_knows_its_place():
    first, middle, last = split_model(build("llama"), [range(1), range(1, 3), range(3, 4)], [0, 1, 2])
    found = [stage_of(part) for part in (first, middle, last)]
    assert [(one.is_first, one.is_last, one.holds_copy) for one in found] == [
        (True, False, False), (False, False, False), (False, True, False),
    ]  # fmt: skip
    assert [one.layer_names for one in found][1] == ("model.layers.1", "model.layers.2")
    assert {(one.num_stages, one.num_layers, one.tied_weight, one.embedding) for one in found} == {
        (3, 4, None, "model.embed_tokens.weight")
    }
    assert [one.num_items for one in found] == [1, 1, 1]
    # Without labels, or without a loss, the last stage returns its normalised states.
    hidden, ids = torch.randn(1, 6, 32), torch.randint(1, 64, (1, 6))
    states = last(hidden)
    assert torch.equal(last(hidden, labels=ids), states)
    assert not states._is_view()
    for requires_grad in (False, True):
        frozen = build("gemma")
        frozen.get_input_embeddings().weight.requires_grad_(requires_grad)
        (part,) = split_model(frozen, [range(2), range(2, 4)], [1])
        assert part.get_output_embeddings().weight.requires_grad is requires_grad
        assert stage_of(part).holds_copy


def test_a_loss_that_is_gone_back_through_twice_gives_the_same_gradients():
    torch.manual_seed(0)
    part = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **BASE))
    head = part.get_output_embeddings().weight
    hidden = torch.randn(2, 3, BASE["hidden_size"], requires_grad=True)

    def loss(model, states, target, *, power):
        return (model.get_output_embeddings()(states) - target).pow(power).mean()

    target = torch.randn(2, 3, BASE["vocab_size"])
    plain = 3 * loss(part, hidden, target, power=4)
    expected = torch.autograd.grad(plain, (hidden, head))
    value = 3 * repeatable(loss)(part, hidden, target, power=4)
    assert value.equal(plain)
    for _ in range(2):
        for gradient, own in zip(torch.autograd.grad(value, (hidden, head), retain_graph=True), expected, strict=True):
            torch.testing.assert_close(gradient, own)
    with torch.no_grad():
        assert (3 * repeatable(loss)(part, hidden, target, power=4)).equal(plain)
    head.requires_grad_(False)
    (3 * repeatable(loss)(part, hidden, target, power=4)).backward()
    torch.testing.assert_close(hidden.grad, expected[0])


def test_a_forward_that_was_replaced_on_a_module_is_that_of_its_copy() -> None:
    """A method that belongs to another module stays bound to that module."""
    pair = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    pair[0].forward = types.MethodType(lambda self, x: x * self.factor, pair[0])
    pair[0].factor, pair[0].borrowed = 3.0, pair[1].forward
    copied = _skeleton(pair, {})[0]
    copied.factor = 5.0
    assert (copied(torch.ones(1)).item(), pair[0](torch.ones(1)).item()) == (5.0, 3.0)
    assert copied.borrowed.__self__ is pair[1]
    assert copied.weight is pair[0].weight


class Wires:
    """One rank's point-to-point messages: records the tensors it sends and fills in those it receives."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, torch.Tensor]] = []
        self.received: list[int] = []

    def get_world_size(self, group: object) -> int:
        return 3

    def isend(self, tensor: torch.Tensor, *, group: object, group_dst: int) -> None:
        self.sent.append((group_dst, tensor))

    def recv(self, tensor: torch.Tensor, *, group: object, group_src: int) -> None:
        tensor.fill_(3 if tensor.dtype == torch.long else 10 + group_src)  # 3: float64
        self.received.append(group_src)


@pytest.mark.parametrize(
    ("stages", "received", "sent", "result"),
    [
        ([0, 1, 2, 3], [], [], 6.0),  # all stages are on this rank: nothing is sent
        ([1, 2], [0, 0], [(0, 3), (0, 13)], None),
        ([0, 3], [2, 2], [(1, 0), (1, 0)], 15.0),
        ([2], [1, 1], [(0, 3), (0, 13)], None),
    ],
)
def test_hidden_states_travel_between_the_ranks_that_have_a_stage(
    stages: list[int], received: list[int], sent: list[tuple[int, int]], result: float | None, monkeypatch: Any
) -> None:
    """Stage n is on rank n modulo 3 and adds n; the last stage has the labels."""
    wires = Wires()
    monkeypatch.setattr(evaluate, "dist", wires)

    def part(stage: int) -> Any:
        def run(hidden: torch.Tensor, *, extra: int, labels: object = None) -> torch.Tensor:
            assert (extra, labels) == (7, "labels" if stage == 3 else None)
            return (hidden if hidden.is_floating_point() else torch.zeros(1, 2, 4)) + stage

        run.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=4))  # type: ignore[attr-defined]
        return run

    pipeline = SimpleNamespace(group="group", stage_indices=stages, parts=[part(n) for n in stages], num_stages=4)
    sends: list[Any] = []
    inputs: Any = {"input_ids": torch.ones(1, 2, dtype=torch.long), "labels": "labels", "extra": 7}
    found = evaluate.forward_through(pipeline, inputs, sends)
    assert wires.received == received
    assert [(to, int(tensor.flatten()[0])) for to, tensor in wires.sent] == sent
    assert (None if found is None else float(found.mean())) == result
    assert len(sends) == len(sent)
