"""The tool that counts how many mutants the tests notice: what it changes, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = '''
from __future__ import annotations

_BUFFER = 8 * 2
LIMIT: int | None = 7


def judge(loss: float, *, floor: float = 0.5, names: list[str] | None = None) -> int:
    """At least 1 of 2."""
    assert loss > 0, "must be 3"
    if loss < floor and names is not None:
        raise ValueError(f"{loss} is below {floor + 1}")
    state.value = min(loss, 3)
    state.close()
    print("step", 4 + 5)
    total = state.all_reduce(value.detach().abs().max(), torch.float32, ReduceOp.MAX, how="sum")
    return [name for name in sorted(names, reverse=True) if not name][-1]
'''


@pytest.fixture
def mutants(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    import mutants

    return mutants


def test_what_is_changed_and_what_is_not(mutants: Any) -> None:
    found = {}
    for kinds in mutants.sites(SOURCE).values():
        for operator, occurrence in kinds:
            text = mutants.mutated(SOURCE, operator, occurrence)
            if text is not None:
                one = mutants.described("m.py", SOURCE, text, operator, occurrence)
                found.setdefault(one.line, set()).add(one.after)
    assert set(found) == {5, 8, 11, 13, 14, 16, 17}
    assert found[5] == {"LIMIT: int | None = 8", "LIMIT: int | None = 6"}
    assert {"if loss <= floor and names is not None:", "if loss < floor or names is not None:"} <= found[11]
    assert {"if loss < floor:", "if names is not None:"} <= found[11]
    assert {"pass", "state.value = max(loss, 3)", "state.value = min(loss, 4)"} <= found[13]
    assert found[14] == {"pass"}
    reduced = "total = state.all_reduce({}, torch.{}, ReduceOp.{}, how={})"
    assert {
        reduced.format("value.abs().max()", "float32", "MAX", '"sum"'),
        reduced.format("value.detach().max()", "float32", "MAX", '"sum"'),
        reduced.format("value.detach().abs().max()", "bfloat16", "MAX", '"sum"'),
        reduced.format("value.detach().abs().max()", "float32", "SUM", '"sum"'),
        reduced.format("value.detach().abs().max()", "float32", "MAX", '"mean"'),
    } <= found[16]
    assert "return [name for name in sorted(names, **{}) if not name][-1]" in found[17]
    assert mutants.sites(SOURCE) == mutants.sites(SOURCE), "a seed draws the same ones again"


def test_what_the_configuration_names_is_there(repository: Path, mutants: Any) -> None:
    """A renamed module or test would end every run, or count its mutants as missed."""
    import mutation_score

    known = mutation_score.known_mutants()
    watched = [*mutation_score.watched_modules(), *(pair[0] for pair in known)]
    assert len(known) > 20
    for one in watched:
        for test in (*one.tests, *one.more):
            assert (repository / test.partition("::")[0]).is_file(), test
    for one in mutation_score.watched_modules():
        assert (repository / one.path).is_file(), one.path
        assert one.tests or one.more, one.path


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_nine_of_ten_mutants_are_noticed(repository: Path) -> None:
    """Seven of ten are noticed by the fast tests alone."""
    script = str(repository / "benchmarks" / "mutation_score.py")
    options = ["--all", "--workers", "2", "--per-module", "1", "--least", "0.9", "--least-fast", "0.7"]
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, timeout=4 * 3600 - 60)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
