"""``--plan`` in the SFT recipe: refusing before loading, choosing, and the final line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from accel_scale.planning.models.catalogue import catalogue_config

pytestmark = pytest.mark.slow


def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded(repository: Path, tmp_path: Path) -> None:
    tokenizer = repository / "accel_scale" / "assets" / "default" / "model"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_text((tokenizer / name).read_text())
    # The folder has no weights: loading them would fail with another message.
    (tmp_path / "config.json").write_text(json.dumps(catalogue_config("meta-llama/Llama-3.1-8B")))
    data = str(repository / "accel_scale" / "assets" / "default" / "data" / "train.jsonl")
    command = [sys.executable, "recipes/sft.py", "--model_name_or_path", str(tmp_path), "--dataset_name", data]
    command += ["--plan", "check", "--plan_gpu", "12GiB", "--output_dir", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("sft.py: error: --plan_gpu: this run would not fit: predicted ")
    assert "of 12 GiB (12 GiB card)" in done.stderr
    assert "the largest part is optimizer states" in done.stderr
    assert "--method qlora (" in done.stderr.split("Fix: ")[1]


def test_measured_stands_beside_predicted(sft: Any, capsys: pytest.CaptureFixture[str]) -> None:
    summary = sft("--plan check --packing false --completion_only_loss false")
    printed = capsys.readouterr().out
    plan = summary["plan"]
    assert json.loads((summary["out"] / "run_summary.json").read_text())["plan"] == plan
    assert printed.rstrip().splitlines()[-1] == plan["line"]
    assert plan["line"].startswith("memory: predicted ")
    assert "measured" in plan["line"]
    assert "predicted" in printed.split("done")[0]  # the table before the first step
    measured, compared = plan["measured"], plan["compared"]
    assert measured["how"] == "first step traced"
    assert measured["step_seconds"] > 0
    assert measured["allocated_bytes"] == pytest.approx(compared["allocated_bytes"], rel=0.05)
    assert measured["positions"] <= compared["positions"] <= 2 * 256


def test_training_is_the_same_watched_or_not(sft: Any) -> None:
    assert sft("--plan check")["losses"] == sft("--plan off")["losses"]


def test_an_optimizer_whose_step_is_compiled_can_be_watched(sft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to compile under a dispatch mode; the tensors that the step makes are counted afterwards."""
    seen = []

    def not_compiled(function: Any, **options: Any) -> Any:
        def run(*args: Any) -> Any:
            seen.append(_get_current_dispatch_mode_stack())
            return function(*args)

        return run

    monkeypatch.setattr(torch, "compile", not_compiled)  # compiling takes 15 seconds
    plan = sft("--plan check --optim adamw_torch_8bit --packing false --completion_only_loss false")["plan"]
    assert seen
    assert not any(seen)
    assert plan["measured"]["how"] == "first step traced"
    assert plan["measured"]["allocated_bytes"] == pytest.approx(plan["compared"]["allocated_bytes"], rel=0.05)


def test_without_a_gpu_nothing_is_planned_by_default(sft: Any) -> None:
    assert sft()["plan"] is None


def test_auto_sets_the_batch_and_trains_on(sft: Any, capsys: pytest.CaptureFixture[str]) -> None:
    # The fixture sets a micro-batch of 2, which is kept; checkpointing, optimizer and method are open.
    summary = sft("--plan auto --gradient_accumulation_steps 2")
    settings, origins = summary["settings"], summary["origins"]
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 4
    assert origins["per_device_train_batch_size"] == "--per_device_train_batch_size"
    assert origins["checkpointing_policy"].startswith("planned: fits ")
    assert capsys.readouterr().out.startswith("planned: --checkpointing_policy none")
