"""DDP's communication hooks, launched: bytes sent, effect on the loss, and a state that survives breaks and skips."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import ddp_hooks_run as run
import parity
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("hooks")
    command = [*parity.launch_commands("ddp", folder)[0], str(Path(run.__file__)), "--output_dir", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=parity.REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=380
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("REPORT "))


def test_hooks_send_fewer_bytes(report: dict[str, Any]) -> None:
    """Bytes are counted where the hooks call `all_reduce`; the hooks' own figures agree."""
    hooks, params = report["hooks"], report["hooks"]["params"]
    sent = {name: hooks[name]["sent_bytes"] for name in ("counted", "bf16", "fp16", "powersgd")}
    assert sent["counted"] == 4 * params
    assert sent["bf16"] == sent["fp16"] == 2 * params
    # Rank 2: (rows + columns) × 2 for every matrix, and whole norms.
    layer = 4 * (128 + 128) + 3 * (128 + 256)
    assert sent["powersgd"] == 4 * (2 * (4 * layer + 2 * (256 + 128)) + 9 * 128)
    assert sent == {name: hooks[name]["hook_bytes"] for name in sent}
    assert hooks["none"]["sent_bytes"] == 0  # DDP's own reduction does not go through it
    assert {entry["buckets"] for name, entry in hooks.items() if name != "params"} == {3}  # of 1 MB each


def test_hooks_change_the_loss_as_little_as_they_should(report: dict[str, Any]) -> None:
    hooks = report["hooks"]
    plain = hooks["none"]["losses"]
    assert hooks["counted"]["losses"] == plain
    for name, tolerance in (("bf16", 5e-4), ("fp16", 5e-4), ("powersgd", 0.05)):
        losses = hooks[name]["losses"]
        assert losses != plain, name
        assert losses == pytest.approx(plain, rel=tolerance), name
        assert hooks[name]["ranks_agree"], name
    # PowerSGD sends whole gradients before its first step, so nothing differs until then.
    assert hooks["powersgd"]["losses"][: run.START] == plain[: run.START]
    assert hooks["powersgd"]["losses"][run.START] != plain[run.START]


def test_the_arithmetic_is_torchs(report: dict[str, Any]) -> None:
    assert report["torchs_own"] == 0.0


def test_a_break_loses_nothing(report: dict[str, Any]) -> None:
    """To the last bit, in a plain loop and in a trainer; without the state the weights differ."""
    assert report["resumed"]["with state"] == report["resumed"]["before the first"] == 0.0
    assert report["resumed"]["without"] > 1e-3
    assert report["trainer_resumed"] == 0.0
    assert report["from_three_ranks"] < 1e-9


def test_a_dropped_step_leaves_no_trace(report: dict[str, Any]) -> None:
    """Not even in the error feedback, where a NaN would never go away."""
    assert report["dropped"] == {str(run.START): 0.0, str(run.START + 3): 0.0}
