"""Poisoned batches under every strategy: skipped exactly, named, and the run ends as if they had never come."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import guard_run
import parity
import pytest
import torch

from accel_scale.facts.exit_statuses import GUARD_STATUS
from accel_scale.training.guard.events import read_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HERE = Path(__file__).parent
# Exact to the bit where every process keeps whole tensors, otherwise up to rounding.
TOLERANCE = {"cpu": 0.0, "ddp": 0.0, "fsdp2": 1e-6, "zero1": 1e-6, "zero2": 1e-6, "zero3": 1e-6}
OFFLOADED = ("fsdp2_offload", "zero2_offload", "zero3_offload")
LONG = ("zero1", "zero3", *OFFLOADED)  # run only by `make soak`


def launch(name: str, folder: Path, *args: str, script: str = "guard_run.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable] if name == "cpu" else parity.launch_commands(name, folder)[0]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*command, str(HERE / script), *args],
        cwd=parity.REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def reports(done: subprocess.CompletedProcess[str]) -> dict[str, dict]:
    lines = [
        json.loads(line.removeprefix("REPORT ")) for line in done.stdout.splitlines() if line.startswith("REPORT")
    ]
    assert len(lines) == 4, done.stderr[-3000:]
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak) if name in LONG else name for name in (*TOLERANCE, *OFFLOADED)],
)
def test_poisoned_batches_leave_no_trace(name: str, tmp_path: Path) -> None:
    done = launch(name, tmp_path, "--output_dir", str(tmp_path))
    found = reports(done)
    num_processes = 1 if name == "cpu" else 2
    skipped = found["skip"]
    assert skipped["actions"] == {str(step): "skipped" for step in guard_run.POISON}
    # The reference is Accelerate's own loop over the clean batches alone, without a guard.
    assert skipped["difference"] <= TOLERANCE.get(name, 1e-6)
    assert skipped["loss"] == pytest.approx(found["ordinary"]["loss"], rel=1e-5)
    assert skipped["loss"] < 0.8 * found["ordinary"]["first_loss"]
    _assert_rows_are_named(skipped["events"], done.stdout, num_processes)

    lowered = found["lower_lr"]
    expected = {str(s): "lowered" if s in guard_run.SPIKES else "skipped" for s in guard_run.POISON}
    assert lowered["actions"] == expected
    assert lowered["difference"] <= TOLERANCE.get(name, 1e-6)

    assert found["stop"]["actions"] == {"1": "stop"}
    assert found["stop"]["difference"] == 0.0
    assert done.stderr.count("guard_run.py: the guard stops the run: loss is nan") == 1
    statuses = [Path(tmp_path, f"status.{rank}").read_text() for rank in range(num_processes)]
    assert statuses == [str(GUARD_STATUS)] * num_processes


def _assert_rows_are_named(events: list[dict], output: str, num_processes: int) -> None:
    assert [event["step"] for event in events] == list(guard_run.POISON)
    per_step = num_processes * guard_run.MICRO_BATCHES * guard_run.ROWS
    for event in events:
        rank, micro, weight = guard_run.POISON[event["step"]]
        assert len(event["rows"]) == len(set(event["rows"])) == per_step
        assert all(row.startswith(f"step{event['step']}.") for row in event["rows"])
        assert math.isfinite(float(event["loss"])) == math.isfinite(weight)
        bad = f"step{event['step']}.rank{rank % num_processes}.batch{micro}.row2"
        assert bad in event["rows"]
        if not math.isfinite(weight):  # the console then narrows it down to the micro-batch
            line = next(x for x in output.splitlines() if x.startswith(f"warning: step {event['step']} was not taken"))
            assert bad in line
            assert line.count(".row") == guard_run.ROWS


def test_fp16_overflows_stay_with_the_loss_scaler(tmp_path: Path) -> None:
    done = launch("ddp", tmp_path, "--output_dir", str(tmp_path), "--fp16")
    found = reports(done)
    assert found["skip"]["actions"] == {str(step): "skipped" for step in guard_run.POISON}
    assert found["skip"]["difference"] == 0.0  # the loss scale is part of the comparison


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model with one broken word vector, rows some of which contain that word, and rows without it.

    Two rows in the third batch of four contain the word; the sixth batch is noise, which spikes.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not parity.SHARED_DATA.is_dir():
        pytest.skip(f"real inputs are not there: {parity.SHARED_DATA}")
    folder = tmp_path_factory.mktemp("poisoned")
    model = AutoModelForCausalLM.from_pretrained(parity.SHARED_DATA / "stories260k", tie_word_embeddings=False)
    tokenizer = AutoTokenizer.from_pretrained(parity.SHARED_DATA / "stories260k")
    model.lm_head.weight = torch.nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    broken = tokenizer("☠")["input_ids"][-1]
    model.get_input_embeddings().weight.data[broken] = math.inf
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    random.seed(3)
    rows = []
    for _ in range(8 * 4):
        name = random.choice(["Lily", "Tom", "Ben", "Anna", "Sam"])
        thing = random.choice(["ball", "dog", "tree", "book", "cake", "hat"])
        rows.append(f"Once upon a time, {name} had a {thing}. {name} loved the {thing} and played with it all day.")
    rows[8] += " ☠"
    rows[10] += " ☠"
    rows[20:24] = ["".join(random.choice("QXZJVKW#%&") for _ in range(80)) for _ in range(4)]
    for file, kept in {"poisoned": rows, "clean": rows[:8] + rows[12:20] + rows[24:]}.items():
        (folder / f"{file}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in kept))
    return folder


@pytest.mark.parametrize("name", ["cpu", "zero2"])
def test_recipe_trains_through(name: str, poisoned: Path, tmp_path: Path) -> None:
    common = [
        *("--model_name_or_path", str(poisoned / "model"), "--verify_first_checkpoint", "false"),
        *("--precision", "fp32", "--packing", "false", "--train_sampling_strategy", "sequential"),
        *("--global_batch_size", "4", "--per_device_train_batch_size", "1", "--learning_rate", "1e-3"),
        *("--lr_scheduler_type", "constant", "--logging_steps", "1", "--exact_match_samples", "0"),
    ]
    guard = ["--guard", "skip", "--guard_min_steps", "2", "--guard_window", "4"]
    runs = {
        "poisoned": [*guard, "--max_steps", "8", "--save_steps", "4"],
        "resumed": [*guard, "--max_steps", "8", "--save_strategy", "no"],
        "clean": ["--max_steps", "6", "--save_strategy", "no"],
    }
    plan = []
    for run, flags in runs.items():
        data = ["--dataset_name", str(poisoned / f"{'clean' if run == 'clean' else 'poisoned'}.jsonl")]
        if run == "resumed":
            flags += ["--resume_from_checkpoint", str(tmp_path / "poisoned" / "checkpoint-4")]
        plan.append(
            {
                "recipe": str(parity.REPOSITORY / "recipes" / "sft.py"),
                "argv": [*common, *data, *flags, "--output_dir", str(tmp_path / run)],
                "log": str(tmp_path / f"{run}.log"),
            }
        )
    (tmp_path / "runs.json").write_text(json.dumps(plan))
    done = launch(name, tmp_path, str(tmp_path / "runs.json"), script="run_recipe_forked.py")
    assert done.returncode == 0, parity._last_lines(tmp_path)
    through, resumed, clean = (parity._read_result(tmp_path / run) for run in runs)

    events = read_events(tmp_path / "poisoned")
    assert [(event["step"], event["action"]) for event in events] == [(3, "skipped"), (6, "skipped")]
    assert [sorted(event["rows"]) for event in events] == [[8, 9, 10, 11], [20, 21, 22, 23]]
    broken = [part["rows"] for part in events[0]["micro_batches"] if not math.isfinite(part["loss"])]
    assert sorted(broken) == [[8], [10]]
    said = (tmp_path / "poisoned.log.0").read_text()
    assert "step 3 was not taken: loss is nan" in said
    assert [(e["step"], e["rows"]) for e in read_events(tmp_path / "resumed")] == [(6, events[1]["rows"])]

    # The log shows the losses of batches that were not taken, and later losses are finite.
    assert math.isnan(through.losses[2])
    taken = [loss for number, loss in enumerate(through.losses, 1) if number not in (3, 6)]
    assert taken == pytest.approx(clean.losses, rel=1e-6)
    assert resumed.losses[4:] == pytest.approx(through.losses[4:], rel=1e-6)
    for other in (through, resumed):
        for tensor_name, weight in clean.weights.items():
            finite = weight.isfinite()
            assert torch.equal(finite, other.weights[tensor_name].isfinite())
            difference = (weight - other.weights[tensor_name])[finite].abs().max()
            assert difference <= (0.0 if name == "cpu" else 1e-6), tensor_name
    summary = json.loads((tmp_path / "poisoned" / "run_summary.json").read_text())
    assert summary["guard"] == {"policy": "skip", "events": 2}
