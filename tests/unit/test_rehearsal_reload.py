"""A rehearsal accepts a final folder only if `from_pretrained` reads it as expected."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from accel_scale.rehearsing.plan import CheckFailed
from accel_scale.rehearsing.rehearse import _check_reload
from accel_scale.rehearsing.reload import compare_final_folders


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """A model before training, and after training that changed one matrix, as saved by two runs."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    model = LlamaForCausalLM(config)
    paths = {name: tmp_path / name for name in ("start", "uninterrupted", "resumed")}
    model.save_pretrained(paths["start"])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight += 0.5
    model.save_pretrained(paths["uninterrupted"])
    model.save_pretrained(paths["resumed"])
    return paths


def edit(folder: Path, name: str, change: float | None) -> None:
    """Add `change` to a saved tensor, or remove the tensor if it is None."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = tensors[name] + change
    save_file(tensors, path, metadata={"format": "pt"})


def test_equal_and_trained(folders: dict[str, Path]) -> None:
    assert compare_final_folders(**folders) == (
        "LlamaForCausalLM: 21 tensors, 1 trained; logits equal after both runs"
    )


def test_a_run_that_cannot_be_resumed_is_loaded_alone(folders: dict[str, Path]) -> None:
    assert compare_final_folders(**{**folders, "resumed": None}).endswith("21 tensors, 1 trained; logits finite")


def test_a_missing_tensor_is_named(folders: dict[str, Path]) -> None:
    edit(folders["uninterrupted"], "model.norm.weight", None)
    with pytest.raises(CheckFailed, match=r"uninterrupted does not load whole: model\.norm\.weight"):
        compare_final_folders(**folders)


@pytest.mark.parametrize(
    ("dtype", "every", "is_allowed"),
    [(torch.bfloat16, 500, True), (torch.float32, 500, False), (torch.bfloat16, 8, False)],
)
def test_a_few_last_bits_of_16_bit_weights_may_differ(
    folders: dict[str, Path], dtype: torch.dtype, every: int, is_allowed: bool
) -> None:
    for name, folder in folders.items():
        path = folder / "model.safetensors"
        tensors = {key: tensor.to(dtype) for key, tensor in load_file(path).items()}
        if name == "resumed":
            weight = tensors["model.layers.0.mlp.up_proj.weight"].view(-1)
            weight[::every] *= 1 + torch.finfo(torch.bfloat16).eps
        save_file(tensors, path, metadata={"format": "pt"})
    if is_allowed:
        assert "logits equal to" in compare_final_folders(**folders)
    else:
        with pytest.raises(CheckFailed, match="differ by"):
            compare_final_folders(**folders)


def test_a_resumed_run_that_went_elsewhere(folders: dict[str, Path]) -> None:
    edit(folders["resumed"], "model.layers.0.mlp.up_proj.weight", 0.1)
    with pytest.raises(CheckFailed, match="differ by"):
        compare_final_folders(**folders)


def test_weights_that_never_moved(folders: dict[str, Path]) -> None:
    start = folders["start"]
    with pytest.raises(CheckFailed, match="nothing in start differs"):
        compare_final_folders(start=start, uninterrupted=start, resumed=start)


def test_weights_that_are_not_numbers(folders: dict[str, Path]) -> None:
    edit(folders["uninterrupted"], "lm_head.weight", float("nan"))
    with pytest.raises(CheckFailed, match="not finite"):
        compare_final_folders(**folders)


def test_a_model_that_fails_when_reloaded_fails_the_check(tmp_path: Path) -> None:
    """Whatever its code raises is a line in the table: here the tokens that are tried are not in its vocabulary."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "uninterrupted")
    rehearsal: Any = SimpleNamespace(spec=SimpleNamespace(resume_flag=None), optimizer_on_nvme=False, start=None)
    with pytest.raises(CheckFailed, match="IndexError: index out of range"):
        _check_reload(rehearsal, tmp_path)
