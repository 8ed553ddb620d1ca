"""The lean loss piece by piece: which head, which factor, which tokens count, and which cases take another path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from accel_scale.errors import ConfigError
from accel_scale.modeling.packing.row_facts import ROW_FACTS, Counting, RowFacts
from accel_scale.optimization import head_loss as head_loss_module
from accel_scale.optimization.fast_loss import (
    FastLossMixin,
    add_fast_lm_head,
    language_model_loss,
    tell_zero3,
)
from accel_scale.optimization.head_loss import head_loss, head_transform, logits_loss
from accel_scale.optimization.loss import at_least_one, default_chunk_size, on_device
from accel_scale.optimization.router_loss import RouterLoss, router_coefficient

CPU = torch.device("cpu")
IDS = torch.randint(1, 40, (2, 9), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(IDS % 3 == 0, -100)


def model(**fields: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=40, num_hidden_layers=1, pad_token_id=0, **sizes, **fields)
    return LlamaForCausalLM(config)


def summed(made: Any, labels: torch.Tensor) -> torch.Tensor:
    logits = made(input_ids=IDS, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


# ── Which head ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, 1.0)),
        ({"logit_scale": 0.5}, (None, 0.5)),
        ({"output_multiplier": 3.0}, (None, 3.0)),
        ({"lm_head_multiplier": 0.25}, (None, 0.25)),
        ({"logit_scale": None, "lm_head_multiplier": 2.0}, (None, 2.0)),
        ({"logit_scale": 0.5, "output_multiplier": 3.0, "logits_scaling": 4.0}, (None, 0.5)),
        ({"logits_scaling": 4.0}, (None, 0.25)),
        ({"logits_scaling": 4.0, "model_type": "hyperclovax"}, (None, 4.0)),
        ({"logit_scale": 0.0}, (None, 0.0)),
        ({"final_logit_softcapping": 30.0, "logit_scale": 2.0}, (30.0, 2.0)),
    ],
)
def test_factors_and_caps_by_the_names_of_configurations(fields: dict[str, Any], expected: tuple[Any, float]) -> None:
    text = SimpleNamespace(**{"model_type": "llama", **fields})
    assert head_transform(SimpleNamespace(get_text_config=lambda: text)) == expected


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("num_items", [None, 7, torch.tensor(7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_from_logits_is_torchs_own(shift: bool, num_items: Any, dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(2, 9, 40, generator=torch.Generator().manual_seed(1))).to(dtype).requires_grad_()
    used, labels = (logits[:, :-1], LABELS[:, 1:]) if shift else (logits, LABELS)
    flat, wanted = used.float().flatten(0, 1), labels.flatten()
    expected = F.cross_entropy(flat, wanted, reduction="sum") / (
        7 if num_items is not None else (wanted != -100).sum()
    )
    loss, correct = logits_loss(logits, LABELS, num_items=num_items, shift=shift, return_num_correct=True)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert correct.item() == sum(int(a == b) for a, b in zip(flat.argmax(-1), wanted, strict=True))
    (ours,), (theirs,) = (torch.autograd.grad(one, logits, retain_graph=True) for one in (loss, expected))
    torch.testing.assert_close(ours, theirs)
    assert logits_loss(logits, LABELS, shift=shift, return_num_correct=False).ndim == 0
    nothing = logits_loss(logits, torch.full_like(LABELS, -100), shift=shift, return_num_correct=False)
    assert nothing.item() == 0
    guessed = logits_loss(100 * F.one_hot(IDS.roll(-1, 1), 40).float(), IDS, return_num_correct=True)
    assert guessed[1].item() == 2 * 8


def test_counts_for_a_division() -> None:
    assert at_least_one(0, CPU) == at_least_one(0.5, CPU) == 1
    assert at_least_one(torch.tensor(0), CPU).item() == 1
    assert at_least_one(torch.tensor(5), CPU).item() == at_least_one(5, CPU) == 5
    placed = on_device(5, torch.device("meta"))
    assert (placed.device.type, placed.dtype, placed.shape) == ("meta", torch.long, ())
    assert on_device(5, CPU).item() == on_device(torch.tensor(5), CPU).item() == 5


def test_long_rows_take_smaller_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, mps = torch.device("cpu"), torch.device("mps")
    assert default_chunk_size(1024, mps, is_trained=False, long_rows=True) == 2**16
    for long_rows in (False, True):
        assert default_chunk_size(1024, cpu, is_trained=True, long_rows=long_rows) == 4096
    assert default_chunk_size(60_000, cpu, is_trained=True) == 69
    sizes: list[Any] = []
    monkeypatch.setattr(
        head_loss_module, "chunked_cross_entropy", lambda *_, **given: sizes.append(given["chunk_size"])
    )
    made = model()
    hidden = torch.zeros(1, 2, 16, device="meta")
    made.get_output_embeddings().to("meta")
    for is_long in (None, False, True):
        if is_long is not None:
            made._has_long_rows = is_long
        head_loss(made, hidden, LABELS)
    assert sizes == [2**28 // 40, 2**28 // 40, 2**26 // 40]


@pytest.mark.parametrize(("gib", "share"), [(15, 1.0), (80, 0.2)])
def test_chunks_follow_the_memory_that_a_run_has_of_its_card(monkeypatch, gib, share):
    card = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
    cuda = torch.device("cuda")
    assert default_chunk_size(2**17, cuda, is_trained=False) == 512  # 2**26 logits at once
    assert default_chunk_size(2**17, cuda, is_trained=True) == 2048


# ── The forward of the model ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("from_logits", [True, False])
def test_a_model_returns_its_loss_when_it_is_asked_to(from_logits: bool) -> None:
    made = model()
    plain = made(input_ids=IDS).logits
    expected = summed(made, LABELS)
    count = int((LABELS[:, 1:] != -100).sum())
    add_fast_lm_head(made, from_logits=from_logits)
    forward = made.forward
    add_fast_lm_head(made, from_logits=from_logits)
    assert made.forward is forward, "twice is once"
    asked = {"input_ids": IDS, "labels": LABELS, "fast_lm_head": True}
    output = made(**asked)
    assert output.loss.item() == pytest.approx(expected.item() / count, rel=1e-5)
    assert (output.num_correct, output.aux_loss) == (None, None)
    assert made(**asked, num_items_in_batch=5).loss.item() == pytest.approx(expected.item() / 5, rel=1e-5)
    correct = (plain[:, :-1].argmax(-1) == LABELS[:, 1:]).sum()
    assert made(**asked, with_accuracy=True).num_correct == correct
    shifted = F.pad(LABELS[:, 1:], (0, 1), value=-100)
    part = made(input_ids=IDS, shift_labels=shifted, fast_lm_head=True)
    assert part.loss.item() == pytest.approx(output.loss.item(), rel=1e-6)
    assert torch.equal(made(input_ids=IDS).logits, plain), "unasked it is the model's own"
    assert made(input_ids=IDS).past_key_values is not None
    facts = RowFacts({"input_ids": IDS, "labels": LABELS})
    assert made(**asked, **{ROW_FACTS: facts}).loss.item() == pytest.approx(output.loss.item(), rel=1e-6)
    facts.num_labels -= 1  # type: ignore[operator]
    assert made(**asked, **{ROW_FACTS: facts}).loss.isnan() == (not from_logits), "a wrong count is no loss"


def test_no_cache_is_kept_beside_a_loss() -> None:
    made, seen = model(), []
    backbone = made.model.forward
    made.model.forward = lambda *args, **kwargs: seen.append(kwargs["use_cache"]) or backbone(*args, **kwargs)
    add_fast_lm_head(made)
    language_model_loss(made, {"input_ids": IDS, "labels": LABELS, "use_cache": True}, 1)
    assert seen == [False]


@pytest.mark.parametrize("from_logits", [True, False])
def test_a_routers_loss_is_handed_on_where_it_is_wanted(from_logits: bool) -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING["mixtral"](
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, pad_token_id=0, output_router_logits=False,
    )  # fmt: skip
    made = AutoModelForCausalLM.from_config(config).eval()
    own = made(input_ids=IDS, labels=IDS, output_router_logits=True, use_cache=False)
    add_fast_lm_head(made, from_logits=from_logits)
    asked = {"input_ids": IDS, "labels": IDS, "fast_lm_head": True}
    assert made(**asked).aux_loss is None
    output = made(**asked, router_loss=True, with_accuracy=True)
    assert output.aux_loss.item() == pytest.approx(own.aux_loss.item(), rel=1e-5)
    assert output.loss.item() == pytest.approx(
        (own.loss - config.router_aux_loss_coef * own.aux_loss).item(), rel=1e-5
    )
    assert output.num_correct.ndim == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({"output_router_logits": True, "router_aux_loss_coef": 0.02}, 0.02),
        ({"output_router_logits": True, "aux_loss_coef": 0.03}, 0.03),
        ({"output_router_logits": True, "router_aux_loss_coef": None, "aux_loss_coef": 0.03}, 0.03),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.0, "aux_loss_coef": 0.03}, 0.0),
        ({"output_router_logits": True, "ffn_config": SimpleNamespace(moe_loss_weight=0.05)}, 0.05),
        ({"output_router_logits": True}, 0.0),
        ({"output_router_logits": False, "router_aux_loss_coef": 0.02}, 0.0),
        ({"router_aux_loss_coef": 0.02}, 0.0),
    ],
)
def test_what_a_configuration_asks_of_its_router(text: dict[str, Any], expected: float) -> None:
    config: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**text))
    assert router_coefficient(config) == expected
    assert (RouterLoss.of(None, config) is None) == (expected == 0.0)


def test_a_routers_loss_in_the_log_is_the_mean_over_ranks() -> None:
    asked: list[Any] = []

    def reduce(value: torch.Tensor, how: str) -> torch.Tensor:
        asked.append((float(value), how))
        return value / 2

    router = RouterLoss(SimpleNamespace(num_processes=2, device="cpu", reduce=reduce), 0.1)
    added = router.weighted(torch.tensor(4.0, requires_grad=True), 1)
    assert added.requires_grad
    router.weighted(torch.tensor(8.0), 1)
    assert router.mean() == 3.0
    assert asked == [(6.0, "mean")]


def test_zero_3_is_told_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed
    from transformers import integrations

    told: list[Any] = []
    monkeypatch.setattr(deepspeed.zero, "register_external_parameter", lambda *given: told.append(given))
    made = model()
    tell_zero3(made)
    assert told == []
    monkeypatch.setattr(integrations, "is_deepspeed_zero3_enabled", lambda: True)
    tell_zero3(made)
    assert [(one is made, weight is made.lm_head.weight) for one, weight in told] == [(True, True)]


# ── The trainer ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Below:
    """The parts of TRL's trainer that the mixin uses."""

    def __init__(self, *, ranks: int = 1, tp: int = 1, smoother: Any = None, compiled: bool = False, steps: int = 2):
        self.model, self._tp_size = model(), tp
        self.args = SimpleNamespace(loss_type="nll", torch_compile=compiled, average_tokens_across_devices=True)
        self.accelerator = SimpleNamespace(
            parallelism_config=None, num_processes=ranks, sync_gradients=True, device=CPU, reduced=[],
            gather=lambda values: values.repeat(ranks, *[1] * (values.ndim - 1)),
        )  # fmt: skip
        self.accelerator.reduce = lambda value, reduction: (self.accelerator.reduced.append(reduction), value * ranks)[
            1
        ]
        self.label_smoother, self.compute_loss_func, self._is_vision_dataset = smoother, None, False
        self.aux_loss_enabled, self.router_aux_loss_coef, self.current_gradient_accumulation_steps = False, 0.5, steps
        self.data_collator, self._total_train_tokens, self.logged = dict, 0, []
        self._metrics: dict[str, Any] = {
            mode: {"mean_token_accuracy": [], "aux_loss": []} for mode in ("train", "eval")
        }

    def get_tp_size(self) -> int:
        return self._tp_size

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return "their own", dict(inputs), return_outputs, num_items_in_batch

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self.logged.append((logs, start_time))


