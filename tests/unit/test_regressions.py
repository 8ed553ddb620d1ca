"""`tests/regressions.yaml` names the tests that cover each past fault: all of them exist."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
FAULTS = yaml.safe_load((REPOSITORY / "tests" / "regressions.yaml").read_text())


@cache
def _tests_of(path: Path) -> frozenset[str]:
    """Names of a file's test functions, with methods as Class::method."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
    return frozenset(names)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["was"][:60])
def test_a_fault_is_held_by_tests_that_exist(fault: dict[str, object]) -> None:
    assert fault["tests"] or fault.get("why"), "neither a test nor a reason"
    for named in fault["tests"]:
        path, separator, piece = named.partition("::")
        if separator:
            assert piece.rpartition("::")[2].startswith("test_")
            assert piece in _tests_of(REPOSITORY / path), f"{path} has no {piece}"
        else:
            path, _, piece = named.partition(": ")
            assert piece in (REPOSITORY / path).read_text(), f"{path} has no row {piece!r}"
