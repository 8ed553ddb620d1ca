"""Numbers are checked when flags are read: every numeric flag has a range, in both recipes and the search."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args, get_type_hints

import pytest

from accel_scale.errors import ConfigError
from accel_scale.flags.library import load_classes
from accel_scale.flags.parsing import parse_flags
from accel_scale.flags.pretraining import PretrainArguments
from accel_scale.flags.ranges import RANGES, FlagRange, check_ranges

ROOT = Path(__file__).parents[2]


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ranges_{name}", ROOT / "recipes" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("recipe", ["sft", "pretrain", "tune"])
def test_every_flag_that_takes_a_number_has_a_range_and_a_default_within(recipe: str) -> None:
    module = loaded(recipe)
    classes = getattr(module, "FLAG_CLASSES", None) or (module.TuneArguments,)
    without, outside = [], []
    for cls in load_classes(classes):
        hints = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if not field.init or not {int, float} & {hints[field.name], *get_args(hints[field.name])}:
                continue
            if field.name not in RANGES:
                without.append(field.name)
            elif isinstance(field.default, (int, float)) and not RANGES[field.name].holds(field.default):
                outside.append(field.name)
    assert (without, outside) == ([], [])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_in_no_range(value: float) -> None:
    assert not any(allowed.holds(value) for allowed in RANGES.values())
    with pytest.raises(ConfigError, match="a_flag_of_somebody_else cannot be"):
        check_ranges({"a_flag_of_somebody_else": value}, "--{}".format)


@pytest.mark.parametrize(
    ("allowed", "inside", "outside"),
    [
        (FlagRange(1), (1, 2, 1e9), (0, -1)),
        (FlagRange(0, above=True), (1e-9, 3), (0, -1e-9)),
        (FlagRange(0, 1, below=True), (0, 0.5), (1, 1.5)),
        (FlagRange(0, 1), (0, 1), (1.01,)),
        (FlagRange(1, also=-1), (1, -1), (0, -2)),
        (FlagRange(0, whole_from=1), (0, 0.03, 1, 200), (1.5, 2.25, -1)),
    ],
)
def test_ranges_have_the_ends_that_they_say(allowed: FlagRange, inside: tuple, outside: tuple) -> None:
    assert all(allowed.holds(value) for value in inside)
    assert not any(allowed.holds(value) for value in outside)
    assert allowed.describe().startswith("use ")


def test_command_line_and_file_are_checked_alike_and_negative_numbers_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 3\nlearning_rate: -1e-4\n")
    for argv, place in (
        (["--learning_rate", "-1e-4"], "--learning_rate"),
        (["--learning_rate=-inf"], "--learning_rate"),
        (["--config_file", str(path)], f"{path}:2"),
    ):
        with pytest.raises(ConfigError, match="use more than 0") as caught:
            parse_flags((PretrainArguments,), argv, program="pretrain.py")
        assert caught.value.place == place
    assert parse_flags((PretrainArguments,), ["--max_steps", "-1"], program="p").explicit == {"max_steps": -1}
