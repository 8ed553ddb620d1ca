"""Reword messages about the recipes' flags for `ScalePlugin`'s fields."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator

from accel_scale.errors import ConfigError

# Flags whose field has another name.
_RENAMED = {"optim": "optimizer", "lr_scheduler_type": "lr_schedule", "attn_implementation": "attention"}
_ADAPTERS = "--method lora or qlora"
# A flag and its value: the word after it, unless that word continues the sentence.
_SENTENCE = (
    "add|already|alone|and|are|beside|both|by|can|cannot|decides|does|follows|for|has|here|in|is|or|says|set|sets|there|"
    "times|to|was|with"
)
_FLAG = re.compile(rf"--(\w+)(?: (?!(?:{_SENTENCE})\b)([\w/-]+(?:[.=]\w+)*))?")


@contextlib.contextmanager
def words_of_fields(names: Collection[str], *, place: Callable[[str], str]) -> Iterator[None]:
    """Make a `ConfigError` name fields instead of flags; a flag without a field only loses its dashes.

    Args:
        names: The fields.
        place: Returns where a field was set, e.g. ``ScalePlugin(optimizer=)``.
    """
    try:
        yield
    except ConfigError as error:
        if error.place:
            before, _, flag = error.place.partition("--")
            field = _RENAMED.get(flag, flag)
            is_field = not before and field in names
            error.place = place(field) if is_field else in_words_of_fields(error.place, names)
        error.problem = in_words_of_fields(error.problem, names)
        error.fix = in_words_of_fields(error.fix, names) if error.fix else None
        error.args = (error.one_line(),)
        raise


def in_words_of_fields(text: str, names: Collection[str]) -> str:
    """Turn ``use --optim sgd.`` into ``use optimizer="sgd".``"""

    def reworded(match: re.Match[str]) -> str:
        flag, value = match.groups()
        name = _RENAMED.get(flag, flag)
        if value is None:
            return name
        is_plain = name not in names or re.fullmatch(r"[\d.]+|[Tt]rue|[Ff]alse", value)
        return f"{name}={value}" if is_plain else f'{name}="{value}"'

    if "adapter" in names:
        text = text.replace(_ADAPTERS, "an adapter")
    return _FLAG.sub(reworded, text)
