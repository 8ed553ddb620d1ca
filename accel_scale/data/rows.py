"""One row of a source in TRL's format, or the reason it cannot be used."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from accel_scale.data.bad_rows import UnusableRow
from accel_scale.data.images import content_parts, images_of, is_blank_content, show_images
from accel_scale.data.layout import Layout
from accel_scale.data.turns import RICH_KEYS, as_turns

# Speaker names → chat template roles. Any other name is an unknown role.
TURN_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
# Taori et al. 2023, Stanford Alpaca, README "Data release".
_ALPACA = "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
ALPACA_WITHOUT_INPUT = _ALPACA.format("")
ALPACA_WITH_INPUT = _ALPACA.format(", paired with an input that provides further context")
_KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}

Turn = dict[str, Any]


class RichTurnsFound(Exception):
    """Raised for turns with tool calls or reasoning in rows after those that the layout was detected from."""


class RowConverter:
    """Turns rows of a layout into TRL's format, as plain objects.

    Args:
        layout: Which columns hold what.
        folder: Folder that relative image paths start from.

    A row is unusable if a column has the wrong type, a main column is missing or blank, a turn has an unknown role or
    is empty, or no turn is the assistant's. Speakers' names become template roles (`TURN_ROLES`); a system column
    becomes the first turn (or, in plain prompts, the first paragraph); alpaca's input follows the instruction after a
    blank line.
    """

    def __init__(self, layout: Layout, folder: str = "") -> None:
        self._layout, self._columns, self._folder = layout, dict(layout.columns), folder
        self._turn_roles, self._keeps, self._conversational = layout.turn_roles, layout.keeps, layout.conversational

    def __call__(self, value: object, place: str = "") -> dict[str, Any]:
        """Convert `value`, a decoded object found at `place`, to a row.

        Raises:
            UnusableRow: if it cannot be used.
            RichTurnsFound: for turns that the layout does not allow for.
        """
        if not isinstance(value, Mapping | None):
            raise UnusableRow("not an object with columns", f"it is {_kind(value)}")
        value = value or {}  # a line that says `null` is a row without columns
        given: dict[str, Any] = {}
        for role, column in self._columns.items():
            item = value.get(column)
            if role in self._turn_roles:
                given[role] = self._turns(item, column)
            elif role in ("answer", "tools"):
                given[role] = _scalar_or_json(item, column)
            elif role == "label":
                given[role] = _truth(item, column)
            elif role == "images":
                found = images_of(item, column, folder=self._folder, place=place, whole=self._layout.images == "whole")
            else:
                given[role] = _text(item, f"`{column}`")
        if self._layout.format == "text":
            row: dict[str, Any] = {"text": self._required(given, "text")}
        elif self._layout.format == "preference" and not self._turn_roles:
            row = self._pair(given)
        elif self._conversational:
            row = self._conversation(given)
        else:
            row = self._plain(given)
        if self._layout.target == "labelled":
            row["label"] = given["label"]
        if self._layout.images:
            show_images(row, len(found))
            row["images"] = found
        return row | {role: given.get(role) for role in self._keeps}

    def _required(self, given: dict[str, Any], role: str) -> str:
        if is_blank_content(given.get(role)):
            raise UnusableRow(f"`{self._columns.get(role)}` is missing or empty")
        return given[role]

    def _conversation(self, given: dict[str, Any]) -> dict[str, list[Turn]]:
        """`messages`, or `prompt` and `completion`, as turns."""
        if self._turn_roles:
            parts = {role: self._checked(given[role], role) for role in self._turn_roles}
        else:
            question = self._instruction(given) if self._layout.format == "alpaca" else self._required(given, "prompt")
            reply = self._required(given, "output" if self._layout.format == "alpaca" else "completion")
            parts = {"prompt": [_turn_of("user", question)], "completion": [_turn_of("assistant", reply)]}
        opening = next(iter(parts.values()))
        if not is_blank_content(given.get("system")) and all(turn["role"] != "system" for turn in opening):
            opening.insert(0, _turn_of("system", given["system"]))
        if self._layout.target == "messages":
            return {"messages": [turn for turns in parts.values() for turn in turns]}
        if (turns := parts.pop("messages", None)) is not None:  # the labelled answer comes last
            if turns[-1]["role"] != "assistant" or len(turns) == 1:
                raise UnusableRow(f"`{self._columns['messages']}` is no question and the assistant's answer")
            parts = {"prompt": turns[:-1], "completion": turns[-1:]}
        return parts

    def _pair(self, given: dict[str, Any]) -> dict[str, str]:
        """`prompt`, `chosen` and `rejected` as text."""
        roles = ("prompt", "chosen", "rejected")
        row: dict[str, str] = {role: self._required(given, role) for role in roles if role in given}
        if "prompt" in row and not is_blank_content(given.get("system")):
            row["prompt"] = f"{given['system']}\n\n{row['prompt']}"
        return row

    def _instruction(self, given: dict[str, Any]) -> str:
        instruction = self._required(given, "instruction")
        return instruction if is_blank_content(given.get("input")) else f"{instruction}\n\n{given['input']}"

    def _plain(self, given: dict[str, Any]) -> dict[str, str]:
        """`prompt` and `completion` as text, for models without a chat template."""
        has_system = not is_blank_content(given.get("system"))
        if self._layout.format != "alpaca":
            prompt, completion = self._required(given, "prompt"), self._required(given, "completion")
            return {"prompt": f"{given['system']}\n\n{prompt}" if has_system else prompt, "completion": completion}
        request, preamble = self._required(given, "instruction"), ALPACA_WITHOUT_INPUT
        if not is_blank_content(given.get("input")):
            request, preamble = f"{request}\n\n### Input:\n{given['input']}", ALPACA_WITH_INPUT
        preamble = given["system"] if has_system else preamble
        prompt = f"{preamble}\n\n### Instruction:\n{request}\n\n### Response:\n"
        return {"prompt": prompt, "completion": self._required(given, "output")}

    # ── Turns ──

    def _turns(self, value: object, column: str) -> list[Turn] | None:
        """The turns of a column, read by the column's own keys, with types checked."""
        if value is None:
            return None
        turns = as_turns(value)
        if turns is None:
            raise UnusableRow(f"`{column}` is {_kind(value)}, not a list of turns")
        return [self._turn(turn, column) for turn in turns]

    def _turn(self, turn: object, column: str) -> Turn:
        if isinstance(turn, str) and turn.startswith("{"):  # how Arrow stores `datasets.Json` columns
            with contextlib.suppress(ValueError):
                turn = json.loads(turn)
        if not isinstance(turn, Mapping):
            raise UnusableRow(f"a turn in `{column}` is {_kind(turn)}, not an object")
        assert self._layout.turn_keys is not None
        speaker_key, content_key = self._layout.turn_keys
        speaker = _text(turn.get(speaker_key), f"`{speaker_key}` of a turn in `{column}`")
        content = turn.get(content_key)
        if isinstance(content, list) and self._layout.images:
            return {"role": speaker, "content": content_parts(content, column)}
        if isinstance(content, list):
            content = "".join(_part(part, column) for part in content)
        content = _text(content, f"`{content_key}` of a turn in `{column}`")
        rich = {key: _without_none(turn[key]) for key in RICH_KEYS if turn.get(key)}
        if rich and not self._layout.rich:
            raise RichTurnsFound
        return {"role": speaker, "content": content} | (json.loads(json.dumps(rich, default=str)) if rich else {})

    def _checked(self, turns: list[Turn] | None, role: str) -> list[Turn]:
        """The same turns with the roles of chat templates."""
        name = self._columns[role]
        if not turns:
            raise UnusableRow(f"`{name}` is missing or empty")
        for turn in turns:
            speaker = turn["role"]
            turn["role"] = TURN_ROLES.get(speaker or "")
            if turn["role"] is None:
                what = f"a turn with the unknown role {speaker!r}" if speaker else "a turn without a role"
                raise UnusableRow(f"{what} in `{name}`")
        for turn in turns:
            if is_blank_content(turn["content"]):
                if turn["role"] in ("user", "assistant") and len(turn) == 2:
                    raise UnusableRow(f"a turn without content in `{name}`")
                turn["content"] = turn["content"] or ""
        if role != "prompt" and all(turn["role"] != "assistant" for turn in turns):
            raise UnusableRow(f"no assistant turn in `{name}`")
        return turns


def _turn_of(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


def _kind(value: object) -> str:
    return "empty" if value is None else _KINDS.get(type(value), type(value).__name__)


def _text(value: object, name: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise UnusableRow(f"{name} is {_kind(value)}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # Half a surrogate pair: an emoji cut in two when the file was written.
        raise UnusableRow("not valid Unicode", f"{name}, character {error.start + 1}") from None
    return value


def _truth(value: object, column: str) -> bool:
    """The truth value of a label; untyped files store it as text."""
    text = str(value).strip().lower()
    if text in ("true", "1", "1.0"):
        return True
    if text in ("false", "0", "0.0"):
        return False
    raise UnusableRow(f"`{column}` is neither true nor false", f"it is {_kind(value)}")


def _scalar_or_json(value: object, column: str) -> str | None:
    if value is None or isinstance(value, str):
        return _text(value, f"`{column}`")
    return json.dumps(_without_none(value), ensure_ascii=False, default=str)


def _part(part: object, column: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        raise UnusableRow(f"a turn in `{column}` has content that is not text", str(kind))
    return text


def _without_none(value: object) -> object:
    """Remove the None entries by which Arrow gives every object the keys of all others."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
