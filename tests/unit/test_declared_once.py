"""Each flag is declared once: recipes share declarations; planner and docs use the recipes' names and values."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections import defaultdict
from pathlib import Path

import pytest

from accel_scale.cli import plan
from accel_scale.flags.common import PLANS, ScaleArguments
from accel_scale.flags.library import LaterClass
from accel_scale.flags.parsing import parse_flags
from accel_scale.planning.search.wish import Wish
from accel_scale.recipe_specs.finding import load_recipe
from accel_scale.shipped import recipe_names, recipe_script

ROOT = Path(__file__).resolve().parents[2]
SPECS = [load_recipe(recipe_script(name)).spec for name in recipe_names() if name != "tune"]
# Flags of the same name whose default or choices differ between recipes, or between a loop and a trainer.
DIFFERENT = {"output_dir", "max_length", "method", "plan", "collective_timeout", "guard"}


def own_classes() -> dict[str, type]:
    """Every class that declares a recipe's flags, including base classes."""
    classes = [cls for spec in SPECS for cls in spec.flags]
    ours = [base for cls in classes for base in (cls.own if isinstance(cls, LaterClass) else (cls,))]
    return {base.__name__: base for cls in ours for base in cls.__mro__ if dataclasses.is_dataclass(base)}


def test_recipes_declare_a_flag_once() -> None:
    declared: dict[str, list[str]] = defaultdict(list)
    for name, cls in own_classes().items():
        for flag in vars(cls).get("__annotations__", {}):
            declared[flag].append(name)
    twice = {flag for flag, classes in declared.items() if len(classes) > 1}
    assert twice == DIFFERENT


def planner() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return parser


def test_the_planners_flags_of_training_are_the_recipes() -> None:
    known = {f.name for cls in own_classes().values() for f in dataclasses.fields(cls)}
    trl = {"per_device_train_batch_size", "max_length", "packing", "attn_implementation", "use_dora", "dataset_name"}
    trl |= {"lora_r", "lora_target_modules", "lora_dropout"}
    own = {"mean_length", "no_packing", "recipe", "stack"}
    for group in planner()._action_groups:
        if group.title and ("training" in group.title or "share" in group.title):
            names = {action.dest for action in group._group_actions}
            assert names <= known | trl | own, names - known - trl - own


def test_the_planners_defaults_on_the_command_line_are_those_of_a_wish() -> None:
    typed = vars(planner().parse_args(["m"]))
    for field in dataclasses.fields(Wish):
        if field.default is dataclasses.MISSING or field.name == "packing":
            continue
        default = typed[field.name]
        assert (tuple(default) if isinstance(default, list) else default) == field.default, field.name


@pytest.mark.parametrize("page", ["fine-tuning.md", "pretraining.md", "guard.md"])
def test_values_in_the_docs_tables_are_choices_of_the_flag(page: str) -> None:
    choices: dict[str, set[str]] = defaultdict(set)
    for cls in own_classes().values():
        for field in dataclasses.fields(cls):
            choices[field.name] |= set(field.metadata.get("choices") or ())
    rows = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("|")]
    for row in rows:
        for name, values in re.findall(r"`--(\w+) ([\w-]+(?:\\\|[\w-]+)+)`", row):
            if choices[name]:
                assert set(values.split("\\|")) <= choices[name], (name, values)


def test_the_docs_name_every_method_precision_and_plan() -> None:
    text = (ROOT / "docs/fine-tuning.md").read_text()
    for flag, values in (
        ("method", ScaleArguments.__dataclass_fields__["method"].metadata["choices"]),
        ("precision", ScaleArguments.__dataclass_fields__["precision"].metadata["choices"]),
        ("plan", PLANS),
    ):
        joined = "\\|".join(values)
        assert f"`--{flag} {joined}`" in text


def test_flags_that_documents_name_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known = set()
    for spec in SPECS:
        with pytest.raises(SystemExit):
            parse_flags(spec.flags, ["--help"], program=spec.program)
        known |= set(re.findall(r"--(\w+)", capsys.readouterr().out))
    for page in ("fine-tuning.md", "pretraining.md", "guard.md"):
        text = (ROOT / "docs" / page).read_text()
        named = {name for row in text.splitlines() if row.startswith("| `--") for name in re.findall(r"`--(\w+)", row)}
        assert named <= known, (page, named - known)
