"""Consequences of the twin's verdicts: another attention, a flag to name, or a check that is skipped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from accel_scale.errors import ConfigError
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy
from accel_scale.start_check import check, isolation
from accel_scale.start_check.plan import AttentionRefused, Crashed, PlannedRun, Verdict

Judge = Callable[[Callable[[PlannedRun], Any]], None]
REFUSED = AttentionRefused("documents see each other.", place="--attn_implementation", fix="train something else.")
CRASHED = Crashed("the twin fails: shapes differ.", place="--attn_implementation", fix=None)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Replace the twin with a function of the run: what it raises or returns is the verdict."""

    def use(verdict_of: Callable[[PlannedRun], Any]) -> None:
        def verdict(run: PlannedRun) -> Any:
            found = verdict_of(run)
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(check, "_verdict", verdict)

    return use


def run(**changes: Any) -> PlannedRun:
    usual = {"config": LlamaConfig(), "attention": "flash_attention_2", "rows": "packed"}
    return PlannedRun(**{**usual, "policy": CheckpointingPolicy("full"), **changes})


def accepted_with(*names: str, **more: Any) -> Callable[[PlannedRun], Any]:
    def verdict_of(planned: PlannedRun) -> Any:
        is_good = planned.attention in names and all(getattr(planned, k) == v for k, v in more.items())
        return Verdict(planned.attention, notes=("seen",)) if is_good else REFUSED

    return verdict_of


def test_what_is_accepted_is_returned_as_it_is(judge: Judge) -> None:
    judge(accepted_with("flash_attention_2"))
    assert check.check_start(run()) == Verdict("flash_attention_2", notes=("seen",))


def test_the_first_other_attention_that_does_is_taken(judge: Judge) -> None:
    for names, taken in ((("sdpa", "eager"), "sdpa"), (("eager",), "eager")):
        judge(accepted_with(*names, rows="packed"))
        found = check.check_start(run())
        assert found.attention == taken
        assert found.notes == (f"attention is {taken}: documents see each other.", "seen")


@pytest.mark.parametrize("other", ["sdpa", "eager"])
def test_one_that_was_asked_for_is_not_replaced_but_another_is_named(judge: Judge, other: str) -> None:
    judge(accepted_with(other, rows="packed"))
    with pytest.raises(ConfigError, match="documents see each other") as refused:
        check.check_start(run(attention_given=True))
    assert refused.value.fix == f"use --attn_implementation {other}."
    assert refused.value.place == "--attn_implementation"


@pytest.mark.parametrize(("rows", "unpacked"), [("packed", "padded"), ("lanes", "stream")])
def test_rows_that_no_attention_keeps_apart_are_not_to_be_packed(judge: Judge, rows: str, unpacked: str) -> None:
    judge(accepted_with("flash_attention_2", rows=unpacked))
    with pytest.raises(ConfigError) as refused:
        check.check_start(run(rows=rows, packing_flag="--isolate_documents false"))
    assert refused.value.fix == "use --isolate_documents false, which switches packing off."


def test_where_nothing_does_the_refusal_has_a_fix(judge: Judge) -> None:
    judge(lambda planned: REFUSED)
    with pytest.raises(ConfigError) as refused:
        check.check_start(run(rows="padded"))
    assert refused.value.fix == "train something else."
    judge(lambda planned: AttentionRefused("no.", place="--x", fix=None))
    with pytest.raises(ConfigError) as refused:
        check.check_start(run(rows="padded"))
    assert (refused.value.place, refused.value.fix) == ("--x", "train another model.")


def test_another_problem_of_the_attention_that_would_be_taken_is_the_problem(judge: Judge) -> None:
    other = ConfigError("the loss differs.", place="--loss", fix="x.")
    judge(lambda planned: REFUSED if planned.attention == "flash_attention_2" else other)
    with pytest.raises(ConfigError, match="the loss differs"):
        check.check_start(run())
    # If it would only be named, it still is: the attention is not the reason for that refusal.
    with pytest.raises(ConfigError, match="documents see each other") as refused:
        check.check_start(run(attention_given=True))
    assert refused.value.fix == "use --attn_implementation sdpa."


def test_a_twin_that_never_runs_is_skipped_unless_adapters_or_the_routers_loss_are_why(judge: Judge) -> None:
    judge(lambda planned: CRASHED)
    found = check.check_start(run(rows="padded"))
    assert found == Verdict("flash_attention_2", notes=("start check: skipped, the twin fails: shapes differ.",))
    adapted = run(rows="padded", adapter=SimpleNamespace(), router_loss=0.1)
    assert check.check_start(adapted).notes == found.notes

    judge(lambda planned: CRASHED if planned.adapter else Verdict("x"))
    with pytest.raises(ConfigError, match="these adapters do not go with the model") as refused:
        check.check_start(adapted)
    assert refused.value.place == "--lora_target_modules"
    judge(lambda planned: Verdict("x") if planned.adapter is None and planned.policy.kind == "none" else CRASHED)
    with pytest.raises(ConfigError, match="these adapters"):
        check.check_start(adapted)

    judge(lambda planned: CRASHED if planned.router_loss else Verdict("x"))
    with pytest.raises(ConfigError, match="the twin fails") as refused:
        check.check_start(adapted)
    assert refused.value.place == "--router_aux_loss_coef"


def test_what_leaks_is_told_from_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small logits are judged absolutely, large ones relatively; earlier tokens are checked before other documents."""
    before, others = torch.tensor([[True, False, False]]), torch.tensor([[False, False, True]])
    logits = torch.tensor([[[0.5], [0.5], [0.5]]])

    def leak(*moved: float, scale: float = 1.0) -> str:
        def model(**inputs: Any) -> Any:
            assert not torch.is_grad_enabled()
            assert set(inputs) == {"input_ids", "use_cache"}
            return SimpleNamespace(logits=scale * logits + torch.tensor(moved)[None, :, None])

        batch: Any = SimpleNamespace(changed={"input_ids": 1, "labels": 2}, before=before, others=others)
        return isolation.find_leak(model, batch, scale * logits)

    assert leak(0, 9, 0) == "none", "the changed tokens themselves"
    assert leak(8e-5, 9, -8e-5) == "none"
    assert leak(2e-4, 9, 0) == "ahead"
    assert leak(0, 9, -2e-4) == "others"
    assert leak(1, 9, 1) == "ahead"
    assert leak(0, 0, 8e-3, scale=200.0) == "none"
    assert leak(0, 0, 2e-2, scale=200.0) == "others"
    assert leak(0, 0, float("nan")) == "others"


def test_documents_that_no_check_can_isolate_are_refused_where_the_twin_is_left_out() -> None:
    from transformers import MambaConfig

    skipped = check._skipped(run(), "too small.")
    assert skipped == Verdict("flash_attention_2", notes=("start check: skipped, too small.",))
    state = run(config=MambaConfig(), packing_flag="--isolate_documents false")
    with pytest.raises(ConfigError, match="isolate_documents false"):
        check._skipped(state, "too small.")
    check._skipped(dataclasses.replace(state, rows="stream"), "too small.")
