"""Every launch file trains every method to DDP's losses and weights, and DDP to those of one process."""

from __future__ import annotations

import parity
import pytest

# The same strategies on several machines; their single-machine launches are among the others.
MULTINODE = {"ddp_multinode", "fsdp2_multinode", "zero3_multinode"}
# Strategies that ZeRO-Infinity, ZeRO-2 and ZeRO-3 cover too, whose files are among the others; and FSDP2 that keeps
# its weights after the forward pass, which test_fsdp_memory.py trains.
LONG = {*MULTINODE, "zero3_offload", "zero2_offload", "zero2_tuned", "zero3_tuned", "fsdp2_grad_op"}
NAMES = [
    pytest.param(name, marks=[pytest.mark.soak] if name in LONG else [])
    for name in parity.launch_names()
    if name != parity.REFERENCE
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_data")]


@pytest.mark.parametrize("method", parity.METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_equals_ddp(name: str, method: str) -> None:
    difference = parity.compare(parity.results(name)[method], parity.results(parity.REFERENCE)[method])
    assert difference.loss <= parity.TOLERANCE
    assert difference.weight <= parity.TOLERANCE


@pytest.mark.parametrize("method", parity.METHODS)
def test_ddp_equals_one_process(method: str) -> None:
    difference = parity.compare(parity.results(parity.REFERENCE)[method], parity.results(parity.SINGLE)[method])
    assert difference.loss <= parity.TOLERANCE
    assert difference.weight <= parity.TOLERANCE


def test_a_wrong_batch_would_be_seen() -> None:
    difference = parity.wrong_batch_difference()
    assert difference.loss > 10 * parity.TOLERANCE
    assert difference.weight > 10 * parity.TOLERANCE
