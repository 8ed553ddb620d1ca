"""Traces of models with windows: rows that are longer than a window have other operations than shorter ones."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.traced import facts_of_any
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.traced.polynomials import value_of
from accel_scale.planning.traced.steps import marks_of
from accel_scale.tracing.alignment import Run
from accel_scale.tracing.fits import fit_segments
from accel_scale.tracing.service import traced_fit
from accel_scale.tracing.step import FakeStep

WINDOW = 512


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def windowed(**fields: Any) -> ModelFacts:
    """A small Ministral, whose class masks what is outside the window only if a row is longer."""
    small = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 256, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "sliding_window": WINDOW,
    }  # fmt: skip
    config = AutoConfig.for_model("ministral", **{**small, **fields}).to_dict()
    return facts_of_any(json.loads(json.dumps(config, default=str)), name="small")


@pytest.mark.parametrize("length", [256, WINDOW, 1024])
def test_all_sizes_are_on_the_same_side_of_a_window(length: int) -> None:
    """Rows of a window's length and longer ones have masks, a quarter of what every layer leaves."""
    facts, setup = windowed(), TrainingSetup(packing=False, checkpointing="none", sequence_length=length)
    fit = traced_fit(facts, setup, is_cuda=True, is_tracked=False)
    assert not fit["exact"]
    step = FakeStep(facts, setup, is_cuda=True, is_tracked=False)
    for point in ((2, length), (1, length), (3, length // 2 if length < WINDOW else 2 * length)):
        peaks, nets = marks_of(fit, *point)
        run = {name: events for name, events in step.run(*point).items() if name != "head" and events}
        assert {name: nets[name] for name in run} == pytest.approx(
            {name: sum(events) for name, events in run.items()}, abs=1
        )
        highest = {name: max(0, *itertools.accumulate(events)) for name, events in run.items()}
        assert {name: max(0, peaks[name]) for name in run} == pytest.approx(highest, rel=1e-6)


def test_between_two_windows_that_are_close_a_length_has_its_own_fit() -> None:
    facts = windowed()
    facts = replace(
        facts, traced_config=json.dumps({**json.loads(facts.traced_config), "window_size": 400, "index_topk": 400})
    )
    setup = TrainingSetup(packing=False, checkpointing="none", sequence_length=448)
    fit = traced_fit(facts, setup, is_cuda=True, is_tracked=False)
    assert fit["exact"]


class Compressing:
    """A step that keeps one entry for every whole block of 128 tokens, and whose masks make it look like a loop."""

    chosen = (0,)

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []

    def run(self, rows: int, length: int) -> Run:
        self.sizes.append((rows, length))
        return {"forward 0": [96 * rows * length, 640 * rows * (length // 128), -32 * rows * length]}

    def forward_allocations(self, rows: int, length: int, at_most: int = sys.maxsize) -> int:
        return min(9 + length // 32, at_most + 1)


def test_beyond_a_window_blocks_are_whole() -> None:
    """A window of 512 tokens needs lengths of more; multiples of 64 would end in the middle of a block."""
    step: Any = Compressing()
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 256}
    facts = replace(facts_from_config({"model_type": "llama", **shape}, name="it"), max_positions=0)
    facts = replace(facts, traced_config='{"index_topk": 512, "is": "compressing"}')
    many, one, exact = fit_segments(step, facts, TrainingSetup(sequence_length=2048), False)
    assert (one, exact) == (None, False)
    assert {length % 256 for _, length in step.sizes} == {0}
    assert min(length for _, length in step.sizes) > 512
    assert value_of(many["forward 0"]["net"], 4, 8192) == pytest.approx(sum(step.run(4, 8192)["forward 0"]))


def test_a_model_without_a_limit_is_run_at_the_usual_lengths() -> None:
    """XLNet says -1 positions; a few tokens would not show which operation needs the most in longer rows."""
    shape = {"d_model": 64, "n_layer": 3, "n_head": 4, "d_inner": 256, "vocab_size": 512}
    config = AutoConfig.for_model("xlnet", **shape).to_dict()
    facts = facts_of_any(json.loads(json.dumps(config, default=str)), name="small")
    assert facts.max_positions == 0
    setup = TrainingSetup(packing=False, checkpointing="none", sequence_length=256)
    fit = traced_fit(facts, setup, is_cuda=False, is_tracked=True)
    peaks, _ = marks_of(fit, 2, 256)
    run = FakeStep(facts, setup, is_cuda=False, is_tracked=True).run(2, 256)
    assert peaks["backward 1"] == pytest.approx(max(itertools.accumulate(run["backward 1"])), rel=1e-6)
