"""The facts that the host gives for a micro-batch are the ones that the device would find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from activation_models import FIELDS
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from accel_scale.facts.device import Device
from accel_scale.modeling.attention import resolve_attention, with_document_lengths
from accel_scale.modeling.packed_attention import register_packed_attention
from accel_scale.modeling.packing import row_facts
from accel_scale.modeling.packing.row_facts import ROW_FACTS, Counting, RowFacts, cumulative, uploaded
from accel_scale.optimization.fast_loss import add_fast_lm_head

# transformers does not accept external attention functions for these models.
NO_PACKED_ATTENTION = {"gemma2", "falcon", "gptj", "bloom", "gpt_oss"}
CPU = torch.device("cpu")
LLAMA4 = {
    **FIELDS["qwen3_moe"],
    "intermediate_size_mlp": 64,
    "num_local_experts": 4,
    "attention_chunk_size": 8,
    "moe_layers": [1],
}


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3))
@example([[1, 2], [3]])
@example([[4], [1, 3], [2, 2]])
def test_documents_are_those_of_the_positions(documents: list[list[int]]) -> None:
    length = max(map(sum, documents))
    rows = [[*lengths, *[1] * (length - sum(lengths))] for lengths in documents]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    facts = RowFacts({"input_ids": torch.zeros_like(positions), "position_ids": positions})
    flat = [n for row in rows for n in row]
    assert facts.shape == (len(rows), length)
    assert facts.document_lengths == tuple(flat)
    assert facts.is_packed == (len(flat) > len(rows))
    assert facts.num_labels is None
    assert torch.equal(facts.starts(), positions == 0)
    told: dict[str, Any] = facts.flash_arguments(CPU)
    bounds = [sum(flat[:index]) for index in range(len(flat) + 1)]
    assert told["cu_seq_lens_q"].tolist() == told["cu_seq_lens_k"].tolist() == bounds
    assert told["cu_seq_lens_q"].dtype == torch.int32
    assert told["max_length_q"] == told["max_length_k"] == max(flat)


@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        (None, (4, 4)),
        ([[1, 1, 1, 1], [1, 1, 0, 0]], (4, 4)),
        ([[1, 1, 1, 1], [0, 1, 1, 1]], None),
        ([[1, 1, 1, 1], [1, 0, 1, 1]], None),
        ([[1, 1, 1, 1], [0, 0, 0, 0]], None),
        ([[[1, 1, 1, 1]]], None),
    ],
)
def test_padding_on_the_right_leaves_one_document_a_row(mask: Any, lengths: Any) -> None:
    rows = {"input_ids": torch.zeros(2, 4, dtype=torch.long)}
    given_ = rows | ({} if mask is None else {"attention_mask": torch.tensor(mask)})
    facts = RowFacts(given_)
    assert (facts.document_lengths, facts.is_packed) == (lengths, False)
    if mask is None:
        assert facts.starts().tolist() == [[True, False, False, False]] * 2
    both = RowFacts({**given_, "position_ids": torch.arange(4).expand(2, 4)})
    assert both.document_lengths == ((4, 4) if mask is None else None), "beside a mask positions are not asked"
    other = RowFacts({**rows, "position_ids": torch.zeros(3, 2, 4)})
    assert other.document_lengths is None


def test_labels_are_counted_as_the_loss_counts_them() -> None:
    labels = torch.tensor([[5, 6, -100, 8], [-100, -100, -100, 3]])
    assert RowFacts({"input_ids": labels, "labels": labels}).num_labels == 3
    assert RowFacts({"input_ids": labels, "labels": [1]}).num_labels is None


def test_a_collators_batch_is_counted_once_it_is_rows() -> None:
    rows = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "name": "a"}
    counted = Counting(lambda given_: given_)(rows)  # type: ignore[arg-type, return-value]
    assert counted.keys() == {"input_ids", "name", ROW_FACTS}
    assert isinstance(counted[ROW_FACTS], RowFacts)
    for other in ({"input_ids": torch.zeros(3)}, {"pixels": torch.zeros(2, 3)}, {"input_ids": [1]}):
        assert Counting(lambda given_: given_)(other) == other  # type: ignore[arg-type, return-value]


def test_uploads_do_not_wait_where_the_driver_fetches_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Any] = []
    monkeypatch.setattr(row_facts, "_PINNING", ("meta",))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    values = torch.arange(3)
    assert uploaded(values, CPU) is values
    assert pinned == []
    assert uploaded(values, torch.device("meta")).device.type == "meta"
    assert len(pinned) == 1
    assert cumulative((2, 3), CPU).tolist() == [0, 2, 5]


# ── What an attention is told ────────────────────────────────────────────────────────────────────────────────────────

POSITIONS = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
LENGTHS = {"cu_seq_lens_q": [0, 3, 5, 6, 10], "cu_seq_lens_k": [0, 3, 5, 6, 10], "max_length_q": 4, "max_length_k": 4}


def told(given_: dict[str, Any], attention: str, *, knows: bool = False) -> dict[str, Any]:
    """The values added to the inputs, as plain numbers."""
    facts = RowFacts({"input_ids": POSITIONS, "position_ids": POSITIONS}) if knows else None
    found = with_document_lengths(dict(given_), attention, facts)
    added = {name: value for name, value in found.items() if name not in given_}
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in added.items()}


@pytest.mark.parametrize("knows", [True, False])
def test_flash_attention_is_told_of_all_documents(knows: bool) -> None:
    rows = {"input_ids": POSITIONS, "position_ids": POSITIONS}
    assert told(rows, "flash_attention_2", knows=knows) == LENGTHS
    assert told(rows, "sdpa", knows=knows) == told(rows, "eager", knows=knows) == {}
    assert told({**rows, "cu_seq_lens_q": 3}, "flash_attention_2", knows=knows) == {}
    assert told({**rows, "attention_mask": POSITIONS}, "flash_attention_2", knows=knows) == {}
    assert told({"input_ids": POSITIONS}, "flash_attention_2") == {}
    one = {name: tensor[:1] for name, tensor in rows.items()}
    assert told(one, "flash_attention_2") == {}, "of a single row transformers finds them itself"
    found = with_document_lengths(rows, "flash_attention_2")
    assert found["cu_seq_lens_q"].dtype == torch.int32
    assert told({"inputs_embeds": POSITIONS, "position_ids": POSITIONS[:1]}, "flash_attention_2", knows=True) == {}


def test_packed_attention_is_told_by_its_mask() -> None:
    facts = RowFacts({"input_ids": POSITIONS, "position_ids": POSITIONS})
    mask = with_document_lengths({"input_ids": POSITIONS}, "sdpa_packed", facts)["attention_mask"]
    assert mask.shape == POSITIONS.shape
    assert mask.all()
    assert told({"input_ids": POSITIONS}, "sdpa_packed") == {}
    unknown = RowFacts({"input_ids": POSITIONS, "attention_mask": POSITIONS})
    assert unknown.document_lengths is None
    assert with_document_lengths({"input_ids": POSITIONS}, "sdpa_packed", unknown) == {"input_ids": POSITIONS}


@pytest.mark.parametrize(
    "architecture", [*(name for name in FIELDS if name not in NO_PACKED_ATTENTION), "llama4_text"]
)
def test_known_documents_do_not_see_each_other_in_any_architecture(architecture: str) -> None:
    """GPT-2 and OPT reshape the mask that they get; Llama 4's chunks restart in every document."""
    config = CONFIG_MAPPING[architecture](**(LLAMA4 if architecture == "llama4_text" else FIELDS[architecture]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=register_packed_attention()).eval()
    add_fast_lm_head(model)
    ids = torch.randint(10, 60, (2, 32), generator=torch.Generator().manual_seed(0))
    documents = [(0, 0, 9), (0, 9, 23), (0, 23, 32), (1, 0, 20), (1, 20, 32)]
    positions, labels = torch.empty_like(ids), ids.clone()
    total, count = 0.0, 0
    for row, begin, end in documents:
        positions[row, begin:end], labels[row, begin] = torch.arange(end - begin), -100
        alone = ids[row : row + 1, begin:end]
        logits = model(input_ids=alone).logits[0, :-1].float()
        total += float(nn.functional.cross_entropy(logits, alone[0, 1:], reduction="sum").detach())
        count += end - begin - 1
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    with torch.no_grad():
        together = model(**batch, fast_lm_head=True, **{ROW_FACTS: RowFacts(batch)}).loss
    assert float(together) == pytest.approx(total / count, rel=2e-6)


@pytest.mark.parametrize(
    ("sizes", "is_served"),
    [
        ({"head_dim": 256}, True), ({"head_dim": 264}, False), ({"head_dim": 60}, False), ({"head_dim": 64}, True),
        ({"hidden_size": 1024, "num_attention_heads": 4}, True),
        ({"hidden_size": 1056, "num_attention_heads": 4}, False), ({}, True),
    ],
)  # fmt: skip
def test_head_sizes_that_flash_attention_serves(sizes: dict[str, int], is_served: bool) -> None:
    class Remote:
        """A configuration from outside transformers."""

        def get_text_config(self) -> Any:
            return self

    config: Any = Remote()
    vars(config).update(sizes)
    device = Device("cuda", "H100", capability=(9, 0), flash=("flash_attention_2",))
    chosen = resolve_attention(None, device=device, dtype=torch.bfloat16, packing=False, model_config=config)
    assert (chosen == "flash_attention_2") == is_served


@pytest.mark.slow
def test_a_compiled_model_uploads_without_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_facts, "_PINNING", frozenset({"cpu"}))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pytest.fail("pinned inside the graph"))
    compiled = torch.compile(lambda values: row_facts.uploaded(values + 1, torch.device("cpu")), backend="eager")
    assert compiled(torch.arange(3)).tolist() == [1, 2, 3]
