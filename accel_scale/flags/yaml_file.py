"""A YAML file of flags: read its entries with their places, and remove entries."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import yaml

from accel_scale.errors import ConfigError


def read_mapping(path: Path) -> list[tuple[str, str, yaml.Node]]:
    """Key, place (``file.yaml:12``) and value of every top-level entry of a YAML file, in order.

    Raises:
        ConfigError: if the file is unreadable, not YAML or not a mapping, repeats a key, or has a tag that is not
            plain YAML's.
    """
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror}).", place=str(path), fix="check the path.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "not text in UTF-8"
        raise ConfigError(f"not valid YAML: {problem}.", place=place, fix="fix the syntax of this line.") from None
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError("holds no flags.", place=f"{path}:1", fix="write one `flag: value` per line.")
    places: dict[str, str] = {}
    entries = []
    for key_node, value_node in node.value:
        key, place = str(key_node.value), f"{path}:{key_node.start_mark.line + 1}"
        if key in places:
            raise ConfigError(f"{key!r} is given twice.", place=place, fix=f"keep one (the other: {places[key]}).")
        places[key] = place
        _refuse_tags(value_node, path)
        entries.append((key, place, value_node))
    return entries


def _refuse_tags(node: yaml.Node, path: Path) -> None:
    """Refuse ``!!python/object`` and other tags: no flag takes them, and the plain value is not what was meant."""
    if node.tag not in yaml.SafeLoader.yaml_constructors:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise ConfigError(
            f"the tag {tag} is not read.", place=f"{path}:{node.start_mark.line + 1}", fix="write the plain value."
        )
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_tags(item, path)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _refuse_tags(key, path)
            _refuse_tags(value, path)


def blank_keys(path: Path, names: Collection[str]) -> None:
    """Empty the lines of the top-level keys `names` in a YAML file."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    entries = root.value if isinstance(root, yaml.MappingNode) else []
    starts = [key.start_mark.line for key, _ in entries] + [len(lines)]
    for (key, _), start, end in zip(entries, starts, starts[1:], strict=False):
        if key.value in names:
            lines[start:end] = [""] * (end - start)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
