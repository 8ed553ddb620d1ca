"""Kill -9 at random moments, then resume, and check that the run is bitwise equal to an undisturbed one.

    python benchmarks/pretrain_soak.py                                  # writes benchmarks/results/pretrain_soak.md
    python benchmarks/pretrain_soak.py --strategies ddp --kills 2 --results /tmp/results

For each strategy recipes/pretrain.py trains a small model in fp32 on CPU processes: once undisturbed, and once with
launcher, ranks and workers killed (SIGKILL) at random moments, including during checkpoint writing, and restarted with
the same command. Every logged step's loss, gradient norm, learning rate and checksum of its global batch's row ids,
and the final weights, must be bitwise equal. Then a run of two ranks is ended half-way and resumed on four ranks and
on one, with losses within 1e-4. A kill counts as "while saving" if it left an unfinished checkpoint behind.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
STRATEGIES = {"single": ("cpu", 1), "ddp": ("ddp", 2), "fsdp2": ("fsdp2", 2), "zero2": ("zero2", 2)}
COMPARED = ("loss", "grad_norm", "learning_rate", "tokens", "rows", "eval_loss")
CONFIG = {
    "model_type": "llama", "vocab_size": 258, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
_GROWTH_TIMEOUT = 300.0


@dataclass
class Job:
    """One run of the recipe, which may be started many times."""

    strategy: str
    folder: Path
    inputs: Path
    steps: int
    ranks: int | None = None
    extra: list[str] = field(default_factory=list)

    def command(self) -> list[str]:
        file, ranks = STRATEGIES[self.strategy]
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no"]
        launch += ["--config_file", str(REPOSITORY / "accelerate_configs" / f"{file}.yaml")]
        launch += ["--num_processes", str(self.ranks or ranks), "--main_process_port", "0"]
        flags = {
            "model_config": self.inputs / "config.json", "tokenizer": "byte", "data": self.inputs / "text.jsonl",
            "max_length": 64, "per_device_train_batch_size": 2, "global_batch_size": 8, "max_steps": self.steps,
            "logging_steps": 1, "log_rows": True, "eval_steps": self.steps // 2, "eval_rows": 8, "save_steps": 3,
            "precision": "fp32", "sample_tokens": 0, "dataloader_num_workers": 1, "output_dir": self.folder,
        }  # fmt: skip
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        return [*launch, str(REPOSITORY / "recipes" / "pretrain.py"), *words, *self.extra]

    def start(self) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = open(self.folder.parent / f"{self.folder.name}.log", "ab")  # noqa: SIM115 - the process keeps it
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            self.command(), stdout=log, stderr=log, start_new_session=True, env=environment, cwd=self.folder
        )

    def finish(self) -> None:
        process = self.start()
        if process.wait():
            log = (self.folder.parent / f"{self.folder.name}.log").read_text(errors="replace")
            raise SystemExit(f"{self.strategy}: ended with {process.returncode}\n{log[-3000:]}")


def make_inputs(folder: Path) -> None:
    """Write a text of 2,000 documents and the model's configuration."""
    generator = random.Random(0)
    words = ["one", "two", "river", "stone", "walks", "sings", "and", "the", "blue", "runs", "over"]
    with open(folder / "text.jsonl", "w", encoding="utf-8") as file:
        for _ in range(2000):
            text = " ".join(generator.choice(words) for _ in range(generator.randint(3, 60)))
            file.write(json.dumps({"text": text}) + "\n")
    (folder / "config.json").write_text(json.dumps(CONFIG))


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Logged values that do not depend on time."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [{name: line[name] for name in ("step", *COMPARED) if name in line} for line in lines]


def kill_at_random(job: Job, generator: random.Random, longest: float) -> str:
    """Start the run and kill it at a random moment after its first new step; returns what the kill left behind."""
    process = job.start()
    before, deadline = len(metrics(job.folder)), time.monotonic() + _GROWTH_TIMEOUT
    path = job.folder / "metrics.jsonl"
    known = path.stat().st_mtime_ns if path.is_file() else 0
    while process.poll() is None and time.monotonic() < deadline:
        if path.is_file() and path.stat().st_mtime_ns != known and len(metrics(job.folder)) != before:
            break
        time.sleep(0.02)
    time.sleep(generator.uniform(0, longest))
    if process.poll() is not None:
        return "had ended"
    kill_all(process)
    return "while saving" if (job.folder / ".partial").is_dir() else "between saves"


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL the launcher and all its descendants: ranks have their own sessions, and would save and exit."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGSTOP)  # so that none notices that others end
    for member in reversed(family):
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    psutil.wait_procs(family, timeout=10)


