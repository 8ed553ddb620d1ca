"""recipes/sft.py on two processes: adapters resume bit for bit, and rows without labels are refused on every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from safetensors.torch import load_file

from accel_scale.training.checkpoints.manifest import read_manifest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = str(REPOSITORY / "recipes" / "sft.py")
CHOSEN = ["fsdp2", *(pytest.param(name, marks=pytest.mark.soak) for name in ("ddp", "zero2", "zero3"))]
NO_LABEL = "cut to 64 tokens, has a token that the loss is taken on."


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good rows, rows of which nine in ten have no label, and rows without any label."""
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    from sft_soak import make_inputs

    folder = tmp_path_factory.mktemp("inputs") / "inputs"
    make_inputs(folder)
    good = (folder / "rows.jsonl").read_text().splitlines()
    cut = [json.dumps({"prompt": f"{index} " + "a" * 100, "completion": " b"}) for index in range(100)]
    (folder / "sparse.jsonl").write_text("\n".join([*good[:30], *cut]) + "\n")
    (folder / "none.jsonl").write_text("\n".join(cut) + "\n")
    return folder


def launch(name: str, folder: Path, runs: dict[str, list[str]], *, ranks: int = 2) -> dict[str, list[str]]:
    """Output of every rank in each of `runs`, which one launch makes one after the other."""
    listed = [{"recipe": RECIPE, "argv": argv, "log": str(folder / f"{key}.log")} for key, argv in runs.items()]
    (folder / "runs.json").write_text(json.dumps(listed))
    (command,) = parity.launch_commands(name, folder)
    forked = str(Path(__file__).with_name("run_recipe_forked.py"))
    launched = [*command, "--num_processes", str(ranks), forked, str(folder / "runs.json")]
    subprocess.run(launched, cwd=REPOSITORY, capture_output=True, timeout=500)  # some runs are expected to fail
    return {key: [(folder / f"{key}.log.{rank}").read_text(errors="replace") for rank in range(ranks)] for key in runs}


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.parametrize("name", CHOSEN)
def test_adapters_go_on_and_rows_without_labels(inputs: Path, tmp_path: Path, name: str) -> None:
    def flags(out: str, rows: str = "rows.jsonl", *more: str, **values: Any) -> list[str]:
        named = {
            "model_name_or_path": inputs / "model", "dataset_name": inputs / rows, "max_length": 64,
            "per_device_train_batch_size": 1, "global_batch_size": 4, "max_steps": 6, "save_steps": 3,
            "precision": "fp32", "logging_steps": 1, "learning_rate": 1e-3, "output_dir": tmp_path / out, **values,
        }  # fmt: skip
        return [*(word for flag, value in named.items() for word in (f"--{flag}", str(value))), *more]

    lora = ("--method", "lora", "--lora_r", "4")
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    onwards = ("--resume_from_checkpoint", str(checkpoint), *lora)
    without_dropout = (*onwards, "--lora_dropout", "0", "--allow_changed_settings")  # masks differ between ranks
    said = launch(
        name, tmp_path, {
            "whole": flags("whole", "rows.jsonl", *lora),
            "onwards": flags("onwards", "rows.jsonl", *onwards),
            "plain": flags("plain", "rows.jsonl", *without_dropout),
            "sparse": flags("sparse", "sparse.jsonl", max_steps=12),
            "none": flags("none", "none.jsonl"),
            "stream": flags("stream", "none.jsonl", "--dataset_streaming", max_steps=10),
        },
    )  # fmt: skip
    assert f"resumed from {checkpoint} (step 3)" in said["onwards"][0]
    assert "adapter_model.safetensors" in read_manifest(checkpoint).files
    assert losses(tmp_path / "onwards").items() <= losses(tmp_path / "whole").items()
    first, second = (load_file(tmp_path / out / "adapter_model.safetensors") for out in ("whole", "onwards"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)

    # In most steps no rank or only one has labels.
    seen = losses(tmp_path / "sparse")
    assert len(seen) == 12, said["sparse"]
    assert 0 < sum(loss > 0 for loss in seen.values()) < 12
    assert (tmp_path / "sparse" / "model.safetensors").is_file()
    for key, rows in (("none", "no training row"), ("stream", "no row of the first 8 steps")):
        assert f"{rows}, {NO_LABEL}" in said[key][0], said[key]
        assert all("Traceback" not in text for text in said[key]), said[key]
        assert not (tmp_path / key / "model.safetensors").exists()

    # Half as many ranks, the same global batch.
    launch(name, tmp_path, {"one": flags("one", "rows.jsonl", *without_dropout)}, ranks=1)
    expected = losses(tmp_path / "plain")
    assert losses(tmp_path / "one") == {step: pytest.approx(expected[step], rel=1e-6) for step in (4, 5, 6)}
