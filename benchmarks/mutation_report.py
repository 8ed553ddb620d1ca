"""Results of mutants, and the Markdown report of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutants import Mutant

KILLED, SURVIVED, INVALID = "killed", "survived", "invalid"


@dataclass(frozen=True)
class Result:
    """Result of a mutant with the fast tests and, if requested, all of `make test`, and the tests that killed it."""

    group: str
    mutant: Mutant
    fast: str
    all: str | None
    seconds: float
    by: str = ""

    @property
    def name(self) -> str:
        return f"{self.mutant.module}:{self.mutant.line}"


def score(results: Sequence[Result], field: str) -> str:
    """Score like ``17 of 20 (85%)``; invalid mutants do not count."""
    outcomes = [getattr(result, field) for result in results if result.fast != INVALID]
    if not outcomes or None in outcomes:
        return "–"
    return f"{outcomes.count(KILLED)} of {len(outcomes)} ({outcomes.count(KILLED) / len(outcomes):.0%})"


def table(results: Sequence[Result], seed: int) -> str:
    """The report as Markdown."""
    lines = [
        "# Mutants that the tests notice",
        "",
        f"`python benchmarks/mutation_score.py`, seed {seed}: mutants drawn at random from the modules of "
        "`benchmarks/mutation.yaml`, each against the tests of its module.",
        "",
        "| group | fast tests | `make test` |",
        "|---|---|---|",
    ]
    groups = list(dict.fromkeys(result.group for result in results))
    for group in sorted(groups):
        of_group = [result for result in results if result.group == group]
        lines.append(f"| {group} | {score(of_group, 'fast')} | {score(of_group, 'all')} |")
    unusable = sum(result.fast == INVALID for result in results)
    lines += [f"| **all** | **{score(results, 'fast')}** | **{score(results, 'all')}** |", ""]
    if unusable:
        lines += [f"Not counted: {unusable} that no module can be imported with, or whose tests fail as it is.", ""]
    lines += ["## Survivors", ""]
    survivors = [result for result in results if SURVIVED in (result.fast, result.all)]
    for result in sorted(survivors, key=lambda result: (result.mutant.module, result.mutant.line)):
        by = "the fast tests" if result.all == KILLED else "all" if result.all else "the fast tests"
        before, after = (
            " ".join(text.replace("`", "'").split())[:160] for text in (result.mutant.before, result.mutant.after)
        )
        lines.append(f"- {result.name} (survives {by}): `{before}` → `{after}`")
    return "\n".join(lines or ["none"]) + "\n"


def load(path: Path) -> list[Result]:
    """Load a run's saved results."""
    return [
        Result(
            entry["group"],
            Mutant(**entry["mutant"]),
            entry["fast"],
            entry["all"],
            entry["seconds"],
            entry.get("by", ""),
        )
        for entry in json.loads(path.read_text(encoding="utf-8"))
    ]
