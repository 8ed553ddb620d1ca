"""In a micro-batch of either recipe the host never waits for the GPU; a step waits for what its guard decides on."""

from __future__ import annotations

import pytest

from benchmarks.device_waits import per_micro_batch_and_step, write_inputs


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft", "pretrain"])
def test_no_micro_batch_waits(recipe, tmp_path):
    write_inputs(tmp_path)
    micro_batch, step = per_micro_batch_and_step(recipe, tmp_path)
    assert micro_batch == {}, "asked of the device, or copied from memory that is not pinned"
    assert {kind for kind, _ in step} <= {"readback"}
    assert sum(step.values()) <= 2, "the gradient norm, and the verdict of all ranks"
