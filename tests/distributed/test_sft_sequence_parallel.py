"""recipes/sft.py on ranks that share rows trains and evaluates as if each row were on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import parity
import pytest
import torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_data")]
EVALUATED = ("--eval_strategy", "steps", "--eval_steps", "2", "--dataset_test_split", "train")


def flags(folder: Path, *, packed: bool, rows: int) -> list[str]:
    """Flags of a run with evaluation; `rows` is the size of a micro-batch and half that of an evaluation batch."""
    batch = ("--per_device_train_batch_size", str(rows), "--per_device_eval_batch_size", str(2 * rows))
    return [*parity.recipe_flags("full", folder), *batch, *EVALUATED, "--packing", str(packed).lower()]


def launched(name: str, folder: Path, *more: str) -> dict[str, tuple[parity.Result, dict]]:
    """Padded and packed runs under the launch file `name`, with their summaries."""
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


@pytest.mark.parametrize("name", [pytest.param("ddp", marks=pytest.mark.soak), "zero3"])
def test_two_ranks_with_parts_of_rows_are_one_process_with_whole_ones(whole, tmp_path, name) -> None:
    shared = launched(name, tmp_path, "--sp_size", "2")
    for run, (reference, expected) in whole.items():
        result, summary = shared[run]
        difference = parity.compare(result, reference)
        assert difference.loss < 1e-6, run
        assert difference.weight < 1e-4, run
        assert summary["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6), run
        # Rows have odd lengths, and their padding is not counted; tokens are counted once, not by each rank.
        assert summary["tokens"] == expected["tokens"], run
        assert (summary["sp_size"], summary["settings"]["gradient_accumulation_steps"]) == (
            2,
            expected["settings"]["gradient_accumulation_steps"],
        )


def test_a_trainer_of_ones_own() -> None:
    """Two groups of two ranks against four: the same training, and each row counts once in every evaluation."""
    found = torchrun.cases("sequence_trainer_run.py", 4)["runs"]
    for attention in ("sdpa", "eager"):
        parts, whole = found[attention]["parts"], found[attention]["whole"]
        assert (parts["is_checked_apart"], whole["is_checked_apart"]) == (True, False)
        assert whole["losses"][0] - whole["losses"][-1] > 0.5
        assert parts["losses"] == pytest.approx(whole["losses"], rel=1e-6), attention
        assert len(whole["evaluated"]) == 2
        assert parts["evaluated"] == pytest.approx(whole["evaluated"], rel=1e-6), attention
        # A mean over batches of all ranks, as in TRL: rows that fill up the last batch count as well.
        assert parts["accuracy"] == pytest.approx(whole["accuracy"], rel=0.03), attention
        assert parts["tokens"] == whole["tokens"], attention
