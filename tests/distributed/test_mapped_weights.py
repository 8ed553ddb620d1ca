"""Ranks that will share a model map the weights that one of them has built; real processes, real files."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
from torchrun import torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
RANKS = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("mapped")
    for name, age in (("old", 2 * 86400), ("young", 0)):  # left by killed runs, or by a run in another container
        left = folder / f"accel-scale-weights-999999999-{name}"
        left.mkdir()
        os.utime(left, (time.time() - age, time.time() - age))
    output = folder / "found.json"
    torchrun("mapped_weights_run.py", RANKS, str(output), env={"TMPDIR": str(folder)}, timeout=180)
    everyone: list[dict[str, Any]] = json.loads(output.read_text())
    return everyone


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "gpt2"])
def test_a_mapped_model_is_the_one_that_was_built(found, kind):
    assert len(found) == RANKS
    for rank in found:
        same = rank[kind]
        assert same.pop("tied") == (kind != "qwen3")
        assert all(same.values()), same


def test_only_the_rank_that_builds_has_weights_of_its_own(found):
    first, *others = [rank["memory"] for rank in found]
    assert first["private"] > 0.9
    for rank in others:
        assert rank["private"] < 0.1
        assert rank["total"] == first["total"]


def test_no_file_is_left_behind(found):
    # The first rank of the measured run has just removed its folder; other ranks may look a moment earlier.
    assert found[0]["memory"]["files"] == 1, "the young one of another run"


def test_every_rank_is_told_what_one_of_them_found(found):
    for rank in found:
        said = rank["refusals"]
        assert said["own"] == "LlamaForCausalLM"
        assert "GiB free" in said["full"]
        assert "TMPDIR" in said["full"]
        assert "no such weights." in said["failed"]