class Lean(FastLossMixin, Below):
    pass


BATCH = {"input_ids": IDS, "labels": LABELS, "attention_mask": torch.ones_like(IDS)}
NUM_LABELS = int((LABELS[:, 1:] != -100).sum())


@pytest.mark.parametrize(("ranks", "tp", "factor"), [(1, 1, 1), (4, 1, 4), (4, 2, 2)])
@pytest.mark.parametrize("averages", [True, False])
def test_a_mean_over_ranks_is_undone_for_tokens_of_all_ranks(ranks: int, tp: int, factor: int, averages: bool) -> None:
    trainer: Any = Lean(ranks=ranks, tp=tp)
    trainer.args.average_tokens_across_devices = averages
    expected = summed(trainer.model, LABELS).item()
    loss = trainer.compute_loss(trainer.model, dict(BATCH), num_items_in_batch=torch.tensor(50))
    assert loss.item() == pytest.approx((factor if averages else 1) * expected / 50, rel=1e-5)
    alone = trainer.compute_loss(trainer.model, dict(BATCH))
    assert alone.item() == pytest.approx(expected / NUM_LABELS, rel=1e-5), "without a count: its own mean"


def test_what_it_does_not_cover_goes_to_trl_without_our_facts() -> None:
    trainer: Any = Lean()
    given = {**BATCH, ROW_FACTS: "facts"}
    kept = {**BATCH}
    assert trainer.compute_loss("m", given, True, 3) == ("their own", kept, True, 3)
    shifted = {**given, "shift_labels": LABELS}
    assert trainer.compute_loss("m", shifted)[0] == "their own"
    smooth: Any = Lean(smoother="set")
    assert smooth.compute_loss("m", given, num_items_in_batch=4) == ("their own", kept, False, 4)
    assert smooth.data_collator is dict
    assert isinstance(trainer.data_collator, Counting)
    assert Lean(compiled=True).data_collator is dict, "a graph for each number of labels"


