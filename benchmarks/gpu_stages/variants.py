"""Stages `precisions` and `optimizers`: compares precisions with fp32, and lean optimizers with AdamW."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from gpu_stages.box import Cases, Needs, expect, lacks
from gpu_stages.inputs import written_documents, written_model
from gpu_stages.recipe import furthest, train
from gpu_stages.training import beside_prediction

# Tolerances of the first steps' losses against fp32 and AdamW; quantised states make rounded updates.
PRECISION_TOLERANCE = {"bf16": 1e-2, "bf16_true": 3e-2, "fp16": 1e-2, "fp8": 5e-2}
OPTIMIZER_TOLERANCE = {8: 3e-2, 4: 6e-2, 32: 1e-4}
OPTIMIZERS = ("adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit")
ON_GPU_ONLY = ("paged_adamw_8bit", "paged_adamw_32bit", "adamw_cpu_offload")


def run(cases: Cases, name: str, **flags: object) -> dict[str, Any]:
    """Run some steps of full fine-tuning at a learning rate that changes the weights."""
    size, length, micro_batch = ("0.5B", 512, 4) if cases.on_gpu else ("tiny", 128, 2)
    return train(
        cases.folder / name,
        model_name_or_path=written_model(cases.folder, size, cases.device),
        dataset_name=written_documents(cases.folder, 400 if cases.on_gpu else 80),
        max_length=length,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=1,
        max_steps=6,
        learning_rate=1e-4 if cases.on_gpu else 1e-3,
        warmup_steps=0,
        lr_scheduler_type="constant",
        plan="check",
        **flags,
    )


def precisions(cases: Cases) -> None:
    """Compare the losses of each precision with fp32's."""
    reference = functools.cache(lambda: run(cases, "fp32", precision="fp32")["losses"])
    for name in PRECISION_TOLERANCE:
        is_emulated = name == "fp8" and not cases.on_gpu
        label = f"{name}, products emulated" if is_emulated else name
        cases.case(label, functools.partial(precision, cases, name, reference, is_emulated))
    if not cases.on_gpu:
        cases.case("fp8 kernels", functools.partial(lacks, "needs a GPU of compute capability 8.9 or above"))


def precision(cases: Cases, name: str, reference: Any, is_emulated: bool) -> str:
    """Check one precision."""
    from accel_scale.errors import ConfigError
    from accel_scale.launching.machine import detect_device

    device = detect_device(cases.device)
    if name == "fp8" and not device.supports_fp8 and not is_emulated:
        raise Needs("needs a GPU whose matrix units take fp8")
    if name.startswith("bf16") and not device.supports_bf16:
        raise Needs("needs a device that computes in bf16")
    extra = {"fp8_emulate": True} if is_emulated else {}
    try:
        summary = run(cases, name, precision=name, **extra)
    except ConfigError as refused:
        if "torchao" in refused.problem:
            raise Needs("needs torchao, which is not installed") from refused
        raise
    gap, allowed = furthest(summary["losses"], reference()), PRECISION_TOLERANCE[name]
    speed = f"{summary['tokens_per_second']:,.0f} tokens/s"
    return expect(gap <= allowed, f"losses {gap:.1e} from fp32's (allowed {allowed:g}), {speed}")


def optimizers(cases: Cases) -> None:
    """Compare losses and memory of each optimizer with AdamW with 32-bit states."""
    reference = functools.cache(lambda: run(cases, "adamw", optim="adamw_torch_fused")["losses"])
    for name in (*OPTIMIZERS, *ON_GPU_ONLY):
        cases.case(name, functools.partial(optimizer, cases, name, reference))
    cases.case("paged states on a full card", functools.partial(paged_on_a_full_card, cases))


def optimizer(cases: Cases, name: str, reference: Any) -> str:
    """Check one optimizer."""
    from accel_scale.facts.optimizer_specs import optimizer_spec

    if name in ON_GPU_ONLY and not cases.on_gpu:
        raise Needs("needs a GPU: on a CPU the states are in host memory already")
    spec = optimizer_spec(name)
    if spec.package and importlib.util.find_spec(spec.package) is None:
        raise Needs(f"needs {spec.package}: {spec.install}")
    summary = run(cases, name, optim=name)
    bits = spec.state_bits or 32
    gap, allowed = furthest(summary["losses"], reference()), OPTIMIZER_TOLERANCE[bits]
    memory, is_near = beside_prediction(summary["plan"])
    # torch's allocator does not see managed memory, which holds paged states, but the planner counts them.
    is_near = is_near or name in ON_GPU_ONLY
    return expect(gap <= allowed and is_near, f"{summary['optimizer']}: losses {gap:.1e} from AdamW's; {memory}")


def paged_on_a_full_card(cases: Cases) -> str:
    """Check that states that do not fit are evicted to host memory, and that the steps equal AdamW's."""
    if not cases.on_gpu:
        raise Needs("needs a GPU")
    from accel_scale.optimization.optimizers import create_optimizer

    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(16_384, 16_384, device="cuda"))  # 1 GiB, its states 2 GiB
    start = weight.detach().cpu()
    gradient = torch.randn_like(weight)
    optimizer = create_optimizer("paged_adamw_32bit", [weight], lr=1e-3, device_type="cuda")
    free, _ = torch.cuda.mem_get_info()
    room = 3 * 2**29  # 1.5 GiB: less than the states
    filler = torch.empty(max(0, free - room), dtype=torch.uint8, device="cuda")
    for _ in range(2):
        weight.grad = gradient
        optimizer.step()
    torch.cuda.synchronize()
    del filler
    found, known = weight.detach().cpu()[:64], torch.nn.Parameter(start[:64])
    torch_adamw = torch.optim.AdamW([known], lr=1e-3, weight_decay=optimizer.param_groups[0]["weight_decay"])
    for _ in range(2):
        known.grad = gradient[:64].cpu()
        torch_adamw.step()
    apart = float((found - known.detach()).abs().max())
    return expect(apart < 1e-5, f"two steps with 1.5 GiB free for 2 GiB of states: weights {apart:.1e} from AdamW's")
