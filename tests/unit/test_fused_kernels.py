"""Fused kernels: when they are chosen, what prevents them, and Liger's own in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from accel_scale.checks.recipe_rules import fused_kernels as doctors_rule
from accel_scale.checks.run_settings import RunSettings
from accel_scale.errors import ConfigError
from accel_scale.facts.device import CPU, Device
from accel_scale.facts.names import FUSED_PARTS
from accel_scale.flags.parsing import parse_flags
from accel_scale.launching.environment import LaunchEnvironment
from accel_scale.launching.strategy import LaunchStrategy
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy
from accel_scale.modeling.fused.liger import fuse_agreed
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.planning.tape.activations import step_bytes
from accel_scale.settings.planned_choice import resolve_planned
from accel_scale.settings.planned_setup import setup_of
from accel_scale.settings.resolved import LaunchFacts, Resolved
from accel_scale.start_check import fused
from tests.unit.test_planned import FLAG_CLASSES

LAUNCH = LaunchEnvironment(LaunchStrategy("single"), None, 1, 1, 0, 0)
CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
AGREED = ("RMSNorm", "RoPE", "SwiGLU")


def resolved(flags: str = "", *, device: str = "cuda") -> Resolved:
    argv = ["--model_name_or_path", "x", "--dataset_name", "x", *flags.split()]
    facts = LaunchFacts(device=Device(device) if device != "cpu" else CPU)
    return resolve_planned(parse_flags(FLAG_CLASSES, argv, program="sft.py"), facts, LAUNCH)


@pytest.fixture
def settle(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Settles a run's flags on a machine with a GPU and Liger, whose check returns `answer`."""

    def run(flags: str, answer: Any = (AGREED, None), *, installed: bool = True, **where: Any) -> Any:
        monkeypatch.setattr(fused, "is_installed", lambda: installed)
        monkeypatch.setattr(fused, "fused_parts", lambda *args, **kwargs: answer)
        settings, lines = resolved(flags, device=where.pop("device", "cuda")), []
        fused.settle_fused_kernels(settings, CONFIG, lines.append, device=torch.device("cpu"), **where)
        return settings, lines

    return run


def test_they_are_used_without_being_asked_where_the_twin_agrees(settle: Any) -> None:
    settings, lines = settle("--checkpointing_policy none")
    assert (settings.fused_label, lines) == ("Liger's RMSNorm, RoPE, SwiGLU", [])
    assert (settings.values["fused_kernels"], settings.fused) == ("on", AGREED)
    assert setup_of(settings, LAUNCH, "sdpa").fused == AGREED
    settings.set_checkpointing("selective", "planned")  # keeps queries and keys, which Liger's rotation overwrites
    assert settings.fused_label == "Liger's RMSNorm, SwiGLU"
    settings, _ = settle("--use_liger_kernel true")
    assert settings.fused == AGREED
    assert "use_liger_kernel" not in settings.values  # TRL would patch the model again


@pytest.mark.parametrize(
    ("flags", "why", "where"),
    [
        ("", "not installed", {"installed": False}),
        ("--torch_compile true", "torch.compile fuses", {}),
        ("--long_rows", "over slices of the rows", {}),
        ("", "tensor parallelism divides", {"divides_tensors": True}),
    ],
)
def test_what_rules_them_out_is_silent_by_default_and_refused_where_asked_for(
    settle: Any, flags: str, why: str, where: dict[str, Any]
) -> None:
    settings, lines = settle(flags, **where)
    assert (settings.values["fused_kernels"], settings.fused, lines) == ("off", (), [])
    with pytest.raises(ConfigError, match=f"--fused_kernels: fused kernels cannot be used: .*{why}.* auto, or off"):
        settle(f"{flags} --fused_kernels on", **where)


def test_a_twin_that_disagrees_means_the_models_own_layers(settle: Any) -> None:
    settings, (line,) = settle("", ((), "Liger has no patch for llama"))
    assert line == "fused kernels: none, the model's own layers are used: Liger has no patch for llama"
    assert settings.fused == ()
    with pytest.raises(ConfigError, match="cannot be used: Liger has no patch for llama"):
        settle("--fused_kernels on", ((), "Liger has no patch for llama"))
    assert settle("--fused_kernels off")[1] == settle("--use_liger_kernel false")[1] == []


def test_a_run_that_goes_on_stays_without_them(settle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "chosen_before", lambda *args: "off")
    settings, (line,) = settle("")
    assert (settings.fused, "the run that goes on is without them" in line) == ((), True)
    assert settle("--fused_kernels on")[0].fused == AGREED


def test_what_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(ConfigError, match="contradict"):
        resolved("--fused_kernels off --use_liger_kernel true")
    with pytest.raises(ConfigError, match="maybe"):
        resolved("--fused_kernels maybe")


def test_liger_is_not_replaced_by_others_where_it_was_named(settle: Any) -> None:
    with pytest.raises(ConfigError, match=r"--use_liger_kernel: fused kernels cannot be used: .* need a CUDA device"):
        settle("--use_liger_kernel true", device="cpu")
    assert settle("--fused_kernels on", device="cpu")[0].fused_label == "RMSNorm, RoPE, SwiGLU"


