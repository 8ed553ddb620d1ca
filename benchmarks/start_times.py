"""Time before training begins: imports, `--help` and loading a model, here and in TRL, in turns.

    python benchmarks/start_times.py              # three rounds; writes benchmarks/results/start_times.md

Every case runs in its own process, one round after another. CPU seconds are compared, since other work on the machine
does not affect them; the minimum over rounds counts. Loading is timed in one process with a bf16 model with random
weights on disk, alternating between transformers' function and this project's.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "start_times.md"
_CLI = "import sys; from accel_scale.cli.main import main; sys.argv[0] = 'accel-scale'; sys.exit(main())"
_TRL = "import sys; from trl.cli import main; sys.argv[0] = 'trl'; sys.exit(main())"
# Imports needed before training; the last case is what `trl sft` itself imports.
_OURS = "from accel_scale.flags.library import load_classes; from accel_scale.recipe_specs.trl import SFT; "
_OURS += "load_classes(SFT.flags); import accel_scale.trainers.sft_trainer"
CASES: dict[str, tuple[str, ...]] = {
    "`import accel_scale`": ("-c", "import accel_scale"),
    "`import trl`": ("-c", "import trl"),
    "`accel-scale --help`": ("-c", _CLI, "--help"),
    "`recipes/sft.py --help`": ("recipes/sft.py", "--help"),
    "`recipes/pretrain.py --help`": ("recipes/pretrain.py", "--help"),
    "`trl sft --help`": ("-c", _TRL, "sft", "--help"),
    "all that `recipes/sft.py` imports to train": ("-c", _OURS),
    "all that `trl sft` imports to train": ("-c", "import trl.scripts.sft; from trl import SFTTrainer"),
}
SHAPE = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 8,
    "vocab_size": 32000,
}  # fmt: skip
_LOAD = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM
from accel_scale.modeling.loading import load_model
folder, rounds = sys.argv[1], int(sys.argv[2])
ways = {"ours": lambda: load_model(folder, dtype=torch.float32),
        "theirs": lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)}
found = {name: [] for name in ways}
for number in range(rounds + 1):
    for name, load in ways.items():
        started = time.process_time()
        load()
        found[name].append(time.process_time() - started)
print(json.dumps({name: seconds[1:] for name, seconds in found.items()}))
"""


def cpu_seconds(words: tuple[str, ...]) -> float:
    """CPU seconds of one process, including its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def loading(rounds: int) -> dict[str, float]:
    """Median seconds of loading one model both ways."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16().save_pretrained(folder)
        words = [sys.executable, "-c", _LOAD, folder, str(rounds)]
        done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def table(seconds: dict[str, list[float]], loads: dict[str, float]) -> str:
    """The results as Markdown."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "trl"))
    lines = [
        "# Before training begins",
        "",
        f"`python benchmarks/start_times.py`, {datetime.date.today().isoformat()}, {versions}, Python "
        f"{sys.version.split()[0]}. CPU seconds, the least of {len(next(iter(seconds.values())))} interleaved rounds.",
        "",
        "| | CPU seconds |",
        "|---|---:|",
        *(f"| {name} | {min(found):.2f} |" for name, found in seconds.items()),
        f"| loading a model of 0.15B parameters: `accel_scale.modeling.loading.load_model` | {loads['ours']:.2f} |",
        f"| the same: `AutoModelForCausalLM.from_pretrained` | {loads['theirs']:.2f} |",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, words in CASES.items():
            seconds[name].append(cpu_seconds(words))
            print(f"{name}: {seconds[name][-1]:.2f} s", flush=True)
    RESULTS.write_text(table(seconds, loading(options.rounds)), encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
