"""The peak FLOP/s that MFU is measured against."""

from __future__ import annotations

import random

import numpy as np
import torch

from accel_scale.measuring.peak_flops import measured_peak_flops


def test_measuring_it_leaves_the_runs_random_numbers_alone() -> None:
    """A resumed run measures it after restoring its random states; dropout used to continue with other numbers."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert measured_peak_flops.__wrapped__("cpu", torch.float32) > 1e8
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