def test_the_doctor_says_so_before_the_launch() -> None:
    parallel = SimpleNamespace(tensor_parallel_size=1)

    def finding(run: RunSettings, device: Device, *packages: str) -> Any:
        machine = SimpleNamespace(has=lambda name: name in packages)
        return doctors_rule(SimpleNamespace(run=run, device=device, machine=machine, parallel=parallel))  # type: ignore[arg-type]

    asked = RunSettings(fused_kernels="on")
    assert "not installed" in finding(asked, Device("cuda")).problem
    assert "need a CUDA device" in finding(asked, Device("mps"), "liger-kernel").problem
    assert finding(asked, CPU) is None
    assert finding(RunSettings(use_liger_kernel=True), CPU, "liger-kernel").place == "--use_liger_kernel"
    assert finding(asked, Device("cuda"), "liger-kernel") is None
    assert finding(RunSettings(), CPU) is None
    assert finding(dataclasses.replace(asked, long_rows=True), Device("cuda"), "liger-kernel") is not None


@pytest.mark.parametrize(
    ("family", "parts"), [("Qwen/Qwen3-0.6B", AGREED), ("google/gemma-2-2b", ("RMSNorm", "GEGLU"))]
)
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_the_planner_counts_fewer_activations(family: str, parts: tuple[str, ...], policy: str) -> None:
    facts = load_model_facts(family)
    own = TrainingSetup(checkpointing=policy, attention="eager" if "gemma" in family else "sdpa")
    with_kernels = step_bytes(facts, dataclasses.replace(own, fused=parts))
    without = step_bytes(facts, own)
    assert with_kernels.peak_bytes <= without.peak_bytes
    if policy == "none":
        # A good part of a layer's inputs to norms, products and the MLP's middle is fp32 copies and products.
        assert with_kernels.saved_bytes < 0.85 * without.saved_bytes
    with pytest.raises(ConfigError):
        dataclasses.replace(own, fused=("softmax",))


def fake_liger(monkeypatch: pytest.MonkeyPatch, factor: float) -> list[str]:
    """Replaces Liger by a package whose patch multiplies LLaMA's MLPs by `factor`; returns the calls it gets."""
    told: list[str] = []

    class LigerSwiGLUMLP:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return factor * self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    LigerSwiGLUMLP.forward.__module__ = "liger_kernel.transformers.swiglu"
    LigerSwiGLUMLP.forward.__qualname__ = "LigerSwiGLUMLP.forward"
    rotate = modeling_llama.apply_rotary_pos_emb

    def liger_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        return rotate(*args, **kwargs)

    def patch(model: Any, rope: bool = True, cross_entropy: bool = True) -> None:
        told.append(f"rope {rope}, cross_entropy {cross_entropy}")
        if rope:
            modeling_llama.apply_rotary_pos_emb = liger_rotary_pos_emb
        modeling_llama.LlamaMLP = LigerSwiGLUMLP
        for layer in model.model.layers:
            layer.mlp.forward = LigerSwiGLUMLP.forward.__get__(layer.mlp)

    module = ModuleType("liger_kernel.transformers.monkey_patch")
    module.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": patch}  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return told


def test_another_model_of_the_family_rotates_on_the_cpu_with_its_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_liger(monkeypatch, 1.0)
    own = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", own)  # restored afterwards
    model = modeling_llama.LlamaForCausalLM(CONFIG)
    fuse_agreed(AGREED, model, CheckpointingPolicy("none"), device_type="cuda")
    called: list[str] = []
    profiled = {own.__code__: "own"}
    sys.setprofile(lambda frame, event, arg: called.append(profiled.get(frame.f_code, frame.f_code.co_name)))
    try:
        for device in ("cpu", "meta"):
            query, cos = torch.ones(1, 2, 3, 4, device=device), torch.ones(1, 3, 4, device=device)
            modeling_llama.apply_rotary_pos_emb(query, query, cos, cos)
            called.append(device)
    finally:
        sys.setprofile(None)
    on_cpu, on_device = called[: called.index("cpu")], called[called.index("cpu") :]
    assert "own" in on_cpu
    assert "liger_rotary_pos_emb" not in on_cpu
    assert "liger_rotary_pos_emb" in on_device


def test_the_twin_tells_kernels_that_agree_from_those_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(vars(modeling_llama))
    told = fake_liger(monkeypatch, 1.0)
    device = torch.device("cpu")
    assert fused.fused_parts(CONFIG, device=device) == (("RoPE", "SwiGLU"), None)
    assert told == [f"rope {rope}, cross_entropy False" for rope in (True, True, False)]
    fake_liger(monkeypatch, 1.01)
    parts, why = fused.fused_parts(CONFIG, device=device)
    assert parts == ()
    assert str(why).startswith("Liger's kernels do not agree with the model's own layers: loss ")
    other = type(CONFIG).from_dict({**CONFIG.to_dict(), "model_type": "llama"})
    monkeypatch.setattr(sys.modules["liger_kernel.transformers.monkey_patch"], "MODEL_TYPE_TO_APPLY_LIGER_FN", {})
    assert fused.fused_parts(other, device=device) == ((), "Liger has no patch for llama")
    assert {name: value for name, value in vars(modeling_llama).items() if before.get(name) is not value} == {}


@pytest.mark.slow
def test_ligers_own_kernels_agree_in_tritons_interpreter() -> None:
    """The real kernels on the CPU, in a separate process: the interpreter is chosen when Triton is imported."""
    for name in ("liger_kernel", "triton"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'accel-scale[fused]' triton")
    script = Path(__file__).with_name("interpreted_liger.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert found["llama"] == found["qwen3"] == "('RMSNorm', 'RoPE', 'SwiGLU') None"
    assert found["gemma2"] == "('RMSNorm', 'RoPE', 'GEGLU') None"
    assert found["opt"] == "() Liger has no patch for opt"
    assert set(AGREED) < set(FUSED_PARTS)
