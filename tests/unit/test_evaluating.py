"""Losses over ranks: each token counts once, whichever rank has it, and a stage takes labels as they are given."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from accel_scale.modeling.evaluation_mode import evaluating
from accel_scale.modeling.precision import enable_fp16_on_cpu
from accel_scale.optimization.fast_loss import add_fast_lm_head, language_model_loss
from accel_scale.optimization.head_loss import head_loss
from accel_scale.parallel.pipelines.split import split_model, stage_of
from accel_scale.training.evaluation.validation import (
    Evaluation,
    beginning_of,
    evaluate_loss,
    reduce_sum,
    sample_text,
    total_over_ranks,
)


class Ranks:
    """The parts of an `Accelerator` that are used, with known sums of the other ranks."""

    def __init__(self, *others: torch.Tensor) -> None:
        self.others, self.num_processes, self.device = others, 1 + len(others), torch.device("cpu")
        self.autocast, self.asked = nullcontext, []

    def reduce(self, values: torch.Tensor, reduction: str) -> torch.Tensor:
        self.asked.append(reduction)
        assert reduction == "sum"
        return values + sum(self.others)


def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, attention_dropout=0.5,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    add_fast_lm_head(made)
    return made.train()


def batches() -> list[dict[str, torch.Tensor]]:
    """Batches with 9 and 2 labels, one without any, and one whose labels are already shifted."""
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 32, (1, 10), generator=draw) for _ in range(4)]
    few, none = ids[1].clone(), torch.full((1, 10), -100)
    few[0, :8] = -100
    shifted = F.pad(ids[3][:, 1:], (0, 1), value=-100)
    rows = [
        {"input_ids": ids[0], "labels": ids[0]},
        {"input_ids": ids[1], "labels": few},
        {"input_ids": ids[2], "labels": none},
    ]
    return [*rows, {"input_ids": ids[3], "shift_labels": shifted}]  # type: ignore[list-item]


def by_hand(made: Any) -> tuple[float, int]:
    total = count = 0.0
    made.eval()
    for batch in batches():
        with torch.no_grad():
            logits = made(input_ids=batch["input_ids"]).logits[0]
        labels = batch.get("shift_labels")
        labels = F.pad(batch["labels"][0, 1:], (0, 1), value=-100) if labels is None else labels[0]
        total += F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
        count += int((labels != -100).sum())
    made.train()
    return total, int(count)


def test_the_mean_is_over_the_tokens_of_all_batches_and_ranks() -> None:
    made = model()
    total, count = by_hand(made)
    assert count == 9 + 2 + 0 + 9
    alone = evaluate_loss(Ranks(), made, batches())
    assert (alone.loss, alone.num_tokens) == (pytest.approx(total / count, rel=1e-5), count)
    assert made.training, "afterwards as before"
    assert all(parameter.grad is None for parameter in made.parameters())
    assert alone.perplexity == pytest.approx(math.exp(alone.loss))
    # A second rank with 30 tokens at 5 nats, and a third with none.
    ranks = Ranks(torch.tensor([150.0, 30.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    together = evaluate_loss(ranks, made, batches())
    assert together.num_tokens == count + 30
    assert together.loss == pytest.approx((total + 150) / (count + 30), rel=1e-5)


def test_nothing_to_count_is_not_a_number() -> None:
    nothing = evaluate_loss(Ranks(), model(), [])
    assert math.isnan(nothing.loss)
    assert math.isnan(nothing.perplexity)
    assert nothing.num_tokens == 0
    assert Evaluation(1e6, 1).perplexity == pytest.approx(math.exp(700))


def test_sums_over_ranks() -> None:
    assert total_over_ranks(Ranks(torch.tensor(5), torch.tensor(7)), 3).item() == 15
    alone = Ranks()
    assert total_over_ranks(alone, 3).item() == 3
    values = torch.tensor([1.0, 2.0])
    assert reduce_sum(alone, values) is values
    assert alone.asked == []
    assert reduce_sum(Ranks(torch.tensor([3.0, 4.0])), values).tolist() == [4.0, 6.0]


def test_a_sum_over_ranks_comes_back_to_the_host() -> None:
    class OnCard(torch.Tensor):
        def cpu(self) -> Any:
            return "on the host"

    ranks: Any = SimpleNamespace(num_processes=2, device="cpu", reduce=lambda values, how: values.as_subclass(OnCard))
    assert reduce_sum(ranks, torch.ones(2)) == "on the host"


def test_ranks_that_share_rows_count_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensor-parallel ranks and two stages: each rank gets the same rows, and the first stage has no loss."""
    from accel_scale.parallel import model_parallel

    asked: list[Any] = []
    shared = SimpleNamespace(
        layout=SimpleNamespace(tp=2, model_ranks=4),
        local=lambda batch: asked.append(set(batch)) or {**batch, "labels": batch["labels"][:, :4]},
        evaluate=lambda made, batch: None,
    )
    monkeypatch.setattr(model_parallel, "model_parallel_of", lambda accelerator: shared)
    others = torch.tensor([40.0, 10.0], dtype=torch.float64)
    row = {"input_ids": torch.arange(6)[None], "labels": torch.arange(6)[None], "names": ["a"]}
    found = evaluate_loss(Ranks(others), torch.nn.Linear(1, 1), [row])
    assert (found.loss, found.num_tokens) == (4.0, 5)
    assert asked == [{"input_ids", "labels"}]
    shared.evaluate = lambda made, batch: torch.tensor(6.0)
    found = evaluate_loss(Ranks(others), torch.nn.Linear(1, 1), [row])
    assert (found.loss, found.num_tokens) == (pytest.approx((6 + 40) / (3 + 10)), 6)
    assert total_over_ranks(Ranks(torch.tensor(5)), 3).item() == 8 // 4


