"""TRL's list of data sets in a recipe's YAML: how it is translated, and what is refused by file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_scale.errors import ConfigError
from accel_scale.flags.command_line import RecipeCommand
from accel_scale.flags.parsing import parse_flags
from accel_scale.flags.paths import named_inputs
from accel_scale.recipe_specs.pretrain import PRETRAIN
from accel_scale.recipe_specs.trl import DPO, SFT

ONE = """datasets:
- path: openai/gsm8k
  name: main
  split: train[:1000]
  columns: {prompt: question, completion: answer}
"""
SEVERAL = """learning_rate: 1.0e-4
datasets:
- path: trl-lib/tldr
  columns: [prompt, completion]
- path: json
  data_files: [a.jsonl, b.jsonl]
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def parsed(path: Path, *words: str, spec=SFT) -> dict[str, object]:
    return parse_flags(spec.flags, ["--config_file", str(path), *words], program=spec.program).explicit


def test_one_data_set_is_a_name(tmp_path):
    assert parsed(written(tmp_path, ONE)) == {
        "dataset_name": "openai/gsm8k",
        "dataset_config": "main",
        "dataset_train_split": "train[:1000]",
        "columns": ["prompt=question", "completion=answer"],
    }


@pytest.mark.parametrize("spec", [SFT, DPO], ids=["sft", "dpo"])
def test_several_are_a_mixture(tmp_path, spec):
    path = written(tmp_path, SEVERAL)
    values = parsed(path, spec=spec)
    assert values["dataset_mixture"] == ["trl-lib/tldr", "a.jsonl", "b.jsonl"]
    assert values["columns"] == ["prompt=prompt", "completion=completion"]
    weighed = "datasets:\n- {path: a.jsonl, fraction: 0.7}\n- {path: b/c, name: d, fraction: 3e-1}\n"
    assert parsed(written(tmp_path, weighed), spec=spec)["dataset_mixture"] == ["a.jsonl=0.7", "b/c:d=3e-1"]


def test_commands_see_the_flags_that_it_stands_for(tmp_path):
    path = written(tmp_path, SEVERAL)
    command = RecipeCommand.parse("sft", ["--config_file", str(path)])
    assert named_inputs(command.values) == {"dataset_mixture": ["trl-lib/tldr", "a.jsonl", "b.jsonl"]}
    assert command.place("dataset_mixture") == f"{path}:2"
    (tmp_path / "copies").mkdir()
    without = command.without(SFT.rehearsal.data_flags, tmp_path / "copies")
    assert without.config_path is not None
    assert parsed(without.config_path) == {"learning_rate": 1e-4}


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("datasets: a.jsonl\n", ":1", "is no list"),
        ("datasets:\n- a.jsonl\n", ":2", "is a mapping"),
        ("datasets:\n- path: a.jsonl\n  fractoin: 1\n", ":3", "did you mean fraction?"),
        ("datasets:\n- split: train\n", ":2", "has no path"),
        ("datasets:\n- path: a\n- path: b\n  split: test\n", ":4", "different splits: train, test"),
        ("datasets:\n- path: a\n  fraction: 1\n- path: b\n", ":2", "some have none"),
        ("datasets:\n- path: a/b\n  data_files: x.json\n", ":3", "data_files within a/b cannot be chosen"),
        ("datasets:\n- path: a\n  columns: [prompt, question]\n", ":3", "'question' is not a role"),
        ("datasets:\n- path: a\n  columns: {prompt: q}\n- path: b\n  columns: {prompt: r}\n", ":5", "'q' in an"),
        ("datasets:\n- path: a\ndataset_name: b\n", ":3", "'dataset_name' is given twice"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, text, place, problem):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        parsed(path)
    assert error.value.place == f"{path}{place}"
    assert problem in error.value.one_line()


def test_a_recipe_without_those_flags_does_not_know_the_key(tmp_path):
    with pytest.raises(ConfigError, match="'datasets' is not a flag"):
        parsed(written(tmp_path, ONE), spec=PRETRAIN)
