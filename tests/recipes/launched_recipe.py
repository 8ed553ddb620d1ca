"""A recipe launched on CPU processes for a few steps, and its records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS = 5
_REPOSITORY = Path(__file__).resolve().parents[2]
_ALWAYS = ["--max_steps", str(STEPS), "--logging_steps", "1", "--seed", "7", "--per_device_train_batch_size", "2"]
# One step is recorded; nothing is saved along the way, evaluated or sampled.
OF_RECIPE = {
    "pretrain": "--max_length 64 --save_steps 0 --eval_steps 0 --sample_tokens 0 --profile_steps 1",
    "sft": "--method full --save_strategy no --exact_match_samples 0 --profile_steps 1",
    "grpo": "--num_generations 2 --max_completion_length 12 --temperature 2 --save_strategy no --lora_dropout 0 "
    "--learning_rate 1e-4 --warmup_steps 0 --rewards tests/recipes/rewards_of_tests.py:even_characters",
    "rloo": "--num_generations 2 --max_completion_length 12 --temperature 2 --save_strategy no --lora_dropout 0 "
    "--learning_rate 1e-4 --warmup_steps 0 --rewards tests/recipes/rewards_of_tests.py:even_characters",
    "reward": "--max_length 128 --save_strategy no --lora_dropout 0 --learning_rate 1e-4 --warmup_steps 0",
    "kto": "--max_length 128 --save_strategy no --lora_dropout 0 --learning_rate 1e-4 --warmup_steps 0",
    "vision": "--save_strategy no --lora_dropout 0 --learning_rate 1e-3 --lr_scheduler_type constant",
    "dpo": "--max_length 128 --save_strategy no --lora_dropout 0 --learning_rate 1e-4 --warmup_steps 0",
}


def launched(
    name: str,
    precision: str,
    recipe: str,
    folder: Path,
    *flags: str,
    processes: int = 2,
    script: str | None = None,
    launcher_flags: Sequence[str] = (),
) -> Path:
    """Run `recipe`, or a `script` that takes its flags, under the launch file `name` into `folder`."""
    launcher = {"fp32": "no"}.get(precision, precision)
    words = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
    words += ["--main_process_port", "0"]  # two launches at the same time would both find the default port free
    words += ["--mixed_precision", launcher, *launcher_flags]
    words += ["--config_file", f"accelerate_configs/{name}.yaml", script or f"recipes/{recipe}.py"]
    words += ["--output_dir", str(folder)]
    words += ["--precision", precision, *_ALWAYS, *OF_RECIPE[recipe].split(), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=_REPOSITORY, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return folder


def logged(folder: Path) -> list[dict[str, Any]]:
    """The log entries of the training steps."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in entries if "loss" in entry]


def events(folder: Path) -> list[dict[str, Any]]:
    """Operations of rank 0 in the recorded step, in order, if they have a name."""
    found = json.loads((folder / "profile" / "trace.json").read_text())["traceEvents"]
    return sorted((event for event in found if "name" in event and "ts" in event), key=lambda event: event["ts"])


def recorded(folder: Path, operation: str) -> list[dict[str, Any]]:
    """Calls of `operation` by rank 0 in the recorded step."""
    return [event for event in events(folder) if event["name"] == operation]
