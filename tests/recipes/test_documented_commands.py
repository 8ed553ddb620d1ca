"""Every command in README, docs and notebooks names files, subcommands and flags that exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RECIPES = ("recipes/sft.py", "recipes/grpo.py", "recipes/pretrain.py", "recipes/tune.py")
_BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)


def shell_blocks(page: Path) -> list[str]:
    """Shell input that a page shows, including bash cells of a notebook."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return _BLOCK.findall(text)
    sources = ["".join(cell["source"]) for cell in json.loads(text)["cells"]]
    cells = [source.partition("\n")[2] for source in sources if source.startswith("%%bash\n")]
    return [*cells, *(block for source in sources for block in _BLOCK.findall(source))]


def commands(page: Path) -> Iterator[list[str]]:
    """Words of every command in a page's shell blocks, without comments."""
    for block in shell_blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|\||;", line):
                if words := shlex.split(part, comments=True):
                    yield words


def flags_of(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if re.match(r"--\w", word)}


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """The `--help` text of each recipe and of each accel-scale subcommand."""

    def listed(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command, "--help"], capture_output=True, text=True, cwd=ROOT, check=True
        )
        return done.stdout

    top = listed("-m", "accel_scale.cli.main")
    names = re.findall(r"^  ([a-z]+(?:-[a-z]+)*)  +\S", top[top.index("commands:") :], re.MULTILINE)
    assert len(names) >= 9
    pages = {name: listed("-m", "accel_scale.cli.main", name) for name in names}
    return pages | {recipe: listed(recipe) for recipe in RECIPES}


def knows(help_text: str, flag: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", help_text) is not None


def test_commands_name_what_exists(helps):
    wrong = []
    seen = 0
    for page in [*PAGES, *NOTEBOOKS]:
        for words in commands(page):
            where = f"{page.name}: {' '.join(words)}"
            script = next((word for word in words if word.endswith(".py")), None)
            at = words.index(script) if script else len(words)
            before, after = words[:at], words[at + 1 :]
            recipe = script if script in RECIPES else None
            for word in words:
                if word.startswith(("accelerate_configs/", "recipes/", "benchmarks/", "docs/")):
                    wrong += [] if (ROOT / word).exists() else [f"{where}: no file {word}"]
            if recipe == "recipes/tune.py":  # tune.py RECIPE [its own flags] [-- the recipe's]
                own, _, inner = " ".join(after).partition(" -- ")
                wrong += [f"{where}: {f}" for f in flags_of(own.split()) if not knows(helps[recipe], f)]
                wrong += [f"{where}: {f}" for f in flags_of(inner.split()) if not knows(helps["recipes/sft.py"], f)]
            elif recipe:
                wrong += [f"{where}: {flag}" for flag in flags_of(after) if not knows(helps[recipe], flag)]
            if "accel-scale" in before:
                name = before[before.index("accel-scale") + 1]
                if name not in helps:
                    wrong.append(f"{where}: no command {name}")
                    continue
                own_flags = flags_of(before[before.index("accel-scale") + 1 :])
                wrong += [f"{where}: {flag}" for flag in own_flags if not knows(helps[name], flag)]
            seen += bool(recipe or "accel-scale" in before)
            if words[0] == "make":
                makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
                wrong += [where for target in words[1:] if not re.search(rf"^{target}:", makefile, re.MULTILINE)]
    assert wrong == []
    assert seen > 50
