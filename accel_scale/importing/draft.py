"""State of an import: the recipe, its flags, the launch file, and a note on every key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accel_scale.facts.optimizer_specs import OPTIMIZER_NAMES

# Outcomes for a key: it has a counterpart; it has one that may differ; it has none and training changes; it has none
# and training is the same; it is off or empty in the file.
MAPPED, CHECK, LOST, NO_EFFECT, OFF = "mapped", "check", "lost", "no effect", "off"


class NoCounterpart(Exception):
    """A value without a counterpart among our flags; the message gives the reason or what to do."""


@dataclass(frozen=True)
class Row:
    """A key of the other project.

    Attributes:
        key: Name in their file; ``outer.inner`` within a mapping.
        flag: Our flag, for a value that converts on its own.
        convert: Converts their value to ours and may raise `NoCounterpart`; None keeps the value.
        why: For a key without a flag, the reason or what to do; empty if it is read together with other keys.
        changes: For a key without a flag, whether training differs.
    """

    key: str
    flag: str | None = None
    convert: Callable[[object], object] | None = None
    why: str = ""
    changes: bool = True


def takes(*keys: str, flag: str | None = None, convert: Callable[[object], object] | None = None) -> tuple[Row, ...]:
    """Keys that convert on their own, to `flag` or to a flag of the same name."""
    return tuple(Row(key, flag or key.rpartition(".")[2], convert) for key in keys)


def joins(*keys: str) -> tuple[Row, ...]:
    """Keys that a function reads together with others."""
    return tuple(Row(key) for key in keys)


def leaves(why: str, *keys: str, changes: bool = True) -> tuple[Row, ...]:
    """Keys without a counterpart."""
    return tuple(Row(key, why=why, changes=changes) for key in keys)


@dataclass(frozen=True)
class Note:
    """A note on one key."""

    key: str
    place: str
    kind: str
    text: str


@dataclass
class Draft:
    """The result of an import while it is built.

    Attributes:
        path: The imported file.
        values: Its keys and values; nested ones as ``outer.inner`` if the project's table has such keys.
        places: Place of each key as ``file:line``.
        recipe: Name of our recipe.
        flags: Our flags, in the order in which they are written.
        launch: Name of a launch file that ships with the package; None leaves it to the user.
    """

    path: Path
    values: Mapping[str, object]
    places: Mapping[str, str]
    recipe: str = "sft"
    flags: dict[str, object] = field(default_factory=dict)
    launch: str | None = None
    notes: list[Note] = field(default_factory=list)

    def get(self, key: str) -> object:
        """The value of their key, or None if not set."""
        return self.values.get(key)

    def is_on(self, key: str) -> bool:
        """True if their key is set to something other than off."""
        return not is_off(self.get(key))

    def note(self, key: str, kind: str, text: str = "") -> None:
        """Add a note on a key if their file has it."""
        if key in self.values:
            self.notes.append(Note(key, self.places[key], kind, text))

    def set(self, flag: str, value: object, *keys: str) -> None:
        """Set a flag, and note it as the counterpart of those of `keys` that are set."""
        self.flags[flag] = value
        for key in keys:
            if self.get(key) is not None:
                self.note(key, MAPPED, f"{flag}: {shown(value)}")

    def default(self, **flags: object) -> None:
        """Apply their defaults where ours differ."""
        for flag, value in flags.items():
            self.flags.setdefault(flag, value)

    def training_defaults(self) -> None:
        """Apply transformers' defaults, which both projects use."""
        if self.flags.get("lr_scheduler_type", "cosine") == "cosine":
            self.default(min_lr_ratio=0.0)
        if self.recipe == "pretrain":
            self.default(adam_beta2=0.999, weight_decay=0.0)

    @property
    def lost(self) -> list[Note]:
        """Notes on keys that change training and have no counterpart."""
        return [note for note in self.notes if note.kind == LOST]

    def apply(self, rows: Sequence[Row]) -> None:
        """Convert independent keys and note those without a counterpart; keys of `joins` must be read before."""
        known = {row.key: row for row in rows}
        joined = {note.key for note in self.notes}
        for key, value in self.values.items():
            row = known.get(key)
            if row is None:
                near = f"the import does not know {key!r}"
                self.note(
                    key, OFF if is_off(value) else LOST, f"{near}: see what it does there, and set our flag for it"
                )
            elif row.flag is not None:
                self._take(row, value)
            elif row.why:
                self.note(key, OFF if is_off(value) else LOST if row.changes else NO_EFFECT, row.why)
            elif key not in joined:
                self.note(key, OFF if is_off(value) else NO_EFFECT, "without effect here, beside the other keys")

    def _take(self, row: Row, value: object) -> None:
        if value is None or value == "":
            self.note(row.key, OFF)
            return
        try:
            converted = value if row.convert is None else row.convert(value)
        except NoCounterpart as error:
            self.note(row.key, LOST, str(error))
            return
        self.set(str(row.flag), converted, row.key)


def is_off(value: object) -> bool:
    """True for null, false, zero or empty values."""
    return value is None or value is False or value in ("", 0, "none", "false") or value in ([], {})


def shown(value: object) -> str:
    """A value on one line, as in YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list) else str(value)


def as_list(value: object) -> list[str]:
    """`value` as a list of strings; a string is split at commas."""
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    return [part.strip() for part in str(value).split(",") if part.strip()]


def number(value: object, name: str) -> float:
    """`value` as a number; YAML may have read it as text (``1e-4``)."""
    try:
        return float(str(value))
    except ValueError:
        raise NoCounterpart(f"{name}: {value!r} is no number") from None


def optimizer(value: object) -> object:
    """The optimizer, if ours has it under the same name."""
    if value in OPTIMIZER_NAMES:
        return value
    raise NoCounterpart(f"optim: {value} is not among ours: see accel-scale sft --recipe_help")