def test_a_loss_that_must_come_from_logits_is_refused_where_trl_has_its_own() -> None:
    class FromLogits(Lean):
        loss_from_logits = True

    with pytest.raises(ConfigError, match="LlamaForCausalLM's loss must come from its own logits"):
        FromLogits(smoother="set")
    assert FromLogits().model._loss_from_logits
    assert not Lean().model._loss_from_logits


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("logs_accuracy", [True, False])
def test_tokens_and_accuracy_are_counted(is_training: bool, logs_accuracy: bool) -> None:
    trainer: Any = Lean(ranks=2)
    trainer.log_token_accuracy = logs_accuracy
    trainer.model.train(is_training)
    mode = "train" if is_training else "eval"
    predicted = trainer.model(input_ids=IDS).logits[:, :-1].argmax(-1)
    correct = int((predicted == LABELS[:, 1:]).sum())
    padded = {**BATCH, "attention_mask": torch.ones_like(IDS).tril(12)}
    trainer.accelerator.sync_gradients = False
    trainer.compute_loss(trainer.model, dict(padded), num_items_in_batch=5)
    assert trainer._total_train_tokens == 0
    trainer.accelerator.sync_gradients = True
    trainer.compute_loss(
        trainer.model, {k: v for k, v in BATCH.items() if k != "attention_mask"}, num_items_in_batch=5
    )
    counted = 2 * 2 * 18 if is_training else 0
    assert int(trainer._total_train_tokens) == counted, "of both micro-batches and both ranks"
    assert trainer.accelerator.reduced == (["sum"] if is_training else [])
    accuracy = trainer._metrics[mode]["mean_token_accuracy"]
    expected = [pytest.approx(correct / NUM_LABELS)] * 2 if logs_accuracy or not is_training else []
    assert accuracy == expected
    trainer.log({"loss": 1.0}, 3.0)
    assert trainer._metrics[mode]["num_tokens"] == [counted]
    assert trainer.logged == [({"loss": 1.0}, 3.0)]
    trainer.compute_loss(trainer.model, {**BATCH, "labels": torch.full_like(IDS, -100)})
    assert accuracy == (expected if not expected else [*expected, 0.0])
    other: Any = Lean()
    other.log({})
    assert "num_tokens" not in other._metrics["train"]


