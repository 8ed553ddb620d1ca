"""The search space: a strictly checked YAML file of the flags to try and their ranges."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from accel_scale.errors import ConfigError
from accel_scale.flags.library import NeedsLibraryError
from accel_scale.flags.parsing import build_parser, parse_entry, refuse_launch_key
from accel_scale.flags.yaml_file import read_mapping
from accel_scale.recipe_specs.finding import Recipe, plain
from accel_scale.tuning.recipe import as_label, refuse_owned

if TYPE_CHECKING:
    from optuna.trial import Trial

_RANGE_KEYS = ("low", "high", "log", "step", "int")
_EXAMPLE = "write {low: 1e-5, high: 1e-3, log: true}, a list of choices, or one value."


@dataclass(frozen=True)
class Choice:
    """A choice among unordered values.

    Attributes:
        values: The values as read from YAML.
    """

    flag: str
    values: tuple[Any, ...]
    place: str

    def suggest(self, trial: Trial) -> object:
        """The value that Optuna suggests for `trial`."""
        by_label = {as_label(value): value for value in self.values}
        return by_label[trial.suggest_categorical(self.flag, list(by_label))]

    def value_of(self, label: Any) -> Any:
        """The flag's value for a value stored by Optuna."""
        return {as_label(value): value for value in self.values}[label]

    def grid(self) -> list[Any]:
        """All values, as Optuna stores them."""
        return [as_label(value) for value in self.values]

    def describe(self) -> Any:
        """The entry as written in the space's YAML."""
        return list(self.values)


@dataclass(frozen=True)
class Range:
    """A number between two inclusive bounds."""

    flag: str
    low: float
    high: float
    place: str
    log: bool = False
    step: float | None = None
    integer: bool = False

    def suggest(self, trial: Trial) -> float | int:
        """The value that Optuna suggests for `trial`."""
        if self.integer:
            step = 1 if self.step is None else int(self.step)
            return trial.suggest_int(self.flag, int(self.low), int(self.high), step=step, log=self.log)
        return trial.suggest_float(self.flag, self.low, self.high, step=self.step, log=self.log)

    def value_of(self, label: Any) -> Any:
        """The flag's value for a value stored by Optuna."""
        return label

    def grid(self) -> list[float]:
        """All values on the range's steps.

        Raises:
            ConfigError: if the range has no steps.
        """
        step = self.step or (1 if self.integer and not self.log else None)
        if step is None:
            raise ConfigError(
                f"{self.flag}: a grid needs finitely many values.",
                place=self.place,
                fix="give the range a `step`, list the values, or use --sampler tpe.",
            )
        count = round((self.high - self.low) / step) + 1
        values = [min(self.low + index * step, self.high) for index in range(count)]
        return [int(value) for value in values] if self.integer else [float(f"{value:.12g}") for value in values]

    def describe(self) -> Any:
        """The entry as written in the space's YAML."""
        described: dict[str, Any] = {"low": self.low, "high": self.high}
        described.update({"log": True} if self.log else {})
        described.update({"step": self.step} if self.step is not None else {})
        return {**described, "int": True} if self.integer else described


