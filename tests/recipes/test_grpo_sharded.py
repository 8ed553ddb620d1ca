"""grpo.py and rloo.py take the same steps under every strategy, generate under each, and resume after a kill."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched_recipe import OF_RECIPE, STEPS, launched, logged
from test_grpo import write_questions

from accel_scale.data.default import default_model_path

REPOSITORY = Path(__file__).resolve().parents[2]
METHODS = ("full", "lora", "qlora")
SCRIPTS = {"grpo": "tests/recipes/fixed_answers.py", "rloo": "tests/recipes/fixed_rloo_answers.py"}
QUICK = {("grpo", "fsdp2", "full"), ("grpo", "zero3", "lora"), ("rloo", "ddp", "lora"), ("rloo", "fsdp2", "full")}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.soak)
    for recipe in SCRIPTS
    for name in ("ddp", "fsdp2", "zero2", "zero3")
    for method in METHODS
    for case in [(recipe, name, method)]
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("grpo") / "questions", answer="completion")


def given(data: Path, method: str) -> list[str]:
    return ["--model_name_or_path", default_model_path(), "--dataset_name", str(data), "--method", method]


@functools.cache
def of_one_process(recipe: str, data: Path, method: str) -> list[tuple[float, ...]]:
    batch = ["--per_device_train_batch_size", "4"]
    folder, script = data.parent / f"one-{recipe}-{method}", SCRIPTS[recipe]
    return of(launched("cpu", "fp32", recipe, folder, *given(data, method), *batch, processes=1, script=script))


def of(folder: Path) -> list[tuple[float, ...]]:
    return [(entry["reward"], entry["loss"], entry["grad_norm"]) for entry in logged(folder)]


@pytest.mark.parametrize(("recipe", "name", "method"), CASES)
def test_rewards_and_gradients_are_those_of_one_process(
    recipe: str, name: str, method: str, data: Path, tmp_path: Path
) -> None:
    """Given the same answers."""
    one = of_one_process(recipe, data, method)
    words = given(data, method)
    several = of(launched(name, "fp32", recipe, tmp_path / "two", *words, script=SCRIPTS[recipe]))
    assert len(one) == len(several) == STEPS
    for (reward, loss, norm), expected in zip(several, one, strict=True):
        assert reward == pytest.approx(expected[0], abs=1e-6)
        assert loss == pytest.approx(expected[1], abs=1e-4)
        assert norm == pytest.approx(expected[2], rel=1e-3)
        assert norm > 1e-3, "every step has a gradient"


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("fsdp2", "lora"),
        ("zero3", "full"),
        *(pytest.param(n, "full", marks=pytest.mark.soak) for n in ("ddp", "zero2")),
    ],
)
def test_what_is_sharded_generates(name: str, method: str, data: Path, tmp_path: Path) -> None:
    entries = logged(launched(name, "fp32", "grpo", tmp_path / "two", *given(data, method)))
    assert len(entries) == STEPS
    assert all(1 <= entry["completions/mean_length"] <= 12 for entry in entries)
    assert max(entry["reward"] for entry in entries) > 0


@pytest.mark.parametrize("recipe", SCRIPTS)
def test_a_killed_run_goes_on_bit_for_bit(recipe: str, data: Path, tmp_path: Path) -> None:
    """Including the answers generated after the kill."""
    words = [sys.executable, f"recipes/{recipe}.py", *given(data, "full"), "--precision", "fp32", "--max_steps", "6"]
    words += [*OF_RECIPE[recipe].split(), "--save_strategy", "steps", "--save_steps", "2", "--logging_steps", "1"]
    words += ["--per_device_train_batch_size", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(folder: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*words, "--output_dir", str(folder)],
            cwd=REPOSITORY,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    process = start(undisturbed)
    output = process.communicate()[0]
    assert process.returncode == 0, output[-3000:]
    process = start(killed)
    while process.poll() is None and not (killed / "checkpoint-2").exists():
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    process = start(killed)
    output = process.communicate()[0]
    assert process.returncode == 0, output[-3000:]
    assert "checkpoint-" in output
    rewards = [[entry["reward"] for entry in logged(folder)] for folder in (undisturbed, killed)]
    assert rewards[0] == rewards[1]
    assert (killed / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
