"""`accel-scale eval --launch`: processes share the questions and arrive at the figures of a single process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from accel_scale.cli.main import main
from accel_scale.data.default import default_model_path

ROOT = Path(__file__).resolve().parents[2]


def test_two_processes_come_to_the_figures_of_one(tmp_path: Path) -> None:
    words = ["eval", default_model_path(), "--tasks", "embedded", "--limit", "41", "--output"]
    assert main([*words, str(tmp_path / "one.json")]) == 0
    launched = [*words, str(tmp_path / "two.json"), "--launch", "ddp", "--num_processes", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "accel_scale.cli.main", *launched],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.count("written to") == 1
    one, two = (json.loads((tmp_path / name).read_text())["results"]["embedded"] for name in ("one.json", "two.json"))
    assert (two["num_correct"], two["num_questions"], two["tasks"]) == (one["num_correct"], 41, one["tasks"])
