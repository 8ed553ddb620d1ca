"""Exit statuses: one module defines them, and the docs' table explains them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from accel_scale.facts import exit_statuses

ROOT = Path(__file__).resolve().parents[2]
NAMES = {value: name for name, value in vars(exit_statuses).items() if isinstance(value, int)}


def test_every_status_has_a_name_of_its_own_and_a_meaning() -> None:
    constants = [value for value in vars(exit_statuses).values() if isinstance(value, int)]
    assert sorted(constants) == sorted(exit_statuses.MEANINGS)


def test_the_docs_table_is_the_modules() -> None:
    text = (ROOT / "docs/checkpoints.md").read_text().partition("## Exit statuses")[2]
    rows = re.findall(r"^\| (\d+) \| (?:`(\w+)` )?\| (.+) \|$", text, re.MULTILINE)
    documented = {int(status): (name, meaning) for status, name, meaning in rows if status != "0"}
    assert documented == {status: (NAMES[status], meaning) for status, meaning in exit_statuses.MEANINGS.items()}


def test_no_module_has_a_status_of_its_own() -> None:
    for path in (*(ROOT / "accel_scale").rglob("*.py"), *(ROOT / "recipes").glob("*.py")):
        text = path.read_text()
        if path.name == "exit_statuses.py" or not re.search(r"_STATUS = |EXIT_\w+ = |[Ee]xit\(\d", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                assert not re.search(r"_STATUS$|^EXIT_", ast.unparse(node.targets[0])), f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and re.search(r"(?:^|[._])[Ee]xit$", ast.unparse(node.func)):
                assert not any(isinstance(a, ast.Constant) and a.value for a in node.args), f"{path}:{node.lineno}"
