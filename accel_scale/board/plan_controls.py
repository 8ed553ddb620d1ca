"""Controls of the "Plan" tab: flags of `accel-scale plan`, and a command line that gives the same answer."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.launching.hub_reach import require_on_hub
from accel_scale.planning.models.catalogue import is_on_hub
from accel_scale.planning.search.wish import FLAGS, MODEL, PlanFlag, Value, Wish

_LONGEST_TEXT = 200  # characters
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
CONTROLS: tuple[PlanFlag, ...] = tuple(flag for flag in (MODEL, *FLAGS) if flag.label)


def name_of(control: PlanFlag) -> str:
    """The flag that the control sets; a setting that is on by default gets its `no_` flag."""
    return f"no_{control.name}" if control.off else control.name


def start_of(control: PlanFlag) -> Value:
    """The control's initial value; None leaves it open."""
    return False if control.off else control.default if control.start is None else control.start


def settings_of(values: Sequence[Value]) -> dict[str, str | bool]:
    """The settings by flag, as text; switches stay booleans.

    Args:
        values: One value for each of `CONTROLS`.

    Raises:
        ConfigError: for a number out of range, text that is too long, or a model that is a path.
    """
    found: dict[str, str | bool] = {}
    for control, value in zip(CONTROLS, values, strict=True):
        if isinstance(control.default, bool):
            found |= {name_of(control): True} if value else {}
        elif value is not None and (text := _text(control, value)):
            found[control.name] = text
    _check_model(str(found.get(MODEL.name, "")))
    return found


def wish_of(settings: Mapping[str, str | bool]) -> Wish:
    """The settings as the planner's `Wish`."""
    words = {name: value for name, value in settings.items() if name in Wish.__dataclass_fields__}
    return Wish(**words, packing=not settings.get("no_packing", False))  # type: ignore[arg-type]


def command_of(settings: Mapping[str, str | bool], *more: str) -> str:
    """The command line that gives the same answer, followed by the words in `more`."""
    words = ["accel-scale", "plan", str(settings[MODEL.name])]
    for name, value in settings.items():
        if value is True:
            words.append(f"--{name}")
        elif name != MODEL.name and value != getattr(Wish, name, None):
            words += [f"--{name}", str(value)]
    return shlex.join([*words, *more])


def _text(control: PlanFlag, value: Value) -> str:
    text = str(value).strip()
    place = f"--{control.name}"
    if len(text) > _LONGEST_TEXT:
        raise ConfigError(f"{len(text):,} characters are too many.", place=place, fix=f"use {_LONGEST_TEXT} or fewer.")
    if not text.isprintable():
        raise ConfigError("holds characters that cannot be printed.", place=place, fix="remove them.")
    if control.most and text:
        if not text.isascii() or not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{text!r} is not a whole number above 0.", place=place, fix="write it like 8.")
        if int(text) > control.most:
            raise ConfigError(f"{text} is too large.", place=place, fix=f"use {control.most:,} or less.")
    return text


def _check_model(name: str) -> None:
    """Check that a model is a catalogue or hub name: the page reads no files of its host.

    Raises:
        ConfigError: for a path, and for a hub name that is not available.
    """
    if not _NAME.fullmatch(name) or ".." in name or name.startswith(".") or Path(name).exists():
        raise ConfigError(
            f"{name!r} is no name of a model." if name else "no model is named.",
            place="MODEL",
            fix="use one of the list or owner/name of the hub; for a folder, accel-scale plan FOLDER in a terminal.",
        )
    if is_on_hub(name):
        require_on_hub(name, kind="model", place="MODEL")
