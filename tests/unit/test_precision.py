"""Precision: recipe, launch file and device agree; loss scaling, bf16 and fp8 really take effect."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from accel_scale.errors import ConfigError
from accel_scale.facts.device import CPU, Device, device_named
from accel_scale.facts.names import PRECISIONS
from accel_scale.facts.precisions import DTYPE_BYTES, REDUCE_DTYPES
from accel_scale.modeling.precision import (
    cast_parameters,
    convert_to_fp8,
    enable_fp16_on_cpu,
    precision_named,
    resolve_precision,
)
from accel_scale.quiet import quiet_imports

quiet_imports()
HOPPER, TURING = device_named("H100"), device_named("T4")
LAUNCH_NAMES = {"fp32": "no", "fp16": "fp16", "bf16": "bf16", "bf16_true": "no", "fp8": "fp8"}


def resolve(requested=None, **kwargs):
    return resolve_precision(requested, **{"device": HOPPER, **kwargs})


@pytest.mark.parametrize(("requested", "launch"), itertools.product(PRECISIONS, ["no", "fp16", "bf16", "fp8"]))
def test_recipe_and_launch_file_agree_or_the_line_is_named(requested, launch):
    settings = {"launch_mixed_precision": launch, "launch_place": "fsdp2.yaml:4"}
    if LAUNCH_NAMES[requested] == launch:
        assert resolve(requested, **settings).name == requested
        return
    with pytest.raises(ConfigError) as error:
        resolve(requested, **settings, place={"precision": "qlora.yaml:7"}.get)
    assert error.value.place == "fsdp2.yaml:4"
    assert "qlora.yaml:7" in error.value.problem
    assert "qlora.yaml:7" in error.value.fix
    quoted = "'no'" if LAUNCH_NAMES[requested] == "no" else LAUNCH_NAMES[requested]
    assert f"mixed_precision: {quoted} here" in error.value.fix


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "bf16"),
        ({"device": TURING}, "fp16"),
        ({"device": Device(computes_bf16=False)}, "fp32"),
        ({"launch_mixed_precision": "no"}, "fp32"),
        ({"launch_mixed_precision": "fp16"}, "fp16"),
        ({"launch_mixed_precision": "fp8"}, "fp8"),
        ({"fp16_flag": True}, "fp16"),
        ({"bf16_flag": True, "launch_mixed_precision": "bf16"}, "bf16"),
        ({"bf16_flag": False}, "bf16"),
        ({"dtype_flag": "bfloat16"}, "bf16_true"),
        ({"dtype_flag": "bfloat16", "trains_adapters": True}, "bf16"),
        ({"dtype_flag": "float32"}, "bf16"),
    ],
)
def test_what_is_chosen_when_precision_is_not_given(settings, expected):
    assert resolve(**settings).name == expected


@pytest.mark.parametrize(
    ("requested", "settings", "place"),
    [
        ("fp64", {}, "--precision"),
        (None, {"fp16_flag": True, "bf16_flag": True}, "--fp16"),
        ("fp32", {"bf16_flag": True}, "--bf16"),
        ("bf16", {"bf16_flag": False}, "--bf16"),
        ("bf16", {"dtype_flag": "bfloat16"}, "--dtype"),
        ("fp16", {"dtype_flag": "float16"}, "--dtype"),
        ("bf16_true", {"dtype_flag": "float32"}, "--dtype"),
        ("bf16", {"dtype_flag": "auto"}, "--dtype"),
        ("bf16", {"device": TURING}, "--precision"),
        ("fp8", {"device": device_named("A100 80GB SXM")}, "--precision"),
        ("bf16", {"fp8_emulate": True}, "--fp8_emulate"),
        ("bf16_true", {"strategy": "zero2"}, "--precision"),
        ("fp8", {"strategy": "zero3"}, "--precision"),
    ],
)
def test_refusals_name_the_flag_and_a_fix(requested, settings, place):
    with pytest.raises(ConfigError) as error:
        resolve(requested, **settings)
    assert error.value.place == place
    assert error.value.fix


def test_fp8_without_fp8_hardware_only_emulated():
    with pytest.raises(ConfigError, match="--fp8_emulate"):
        resolve_precision("fp8", device=CPU)
    assert resolve_precision("fp8", device=CPU, fp8_emulate=True).fp8_emulate


def test_missing_torchao_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        resolve("fp8")


def test_deepspeed_fp16_on_a_cpu_without_fp16(monkeypatch):
    monkeypatch.setattr("accel_scale.modeling.precision._cpu_multiplies_fp16", lambda: False)
    with pytest.raises(ConfigError, match="DeepSpeed refuses fp16"):
        resolve("fp16", device=CPU, strategy="zero2")
    assert resolve("fp16", device=CPU, strategy="ddp").grad_scaler


@pytest.mark.parametrize(
    ("name", "weights", "compute", "flags"),
    [
        ("fp32", torch.float32, torch.float32, {"fp16": False, "bf16": False}),
        ("fp16", torch.float32, torch.float16, {"fp16": True, "bf16": False}),
        ("bf16", torch.float32, torch.bfloat16, {"fp16": False, "bf16": True}),
        ("bf16_true", torch.bfloat16, torch.bfloat16, {"fp16": False, "bf16": False}),
        ("fp8", torch.float32, torch.bfloat16, {"fp16": False, "bf16": True}),
    ],
)
def test_dtypes(name, weights, compute, flags):
    precision = precision_named(name)
    assert (precision.model_dtype, precision.compute_dtype) == (weights, compute)
    assert precision.trainer_flags == flags
    # A frozen base needs only the compute dtype; adapters are trained, so they are kept like trained weights.
    assert (precision.frozen_dtype, precision.adapter_dtype) == (compute, weights)
    assert precision.grad_scaler == (name == "fp16")
    assert bool(precision.notes) == (name == "bf16_true")


def mlp() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64),
        torch.nn.GELU(),
        torch.nn.Linear(64, 64),
        torch.nn.GELU(),
        torch.nn.Linear(64, 16),
    )


def train(precision, model, num_steps=20, learning_rate=3e-3):
    """Losses of a plain loop in `precision`, and its optimizer."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(64, 32), torch.randn(64, 16)
    model.to(precision.model_dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    scaler = precision.scaler("cpu")
    losses = []
    for _ in range(num_steps):
        with precision.autocast("cpu"):
            loss = (model(inputs.to(precision.model_dtype)).float() - targets).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer


@pytest.mark.parametrize("name", ["fp16", "bf16", "bf16_true", "fp8"])
def test_training_follows_fp32(name):
    """Every precision lowers the loss as fp32 does, and none is secretly fp32."""
    reference, _ = train(precision_named("fp32"), mlp())
    model = mlp()
    if name == "fp8":
        convert_to_fp8(model, emulate=True)
    losses, optimizer = train(precision_named(name), model)
    assert reference[-1] < 0.85 * reference[0]
    assert losses != reference
    assert losses == pytest.approx(reference, rel=0.02)
    dtypes = {value.dtype for state in optimizer.state.values() for value in state.values() if value.dim()}
    assert dtypes == {torch.bfloat16 if name == "bf16_true" else torch.float32}


def test_fp16_overflow_halves_the_scale_and_skips_the_step():
    precision, model = precision_named("fp16"), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = precision.scaler("cpu")
    scales, moved = [], []
    for factor in (1.0, 1e6, 1.0):  # the second loss has gradients above 65504, the largest fp16 value
        before = model[0].weight.clone()
        with precision.autocast("cpu"):
            loss = model(torch.randn(8, 32)).float().pow(2).mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(before, model[0].weight))
    assert scales == [2.0**16, 2.0**15, 2.0**15]
    assert moved == [True, False, True]


