"""dpo.py, kto.py and reward.py take the same steps under every strategy, and resume bit for bit after a kill."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched_recipe import STEPS, launched, logged
from pairs import write_labelled, write_pairs

from accel_scale.data.default import default_model_path

REPOSITORY = Path(__file__).resolve().parents[2]
METHODS = ("full", "lora", "qlora")
MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"
QUICK = {
    ("dpo", "fsdp2", "full"), ("dpo", "zero3", "lora"), ("reward", "fsdp2", "lora"), ("reward", "zero3", "full"),
    ("kto", "fsdp2", "lora"), ("kto", "zero3", "full"), ("kto", "ddp", "full"),
}  # fmt: skip
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.soak)
    for recipe in ("dpo", "kto", "reward")
    for name in ("ddp", "fsdp2", "zero2", "zero3")
    for method in METHODS
    for case in [(recipe, name, method)]
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `pairs` and `labelled` answers."""
    folder = tmp_path_factory.mktemp("preferences")
    write_pairs(folder / "pairs")
    write_labelled(folder / "labelled")
    return folder


def given(recipe: str, data: Path, method: str) -> list[str]:
    rows = data / ("labelled" if recipe == "kto" else "pairs")
    return ["--model_name_or_path", default_model_path(), "--dataset_name", str(rows), "--method", method]


@functools.cache
def of_one_process(recipe: str, data: Path, method: str) -> list[float]:
    batch = ["--per_device_train_batch_size", "4"]
    folder = data / f"one-{recipe}-{method}"
    script = "tests/recipes/kl_of_twos.py" if recipe == "kto" else None
    launched("cpu", "fp32", recipe, folder, *given(recipe, data, method), *batch, processes=1, script=script)
    return [entry["loss"] for entry in logged(folder)]


@pytest.mark.parametrize(("recipe", "name", "method"), CASES)
def test_losses_are_those_of_one_process(recipe: str, name: str, method: str, data: Path, tmp_path: Path) -> None:
    one = of_one_process(recipe, data, method)
    folder = launched(name, "fp32", recipe, tmp_path / "two", *given(recipe, data, method))
    several = [entry["loss"] for entry in logged(folder)]
    assert len(one) == STEPS
    assert several == pytest.approx(one, abs=1e-4)
    assert max(one) - min(one) > 1e-3, "the weights move"


@pytest.mark.parametrize(
    ("recipe", "method", "weights"), [("dpo", "full", MODEL), ("kto", "full", MODEL), ("reward", "lora", ADAPTER)]
)
def test_a_killed_run_goes_on_bit_for_bit(recipe: str, method: str, weights: str, data: Path, tmp_path: Path) -> None:
    words = [
        sys.executable,
        f"recipes/{recipe}.py",
        *given(recipe, data, method),
        "--precision",
        "fp32",
        "--max_length",
        "128",
    ]
    words += ["--max_steps", "6", "--save_steps", "2", "--logging_steps", "1", "--per_device_train_batch_size", "2"]
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
    process.communicate()
    assert process.returncode == 0
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
    assert (killed / weights).read_bytes() == (undisturbed / weights).read_bytes()
    output = start(killed).communicate()[0]
    assert "nothing is left to do" in output, output[-3000:]
