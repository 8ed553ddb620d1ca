"""The final folder of ranks that share a model, read back: differing, missing and ungathered tensors are named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from accel_scale.training.saving.final_shared import _verified
from accel_scale.training.saving.verification import CheckpointMismatch

Weights = dict[str, torch.Tensor]


@pytest.fixture
def gathered(tmp_path: Path) -> Weights:
    weights = {"a": torch.arange(4.0), "b": torch.ones(2, 2, dtype=torch.bfloat16), "c": torch.tensor([1, 2])}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return weights


def test_what_is_read_back_is_counted(gathered: Weights, tmp_path: Path) -> None:
    found = _verified(gathered, tmp_path)
    assert (found.num_tensors, found.max_abs_diff, found.source) == (3, 0.0, "model.safetensors")
    assert 0 <= found.seconds < 60
    gathered["a"] = gathered["a"] + torch.tensor([0.0, 0.0, 0.0, math.nan])
    both = load_file(tmp_path / "model.safetensors") | {"a": gathered["a"]}
    save_file(both, tmp_path / "model.safetensors")
    assert _verified(gathered, tmp_path).max_abs_diff == 0.0, "equal NaNs are equal"


CHANGES: dict[str, tuple[Callable[[Weights], Any], str]] = {
    "another value": (lambda weights: weights["a"].__setitem__(2, 9.0), "a differs by up to 7"),
    "another number": (lambda weights: weights["c"].__setitem__(1, 3), "c differs"),
    "another shape": (lambda weights: weights.update(b=torch.ones(4)), r"b has shape \[2, 2\] instead of \[4\]"),
    "one more": (lambda weights: weights.update(d=torch.ones(1)), "d is missing"),
    "one less": (lambda weights: weights.pop("b"), "b is unexpected or cannot be read"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_what_was_gathered_is_refused(gathered: Weights, tmp_path: Path, change: str) -> None:
    alter, said = CHANGES[change]
    alter(gathered)
    with pytest.raises(CheckpointMismatch, match=f"memory: {said}\\.") as refused:
        _verified(gathered, tmp_path)
    assert refused.value.place == str(tmp_path)


def test_what_cannot_be_read_is_refused(gathered: Weights, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointMismatch, match=r"model\.safetensors cannot be read"):
        _verified(gathered, tmp_path)
    index = {"metadata": {}, "weight_map": dict.fromkeys(gathered, "model-00001-of-00001.safetensors")}
    save_file({name: gathered[name] for name in "bc"}, tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    path.unlink()
    with pytest.raises(CheckpointMismatch, match="a is unexpected or cannot be read"):
        _verified(gathered, tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointMismatch, match=r"there is no model\.safetensors"):
        _verified(gathered, tmp_path)
