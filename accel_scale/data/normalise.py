"""One Arrow table of raw rows in, TRL's format out, and the rows that cannot be used with the reason: vectorised."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from accel_scale.data.layout import Layout

# Names of speakers → roles of chat templates. What is not here is an unknown role.
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


@dataclass(frozen=True)
class Normalised:
    """`table` has TRL's columns and the good rows only; `bad` lists (row of the input, reason)."""

    table: pa.Table
    bad: list[tuple[int, str]]


@dataclass
class _Turns:
    """Turns of many rows, flat: `row[i]` is the row that turn i belongs to; turns of a row are in order."""

    row: np.ndarray
    role: pa.Array
    content: pa.Array
    extra: pa.Array

    def __len__(self) -> int:
        return len(self.row)

    @classmethod
    def joined(cls, parts: list[_Turns]) -> _Turns:
        """The turns of several parts, part after part within each row."""
        row = np.concatenate([part.row for part in parts])
        order = pa.array(np.argsort(row, kind="stable"))
        columns = [pa.concat_arrays([getattr(part, name) for part in parts]) for name in ("role", "content", "extra")]
        return cls(row[order.to_numpy()], *(column.take(order) for column in columns))

    @classmethod
    def single(cls, role: str, content: pa.Array, present: np.ndarray) -> _Turns:
        """One turn in each row where `present`."""
        row = np.flatnonzero(present)
        content = content.filter(pa.array(present))
        return cls(row, pa.array([role] * len(row), pa.string()), content, pa.nulls(len(row), pa.string()))


class _Faults:
    """The first reason found against each row."""

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}

    def add(self, rows: np.ndarray, reason: str) -> None:
        for row in rows.tolist():
            self.reasons.setdefault(row, reason)


def normalise(table: pa.Table, layout: Layout) -> Normalised:
    """Turn raw rows (columns and types as in `layout.raw_schema()`) into TRL's format.

    A row is bad when a main column is missing or blank, a turn has an unknown role or nothing in it, or no turn is
    the assistant's. Speakers' names become template roles (`TURN_ROLES`); a system column becomes the first turn
    (or, in plain prompts, the first paragraph); alpaca's input follows the instruction after a blank line.
    """
    table = table.combine_chunks()
    faults = _Faults()
    columns: dict[str, pa.Array] = {}
    if layout.turn_keys:
        parts = {role: _turns(table, layout, role, faults) for role in layout.turn_roles}
        columns = _turn_columns(parts, table, layout)
    elif layout.format == "text":
        columns["text"] = _required(table, layout, "text", faults)
    elif layout.conversational:
        columns = _chat_columns(table, layout, faults)
    else:
        columns = _plain_columns(table, layout, faults)
    for role in layout.keeps:
        columns[role] = _column(table, layout, role)
    features = layout.features().arrow_schema
    result = pa.Table.from_arrays(
        [columns[name].cast(features.field(name).type) for name in features.names], schema=features
    )
    bad = sorted(faults.reasons.items())
    if bad:
        good = np.ones(table.num_rows, dtype=bool)
        good[[row for row, _ in bad]] = False
        result = result.filter(pa.array(good))
    return Normalised(result, bad)


def _column(table: pa.Table, layout: Layout, role: str) -> pa.Array:
    column = layout.column(role)
    if column is None:
        return pa.nulls(table.num_rows, pa.string())
    chunks = table.column(column)
    return pa.concat_arrays(chunks.chunks) if chunks.num_chunks else pa.array([], chunks.type)


def _blank(text: pa.Array) -> np.ndarray:
    """True where text is null, empty or white space."""
    # Both tests stop at the first visible character; trimming or measuring would copy or read everything.
    blank = pc.or_(pc.equal(pc.binary_length(text), 0), pc.utf8_is_space(text))
    return blank.fill_null(True).to_numpy(zero_copy_only=False)


def _required(table: pa.Table, layout: Layout, role: str, faults: _Faults) -> pa.Array:
    text = _column(table, layout, role)
    faults.add(np.flatnonzero(_blank(text)), f"`{layout.column(role)}` is missing or empty")
    return text


def _turns(table: pa.Table, layout: Layout, role: str, faults: _Faults) -> _Turns:
    """The turns of one column, roles translated, faults noted."""
    name = layout.column(role)
    lists = _column(table, layout, role)
    num_turns = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    faults.add(np.flatnonzero(num_turns == 0), f"`{name}` is missing or empty")
    row = np.repeat(np.arange(len(lists)), num_turns)
    flat = lists.flatten()
    assert layout.turn_keys is not None
    speaker, content = (pc.struct_field(flat, key) for key in layout.turn_keys)
    extra = pc.struct_field(flat, "extra") if layout.rich else pa.nulls(len(flat), pa.string())
    encoded = speaker.dictionary_encode()
    known = pa.array([TURN_ROLES.get(word) if word else None for word in encoded.dictionary.to_pylist()], pa.string())
    roles = known.take(encoded.indices)
    for unknown in np.flatnonzero(roles.is_null().to_numpy(zero_copy_only=False)).tolist():
        word = speaker[unknown].as_py()
        reason = f"a turn with the unknown role {word!r}" if word else "a turn without a role"
        faults.add(row[unknown : unknown + 1], f"{reason} in `{name}`")
    spoken = pc.is_in(roles, pa.array(["user", "assistant"])).to_numpy(zero_copy_only=False)
    empty = _blank(content) & spoken & extra.is_null().to_numpy(zero_copy_only=False)
    faults.add(row[empty], f"a turn without content in `{name}`")
    if role != "prompt":
        replies = pc.equal(roles, "assistant").fill_null(False).to_numpy(zero_copy_only=False)
        answered = np.bincount(row[replies], minlength=len(lists)) > 0
        faults.add(np.flatnonzero(~answered), f"no assistant turn in `{name}`")
    return _Turns(row, roles, content.fill_null(""), extra)


