"""Trackers: which exist, what their libraries find in the environment, names of metrics, and secrets."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from accel_scale.errors import ConfigError
from accel_scale.flags.trackers import TRACKERS, chosen_trackers, refuse_unknown_trackers, require_trackers
from accel_scale.reporting.trackers import masked_words, send_alert, settle_trackers, tracked_names

TOKEN = "hf_" + "a" * 30


def test_the_table_is_that_of_the_libraries():
    from accelerate.utils import LoggerType
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    assert {name for name, tracker in TRACKERS.items() if tracker.in_trainers} == set(INTEGRATION_TO_CALLBACK)
    assert {name for name, tracker in TRACKERS.items() if tracker.in_loops} == set(LoggerType.list()) - {"all"}


@pytest.mark.parametrize(
    ("name", "in_trainer", "problem"),
    [
        ("tensorbord", True, "--report_to: tensorbord is no tracker. Fix: choose from trackio, tensorboard, "),
        ("aim", True, "--report_to: aim is a tracker of other recipes."),
        ("codecarbon", False, "--report_to: codecarbon is a tracker of other recipes."),
    ],
)
def test_a_name_that_is_no_tracker_is_refused(name, in_trainer, problem):
    with pytest.raises(ConfigError) as refused:
        refuse_unknown_trackers(["tensorboard", name], place="--report_to", in_trainer=in_trainer)
    assert str(refused.value).startswith(problem)
    refuse_unknown_trackers(["tensorboard", "none"], place="--report_to", in_trainer=in_trainer)


@pytest.mark.parametrize("name", ["comet_ml", "swanlab", "neptune"])
def test_a_missing_tracker_is_named_with_pips_command(name):
    assert importlib.util.find_spec(name) is None
    with pytest.raises(ConfigError) as refused:
        require_trackers(["none", name], place="my.yaml:3")
    assert str(refused.value) == f"my.yaml:3: {name} is not installed. Fix: pip install {name}, or leave {name} out."


def test_mlflows_database_needs_more_than_mlflow(monkeypatch):
    there = {"mlflow": True, "sqlalchemy": True, "alembic": False}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there[name] else None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="alembic, which mlflow's local database needs, is not installed"):
        require_trackers(["mlflow"], place="--report_to")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example:5000")
    require_trackers(["mlflow"], place="--report_to")


def test_all_means_the_installed_ones():
    names = [name for name in TRACKERS if all(map(importlib.util.find_spec, TRACKERS[name].modules[:1]))]
    chosen = chosen_trackers("all", in_trainer=True)
    assert set(chosen) == set(names) - {"aim"}
    assert "codecarbon" not in chosen_trackers(["all"], in_trainer=False)
    assert chosen_trackers(["none"], in_trainer=True) == chosen_trackers(None, in_trainer=True) == []


def settled(
    tmp_path: Path, environment: dict[str, str], *names: str, **options: object
) -> tuple[dict[str, str], list[str]]:
    environment = {"NETRC": str(tmp_path / "netrc"), **environment}
    lines = settle_trackers(names or ("wandb",), environment, project="mine", **options)  # type: ignore[arg-type]
    return environment, lines


def test_wandb_stays_offline_until_the_user_logs_in(tmp_path):
    environment, (line,) = settled(tmp_path, {})
    assert environment["WANDB_MODE"] == "offline"
    assert environment["WANDB_ERROR_REPORTING"] == "false"
    assert line == "wandb: offline, as nobody is logged in; wandb sync wandb/offline-run-* uploads the run."
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        environment, lines = settled(tmp_path, {name: "x" * 40})
        assert "WANDB_MODE" not in environment
        assert lines == []
    assert settled(tmp_path, {"WANDB_MODE": "online"})[0]["WANDB_MODE"] == "online"
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    assert "WANDB_MODE" not in settled(tmp_path, {})[0]
    elsewhere, _ = settled(tmp_path, {"WANDB_BASE_URL": "https://wandb.example"})
    assert elsewhere["WANDB_MODE"] == "offline"  # the login is for another server


def test_the_project_is_the_users_the_flags_or_the_variables(tmp_path):
    own = {"WANDB_PROJECT": "theirs"}
    assert settled(tmp_path, {})[0]["WANDB_PROJECT"] == "mine"
    assert settled(tmp_path, own)[0]["WANDB_PROJECT"] == "theirs"
    assert settled(tmp_path, own, is_chosen=True)[0]["WANDB_PROJECT"] == "mine"
    mlflow, lines = settled(tmp_path, {}, "mlflow")
    assert (mlflow["MLFLOW_EXPERIMENT_NAME"], mlflow["MLFLOW_DISABLE_TELEMETRY"]) == ("mine", "true")
    assert "WANDB_MODE" not in mlflow
    assert lines == []


def test_a_command_line_is_kept_without_its_credentials(monkeypatch, tmp_path):
    words = [
        "--hub_token",
        "abc",
        "--learning_rate",
        "1e-4",
        f"--dataset_name=https://u:pw@host/{TOKEN}",
        "--api-key=x",
    ]
    expected = [
        "--hub_token",
        "***",
        "--learning_rate",
        "1e-4",
        "--dataset_name=https://u:***@host/hf_***",
        "--api-key=***",
    ]
    assert masked_words(words) == expected
    monkeypatch.setattr(sys, "argv", ["sft.py", *words])
    settled(tmp_path, {}, "trackio")
    assert sys.argv == ["sft.py", *expected]


def test_a_tracker_that_fails_is_a_warning_of_one_line_without_credentials(capsys):
    class Failing:
        def add_text(self, tag, text_string, global_step):
            raise OSError(f"no answer from https://user:{TOKEN}@host/\nwhat the server sent")

        def flush(self): ...

    send_alert("step 3: skip", "spike", step=3, is_error=False, writers=[Failing()])
    line = "warning: tensorboard did not take an alert (OSError: no answer from https://user:***@host/).\n"
    assert capsys.readouterr().err == line


def test_names_are_those_of_transformers_callbacks():
    from transformers.integrations.integration_utils import rewrite_logs

    logged = {"loss": 1.0, "eval_loss": 2.0, "tokens_per_second": 3.0, "reward": 0.5, "eval_reward": 0.25}
    assert tracked_names(logged) == rewrite_logs(logged)
    assert tracked_names({"eval_loss": 1.0, "perplexity": 2.7}) == {"eval/loss": 1.0, "eval/perplexity": 2.7}
