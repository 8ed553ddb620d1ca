"""Polynomials of events that are found in each other: single rows, several rows, and loops over chunks of a row."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from accel_scale.planning.models.traced import facts_of_any
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.traced.polynomials import fitted, value_of
from accel_scale.planning.traced.steps import marks_of
from accel_scale.tracing.alignment import Run, are_alike, by_event, by_loop
from accel_scale.tracing.fits import _LOOPING, _by_points, _of_rows
from accel_scale.tracing.service import traced_fit
from accel_scale.tracing.step import FakeStep, Layers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import plan_times

POINTS = [(2, 128), (3, 320), (5, 192), (4, 256)]
OTHERS = [(3, 384), (7, 64 * 50), (16, 1024)]
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 256, "max_position_embeddings": 8192,
}  # fmt: skip
QWEN = {
    "model_type": "qwen3_5_text", "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"], **SIZES,
}  # fmt: skip
LFM = {
    "model_type": "lfm2", "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3,
    **SIZES,
}  # fmt: skip
MAMBA = {
    "model_type": "mamba", "num_hidden_layers": 3, "state_size": 8, "time_step_rank": 4, "hidden_size": 64,
    "vocab_size": 256,
}  # fmt: skip


XLSTM = {
    "model_type": "xlstm", "num_hidden_layers": 3, "hidden_size": 64, "num_heads": 4, "vocab_size": 256,
    "chunk_size": 64,
}  # fmt: skip
ZAMBA = {
    "model_type": "zamba", "num_hidden_layers": 5, "mamba_d_state": 4, "mamba_dt_rank": 4, "n_mamba_heads": 2,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba"], "use_mamba_kernels": False, **SIZES,
    "num_key_value_heads": 4, "attention_head_dim": 32, "attention_hidden_size": 128,
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@settings(max_examples=200, deadline=None)
@given(
    terms=st.dictionaries(st.integers(0, 5), st.integers(1, 10_000), min_size=1, max_size=2),
    sign=st.sampled_from([1, -1]),
)
@example(terms={2: 1, 3: 3072}, sign=1)  # 464 L - 36864 gives the same at all three sizes
def test_one_or_two_terms_are_found_from_three_sizes(terms: dict[int, int], sign: int) -> None:
    expected = [float(sign * terms.get(k, 0)) for k in range(6)]
    found = fitted([value_of(expected, *point) for point in POINTS[:3]], POINTS[:3])
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_pairs_of_chunks_are_quadratic_in_the_length() -> None:
    """A state-space layer decays between every two of its chunks, of 64 tokens here, and a state before them."""

    def pairs(rows: int, length: int) -> int:
        return 4 * rows * (length // 64 + 1) ** 2

    found = fitted([pairs(*point) for point in POINTS[:3]], POINTS[:3])
    assert found is not None
    assert [value_of(found, *point) for point in OTHERS] == pytest.approx([pairs(*point) for point in OTHERS])
    assert fitted([3, 1, 2], POINTS[:3]) is None


def run_of(rows: int, length: int, *, recomputes: bool) -> Run:
    """A segment whose loops keep a state for every chunk and free it in the second, with a tall block between them."""
    state, work, whole, table = 32 * rows, 80 * rows, 8 * rows * length, 4 * length
    chunks = length // 64
    first = [whole, table, *([work, state, -work] * chunks)]
    block = [3 * whole, work, whole, -3 * whole, -work]
    second = [*([work, work, -state, -2 * work] * chunks)]
    end = [-whole, -table]
    return {"backward 0": first + (block + second + end if recomputes else end), "embed": [whole, -table], "head": [9]}


@pytest.mark.parametrize("recomputes", [False, True])
def test_loops_grow_with_the_length(recomputes: bool) -> None:
    found = by_loop([run_of(*point, recomputes=recomputes) for point in POINTS], POINTS)
    assert found is not None
    assert "head" not in found
    for point in OTHERS:
        for name, events in run_of(*point, recomputes=recomputes).items():
            if name == "head":
                continue
            assert value_of(found[name]["net"], *point) == pytest.approx(sum(events), abs=1e-3)
            peak = max(value_of(polynomial, *point) for polynomial in found[name]["peaks"])
            assert peak == pytest.approx(max(itertools.accumulate(events)), rel=1e-9)


@pytest.mark.parametrize("num_loops", [3, 4])
def test_of_many_loops_the_highest_point_is_exact(num_loops: int) -> None:
    """As where a layer is run again, keeping some products, before its backward pass; the first loop ends highest."""

    def run(rows: int, length: int) -> Run:
        chunks, whole = length // 64, 8 * rows * length
        loops = [[*([40 * rows + number, 500 * rows, -500 * rows] * chunks)] for number in range(num_loops)]
        freed = [-(40 * rows + number) * chunks for number in range(num_loops)]
        events = [10**6]
        for loop, free in zip(loops, freed, strict=True):
            events += [*loop, whole, 7, free, -7, -whole, 9]
        return {"backward 0": events}

    found = by_loop([run(*point) for point in POINTS], POINTS)
    assert found is not None
    for point in OTHERS:
        events = run(*point)["backward 0"]
        assert value_of(found["backward 0"]["net"], *point) == pytest.approx(sum(events))
        peak = max(value_of(polynomial, *point) for polynomial in found["backward 0"]["peaks"])
        assert peak == pytest.approx(max(itertools.accumulate(events)), rel=1e-9)


def loop_with_ends(rows: int, length: int) -> Run:
    """A backward loop whose first, second to last and last chunks differ; a table or the work is highest in a chunk.

    In short rows the table, of which each chunk allocates another, is larger than what a token needs.
    """
    chunks, work, table, state = length // 64, 96 * rows * 64, 300_000, 40 * rows
    first = [state, table, -table, work, work, -2 * work]
    inner = [state, table, work, -table, work, -work, -work]
    before_last = [state, work, table, -work, -table, work, -work]
    last = [work, table, -table, -work, 8]
    middle = [*inner * (chunks - 3), *before_last] if chunks > 2 else []
    whole = 512 * rows * length
    return {"backward 0": [whole, *first, *middle, *last, -whole]}


class LoopWithEnds:
    """Runs of such a loop, and the sizes that were run."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []

    def run(self, rows: int, length: int) -> Run:
        self.sizes.append((rows, length))
        return loop_with_ends(rows, length)


