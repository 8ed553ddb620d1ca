"""The run summary is complete, atomic and free of credentials; tables fit their width."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest

from accel_scale.measuring.meters import ThroughputMeter, peak_host_bytes
from accel_scale.reporting.run_tables import data_bound_advice, end_rows
from accel_scale.reporting.summary import SUMMARY_NAME, without_secrets, write_summary
from accel_scale.reporting.tables import format_count, format_seconds, print_table


def test_summary_names_versions_and_leaves_no_partial(tmp_path: Path) -> None:
    path = write_summary(tmp_path / "out", {"final_loss": 0.5, "hub_token": "hf_secret"})
    document = json.loads(path.read_text())
    assert path.name == SUMMARY_NAME
    assert document["final_loss"] == 0.5
    assert document["versions"]["torch"].startswith("2.")
    assert document["machine"]["cores"] >= 1
    assert "hf_secret" not in path.read_text()
    assert [p.name for p in path.parent.iterdir()] == [SUMMARY_NAME]


def test_secrets_go_and_token_counts_stay() -> None:
    content = {
        "hub_token": 1,
        "nested": [{"wandb_api_key": 2, "num_tokens": 3}],
        "tokens_per_second": 4,
        "eos_token": "</s>",
        "PASSWORD": 5,
        "token": 6,
    }
    assert without_secrets(content) == {
        "nested": [{"num_tokens": 3}],
        "tokens_per_second": 4,
        "eos_token": "</s>",
    }


def test_table_leaves_out_what_is_unknown_and_fits() -> None:
    out = io.StringIO()
    print_table("run", {"model": "tiny", "gpu": None, "note": "x" * 300}, file=out)
    lines = out.getvalue().splitlines()
    assert "gpu" not in out.getvalue()
    assert max(map(len, lines)) <= 110
    assert sum(line.count("x") for line in lines) == 300


def test_end_rows_show_what_was_measured_and_only_that() -> None:
    summary = {
        "losses": [2.0, 0.5],
        "steps": 30,
        "eval_loss": None,
        "tokens_per_second": 12_345.6,
        "data_wait_ratio": 0.012,
        "peak_host_bytes": 3 * 2**30,
        "peak_device_bytes": {"allocated_bytes": 5 * 2**29, "reserved_bytes": 1},
        "seconds": 61.0,
        "verified": {"tensors": 47, "max_diff": 0.0},
        "exact_match": {
            "before": {"accuracy": 0.01, "num_questions": 200},
            "after": {"accuracy": 0.905, "num_questions": 200},
        },
    }
    rows = end_rows(summary)
    assert rows["loss"] == "2.0000 → 0.5000 in 30 steps"
    assert rows["evaluation loss"] is None
    assert rows["exact match"] == "1.0% → 90.5% of 200 held-out questions"
    assert rows["speed"] == "12,346 tokens/s without padding"
    assert rows["peak memory"] == "host 3 GiB, device 2.5 GiB"
    assert end_rows({**summary, "exact_match": {}, "losses": []})["loss"] is None


def test_formats() -> None:
    assert [format_count(c) for c in (950, 12_345, 1_240_000, 7e9)] == ["950", "12,345", "1.24M", "7.00B"]
    assert [format_seconds(s) for s in (48.21, 200, 18_120)] == ["48.2 s", "3 min 20 s", "5 h 02 min"]


def test_meter_leaves_out_the_first_step_and_what_happens_between_steps() -> None:
    meter = ThroughputMeter()
    for step in range(3):
        meter.start_step()
        time.sleep(0.05 if step == 0 else 0.01)
        meter.fetched()
        meter.add_tokens(100)
        time.sleep(0.01)
        meter.end_step()
        time.sleep(0.05)
    assert meter.num_tokens == 300
    assert meter.timed_tokens == 200
    assert 0.04 <= meter.timed_seconds < 0.09
    assert 0.3 < meter.data_wait_ratio < 0.7
    assert meter.tokens_per_second == 200 / meter.timed_seconds


def test_peak_host_memory_holds_at_least_what_was_touched() -> None:
    block = bytearray(200_000_000)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_host_bytes() >= 200_000_000


@pytest.mark.parametrize("waiting", [None, 0.0, 0.1])
def test_a_run_that_does_not_wait_for_data_is_told_nothing(waiting: float | None) -> None:
    assert data_bound_advice(waiting) is None


def test_a_run_that_waits_for_data_is_told_what_helps() -> None:
    line = data_bound_advice(0.25, or_else="tokenise once")
    assert line is not None
    assert line.startswith("warning: 25% of the time went on waiting for data.")
    assert "--dataloader_num_workers" in line
    assert line.endswith("or tokenise once.")