def test_the_loss_takes_what_it_needs_and_the_routers_part(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def made(**inputs: Any) -> Any:
        seen.update(inputs)
        return SimpleNamespace(loss=torch.tensor(2.0), aux_loss=torch.tensor(8.0))

    router: Any = SimpleNamespace(weighted=lambda loss, num_micro_batches: 0.25 * loss / num_micro_batches)
    batch = {"input_ids": 1, "labels": 2, "position_ids": 3, "row_ids": 4}
    assert language_model_loss(made, batch, 7).item() == 2.0
    assert seen == {
        "input_ids": 1, "labels": 2, "position_ids": 3, "num_items_in_batch": 7, "fast_lm_head": True,
        "router_loss": False,
    }  # fmt: skip
    assert language_model_loss(made, batch, 7, router=router).item() == 4.0
    assert seen["router_loss"]
    assert language_model_loss(made, batch, 7, router=router, num_micro_batches=4).item() == 2.5


class Words:
    """A tokenizer of numbers; 0 is a special token."""

    pad_token_id: int | None = None
    eos_token_id: int | None = 5

    def __call__(self, text: str, *, add_special_tokens: bool, return_tensors: str) -> dict[str, torch.Tensor]:
        assert (add_special_tokens, return_tensors) == (False, "pt")
        return {"input_ids": torch.tensor([[int(word) for word in text.split()]], dtype=torch.long)}

    def decode(self, ids: torch.Tensor, *, skip_special_tokens: bool) -> str:
        return " ".join(str(one) for one in ids.tolist() if one or not skip_special_tokens)


def test_the_beginning_of_the_first_row_is_shown() -> None:
    rows = [{"input_ids": torch.tensor([[0, *range(1, 30)], [9] * 30])}]
    assert beginning_of(rows, Words(), num_tokens=4) == "1 2 3"
    assert beginning_of(rows, Words()) == " ".join(map(str, range(1, 12)))
    assert beginning_of([], Words()) == beginning_of(None, Words()) == ""


def test_a_sample_is_drawn_alike_each_time_and_in_step_where_weights_are_shared() -> None:
    made, seen = model(), []
    generate = made.generate

    def watched(**settings: Any) -> torch.Tensor:
        seen.append((settings, made.training))
        return generate(**settings)

    made.generate = watched
    torch.manual_seed(3)
    before = torch.get_rng_state()
    texts = [sample_text(Ranks(), made, Words(), "7 8", max_new_tokens=9, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert texts[0] == texts[1] != texts[2]
    assert made.training
    settings, was_training = seen[0]
    assert not was_training
    assert settings.pop("input_ids").tolist() == [[7, 8]]
    assert settings.pop("attention_mask").tolist() == [[1, 1]]
    assert settings == {
        "max_new_tokens": 9, "do_sample": True, "temperature": 0.8, "top_k": 50, "use_cache": True,
        "synced_gpus": False, "pad_token_id": 5,
    }  # fmt: skip
    numbers = [int(word) for word in texts[0].split()]
    assert 0 < len(numbers) <= 9

    class Padded(Words):
        pad_token_id = 0

    sample_text(Ranks(), made, Padded(), "", max_new_tokens=1)
    assert seen[-1][0]["input_ids"].tolist() == [[5]], "nothing to begin with: the end of a text"
    assert seen[-1][0]["pad_token_id"] == 0
    # Ranks with whole weights generate independently; those with parts of them wait for each other.
    several = Ranks(torch.zeros(2))
    made.generate = lambda **settings: seen.append((settings, None)) or torch.tensor([[7, 3, 0], [7, 4, 0]])
    assert sample_text(several, made, Words(), "7", max_new_tokens=1) == "3", "without the token that ends it"
    assert seen[-1][0]["synced_gpus"] is False
    for mark in ("ds_id", "device_mesh"):
        parameter = next(made.parameters())
        setattr(parameter, mark, 1)
        sample_text(several, made, Words(), "7", max_new_tokens=1)
        assert seen[-1][0]["synced_gpus"] is True, mark
        sample_text(Ranks(), made, Words(), "7", max_new_tokens=1)
        assert seen[-1][0]["synced_gpus"] is False
        delattr(parameter, mark)


def test_an_empty_prompt_begins_with_a_token_that_there_is() -> None:
    made = model()

    class Endless(Words):
        eos_token_id = None
        pad_token_id = 3

    seen: list[Any] = []
    made.generate = lambda **settings: seen.append(settings["input_ids"].tolist()) or torch.tensor([[0, 9, 8]])
    assert sample_text(Ranks(), made, Endless(), "", max_new_tokens=2) == "9 8", "the prompt is no part of it"
    assert seen == [[[0]]]
    made.generate = lambda **settings: torch.tensor([[7, 6, 5, 4], [1, 1, 1, 1]])
    assert sample_text(Ranks(), made, Words(), "7 6", max_new_tokens=2) == "5 4"


@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize("has_adapter", [True, False])
def test_weights_outside_of_blocks_are_gathered_where_generation_passes_their_hooks_by(
    is_sharded: bool, has_adapter: bool
) -> None:
    from torch.distributed.fsdp import FSDPModule

    calls: list[str] = []

    class Whole(torch.nn.Linear):
        training = True

        def generate(self, **settings: Any) -> torch.Tensor:
            calls.append("generate")
            if self.fails:
                raise KeyError
            return torch.tensor([[7, 6]])

        fails = False

    class Sharded(Whole, FSDPModule):  # type: ignore[misc]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return object.__new__(cls)

        def unshard(self, async_op: bool = False) -> None:
            calls.append("unshard")

        def reshard(self) -> None:
            calls.append("reshard")

    made = (Sharded if is_sharded else Whole)(1, 1)
    if has_adapter:
        made.peft_config = {}
    around = (["unshard"], ["reshard"]) if is_sharded and has_adapter else ([], [])
    sample_text(Ranks(), made, Words(), "7", max_new_tokens=1)
    made.fails = True
    with pytest.raises(KeyError):
        sample_text(Ranks(), made, Words(), "7", max_new_tokens=1)
    assert calls == [*around[0], "generate", *around[1]] * 2


def test_evaluating_has_no_dropout_and_puts_the_mode_back() -> None:
    made = model()
    for training in (True, False):
        made.train(training)
        with evaluating(made):
            assert not made.training
            assert not torch.is_grad_enabled()
        assert made.training is training
    with pytest.raises(KeyError), evaluating(made.train()):
        raise KeyError
    assert made.training


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_the_last_stage_shifts_labels_that_are_not(name: str) -> None:
    """Parts of rows come with labels shifted before the cut; shifted again, they would belong to a later token."""
    made = model().eval()
    ids = torch.arange(12)[None]
    labels = ids if name == "labels" else F.pad(ids[:, 1:], (0, 1), value=-100)
    with torch.no_grad():
        expected = F.cross_entropy(made(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum")
        first, last = split_model(made, [range(1), range(1, 2)], [0, 1])
        stage_of(last).loss, stage_of(last).num_items = head_loss, 2
        assert last(first(ids), **{name: labels}).item() == pytest.approx(expected.item() / 2, rel=1e-5)


def test_fp16_on_a_cpu_scales_as_the_launch_says() -> None:
    from accelerate import Accelerator, GradScalerKwargs
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        settings = GradScalerKwargs(init_scale=8.0, growth_interval=3, growth_factor=4.0, backoff_factor=0.25)
        accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[settings])
        assert enable_fp16_on_cpu(accelerator)
        scaler = accelerator.scaler
        assert scaler.get_scale() == 8.0
        found = (scaler.get_growth_interval(), scaler.get_growth_factor(), scaler.get_backoff_factor())
        assert found == (3, 4.0, 0.25)
        assert not enable_fp16_on_cpu(accelerator), "it is there"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
