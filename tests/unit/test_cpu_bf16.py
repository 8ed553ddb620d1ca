"""CPUs on which bf16 is the default: those whose bf16 products are faster than their fp32 ones."""

from __future__ import annotations

import pytest
import torch

from accel_scale.launching.machine import detect_machine
from accel_scale.modeling.precision import resolve_precision


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"cpu_name": "AMD EPYC", "avx512_bf16": True}, "bf16"),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": False}, "fp32"),
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, "bf16"),
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": False}, "fp32"),  # AMX hidden: half as fast
        ({"architecture": "arm64", "bf16": True}, "bf16"),
        ({}, "fp32"),
    ],
)
def test_bf16_is_the_default_where_it_is_faster(monkeypatch, capabilities: dict, expected: str) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    machine = detect_machine()
    assert machine.accelerator.native_bf16 == (expected == "bf16")
    assert resolve_precision(None, device=machine.accelerator).name == expected
    # If requested, bf16 is available on all of them.
    assert resolve_precision("bf16", device=machine.accelerator).name == "bf16"
