"""What an import has found so far: the recipe, its flags, the launch file, and a word on every key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accel_scale.facts.optimizer_specs import OPTIMIZER_NAMES

# How far a key has come: it has a counterpart; it has one that may differ; it has none and training changes; it has
# none and training is the same; it is off or empty in the file.
MAPPED, CHECK, LOST, NO_EFFECT, OFF = "mapped", "check", "lost", "no effect", "off"


class NoCounterpart(Exception):
    """A value that no flag of ours stands for: why, or what to do."""


@dataclass(frozen=True)
class Row:
    """A key of theirs.

    Attributes:
        key: As in their file; ``outer.inner`` within a mapping.
        flag: Ours, for a value that goes across on its own.
        convert: Their value → ours; raises `NoCounterpart`. None: as it is.
        why: Without a flag: why there is none, or what to do. Empty: read together with other keys.
        changes: Without a flag: whether what is trained differs.
    """

    key: str
    flag: str | None = None
    convert: Callable[[object], object] | None = None
    why: str = ""
    changes: bool = True


def takes(*keys: str, flag: str | None = None, convert: Callable[[object], object] | None = None) -> tuple[Row, ...]:
    """Keys that go across, under `flag` or their own names."""
    return tuple(Row(key, flag or key.rpartition(".")[2], convert) for key in keys)


def joins(*keys: str) -> tuple[Row, ...]:
    """Keys that a function reads together."""
    return tuple(Row(key) for key in keys)


def leaves(why: str, *keys: str, changes: bool = True) -> tuple[Row, ...]:
    """Keys without a counterpart."""
    return tuple(Row(key, why=why, changes=changes) for key in keys)


@dataclass(frozen=True)
class Note:
    """A word on a key."""

    key: str
    place: str
    kind: str
    text: str


@dataclass
class Draft:
    """The result of an import, as it grows.

    Attributes:
        path: Their file.
        values: Their keys and values; nested ones as ``outer.inner`` where `rows` have such keys.
        places: key → ``file:line``.
        recipe: Ours.
        flags: Ours, in the order in which they are written.
        launch: The launch file that comes with the package, by name; None: as the user likes.
    """

    path: Path
    values: Mapping[str, object]
    places: Mapping[str, str]
    recipe: str = "sft"
    flags: dict[str, object] = field(default_factory=dict)
    launch: str | None = None
    notes: list[Note] = field(default_factory=list)

    def get(self, key: str) -> object:
        """Their value, None where it is not set."""
        return self.values.get(key)

    def is_on(self, key: str) -> bool:
        """Whether a switch of theirs is set and not false."""
        return not is_off(self.get(key))

    def note(self, key: str, kind: str, text: str = "") -> None:
        """Say something of a key, if their file has it."""
        if key in self.values:
            self.notes.append(Note(key, self.places[key], kind, text))

    def set(self, flag: str, value: object, *keys: str) -> None:
        """Give a flag a value, from those of `keys` that are set."""
        self.flags[flag] = value
        for key in keys:
            if self.get(key) is not None:
                self.note(key, MAPPED, f"{flag}: {shown(value)}")

    def default(self, **flags: object) -> None:
        """Their defaults, where ours differ."""
        for flag, value in flags.items():
            self.flags.setdefault(flag, value)

    def training_defaults(self) -> None:
        """transformers' defaults, which both projects take over."""
        if self.flags.get("lr_scheduler_type", "cosine") == "cosine":
            self.default(min_lr_ratio=0.0)
        if self.recipe == "pretrain":
            self.default(adam_beta2=0.999, weight_decay=0.0)

    @property
    def lost(self) -> list[Note]:
        """What changes training and did not come across."""
        return [note for note in self.notes if note.kind == LOST]

    def apply(self, rows: Sequence[Row]) -> None:
        """Bring across what stands on its own, and say what has no counterpart; `joins` must come before."""
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
    """Null, false, zero or empty."""
    return value is None or value is False or value in ("", 0, "none", "false") or value in ([], {})


def shown(value: object) -> str:
    """A value as in YAML, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list) else str(value)


def as_list(value: object) -> list[str]:
    """A list of texts; one text may hold several, with commas."""
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    return [part.strip() for part in str(value).split(",") if part.strip()]


def number(value: object, name: str) -> float:
    """A number, which YAML may have read as text (``1e-4``)."""
    try:
        return float(str(value))
    except ValueError:
        raise NoCounterpart(f"{name}: {value!r} is no number") from None


def optimizer(value: object) -> object:
    """An optimizer that ours has under the same name."""
    if value in OPTIMIZER_NAMES:
        return value
    raise NoCounterpart(f"optim: {value} is not among ours: see accel-scale sft --recipe_help")
