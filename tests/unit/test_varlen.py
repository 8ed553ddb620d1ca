"""torch's variable-length attention behind `sdpa_packed`: on a fake GPU, compared with masked attention in fp32."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import varlen as torch_varlen

from accel_scale.facts.device import Device
from accel_scale.modeling.packed_attention import packed_attention_forward
from accel_scale.modeling.packed_mask import attach_layout, packed_layout
from accel_scale.modeling.packing import varlen
from accel_scale.modeling.packing.varlen import varlen_refusal
from benchmarks import varlen_reference
from benchmarks.pretend_gpu import H100, PretendGpu

T4 = replace(H100, name="Tesla T4", capability=(7, 5))
ROWS = [[5, 1, 20, 6], [32]]
DOCUMENT = torch.repeat_interleave(torch.arange(5), torch.tensor([5, 1, 20, 6, 32]))


def attend(dtype, *, heads=(4, 2), size=16, window=None, scaling=None, device=H100):
    """Returns (output and gradients on the fake GPU, the same in fp32 with a mask, the GPU's counts)."""
    draw = torch.Generator().manual_seed(0)
    starts = torch.zeros(2, 32, dtype=torch.bool)
    for row, lengths in enumerate(ROWS):
        starts[row, torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
    inputs = [torch.randn(2, n, 32, size, generator=draw).to(dtype) for n in (heads[0], heads[1], heads[1])]
    weights = torch.randn(2, 32, heads[0], size, generator=draw)
    exact = [tensor.detach().clone().float().requires_grad_() for tensor in inputs]
    place = torch.arange(64)
    seen = (DOCUMENT[:, None] == DOCUMENT[None]) & (place[:, None] >= place[None])
    if window is not None:
        seen &= place[:, None] - place[None] < window
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1).transpose(0, 1) for tensor in exact)
    group = heads[0] // heads[1]
    scores = query @ key.repeat_interleave(group, 0).transpose(1, 2) * (size**-0.5 if scaling is None else scaling)
    masked = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value.repeat_interleave(group, 0)
    masked = masked.transpose(0, 1).view(2, 32, heads[0], size)
    expected = [masked, *torch.autograd.grad((masked * weights).sum(), exact)]
    with PretendGpu(device) as gpu:
        tensors = [tensor.to("cuda").requires_grad_() for tensor in inputs]
        on_device = weights.to("cuda")
        layout = packed_layout(starts, window, tensors[0].device)
        mask = attach_layout(layout)
        gpu.clear()
        module = SimpleNamespace(is_causal=True, num_key_value_groups=group)
        output, _ = packed_attention_forward(module, *tensors, mask, scaling=scaling)
        (output.float() * on_device).sum().backward()
        found = [output.detach().held, *(tensor.grad.held for tensor in tensors)]
    return found, expected, gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"window": 7},
        {"window": 1},
        {"heads": (4, 4)},
        {"heads": (3, 1), "scaling": 0.3},
        {"size": 12, "window": 9},
    ],
    ids=str,
)
def test_documents_as_they_lie_are_masked_attention(dtype, case):
    found, expected, gpu = attend(dtype, **case)
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours.float() - exact).norm() <= 0.01 * exact.norm()
    assert (gpu.waits, gpu.uploads) == ([], 0), "the bounds of the documents came with the mask"
    assert gpu.operators["torch_attn::_varlen_attn"] == gpu.operators["torch_attn::_varlen_attn_backward"] == 1


@pytest.mark.parametrize(("dtype", "device"), [(torch.float32, H100), (torch.float16, T4)])
def test_elsewhere_buckets_without_a_wait(dtype, device):
    found, expected, gpu = attend(dtype, window=7, device=device)
    for ours, exact in zip(found, expected, strict=True):
        assert (ours.float() - exact).norm() <= 0.01 * exact.norm()
    assert gpu.operators["torch_attn::_varlen_attn"] == 0
    assert gpu.waits == []


def test_what_the_kernel_does_not_serve_is_named(monkeypatch):
    served = {"dtype": torch.bfloat16, "key_size": 128, "value_size": 128, "dropout": 0.0}
    assert varlen_refusal(H100, **served) is None
    assert varlen_refusal(Device("cuda", "B200", capability=(10, 0)), **served) is None
    for device, change, reason in [
        (T4, {}, "Tesla T4 has no flash kernel"),
        (Device(), {}, "CPU has no flash kernel"),
        (Device("cuda", "AMD Instinct MI300X", architecture="gfx942"), {}, "MI300X has no flash kernel"),
        (H100, {"dtype": torch.float32}, "not in float32"),
        (H100, {"key_size": 192}, "values have heads of 128 and keys of 192"),
        (H100, {"key_size": 512, "value_size": 512}, "512 exceed 256"),
        (H100, {"dropout": 0.1}, "no dropout"),
    ]:
        assert reason in varlen_refusal(device, **{**served, **change})
    for older in (None, lambda query, key, value: query):
        monkeypatch.setattr(varlen, "varlen_attn", older)
        assert "has no attention of variable length" in varlen_refusal(H100, **served)


@pytest.mark.parametrize(
    ("operator", "reference"),
    [("_varlen_attn", varlen_reference.forward), ("_varlen_attn_backward", varlen_reference.backward)],
)
def test_the_reference_takes_what_torchs_operator_takes(operator, reference):
    schema = getattr(torch.ops.torch_attn, operator).default._schema
    ours = inspect.signature(reference).parameters.values()
    assert [argument.name for argument in schema.arguments] == [parameter.name for parameter in ours]
    defaults = [argument.default_value for argument in schema.arguments if argument.has_default_value()]
    assert defaults == [each.default for each in ours if each.default is not inspect.Parameter.empty]


def test_torchs_own_operators_take_the_arguments():
    """The bodies that call the flash kernels, on meta tensors: names, types and shapes are torch's."""
    query = torch.empty(64, 4, 16, dtype=torch.bfloat16, device="meta")
    key = torch.empty(64, 2, 16, dtype=torch.bfloat16, device="meta")
    bounds = torch.empty(6, dtype=torch.int32, device="meta")
    output, sums, state = torch_varlen._varlen_attn._init_fn(
        query, key, key, bounds, bounds, 32, 32, False, 0.25, [6, 0], True
    )
    assert output.shape == query.shape
    arguments = (query, query, key, key, output, sums, bounds, bounds, 32, 32, False, state, 0.25, [6, 0])
    gradients = torch_varlen._varlen_attn_backward._init_fn(*arguments)
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, key.shape]
