"""Kill -9 at random moments, rerun the command, and check that the run is bitwise equal to an undisturbed one.

    python benchmarks/sft_soak.py                                       # writes benchmarks/results/sft_soak.md
    python benchmarks/sft_soak.py --strategies ddp --kills 2 --results /tmp/results

For each strategy recipes/sft.py fine-tunes a small model in fp32 on CPU processes: once undisturbed, and once with
launcher and ranks killed (SIGKILL) repeatedly, every second time while a checkpoint is being written, and restarted
with the same command. Every logged step's loss, gradient norm, learning rate and number of tokens, and the final
weights, must be bitwise equal. A kill counts as "while saving" if it left an unfinished checkpoint behind. Then a run
of two ranks is killed half-way and finished by one rank, with losses within 1e-6 of each other. Processes are forked
from servers that have imported the libraries (tests/warm_python.py); --cold starts Python from scratch.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from warm_python import WarmPython  # noqa: E402

STRATEGIES = {
    "single": ("cpu", 1), "ddp": ("ddp", 2), "fsdp2": ("fsdp2", 2), "zero2": ("zero2", 2), "zero3": ("zero3", 2),
}  # fmt: skip
COMPARED = ("loss", "grad_norm", "learning_rate", "num_tokens")
CONFIG = {
    "model_type": "llama", "vocab_size": 258, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
_GROWTH_TIMEOUT = 300.0
# Share of the pause used for kills during saving: a small model is saved in hundredths of a second.
_SHARE_OF_SAVE = 0.005
SAVE_STEPS = 3


@dataclass
class Job:
    """One run of the recipe, which may be started many times.

    Attributes:
        python: Interpreter to run.
        family: Returns every process of the run, whatever started it.
    """

    strategy: str
    folder: Path
    inputs: Path
    steps: int
    python: str
    family: Callable[[int], list[psutil.Process]]
    ranks: int | None = None
    extra: list[str] = field(default_factory=list)

    def command(self) -> list[str]:
        file, ranks = STRATEGIES[self.strategy]
        launch = [self.python, "-m", "accelerate.commands.launch", "--mixed_precision", "no"]
        launch += ["--config_file", str(REPOSITORY / "accelerate_configs" / f"{file}.yaml")]
        launch += ["--num_processes", str(self.ranks or ranks), "--main_process_port", "0"]
        flags = {
            "model_name_or_path": self.inputs / "model", "dataset_name": self.inputs / "rows.jsonl",
            "max_length": 64, "per_device_train_batch_size": 1, "global_batch_size": 4, "max_steps": self.steps,
            "logging_steps": 1, "save_steps": SAVE_STEPS, "save_total_limit": 2, "precision": "fp32",
            "learning_rate": "1e-3", "dataloader_num_workers": 0, "output_dir": self.folder,
        }  # fmt: skip
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        return [*launch, str(REPOSITORY / "recipes" / "sft.py"), *words, *self.extra]

    @property
    def log(self) -> Path:
        """Log of all starts."""
        return self.folder.parent / f"{self.folder.name}.log"

    def start(self) -> subprocess.Popen[bytes]:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}",
        }
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                self.command(), stdout=log, stderr=log, start_new_session=True, env=environment, cwd=REPOSITORY
            )

    def finish(self) -> None:
        self.check(self.start())

    def check(self, process: subprocess.Popen[bytes]) -> None:
        """Raise unless the process ends by itself with status 0."""
        if process.wait():
            text = self.log.read_text(errors="replace")
            raise SystemExit(f"{self.strategy}: ended with {process.returncode}\n{text[-6000:]}")

    def kill(self, process: subprocess.Popen[bytes], known: Sequence[psutil.Process] = ()) -> None:
        """SIGKILL the launcher and all its descendants: ranks have their own sessions, and would save.

        Args:
            known: Processes to stop immediately, before all others are searched.
        """
        stop(known)
        family = self.family(process.pid)
        stop(family)  # so that none notices that others end
        for member in reversed(family):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
        psutil.wait_procs(family, timeout=10)


def stop(processes: Sequence[psutil.Process]) -> None:
    """Pause those of the processes that still exist."""
    for member in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGSTOP)


def make_inputs(folder: Path) -> None:
    """Write rows of several lengths, and a small model with a byte tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from accel_scale.data.pretraining import load_pretraining_tokenizer

    folder.mkdir(parents=True)
    generator = random.Random(0)
    words = ["one", "two", "river", "stone", "walks", "sings", "and", "the", "blue", "runs", "over"]
    with open(folder / "rows.jsonl", "w", encoding="utf-8") as file:
        for _ in range(400):
            prompt, completion = (" ".join(generator.choices(words, k=generator.randint(1, 5))) for _ in range(2))
            file.write(json.dumps({"prompt": prompt, "completion": " " + completion}) + "\n")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder / "model")
    load_pretraining_tokenizer("byte").save_pretrained(folder / "model")


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Logged values that do not depend on time; an incomplete line is left out."""
    path = folder / "metrics.jsonl"
    lines = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return [{name: line[name] for name in ("step", *COMPARED) if name in line} for line in lines]


def kill_at_random(job: Job, generator: random.Random, longest: float, *, in_save: bool) -> str:
    """Start the run and kill it at a random moment after its first new step; returns what the kill left behind."""
    path, partial = job.folder / "metrics.jsonl", job.folder / ".partial"
    known = path.stat().st_mtime_ns if path.is_file() else 0
    process = job.start()
    deadline, pause = time.monotonic() + _GROWTH_TIMEOUT, generator.uniform(0, longest)
    while process.poll() is None and time.monotonic() < deadline:
        if path.is_file() and path.stat().st_mtime_ns != known:
            break
        time.sleep(0.01)
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = job.family(process.pid)
    time.sleep(0 if in_save else pause)
    while in_save and process.poll() is None and not any(partial.glob("checkpoint-*/*")):
        time.sleep(0.0005)
    time.sleep(pause * _SHARE_OF_SAVE if in_save else 0)
    if process.poll() is not None:
        job.check(process)
        return "had ended"
    job.kill(process, family)
    return "while saving" if any(partial.glob("checkpoint-*")) else "between saves"


def differences(reference: Path, other: Path) -> list[str]:
    """Differences between two runs: logged steps, then weights."""
    from safetensors.torch import load_file

    found = []
    first, second = metrics(reference), metrics(other)
    if [line["step"] for line in first] != [line["step"] for line in second]:
        found.append(f"{len(first)} lines against {len(second)}")
    for one, two in zip(first, second, strict=False):
        found += [f"step {one['step']}: {n} {one[n]} against {two.get(n)}" for n in one if one[n] != two.get(n)]
    weights = [load_file(folder / "model.safetensors") for folder in (reference, other)]
    worst = max((weights[0][name] - weights[1][name]).abs().max().item() for name in weights[0])
    return [*found, f"weights differ by up to {worst:.3g}"] if worst else found


def soak(strategy: str, options: argparse.Namespace, root: Path, python: str, family: Any) -> dict[str, Any]:
    """Test one strategy: undisturbed, killed many times, and finished on one rank."""
    inputs, generator = root / "inputs", random.Random(f"{options.seed} {strategy}")
    if not inputs.is_dir():
        make_inputs(inputs)
    make = lambda name, **more: Job(strategy, root / name, inputs, options.steps, python, family, **more)  # noqa: E731
    whole, killed = make(f"{strategy}_whole"), make(f"{strategy}_killed")
    whole.finish()
    moments: list[str] = []
    found: list[str] = []
    while len(moments) < options.kills and not found and time.monotonic() < options.deadline:
        moment = kill_at_random(killed, generator, options.longest, in_save=len(moments) % 2 == 0)
        if moment == "had ended":  # it reached its end: start over, the kills so far count
            found = differences(whole.folder, killed.folder)
            shutil.rmtree(killed.folder)
            continue
        moments.append(moment)
        lines = metrics(killed.folder)
        print(f"  {strategy}: kill {len(moments)} {moment}, at step {lines[-1]['step'] if lines else 0}", flush=True)
    killed.finish()
    result: dict[str, Any] = {
        "strategy": strategy, "kills": len(moments), "while_saving": moments.count("while saving"),
        "differences": found or differences(whole.folder, killed.folder), "one_rank": None,
    }  # fmt: skip
    if strategy != "single" and options.one_rank:
        half = make(f"{strategy}_half")
        process = half.start()
        while process.poll() is None and not any(half.folder.glob("checkpoint-*")):
            time.sleep(0.01)
        half.kill(process)
        make(f"{strategy}_half", ranks=1).finish()
        first, second = (metrics(job.folder) for job in (whole, half))
        result["one_rank"] = max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(first, second, strict=True))
    return result


def table(results: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """The results as Markdown."""
    from accel_scale.reporting.summary import _commit, installed_versions

    versions = installed_versions()
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "trl", "deepspeed"))
    lines = [
        "# Fine-tuning, killed and started again", "",
        f"`python benchmarks/sft_soak.py`, whose first lines say what is compared: {options.steps} steps, a "
        f"checkpoint every {SAVE_STEPS}, fp32 on CPU processes, {named}, {datetime.date.today().isoformat()}, commit "
        f"{_commit()}.",
        "", "| strategy | kills | of them while saving | log and weights | ended on one rank |",
        "|---|---:|---:|---|---:|",
    ]  # fmt: skip
    for result in results:
        other = f"{result['one_rank']:.1e}" if result["one_rank"] is not None else "–"
        verdict = "the same, bit for bit" if not result["differences"] else f"DIFFER: {result['differences'][0]}"
        lines.append(f"| {result['strategy']} | {result['kills']} | {result['while_saving']} | {verdict} | {other} |")
    lines += ["", "The last column is the largest relative difference of a loss from the run on two ranks."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Entry point; status 1 if a run differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--longest", type=float, default=2.0, help="Seconds after the first new step, at most.")
    parser.add_argument("--one_rank", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--minutes", type=float, default=600.0, help="No kill after this long, for each strategy.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cold", action="store_true", help="Start all of Python for every process.")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        warm = None if options.cold else WarmPython()
        if warm is not None:
            stack.callback(warm.close)

        def family(pid: int) -> list[psutil.Process]:
            """The run's processes, including the servers' children, which are not the launcher's."""
            own = psutil.Process(pid)
            below = own.children(recursive=True)
            for server in warm.servers if warm is not None else ():
                below += psutil.Process(server).children(recursive=True)
            return [own, *dict.fromkeys(below)]

        python = str(warm.executable) if warm is not None else sys.executable
        for strategy in options.strategies:
            options.deadline = time.monotonic() + 60 * options.minutes
            results.append(soak(strategy, options, Path(folder), python, family))
            (options.results / "sft_soak.md").write_text(table(results, options))  # it takes hours: save each
    print(table(results, options))
    return int(any(r["differences"] or (r["one_rank"] or 0.0) > 1e-6 for r in results))


if __name__ == "__main__":
    sys.exit(main())