def test_ranks_that_read_the_same_rows_count_them_once() -> None:
    for tp, sp, counted in ((1, 1, 72), (2, 1, 36), (1, 4, 18), (2, 2, 18)):
        trainer: Any = Lean(ranks=4, tp=tp)
        trainer.sp_size = sp
        trainer.compute_loss(trainer.model, dict(BATCH), num_items_in_batch=5)
        assert int(trainer._total_train_tokens) == counted, (tp, sp)
    alone: Any = Lean()
    for _ in range(3):
        alone.compute_loss(alone.model, dict(BATCH), num_items_in_batch=5)
    assert int(alone._total_train_tokens) == 54
    assert alone.accelerator.reduced == []


@pytest.mark.parametrize(("num_items", "factor"), [(50, 0.5 / 2), (None, 0.5)])
def test_a_routers_loss_is_a_mean_over_micro_batches(num_items: Any, factor: float) -> None:
    trainer: Any = Lean(ranks=2)
    trainer.aux_loss_enabled = True
    aux = torch.tensor(3.0, requires_grad=True)
    output = SimpleNamespace(loss=torch.tensor(1.0), num_correct=None, aux_loss=aux)
    seen: dict[str, Any] = {}

    def called(**given: Any) -> Any:
        seen.update(given)
        return output

    loss = trainer.compute_loss(called, dict(BATCH), num_items_in_batch=num_items)
    assert loss.item() == pytest.approx((2.0 if num_items else 1.0) + 3.0 * factor)
    assert seen["router_loss"]
    assert seen["fast_lm_head"]
    assert trainer._metrics["train"]["aux_loss"] == [3.0]
