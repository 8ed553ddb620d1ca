"""Measure how many mutants of the modules in benchmarks/mutation.yaml the tests detect.

    python -m pytest tests/unit -m "not slow and not soak" --cov --cov-context=test --cov-report=
    python benchmarks/mutation_score.py --per-module 2 --all --write --covered .coverage
    python benchmarks/mutation_score.py --module accel_scale/optimization/loss.py --per-module 40
    python benchmarks/mutation_score.py --survivors /tmp/mutation.json  # those of an earlier run, after a new test

A mutant is written into a copy of the checkout, and the tests of its module run there, in a process forked from one
that has imported the libraries. Fast tests run first: with --covered those recorded by the first command for the
changed line, followed by the module's files, which alone are run without it. With --all, survivors also meet the slow
tests of the same files and those under `more`. A test kills a mutant if it fails with it and passes without; a mutant
that cannot be imported is invalid. In addition to randomly drawn mutants, the known ones, each of which was missed
once, are always run.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import yaml
from mutants import Mutant, described, mutated, sites
from mutation_coverage import Covered
from mutation_report import INVALID, KILLED, SURVIVED, Result, load, table

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))
import warm_python  # noqa: E402

CONFIG = REPOSITORY / "benchmarks" / "mutation.yaml"
RESULTS = REPOSITORY / "benchmarks" / "results" / "mutation.md"
COPIED = ("accel_scale", "accelerate_configs", "benchmarks", "docs", "recipes", "tests", "README.md", "pyproject.toml")
FAST, SLOW, MORE = "not slow and not soak", "slow and not soak", "not soak"
KNOWN = "known"
# Limits in seconds for one test and for all tests, which kill mutants that loop.
_LIMITS = {FAST: (60, 400), SLOW: (300, 1200), MORE: (300, 1200)}
# pytest's exit status: 1 a test failed, 2 a file could not be imported, 5 no test was chosen.
_OF_STATUS = {0: SURVIVED, 5: SURVIVED, 2: INVALID}
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+::.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Watched:
    """A module and the tests that must detect its mutants."""

    group: str
    path: str
    tests: tuple[str, ...]
    more: tuple[str, ...]


@functools.cache
def read(module: str) -> str:
    """A module's unmodified text."""
    return (REPOSITORY / module).read_text(encoding="utf-8")


def configuration() -> dict[str, Any]:
    """Content of benchmarks/mutation.yaml."""
    content: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    return content


def watched_modules() -> list[Watched]:
    """The modules of all groups."""
    return [
        Watched(group, path, tuple(tests.get("fast", ())), tuple(tests.get("more", ())))
        for group, modules in configuration()["groups"].items()
        for path, tests in modules.items()
    ]


def known_mutants() -> list[tuple[Watched, Mutant]]:
    """The configuration's known mutants, each with its own tests.

    Raises:
        SystemExit: if a line no longer occurs exactly once because the module has changed.
    """
    pairs = []
    for index, entry in enumerate(configuration()["known"]):
        source = read(entry["path"])
        if source.count(entry["before"]) != 1:
            raise SystemExit(f"{CONFIG.name}: {entry['path']} has not one {entry['before']!r} any more")
        line = source[: source.index(entry["before"])].count("\n") + 1
        mutant = Mutant(entry["path"], line, KNOWN, index, entry["before"].strip(), entry["after"].strip())
        tests, more = entry.get("fast", ()), entry.get("more", ())
        pairs.append((Watched(KNOWN, f"known {index}", tuple(tests), tuple(more)), mutant))
    return pairs


def changed(mutant: Mutant) -> str:
    """The module's text with the mutant applied."""
    source = read(mutant.module)
    if mutant.operator == KNOWN:
        entry = configuration()["known"][mutant.occurrence]
        return source.replace(entry["before"], entry["after"])
    text = mutated(source, mutant.operator, mutant.occurrence)
    assert text is not None
    return text


