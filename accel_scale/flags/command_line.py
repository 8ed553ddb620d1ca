"""A recipe's command line as written: look a flag up, take flags out, add flags, without knowing the recipe."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.flags import datasets_key
from accel_scale.flags.yaml_file import blank_keys, read_mapping
from accel_scale.shipped import named_script

_CONFIG_FLAGS = {"config_file", "config"}


@dataclass(frozen=True)
class RecipeCommand:
    """``recipes/sft.py --flag value …``, with the YAML file of flags that it may name.

    Attributes:
        script: The recipe.
        words: Its command line.
        config_path: Its ``--config_file``, if any; the command line wins over it.
    """

    script: Path
    words: tuple[str, ...]
    config_path: Path | None = None

    @classmethod
    def parse(cls, script: str, words: Sequence[str]) -> RecipeCommand:
        """Parse the script and the words that follow it.

        Raises:
            ConfigError: if the script (or shipped recipe of that name) or its file of flags does not exist.
        """
        path = named_script(script)
        if not path.is_file():
            raise ConfigError(f"there is no recipe {script!r}.", place="command line", fix="check the path.")
        command = cls(path, tuple(words))
        config = next((values[-1] for name, values in command.flags() if name in _CONFIG_FLAGS and values), None)
        if config is not None and not Path(config).is_file():
            problem = "is not a file." if Path(config).exists() else "does not exist."
            raise ConfigError(problem, place=config, fix="check the path after --config_file.")
        return replace(command, config_path=Path(config)) if config is not None else command

    def value(self, name: str, default: Any = None) -> Any:
        """The value of `name` (text from the command line, as typed in YAML), or `default`."""
        values = self.values(name)
        return values[-1] if values else default

    def values(self, name: str) -> list[Any]:
        """All values of a flag that takes several; the last occurrence wins."""
        given = [values for flag, values in self.flags() if flag == name]
        if given:
            return list(given[-1]) or ["true"]
        entry = self._yaml().get(name)
        return [] if entry is None else list(entry) if isinstance(entry, list) else [entry]

    def names(self) -> list[str]:
        """Every flag that is set, on the command line or in the file."""
        return list(dict.fromkeys([*(name for name, _ in self.flags()), *self._yaml()]))

    def place(self, name: str) -> str:
        """``--name``, or ``file.yaml:12`` if the file of flags sets it."""
        if self.config_path is not None and all(flag != name for flag, _ in self.flags()):
            names = (name, datasets_key.KEY) if name in datasets_key.FLAGS else (name,)
            places = (place for key, place, _ in read_mapping(self.config_path) if key in names)
            return next(places, f"--{name}")
        return f"--{name}"

    def without(self, names: Collection[str], folder: Path) -> RecipeCommand:
        """The same command without `names`; a file of flags that sets one is copied to `folder` without it.

        The copy keeps all other lines in place, so that messages name the right line.
        """
        if set(names) & set(datasets_key.FLAGS):
            names = {*names, datasets_key.KEY}
        words = [word for flag, kept in self._words_by_flag() if flag not in names for word in kept]
        if self.config_path is None or not set(names) & {*self._yaml(), *self._own_keys()}:
            return replace(self, words=tuple(words))
        copy = folder / self.config_path.name
        if copy != self.config_path:  # otherwise it is a copy already
            shutil.copyfile(self.config_path, copy)
        blank_keys(copy, names)
        words = [word for flag, kept in self._words_by_flag() if flag not in {*names, *_CONFIG_FLAGS} for word in kept]
        return replace(self, words=("--config_file", str(copy), *words), config_path=copy)

    def with_flags(self, **flags: Any) -> RecipeCommand:
        """The same command with `flags` set, overriding the command line and the file."""
        added = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        return replace(self, words=(*self.words, *added))

    def _yaml(self) -> dict[str, Any]:
        """Flags of the file, with TRL's list of data sets replaced by the flags that it stands for."""
        import yaml

        if self.config_path is None:
            return {}
        text = self.config_path.read_text(encoding="utf-8")
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError:
            return {}  # the recipe itself names the line
        if not isinstance(values, dict):
            return {}
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        entries = root.value if isinstance(root, yaml.MappingNode) else []
        node = next((value for key, value in entries if key.value == datasets_key.KEY), None)
        if node is not None and datasets_key.is_list_of_datasets(node):
            with contextlib.suppress(ConfigError):  # likewise
                del values[datasets_key.KEY]
                values |= datasets_key.flags_of_datasets(node, self.config_path)
        return values

    def _own_keys(self) -> list[str]:
        return [] if self.config_path is None else [key for key, _, _ in read_mapping(self.config_path)]

    def flags(self) -> list[tuple[str, list[str]]]:
        """``(name, values)`` of every flag on the command line, in order."""
        flags = []
        for flag, words in self._words_by_flag():
            if flag:
                _, has_value, value = words[0].partition("=")
                flags.append((flag, [value] if has_value else words[1:]))
        return flags

    def _words_by_flag(self) -> list[tuple[str, list[str]]]:
        """The command line split before every flag; words before the first flag come under an empty name."""
        groups: list[tuple[str, list[str]]] = []
        for word in self.words:
            if word.startswith("--"):
                groups.append((word[2:].partition("=")[0].replace("-", "_"), [word]))
            elif groups:
                groups[-1][1].append(word)
            else:
                groups.append(("", [word]))
        return groups