def _turn_columns(parts: dict[str, _Turns], table: pa.Table, layout: Layout) -> dict[str, pa.Array]:
    """`messages`, or `prompt` and `completion`, of rows that came as turns."""
    first = layout.turn_roles[0]
    if layout.column("system"):
        system = _column(table, layout, "system")
        opening = parts[first]
        has_own = np.zeros(table.num_rows, dtype=bool)
        has_own[opening.row[pc.equal(opening.role, "system").fill_null(False).to_numpy(zero_copy_only=False)]] = True
        parts[first] = _Turns.joined([_Turns.single("system", system, ~_blank(system) & ~has_own), opening])
    if layout.target == "messages":
        parts = {"messages": _Turns.joined(list(parts.values()))}
    return {name: _as_lists(turns, table.num_rows, layout.rich) for name, turns in parts.items()}


def _chat_columns(table: pa.Table, layout: Layout, faults: _Faults) -> dict[str, pa.Array]:
    """Text columns (alpaca, or prompt and completion bound for `messages`) as turns."""
    if layout.format == "alpaca":
        question = _instruction_with_input(table, layout, faults)
        reply = _required(table, layout, "output", faults)
    else:
        question = _required(table, layout, "prompt", faults)
        reply = _required(table, layout, "completion", faults)
    system = _column(table, layout, "system")
    everywhere = np.ones(table.num_rows, dtype=bool)
    prompt = _Turns.joined(
        [
            _Turns.single("system", system, ~_blank(system)),
            _Turns.single("user", question.fill_null(""), everywhere),
        ]
    )
    completion = _Turns.single("assistant", reply.fill_null(""), everywhere)
    parts = {"prompt": prompt, "completion": completion}
    if layout.target == "messages":
        parts = {"messages": _Turns.joined([prompt, completion])}
    return {name: _as_lists(turns, table.num_rows, layout.rich) for name, turns in parts.items()}


def _instruction_with_input(table: pa.Table, layout: Layout, faults: _Faults) -> pa.Array:
    instruction = _required(table, layout, "instruction", faults)
    more = _column(table, layout, "input")
    both = pc.binary_join_element_wise(instruction, more, "\n\n")
    return pc.if_else(pa.array(_blank(more)), instruction, both)


def _plain_columns(table: pa.Table, layout: Layout, faults: _Faults) -> dict[str, pa.Array]:
    """`prompt` and `completion` as text, for models without a chat template."""
    system = _column(table, layout, "system")
    no_system = pa.array(_blank(system))
    if layout.format != "alpaca":
        prompt = _required(table, layout, "prompt", faults)
        completion = _required(table, layout, "completion", faults)
        if layout.column("system") is None:
            return {"prompt": prompt, "completion": completion}
        with_system = pc.binary_join_element_wise(system, prompt, "\n\n")
        return {"prompt": pc.if_else(no_system, prompt, with_system), "completion": completion}
    instruction = _required(table, layout, "instruction", faults)
    more = _column(table, layout, "input")
    no_input = pa.array(_blank(more))
    preamble = pc.if_else(no_system, pc.if_else(no_input, ALPACA_WITHOUT_INPUT, ALPACA_WITH_INPUT), system)
    with_input = pc.binary_join_element_wise(instruction, "\n\n### Input:\n", more, "")
    request = pc.if_else(no_input, instruction, with_input)
    prompt = pc.binary_join_element_wise(preamble, "\n\n### Instruction:\n", request, "\n\n### Response:\n", "")
    return {"prompt": prompt, "completion": _required(table, layout, "output", faults)}


def _as_lists(turns: _Turns, num_rows: int, rich: bool) -> pa.Array:
    offsets = np.zeros(num_rows + 1, dtype=np.int32)
    np.cumsum(np.bincount(turns.row, minlength=num_rows), out=offsets[1:])
    if rich:
        members = zip(turns.role.to_pylist(), turns.content.to_pylist(), turns.extra.to_pylist(), strict=True)
        values = pa.array([_turn_json(*member) for member in members], pa.string())
    else:
        values = pa.StructArray.from_arrays([turns.role, turns.content], names=["role", "content"])
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _turn_json(role: str | None, content: str, extra: str | None) -> str:
    turn: dict[str, Any] = {"role": role, "content": content}
    if extra:
        turn.update(json.loads(extra))
    return json.dumps(turn, ensure_ascii=False)
