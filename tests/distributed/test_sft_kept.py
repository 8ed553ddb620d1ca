"""recipes/sft.py on two processes: a signal saves, the same command resumes bit for bit; hostile pickles never run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accel_scale.training.checkpoints.manifest import describe_files, read_manifest, write_manifest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
# ZeRO-2 has the pickles that DeepSpeed reads without restrictions.
CHOSEN = ["zero2", *(pytest.param(name, marks=pytest.mark.soak) for name in ("ddp", "fsdp2", "zero3"))]


def start(name: str, inputs: Path, out: Path, *flags: str, ranks: int = 2) -> subprocess.Popen[bytes]:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no"]
    launch += ["--config_file", str(REPOSITORY / "accelerate_configs" / f"{name}.yaml")]
    launch += ["--num_processes", str(ranks), "--main_process_port", "0"]
    words = ["--model_name_or_path", str(inputs / "model"), "--dataset_name", str(inputs / "rows.jsonl")]
    words += ["--max_length", "64", "--per_device_train_batch_size", "1", "--global_batch_size", "4"]
    words += ["--max_steps", "40", "--save_strategy", "no", "--precision", "fp32", "--logging_steps", "1"]
    words += ["--learning_rate", "1e-3", "--output_dir", str(out), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(out.parent / f"{out.name}.log", "ab") as log:
        return subprocess.Popen(
            [*launch, str(REPOSITORY / "recipes" / "sft.py"), *words],
            stdout=log, stderr=log, env=environment, cwd=REPOSITORY, start_new_session=True,
        )  # fmt: skip


def logged(folder: Path) -> list[tuple[float, ...]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["num_tokens"]) for line in lines if "loss" in line]


@pytest.mark.parametrize("name", CHOSEN)
def test_a_signal_and_the_same_command_again_change_nothing(inputs: Path, tmp_path: Path, name: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert start(name, inputs, whole).wait(400) == 0
    process, deadline = start(name, inputs, parts), time.monotonic() + 200
    while not (parts / "metrics.jsonl").is_file() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.wait(100)
    (checkpoint,) = parts.glob("checkpoint-*")
    assert read_manifest(checkpoint).stopped_by == "SIGTERM"
    said = (tmp_path / "parts.log").read_text(errors="replace")
    assert f"saved {checkpoint.name} after SIGTERM; the same command continues from there" in said
    kept = tmp_path / "kept" / checkpoint.name
    shutil.copytree(checkpoint, kept)

    assert start(name, inputs, parts).wait(400) == 0
    said = (tmp_path / "parts.log").read_text(errors="replace")
    assert f"resumed from {checkpoint} (step {read_manifest(kept).step})" in said
    assert logged(parts) == logged(whole)
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, parts))
    assert all(torch.equal(first[key], second[key]) for key in first)
    counted = [json.loads((folder / "run_summary.json").read_text())["tokens"] for folder in (whole, parts)]
    assert counted[0] == counted[1]

    # Half as many ranks, the same global batch.
    assert start(name, inputs, tmp_path / "one", "--resume_from_checkpoint", str(kept), ranks=1).wait(400) == 0
    losses = [{line[0]: line[1] for line in logged(folder)} for folder in (whole, tmp_path / "one")]
    for step, loss in losses[1].items():
        assert loss == pytest.approx(losses[0][step], rel=1e-6), step

    if name != "zero2":
        return
    manifest, proof = read_manifest(kept), tmp_path / "executed"
    planted = next(kept.rglob("*optim_states.pt"))
    torch.save({"optimizer_state_dict": _Planted(proof)}, planted)
    names = [str(p.relative_to(kept)) for p in kept.rglob("*") if p.is_file() and p.name != "manifest.json"]
    fields = {**vars(manifest), "files": describe_files(kept, names, manifest.algorithm, sync=False)}
    write_manifest(kept, type(manifest)(**fields))
    assert start(name, inputs, tmp_path / "hostile", "--resume_from_checkpoint", str(kept)).wait(400) != 0
    assert "which only an unrestricted unpickler reads" in (tmp_path / "hostile.log").read_text(errors="replace")
    assert not proof.exists()


class _Planted:
    """An object whose hostile pickle creates a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))
