"""`metrics.jsonl` can be followed while it is written, and a resumed run records each step only once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from accel_scale.reporting.metrics_log import METRICS_NAME, MetricsLog, parse_lines, read_metrics


def test_each_line_is_there_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "new" / "folder", True)
    log.write(1, loss=2.5, learning_rate=1e-3)
    assert (log.path.name, log.path.parent) == (METRICS_NAME, tmp_path / "new" / "folder")
    assert json.loads(log.path.read_text()) == {"step": 1, "loss": 2.5, "learning_rate": 1e-3}
    log.write(2, eval_loss=torch.tensor(0.5))
    assert [line["step"] for line in read_metrics(log.path)] == [1, 2]
    assert read_metrics(log.path)[1] == {"step": 2, "eval_loss": 0.5}


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "out", False).write(1, loss=1.0)
    assert not (tmp_path / "out").exists()


def test_numbers_that_json_lacks_come_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, True)
    log.write(1, loss=float("nan"), grad_norm=float("inf"))

    def refuse(name: str) -> None:
        pytest.fail(f"{name} is not JSON")

    json.loads(log.path.read_text(), parse_constant=refuse)
    (line,) = read_metrics(log.path)
    assert math.isnan(line["loss"])
    assert line["grad_norm"] == math.inf


def test_a_new_run_replaces_and_a_resumed_one_continues(tmp_path: Path) -> None:
    first = MetricsLog(tmp_path, True)
    for step in (2, 4, 6):
        first.write(step, loss=float(step))
    first.close()
    first.write(8, loss=8.0)
    assert [line["step"] for line in read_metrics(first.path)] == [2, 4, 6, 8]
    MetricsLog(tmp_path, True, resumed_step=4).write(5, loss=5.0)
    assert [line["step"] for line in read_metrics(first.path)] == [2, 4, 5]
    MetricsLog(tmp_path, True).write(1, loss=1.0)
    assert [line["step"] for line in read_metrics(first.path)] == [1]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_NAME]


def test_a_line_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    assert list(parse_lines('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')) == [{"step": 1, "loss": 2.0}]
    assert list(parse_lines('{"step": 2, "lo{"step": 3}\n[]\n{"step": 4}\n')) == [{"step": 4}]
    assert read_metrics(tmp_path / "absent") == []
