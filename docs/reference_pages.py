"""The pages that are made from the code: docs/flags.md from the declarations of flags, docs/api.md from docstrings.

`python docs/refresh.py` writes both. Nothing here imports torch or TRL.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import accel_scale
from accel_scale.cli import plan
from accel_scale.flags.library import SHIPPED, FlagClass, FlagTable, LaterClass
from accel_scale.flags.parsing import build_parser
from accel_scale.planning.search.recipe_choices import PLANNED_RECIPES
from accel_scale.recipe_specs.finding import load_recipe

ROOT = Path(__file__).resolve().parents[1]
# Recipes on TRL's trainers: most of their flags are the same.
TRAINERS = tuple(name for name in PLANNED_RECIPES if name != "pretrain")

_FLAGS_INTRO = """# Flags

Every flag of every recipe and of `accel-scale plan`, as declared in the code; `python docs/refresh.py` writes this
page. A recipe's flags are also the keys of its YAML file. [fine-tuning.md](fine-tuning.md) and
[pretraining.md](pretraining.md) explain the ones that most runs set. Flags of TRL and transformers are cut to their
first sentence; the recipe's `--help` has the rest. This page knows {versions}.

A switch takes `true` or `false`; a bare `--flag` means `true`. One that is on by default also has a `--no_flag`. An
empty default means that the recipe, the launch file or the device decides, or that nothing is set.
"""
_API_INTRO = """# Public names

What `from accel_scale import …` gives. Each name is imported when it is first used. [library.md](library.md) shows
them at work. `python docs/refresh.py` writes this page from the docstrings; on the site, signatures and arguments
follow the table.

| name | what | defined in |
|---|---|---|
"""


class FlagRow(NamedTuple):
    """One flag as the page shows it."""

    name: str
    default: str
    text: str
    is_ours: bool


def flag_rows(classes: Sequence[FlagClass], table: FlagTable | None) -> list[FlagRow]:
    """Flags of a recipe, in the order of its `--help`."""
    own = (base for cls in classes for base in (cls.own if isinstance(cls, LaterClass) else (cls,)))
    ours = {"config_file", *(declared.name for base in own for declared in dataclasses.fields(base))}
    rows: dict[str, FlagRow] = {}
    for action in build_parser(classes, program="", table=table)._actions:
        if action.dest != "help" and action.dest not in rows:  # --no_flag follows its --flag
            rows[action.dest] = _row(action, is_ours=action.dest in ours)
    return list(rows.values())


def plan_rows() -> list[FlagRow]:
    """Flags of `accel-scale plan`, in the order of its `--help`."""
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return [
        _row(action, is_ours=True) for action in parser._actions if action.option_strings and action.dest != "help"
    ]


def _row(action: argparse.Action, *, is_ours: bool) -> FlagRow:
    text = " ".join((action.help or "").replace("%%", "%").replace(" (default: %(default)s)", "").split())
    if not is_ours:
        text = re.split(r"(?<=[^.][^.][.!?]) +(?=[A-Z`'])", text)[0]
    if action.choices is not None:
        choices = ", ".join(f"`{getattr(choice, 'value', choice)}`" for choice in action.choices)
        text = f"{text.rstrip('.')}. One of {choices}."
    default = getattr(action.default, "value", action.default)
    if isinstance(default, (list, tuple)):
        default = " ".join(map(str, default))
    shown = "" if default in (None, "") else f"`{str(default).lower() if isinstance(default, bool) else default}`"
    return FlagRow(f"`--{action.dest}`", _cell(shown), _cell(text), is_ours)


def _cell(text: str) -> str:
    """Text for a cell of a table: no markup but code, which flags are too."""
    parts = text.replace("|", r"\|").split("`")
    for index in range(0, len(parts), 2):
        plain = parts[index].replace("<", "&lt;").replace("[", r"\[").replace("*", r"\*")
        parts[index] = re.sub(r"--[a-z]\w*", r"`\g<0>`", plain)
    return "`".join(parts)


def _table(rows: Iterable[FlagRow]) -> str:
    lines = [f"| {row.name} | {row.default} | {row.text} |" for row in rows]
    return "\n".join(["| flag | default | what |", "|---|---|---|", *lines]) + "\n"


def flags_page() -> str:
    """docs/flags.md, from the recipes' declarations and the shipped table of the libraries' flags."""
    table: FlagTable = json.loads(SHIPPED.read_text(encoding="utf-8"))
    folder = ROOT / "recipes"
    rows = {name: flag_rows(load_recipe(folder / f"{name}.py").spec.flags, table) for name in (*TRAINERS, "pretrain")}
    common = [row for row in rows["sft"] if all(row in rows[name] for name in TRAINERS)]
    versions = " and ".join(f"{name} {version}" for name, version in table["versions"].items())
    page = [
        _FLAGS_INTRO.format(versions=versions),
        "## Fine-tuning recipes\n",
        f"What {', '.join(f'`{name}.py`' for name in TRAINERS)} have in common, with the same default.\n",
        "### Of this project, or with its default\n",
        _table(row for row in common if row.is_ours),
        "### Of TRL and transformers\n",
        _table(row for row in common if not row.is_ours),
    ]
    for name in TRAINERS:
        page += [f"## {name}.py\n", "Beside [those of all fine-tuning recipes](#fine-tuning-recipes).\n"]
        page.append(_table(row for row in rows[name] if row not in common))
    page += ["## pretrain.py\n", _table(rows["pretrain"])]
    page += ["## tune.py\n", "They come after the recipe's path, and the recipe's own flags after `--`.\n"]
    page.append(_table(flag_rows((module_at(folder / "tune.py").TuneArguments,), None)))
    page += ["## accel-scale plan\n", "[planning.md](planning.md) shows them at work.\n", _table(plan_rows())]
    return "\n".join(page)


def module_at(path: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def api_page() -> str:
    """docs/api.md: every public name with the first sentence of its docstring."""
    rows = []
    for name, module in sorted(accel_scale._EXPORTS.items(), key=lambda item: item[0].lower()):
        body = ast.parse((ROOT / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8")).body
        definition = next(node for node in body if getattr(node, "name", None) == name)
        summary = " ".join((ast.get_docstring(definition) or "").split("\n\n")[0].split())
        rows.append(f"| `{name}` | {_cell(re.sub('`+', '`', summary))} | `{module}` |")
    return _API_INTRO + "\n".join(rows) + "\n"