def test_of_a_loop_whose_ends_differ_the_highest_point_is_exact() -> None:
    step: Any = LoopWithEnds()
    found = _by_points(step, 64, 4)
    assert found is not None
    many, one = found
    assert one is None
    assert len(step.sizes) == 5, "no size is run in vain"
    for point in [*OTHERS, (1, 4096), (64, 8192)]:
        events = loop_with_ends(*point)["backward 0"]
        assert value_of(many["backward 0"]["net"], *point) == pytest.approx(sum(events))
        peak = max(value_of(polynomial, *point) for polynomial in many["backward 0"]["peaks"])
        assert peak == pytest.approx(max(itertools.accumulate(events)), rel=1e-9)


def test_runs_of_other_layers_are_not_fitted_together() -> None:
    runs = [run_of(*point, recomputes=False) for point in POINTS]
    assert not are_alike(runs)
    assert by_loop([*runs[:3], {"forward 0": [1]}], POINTS) is None
    # What one chunk leaves must not depend on which chunk it is.
    cubic = [{"forward 0": [rows * (place + 1) ** 3 for place in range(length // 64)]} for rows, length in POINTS]
    found = by_loop(cubic, POINTS)
    assert found is not None
    cubes = sum(3 * (place + 1) ** 3 for place in range(6))
    assert value_of(found["forward 0"]["net"], 3, 384) != pytest.approx(cubes, rel=0.01), "the size that verifies it"
    assert by_event([{"embed": [7, 1]}, {"embed": [2, 1]}, {"embed": [9, 1]}], POINTS[:3]) is None


class LoopOverTokens:
    """Runs in which every token keeps a state; in single rows it is smaller, and the first need more for a moment."""

    def run(self, rows: int, length: int) -> Run:
        state = 320 * rows if rows > 1 else 200
        spikes = [380 if token < 10 else 10 for token in range(length)] if rows == 1 else [60 * rows] * length
        whole = [8 * rows * length, *([4, -4] if rows == 1 else [])]
        return {"forward 0": [*whole, *(event for spike in spikes for event in (state, spike, -spike))]}


def test_single_rows_whose_highest_point_moves_are_fitted_from_longer_ones() -> None:
    step: Any = LoopOverTokens()
    assert _of_rows(step, (1, 1, 1, 1), 3)[0] is None
    found = _by_points(step, 3)
    assert found is not None
    many, one = found
    assert one is not None
    for fit, rows in ((one, 1), (many, 4)):
        [events] = step.run(rows, 2048).values()
        assert value_of(fit["forward 0"]["net"], rows, 2048) == pytest.approx(sum(events))
        peak = max(value_of(polynomial, rows, 2048) for polynomial in fit["forward 0"]["peaks"])
        assert peak == pytest.approx(max(itertools.accumulate(events)), rel=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", ["full", "none", "selective"])
@pytest.mark.parametrize(
    ("config", "others"),
    [
        (QWEN, [(4, 1024), (1, 512)]),
        (LFM, [(4, 2048), (1, 2048)]),
        (MAMBA, [(4, 64), (1, 96)]),
        (XLSTM, [(4, 512), (1, 1024)]),
        (ZAMBA, [(4, 64), (1, 96)]),
    ],
    ids=["qwen3_5", "lfm2", "mamba", "xlstm", "zamba"],
)
def test_a_fit_gives_the_bytes_of_a_run_of_any_size(config, others, checkpointing: str) -> None:
    """Qwen 3.5 loops over chunks, Mamba and Zamba over tokens, xLSTM over chunks and the tokens after the last one;
    LFM2 copies what it only views if there is one row."""
    facts = facts_of_any(config, name="small")
    setup = TrainingSetup(packing=False, checkpointing=checkpointing, micro_batch_size=2, sequence_length=128)
    fit = traced_fit(facts, setup, is_cuda=True, is_tracked=False)
    assert not fit["exact"]
    step = FakeStep(facts, setup, is_cuda=True, is_tracked=False)
    for point in others:
        peaks, nets = marks_of(fit, *point)
        run = {name: events for name, events in step.run(*point).items() if name != "head"}
        assert nets == pytest.approx({name: sum(events) for name, events in run.items()}, abs=1)
        highest = {name: max(0, *itertools.accumulate(events)) for name, events in run.items() if events}
        assert {name: max(0, peaks[name]) for name in highest} == pytest.approx(highest, rel=1e-6)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("checkpointing", ["full", "none", "selective"])
@pytest.mark.parametrize("model_type", plan_times.CONFIGS)
def test_a_fit_gives_the_bytes_of_longer_runs_of_models_of_real_size(
    model_type: str, checkpointing: str, method: str
) -> None:
    """Gradients of large weights hide what grows from the sizes that verify a fit."""
    config = AutoConfig.for_model(model_type, **plan_times.CONFIGS[model_type]).to_dict()
    facts = facts_of_any(json.loads(json.dumps(config, default=str)), name=model_type)
    setup = TrainingSetup(method=method, packing=False, checkpointing=checkpointing, sequence_length=2048)
    fit = traced_fit(facts, setup, is_cuda=True, is_tracked=False)
    layers: Layers = "few, counted as all" if model_type == "gemma4_text" else "few"  # it has inputs for each layer
    step = FakeStep(facts, setup, is_cuda=True, is_tracked=False, layers=layers)
    points = [(3, 64), (1, 96)] if _LOOPING[facts.traced_config] == "tokens" else [(3, 2048), (1, 1024)]
    for point in points:
        peaks, nets = marks_of(fit, *point)
        run = {name: events for name, events in step.run(*point).items() if name != "head" and events}
        highest = {name: max(0, *itertools.accumulate(events)) for name, events in run.items()}
        slack = 0.005 * max(highest.values())
        assert {name: nets[name] for name in run} == pytest.approx(
            {name: sum(events) for name, events in run.items()}, abs=slack
        )
        assert {name: max(0, peaks[name]) for name in run} == pytest.approx(highest, abs=slack)
