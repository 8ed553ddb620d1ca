"""Stage `kernels`: describes this machine and the kernels that a training step really runs on it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_stages.box import Cases
from gpu_stages.inputs import llama_config

_SHOWN = 6
# Operations whose result the host must wait for.
_READ_BACK = ("aten::_local_scalar_dense", "aten::nonzero", "aten::unique_consecutive")
# Names of attention kernels in the profiler: torch's own, cuDNN's, FlashAttention's, Triton's.
_ATTENTION = ("flash", "fmha", "attention", "cudnn_sdpa", "efficient", "flex")


def kernels(cases: Cases) -> None:
    """Report the device, the resulting choices, and the operations of a step by time."""
    cases.case("device", device)
    cases.case("libraries", libraries)
    cases.case("attention: padded rows", lambda: chosen_attention(cases, packing=False))
    cases.case("attention: packed rows", lambda: chosen_attention(cases, packing=True))
    cases.case("operations of a step, by time", lambda: operations(cases))
    cases.case("points where the host waits, per packed micro-batch", lambda: waits(cases))


def device() -> str:
    """The device seen by torch, and the recipes' choices for it."""
    from accel_scale.launching.machine import detect_device, detect_machine

    found, machine = detect_device(), detect_machine()
    parts = [found.name or found.type, f"precision {found.default_precision}", f"{machine.num_cores} cores"]
    if found.capability is not None:
        parts.append(f"compute capability {found.capability[0]}.{found.capability[1]}")
    if found.memory_bytes is not None:
        parts.append(f"{found.memory_bytes / 2**30:.1f} GiB")
    if torch.version.cuda:
        parts.append(f"CUDA {torch.version.cuda}")
    return ", ".join(parts)


def libraries() -> str:
    """Libraries with kernels, and their versions."""
    from accel_scale.launching.machine import installed_packages

    named = ("torch", "bitsandbytes", "flash-attn", "flash-attn-3", "kernels", "liger-kernel", "torchao", "deepspeed")
    versions = installed_packages()
    return ", ".join(f"{name} {versions.get(name, 'not installed')}" for name in named)


def chosen_attention(cases: Cases, *, packing: bool) -> str:
    """The attention name that the recipe would pass to transformers, for its training precision."""
    from accel_scale.launching.machine import detect_device
    from accel_scale.modeling.attention import resolve_attention

    found, dtype = detect_device(cases.device), precision(cases).compute_dtype
    config = llama_config("0.5B" if cases.on_gpu else "tiny")
    return resolve_attention(None, device=found, dtype=dtype, packing=packing, model_config=config)


def step(cases: Cases) -> Callable[[], Any]:
    """Forward and backward of a model on plain rows, as trained by the recipe."""
    from accel_scale.launching.machine import detect_device
    from accel_scale.planning.models.training_setup import TrainingSetup
    from accel_scale.verifying.trial_step import TrialRun, build_trial, one_process

    precision = detect_device(cases.device).default_precision
    setup = TrainingSetup(precision=precision, micro_batch_size=2, sequence_length=512 if cases.on_gpu else 64)
    setup = one_process(setup)
    model = build_trial(llama_config("0.5B" if cases.on_gpu else "tiny"), setup, cases.device)
    run = TrialRun(model, setup, cases.device)
    run.passes()
    run.update()  # kernels are now chosen, compiled and loaded
    return run.passes


def operations(cases: Cases) -> str:
    """The slowest operations of a profiled pass, and its attention kernels."""
    run = step(cases)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cases.on_gpu else [])]
    with profile(activities=activities) as profiler:
        run()
        if cases.on_gpu:
            torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA if cases.on_gpu else torch.autograd.DeviceType.CPU
    name = "self_device_time_total" if cases.on_gpu else "self_cpu_time_total"
    events = [event for event in profiler.key_averages() if event.device_type == on_device]
    events.sort(key=lambda event: -getattr(event, name))
    total = sum(getattr(event, name) for event in events) or 1.0
    longest = ", ".join(f"{short(e.key)} {getattr(e, name) / total:.0%}" for e in events[:_SHOWN])
    attending = [short(e.key) for e in events if any(word in e.key.lower() for word in _ATTENTION)]
    return f"{longest}; attention: {', '.join(attending[:4]) or 'none of its own'}"


def short(name: str) -> str:
    """A kernel's name without its template arguments."""
    return name.replace("void ", "").partition("<")[0][:60]


def waits(cases: Cases) -> str:
    """Host waits in forward and backward of a packed micro-batch: by CUDA's debug mode, or on a CPU by operation."""
    from accel_scale.modeling.packing.row_facts import ROW_FACTS, RowFacts
    from accel_scale.optimization.fast_loss import add_fast_lm_head
    from accel_scale.start_check.steps import recipe_loss
    from gpu_stages.numerics import batch, build, config_with, to_device

    model = build(config_with(None, cases.device), chosen_attention(cases, packing=True), cases.device)
    add_fast_lm_head(model)
    rows, half = batch(), precision(cases)
    inputs = to_device({**rows, ROW_FACTS: RowFacts(rows)}, cases.device)  # as sent by the recipes' loaders

    def run() -> None:
        with half.autocast(cases.device):
            loss = recipe_loss(model, inputs)
        loss.backward()

    run()  # kernels are now chosen, compiled and loaded
    if not cases.on_gpu:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            run()
        counted = {e.key: e.count for e in profiler.key_averages() if e.key in _READ_BACK}
        listed = ", ".join(f"{count} {name.removeprefix('aten::')}" for name, count in counted.items())
        return f"{sum(counted.values())} operations that would wait for a GPU ({listed or 'none'})"
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = [f"{w.filename.rpartition('/')[2]}:{w.lineno}" for w in caught if "synchronizing" in str(w.message)]
    return f"{len(places)}" + (f" ({', '.join(dict.fromkeys(places))})" if places else "")


def precision(cases: Cases) -> Any:
    """The precision that the recipes would use here."""
    from accel_scale.launching.machine import detect_device
    from accel_scale.modeling.precision import precision_named

    return precision_named(detect_device(cases.device).default_precision)
