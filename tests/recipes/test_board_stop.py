"""A training run, followed and stopped as the board does it: it saves, exits with its status, and can be resumed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from accel_scale.board.runs import progress_of, records_of, runs_below
from accel_scale.board.stopping import process_of, stop
from accel_scale.errors import ConfigError
from accel_scale.facts.exit_statuses import EXIT_STOPPED

pytestmark = pytest.mark.slow
STEPS = 400
TWO_RANKS = [
    *("-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/ddp.yaml"),
    *("--num_processes=2", "--main_process_port=0"),
]


def command(python: str, folder: Path, steps: int, *launcher: str) -> list[str]:
    flags = ["--logging_steps", "1", "--save_strategy", "no", "--exact_match_samples", "0", "--max_length", "64"]
    return [python, *launcher, "recipes/sft.py", "--output_dir", str(folder), "--max_steps", str(steps), *flags]


@pytest.mark.parametrize(
    ("launcher", "status"),
    [((), EXIT_STOPPED), (TWO_RANKS, 1)],
    ids=["alone", "two ranks"],
)
def test_a_run_is_followed_stopped_and_continued(
    repository: Path, tmp_path: Path, real_python: str, launcher: tuple[str, ...], status: int
) -> None:
    folder = tmp_path / "outputs" / "sft"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)}
    words = command(real_python, folder, STEPS, *launcher)
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(words, cwd=repository, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + 240
        while not (folder / "metrics.jsonl").exists() or records_of(folder).last_step < 2:
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < deadline
            if folder.exists() and not (folder / "run_starts.jsonl").exists():
                with pytest.raises(ConfigError, match="not training"):  # while it loads, the signal would kill it
                    process_of(folder)
            time.sleep(0.2)
        assert runs_below(tmp_path / "outputs") == ["sft"]
        run = records_of(folder)
        assert run.how == "running"
        progress = progress_of(run)
        assert progress.num_steps == STEPS
        assert progress.seconds_left is not None
        found = process_of(folder)
        assert found.pid == process.pid or launcher
        stop(folder, found)
        assert process.wait(120) == status, (tmp_path / "log").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    stopped = records_of(folder)
    assert stopped.how == "stopped"
    with pytest.raises(ConfigError, match="not training"):
        process_of(folder)
    (saved,) = folder.glob("checkpoint-*/manifest.json")
    manifest = json.loads(saved.read_text())
    assert manifest["stopped_by"] == "SIGTERM"
    step = manifest["step"]
    if launcher:
        return
    words = [*command(real_python, folder, step + 2), "--allow_changed_settings", "true"]
    done = subprocess.run(words, cwd=repository, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert records_of(folder).how == "finished"
    assert [start.step for start in records_of(folder).starts] == [0, step]
