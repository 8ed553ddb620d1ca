"""Packed rows filled up to a length that a CPU multiplies faster: the same loss and gradients, and few lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from accel_scale.modeling.packed_attention import register_packed_attention
from accel_scale.modeling.packing.row_facts import ROW_FACTS, Counting, filled_up
from accel_scale.optimization import fast_loss
from accel_scale.optimization.fast_loss import add_fast_lm_head

SIZES = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
BF16 = torch.bfloat16


def batch(*lengths: int) -> dict[str, Any]:
    """A packed row as TRL makes it; the first half of each document has no labels."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in lengths:
        ids = torch.randint(1, 90, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * (length // 2) + ids[length // 2 :]})
    return Counting(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True))(rows)


def model(kind: str = "llama", **settings: Any) -> Any:
    torch.manual_seed(0)
    attention = register_packed_attention()
    made = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[kind](**{**SIZES, **settings}), attn_implementation=attention
    )
    add_fast_lm_head(made)
    return made.train()


def lengths_of(made: Any) -> list[int]:
    """The list that gets the number of tokens that each pass computes."""
    seen: list[int] = []
    made.get_input_embeddings().register_forward_hook(lambda _, args, output: seen.append(args[0].shape[1]))
    return seen


def step(made: Any, inputs: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    made.zero_grad()
    with torch.autocast("cpu", BF16):
        loss = made(**inputs, fast_lm_head=True).loss
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in made.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "olmo2"])
def test_loss_and_gradients_are_those_of_the_row_as_it_came(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = {"sliding_window": 8} if kind in ("mistral", "gemma3_text") else {}
    made, inputs = model(kind, **windows), batch(11, 20, 16)
    seen = lengths_of(made)
    loss, gradients = step(made, inputs)
    monkeypatch.setattr(fast_loss, "filled_up", lambda inputs, facts, dtype: (inputs, facts))
    expected, references = step(made, inputs)
    assert seen == [64, 47]
    assert loss == pytest.approx(expected, rel=1e-4)
    for name, gradient in references.items():
        assert (gradients[name] - gradient).norm() <= 2e-2 * gradient.norm() + 1e-6, name


def test_every_tensor_of_the_row_grows_by_one_document() -> None:
    inputs = batch(11, 20, 16)
    facts = inputs.pop(ROW_FACTS)
    longer, longer_facts = filled_up(inputs, facts, BF16)
    expected = Counting(dict)({name: longer[name] for name in ("input_ids", "labels", "position_ids")})[ROW_FACTS]
    assert vars(longer_facts) == vars(expected)
    assert longer_facts.document_lengths == (11, 20, 16, 17)
    assert longer_facts.num_labels == facts.num_labels
    assert longer["cu_seq_lens_q"].tolist() == longer["cu_seq_lens_k"].tolist() == [0, 11, 31, 47, 64]
    assert longer["seq_idx"][0].unique_consecutive(return_counts=True)[1].tolist() == [11, 20, 16, 17]
    assert longer["max_length_q"] == 20
    assert facts.shape == (1, 47)
    short, _ = filled_up(batch(3, 5), batch(3, 5)[ROW_FACTS], BF16)
    assert short["max_length_k"] == 24  # the added document is the longest


def test_what_is_left_as_it_is() -> None:
    inputs = batch(11, 20, 16)
    facts = inputs.pop(ROW_FACTS)
    assert filled_up(inputs, facts, torch.float32) == (inputs, facts)
    unknown = {**inputs, "token_type_ids": torch.zeros_like(inputs["input_ids"])}
    assert filled_up(unknown, facts, BF16)[0] is unknown
    whole = batch(12, 20, 32)
    assert filled_up(whole, whole[ROW_FACTS], BF16)[0] is whole
    alone = batch(47)
    assert filled_up(alone, alone[ROW_FACTS], BF16)[0] is alone


def test_a_routers_loss_is_a_mean_over_the_rows_own_tokens() -> None:
    made, inputs = model("mixtral", num_local_experts=2, num_experts_per_tok=1), batch(11, 20, 16)
    seen = lengths_of(made)
    with torch.autocast("cpu", BF16):
        made(**inputs, fast_lm_head=True, router_loss=True)
        made(**inputs, fast_lm_head=True)
    assert seen == [47, 64]
