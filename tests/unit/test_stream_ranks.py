"""Plans of ranks that share hidden states, and their loss, as torchtitan has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss as torch_loss

from accel_scale.errors import ConfigError
from accel_scale.planning.cost.memory import predict_memory
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup
from accel_scale.planning.tape.head import cross_entropy, parallel_cross_entropy
from accel_scale.planning.tape.ops import Ops
from accel_scale.planning.tape.tape import Tape
from accel_scale.planning.tape.tensors import Parameter, Tensor
from accel_scale.verifying.measured_memory import StorageTracker

ROWS, VOCABULARY = 48, 320
WHOLE = TrainingSetup(
    precision="bf16", packing=False, micro_batch_size=4, sequence_length=8192, loss="full",
    parallel=ParallelSetup("fsdp2", 64, tensor_parallel=8),
)  # fmt: skip
DIVIDED = replace(WHOLE, parallel=replace(WHOLE.parallel, stream_ranks=8))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def logits_of(ops: Ops, *, itemsize: int) -> Tensor:
    parameter = Parameter(ROWS * VOCABULARY, itemsize)
    return ops.tape.record(ops.new(ROWS * VOCABULARY, itemsize), [parameter], [], lambda grad: [grad.view()])


def test_the_loss_of_a_share_of_the_vocabulary_needs_what_torchs_needs(mesh: DeviceMesh) -> None:
    logits = torch.randn(ROWS, VOCABULARY, dtype=torch.bfloat16)
    target = torch.arange(ROWS)
    tracker = StorageTracker()
    with tracker:
        upcast = logits.float()
        log_probs = torch_loss._log_softmax(upcast, 1, False, mesh, 0)
        del upcast
        forward = tracker.peak_bytes
        gradient = torch_loss._nll_loss_and_log_softmax_backward(
            torch.tensor(1.0), log_probs, target, None, 1, -100, torch.tensor(ROWS), log_probs.shape, 1, mesh, 0
        )
    expected = (torch.eye(VOCABULARY)[target] - logits.float().softmax(-1)) / -ROWS
    torch.testing.assert_close(gradient, expected)
    tape = Tape(autocast_bytes=None, adds_in_place=True, is_cuda=True)
    ops = Ops(tape)
    planned = parallel_cross_entropy(ops, logits_of(ops, itemsize=2))
    own = ROWS * VOCABULARY * 2  # the logits themselves, which the tracker does not see
    assert tape.meter.peak_bytes - own == pytest.approx(forward, rel=0.03)
    tape.meter.reset_peak()
    tape.backward(planned)
    assert tape.meter.peak_bytes == pytest.approx(tracker.peak_bytes, rel=0.03)


def test_a_whole_vocabularys_loss_needs_one_copy_less() -> None:
    peaks = []
    for function in (cross_entropy, parallel_cross_entropy):
        tape = Tape(autocast_bytes=None, adds_in_place=True, is_cuda=True)
        ops = Ops(tape)
        tape.backward(function(ops, logits_of(ops, itemsize=4)))
        peaks.append(tape.meter.peak_bytes / (ROWS * VOCABULARY * 4))
    assert peaks[1] == pytest.approx(peaks[0] + 1, abs=0.02)


def test_layer_inputs_are_divided_among_the_ranks() -> None:
    facts = load_model_facts("meta-llama/Llama-3.1-70B", allow_download=False)
    whole, divided = (predict_memory(facts, setup).step for setup in (WHOLE, DIVIDED))
    one = 4 * 8192 * facts.hidden_size * 2
    logits = 4 * 8192 * facts.vocab_size / 8 * 4
    # Also of the last norm: its input, in fp32 too, and its result.
    assert whole.saved_bytes == pytest.approx((facts.num_layers + 4) * one + logits, rel=0.01)
    # The head's input is gathered.
    assert divided.saved_bytes == pytest.approx((facts.num_layers + 4) * one / 8 + one + logits, rel=0.01)


def test_a_loss_in_one_kernel_keeps_the_logits_as_they_are() -> None:
    facts = load_model_facts("meta-llama/Llama-3.1-8B", allow_download=False)
    single = replace(WHOLE, parallel=ParallelSetup(), micro_batch_size=1)
    whole, compiled = (
        predict_memory(facts, replace(single, loss=loss)).step.loss_bytes for loss in ("full", "full_compiled")
    )
    # In fp32: log-probabilities, their gradient, and that of the logits. In bf16: logits and gradient.
    assert whole - compiled == pytest.approx(8192 * facts.vocab_size * (3 * 4 - 2 * 2), rel=0.01)


@pytest.mark.parametrize(
    ("model", "parallel", "problem"),
    [
        ("meta-llama/Llama-3.1-8B", ParallelSetup("fsdp2", 8, tensor_parallel=4, stream_ranks=2), "cannot share"),
        ("EleutherAI/pythia-1.4b", ParallelSetup("fsdp2", 8, tensor_parallel=2, stream_ranks=2), "not modelled"),
    ],
)
def test_what_is_not_planned(model: str, parallel: ParallelSetup, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        predict_memory(load_model_facts(model, allow_download=False), replace(WHOLE, parallel=parallel))
