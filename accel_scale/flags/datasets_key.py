"""TRL's ``datasets:`` in a recipe's YAML: a list of data sets, read as the recipes' own data flags."""

from __future__ import annotations

import difflib
from pathlib import Path

import yaml

from accel_scale.errors import ConfigError
from accel_scale.facts.names import COLUMN_ROLES

KEY = "datasets"
# Flags that the key stands for.
FLAGS = ("dataset_name", "dataset_config", "dataset_mixture", "dataset_train_split", "columns")
# Keys of TRL's `DatasetConfig` (1.16).
_ITEM_KEYS = ("path", "name", "data_dir", "data_files", "split", "columns", "fraction")
# Readers of `datasets`, given in place of a name; the files are named beside them.
_READERS = ("json", "csv", "parquet", "arrow", "text")


def is_list_of_datasets(node: yaml.Node) -> bool:
    """True if a value is a list of mappings, as TRL's is."""
    return isinstance(node, yaml.SequenceNode) and any(isinstance(item, yaml.MappingNode) for item in node.value)


def flags_of_datasets(node: yaml.Node, path: Path) -> dict[str, str | list[str]]:
    """Flag → its words, as the command line would have them.

    One data set is ``--dataset_name``. Several are ``--dataset_mixture``: one after another, or by their fractions.

    Args:
        node: The value of the key.
        path: The file, for messages.

    Raises:
        ConfigError: naming file, line and key of anything that the recipes do not read.
    """
    if not isinstance(node, yaml.SequenceNode) or not node.value:
        raise ConfigError(f"{KEY!r} is no list.", place=_place(path, node), fix="write `- path: …` for each data set.")
    names: list[tuple[str, str | None]] = []
    columns: dict[str, str] = {}
    splits: dict[str, str] = {}
    for item in node.value:
        entry = _Item(item, path)
        names += [(name, entry.text("fraction")) for name in entry.names()]
        splits.setdefault(entry.text("split") or "train", entry.place("split"))
        for role, column in entry.columns().items():
            if columns.setdefault(role, column) != column:
                fix = "call the column alike in all of them: --columns are common to all data sets."
                problem = f"{role} is {columns[role]!r} in an earlier data set and {column!r} here."
                raise ConfigError(problem, place=entry.place("columns"), fix=fix)
    if len(splits) > 1:
        raise ConfigError(
            f"the data sets have different splits: {', '.join(splits)}.",
            place=list(splits.values())[-1],
            fix="name the same one for all, or make files of the rows and name those.",
        )
    found: dict[str, str | list[str]] = {"dataset_train_split": next(iter(splits))}
    if columns:
        found["columns"] = [f"{role}={column}" for role, column in columns.items()]
    if len(names) == 1:
        name, _, config = names[0][0].partition(":")
        return found | {"dataset_name": name} | ({"dataset_config": config} if config else {})
    weights = [weight for _, weight in names if weight is not None]
    if weights and len(weights) < len(names):
        raise ConfigError(
            "some data sets have a fraction and some have none.",
            place=_place(path, node),
            fix="give all one, or none.",
        )
    return found | {"dataset_mixture": [name if weight is None else f"{name}={weight}" for name, weight in names]}


def _place(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"


class _Item:
    """One entry of the list."""

    def __init__(self, node: yaml.Node, path: Path) -> None:
        self._place, self._path = _place(path, node), path
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError("a data set is a mapping.", place=self._place, fix="write `- path: …`.")
        self._nodes: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name, place = str(key.value), _place(path, key)
            if name not in _ITEM_KEYS:
                near = difflib.get_close_matches(name, _ITEM_KEYS, n=1)
                fix = f"did you mean {near[0]}?" if near else f"use {', '.join(_ITEM_KEYS)}."
                raise ConfigError(f"{KEY}: {name!r} is no key of a data set.", place=place, fix=fix)
            self._nodes[name] = value

    def place(self, key: str) -> str:
        return _place(self._path, self._nodes[key]) if key in self._nodes else self._place

    def text(self, key: str) -> str | None:
        """The value of `key` as written; None if it is missing or null."""
        node = self._nodes.get(key)
        if node is None or node.tag == "tag:yaml.org,2002:null":
            return None
        if not isinstance(node, yaml.ScalarNode):
            raise ConfigError(f"{KEY}: {key} takes one value.", place=self.place(key), fix=f"write `{key}: value`.")
        return str(node.value)

    def _refused(self, key: str, problem: str, fix: str) -> ConfigError:
        return ConfigError(f"{KEY}: {problem}", place=self.place(key), fix=fix)

    def names(self) -> list[str]:
        """Sources as `--dataset_mixture` names them."""
        path, config = self.text("path"), self.text("name")
        if not path:
            raise self._refused("path", "a data set has no path.", "write `path: …`.")
        files = self._nodes.get("data_files")
        if path in _READERS and (files is not None or self.text("data_dir")):
            return self._files(files)
        for key in ("data_files", "data_dir"):
            if key in self._nodes:
                fix = "name the files themselves as `path`, or all of the data set."
                raise self._refused(key, f"{key} within {path} cannot be chosen.", fix)
        return [f"{path}:{config}" if config else path]

    def _files(self, node: yaml.Node | None) -> list[str]:
        folder = self.text("data_dir")
        if node is None:
            return [str(folder)]
        values = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not all(isinstance(value, yaml.ScalarNode) for value in values):
            fix = "list the training files, and name test files with --dataset_test_split in a folder of splits."
            raise self._refused("data_files", "data_files by split are not read.", fix)
        if len(values) > 1 and self.text("fraction"):
            raise self._refused(
                "fraction", "several files share a fraction.", "put them into one folder, and name it."
            )
        return [str(Path(folder or "") / value.value) for value in values]

    def columns(self) -> dict[str, str]:
        """role → column; TRL's list of columns names the roles themselves."""
        node = self._nodes.get("columns")
        if node is None or node.tag == "tag:yaml.org,2002:null":
            return {}
        if isinstance(node, yaml.MappingNode):
            found = {str(role.value): str(column.value) for role, column in node.value}
        elif isinstance(node, yaml.SequenceNode):
            found = {str(column.value): str(column.value) for column in node.value}
        else:
            raise self._refused("columns", "columns is no list.", "write `columns: [prompt, completion]`.")
        for role in found:
            if role not in COLUMN_ROLES:
                near = difflib.get_close_matches(role, COLUMN_ROLES, n=1, cutoff=0.7)
                hint = f"did you mean {near[0]}?" if near else f"say which role it has, as in {{prompt: {role}}}."
                raise self._refused("columns", f"{role!r} is not a role a column can have.", hint)
        return found
