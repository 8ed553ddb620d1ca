"""Splitting along sequences: which models and batches can be split, how, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    BloomConfig,
    DeepseekV32Config,
    FalconMambaConfig,
    GPT2Config,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3NextConfig,
)

from accel_scale.errors import ConfigError
from accel_scale.optimization.loss import count_loss_tokens
from accel_scale.parallel.sequence import (
    check_sequence_parallel,
    check_ulysses,
    cut_batch,
    enable_ulysses,
)
from accel_scale.parallel.sequence_attention import document_lengths


def llama(heads: int, keys: int) -> LlamaConfig:
    return LlamaConfig(hidden_size=16 * heads, num_attention_heads=heads, num_key_value_heads=keys)


@pytest.mark.parametrize(
    ("config", "size", "attention"),
    [
        (llama(8, 8), 4, "sdpa"),
        (llama(8, 2), 4, "sdpa_packed"),
        (llama(8, 1), 8, "flash_attention_2"),
        (GPT2Config(n_head=12), 3, "eager"),
        (MistralConfig(sliding_window=16), 8, "sdpa"),
        (BloomConfig(), 1, "eager"),
    ],
)
def test_what_divides_is_accepted(config, size, attention):
    check_sequence_parallel(config, size, 48, attention)


@pytest.mark.parametrize(
    ("config", "size", "length", "attention", "problem", "fix"),
    [
        (llama(8, 8), 3, 48, "sdpa", "8 attention heads cannot be divided among 3", "2, 4, 8"),
        (llama(12, 6), 4, 48, "sdpa", "6 key heads neither divide nor are divided by 4", "use 2, 3, 6, 12"),
        (llama(8, 8), 4, 50, "sdpa", "rows of 50 tokens", "--max_length 52"),
        (llama(8, 8), 4, 48, "flex_attention", "flex_attention attention does not run", "sdpa_packed"),
        (FalconMambaConfig(), 2, 48, "eager", "state or a convolution", "use 1"),
        (Qwen3NextConfig(), 2, 48, "sdpa", "linear_attention", "use 1"),
        (Lfm2Config(num_hidden_layers=2, full_attn_idxs=[1]), 2, 48, "sdpa", "conv", "use 1"),
        (BloomConfig(), 2, 48, "eager", "attention interface", "use 1"),
        (DeepseekV32Config(), 2, 48, "sdpa", "picks its keys", "use 1"),
    ],
)
def test_what_does_not_divide_is_refused(config, size, length, attention, problem, fix):
    with pytest.raises(ConfigError) as caught:
        check_sequence_parallel(config, size, length, attention)
    assert problem in str(caught.value)
    assert fix in str(caught.value)


def test_heads_are_divided_after_tensor_parallelism():
    check_sequence_parallel(llama(8, 4), 4, 48, "sdpa", tp_size=2)
    with pytest.raises(ConfigError, match="2 attention heads on each of 4 tensor-parallel ranks"):
        check_sequence_parallel(llama(8, 4), 4, 48, "sdpa", tp_size=4)


def test_every_label_is_predicted_by_one_part():
    ids = torch.arange(24).view(2, 12)
    labels = ids.clone()
    labels[0, :5] = -100
    position_ids = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, 12)
    parts = [cut_batch({"input_ids": ids, "labels": labels, "position_ids": position_ids}, r, 3) for r in range(3)]
    assert set(parts[0]) == {"input_ids", "position_ids", "shift_labels"}
    assert torch.equal(torch.cat([part["input_ids"] for part in parts], 1), ids)
    assert torch.equal(torch.cat([part["position_ids"] for part in parts], 1), position_ids)
    assert parts[0]["shift_labels"].tolist() == [[-100, -100, -100, -100], [13, 14, 15, 16]]
    assert parts[1]["shift_labels"].tolist() == [[5, 6, 7, 8], [17, 18, 19, 20]]
    assert parts[2]["shift_labels"][:, -1].tolist() == [-100, -100]
    counted = sum(int(count_loss_tokens(part["shift_labels"], shift=False)) for part in parts)
    assert counted == int(count_loss_tokens(labels))


def test_rows_without_positions_get_those_of_the_whole_row():
    part = cut_batch({"input_ids": torch.ones(2, 8, dtype=torch.long)}, 1, 2)
    assert part["position_ids"].tolist() == [[4, 5, 6, 7]] * 2


def test_padding_is_fine_on_the_right_only():
    ids = torch.ones(1, 4, dtype=torch.long)
    assert "attention_mask" not in cut_batch({"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 0]])}, 0, 2)
    with pytest.raises(ConfigError, match="padding in front"):
        cut_batch({"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1, 1]])}, 0, 2)


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ({"input_ids": torch.ones(1, 5, dtype=torch.long)}, "rows of 5 tokens cannot be cut into 2"),
        ({"input_ids": torch.ones(1, 4), "token_type_ids": torch.ones(1, 4)}, "token_type_ids"),
    ],
)
def test_batches_that_cannot_be_cut(batch, problem):
    with pytest.raises(ConfigError, match=problem):
        cut_batch(batch, 0, 2)


def test_weights_of_heads_are_refused():
    class Two:
        def size(self) -> int:
            return 2

    config = GptOssConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=16, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=32, num_local_experts=2, num_experts_per_tok=1, pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="sinks"):
        enable_ulysses(GptOssForCausalLM(config), Two())


def test_lengths_of_documents_in_rows_laid_end_to_end():
    lengths = document_lengths(torch.tensor([[0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 1, 1]]))
    assert lengths["cu_seq_lens_q"].tolist() == [0, 3, 4, 6, 7, 12]
    assert lengths["cu_seq_lens_q"].dtype == torch.int32
    assert lengths["max_length_k"] == 5


class Halved(torch.nn.Module):
    """A model of one table whose results are off by `error` on the parts of a row; this rank has the second half."""

    def __init__(self, error: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.error = torch.nn.Embedding(32, 4), error
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=32))
        self.lengths: list[tuple[int, bool]] = []

    def base_model(self, *, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        assert input_ids.shape == position_ids.shape
        self.lengths.append((input_ids.shape[1], self.training))
        hidden = self.table(input_ids)
        return SimpleNamespace(last_hidden_state=hidden + self.error * (input_ids.shape[1] == 16))


@pytest.mark.parametrize("elsewhere", [0.0, 5e-4, 0.5])
@pytest.mark.parametrize("here", [0.0, 1e-4, 0.5])
def test_a_row_that_any_rank_computes_otherwise_is_refused_on_all(here, elsewhere, monkeypatch) -> None:
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    asked = []

    def all_reduce(worst: torch.Tensor, op: object, group: object = None) -> None:
        asked.append((op, group))
        worst.clamp_(min=elsewhere)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    model = Halved(here).train()
    if max(here, elsewhere) == 0.5:
        with pytest.raises(ConfigError, match=r"Halved does not compute the same on parts of a row: off by \d"):
            check_ulysses(model, group)
    else:
        found = check_ulysses(model, group)
        assert elsewhere <= found < 1e-3
        assert found > 0 or not here
    assert asked == [(torch.distributed.ReduceOp.MAX, group)]
    assert model.lengths == [(16, False), (32, False)]
    assert model.training
