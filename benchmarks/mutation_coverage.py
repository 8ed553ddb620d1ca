"""Finds the tests that run a line, from a recording of `pytest --cov --cov-context=test`."""

from __future__ import annotations

import ast
import functools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from coverage import CoverageData

# Limit of tests per line, since hundreds of tests run some lines of the planner.
MOST_TESTS = 100


class Covered:
    """A recorded run of the fast tests.

    Args:
        recorded: Data file written by coverage, with one context per test.
        repository: Folder of the modules, unchanged since the recording.
    """

    def __init__(self, recorded: Path, repository: Path) -> None:
        self._data = CoverageData(str(recorded))
        self._data.read()
        self._repository = repository

    def tests(self, module: str, line: int, named: Sequence[str]) -> list[str]:
        """At most `MOST_TESTS` tests that run the statement at a line, those of the files in `named` first.

        For a statement that runs at import, or without a recorded test, the files in `named` are returned: some tests
        run it in separate processes. Files of `named` that run the module only in such processes are always added.
        """
        lines = self._lines(module)
        around = _statement((self._repository / module).read_text(encoding="utf-8"), line)
        if around is None:
            return list(named)
        found = sorted({test for one in around for test in lines.get(one, ())})
        random.Random(0).shuffle(found)
        found.sort(key=lambda test: test.partition("::")[0] not in named)
        files = {test.partition("::")[0] for tests in lines.values() for test in tests} if found else set()
        return [*found[:MOST_TESTS], *(name for name in named if name.partition("::")[0] not in files)]

    @functools.cache  # noqa: B019 - one object in a run
    def _lines(self, module: str) -> dict[int, set[str]]:
        (path,) = [file for file in self._data.measured_files() if file.endswith("/" + module)] or [""]
        return {
            line: {context.partition("|")[0] for context in contexts if "::" in context}
            for line, contexts in self._data.contexts_by_lineno(path).items()
        }


def _statement(source: str, line: int) -> range | None:
    """Lines of the innermost statement, or of a compound statement's head; None outside functions."""
    inside = [node for node in _bodies(ast.parse(source)) if node.lineno <= line <= (node.end_lineno or node.lineno)]
    if not inside:
        return None
    node = max(inside, key=lambda one: one.lineno)
    body = getattr(node, "body", None)
    end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
    return range(node.lineno, max(end, line, node.lineno) + 1)


def _bodies(tree: ast.AST) -> Iterator[ast.stmt]:
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in function.body:
                yield from (node for node in ast.walk(statement) if isinstance(node, ast.stmt))
