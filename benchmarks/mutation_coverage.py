"""Which tests run a line: what `pytest --cov --cov-context=test` has recorded, asked by module and line."""

from __future__ import annotations

import ast
import functools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from coverage import CoverageData

# A line of the planner is run by hundreds of tests.
MOST_TESTS = 100


class Covered:
    """A recorded run of the fast tests.

    Args:
        recorded: The data file that coverage wrote; several contexts, one a test.
        repository: Where the modules are now, unchanged since.
    """

    def __init__(self, recorded: Path, repository: Path) -> None:
        self._data = CoverageData(str(recorded))
        self._data.read()
        self._repository = repository

    def tests(self, module: str, line: int, named: Sequence[str]) -> list[str]:
        """Tests that run the statement at a line, those of the files in `named` first, at most `MOST_TESTS`.

        A statement that runs while the module is imported is for the files in `named`, and so is one that no test is
        recorded for: some run it in processes of their own. A file that runs the module only there meets them all.
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
    """The lines of the innermost statement, of a compound one its head; None outside functions."""
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
