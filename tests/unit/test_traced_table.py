"""Families of models that once had no plan: each is in the table of plans with the peaks of real steps."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TABLE = json.loads((REPOSITORY / "benchmarks" / "results" / "traced_models.json").read_text())
FAMILIES = (
    "llama4_text", "qwen3_next", "qwen3_5", "gemma3n", "gemma4", "glm4_moe", "granitemoehybrid", "nemotron",
    "nemotron_h", "ernie4_5", "olmoe", "minimax", "seed_oss", "lfm2", "mamba2", "mpt",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_plan_is_near_the_peak_of_a_real_step(family: str) -> None:
    rows = [row for row in TABLE["rows"] if row["model_type"] == family]
    assert rows
    assert not any(row["problem"] for row in rows)
    for row in rows:
        assert row["predicted_bytes"] == pytest.approx(row["measured_bytes"], rel=0.05)


def test_every_plan_is_near_the_peak_of_a_real_step() -> None:
    errors = [abs(row["predicted_bytes"] / row["measured_bytes"] - 1) for row in TABLE["rows"] if not row["problem"]]
    assert statistics.median(errors) <= 0.01
    assert max(errors) <= 0.05
    counts = [
        len([row for row in TABLE["rows"] if row["setup"] == s and not row["problem"]])
        for s in ("full", "lora", "recomputed")
    ]
    assert counts[0] >= 185
    said = " ".join((REPOSITORY / "docs" / "planning.md").read_text(encoding="utf-8").split())
    assert (
        f"{counts[0]} architectures trained in full, {counts[1]} of them also with LoRA, {counts[2]} with "
        "selective checkpointing; median error 0.01 %" in said
    )
    assert f"worst {max(errors):.1%})".replace("%", " %") in said


@pytest.mark.soak
def test_the_families_are_planned_and_measured_anew() -> None:
    command = ["benchmarks/traced_models.py", "--only", *FAMILIES, "--setups", "recomputed", "--print"]
    done = subprocess.run([sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = dict(re.findall(r"^(\w+) recomputed \w+ ([+-][\d.]+)% *$", done.stdout, flags=re.MULTILINE))
    assert found.keys() == set(FAMILIES)
    assert all(abs(float(error)) <= 3 for error in found.values())