def differences(reference: Path, other: Path, *, tolerance: float = 0.0) -> list[str]:
    """Differences between two runs: logged steps, then weights."""
    from safetensors.torch import load_file

    found = []
    first, second = metrics(reference), metrics(other)
    if [line["step"] for line in first] != [line["step"] for line in second]:
        found.append(f"{len(first)} lines against {len(second)}")
    for one, two in zip(first, second, strict=False):
        for name in one:
            same = one[name] == two.get(name)
            if not same and tolerance and isinstance(one[name], float) and name in two:
                same = abs(one[name] - two[name]) <= tolerance * max(1.0, abs(one[name]))
            if not same:
                found.append(f"step {one['step']}: {name} {one[name]} against {two.get(name)}")
    weights = [load_file(folder / "model.safetensors") for folder in (reference, other)]
    worst = max((weights[0][name] - weights[1][name]).abs().max().item() for name in weights[0])
    if worst > tolerance:
        found.append(f"weights differ by up to {worst:.3g}")
    return found


def soak(strategy: str, options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Test one strategy: undisturbed, killed many times, and resumed on other numbers of ranks."""
    inputs = root / "inputs"
    if not inputs.is_dir():
        inputs.mkdir(parents=True)
        make_inputs(inputs)
    generator, extra = random.Random(f"{options.seed} {strategy}"), ["--async_save", "true"] * options.asynchronous
    whole = Job(strategy, root / f"{strategy}_whole", inputs, options.steps, extra=extra)
    started = time.perf_counter()
    whole.finish()
    seconds = time.perf_counter() - started
    killed = Job(strategy, root / f"{strategy}_killed", inputs, options.steps, extra=extra)
    moments: list[str] = []
    while len(moments) < options.kills:
        moment = kill_at_random(killed, generator, options.longest)
        if moment == "had ended":  # it reached its end: start over, the kills so far count
            found = differences(whole.folder, killed.folder)
            if found:
                break
            shutil.rmtree(killed.folder)
            continue
        moments.append(moment)
        print(f"  {strategy}: kill {len(moments)} {moment}, at step {_last_step(killed.folder)}", flush=True)
    killed.finish()
    result: dict[str, Any] = {
        "strategy": strategy, "kills": len(moments), "while_saving": moments.count("while saving"),
        "seconds_undisturbed": seconds, "differences": differences(whole.folder, killed.folder), "other_ranks": {},
    }  # fmt: skip
    for ranks in () if strategy == "single" else options.ranks:
        half = Job(strategy, root / f"{strategy}_to_{ranks}", inputs, options.steps // 2, extra=extra)
        # A schedule independent of the number of steps, so that half a run equals the first half of a whole one.
        half.extra = [*extra, "--lr_scheduler_type", "constant"]
        half.finish()
        resumed = Job(strategy, half.folder, inputs, options.steps, ranks=ranks, extra=half.extra)
        resumed.finish()
        reference = Job(strategy, root / f"{strategy}_constant", inputs, options.steps, extra=half.extra)
        if not reference.folder.is_dir():
            reference.finish()
        result["other_ranks"][ranks] = loss_difference(reference.folder, resumed.folder)
    return result


def loss_difference(reference: Path, other: Path) -> float:
    """Largest relative difference of training losses at equal steps; the order of rows must be the same."""
    first = {line["step"]: line for line in metrics(reference) if "loss" in line}
    second = {line["step"]: line for line in metrics(other) if "loss" in line}
    if first.keys() != second.keys() or any(first[step]["rows"] != second[step]["rows"] for step in first):
        raise SystemExit(f"{other}: other steps or rows than {reference}")
    return max(abs(first[step]["loss"] - second[step]["loss"]) / first[step]["loss"] for step in first)


def _last_step(folder: Path) -> int:
    lines = metrics(folder)
    return lines[-1]["step"] if lines else 0


def table(results: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """The results as Markdown."""
    from accel_scale.reporting.summary import _commit, installed_versions

    versions = installed_versions()
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "accelerate", "deepspeed") if name in versions)
    lines = [
        "# Killed and resumed", "",
        f"`python benchmarks/pretrain_soak.py`, whose first lines say what is compared: {options.steps} steps, a "
        f"checkpoint every 3, fp32 on CPU processes, {named}, {datetime.date.today().isoformat()}, commit "
        f"{_commit()}.",
        "", "| strategy | kills | of them while saving | log, rows and weights | resumed on 4 ranks | on 1 |",
        "|---|---:|---:|---|---:|---:|",
    ]  # fmt: skip
    for result in results:
        others = [f"{result['other_ranks'][n]:.1e}" if n in result["other_ranks"] else "–" for n in (4, 1)]
        verdict = "the same, bit for bit" if not result["differences"] else f"DIFFER: {result['differences'][0]}"
        lines.append(
            f"| {result['strategy']} | {result['kills']} | {result['while_saving']} | {verdict} | {others[0]} "
            f"| {others[1]} |"
        )
    lines += ["", "The last two columns are the largest relative difference of a loss from the run on two ranks."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Entry point; status 1 if a run differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--longest", type=float, default=4.0, help="Seconds after the first new step, at most.")
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 1])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--asynchronous", action="store_true", help="Checkpoints are written while training goes on.")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for strategy in options.strategies:
            results.append(soak(strategy, options, Path(folder)))
            (options.results / "pretrain_soak.md").write_text(table(results, options))  # it takes hours: save each
    print(table(results, options))
    return int(any(r["differences"] or max([0.0, *r["other_ranks"].values()]) > 1e-4 for r in results))


if __name__ == "__main__":
    sys.exit(main())