@dataclass(frozen=True)
class SearchSpace:
    """The searched flags, and those that the same file fixes for every trial.

    Attributes:
        path: The YAML file.
        dimensions: Choice or range of each searched flag.
        fixed: Value and place of each fixed flag.
    """

    path: Path
    dimensions: dict[str, Choice | Range]
    fixed: dict[str, tuple[Any, str]] = field(default_factory=dict)

    @property
    def searched(self) -> dict[str, str]:
        """Place in the file of each searched flag."""
        return {flag: dimension.place for flag, dimension in self.dimensions.items()}

    def suggest(self, trial: Trial) -> dict[str, Any]:
        """The flags of one trial."""
        return {flag: dimension.suggest(trial) for flag, dimension in self.dimensions.items()}

    def values_of(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The flags for a finished trial's parameters."""
        return {flag: self.dimensions[flag].value_of(params[flag]) for flag in self.dimensions if flag in params}

    def grid(self) -> dict[str, list[Any]]:
        """All values of each flag, for a grid."""
        return {flag: dimension.grid() for flag, dimension in self.dimensions.items()}

    def describe(self) -> dict[str, Any]:
        """The searched flags as written in YAML."""
        return {flag: dimension.describe() for flag, dimension in self.dimensions.items()}


def read_space(path: str | Path, recipe: Recipe) -> SearchSpace:
    """Read the space at `path`; every value goes through the recipe's own parser.

    Raises:
        ConfigError: naming file and line, for an unknown flag, a wrong type or bounds out of order.
    """
    try:
        return _read_space(Path(path), recipe)
    except NeedsLibraryError:
        whole = build_parser(recipe.classes, program=recipe.program)
        return _read_space(Path(path), replace(recipe, parser=whole))


def _read_space(path: Path, recipe: Recipe) -> SearchSpace:
    dimensions: dict[str, Choice | Range] = {}
    fixed: dict[str, tuple[Any, str]] = {}
    for flag, place, node in read_mapping(path):
        refuse_launch_key(recipe.parser, flag, place=place, path=path)
        refuse_owned(recipe, flag, place)
        if not recipe.has(flag):
            parse_entry(recipe.parser, flag, node, place)  # raises, naming the nearest existing flag
        if isinstance(node, yaml.SequenceNode):
            choice = _read_choice(recipe, flag, node, place, path)
            if len(choice.values) > 1:
                dimensions[flag] = choice
            else:
                fixed[flag] = choice.values[0], place
        elif isinstance(node, yaml.MappingNode) and _means_range(recipe, flag, node):
            dimensions[flag] = _read_range(recipe, flag, node, place, path)
        else:
            fixed[flag] = plain(parse_entry(recipe.parser, flag, node, place)), place
    if not dimensions:
        raise ConfigError("searches nothing.", place=str(path), fix=f"for at least one flag, {_EXAMPLE}")
    return SearchSpace(path, dimensions, fixed)


def _read_choice(recipe: Recipe, flag: str, node: yaml.SequenceNode, place: str, path: Path) -> Choice:
    values: list[Any] = []
    for item in node.value:
        item_place = f"{path}:{item.start_mark.line + 1}"
        value = plain(parse_entry(recipe.parser, flag, item, item_place))
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{flag}: {value} is not a value to try.", place=item_place, fix="use a finite number.")
        if value in values:
            raise ConfigError(f"{flag}: {value!r} is listed twice.", place=item_place, fix="list each value once.")
        values.append(value)
    if not values:
        raise ConfigError(f"{flag}: the list is empty.", place=place, fix=_EXAMPLE)
    return Choice(flag, tuple(values), place)


def _numeric_type(recipe: Recipe, flag: str) -> type | None:
    """`int` or `float` if the recipe's flag takes one number of that type, else None."""
    action = next((a for a in recipe.parser._actions if f"--{flag}" in a.option_strings), None)
    if action is None or action.choices or action.nargs not in (None, 1):
        return None
    return action.type if action.type in (int, float) else None  # type: ignore[return-value]


def _means_range(recipe: Recipe, flag: str, node: yaml.MappingNode) -> bool:
    """True if a mapping is a range: the flag takes a number, or the mapping has a `low` or `high` key."""
    keys = {str(key.value) for key, _ in node.value}
    return _numeric_type(recipe, flag) is not None or bool(keys & {"low", "high"})


def _read_range(recipe: Recipe, flag: str, node: yaml.MappingNode, place: str, path: Path) -> Range:
    number = _numeric_type(recipe, flag)
    if number is None:
        raise ConfigError(f"{flag} is not one number, so it has no range.", place=place, fix="list its choices.")
    found: dict[str, Any] = {}
    places: dict[str, str] = {}
    for key_node, value_node in node.value:
        key, key_place = str(key_node.value), f"{path}:{key_node.start_mark.line + 1}"
        if key not in _RANGE_KEYS:
            near = difflib.get_close_matches(key, _RANGE_KEYS, n=1, cutoff=0.3)
            fix = f"did you mean {near[0]}?" if near else f"a range has {', '.join(_RANGE_KEYS)}."
            raise ConfigError(f"{flag}: {key!r} is not part of a range.", place=key_place, fix=fix)
        if key in found:
            raise ConfigError(f"{flag}: {key!r} is given twice.", place=key_place, fix="keep one.")
        found[key] = _switch(flag, key, value_node, key_place) if key in ("log", "int") else value_node
        places[key] = key_place
    for bound in ("low", "high"):
        if bound not in found:
            raise ConfigError(f"{flag}: a range needs {bound!r}.", place=place, fix=_EXAMPLE)
    integer = number is int or found.get("int", False)
    if number is int and found.get("int") is False:
        raise ConfigError(f"{flag} takes whole numbers only.", place=places["int"], fix="remove `int: false`.")
    numbers = {
        key: _number(recipe, flag, key, found[key], places[key], integer=integer)
        for key in ("low", "high", "step")
        if key in found
    }
    result = Range(
        flag, numbers["low"], numbers["high"], place, found.get("log", False), numbers.get("step"), bool(integer)
    )
    _check_range(result, places)
    return result


def _switch(flag: str, key: str, node: yaml.Node, place: str) -> bool:
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:bool":
        return node.value.lower() in ("true", "yes", "on")
    raise ConfigError(f"{flag}: {key!r} is true or false.", place=place, fix=f"write `{key}: true` or remove it.")


def _number(recipe: Recipe, flag: str, key: str, node: yaml.Node, place: str, *, integer: bool) -> float:
    text = node.value if isinstance(node, yaml.ScalarNode) else None
    try:
        value = float(text)  # type: ignore[arg-type]  # from the text: YAML 1.1 reads 1e-4 as a word
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        shown = "this" if text is None else repr(text)
        raise ConfigError(f"{flag}: {key!r} must be a number, and {shown} is none.", place=place, fix=_EXAMPLE)
    if integer and not value.is_integer():
        raise ConfigError(f"{flag}: {key!r} must be a whole number, not {text}.", place=place, fix="round it.")
    if key != "step":
        parse_entry(recipe.parser, flag, yaml.ScalarNode(node.tag, f"{value:g}" if not integer else text), place)
    return int(value) if integer else value


def _check_range(found: Range, places: Mapping[str, str]) -> None:
    flag = found.flag
    if not found.low < found.high:
        raise ConfigError(
            f"{flag}: low ({found.low:g}) must be below high ({found.high:g}).",
            place=places["low"],
            fix="swap them, or give one value.",
        )
    if found.log and found.low <= 0:
        raise ConfigError(
            f"{flag}: a logarithmic range cannot begin at {found.low:g}.",
            place=places["low"],
            fix="begin above 0, or remove `log`.",
        )
    if found.step is None:
        return
    if found.log:
        raise ConfigError(
            f"{flag}: `step` and `log` exclude each other.", place=places["step"], fix="list the values to be tried."
        )
    if found.step <= 0:
        raise ConfigError(f"{flag}: step must be above 0.", place=places["step"], fix="use a positive step.")
    steps = (found.high - found.low) / found.step
    if abs(steps - round(steps)) > 1e-6:
        reached = found.low + math.floor(steps + 1e-6) * found.step
        raise ConfigError(
            f"{flag}: steps of {found.step:g} from {found.low:g} do not reach {found.high:g}.",
            place=places["step"],
            fix=f"end at {reached:g}, or change the step.",
        )