def sample(watched: Watched, number: int, seed: int) -> list[Mutant]:
    """Draw `number` mutants of a module: random places, with one of the possible changes at each."""
    source = read(watched.path)
    draw = random.Random(f"{seed} {watched.path}")
    by_place = sites(source)
    places = sorted(by_place)
    draw.shuffle(places)
    found: list[Mutant] = []
    for place in places:
        operator, occurrence = draw.choice(by_place[place])
        text = mutated(source, operator, occurrence)
        if text is not None:
            found.append(described(watched.path, source, text, operator, occurrence))
        if len(found) == number:
            break
    return sorted(found, key=lambda mutant: mutant.line)


class Copy:
    """A copy of the checkout in which one module at a time is replaced."""

    def __init__(self) -> None:
        self._made = Path(tempfile.mkdtemp(prefix="mutation-"))
        self.folder = self._made / REPOSITORY.name
        self.folder.mkdir()
        if (REPOSITORY.parent / "shared").is_dir():  # real inputs, without which some tests are skipped
            (self._made / "shared").symlink_to((REPOSITORY.parent / "shared").resolve())
        for name in COPIED:
            source = REPOSITORY / name
            if source.is_dir():
                shutil.copytree(source, self.folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
            elif source.exists():
                shutil.copy2(source, self.folder / name)
        self._changes = 0

    def write(self, module: str, text: str) -> None:
        """Write another text with a new modification time, so that Python recompiles it."""
        self._changes += 1
        path = self.folder / module
        if path.read_text(encoding="utf-8") == text:
            return
        path.write_text(text, encoding="utf-8")
        os.utime(path, (self._changes, self._changes))
        shutil.rmtree(self.folder / ".hypothesis", ignore_errors=True)  # no example is carried over

    def run(self, python: Path, tests: Sequence[str], chosen: str) -> tuple[str, list[str]]:
        """Run the tests on this copy; returns the outcome and the failed tests."""
        there = [test for test in tests if (self.folder / test.partition("::")[0]).exists()]
        if not there:
            return SURVIVED, []
        per_test, limit = _LIMITS[chosen]
        options = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=no"]
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1", "HYPOTHESIS_SEED": "0"}
        command = [str(python), "-m", "pytest", *options, "--timeout", str(per_test), "-m", chosen, *there]
        # Output goes to a file, since ranks started by a looping mutant would keep a pipe open.
        with tempfile.TemporaryFile("w+") as output:
            with subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=output, stderr=subprocess.STDOUT
            ) as process:
                try:
                    process.wait(timeout=limit)
                except subprocess.TimeoutExpired:
                    process.kill()
                    return KILLED, []
            output.seek(0)
            return _OF_STATUS.get(process.returncode, KILLED), _FAILED.findall(output.read())

    def close(self) -> None:
        shutil.rmtree(self._made, ignore_errors=True)


class Runner:
    """Runs several mutants in parallel."""

    def __init__(self, workers: int, *, all_tests: bool, covered: Covered | None) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        warm_python.SERVERS = 1  # ranks of a launch need two servers for different hashes; here only speed matters
        self._warm = warm_python.WarmPython()
        self._copies = [Copy() for _ in range(workers)]
        self._free: Queue[Copy] = Queue()
        for copy in self._copies:
            self._free.put(copy)
        self._all_tests = all_tests
        self._covered = covered
        self._passes: dict[str, bool] = {}

    def _passes_as_it_is(self, copy: Copy, test: str, chosen: str) -> bool:
        if test not in self._passes:
            self._passes[test] = copy.run(self._warm.executable, [test], chosen)[0] == SURVIVED
            if not self._passes[test]:
                print(f"{test} fails as it is", flush=True)
        return self._passes[test]

    def result(self, watched: Watched, mutant: Mutant) -> Result:
        """Write one mutant, run its tests and restore the module."""
        copy, started, outcomes, failed = self._free.get(), time.perf_counter(), [SURVIVED], []
        try:
            for chosen, tests in self._rounds(watched, mutant):
                copy.write(mutant.module, changed(mutant))
                outcome, failed = copy.run(self._warm.executable, tests, chosen)
                copy.write(mutant.module, read(mutant.module))
                if not all(self._passes_as_it_is(copy, test, chosen) for test in failed):
                    outcome = INVALID
                outcomes = [outcome] if chosen == FAST else [*outcomes, outcome]
                if outcome != SURVIVED:
                    break
        finally:
            copy.write(mutant.module, read(mutant.module))
            self._free.put(copy)
        return Result(
            watched.group,
            mutant,
            outcomes[0],
            outcomes[-1] if self._all_tests else None,
            time.perf_counter() - started,
            failed[0] if failed else "",
        )

    def _rounds(self, watched: Watched, mutant: Mutant) -> list[tuple[str, Sequence[str]]]:
        rounds: list[tuple[str, Sequence[str]]] = [(FAST, watched.tests)]
        if self._covered is not None and watched.group != KNOWN:
            rounds.insert(0, (FAST, self._covered.tests(mutant.module, mutant.line, watched.tests)))
        if self._all_tests:
            rounds += [(SLOW, watched.tests), (MORE, watched.more)]
        return rounds

    def close(self) -> None:
        self._warm.close()
        for copy in self._copies:
            copy.close()


