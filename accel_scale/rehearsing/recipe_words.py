"""Helpers for commands that run a recipe in small: where its words begin, and a working folder."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from accel_scale.launching.run_folder import OutputFolder


def mark_recipe(words: Sequence[str], value_flags: Sequence[str]) -> list[str]:
    """Insert ``--`` before the recipe, so that argparse leaves everything after it to the recipe.

    Args:
        words: Words of the command line after the command's name.
        value_flags: The command's own flags that take a value.
    """
    index = 0
    while index < len(words) and words[index].startswith("--"):
        index += 2 if words[index] in value_flags else 1
    return [*words[:index], "--", *words[index:]] if index < len(words) else list(words)


@contextlib.contextmanager
def work_folder(keep: str | None, prefix: str) -> Iterator[Path]:
    """Yield the folder `keep`, created if needed, or a temporary folder that is removed afterwards.

    Raises:
        ConfigError: if `keep` holds anything else.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
        return
    OutputFolder(Path(keep), f"accel-scale {prefix.rstrip('-')}", is_strict=True, place="--keep").mark()
    yield Path(keep).resolve()