@pytest.fixture
def accelerator_factory():
    """Makes an `Accelerator` in a given precision; the process-wide state is reset before and after."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield lambda name: Accelerator(mixed_precision=name, cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_ignores_fp16_on_a_cpu(accelerator_factory):
    """The reason for `enable_fp16_on_cpu`; if this fails, Accelerate supports it and the function can be removed."""
    accelerator = accelerator_factory("fp16")
    assert accelerator.mixed_precision == "fp16"
    assert not accelerator.native_amp
    assert accelerator.scaler is None


def test_fp16_through_accelerate_on_a_cpu(accelerator_factory):
    accelerator = accelerator_factory("fp16")
    assert enable_fp16_on_cpu(accelerator)
    assert not enable_fp16_on_cpu(accelerator)  # a second call changes nothing
    model = mlp()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    skipped, norms = [], []
    for factor in (1.0, 1e6, 1.0):
        loss = model(torch.ones(8, 32)).pow(2).mean() * factor
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    assert seen == [torch.float16] * 3
    assert skipped == [False, True, False]
    assert accelerator.scaler.get_scale() == 2.0**15
    assert norms[0] < 10  # gradients were unscaled before clipping, not 65536 times too large


def test_nothing_is_enabled_in_other_precisions(accelerator_factory):
    accelerator = accelerator_factory("bf16")
    assert not enable_fp16_on_cpu(accelerator)
    assert accelerator.scaler is None


class TestFp8:
    def test_inner_layers_are_converted_and_keep_their_parameters(self):
        from torchao.float8.float8_linear import Float8Linear

        model = mlp()
        parameters = dict(model.named_parameters())
        assert convert_to_fp8(model, emulate=True) == ["2"]
        assert [type(module) is Float8Linear for module in (model[0], model[2], model[4])] == [False, True, False]
        after = dict(model.named_parameters())
        # An optimizer created earlier must still train them: the same tensors, under the same names.
        assert parameters.keys() == after.keys()
        assert all(parameters[name] is after[name] for name in parameters)

    def test_operands_are_really_rounded_to_fp8(self):
        model, reference = mlp(), mlp()
        convert_to_fp8(model, emulate=True)
        inputs = torch.randn(16, 64)
        output, exact = model[2](inputs), reference[2](inputs)

        def rounded(tensor):
            """Per-tensor dynamic scaling to e4m3, like torchao's default recipe."""
            scale = torch.finfo(torch.float8_e4m3fn).max / tensor.abs().max()
            return (tensor * scale).to(torch.float8_e4m3fn).float() / scale

        expected = rounded(inputs) @ rounded(reference[2].weight).t() + reference[2].bias
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        error = (output - exact).norm() / exact.norm()
        assert 0.01 < error < 0.1  # 3 mantissa bits: bf16 would be below 0.01

    def test_every_converted_weight_trains(self):
        model = mlp()
        convert_to_fp8(model, emulate=True)
        before = copy.deepcopy(model.state_dict())
        train(precision_named("fp8"), model, num_steps=1)
        assert all(not torch.equal(before[name], value) for name, value in model.state_dict().items())

    def test_adapters_and_odd_sizes_stay(self):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(mlp(), LoraConfig(r=16, target_modules=["0", "2", "4"]))
        names = convert_to_fp8(model, emulate=True)
        assert names == ["base_model.model.2.base_layer"]
        odd = torch.nn.Sequential(*[torch.nn.Linear(size, size) for size in (16, 20, 16)])
        with pytest.raises(ConfigError, match="multiples of 16"):
            convert_to_fp8(odd, emulate=True)

    def test_a_model_without_inner_layers_is_refused_not_trained_in_bf16(self):
        with pytest.raises(ConfigError, match="no layer of this model"):
            convert_to_fp8(torch.nn.Sequential(torch.nn.Linear(16, 16)), emulate=True)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_only_fp16_scales_its_loss(name) -> None:
    from accel_scale.modeling.precision import precision_named

    assert precision_named(name).scaler("cpu").is_enabled() == (name == "fp16")


def test_only_fp16_scales_the_loss_and_bytes_are_those_of_torch():
    assert {name: precision_named(name).scaler("cpu").is_enabled() for name in PRECISIONS} == {
        name: name == "fp16" for name in PRECISIONS
    }
    assert {name: getattr(torch, name).itemsize for name in DTYPE_BYTES} == DTYPE_BYTES
    assert set(REDUCE_DTYPES.values()) <= set(DTYPE_BYTES)


def test_only_numbers_of_training_are_cast() -> None:
    """Integers and 4-bit values keep their stored dtype; trained and frozen weights each get their own."""
    model = torch.nn.Module()
    for name, dtype, trains in (("trained", torch.float16, True), ("frozen", torch.float32, False)):
        model.register_parameter(name, torch.nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=trains))
    for name, dtype in (("packed", torch.uint8), ("stored", torch.float16)):
        model.register_parameter(name, torch.nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False))
    model.stored.quant_state = object()  # how bitsandbytes marks a weight, here one stored in another dtype
    cast_parameters(model, resolve("bf16"))
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes == {
        "trained": torch.float32, "frozen": torch.bfloat16, "packed": torch.uint8, "stored": torch.float16,
    }  # fmt: skip
