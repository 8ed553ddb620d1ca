"""Studies of real launches: killed and continued, pruned, failing, shared. The metric is what the launches wrote."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
import yaml

from accel_scale.errors import ConfigError
from accel_scale.flags.parsing import parse_flags
from accel_scale.recipe_specs.finding import load_recipe
from accel_scale.reporting.metrics_log import read_metrics
from accel_scale.tuning.launch import TrialLaunch, launch_command, read_trial_launch_file

pytestmark = pytest.mark.slow
WARM_PYTHON = False  # a study ends its trials with all their descendants
SMALL = Path(__file__).parent / "small_recipe.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def tune(repository: Path) -> Any:
    spec = importlib.util.spec_from_file_location("recipes_tune", repository / "recipes" / "tune.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def processes_naming(folder: Path) -> list[psutil.Process]:
    """Launchers and workers whose command line names a trial in `folder`."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if any(str(folder / "trials") in word for word in words) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def wait_until(condition: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def trials_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / "trials.csv", newline="") as file:
        return list(csv.DictReader(file))


def write_space(folder: Path, **entries: Any) -> Path:
    path = folder / "space.yaml"
    path.write_text(yaml.safe_dump(entries))
    return path


def test_a_killed_study_goes_on_and_its_best_flags_run(repository: Path, tmp_path: Path) -> None:
    """SIGKILL in the second trial; the first one is impossible (a batch of 6 in micro-batches of 4)."""
    space = write_space(tmp_path, global_batch_size=[4, 6], max_steps=4, eval_strategy="steps", eval_steps=2)
    out = tmp_path / "out"
    command = [sys.executable, "recipes/tune.py", "recipes/sft.py", "--space", str(space), "--sampler", "grid"]
    command += ["--output_dir", str(out), "--", "--max_length", "64"]
    command += ["--per_device_train_batch_size", "4", "--exact_match_samples", "0", "--learning_rate", "1e-3"]

    first = subprocess.Popen(command, cwd=repository, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    second_log = out / "trials" / "1" / "trial.log"
    wait_until(
        lambda: (second_log.is_file() and second_log.stat().st_size) or first.poll() is not None, 240, "trial 1"
    )
    first.kill()
    before = first.communicate()[0]
    assert "trial 0: failed" in before
    wait_until(lambda: not processes_naming(out), 30, "the launch of a killed search ends")

    done = subprocess.run(command, cwd=repository, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trial 1 was interrupted; its parameters are queued again" in done.stdout
    assert "trial 0: " not in done.stdout, "a finished trial is not run again"
    failed, interrupted, complete = trials_of(out)
    assert [t["outcome"] for t in (failed, interrupted, complete)] == ["failed", "interrupted", "complete"]
    assert [t["global_batch_size"] for t in (failed, interrupted, complete)] == ["6", "4", "4"]
    assert complete["retry_of"] == "1"
    assert "--global_batch_size 6" in failed["reason"] or "6" in failed["reason"]

    last = read_metrics(out / "trials" / "2" / "metrics.jsonl")[-1]
    assert (float(complete["value"]), int(complete["last_step"])) == (last["eval_loss"], 4)
    cost = json.loads((out / "trials" / "2" / "run_summary.json").read_text())
    assert float(complete["tokens_per_second"]) == cost["tokens_per_second"] > 0
    assert int(complete["peak_bytes"]) == cost["peak_host_bytes"]
    assert failed["tokens_per_second"] == interrupted["peak_bytes"] == ""
    table = done.stdout[done.stdout.index("trials") :]
    assert f"{cost['tokens_per_second']:,.0f}" in table
    recipe = load_recipe(repository / "recipes" / "sft.py")
    flags = parse_flags(recipe.classes, ["--config_file", str(out / "best.yaml")], program="sft.py").explicit
    assert (flags["global_batch_size"], flags["max_length"], flags["learning_rate"]) == (4, 64, 1e-3)
    assert (flags["max_steps"], "output_dir" in flags) == (4, False)
    assert (out / "trials" / "2" / "model.safetensors").is_file()
    summary = json.loads((out / "study_summary.json").read_text())
    assert summary["counts"] == {"complete": 1, "failed": 1, "interrupted": 1}
    assert "global_batch_size" in summary["trials"][0]["log_tail"] or "6" in summary["trials"][0]["log_tail"]
    assert summary["versions"]["optuna"].startswith("5.")
    assert (out / "optimization_history.png").is_file()


def test_pruning_ends_the_launch(tune: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three good rates run to the end, a fourth is far worse, and a fifth diverges."""
    rates = [0.1, 0.12, 0.14, 1e-4, 30.0]
    space = write_space(tmp_path, learning_rate=rates, max_steps=60, step_seconds=0.05)
    out = tmp_path / "out"
    argv = [str(SMALL), "--space", str(space), "--output_dir", str(out), "--prune_after", "3"]
    storage = f"sqlite:///{tmp_path}/study.db"
    argv += ["--storage", storage, "--study_name", "rates"]

    assert tune([*argv, "--num_trials", "1", "--timeout", "1e-9"]) == 1, "nothing ran, nothing is best"
    study = optuna.load_study(study_name="rates", storage=storage)
    for rate in rates:
        study.enqueue_trial({"learning_rate": rate})
    assert tune([*argv, "--num_trials", "5"]) == 0

    trials = trials_of(out)
    assert [trial["outcome"] for trial in trials] == ["complete"] * 3 + ["pruned", "pruned"]
    bad, diverged = trials[3:]
    assert bad["last_step"] == "4", "the first step after --prune_after"
    assert len(read_metrics(out / "trials" / "3" / "metrics.jsonl")) < 60
    for number in range(5):
        log = (out / "trials" / str(number) / "trial.log").read_text()
        assert ("reached the end" in log) == (number < 3)
    assert int(diverged["last_step"]) < 60
    assert not processes_naming(out)
    assert "trial 3: pruned at step 4" in capsys.readouterr().out


def test_a_study_whose_first_trials_all_fail_stops_and_says_why(tune: Any, tmp_path: Path) -> None:
    space = write_space(tmp_path, learning_rate={"low": -2.0, "high": -1.0})
    argv = [str(SMALL), "--space", str(space), "--output_dir", str(tmp_path / "out"), "--num_trials", "1"]
    with pytest.raises(
        ConfigError, match=r"the first 1 trial failed, the last by: .*learning_rate cannot be -.*use more than 0"
    ) as caught:
        tune(argv)
    assert caught.value.place == f"{tmp_path}/out/trials/0/trial.log"
    with pytest.raises(ConfigError, match="started with max_steps = nothing, and this is 5"):
        tune([*argv, "--", "--max_steps", "5"])


def test_a_loss_of_exactly_zero_is_a_failure_and_not_the_best_trial(tune: Any, tmp_path: Path) -> None:
    space = write_space(tmp_path, learning_rate={"low": 0.1, "high": 0.2})
    argv = [str(SMALL), "--space", str(space), "--output_dir", str(tmp_path / "out"), "--num_trials", "1"]
    with pytest.raises(ConfigError, match="eval_loss is exactly 0: no row had a token that the loss is taken on"):
        tune([*argv, "--", "--max_steps", "2", "--has_labels", "false"])


@pytest.mark.soak
def test_two_searches_share_a_study_and_ctrl_c_queues_the_trial(repository: Path, tmp_path: Path) -> None:
    space = write_space(tmp_path, learning_rate={"low": 0.05, "high": 0.2}, max_steps=4)
    storage = f"sqlite:///{tmp_path}/shared.db"
    command = [sys.executable, "recipes/tune.py", str(SMALL), "--space", str(space), "--pruner", "none"]
    command += ["--storage", storage, "--num_trials", "3", "--output_dir", str(tmp_path / "out")]
    searches = [
        subprocess.Popen(command, cwd=repository, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    running = tmp_path / "out" / "trials" / "0" / "trial.log"
    wait_until(running.is_file, 120, "the first trial")
    owner = optuna.load_study(study_name="small_recipe", storage=storage).trials[0].user_attrs["owner"]["pid"]
    os.kill(owner, signal.SIGINT)
    printed = {search.pid: search.communicate(timeout=240)[0] for search in searches}
    statuses = {search.pid: search.returncode for search in searches}
    assert statuses.pop(owner) == 130, printed
    assert "interrupted; the same command continues" in printed[owner]
    assert list(statuses.values()) == [0], printed

    trials = optuna.load_study(study_name="small_recipe", storage=storage).trials
    assert [trial.number for trial in trials] == list(range(len(trials)))
    retried = [trial for trial in trials if trial.user_attrs.get("retry_of") == 0]
    assert [trial.params for trial in retried] == [trials[0].params]
    assert sum(trial.state == optuna.trial.TrialState.COMPLETE for trial in trials) == 3


def test_a_launch_of_two_processes_ends_with_its_workers(repository: Path, tmp_path: Path) -> None:
    """torch's launcher starts workers in their own sessions, out of reach of a signal to the launch's group."""
    flags = tmp_path / "trials" / "flags.yaml"
    flags.parent.mkdir()
    flags.write_text(f"max_steps: 100000\nstep_seconds: 0.05\noutput_dir: {tmp_path}/trials\n")
    launch_file = read_trial_launch_file(repository / "accelerate_configs" / "ddp.yaml")
    launch = TrialLaunch(launch_command(SMALL, flags, launch_file), tmp_path / "log")
    try:
        wait_until(lambda: read_metrics(tmp_path / "trials" / "metrics.jsonl"), 120, "the first step")
        workers = [p for p in processes_naming(tmp_path) if "accelerate_cli" not in " ".join(p.cmdline())]
        assert len(workers) == 2
        assert {os.getsid(worker.pid) for worker in workers} != {os.getsid(launch.pid)}
    finally:
        launch.end()
    assert not processes_naming(tmp_path)


def test_what_cannot_be_searched_is_said_before_any_launch(tune: Any, repository: Path, tmp_path: Path) -> None:
    space = write_space(tmp_path, learning_rate=[0.1, 0.2])
    base = [str(SMALL), "--space", str(space), "--output_dir", str(tmp_path / "out")]
    sft = [str(repository / "recipes" / "sft.py"), *base[1:]]
    several = tmp_path / "several.yaml"
    several.write_text(
        (repository / "accelerate_configs" / "ddp.yaml").read_text().replace("num_machines: 1", "num_machines: 2")
    )
    for argv, words in (
        (["--space", str(space)], "the recipe to search comes first"),
        ([str(SMALL)], "has no space of its own"),
        ([*base, "--num_trial", "3"], "did you mean --num_trials?"),
        ([*base, "--num_trials", "0"], "num_trials cannot be 0"),
        ([*base, "--storage", "study.db"], "not a storage URL"),
        ([*base, "--storage", "nosuch://user:hunter2@host/db"], "cannot be used"),
        ([*base, "--launch_file", str(space)], "space.yaml"),
        ([*base, "--launch_file", str(several)], "several.yaml:"),
        ([*base, "--", "--learning_rate", "0.3"], "searched in the space"),
        (sft, "the trials do not validate"),
    ):
        with pytest.raises(ConfigError) as caught:
            tune(argv)
        assert words in str(caught.value), argv
        assert "hunter2" not in str(caught.value)
    (tmp_path / "out" / "trials" / "0").mkdir(parents=True)
    with pytest.raises(ConfigError, match="is not in this study"):
        tune(base)
