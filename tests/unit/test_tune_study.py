"""A study proposes the same with or without a break, resumes only unchanged, and is cleared of dead trials."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import optuna
import psutil
import pytest

from accel_scale.errors import ConfigError
from accel_scale.recipe_specs.finding import Recipe, load_recipe
from accel_scale.tuning import study as studies
from accel_scale.tuning.ownership import MAX_RETRIES, fail_abandoned, is_abandoned, owner_of_this_process
from accel_scale.tuning.space import SearchSpace, read_space
from accel_scale.tuning.study import (
    PerTrialSampler,
    counted_trials,
    make_pruner,
    make_sampler,
    masked,
    open_storage,
    open_study,
)

ROOT = Path(__file__).parents[2]
optuna.logging.set_verbosity(optuna.logging.ERROR)
State = optuna.trial.TrialState


@pytest.fixture(scope="module")
def sft() -> Recipe:
    return load_recipe(ROOT / "recipes" / "sft.py")


def space_of(recipe: Recipe, folder: Path, text: str) -> SearchSpace:
    path = folder / "space.yaml"
    path.write_text(text)
    return read_space(path, recipe)


def test_a_grid_needs_steps_and_tries_every_point_once(sft: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"space.yaml:1: learning_rate: a grid needs finitely many values"):
        make_sampler("grid", space_of(sft, tmp_path, "learning_rate: {low: 0.1, high: 0.2}"), 0)
    space = space_of(sft, tmp_path, "warmup_ratio: {low: 0.0, high: 0.3, step: 0.1}\nlora_r: {low: 1, high: 2}")
    sampler, size = make_sampler("grid", space, 0)
    assert size == 8
    study = optuna.create_study(sampler=sampler)
    study.optimize(lambda trial: float(len(space.suggest(trial))), n_trials=8)
    assert len({tuple(trial.params.values()) for trial in study.trials}) == 8
    assert {trial.params["warmup_ratio"] for trial in study.trials} == {0.0, 0.1, 0.2, 0.3}


def test_a_queued_trial_does_not_upset_the_grid(sft: Recipe, tmp_path: Path) -> None:
    space = space_of(sft, tmp_path, "seed: [1, 2]")
    sampler, _ = make_sampler("grid", space, 0)
    study = optuna.create_study(sampler=sampler)
    first = study.ask()
    space.suggest(first)
    study.tell(first, state=optuna.trial.TrialState.FAIL)
    study.enqueue_trial(first.params)
    study.optimize(lambda trial: float(space.suggest(trial)["seed"]), n_trials=2)
    assert {trial.params["seed"] for trial in study.trials[1:]} == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tpe", "random"])
def test_a_continued_study_proposes_what_it_would_have_without_the_break(
    sft: Recipe, tmp_path: Path, name: str
) -> None:
    space = space_of(sft, tmp_path, "learning_rate: {low: 1e-5, high: 1e-3, log: true}\nlora_r: {low: 1, high: 64}")

    def run(url: str, *counts: int) -> list[dict]:
        for count in counts:
            study = optuna.create_study(
                storage=url, study_name="a", load_if_exists=True, sampler=make_sampler(name, space, 5)[0]
            )
            study.optimize(lambda trial: sum(space.suggest(trial).values()), n_trials=count)
        return [trial.params for trial in study.trials]

    whole, parts = run(f"sqlite:///{tmp_path}/a.db", 8), run(f"sqlite:///{tmp_path}/b.db", 3, 3, 2)
    assert whole == parts
    assert len({params["learning_rate"] for params in whole}) == 8
    assert isinstance(make_sampler(name, space, 5)[0], PerTrialSampler)


def test_a_study_refuses_another_definition(tmp_path: Path) -> None:
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/a.db")

    def open_with(**definition: object) -> optuna.Study:
        return open_study(
            storage,
            name="a",
            direction="minimize",
            sampler=optuna.samplers.RandomSampler(),
            pruner=make_pruner("median", prune_after=0),
            definition=definition,
        )

    open_with(metric="eval_loss", fixed={"max_steps": 5, "seed": 1})
    study = open_with(metric="eval_loss", fixed={"max_steps": 5, "seed": 1})
    with pytest.raises(ConfigError, match="started with max_steps = 5, and this is 6"):
        open_with(metric="eval_loss", fixed={"max_steps": 6, "seed": 1})
    with pytest.raises(ConfigError, match="started with metric = eval_loss"):
        open_with(metric="loss", fixed={"max_steps": 5, "seed": 1})
    # Interrupted and queued trials do not count; failed, finished and running trials do.
    interrupted, failed, done, _ = (study.ask() for _ in range(4))
    failed.set_user_attr("reason", "no memory")
    for trial in (interrupted, failed):
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    study.tell(done, 1.0)
    study.enqueue_trial({})
    assert [trial.number for trial in counted_trials(study)] == [1, 2, 3]


def test_nothing_is_pruned_up_to_the_step_that_was_given() -> None:
    for name in ("median", "halving"):
        study = optuna.create_study(pruner=make_pruner(name, prune_after=3))
        for value in (1.0, 1.0, 1.0, 1.0, 9.0):
            trial, pruned = study.ask(), []
            for step in range(1, 9):
                trial.report(value, step)
                if trial.should_prune():
                    pruned.append(step)
            study.tell(trial, value)
        assert pruned[0] == 4, name
    study = optuna.create_study(pruner=make_pruner("none", prune_after=0))
    trial = study.ask()
    trial.report(float("nan"), 1)
    assert not trial.should_prune()


def open_here(folder: Path, lines: list[str]) -> optuna.Study:
    return open_study(
        open_storage(f"sqlite:///{folder}/a.db", lines.append),
        name="a",
        direction="minimize",
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=make_pruner("none", prune_after=0),
        definition={},
    )


def test_a_killed_process_leaves_a_trial_that_is_queued_again_a_few_times(tmp_path: Path) -> None:
    lines: list[str] = []
    study = open_here(tmp_path, lines)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = psutil.Process(sleeper.pid)
    owner = {**owner_of_this_process(), "pid": sleeper.pid, "started": process.create_time()}
    first = study.ask()
    first.suggest_float("x", 0, 1)
    first.set_user_attr("owner", owner)
    assert not is_abandoned(study.trials[0])
    fail_abandoned(study, lines.append)
    assert study.trials[0].state == State.RUNNING
    sleeper.kill()
    sleeper.wait()
    fail_abandoned(study, lines.append)
    assert [trial.state for trial in study.trials] == [State.FAIL, State.WAITING]
    for number in range(1, MAX_RETRIES + 1):
        again = study.ask()
        assert (again.number, again.suggest_float("x", 0, 1)) == (number, first.params["x"])
        again.set_user_attr("owner", owner)
        fail_abandoned(study, lines.append)
    assert [trial.state for trial in study.trials] == [State.FAIL] * (MAX_RETRIES + 1)
    assert counted_trials(study) == []
    assert "not tried again" in lines[-1]
    # Another process has this id by now: its creation time tells them apart.
    reused = study.ask()
    reused.set_user_attr("owner", {**owner_of_this_process(), "started": 1.0})
    assert is_abandoned(study.trials[reused.number])


@pytest.mark.slow
def test_another_machines_trial_is_judged_by_its_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "HEARTBEAT_SECONDS", 1)
    monkeypatch.setattr(studies, "GRACE_SECONDS", 2)
    lines: list[str] = []
    study = open_here(tmp_path, lines)
    trial = study.ask()
    trial.suggest_float("x", 0, 1)
    trial.set_user_attr("owner", {**owner_of_this_process(), "host": "elsewhere"})
    study._storage.record_heartbeat(trial._trial_id)
    fail_abandoned(study, lines.append)
    assert study.trials[0].state == State.RUNNING
    time.sleep(4)
    fail_abandoned(study, lines.append)
    assert [found.state for found in study.trials] == [State.FAIL, State.WAITING]
    assert lines == ["trial 0 was interrupted; its parameters are queued again"]


@pytest.mark.slow
def test_searches_that_start_together_make_one_study(tmp_path: Path) -> None:
    """Optuna creates its tables without a lock: searches that start at once are told that they exist."""
    go = tmp_path / "go"
    code = f"""
