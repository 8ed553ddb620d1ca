"""Converts another project's file to flags that the recipe's strict parser accepts, with a note on every key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from accel_scale.errors import ConfigError
from accel_scale.flags.library import known_table
from accel_scale.flags.parsing import build_parser, parse_entry
from accel_scale.flags.yaml_file import read_mapping
from accel_scale.importing import axolotl, llama_factory, trl
from accel_scale.importing.draft import CHECK, LOST, NO_EFFECT, Draft, NoCounterpart, Row
from accel_scale.recipe_specs.finding import load_recipe
from accel_scale.shipped import recipe_script, shipped_recipes


class Project(NamedTuple):
    """A supported project: its converter, its key table, and keys that identify its files."""

    convert: Callable[[Draft], None]
    rows: tuple[Row, ...]
    signs: frozenset[str]


PROJECTS: Mapping[str, Project] = {
    "axolotl": Project(
        axolotl.convert,
        axolotl.ROWS,
        frozenset({"base_model", "sequence_len", "micro_batch_size", "num_epochs", "sample_packing", "adapter"}),
    ),
    "LLaMA-Factory": Project(
        llama_factory.convert,
        llama_factory.ROWS,
        frozenset({"stage", "finetuning_type", "cutoff_len", "template", "dataset", "dataset_dir", "lora_rank"}),
    ),
    "TRL": Project(
        trl.convert,
        (),
        frozenset({"dataset_name", "datasets", "model_name_or_path", "max_length", "lora_r", "accelerate_config"}),
    ),
}
# Flags of the other recipes and their names in pretrain.py.
_OF_PRETRAIN = {"save_total_limit": "keep_last", "resume_from_checkpoint": "resume"}


class Imported(NamedTuple):
    """The project a file came from, and the converted draft."""

    project: str
    draft: Draft


def import_config(path: Path) -> Imported:
    """Read and convert a file.

    Raises:
        ConfigError: if it is not a YAML mapping, its project is unknown, or no recipe trains by its method.
    """
    entries = read_mapping(path)
    project = _project_of(path, {key for key, _, _ in entries})
    values: dict[str, object] = {}
    places: dict[str, str] = {}
    nested = {row.key.partition(".")[0] for row in PROJECTS[project].rows if "." in row.key}
    for key, place, node in entries:
        value = _value(node)
        inner = value if key in nested and isinstance(value, dict) else None
        for name, item in [(key, value)] if inner is None else [(f"{key}.{k}", v) for k, v in inner.items()]:
            values[name], places[name] = item, place
    draft = Draft(path, values, places)
    try:
        PROJECTS[project].convert(draft)
    except NoCounterpart as error:
        key = str(error).partition(":")[0]
        fix = f"train it with {project}, or change {key}."
        raise ConfigError(f"{error}.", place=places.get(key, str(path)), fix=fix) from None
    if draft.recipe not in shipped_recipes():
        raise ConfigError(
            f"it calls for a recipe {draft.recipe!r}, which does not come with the package.",
            place=places.get("stage") or places.get("reward_model") or str(path),
            fix=f"train it with {project}; ours are {', '.join(shipped_recipes())}.",
        )
    _settle(draft)
    if draft.flags.get("trust_remote_code"):
        draft.note("trust_remote_code", CHECK, "it runs code from the hub: leave it out if the model needs none")
    return Imported(project, draft)


def _project_of(path: Path, keys: set[str]) -> str:
    if "train_dataset" in keys and "base_model" not in keys:
        raise ConfigError(
            "a configuration of LLaMA-Factory's next version, whose keys are not known yet.",
            place=str(path),
            fix="give one with stage, dataset and finetuning_type.",
        )
    counts = {name: len(project.signs & keys) for name, project in PROJECTS.items()}
    best = max(counts, key=lambda name: counts[name])
    if not counts[best]:
        raise ConfigError(
            "no configuration of axolotl, LLaMA-Factory or TRL: it has none of their keys.",
            place=str(path),
            fix="give a file with base_model, or with model_name_or_path and stage or dataset_name.",
        )
    return best


def _value(node: yaml.Node) -> object:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _settle(draft: Draft) -> None:
    """Check every flag with the recipe's own parser; refused flags are reported and left out."""
    spec = load_recipe(recipe_script(draft.recipe)).spec
    parser = build_parser(spec.flags, program=spec.program, table=known_table(spec.flags))
    known = {action.dest for action in parser._actions}
    if draft.recipe == "pretrain":
        _as_pretraining(draft)
    for flag, value in list(draft.flags.items()):
        source = next((note for note in draft.notes if note.text.startswith(f"{flag}: ")), None)
        if flag not in known:
            del draft.flags[flag]
            kind, text = LOST, f"{flag} is no flag of {spec.program}"
        else:
            try:
                parse_entry(parser, flag, _node(value), str(draft.path))
                continue
            except ConfigError as error:
                del draft.flags[flag]
                kind, text = LOST, f"{error.problem} {error.fix}"
        if source is not None:
            draft.notes.remove(source)
            draft.note(source.key, kind, text)


def _node(value: object) -> yaml.Node:
    node = yaml.compose(as_yaml(value), Loader=yaml.SafeLoader)
    assert node is not None
    return node


def as_yaml(value: object) -> str:
    """One value as YAML in flow style."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def _as_pretraining(draft: Draft) -> None:
    """Adapt flags to pretrain.py, which counts steps and global-batch rows and names a few flags differently."""
    flags = draft.flags
    for theirs, ours in _OF_PRETRAIN.items():
        if theirs in flags:
            flags[ours] = flags.pop(theirs)
    steps = flags.pop("gradient_accumulation_steps", None)
    if steps is not None:
        rows = int(str(steps)) * int(str(flags.get("per_device_train_batch_size", 1)))
        flags["global_batch_size"] = rows
        draft.notes = [note for note in draft.notes if note.key != "gradient_accumulation_steps"]
        text = f"global_batch_size: {rows} rows of all processes; multiply it by their number"
        draft.note("gradient_accumulation_steps", CHECK, text)
    epochs = flags.pop("num_train_epochs", None)
    if epochs is not None and int(str(flags.get("max_steps", -1))) < 0:
        key = next((key for key in ("num_epochs", "num_train_epochs") if key in draft.values), "num_train_epochs")
        draft.notes = [note for note in draft.notes if note.key != key]
        draft.note(key, LOST, f"{epochs} epochs: set --max_tokens or --max_steps")
    for name in ("save_strategy", "eval_strategy", "dataset_num_proc", "tf32", "save_only_model", "ddp_timeout"):
        if name in flags:
            del flags[name]
            for note in [note for note in draft.notes if note.text.startswith(f"{name}: ")]:
                draft.notes.remove(note)
                draft.note(note.key, NO_EFFECT, "pretrain.py has its own flags for that")
