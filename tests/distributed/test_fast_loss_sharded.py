"""The lean loss weights tokens across ranks, and its head's gradient is whole however the head is sharded."""

from __future__ import annotations

import pytest
import torchrun

pytestmark = pytest.mark.slow


def test_gradients_over_two_ranks_equal_one_process():
    cases = torchrun.cases("fast_loss_run.py", 2)
    assert set(cases) == {"ddp", "fsdp2", "fsdp2_head_apart"}
    for name, case in cases.items():
        assert case["num_grads"] == 21, name
        assert case["largest"] > 1e-2, name
        assert case["difference"] < 1e-6, name
