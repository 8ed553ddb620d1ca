"""recipes/sft.py on ranks that share rows trains and evaluates as where each row is on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import parity
import pytest
import torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_data")]
EVALUATED = ("--eval_strategy", "steps", "--eval_steps", "2", "--dataset_test_split", "train")


def flags(folder: Path, *, packed: bool, rows: int) -> list[str]:
    """Of one run with evaluation; `rows` in a micro-batch and in a batch of evaluation."""
    batch = ("--per_device_train_batch_size", str(rows), "--per_device_eval_batch_size", str(2 * rows))
    return [*parity.recipe_flags("full", folder), *batch, *EVALUATED, "--packing", str(packed).lower()]


def launched(name: str, folder: Path, *more: str) -> dict[str, tuple[parity.Result, dict]]:
    """Padded and packed runs of the launch file `name`, with what they wrote into their summaries."""
    runs = {
        "padded": [*flags(folder, packed=False, rows=1), *more],
        "packed": [*flags(folder, packed=True, rows=2), *more],
    }
    results = parity.run_launch(name, runs, folder)
    assert not any("Warning" in log.read_text() for log in folder.glob("*.log*") if log.is_file())
    return {run: (results[run], json.loads((folder / run / "run_summary.json").read_text())) for run in runs}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[parity.Result, dict]]:
    return launched(parity.SINGLE, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_two_ranks_with_parts_of_rows_are_one_process_with_whole_ones(whole, tmp_path, name) -> None:
    shared = launched(name, tmp_path, "--sp_size", "2")
    for run, (reference, expected) in whole.items():
        result, summary = shared[run]
        difference = parity.compare(result, reference)
        assert difference.loss < 1e-6, run
        assert difference.weight < 1e-4, run
        assert summary["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6), run
        # Rows are of odd lengths, and what fills them up is no token; tokens are counted once, not by each rank.
        assert summary["tokens"] == expected["tokens"], run
        assert (summary["sp_size"], summary["settings"]["gradient_accumulation_steps"]) == (
            2,
            expected["settings"]["gradient_accumulation_steps"],
        )


def test_a_trainer_of_ones_own() -> None:
    found = torchrun.cases("sequence_trainer_run.py", 2)["losses"]
    for attention in ("sdpa", "eager"):
        parts, whole = found[attention]["parts"], found[attention]["whole"]
        assert whole[0] - whole[-1] > 0.5
        assert parts == pytest.approx(whole, rel=1e-6), attention


def test_evaluation_counts_each_row_once_where_two_groups_share_rows(tmp_path) -> None:
    """Two groups of two ranks against two ranks: the last batch of rows is filled up on either."""
    run = {"run": flags(tmp_path, packed=False, rows=2)}
    plain, shared = tmp_path / "plain", tmp_path / "shared"
    for folder in (plain, shared):
        folder.mkdir()
    expected = parity.run_launch("fsdp2", run, plain)["run"]
    found = parity.run_launch("fsdp2_sp", run, shared)["run"]
    difference = parity.compare(found, expected)
    assert difference.loss < 1e-6
    assert difference.weight < 1e-4
    losses = [json.loads((folder / "run" / "run_summary.json").read_text())["eval_loss"] for folder in (plain, shared)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
