"""`accel-scale import`: convert a configuration of axolotl, LLaMA-Factory or TRL to flags of a recipe."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_scale.importing.convert import Imported
    from accel_scale.importing.draft import Draft

DESCRIPTION = """Read a configuration of axolotl, LLaMA-Factory or TRL into flags of the recipe that fits.

  accel-scale import qlora.yml                     # shows what becomes of every key
  accel-scale import qlora.yml -o mine.yaml        # writes the flags
  accel-scale import qlora.yml --write configs     # writes them below a folder, under the file's name

Every key is mapped or named: nothing is dropped without a word. Status 0: all keys that change training have come
across; 3: some have no counterpart, and the lines say which and what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command; light, so that `--help` stays fast."""
    parser.description = DESCRIPTION
    parser.add_argument("file", metavar="FILE", help="their YAML file")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-o", "--output", metavar="FILE", help="write the recipe's flags to this file")
    where.add_argument("--write", metavar="DIR", help="write them into this folder, under the file's name")


def run(args: argparse.Namespace) -> int:
    """Read, write, and report what became of every key."""
    from accel_scale.errors import ConfigError
    from accel_scale.facts.exit_statuses import INCOMPLETE_STATUS
    from accel_scale.importing.convert import import_config

    source = Path(args.file)
    target = Path(args.output) if args.output else Path(args.write) / f"{source.stem}.yaml" if args.write else None
    if target is not None and target.exists():
        raise ConfigError("exists already.", place=str(target), fix="name another file.")
    imported = import_config(source)
    text = _yaml(imported, source.name)
    if target is None:
        print(text)
    else:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot be written ({error.strerror}).", place=str(target), fix="name another file."
            ) from None
    draft = imported.draft
    print(f"{imported.project} → {draft.recipe}, {len(draft.flags)} flags", file=sys.stderr)
    print("\n".join(_report(draft)), file=sys.stderr)
    launch = f" --launch {draft.launch}" if draft.launch else ""
    print(f"run it: accel-scale {draft.recipe}{launch} --config_file {target or 'FILE'}", file=sys.stderr)
    return INCOMPLETE_STATUS if draft.lost else 0


def _yaml(imported: Imported, name: str) -> str:
    from accel_scale.importing.convert import as_yaml

    draft = imported.draft
    launch = f" --launch {draft.launch}" if draft.launch else ""
    lines = [
        f"# From {imported.project}'s {_comment(name)} by accel-scale import.",
        f"#   accel-scale {draft.recipe}{launch} --config_file THIS_FILE",
    ]
    for note in draft.lost:
        lines.append(f"# Not here: {_comment(note.key)}: {_comment(note.text)}")
    lines += [f"{flag}: {as_yaml(value)}" for flag, value in draft.flags.items()]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    """`text` on one line, without characters that end a comment or move a terminal's cursor."""
    return "".join(character if character.isprintable() else " " for character in " ".join(text.split()))


def _report(draft: Draft) -> list[str]:
    from accel_scale.importing.draft import CHECK, LOST, MAPPED, NO_EFFECT, OFF

    heads = {
        MAPPED: "mapped",
        CHECK: "mapped, to be compared",
        LOST: "no counterpart, and training changes",
        NO_EFFECT: "no counterpart, and training is the same",
    }
    lines = []
    for kind, head in heads.items():
        notes = [note for note in draft.notes if note.kind == kind]
        if notes:
            lines += [f"{head}:", *dict.fromkeys(_line(note.place, note.key, note.text) for note in notes)]
    off = dict.fromkeys(note.key for note in draft.notes if note.kind == OFF)
    return lines + ([f"off or empty there: {_comment(', '.join(off))}"] if off else [])


def _line(place: str, key: str, text: str) -> str:
    return "  " + _comment(f"line {place.rpartition(':')[2]} {key}: {text}")
