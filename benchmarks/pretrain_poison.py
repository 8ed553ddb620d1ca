"""Pretraining on poisoned data: rows that cause NaN or loss spikes are skipped under every strategy.

    python benchmarks/pretrain_poison.py                        # writes benchmarks/results/pretrain_poison.md
    python benchmarks/pretrain_poison.py --strategies zero2 --results /tmp/results

A model in which the embedding of one byte is NaN reads text in which a few of 2,000 documents contain that byte and a
few are noise. recipes/pretrain.py trains it on CPU processes with the launch files of accelerate_configs/, guard on;
its final validation loss is compared with a run on clean text, and the rows named by the guard are checked.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
STRATEGIES = {"single": ("cpu", 1), "ddp": ("ddp", 2), "fsdp2": ("fsdp2", 2), "zero2": ("zero2", 2)}
POISON = "\x01"
SHAPE = {
    "vocab_size": 258, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
WORDS = ["one", "two", "river", "stone", "walks", "sings", "and", "the", "blue", "runs", "over"]


def make_inputs(folder: Path) -> None:
    """Write clean, poisoned and held-out documents, and the model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from accel_scale.data.pretraining import load_pretraining_tokenizer

    generator, noise = random.Random(0), random.Random(1)
    clean = [" ".join(generator.choices(WORDS, k=generator.randint(3, 60))) for _ in range(2000)]
    poisoned = list(clean)
    for index in range(100, 1900, 400):
        poisoned[index] = poisoned[index][:20] + POISON
    for index in range(300, 1900, 400):
        poisoned[index] = "".join(chr(noise.randint(33, 126)) for _ in range(300))
    held_out = [" ".join(generator.choices(WORDS, k=40)) for _ in range(60)]
    for name, texts in (("clean", clean), ("poisoned", poisoned), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    with torch.no_grad():
        model.get_input_embeddings().weight[ord(POISON)] = float("nan")
    model.save_pretrained(folder / "model")
    load_pretraining_tokenizer("byte").save_pretrained(folder / "model")


def train(strategy: str, data: str, inputs: Path, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one launch; returns its summary and events."""
    file, ranks = STRATEGIES[strategy]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no", "--num_processes"]
    launch += [str(ranks), "--main_process_port", "0", "--config_file"]
    launch += [str(REPOSITORY / "accelerate_configs" / f"{file}.yaml"), str(REPOSITORY / "recipes" / "pretrain.py")]
    flags = {
        "model_name_or_path": inputs / "model", "data": inputs / f"{data}.jsonl",
        "validation_data": inputs / "held_out.jsonl", "max_length": 64, "per_device_train_batch_size": 2,
        "global_batch_size": 8, "max_steps": options.steps, "learning_rate": 3e-3, "precision": "fp32",
        "lr_scheduler_type": "cosine", "eval_steps": 0, "save_steps": 0, "sample_tokens": 0, "output_dir": out,
        "dataloader_num_workers": 0, "guard": "skip" if data == "poisoned" else "off",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    if data == "poisoned":
        words += ["--guard_max_skips", "40"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *words], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{strategy}, {data}: ended with {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    events = out / "guard_events.jsonl"
    return {
        "strategy": strategy,
        "loss": json.loads((out / "run_summary.json").read_text())["eval_loss"],
        "events": [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else [],
    }


def named(run: dict[str, Any], inputs: Path) -> dict[str, int]:
    """Number of skipped steps by cause, and how many of those with NaN name a poisoned row."""
    from transformers import AutoTokenizer

    from accel_scale.data.pretraining import open_pretraining_data

    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    data = open_pretraining_data(str(inputs / "poisoned.jsonl"), tokenizer=tokenizer, row_length=64)
    nan = [event for event in run["events"] if "nan" in event["reason"]]
    found = [event for event in nan if any(POISON in data.row_text(name) for name in event["rows"])]
    return {"nan": len(nan), "spikes": len(run["events"]) - len(nan), "named": len(found)}


def table(clean: dict[str, Any], runs: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """The results as Markdown."""
    from machine import machine

    info = machine()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=REPOSITORY)
    lines = [
        "# Pretraining on poisoned data", "",
        f"{info['cores']} cores of {info['cpu']}, torch {info['torch']}, {datetime.date.today()}, commit "
        f"{commit.stdout.strip()}; {options.steps} steps of 8 rows of 64 tokens, fp32. Made by "
        "`python benchmarks/pretrain_poison.py`. The clean run on one process ends at "
        f"{clean['loss']:.4f} nats per token.", "",
        "| strategy | skipped for NaN | of them with the poisoned row among those named | skipped as spikes "
        "| validation loss | of the clean run's |", "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for run in runs:
        counts = run["counts"]
        lines.append(
            f"| {run['strategy']} | {counts['nan']} | {counts['named']} | {counts['spikes']} | {run['loss']:.4f} "
            f"| {run['loss'] / clean['loss'] - 1:+.2%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Entry point; status 1 if a loss is more than 1 % from the clean run's or a poisoned row was not named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--results", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="poison-") as name:
        work = Path(name)
        make_inputs(work)
        clean = train("single", "clean", work, work / "clean", options)
        runs = [train(strategy, "poisoned", work, work / strategy, options) for strategy in options.strategies]
        for run in runs:
            run["counts"] = named(run, work)
    options.results.mkdir(parents=True, exist_ok=True)
    text = table(clean, runs, options)
    (options.results / "pretrain_poison.md").write_text(text)
    print(text)
    close = all(abs(run["loss"] / clean["loss"] - 1) <= 0.01 for run in runs)
    return int(not close or any(run["counts"]["named"] < run["counts"]["nan"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
