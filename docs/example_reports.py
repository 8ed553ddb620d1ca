"""The pages below docs/examples, each from real runs on this machine: `python docs/example_reports.py [NAME…]`.

sft.html         the report of `make sft`
guarded.html     the report of a run with three poisoned rows, killed once and stopped by a signal once
comparison.html  four runs with different learning rates and optimizers beside each other

Minutes on two idle cores. Runs go to a temporary folder, of which only the pages are kept.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "examples"
ROWS = ROOT / "accel_scale" / "assets" / "default" / "data" / "train.jsonl"
MODEL = "accel_scale/assets/default/model"
# Short rows, so that a step takes a moment.
SMALL = (
    "--max_length 128 --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --assistant_only_loss true "
    "--packing true --precision fp32 --logging_steps 1 --exact_match_samples 40 --plan check --learning_rate 1e-3 "
    "--adam_beta2 0.95"
)
NUM_ROWS, NUM_POISONED, DATA_SEED = 1200, 3, 5


def main() -> None:
    """Make the pages that are named, or all."""
    makers = {"sft": sft, "guarded": guarded, "comparison": comparison}
    PAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or makers:
            report(makers[name](Path(folder) / name), name)


def report(runs: list[Path], name: str) -> None:
    """Write the page of `runs`."""
    page = PAGES / f"{name}.html"
    done = [sys.executable, "-m", "accel_scale.cli.main", "report", *map(str, runs), "-o", str(page)]
    subprocess.run(done, cwd=ROOT, check=True, env=environment())


def environment() -> dict[str, str]:
    """That of a launch from the checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}


def start(words: str, folder: Path) -> subprocess.Popen[bytes]:
    """recipes/sft.py with `words` as flags, its output beside the folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "ab") as log:
        command = [sys.executable, "recipes/sft.py", *words.split(), "--output_dir", str(folder)]
        return subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log)


def run(words: str, folder: Path) -> Path:
    """The same to its end."""
    if start(words, folder).wait() != 0:
        sys.exit(Path(f"{folder}.log").read_text(errors="replace")[-3000:])
    return folder


def sft(folder: Path) -> list[Path]:
    """As `make sft`."""
    return [run("", folder)]


def guarded(folder: Path) -> list[Path]:
    """Poisoned rows that the guard leaves out; SIGKILL at step 45, SIGTERM at step 90."""
    data = folder.with_suffix(".jsonl")
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("\n".join(poisoned_rows()) + "\n")
    words = f"{SMALL} --model_name_or_path {MODEL} --dataset_name {data} --num_train_epochs 1 --seed 3 "
    words += "--save_strategy steps --save_steps 20 --guard_min_steps 16 --guard_threshold 4 "
    words += "--dataset_train_split train[:97%] --dataset_test_split train[97%:]"
    for at, number in ((45, signal.SIGKILL), (90, signal.SIGTERM)):
        process = start(words, folder)
        while last_step(folder) < at and process.poll() is None:
            time.sleep(0.2)
        process.send_signal(number)
        process.wait()
    return [run(words, folder)]


def poisoned_rows() -> list[str]:
    """Some of the embedded rows, and a few whose answers are noise."""
    rng = random.Random(DATA_SEED)
    rows = ROWS.read_text().splitlines()[:NUM_ROWS]
    for at in range(NUM_POISONED):
        noise = "".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(60))
        turns = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": noise}]
        row = json.dumps({"messages": turns, "answer": noise, "task": "noise", "wording": "seen"})
        rows.insert(NUM_ROWS * (2 * at + 3) // 9, row)
    return rows


def last_step(folder: Path) -> int:
    """Of the log; 0 before there is one."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return int(json.loads(lines[-1])["step"]) if lines and lines[-1].endswith("}") else 0


def comparison(folder: Path) -> list[Path]:
    """Four runs of 80 steps."""
    chosen = {
        "slow": "--learning_rate 1e-4",
        "usual": "--learning_rate 1e-3",
        "fast": "--learning_rate 4e-3",
        "adafactor": "--learning_rate 1e-3 --optim adafactor",
    }
    words = SMALL.replace("--learning_rate 1e-3 ", "")
    return [run(f"{words} --max_steps 80 {more}", folder / name) for name, more in chosen.items()]


if __name__ == "__main__":
    main()