def run(pairs: list[tuple[Watched, Mutant]], runner: Runner, *, workers: int, keep: Path) -> list[Result]:
    """Run all mutants, printing and saving each result when it is known."""
    try:
        results: list[Result] = []
        with ThreadPoolExecutor(workers) as pool:
            for result in pool.map(lambda pair: runner.result(*pair), pairs):
                results.append(result)
                keep.write_text(json.dumps([asdict(one) for one in results], indent=1), encoding="utf-8")
                outcome = result.fast if result.all in (None, result.fast) else f"{result.fast}, then {result.all}"
                change = f"{result.mutant.before[:110]}  ==>  {result.mutant.after[:110]}"
                print(f"{outcome:10} {result.seconds:5.1f} s  {result.name}  {change}", flush=True)
        return results
    finally:
        runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-module", type=int, default=8, help="mutants drawn from each module")
    parser.add_argument("--module", action="append", help="only this module, by its path (repeatable)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="what survives the fast tests meets the others, too")
    parser.add_argument("--covered", type=Path, help="coverage's record of which test runs which line")
    parser.add_argument("--survivors", type=Path, help="only those that survive in this file of an earlier run")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "mutation.json")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/mutation.md")
    parser.add_argument("--least", type=float, default=0.0, help="share of killed mutants below which it fails")
    parser.add_argument("--least-fast", type=float, default=0.0, help="the same of the fast tests alone")
    options = parser.parse_args()
    modules = [w for w in watched_modules() if not options.module or w.path in options.module]
    known = [pair for pair in known_mutants() if not options.module or pair[1].module in options.module]
    if options.survivors:
        by_path = {watched.path: watched for watched in modules}
        earlier = [r for r in load(options.survivors) if r.fast == SURVIVED]
        pairs = [
            (by_path[r.mutant.module], r.mutant) for r in earlier if r.group != KNOWN and r.mutant.module in by_path
        ]
        missed = {r.mutant.occurrence for r in earlier if r.group == KNOWN}
        pairs += [pair for pair in known if pair[1].occurrence in missed]
    else:
        drawn = [(w, mutant) for w in modules for mutant in sample(w, options.per_module, options.seed)]
        random.Random(options.seed).shuffle(drawn)  # an interrupted run is then a smaller sample of all modules
        pairs = drawn + known
    covered = Covered(options.covered, REPOSITORY) if options.covered else None
    runner = Runner(options.workers, all_tests=options.all, covered=covered)
    results = run(pairs, runner, workers=options.workers, keep=options.keep)
    report = table(results, options.seed)
    print(report)
    if options.write:
        RESULTS.write_text(report, encoding="utf-8")
    valid = [result for result in results if result.fast != INVALID]
    for least, killed in (
        (options.least, sum((result.all or result.fast) == KILLED for result in valid)),
        (options.least_fast, sum(result.fast == KILLED for result in valid)),
    ):
        if valid and killed / len(valid) < least:
            raise SystemExit(f"{killed} of {len(valid)} mutants were noticed, fewer than {least:.0%}")


if __name__ == "__main__":
    main()
