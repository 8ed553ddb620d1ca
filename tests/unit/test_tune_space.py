"""The search space is read strictly by the recipe's own parser, and the best trial is a file the recipe can read."""

from __future__ import annotations

import json
from pathlib import Path

import optuna
import pytest

from accel_scale.errors import ConfigError
from accel_scale.flags.parsing import parse_flags
from accel_scale.recipe_specs.finding import Recipe, load_recipe
from accel_scale.tuning.recipe import FixedFlags, fixed_flags
from accel_scale.tuning.results import importances, outcome, row, write_best, write_csv, write_plots
from accel_scale.tuning.space import SearchSpace, read_space
from accel_scale.tuning.trials import RECORDS, refuse_foreign_trials, remove_model

ROOT = Path(__file__).parents[2]
optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture(scope="module")
def sft() -> Recipe:
    return load_recipe(ROOT / "recipes" / "sft.py")


def space_of(recipe: Recipe, folder: Path, text: str) -> SearchSpace:
    path = folder / "space.yaml"
    path.write_text(text)
    return read_space(path, recipe)


GOOD = """\
learning_rate: {low: 1e-5, high: 1e-3, log: true}
lora_r: {low: 8, high: 64, step: 8}
warmup_ratio: {low: 0.0, high: 0.2, step: 0.05}
lr_scheduler_type: [linear, cosine]
eval_strategy: [no, steps]
lora_target_modules: [[q_proj], [q_proj, v_proj]]
lr_scheduler_kwargs: {num_cycles: 2}
max_steps: 100
optim: [adamw_torch]
"""


def test_ranges_choices_and_fixed_values(sft: Recipe, tmp_path: Path) -> None:
    space = space_of(sft, tmp_path, GOOD)
    assert space.describe() == {
        "learning_rate": {"low": 1e-5, "high": 1e-3, "log": True},
        "lora_r": {"low": 8, "high": 64, "step": 8, "int": True},
        "warmup_ratio": {"low": 0.0, "high": 0.2, "step": 0.05},
        "lr_scheduler_type": ["linear", "cosine"],
        "eval_strategy": ["no", "steps"],  # as the flag defines it, not as YAML 1.1 does
        "lora_target_modules": [["q_proj"], ["q_proj", "v_proj"]],
    }
    assert {name: value for name, (value, _) in space.fixed.items()} == {
        "lr_scheduler_kwargs": '{"num_cycles": 2}',
        "max_steps": 100,
        "optim": "adamw_torch",
    }
    assert space.fixed["max_steps"][1] == f"{tmp_path}/space.yaml:8"
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)).ask()
    values = space.suggest(trial)
    assert values == space.values_of(trial.params)
    assert 1e-5 <= values["learning_rate"] <= 1e-3
    assert values["lora_r"] % 8 == 0
    assert isinstance(values["lora_target_modules"], list)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("max_steps: 5\nlearning_rat: [1e-3, 2e-3]", 2, "did you mean learning_rate?"),
        ("learning_rat: {low: 1, high: 2}", 1, "did you mean learning_rate?"),
        ("learning_rate: {low: 1e-3, high: 1e-4}", 1, "low (0.001) must be below high (0.0001)"),
        ("learning_rate:\n  low: 1e-4\n  hihg: 1e-3", 3, "did you mean high?"),
        ("learning_rate: {low: 1e-4}", 1, "needs 'high'"),
        ("learning_rate:\n  low: 0\n  high: 1\n  log: true", 2, "cannot begin at 0"),
        ("learning_rate:\n  low: 1e-4\n  high: 1e-3\n  log: maybe", 4, "true or false"),
        ("learning_rate:\n  low: 1e-4\n  high: tiny", 3, "'tiny' is none"),
        ("learning_rate: {low: 1e-4, high: .inf}", 1, "must be a number"),
        ("learning_rate:\n  low: 1\n  high: 2\n  log: true\n  step: 0.5", 5, "exclude each other"),
        ("learning_rate:\n  low: 1\n  low: 2\n  high: 3", 3, "given twice"),
        ("warmup_ratio:\n  low: 0\n  high: 0.2\n  step: 0.15", 4, "end at 0.15"),
        ("warmup_ratio:\n  low: 0\n  high: 0.2\n  step: 0", 4, "above 0"),
        ("lora_r:\n  low: 8\n  high: 16.5", 3, "whole number"),
        ("lora_r:\n  low: 8\n  high: 16\n  int: false", 4, "whole numbers only"),
        ("lr_scheduler_type: {low: 1, high: 2}", 1, "not one number"),
        ("packing: {low: 0, high: 1}", 1, "not one number"),
        ("lr_scheduler_type:\n- linear\n- cosin", 3, "did you mean cosine?"),
        ("learning_rate: [1e-3,\n  fast]", 2, "learning_rate"),
        ("learning_rate: [1e-3, 0.001]", 1, "listed twice"),
        ("learning_rate: [1e-3, nan]", 1, "not a value to try"),
        ("learning_rate: []", 1, "the list is empty"),
        ("seed: 1\nseed: [1, 2]", 2, "given twice"),
        ("seed: [1, 2]\noutput_dir: out", 2, "cannot be set for a trial"),
        ("seed: [1, 2]\nfsdp_config: {a: 1}", None, None),
        ("distributed_type: FSDP", 1, "belongs to an Accelerate launch file"),
        ("seed: [1, 2", None, "not valid YAML"),
        ("max_steps: 5", None, "searches nothing"),
        ("", None, "searches nothing"),
    ],
)
def test_a_bad_space_names_file_and_line(
    sft: Recipe, tmp_path: Path, text: str, line: int | None, words: str | None
) -> None:
    if words is None:  # a flag that accepts mappings keeps them
        assert json.loads(space_of(sft, tmp_path, text).fixed["fsdp_config"][0]) == {"a": 1}
        return
    with pytest.raises(ConfigError) as caught:
        space_of(sft, tmp_path, text)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/space.yaml" + (f":{line}:" if line else ""))
    assert "Fix:" in str(caught.value)
    assert "\n" not in str(caught.value)


