"""What torch's allocator holds after steps of rows of one length: simulated, and planned."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.training_setup import LoraSetup, ParallelSetup, TrainingSetup

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from allocator_steps import simulate

GIB = 2**30
LORA = TrainingSetup(
    method="lora", lora=LoraSetup(16), loss="full", attention="flash_attention_2", micro_batch_size=4,
    sequence_length=4096,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rows"), [("mistralai/Mistral-7B-v0.1", 4), ("meta-llama/Llama-3.1-8B", 4), ("Qwen/Qwen3-4B", 8)]
)
def test_held_blocks_are_those_of_the_allocator(name: str, rows: int) -> None:
    """Layers' blocks are too small for logits: a tenth and more of the memory is held besides tensors."""
    model, setup = load_model_facts(name, allow_download=False), replace(LORA, micro_batch_size=rows)
    found, plan = simulate(model, setup), predict_memory(model, setup)
    assert found.peak == pytest.approx(plan.peak_bytes, rel=0.02)
    assert plan.reserved_bytes == pytest.approx(found.reserved, rel=0.06)
    assert plan.reserved_bytes - plan.hoarded_bytes < 0.95 * found.reserved


def test_states_made_after_the_first_pass_take_the_blocks_of_its_activations() -> None:
    model = load_model_facts("Qwen/Qwen3-4B", allow_download=False)
    full = replace(LORA, method="full", precision="bf16_true", optimizer="adamw_torch", micro_batch_size=2)
    found, plan = simulate(model, full), predict_memory(model, full)
    assert plan.reserved_bytes == pytest.approx(found.reserved, rel=0.05)
    assert plan.hoarded_bytes > 0.2 * found.reserved
    # DeepSpeed makes its states before the first pass.
    early = predict_memory(model, replace(full, parallel=ParallelSetup("zero1", num_gpus=1)))
    assert early.hoarded_bytes == 0


@pytest.mark.parametrize("gib", [18.0, 24.0, 32.0, 48.0, 80.0])
def test_held_blocks_fill_the_card_at_most_and_never_decide_what_fits(gib: float) -> None:
    model, limit = load_model_facts("Qwen/Qwen2.5-7B", allow_download=False), gib * GIB
    for setup in (LORA, replace(LORA, micro_batch_size=1), replace(LORA, method="qlora")):
        plan = predict_memory(model, setup, limit_bytes=limit)
        grown = predict_memory(model, replace(setup, expandable_segments=True), limit_bytes=limit)
        assert grown.hoarded_bytes == 0
        assert (plan.high_bytes <= limit) == (grown.high_bytes <= limit)
        assert plan.least_bytes == pytest.approx(grown.high_bytes)
        if plan.high_bytes <= limit:
            assert plan.low_bytes < plan.device_bytes <= plan.high_bytes
            assert plan.is_bounded == (plan.high_bytes == limit)
            assert (" to " if plan.is_bounded else " ± ") in plan.text
