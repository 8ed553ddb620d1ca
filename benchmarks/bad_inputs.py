"""Run every command with invalid input and record its error line, time and exit status.

    python benchmarks/bad_inputs.py --write     # real processes, one after another; benchmarks/results/bad_inputs.md

tests/recipes/test_bad_inputs.py runs the same cases in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import yaml

from accel_scale.shipped import recipe_names

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "bad_inputs.md"
_HEAD = """# What cannot work, and the line that says so

`python benchmarks/bad_inputs.py --write`; `…` stands for flags of a run that works, and for the folder of the inputs.
Times are of whole processes. Those of several seconds answer after torch, transformers and TRL have been imported; a
row marked "+ imports" was run in a process that had them already.

| command | line | time | status |
|---|---|---|---|
"""
# Time after which a process is assumed to be importing the libraries.
_PATIENCE_SECONDS = 6.0
# Longest time to an error line on an idle machine, and the flags that may take longer because rows are tokenized.
_LONGEST_SECONDS = 3.0
_TOKENIZES = "--max_length 4"
RECIPES = recipe_names()
_RUNS = {
    "sft": "--model_name_or_path {model} --dataset_name {rows} --columns prompt=question completion=answer "
    "--precision fp32 --max_length 64 --max_steps 2 --per_device_train_batch_size 2 --save_strategy no "
    "--output_dir {out}",
    "pretrain": "--model_name_or_path {model} --data {text} --precision fp32 --max_length 64 --max_steps 2 "
    "--per_device_train_batch_size 2 --output_dir {out}",
}


_OWN = {
    "sft_py": str(ROOT / "recipes" / "sft.py"),
    "ddp": str(ROOT / "accelerate_configs" / "ddp.yaml"),
}


@dataclass(frozen=True)
class Case:
    """One command with invalid input.

    Attributes:
        program: ``sft``, ``pretrain``, ``tune`` or a subcommand of ``accel-scale``.
        line: Its arguments, with input names in braces.
        says: Texts that the answer must contain; alternatives are separated by ``|``.
    """

    program: str
    line: str
    says: tuple[str, ...]

    def words(self, inputs: dict[str, str], out: Path) -> list[str]:
        """The arguments with real paths; a repeated flag overrides the run's own."""
        names = {**inputs, "out": str(out), **_OWN}
        runs = {name: flags.format(**names) for name, flags in _RUNS.items()}
        text = self.line.format(**{**names, **runs})
        return shlex.split(text.replace('{"', "'{\"").replace('"}', "\"}'"))

    @property
    def command(self) -> str:
        """The command as shown in the results."""
        shown = self.line.replace("{{", "{").replace("}}", "}").replace("{sft} ", "… ").replace("{pretrain} ", "… ")
        return f"{self.program}.py {shown}" if self.program in RECIPES else f"accel-scale {self.program} {shown}"

    def problems(self, status: int, error: str, seconds: float = 0.0) -> list[str]:
        """Problems of an answer: more than one line, a wrong status, no fix, a missing text, or a long wait."""
        lines = [line for line in error.splitlines() if line.strip()]
        found = [] if len(lines) == 1 else [f"{len(lines)} lines"]
        found += [f"status {status}"] if status != 2 else []
        found += [] if "Fix: " in error else ["no fix"]
        is_late = seconds > _LONGEST_SECONDS and _TOKENIZES not in self.line
        found += [f"{seconds:.1f} s"] if is_late else []
        last = lines[-1] if lines else ""
        return found + [words for words in self.says if not any(word in last for word in words.split("|"))]


def read_cases(path: Path = ROOT / "benchmarks" / "data" / "bad_inputs.yaml") -> list[Case]:
    """All cases, in the file's order."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Case(program, line, tuple(says)) for program, cases in content.items() for line, says in cases]


@contextlib.contextmanager
def _captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err


def run_here(case: Case, words: list[str], recipe: Callable[[str], ModuleType]) -> tuple[int, str]:
    """Run `case` in this process; returns status and standard error.

    Args:
        recipe: Returns the recipe's module for a name.
    """
    from accel_scale.cli.main import main as cli
    from accel_scale.ending.user_errors import user_errors

    with _captured() as (_, err):
        try:
            if case.program in RECIPES:
                module = recipe(case.program)
                with user_errors(module.PROGRAM):
                    module.main(words)
                return 0, err.getvalue()
            return cli([case.program, *words]), err.getvalue()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1, err.getvalue()


def run_process(
    case: Case, words: list[str], *, python: Path | str = sys.executable, timeout: float = 600.0
) -> tuple[int, str, float]:
    """Run `case` in its own process; returns status, standard error and seconds.

    Raises:
        subprocess.TimeoutExpired: if it has not ended after `timeout` seconds.
    """
    program = [str(ROOT / "recipes" / f"{case.program}.py")]
    command = program if case.program in RECIPES else ["-m", "accel_scale.cli.main", case.program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    started = time.perf_counter()
    done = subprocess.run(
        [str(python), *command, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=timeout,
    )
    return done.returncode, done.stderr, time.perf_counter() - started


def load_recipe(name: str) -> ModuleType:
    """Load the module recipes/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"recipes_{name}", ROOT / "recipes" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Run all cases as processes; returns 1 if any answer is not one correct line."""
    from benchmarks.bad_input_files import make_inputs
    from tests.warm_python import WarmPython

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", action="store_true", help="write what was run into benchmarks/results/bad_inputs.md"
    )
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose command holds one of these texts")
    args = parser.parse_args()
    shown = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
    rows = {line.partition("` | ")[0]: line for line in shown.splitlines() if line.startswith("| `")}
    failed, warm = 0, WarmPython()
    with contextlib.closing(warm), tempfile.TemporaryDirectory() as folder:
        inputs = make_inputs(Path(folder) / "inputs")
        cases = [case for case in read_cases() if any(text in case.command for text in args.only)]
        for number, case in enumerate(cases):
            words, imports = case.words(inputs, Path(folder) / f"out{number}"), ""
            try:
                status, error, seconds = run_process(case, words, timeout=_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                status, error, seconds = run_process(case, words, python=warm.executable)
                imports = " + imports"
            problems = case.problems(status, error, seconds + _PATIENCE_SECONDS * bool(imports))
            failed += bool(problems)
            line = (
                re.sub(r"\s+", " ", (error.strip().splitlines() or [""])[-1]).replace(folder, "…").replace("|", "\\|")
            )
            rows[f"| `{case.command}"] = f"| `{case.command}` | {line} | {seconds:.1f} s{imports} | {status} |"
            print(
                f"{seconds:5.1f} s{imports}  {status}  {case.command}\n    {line}\n    {'; '.join(problems)}",
                flush=True,
            )
    if args.write:
        told = [rows[f"| `{case.command}"] for case in read_cases() if f"| `{case.command}" in rows]
        RESULTS.write_text(_HEAD + "\n".join(told) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
