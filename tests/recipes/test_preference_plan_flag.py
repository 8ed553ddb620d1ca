"""``--plan`` for preferences and rewards: predictions against the tensors of a real step, choosing, refusing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pairs import write_labelled, write_pairs
from test_grpo import REWARDS, write_questions

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.bad_inputs import load_recipe

pytestmark = pytest.mark.slow


def planned(recipe: str, folder: Path, flags: str) -> dict[str, Any]:
    """The plan in `run_summary.json` after one step of the embedded model, with the settings chosen for it."""
    common = ["--model_name_or_path", default_model_path(), "--max_steps", "1", "--save_strategy", "no"]
    common += ["--output_dir", str(folder / "out"), "--logging_steps", "1", "--recover_from_oom", "false"]
    if recipe in ("dpo", "kto"):
        write = write_pairs if recipe == "dpo" else write_labelled
        common += ["--dataset_name", str(write(folder / "data")), "--max_length", "128"]
    else:
        common += ["--dataset_name", str(write_questions(folder / "data", answer="completion"))]
        common += ["--rewards", f"{REWARDS}:even_characters", "--num_generations", "4"]
        common += ["--max_completion_length", "24"]
    summary: dict[str, Any] = load_recipe(recipe).main([*common, *flags.split()])
    return summary


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("dpo", "--precision bf16 --checkpointing_policy none"),
        ("dpo", "--precision fp32 --method lora"),
        ("dpo", "--precision fp32 --precompute_ref_log_probs true"),
        ("kto", "--precision bf16 --checkpointing_policy none"),
        ("kto", "--precision fp32 --method lora"),
        ("kto", "--precision fp32 --precompute_ref_log_probs true"),
        ("grpo", "--precision fp32 --beta 0.1"),
        ("rloo", "--precision fp32"),
        ("grpo", "--precision bf16 --method lora --gradient_accumulation_steps 2"),
    ],
)
def test_predicted_bytes_are_those_of_a_real_step(tmp_path: Path, recipe: str, flags: str) -> None:
    plan = planned(recipe, tmp_path, f"--plan check --per_device_train_batch_size 4 {flags}")["plan"]
    measured, compared = plan["measured"], plan["compared"]
    assert measured["how"] == "first step traced"
    assert 0 < measured["positions"] <= compared["positions"]
    assert measured["allocated_bytes"] == pytest.approx(compared["allocated_bytes"], rel=0.05)
    assert ("generation" in plan["predicted"]["phases"]) == (recipe in ("grpo", "rloo"))


@pytest.mark.parametrize(("recipe", "examples"), [("dpo", 4), ("kto", 4), ("grpo", 8)])
def test_auto_chooses_a_batch_that_counts_examples(tmp_path: Path, recipe: str, examples: int) -> None:
    flags = f"--plan auto --global_batch_size {examples} --precision fp32"
    summary = planned(recipe, tmp_path, flags)
    settings = summary["settings"]
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == examples
    assert summary["origins"]["per_device_train_batch_size"].startswith("planned: fits ")
    assert summary["steps"] == 1


@pytest.mark.parametrize("recipe", ["dpo", "grpo"])
def test_what_cannot_fit_is_refused_before_a_step(tmp_path: Path, recipe: str) -> None:
    flags = "--plan check --plan_gpu 600MiB --per_device_train_batch_size 64 --precision fp32"
    with pytest.raises(ConfigError, match=r"--plan_gpu: this run would not fit: predicted .* of 600 MiB"):
        planned(recipe, tmp_path, flags)
    assert not (tmp_path / "out" / "model.safetensors").exists()
