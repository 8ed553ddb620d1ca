"""Map columns of a table to roles: by detecting the format, or with ``--columns role=column``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accel_scale.data.columns import check_columns
from accel_scale.data.images import IMAGE_COLUMNS
from accel_scale.data.turns import is_rich, turn_keys_of
from accel_scale.errors import ConfigError
from accel_scale.facts.names import RowsWith

if TYPE_CHECKING:
    from datasets import Features

SYSTEM_COLUMNS = ("system", "system_prompt")
# Roles whose columns may hold lists of turns.
TURN_ROLES = ("messages", "prompt", "completion", "chosen", "rejected")
# Common column names for these roles; used in advice only, never to guess silently.
_LIKELY = {
    "messages": ("conversations", "conversation", "dialog", "dialogue", "chat", "turns"),
    "prompt": ("question", "query", "input", "instruction", "problem", "inputs", "source", "title", "goal"),
    "completion": ("answer", "response", "output", "solution", "target", "targets", "label", "reply", "chosen"),
    "text": ("content", "document", "body", "story", "passage", "article", "code"),
}


@dataclass(frozen=True)
class Layout:
    """How the rows of one source are read, and which of TRL's formats they become.

    Args:
        format: The format found: ``messages``, ``sharegpt``, ``prompt_completion``, ``alpaca`` or ``text``; for
            preference data, ``preference`` or ``labelled``.
        columns: (role, column) pairs; the roles: `COLUMN_ROLES`, and alpaca's ``instruction``, ``input``, ``output``.
        turn_keys: The two keys of a turn where the main columns hold lists of turns, else None.
        rich: Whether turns have more than role and content (tool calls, reasoning), kept as JSON.
        chat: Whether Alpaca rows become user and assistant turns; otherwise Alpaca's own prompt text.
        target: TRL's format: ``messages``, ``prompt_completion``, ``text``, ``preference`` or ``labelled``.
        extras: Which of ``answer`` and ``tools`` are kept beside it (null if this source has none).
        images: How far images, if there are any, are read along with the rows: ``opened`` or ``whole``.
    """

    format: str
    columns: tuple[tuple[str, str], ...]
    turn_keys: tuple[str, str] | None = None
    rich: bool = False
    chat: bool = True
    target: str = "messages"
    extras: tuple[str, ...] = ()
    images: str = ""

    def column(self, role: str) -> str | None:
        """The column that holds `role`, or None."""
        return dict(self.columns).get(role)

    @property
    def turn_roles(self) -> tuple[str, ...]:
        """The roles whose columns hold lists of turns."""
        if self.turn_keys is None:
            return ()
        return tuple(role for role in TURN_ROLES if self.column(role))

    @property
    def conversational(self) -> bool:
        """True if rows come out as turns, which need a chat template."""
        if self.target == "messages" or self.turn_keys is not None or self.images:
            return True
        return self.format == "alpaca" and self.chat

    @property
    def keeps(self) -> tuple[str, ...]:
        """Extra columns that are kept: ``answer``, and ``tools`` with turns."""
        return tuple(role for role in self.extras if role == "answer" or self.conversational)

    def as_messages(self) -> Layout:
        """The same rows, coming out as ``messages``."""
        return replace(self, target="messages")

    def sampled(self) -> Layout:
        """The same layout for sampling: images are not read to their end."""
        return replace(self, images="opened") if self.images else self

    def features(self) -> Features:
        """`datasets.Features` of the normalised rows."""
        from datasets import Features, Json, List, Value

        text = Value("string")
        value: Any = text
        if self.conversational:
            value = List(Json()) if self.rich else List({"role": text, "content": text})
        names = {"messages": ("messages",), "prompt_completion": ("prompt", "completion"), "text": ("text",)}
        names["preference"] = ("prompt", "chosen", "rejected") if self.column("prompt") else ("chosen", "rejected")
        names["labelled"] = ("prompt", "completion")
        label = {"label": Value("bool")} if self.target == "labelled" else {}
        image = List({"bytes": Value("binary"), "path": text, "place": text})
        beside = {**label, **dict.fromkeys(self.keeps, text), **({"images": image} if self.images else {})}
        return Features({**dict.fromkeys(names[self.target], value), **beside})


def detect_layout(
    source: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    mapping: Mapping[str, str] | None = None,
    columns: Sequence[str] | None = None,
    chat: bool = True,
    rows_with: RowsWith | None = None,
) -> Layout:
    """Decide the layout of a source from a sample of its rows (plain Python values).

    It is the first of these formats that the columns allow: messages, sharegpt, prompt and completion, alpaca, text.

    Args:
        source: Its name in errors.
        rows: The first rows, as dictionaries.
        mapping: role → column, from `columns.parse_columns`.
        columns: All column names; by default those of `rows`.
        chat: See `Layout.chat`.
        rows_with: Read ``pairs`` of a better and a worse answer, chosen and rejected, with or without prompt; or
            answers with ``labels``, true for a good one: prompt and completion, or messages that end with the answer.

    Raises:
        ConfigError: a mapped column that does not exist, or a table in none of the formats.
    """
    names = list(columns or dict.fromkeys(name for row in rows for name in row))
    mapping = dict(mapping or {})
    check_columns(mapping, names, source)
    if rows_with in (None, "images"):
        found = _main_columns(mapping, names, rows)
    else:
        found = (_pair_columns if rows_with == "pairs" else _labelled_columns)(mapping, names)
        if found is None:
            raise _no_preferences(source, names, rows, rows_with)
    if found is None:
        raise _unrecognised(source, names, rows)
    name, main = found
    if rows_with == "images":
        main["images"] = _image_column(source, names, rows, mapping, name)
    extras = {role: mapping.get(role, role) for role in ("answer", "tools")}
    extras["system"] = mapping.get("system") or next((c for c in SYSTEM_COLUMNS if c in names), "")
    for role, column in extras.items():
        # A column already used for something else is kept a second time only if the user asks for it.
        if column in names and (role in mapping or column not in main.values()):
            main[role] = column
    turn_roles = [role for role in TURN_ROLES if role in main]
    keys = {role: turn_keys_of(rows, main[role]) for role in turn_roles}
    if len(set(keys.values())) > 1:
        names_of_turns = " and ".join(repr(main[role]) for role in turn_roles)
        raise ConfigError(
            f"{source} has turns in one of {names_of_turns} and none in the other.",
            place="--columns",
            fix="make all of them lists of turns, or all plain text.",
        )
    turn_keys = keys.get(turn_roles[0]) if turn_roles else None
    if "messages" in main and turn_keys is None:
        raise _not_turns(source, main["messages"], rows)
    if turn_keys == ("from", "value") and name == "messages":
        name = "sharegpt"
    targets = {name: name for name in ("messages", "text", "preference", "labelled")} | {"sharegpt": "messages"}
    rich = turn_keys is not None and any(is_rich(row.get(main[role])) for row in rows for role in turn_roles)
    return Layout(
        name,
        tuple(main.items()),
        turn_keys,
        rich=rich or rows_with == "images",  # turns are parts: text and places of images
        chat=chat,
        target=targets.get(name, "prompt_completion"),
        extras=tuple(role for role in ("answer", "tools") if role in main),
        images="whole" if rows_with == "images" else "",
    )


def _main_columns(
    mapping: dict[str, str], names: list[str], rows: Sequence[Mapping[str, Any]]
) -> tuple[str, dict[str, str]] | None:
    """(format, role → column) of the columns that make up a row: those most rows fill, else the first; or None."""
    if "messages" in mapping or "text" in mapping:
        role = "messages" if "messages" in mapping else "text"
        return role, {role: mapping[role]}
    pair = {role: mapping.get(role, role) for role in ("prompt", "completion")}
    if "prompt" in mapping or "completion" in mapping:
        return ("prompt_completion", pair) if set(pair.values()) <= set(names) else None
    found: list[tuple[str, dict[str, str]]] = []
    for column in ("messages", "conversations"):
        if column in names and (column == "messages" or turn_keys_of(rows, column)):
            found.append(("messages", {"messages": column}))
    if set(pair) <= set(names):
        found.append(("prompt_completion", pair))
    if {"instruction", "output"} <= set(names):
        found.append(("alpaca", {role: role for role in ("instruction", "input", "output") if role in names}))
    if "text" in names:
        found.append(("text", {"text": "text"}))

    def filled(candidate: tuple[str, dict[str, str]]) -> int:
        needed = [column for role, column in candidate[1].items() if role != "input"]
        return sum(all(row.get(column) for column in needed) for row in rows)

    return max(found, key=filled, default=None)


def _pair_columns(mapping: dict[str, str], names: list[str]) -> tuple[str, dict[str, str]] | None:
    """`_main_columns` for pairs."""
    pair = {role: mapping.get(role, role) for role in ("prompt", "chosen", "rejected")}
    if pair["prompt"] not in names:
        pair.pop("prompt")
    return ("preference", pair) if set(pair.values()) <= set(names) else None


def _labelled_columns(mapping: dict[str, str], names: list[str]) -> tuple[str, dict[str, str]] | None:
    """`_main_columns` for labelled answers."""
    for roles in (("prompt", "completion", "label"), ("messages", "label")):
        found = {role: mapping.get(role, role) for role in roles}
        if set(found.values()) <= set(names):
            return "labelled", found
    return None


def _image_column(
    source: str, names: Sequence[str], rows: Sequence[Mapping[str, object]], mapping: Mapping[str, str], name: str
) -> str:
    """The column of images, after checking that the rows can show them."""
    column = mapping.get("images") or next((column for column in IMAGE_COLUMNS if column in names), None)
    columns = describe_columns(names, rows)
    if column is None:
        raise ConfigError(
            f"{source} has no column of images; its columns are {columns}.",
            place="--dataset_name",
            fix="name it, e.g. --columns images=photo, or train rows of text with recipes/sft.py.",
        )
    if name == "text":
        raise ConfigError(
            f"{source} holds plain text, which has no question to show an image in; its columns are {columns}.",
            place="--dataset_name",
            fix="say which columns are what, e.g. --columns prompt=question completion=answer.",
        )
    if "tools" in (mapping, *names):
        raise ConfigError(
            f"{source} has tools, which TRL does not write into rows with images.",
            place="--dataset_name",
            fix="remove the column.",
        )
    return column


def _no_preferences(
    source: str, names: Sequence[str], rows: Sequence[Mapping[str, Any]], rows_with: RowsWith
) -> ConfigError:
    what, columns = "answers with labels", "prompt=question completion=answer label=is_good"
    if rows_with == "pairs":
        what, columns = "pairs of answers", "prompt=question chosen=better rejected=worse"
    fix = f"say which columns are what, e.g. --columns {columns}."
    if rows_with == "labels" and {"chosen", "rejected"} <= set(names):
        fix = "train on pairs with recipes/dpo.py, or write a row for each answer, with a label."
    return ConfigError(
        f"{source} holds no {what}; its columns are {describe_columns(names, rows)}.", place="--dataset_name", fix=fix
    )


def describe_columns(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """``question (text), score (number), …``, from the first row that has each."""
    kinds = {str: "text", bool: "true/false", int: "number", float: "number", list: "list", dict: "object"}
    parts = []
    for name in names:
        value = next((row[name] for row in rows if row.get(name) is not None), None)
        parts.append(f"{name} ({kinds.get(type(value), 'empty' if value is None else type(value).__name__)})")
    return ", ".join(parts)


def _likely_column(role: str, names: Sequence[str]) -> str | None:
    lowered = {name.lower(): name for name in names}
    return next((lowered[name] for name in (role, *_LIKELY[role]) if name in lowered), None)


def _unrecognised(source: str, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> ConfigError:
    prompt, completion = (_likely_column(role, names) for role in ("prompt", "completion"))
    single = next((role for role in ("messages", "text") if _likely_column(role, names)), None)
    if prompt and completion and prompt != completion:
        advice = f"--columns prompt={prompt} completion={completion}"
    elif single:
        advice = f"--columns {single}={_likely_column(single, names)}"
    else:
        advice = "--columns prompt=… completion=… (or messages=…, or text=…)"
    return ConfigError(
        f"{source} is none of the known formats (messages, prompt and completion, alpaca, sharegpt, text); "
        f"its columns are {describe_columns(names, rows)}.",
        place="--dataset_name",
        fix=f"say which column is what, e.g. {advice}.",
    )


def _not_turns(source: str, column: str, rows: Sequence[Mapping[str, Any]]) -> ConfigError:
    return ConfigError(
        f"{source}: {describe_columns([column], rows)} does not hold lists of turns with role and content.",
        place="--columns",
        fix='make each row a list such as [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}].',
    )
