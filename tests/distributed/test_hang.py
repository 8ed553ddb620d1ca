"""A collective that never completes: the run ends in bounded time, and one line names rank, step and operation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_scale.facts.exit_statuses import HUNG_STATUS
from accel_scale.training.resilience.hang_verdict import blamed, verdict
from accel_scale.training.resilience.heartbeat import Beat, locate

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def scenarios() -> dict[str, Any]:
    """All scenarios of hang_run.py, in one process tree."""
    done = subprocess.run(
        [sys.executable, str(HERE / "hang_run.py")],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def the_line(scenario: dict[str, Any]) -> str:
    """The line that exactly one rank printed."""
    lines = [line for text in scenario["said"] for line in text.splitlines() if line.startswith("train.py: ")]
    assert len(lines) == 1, scenario
    return lines[0]


@pytest.mark.slow
def test_a_rank_that_sleeps_in_its_data_is_named(scenarios: dict[str, Any]) -> None:
    found = scenarios["sleep_in_data"]
    pattern = r"train.py: rank 1 has not reached all_reduce of step 3 \(backward\): last seen in 'data' at step 3, .*"
    assert re.fullmatch(pattern, the_line(found)), found
    assert found["status"] == [HUNG_STATUS, HUNG_STATUS]  # the sleeper leaves as well: nothing waits for a launcher
    assert max(found["seconds"]) < 30


@pytest.mark.slow
def test_a_rank_that_never_ends_its_backward_is_named(scenarios: dict[str, Any]) -> None:
    found = scenarios["loop_in_backward"]
    assert "rank 1 has not reached all_reduce of step 3 (backward)" in the_line(found), found
    assert "last seen in 'backward' at step 3" in the_line(found)
    assert found["status"] == [HUNG_STATUS, HUNG_STATUS]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_process_is_named_even_if_it_hosts_the_store(scenarios: dict[str, Any], rank: int) -> None:
    found = scenarios[f"stop_rank_{rank}"]
    line = the_line(found)
    assert f"rank {rank} has not reached all_reduce of step 3 (backward)" in line, found
    assert re.search(r"last seen in 'data' at step 3, \d+ s ago: its process is stopped, or its node is gone", line)
    assert found["status"][1 - rank] == HUNG_STATUS
    assert found["seconds"][1 - rank] < 40


@pytest.mark.slow
def test_slow_ranks_that_move_are_left_alone(scenarios: dict[str, Any]) -> None:
    assert scenarios["nobody"]["status"] == [0, 0], scenarios["nobody"]
    assert not any("train.py" in text for text in scenarios["nobody"]["said"])


def beat(
    rank: int, step: int = 12, phase: str = "backward", operation: str | None = "all_reduce", **more: Any
) -> Beat:
    values = {"progress": 40, "still_seconds": 60.0, "count": 99, "clock": 1000.0, **more}
    return Beat(rank=rank, step=step, phase=phase, operation=operation, **values)


def test_silent_ranks_come_before_slow_ones() -> None:
    beats = {0: beat(0), 1: beat(1, operation=None, phase="data"), 2: beat(2, step=11)}
    assert blamed(beats, silent=[2]) == [2]
    assert blamed(beats, silent=[]) == [1]
    assert blamed({0: beat(0), 1: beat(1, progress=39)}, silent=[]) == [1]
    assert blamed({0: beat(0), 1: None}, silent=[]) == [1]
    assert blamed({0: beat(0), 1: beat(1)}, silent=[]) == []


def test_the_line_says_where_and_since_when() -> None:
    line = verdict(beat(0), {1: beat(1, phase="data", operation=None, still_seconds=63)}, [], now=1000.0)
    assert line == (
        "rank 1 has not reached all_reduce of step 12 (backward): last seen in 'data' at step 12, where it has been "
        "for 63 s; rank 0 has waited 60 s"
    )
    silent = verdict(beat(0), {1: beat(1, phase="forward", operation=None, clock=937.0)}, [1], now=1000.0)
    assert "last seen in 'forward' at step 12, 63 s ago: its process is stopped, or its node is gone" in silent


def test_many_missing_ranks_are_one_line() -> None:
    beats = {rank: beat(rank, phase="data", operation=None) for rank in range(8, 16)}
    line = verdict(beat(0), {**beats, 1: beat(1)}, [], now=1000.0)
    assert line.startswith(
        "ranks 8, 9, 10, 11 and 4 more have not reached all_reduce of step 12 (backward): last seen"
    )


def test_nobody_behind_points_at_the_network() -> None:
    assert "look at the network" in verdict(beat(0), {1: beat(1)}, [], now=1000.0)


def test_phases_and_collectives_of_stacks() -> None:
    c10d, autograd = "/x/torch/distributed/distributed_c10d.py", "/x/torch/autograd/graph.py"
    evaluate = ("/x/accel_scale/training/evaluation/validation.py", "evaluate_loss")
    call = ("/x/torch/nn/modules/module.py", "_call_impl")
    assert locate([("/x/recipes/pretrain.py", "train")]) == ("other", None)
    assert locate([evaluate, call]) == ("evaluation", None)
    assert locate([call]) == ("forward", None)
    gather = [(c10d, "all_gather_object"), (c10d, "wrapper"), (c10d, "all_gather")]
    assert locate([evaluate, *gather]) == ("evaluation", "all_gather")
    backward = (autograd, "_engine_run_backward")
    scatter = (c10d, "reduce_scatter_tensor")
    assert locate([backward, call, scatter]) == ("backward", "reduce_scatter")