def fix(recipe: Recipe, space: SearchSpace, *argv: str) -> FixedFlags:
    return fixed_flags(recipe, argv, space.fixed, space.searched)


def test_command_line_over_space_over_the_recipes_file(sft: Recipe, tmp_path: Path) -> None:
    space = space_of(sft, tmp_path, "learning_rate: [1e-3, 2e-3]\nmax_steps: 100\nseed: 7")
    base = tmp_path / "base.yaml"
    base.write_text("learning_rate: 5e-4\nmax_steps: 9\nweight_decay: 0.1\nlogging_steps: 3\noutput_dir: final\n")
    found = fix(sft, space, "--config_file", str(base), "--logging_steps", "4", "--packing", "false")
    assert found.values == {
        "max_steps": 100,
        "seed": 7,
        "weight_decay": 0.1,
        "logging_steps": 4,
        "packing": False,
    }
    assert found.output_dir == "final"
    assert found.origins["weight_decay"] == f"{base}:3"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--learning_rate", "1e-3"], "searched in the space"),
        (["--output_dir", "x"], "cannot be set for a trial"),
        (["--resume_from_checkpoint", "true"], "cannot be set for a trial"),
        (["--hub_token", "hf_abc"], "HF_TOKEN"),
        (["--push_to_hub"], "uploaded"),
        (["--learning_rat", "1"], "did you mean --learning_rate?"),
    ],
)
def test_flags_that_no_trial_can_have(sft: Recipe, tmp_path: Path, argv: list[str], words: str) -> None:
    space = space_of(sft, tmp_path, "learning_rate: [1e-3, 2e-3]")
    with pytest.raises(ConfigError) as caught:
        fix(sft, space, *argv)
    assert words in str(caught.value)
    assert "hf_abc" not in str(caught.value)


@pytest.mark.slow
def test_best_is_a_file_that_the_recipe_reads_back(sft: Recipe, tmp_path: Path) -> None:
    space = space_of(sft, tmp_path, GOOD)
    fixed = fix(sft, space, "--columns", "prompt=a b", "completion=c", "--model_init_kwargs", '{"use_cache": false}')
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    tried = []
    for value in (0.75, 0.25, 0.5, 1.0):
        trial = study.ask()
        tried.append(space.suggest(trial))
        trial.report(value, 10)
        study.tell(trial, value)
    path = write_best(tmp_path, sft, space, fixed, study.best_trial, "eval_loss")
    read = parse_flags(sft.classes, ["--config_file", str(path)], program="sft.py").explicit
    assert read["learning_rate"] == tried[1]["learning_rate"], "to the last bit"
    assert read["lora_target_modules"] == tried[1]["lora_target_modules"]
    assert str(getattr(read["eval_strategy"], "value", read["eval_strategy"])) == tried[1]["eval_strategy"]
    assert read["columns"] == ["prompt=a b", "completion=c"]
    assert read["max_steps"] == 100
    assert read.keys() == {*space.dimensions, *fixed.values}
    assert "--config_file" in path.read_text().splitlines()[2]

    lines = write_csv(tmp_path, study.trials, space).read_text().splitlines()
    assert len(lines) == 5
    assert lines[0].startswith(
        "trial,outcome,value,last_step,seconds,tokens_per_second,peak_bytes,started,learning_rate"
    )
    assert sum(importances(study).values()) == pytest.approx(1)
    assert set(write_plots(tmp_path, study)) == {"optimization_history.png", "importances.png", "slices.png"}
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("slices", "importances"))


def test_a_study_without_a_complete_trial_still_reports(sft: Recipe, tmp_path: Path) -> None:
    space = space_of(sft, tmp_path, "learning_rate: [1e-3, 2e-3]")
    study = optuna.create_study()
    trial = study.ask()
    space.suggest(trial)
    trial.report(float("nan"), 3)
    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    assert write_plots(tmp_path, study) == []
    assert importances(study) == {}
    assert outcome(study.trials[0]) == "pruned"
    assert row(study.trials[0], space)["value"] != row(study.trials[0], space)["value"]


def test_the_embedded_space_fits_its_recipe(sft: Recipe) -> None:
    space = read_space(ROOT / "recipes" / "configs" / "tune_sft.yaml", sft)
    assert "learning_rate" in space.dimensions
    assert space.fixed["eval_strategy"][0] == "steps"
    assert space.fixed["max_steps"][0] / space.fixed["eval_steps"][0] >= 3, "nothing to prune by"


def test_only_records_of_a_trial_stay(tmp_path: Path) -> None:
    for name in [*RECORDS, "model.safetensors", "config.json", "checkpoint-5/model.safetensors"]:
        path = tmp_path / "0" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    remove_model(tmp_path / "0")
    assert {path.name for path in (tmp_path / "0").iterdir()} == RECORDS
    remove_model(tmp_path / "absent")
    refuse_foreign_trials({"0"}, {0, 1}, tmp_path)
    with pytest.raises(ConfigError, match=r"trial 0 in .* is not in this study"):
        refuse_foreign_trials({"0"}, set(), tmp_path)


def test_a_script_must_say_its_flags(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no recipe"):
        load_recipe(tmp_path / "absent.py")
    (tmp_path / "plain.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match=r"assign an .*RecipeSpec to RECIPE"):
        load_recipe(tmp_path / "plain.py")
    (tmp_path / "broken.py").write_text("RECIPE = 1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_recipe(tmp_path / "broken.py")
