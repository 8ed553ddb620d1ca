"""recipes/vision.py takes the same steps, to the same weights, under every strategy."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from launched_recipe import STEPS, launched, logged
from pictures import KINDS, write_model, write_pictures
from safetensors.torch import load_file

LAUNCHES = ("ddp", "fsdp2", "zero2", "zero3")
QUICK = {
    ("llava", "ddp", "full", "all"), ("llava", "zero3", "full", "none"),
    ("idefics3", "zero3", "lora", "none"), ("gemma3", "fsdp2", "full", "none"),
}  # fmt: skip
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.soak)
    for kind in KINDS
    for launch in LAUNCHES
    for method, parts in (("full", "none"), ("full", "all"), ("lora", "none"), ("qlora", "none"))
    for case in [(kind, launch, method, parts)]
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each kind, and rows of which every third has two pictures."""
    folder = tmp_path_factory.mktemp("vision")
    for kind in KINDS:
        write_model(kind, folder / kind)
    write_pictures(folder / "rows", count=40, several=True)
    return folder


def words(made: Path, kind: str, method: str, parts: str) -> list[str]:
    given = ["--model_name_or_path", str(made / kind), "--dataset_name", str(made / "rows")]
    return [*given, "--method", method, "--train_vision", parts]


def saved(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@functools.cache
def of_one_process(made: Path, kind: str, method: str, parts: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    folder = made / f"one-{kind}-{method}-{parts}"
    batch = ["--per_device_train_batch_size", "4"]
    launched("cpu", "fp32", "vision", folder, *words(made, kind, method, parts), *batch, processes=1)
    return [entry["loss"] for entry in logged(folder)], saved(folder)


@pytest.mark.parametrize(("kind", "launch", "method", "parts"), CASES)
def test_steps_are_those_of_one_process(
    kind: str, launch: str, method: str, parts: str, made: Path, tmp_path: Path
) -> None:
    losses, weights = of_one_process(made, kind, method, parts)
    folder = launched(launch, "fp32", "vision", tmp_path / "two", *words(made, kind, method, parts))
    assert len(losses) == STEPS
    assert [entry["loss"] for entry in logged(folder)] == pytest.approx(losses, rel=1e-4)
    assert max(losses) - min(losses) > 1e-3, "the weights move"
    found = saved(folder)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        # Biases of a tower's keys have no gradient but rounding errors, which Adam turns into steps.
        allowed = 1e-4 * float(tensor.norm()) + 2e-5 * name.endswith("k_proj.bias")
        assert float((found[name] - tensor).norm()) <= allowed, name
