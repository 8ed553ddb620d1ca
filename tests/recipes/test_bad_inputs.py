"""Inputs that cannot work give one line that names place and fix, whatever the command: a table of mistakes."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.bad_input_files import make_inputs
from benchmarks.bad_inputs import RESULTS, Case, read_cases, run_here

pytestmark = pytest.mark.slow
CASES = read_cases()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_inputs(tmp_path_factory.mktemp("bad"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.command)
def test_a_mistake_is_one_line_that_names_place_and_fix(
    case: Case,
    inputs: dict[str, str],
    sft_module: Any,
    pretrain_module: Any,
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks.bad_inputs import load_recipe

    loaded = {"sft": sft_module, "pretrain": pretrain_module}

    def recipe(name: str) -> ModuleType:
        return loaded.get(name) or load_recipe(name)

    monkeypatch.chdir(repository)
    with warnings.catch_warnings():
        status, error = run_here(case, case.words(inputs, tmp_path / "out"), recipe)
    assert case.problems(status, error) == [], error


def test_every_command_has_cases_and_the_table_is_of_all_of_them() -> None:
    from accel_scale.cli.main import COMMANDS

    assert {case.program for case in CASES} == {"sft", "pretrain", "tune", *COMMANDS}
    assert len(CASES) >= 80
    shown = RESULTS.read_text(encoding="utf-8")
    assert [case.command for case in CASES if f"`{case.command}`" not in shown] == []