import optuna, pathlib, time
from accel_scale.tuning.study import open_storage
print("ready", flush=True)
while not pathlib.Path({str(go)!r}).exists():
    time.sleep(0.001)
storage = open_storage("sqlite:///{tmp_path}/a.db", print)
print(optuna.create_study(study_name="a", storage=storage, load_if_exists=True)._study_id)
"""
    together = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in together:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    go.touch()
    for process in together:
        printed, errors = process.communicate()
        assert (process.returncode, printed) == (0, "1\n"), errors


def test_passwords_are_not_shown() -> None:
    assert masked("postgresql://me:hunter2@host/db") == "postgresql://me:***@host/db"
    assert "hunter2" not in masked("redis://:hunter2@host:bad")
    assert masked("mysql://me:hun@t/er?2@host/db") == "mysql://me:***@host/db"
    assert masked("redis://host:6379/0?password=hunter2") == "redis://host:6379/0?…"
    assert masked("sqlite:////tmp/a@b/study.db") == "sqlite:////tmp/a@b/study.db"


def test_a_driver_that_repeats_the_password_is_not_quoted_with_it() -> None:
    with pytest.raises(ConfigError, match="nosuch") as caught:
        open_storage("nosuch://me:hunter2@host/db", print)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"^--storage: redis://:\*\*\*@nowhere") as caught:
        open_storage("redis://:hunter2@nowhere.invalid:1/x", print)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        open_storage("sqlite:////no/such/folder/study.db", print)
    assert "unable to open database file" in str(caught.value)
