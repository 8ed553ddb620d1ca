"""Positions in the data as JSON: collected from each rank, joined, checked, and divided among any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel_scale.errors import ConfigError

STATE_VERSION = 1
_NAMES = {
    "seed": "the seed",
    "global_batch_size": "the global batch size",
    "row_length": "the row length",
    "tokenizer": "the tokenizer",
    "sources": "the data (its sources, their sizes or shares, or the validation share)",
}


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge all ranks' states of one step into one, from which any number of ranks can resume.

    Args:
        states: What `TrainLoader.state_dict()` returned on each rank, in any order.

    Returns:
        A dict of numbers, texts, lists and dicts, as `json.dumps` takes it.

    Raises:
        ConfigError: states of different runs or steps, or of only some of the ranks.
    """
    if not states:
        raise ConfigError("there are no states to merge.", place="merge_states", fix="gather them from all ranks.")
    first = states[0]
    lanes: dict[str, Any] = {}
    for state in states:
        if state["run"] != first["run"] or state["step"] != first["step"]:
            raise ConfigError(
                f"states of steps {first['step']} and {state['step']} of {_difference(first['run'], state['run'])}.",
                place="merge_states",
                fix="gather the states of all ranks at the same step of the same run.",
            )
        lanes |= state["lanes"]
    merged = {**first, "lanes": dict(sorted(lanes.items(), key=lambda item: int(item[0])))}
    missing = first["run"]["global_batch_size"] - len(lanes)
    if missing:
        raise ConfigError(
            f"{missing} of the global batch's {first['run']['global_batch_size']} rows have no state.",
            place="merge_states",
            fix="give the states of all ranks.",
        )
    return merged


def check_state(state: Mapping[str, Any], run: Mapping[str, Any], lanes: Sequence[int]) -> None:
    """Raise a ConfigError unless `state` is from a run like `run` and has the position of each of `lanes`."""
    if state.get("version") != STATE_VERSION:
        raise ConfigError(
            f"the position in the data has version {state.get('version')}, and this version reads {STATE_VERSION}.",
            place="resume",
            fix="resume with the version that wrote the checkpoint.",
        )
    if state["run"] != run:
        raise ConfigError(
            f"the position in the data is that of another run: {_difference(state['run'], run)}.",
            place="resume",
            fix="resume with the same data and settings, or start a new run from the model's weights.",
        )
    missing = [lane for lane in lanes if str(lane) not in state["lanes"]]
    if missing:
        raise ConfigError(
            f"the state has no position for row {missing[0]} of the global batch.",
            place="resume",
            fix="join the states of all ranks with merge_states before resuming on another number of ranks.",
        )


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    for name, words in _NAMES.items():
        if before.get(name) != now.get(name):
            values = f" ({before.get(name)}, now {now.get(name)})" if name not in ("sources", "tokenizer") else ""
            return f"{words} changed{values}"
    return "one run"
