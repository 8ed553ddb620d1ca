"""Preference and reward trainers on their own: references, prompts, groups of answers, figures, trackers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers.integrations import MLflowCallback

from accel_scale.data.loading import LoadedData
from accel_scale.errors import ConfigError
from accel_scale.trainers import grpo_trainer, reference, rewarded_run, sft_trainer
from accel_scale.trainers.tracker_names import NamedMLflowCallback, text_writers, use_tracker_names
from accel_scale.training.guard.learning import NothingLearnt


def bare(kind: type, **fields: Any) -> Any:
    """An instance of a trainer class that has only these attributes."""
    made = kind.__new__(kind)
    vars(made).update(fields)
    return made


# ── References ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("adapters", "before", "fsdp", "num_models"),
    [
        (False, False, False, 2),
        (True, False, False, 1),
        (False, True, False, 1),
        (False, True, True, 2),
        (True, True, True, 1),
    ],
)
def test_a_frozen_copy_is_loaded_as_the_model_where_nothing_else_is_the_reference(
    adapters: bool, before: bool, fsdp: bool, num_models: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []

    def load(run: Any, args: Any) -> str:
        loaded.append(args.model_init_kwargs)
        args.model_init_kwargs = None
        return f"model {len(loaded)}"

    monkeypatch.setattr(reference, "load_run_model", load)
    run: Any = SimpleNamespace(
        settings=SimpleNamespace(trains_adapters=adapters),
        launch=SimpleNamespace(parallel=SimpleNamespace(is_fsdp=fsdp)),
    )
    args: Any = SimpleNamespace(model_init_kwargs={"kind": "told"}, precompute_ref_log_probs=before)
    expected = ("model 1", "model 2" if num_models == 2 else None)
    assert reference.load_with_reference(run, args) == expected
    assert loaded == [{"kind": "told"}] * num_models


@pytest.mark.parametrize("before", [True, False])
def test_a_reference_that_has_spoken_before_training_goes(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_trainer.OwnLossBase, "__init__", lambda self, **given: vars(self).update(given))
    args = SimpleNamespace(precompute_ref_log_probs=before)
    trainer = sft_trainer._ReferenceBase(args=args, ref_model="frozen")
    assert trainer.ref_model == (None if before else "frozen")


def test_an_optimizer_is_kept_for_trainers_that_do_not_take_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_trainer.RecipeTrainerMixin, "__init__", lambda self, **given: vars(self).update(given))
    chosen = (torch.optim.SGD, {"lr": 1.0})
    trainer = sft_trainer.ScaleKTOTrainer(optimizer_cls_and_kwargs=chosen, args=SimpleNamespace(
        precompute_ref_log_probs=False))  # fmt: skip
    assert (trainer.optimizer_cls_and_kwargs, trainer.program) == (chosen, "kto.py")
    assert sft_trainer.ScaleDPOTrainer.program == "dpo.py"


# ── Labelled answers ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fails", [True, False])
def test_what_ranks_gather_of_labelled_answers_is_in_fp32(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[torch.dtype] = []

    def gather(values: torch.Tensor) -> torch.Tensor:
        gathered.append(values.dtype)
        return values * 2

    def compute(self: Any, model: Any, inputs: Any, return_outputs: bool) -> Any:
        for kind in (torch.bfloat16, torch.float32, torch.int64):
            assert self.accelerator.gather_for_metrics(torch.ones(1, dtype=kind)).item() == 2
        if fails:
            raise ValueError("as it is")
        return model, inputs, return_outputs

    monkeypatch.setattr(sft_trainer.KTOTrainer, "_compute_loss", compute)
    trainer = bare(sft_trainer.ScaleKTOTrainer, accelerator=SimpleNamespace(gather_for_metrics=gather))
    if fails:
        with pytest.raises(ValueError, match="as it is"):
            trainer._compute_loss("model", {}, True)
    else:
        assert trainer._compute_loss("model", {}, True) == ("model", {}, True)
    assert gathered == [torch.float32, torch.float32, torch.int64]
    assert trainer.accelerator.gather_for_metrics is gather


def test_figures_are_those_that_the_log_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_trainer.RecipeTrainerMixin, "figures", lambda self: {"losses": [1.0]})
    for kind, logged, name in (
        (sft_trainer.ScaleKTOTrainer, "rewards/margins", "margins"),
        (grpo_trainer.ScaleRLOOTrainer, "reward", "rewards"),
    ):
        state = SimpleNamespace(log_history=[{logged: 0.5}, {"loss": 1.0}, {logged: -0.25}])
        assert bare(kind, state=state).figures() == {"losses": [1.0], name: [0.5, -0.25]}


# ── Rewarded answers ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rows", "batch", "group", "message"),
    [
        (4, 16, 4, None),
        (3, 16, 4, "3 prompts do not fill one batch of 4"),
        (1, None, None, None),
        (1, 7, 8, None),
    ],
)
def test_prompts_fill_a_batch_of_answers(rows: int, batch: int | None, group: int | None, message: str | None) -> None:
    given = {"train_dataset": Dataset.from_dict({"prompt": ["x"] * rows})}
    args = SimpleNamespace(generation_batch_size=batch, num_generations=group)
    trainer = bare(grpo_trainer.ScaleGRPOTrainer, args=args, **given)
    if message is None:
        trainer.refuse_rows()
        trainer.train_dataset = given["train_dataset"].to_iterable_dataset()  # of unknown length
        trainer.refuse_rows()
    else:
        with pytest.raises(ConfigError, match=message):
            trainer.refuse_rows()


@pytest.mark.parametrize(
    ("per_generation", "iterations", "accumulation", "steps"),
    [(8, 1, 4, 2), (8, 3, 4, 6), (None, 1, 4, 1), (6, 1, 4, 1)],
)
def test_steps_that_share_what_was_generated(
    per_generation: int | None, iterations: int, accumulation: int, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    args = SimpleNamespace(
        steps_per_generation=per_generation, num_iterations=iterations, gradient_accumulation_steps=accumulation
    )
    trainer = bare(grpo_trainer.ScaleGRPOTrainer, args=args)
    assert trainer.steps_per_cycle == steps
    for at, is_main in ((0, True), (steps + 1, True), (steps + 1, False)):
        state = SimpleNamespace(global_step=at, is_world_process_zero=is_main)
        grpo_trainer._InStep(trainer).on_train_begin(args, state, None)
        assert trainer._step == at * accumulation
        assert ("generated anew" in capsys.readouterr().out) == (at % steps != 0 and is_main)


@pytest.mark.parametrize(
    ("steps", "alike", "is_refused"),
    [(8, [1.0, 1.0], True), (7, [1.0, 1.0], False), (8, [1.0, 0.75], False), (8, [], False)],
)
def test_answers_that_were_never_rewarded_differently_are_an_error(
    steps: int, alike: list[float], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft_trainer.OwnLossBase, "train", lambda self, *given, **more: (given, more), raising=False)
    history = [{"frac_reward_zero_std": share} for share in alike] + [{"loss": 1.0}]
    state = SimpleNamespace(global_step=steps, log_history=history)
    trainer = bare(grpo_trainer.ScaleGRPOTrainer, state=state, args=SimpleNamespace(num_generations=4))
    if is_refused:
        with pytest.raises(NothingLearnt, match="all 4 answers to each prompt had the same reward"):
            trainer.train()
    else:
        assert trainer.train("from", resume=True) == (("from",), {"resume": True})


@pytest.mark.parametrize("is_training", [True, False])
def test_tokens_of_prompts_and_answers_are_counted_once_they_are_there(
    is_training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = {"prompt_mask": torch.tensor([[0, 1, 1]]), "completion_mask": torch.tensor([[1, 1, 1, 0, 0]])}
    monkeypatch.setattr(grpo_trainer.GRPOTrainer, "_prepare_inputs", lambda self, batch: {**masks, **batch})
    counted: list[int] = []
    meter = SimpleNamespace(add_tokens=lambda count: counted.append(int(count)))
    trainer = bare(grpo_trainer.ScaleGRPOTrainer, model=SimpleNamespace(training=is_training), meter=meter)
    assert trainer._prepare_inputs({"more": 1})["more"] == 1
    assert trainer.num_tokens_of({"prompt": "long"}) == 0
    assert counted == ([5] if is_training else [])
    assert trainer.answer_sizes == ((3, 5) if is_training else (0, 0))


def data_of(rows: dict[str, list[Any]], kind: str) -> LoadedData:
    made = Dataset.from_dict(rows)
    return LoadedData(made, made.select([0]), kind, True, ("it",), ("it",), made.num_rows)


def test_prompts_and_answers_are_the_last_turns_or_the_completions() -> None:
    question, answer = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
    turns = rewarded_run.as_prompts(
        data_of({"messages": [[question, answer]], "task": ["sum"]}, "messages"), place="p"
    )
    assert turns.train.to_list() == [{"task": "sum", "prompt": [question], "answer": "4"}]
    assert turns.test is not None
    assert turns.test.to_list() == turns.train.to_list()
    rows = {"prompt": ["a", "b"], "completion": ["c", "d"], "more": [1, 2]}
    pairs = rewarded_run.as_prompts(data_of(rows, "prompt_completion").with_test(None), place="p")
    assert pairs.train.to_list() == [{"prompt": "a", "answer": "c"}, {"prompt": "b", "answer": "d"}]
    assert pairs.test is None
    with pytest.raises(ConfigError, match="no prompt to answer") as refused:
        rewarded_run.as_prompts(data_of({"text": ["x"]}, "text"), place="my.yaml:3")
    assert refused.value.place == "my.yaml:3"


@pytest.mark.parametrize(
    ("options", "revision", "beta", "adapters", "kept"),
    [
        ({"a": 1}, "main", 0.1, False, {"a": 1}),
        ({"a": 1}, "v2", 0.1, False, {"a": 1, "revision": "v2"}),
        (None, "v2", 0.1, False, {"revision": "v2"}),
        (None, "main", 0.1, False, None),
        ({"a": 1}, "main", 0.0, False, None),
        ({"a": 1}, "main", 0.1, True, None),
    ],
)
def test_a_reference_that_trl_loads_is_loaded_as_the_model(
    options: Any, revision: str, beta: float, adapters: bool, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel_scale.modeling import loading

    def load(run: Any, args: Any) -> str:
        args.model_init_kwargs = None
        return "model"

    stopped: list[Any] = []
    monkeypatch.setattr(rewarded_run, "load_run_model", load)
    monkeypatch.setattr(rewarded_run, "prepare_chat", lambda run: "<end>")
    monkeypatch.setattr(loading, "add_stop_token", lambda *given: stopped.append(given))
    run: Any = SimpleNamespace(
        tokenizer="tokenizer",
        model_args=SimpleNamespace(model_revision=revision),
        settings=SimpleNamespace(trains_adapters=adapters),
    )
    args: Any = SimpleNamespace(model_init_kwargs=options, beta=beta, use_vllm=False)
    assert rewarded_run.load_generating_model(run, args) == ("model", "<end>")
    assert stopped == [("model", "tokenizer", "<end>")]
    assert args.model_init_kwargs == kept


def test_a_rewarded_run_is_the_recipes_run_with_what_it_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_scale.data.default import DEFAULT_REWARDING
    from accel_scale.starting import early_checks
    from accel_scale.trainers.rewards import number

    ranks, values = [], {"reward_weights": [1.0]}
    settings = SimpleNamespace(values=values, build=lambda kind: kind(rewards=["number"]))
    usual = SimpleNamespace(settings=settings, start="start", script="script", model_args="model")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(early_checks, "refuse_groups", lambda parsed, world_size: ranks.append(world_size))
    monkeypatch.setattr(rewarded_run, "resolve_trainer_run", lambda parsed, plan, preset: {
        ("parsed", "plan", id(DEFAULT_REWARDING)): usual}[parsed, plan, id(preset)])  # fmt: skip
    parsed, plan = "parsed", "plan"
    run = rewarded_run.resolve_rewarded_run(parsed, plan)  # type: ignore[arg-type]
    found = (run.settings, run.start, run.script, run.model_args)
    assert found == (settings, "start", "script", "model")
    assert (run.rewards, ranks) == ([number], [3])
    values["reward_weights"] = [1.0, 2.0]
    with pytest.raises(ConfigError, match="1 rewards and 2 weights"):
        rewarded_run.resolve_rewarded_run(parsed, plan)  # type: ignore[arg-type]


def test_vllm_is_told_what_ends_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_scale.modeling import loading

    ends = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=7))
    monkeypatch.setattr(rewarded_run, "load_run_model", lambda run, args: ends)
    monkeypatch.setattr(rewarded_run, "prepare_chat", lambda run: "<end>")
    monkeypatch.setattr(loading, "add_stop_token", lambda *given: None)
    run: Any = SimpleNamespace(
        tokenizer="tokenizer",
        model_args=SimpleNamespace(model_revision="main"),
        settings=SimpleNamespace(trains_adapters=False),
    )
    for stop, given, expected in (
        (7, None, {"stop_token_ids": [7]}),
        ([7, 9], {"seed": 1}, {"stop_token_ids": [7, 9], "seed": 1}),
        (7, {"stop_token_ids": [3]}, {"stop_token_ids": [3]}),
        (None, {}, {"stop_token_ids": []}),
    ):
        ends.generation_config.eos_token_id = stop
        args: Any = SimpleNamespace(model_init_kwargs=None, beta=0.0, use_vllm=True, generation_kwargs=given)
        rewarded_run.load_generating_model(run, args)
        assert args.generation_kwargs == expected


# ── Trackers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_mlflow_gets_the_names_of_the_other_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    monkeypatch.setattr(MLflowCallback, "__init__", lambda self: None)
    monkeypatch.setattr(MLflowCallback, "__del__", lambda self: None)
    monkeypatch.setattr(MLflowCallback, "on_log", lambda self, *given, **more: logged.append((given, more)))

    class Callbacks:
        def __init__(self, *callbacks: Any) -> None:
            self.callbacks = list(callbacks)

    class Trainer:
        def __init__(self, *callbacks: Any) -> None:
            self.callback_handler = Callbacks(*callbacks)

        def remove_callback(self, kind: type) -> None:
            held = self.callback_handler.callbacks
            held[:] = [one for one in held if type(one) is not kind]

        def add_callback(self, callback: Any) -> None:
            self.callback_handler.callbacks.append(callback)

    board = SimpleNamespace(tb_writer="writer")
    with_mlflow, without = (
        Trainer(SimpleNamespace(), MLflowCallback(), board),
        Trainer(SimpleNamespace(tb_writer=None)),
    )
    for trainer in (with_mlflow, without):
        use_tracker_names(trainer)  # type: ignore[arg-type]
    kinds = [type(one) for one in with_mlflow.callback_handler.callbacks]
    assert kinds == [SimpleNamespace, SimpleNamespace, NamedMLflowCallback]
    assert len(without.callback_handler.callbacks) == 1
    assert text_writers(with_mlflow) == ["writer"]  # type: ignore[arg-type]
    assert text_writers(without) == []  # type: ignore[arg-type]
    callback = with_mlflow.callback_handler.callbacks[-1]
    callback.on_log("args", "state", "control", {"loss": 1.0, "eval_loss": 2.0}, model="model", more=3)
    callback.on_log("args", "state", "control")
    assert logged == [
        (("args", "state", "control"), {"logs": {"train/loss": 1.0, "eval/loss": 2.0}, "model": "model", "more": 3}),
        (("args", "state", "control"), {"logs": {}, "model": None}),
    ]
