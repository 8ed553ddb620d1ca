"""Two processes that share each row train as one process does, and documents stay apart across the cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def launch(repository: Path, num_processes: int, what: str) -> dict[str, dict]:
    script = Path(__file__).with_name("sequence_parallel_run.py")
    runner = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_processes}", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(
        [*runner, str(script), what], cwd=repository, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return {line.pop("case"): line for line in map(json.loads, process.stdout.strip().splitlines())}


@pytest.fixture(scope="module")
def pair(repository):
    return launch(repository, 2, "pair")


def test_losses_and_weights_are_those_of_one_process(pair):
    trained = {name: case for name, case in pair.items() if "weights" in case}
    assert len(trained) == 16
    for name, case in trained.items():
        assert case["learned"] > 0.1, name
        # bf16 rounds sums over a part and over the whole row differently; Adam's first steps scale that up.
        assert case["loss"] < (1e-3 if "bf16" in name else 1e-6), name
        assert case["weights"] < (5e-2 if "bf16" in name else 1e-4), name


def test_forward_passes_agree_for_every_architecture(pair):
    differences = {name: case["forward"] for name, case in pair.items() if "forward" in case}
    assert len(differences) == 15
    assert max(differences.values()) < 1e-5


def test_documents_stay_apart_across_the_cut(pair):
    case = pair["isolation"]
    assert case["cut"] == pytest.approx(case["whole"], rel=1e-6)
    assert case["other_documents_changed"] == case["cut"]
    # What belongs to the document does count, on whichever part it lies; so does isolation, and so does the shift.
    for name in ("beginning_changed", "not_isolated", "shifted_after_the_cut"):
        assert abs(case[name] - case["cut"]) > 1e-3 * case["cut"], name


def test_generating_takes_whole_rows_as_before(pair):
    assert pair["generation"] == {"same": True, "length": 18}


def test_each_rank_keeps_half_of_the_activations(pair):
    case = pair["memory"]
    assert case["part_bytes"] < 0.56 * case["whole_bytes"]


@pytest.mark.soak
def test_beside_the_other_ways_of_sharing_a_model(repository):
    cases = launch(repository, 4, "sharded")
    assert set(cases) == {"fsdp2", "fsdp2, gemma2", "four ranks, two key heads", "tensor parallel", "pipeline"}
    for name, case in cases.items():
        assert case["learned"] > 0.1, name
        assert case["loss"] < 1e-6, name
        assert case.get("weights", 0.0) < 1e-4, name
