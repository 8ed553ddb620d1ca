"""A run's choices on a device and its refusals there: the recipe's own decisions on described devices."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import GPT2Config, LlamaConfig
from trl import ScriptArguments

from accel_scale.checks.registry import check_run
from accel_scale.checks.run_settings import RunSettings
from accel_scale.data.default import DEFAULT_TRAINING
from accel_scale.errors import ConfigError
from accel_scale.facts.device import CPU, Device, device_named
from accel_scale.flags.common import ScaleArguments
from accel_scale.flags.parsing import parse_flags
from accel_scale.launching.environment import LaunchEnvironment
from accel_scale.launching.machine import PACKAGES, LocalMachine
from accel_scale.launching.strategy import LaunchStrategy
from accel_scale.modeling import attention as attention_module
from accel_scale.modeling import packed_attention
from accel_scale.modeling.attention import choose_kernels, resolve_attention, score_matrix_note
from accel_scale.optimization.optimizers import check_optimizer
from accel_scale.settings.resolve import resolve
from accel_scale.settings.resolved import LaunchFacts, Resolved
from accel_scale.settings.trl_config import RecipeModelConfig, RecipeSFTConfig

DEVICES = {
    "V100": device_named("V100 16GB"),
    "T4": device_named("T4"),
    "3060": device_named("3060"),
    "4090": device_named("4090"),
    "A100": device_named("A100 80GB SXM"),
    "H100": device_named("H100"),
    "B200": device_named("B200"),
    "MI250X": device_named("MI250X"),
    "MI300X": device_named("MI300X"),
    "M1": Device("mps", "Apple M1", fast_bf16=False),
    "M4": Device("mps", "Apple M4 Max"),
    "XPU": Device("xpu", "Intel Data Center GPU Max 1100"),
    "CPU": CPU,
    "old CPU": Device(fast_bf16=False),
}
GROUPED = LlamaConfig(hidden_size=512, num_attention_heads=8, num_key_value_heads=2)
FLASH2, FLASH3 = ("flash_attention_2",), ("flash_attention_2", "flash_attention_3")

# Device: precision, attention for packed rows, for plain rows, for these with FlashAttention installed, checkpointing,
# whether fp8 is allowed, whether FlashAttention 3 is, whether cuDNN's attention is avoided for varying lengths,
# whether key heads are shared in half precision, backend for collectives.
TABLE = {
    "V100": ("fp16", "sdpa_packed", "sdpa_packed", "sdpa_packed", "full", False, False, False, False, "nccl"),
    "T4": ("fp16", "sdpa_packed", "sdpa_packed", "sdpa_packed", "full", False, False, False, False, "nccl"),
    "3060": ("bf16", "sdpa_packed", "sdpa", "flash_attention_2", "full", False, False, False, True, "nccl"),
    "4090": ("bf16", "sdpa_packed", "sdpa", "flash_attention_2", "full", True, False, False, True, "nccl"),
    "A100": ("bf16", "sdpa_packed", "sdpa", "flash_attention_2", "full", False, False, False, True, "nccl"),
    "H100": ("bf16", "sdpa_packed", "sdpa", "flash_attention_2", "full", True, True, True, True, "nccl"),
    "B200": ("bf16", "sdpa_packed", "sdpa", "flash_attention_2", "full", True, False, True, True, "nccl"),
    "MI250X": ("bf16", "sdpa_packed", "sdpa_packed", "flash_attention_2", "full", False, False, False, False, "nccl"),
    "MI300X": ("bf16", "sdpa_packed", "sdpa_packed", "flash_attention_2", "full", True, False, False, False, "nccl"),
    "M1": ("fp32", "sdpa_packed", "sdpa_packed", "sdpa_packed", "full", False, False, False, False, None),
    "M4": ("bf16", "sdpa_packed", "sdpa_packed", "sdpa_packed", "full", False, False, False, False, None),
    "XPU": ("bf16", "sdpa_packed", "sdpa_packed", "sdpa_packed", "full", False, False, False, False, "xccl"),
    "CPU": ("bf16", "sdpa_packed", "sdpa_packed", "sdpa_packed", "none", False, False, False, True, "gloo"),
    "old CPU": ("fp32", "sdpa_packed", "sdpa_packed", "sdpa_packed", "none", False, False, False, True, "gloo"),
}


def settings_on(device: Device, line: str = "", preset: dict | None = None, **launch) -> Resolved:
    classes = (ScriptArguments, RecipeSFTConfig, RecipeModelConfig, ScaleArguments)
    parsed = parse_flags(classes, line.split(), program="sft.py")
    return resolve(parsed, LaunchFacts(device=device, **launch), preset=preset)


def findings_on(device: Device, *, world_size: int = 1, mixed_precision: str | None = None, **run) -> list[str]:
    """The lines of the checks before a launch, on a machine with every package installed."""
    machine = LocalMachine(
        accelerator=device,
        num_devices=world_size if device.type != "cpu" else 0,
        packages=dict.fromkeys(PACKAGES, "1"),
        has_compiler=True,
        has_ninja=True,
        has_libaio=True,
    )
    strategy = LaunchStrategy("ddp" if world_size > 1 else "single")
    launch = LaunchEnvironment(strategy, mixed_precision, world_size, world_size, 0, 0)
    return [finding.one_line() for finding in check_run(RunSettings(**run), launch, machine)]


def attention_on(device: Device, precision: str, *, packing: bool, requested: str | None = None) -> str:
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    return resolve_attention(requested, device=device, dtype=dtype, packing=packing, model_config=GROUPED)


@pytest.mark.parametrize("is_there", [True, False])
def test_kernels_of_the_hub_need_their_package(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import utils

    monkeypatch.setattr(utils, "is_kernels_available", lambda: is_there)
    name = "kernels-community/flash-attn2"
    if is_there:
        assert attention_module._check_kernel(name, "cuda") == name
    else:
        with pytest.raises(ConfigError, match="the kernels package, which is not installed"):
            attention_module._check_kernel(name, "cuda")
    with pytest.raises(ConfigError, match="is a kernel for accelerators and this run is on a CPU"):
        attention_module._check_kernel(name, "cpu")


def refused(device: Device, requested: str, precision: str) -> bool:
    try:
        attention_on(device, precision, packing=True, requested=requested)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("name", DEVICES)
def test_what_each_device_would_choose(name, monkeypatch):
    switched = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    device = DEVICES[name]
    settings = settings_on(device)
    precision = settings.precision.name
    with_flash = dataclasses.replace(device, flash=FLASH3)
    half = precision if precision != "fp32" else "fp16"
    chosen = (
        precision,
        attention_on(device, precision, packing=True),
        attention_on(device, precision, packing=False),
        attention_on(with_flash, precision, packing=True),
        str(settings.checkpointing),
        device.supports_fp8,
        not refused(with_flash, "flash_attention_3", half),
        choose_kernels(device, lengths_vary=True),
        device.shares_key_heads(half=True, masked=False, key_size=64, value_size=64),
        device.collective_backend,
    )
    assert chosen == TABLE[name]
    assert switched == ([False] if chosen[7] else [])
    assert not choose_kernels(device, lengths_vary=False)  # rows of one length keep the fastest kernel

    # The default optimizer, packing and the default precision are accepted on every device.
    assert check_optimizer("adamw_torch_fused", device_type=device.type, precision=precision) == []
    assert findings_on(device) == []
    assert settings.precision.grad_scaler == (precision == "fp16")
    # The embedded preset says bf16; where bf16 is not native, the preset gives way, with one line of output.
    embedded = settings_on(device, preset=dict(DEFAULT_TRAINING))
    assert embedded.precision.name == precision
    surprising = device.type != "cpu" and precision != "bf16"
    assert len(embedded.precision.notes) == surprising
    assert not surprising or f"computes in {precision}" in embedded.precision.notes[0]


@pytest.mark.parametrize(
    ("name", "dtype", "config", "forms"),
    [
        ("T4", torch.float16, GROUPED, True),
        ("V100", torch.float16, GROUPED, True),
        ("A100", torch.float32, GROUPED, True),  # the flash kernel needs half precision
        ("A100", torch.bfloat16, GROUPED, False),
        ("T4", torch.float16, LlamaConfig(hidden_size=512, num_attention_heads=8), False),
        ("T4", torch.float16, LlamaConfig(num_attention_heads=8, num_key_value_heads=2, head_dim=512), False),
        ("T4", torch.float16, GPT2Config(), False),
        ("CPU", torch.float32, GROUPED, False),
        ("MI300X", torch.bfloat16, GROUPED, False),  # unknown for this card
    ],
)
def test_sdpa_that_forms_score_matrices_is_never_chosen_and_noted_where_it_is_asked_for(
    name, dtype, config, forms
) -> None:
    device = DEVICES[name]
    note = score_matrix_note("sdpa", device=device, dtype=dtype, model_config=config)
    assert (note is not None) == forms
    assert not forms or ("sdpa_packed" in note and device.name in note)
    chosen = resolve_attention(None, device=device, dtype=dtype, packing=False, model_config=config)
    assert score_matrix_note(chosen, device=device, dtype=dtype, model_config=config) is None
    asked = resolve_attention("sdpa", device=device, dtype=dtype, packing=False, model_config=config)
    assert asked == "sdpa", "what was asked for"


@pytest.mark.parametrize("name", DEVICES)
def test_what_each_device_refuses(name):
    device = DEVICES[name]
    has_bf16 = name not in ("V100", "T4")
    assert bool(findings_on(device, precision="bf16")) != has_bf16
    assert bool(findings_on(device, mixed_precision="bf16")) != has_bf16
    assert bool(findings_on(device, precision="fp8")) != TABLE[name][5]
    assert bool(findings_on(device, world_size=2)) == (device.type == "mps")
    if not has_bf16:
        with pytest.raises(ConfigError, match=f"{device.name} does not compute in bf16") as error:
            settings_on(device, "--precision bf16")
        assert "--precision fp16" in error.value.fix
        with pytest.raises(ConfigError) as error:
            settings_on(device, mixed_precision="bf16", mixed_precision_place="accelerate launch --mixed_precision")
        assert "--mixed_precision fp16" in error.value.fix
        # A setting of the launch is answered in the launch's terms.
        (line,) = findings_on(device, mixed_precision="bf16")
        assert "--precision fp16" in line
        assert "accelerate launch --mixed_precision fp16" in line


def test_a_build_of_torch_without_kernels_for_the_card_is_one_line():
    cuda13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
    volta = dataclasses.replace(DEVICES["V100"], built_for=cuda13)
    (line,) = findings_on(volta)
    assert "no kernels for V100 16GB (compute capability 7.0" in line
    assert "cu126" in line
    for name in ("T4", "3060", "4090", "A100", "H100", "B200"):
        assert findings_on(dataclasses.replace(DEVICES[name], built_for=cuda13)) == []
    # Code for a single capability, and older code that can be translated.
    assert not dataclasses.replace(DEVICES["H100"], built_for=("sm_80", "sm_100a")).has_kernels
    assert not dataclasses.replace(DEVICES["B200"], built_for=("sm_103a",)).has_kernels
    assert dataclasses.replace(DEVICES["B200"], built_for=("sm_80", "compute_90")).has_kernels


@pytest.mark.parametrize(("name", "is_shared"), [("T4", False), ("A100", True), ("MI300X", False), ("CPU", True)])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_key_heads_are_repeated_where_sdpa_would_form_whole_matrices(name, is_shared, packed, monkeypatch):
    calls = []

    def sdpa(q, k, v, **kwargs):
        calls.append((q.shape[1], k.shape[1], kwargs["enable_gqa"]))
        return kernel(q, k, v, **kwargs)

    kernel = torch.nn.functional.scaled_dot_product_attention
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 4, True
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 600, 16).half() for heads in (8, 2, 2))
    mask = None
    if packed:
        starts = torch.zeros(1, 600, dtype=torch.bool)
        starts[0, [0, 100, 350]] = True
        from accel_scale.modeling.packed_mask import attach_layout, packed_layout

        mask = attach_layout(packed_layout(starts, None, torch.device("cpu")))
    expected, _ = packed_attention.packed_attention_forward(module, query, key, value, mask)
    monkeypatch.setattr(packed_attention, "_device", lambda device_type: DEVICES[name])
    monkeypatch.setattr(packed_attention, "varlen_refusal", lambda *args, **kwargs: "an older torch")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    output, _ = packed_attention.packed_attention_forward(module, query, key, value, mask)
    assert calls
    assert set(calls) == {(8, 2, True) if is_shared else (8, 8, False)}
    assert torch.allclose(output.float(), expected.float(), atol=2e-3)
