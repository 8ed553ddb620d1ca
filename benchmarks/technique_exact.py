"""`techniques.py`: effects of techniques on numbers: gradients with and without them, and bytes that they keep."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from technique_arithmetic import OPTIMIZERS
from technique_cpu import SETUP, embedded_rows, start
from technique_rows import Stage, Values, Work, ladder

NUM_ROWS, LENGTH = 16, 128
SCALE = 65536.0
ATTENTION_LENGTHS = (512, 2048)
HEADS, HEAD_SIZE = 4, 64
NUM_IMAGES, IMAGE_SIZE, NUM_CLASSES, CNN_STEPS = 64, 32, 10, 60


def gradients(model: Any) -> Any:
    """All of a model's gradients as one vector; the gradients are reset."""
    import torch

    parts = [weight.grad.flatten().double() for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    return torch.cat(parts)


def difference(a: Any, b: Any) -> float:
    """Relative difference ‖A − B‖ ÷ ‖B‖."""
    return float((a - b).norm() / b.norm())


def underflow() -> dict[str, Values]:
    """Share of a pretrained model's gradients that become zero in 16 bits."""
    import torch

    loop = start("loss", ladder(SETUP)["loss"])
    loop.loss(embedded_rows(4, LENGTH)).backward()
    found = gradients(loop.model).float()
    found = found[found != 0]

    def lost(dtype: torch.dtype, scale: float = 1.0) -> float:
        return float(((found * scale).to(dtype) == 0).float().mean())

    halves = {"fp16": lost(torch.float16), "fp16_scaled": lost(torch.float16, SCALE)}
    return {"exact/underflow": {**halves, "bf16": lost(torch.bfloat16)}}


def accumulation() -> dict[str, Values]:
    """Gradients of sixteen rows of different lengths, at once and as 4 × 4."""
    import torch

    from accel_scale.optimization.fast_loss import language_model_loss

    model = start("loss", ladder(SETUP)["loss"]).model
    rows = embedded_rows(NUM_ROWS, LENGTH)
    lengths = torch.linspace(8, LENGTH, NUM_ROWS).long()
    labels = rows.masked_fill(torch.arange(LENGTH)[None] >= lengths[:, None], -100)

    def gradient(size: int, items: Callable[[Any], float]) -> Any:
        for ids, wanted in zip(rows.split(size), labels.split(size), strict=True):
            language_model_loss(model, {"input_ids": ids, "labels": wanted}, items(wanted)).backward()
        return gradients(model)

    def predicted(wanted: Any) -> int:
        return int((wanted[:, 1:] != -100).sum())

    whole = gradient(NUM_ROWS, predicted)
    by_tokens = gradient(4, lambda wanted: predicted(labels))
    by_batches = gradient(4, lambda wanted: 4 * predicted(wanted))
    figures = {"tokens": difference(by_tokens, whole), "batches": difference(by_batches, whole)}
    return {"exact/accumulation": figures}


def batch_norm() -> dict[str, Values]:
    """Gradients of a small convolutional network on 256 random images, at once and as 4 × 64."""
    import torch
    from torch import nn

    def off(norm: Callable[[], nn.Module]) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), norm(), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)
        )
        images, labels = torch.randn(256, 3, 12, 12), torch.randint(10, (256,))
        nn.functional.cross_entropy(model(images), labels).backward()
        whole = gradients(model)
        for part, wanted in zip(images.split(64), labels.split(64), strict=True):
            (nn.functional.cross_entropy(model(part), wanted) / 4).backward()
        return difference(gradients(model), whole)

    return {
        "exact/batch_norm": {
            "batch_norm": off(lambda: nn.BatchNorm2d(8)),
            "group_norm": off(lambda: nn.GroupNorm(4, 8)),
        }
    }


def convolutions() -> dict[str, Values]:
    """Bytes, CPU time and accuracy of a convolutional network trained in fp32 and in bf16 mixed precision."""
    import torch
    from torch import nn

    from accel_scale.verifying.measured_memory import StorageTracker, resident_tensors

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    noise = torch.Generator().manual_seed(0)
    patterns = torch.randn(NUM_CLASSES, 3, IMAGE_SIZE, IMAGE_SIZE, generator=noise)

    def images(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images of each class's pattern with noise of three times its size."""
        labels = torch.randint(NUM_CLASSES, (number,), generator=noise)
        return patterns[labels] + 3 * torch.randn(number, *patterns.shape[1:], generator=noise), labels

    torch.set_num_threads(1)
    batches, unseen = [images(NUM_IMAGES) for _ in range(CNN_STEPS)], images(512)
    seconds: dict[str, list[float]] = {"fp32": [], "bf16": []}
    figures: dict[str, float] = {}
    loops = {}
    for name in seconds:
        torch.manual_seed(0)
        head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, NUM_CLASSES)]
        model = nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), *head)
        loops[name] = (model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step(name: str, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        model, optimizer = loops[name]
        started = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "bf16"):
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - started

    for batch in batches:
        for name, times in seconds.items():
            times.append(step(name, batch))
    for name, (model, optimizer) in loops.items():
        tracker = StorageTracker()
        with tracker:
            tracker.adopt(resident_tensors(model, optimizer))
            step(name, batches[0])
        figures[f"{name}_bytes"] = float(tracker.peak_bytes)
        with torch.no_grad():
            figures[f"{name}_accuracy"] = float((model.eval()(unseen[0]).argmax(-1) == unseen[1]).float().mean())
    ratios = [a / b for a, b in zip(seconds["fp32"][1:], seconds["bf16"][1:], strict=True)]
    saved = 1 - figures["bf16_bytes"] / figures["fp32_bytes"]
    return {"exact/convolutions": {**figures, "saved": saved, "speed": statistics.median(ratios)}}


def checkpointing() -> dict[str, Values]:
    """Compare gradients under every checkpointing policy with those without one."""
    import torch

    from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing

    loop = start("loss", ladder(SETUP)["loss"])
    rows = embedded_rows(4, LENGTH)
    loop.loss(rows).backward()
    plain = gradients(loop.model)
    worst = 0.0
    for policy in ("full", "every_2", "every_3", "selective", "offload"):
        apply_checkpointing(loop.model, CheckpointingPolicy.parse(policy))
        loop.loss(rows).backward()
        worst = max(worst, float((gradients(loop.model) - plain).abs().max()))
    return {"exact/checkpointing": {"difference": worst, "largest": float(torch.as_tensor(plain).abs().max())}}


def optimizer_states() -> dict[str, Values]:
    """Bytes per parameter of real optimizers' states after a step, for a matrix of a million weights."""
    import torch
    from torch.utils._pytree import tree_leaves

    from accel_scale.optimization.optimizers import create_optimizer

    figures = {}
    for name, optim in OPTIMIZERS.items():
        if name == "paged":  # needs CUDA's unified memory
            continue
        weight = torch.nn.Parameter(torch.randn(1024, 1024))
        weight.grad = torch.randn_like(weight)
        optimizer = create_optimizer(optim, [weight], lr=1e-3)
        optimizer.step()
        states = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor)]
        # Small tensors are left out: code books of quantised states belong to the optimizer, not to the parameter.
        figures[name] = sum(_stored_bytes(leaf) for leaf in states if leaf.numel() > 256) / weight.numel()
    return {"exact/optimizer_states": figures}


def _stored_bytes(tensor: Any) -> int:
    """Bytes of a tensor, or of the inner tensors of a quantised one."""
    parts = getattr(tensor, "__tensor_flatten__", None)
    if parts is None:
        return tensor.numel() * tensor.element_size()
    return sum(_stored_bytes(getattr(tensor, name)) for name in parts()[0])


def epochs() -> dict[str, Values]:
    """Compare the rows in two epochs of a loader prepared by Accelerate."""
    import torch
    from accelerate import Accelerator

    loader = Accelerator(cpu=True).prepare_data_loader(
        torch.utils.data.DataLoader(torch.arange(1000), batch_size=10, shuffle=True)
    )
    orders = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        orders.append(torch.cat([part.cpu() for part in loader]))
    first, second = orders
    return {
        "exact/epochs": {
            "same": float((first == second).float().mean()),
            "seen": len(set(second.tolist()) & set(first.tolist())) / 1000,
        }
    }


def attention() -> dict[str, Values]:
    """Compare transformers' unfused and fused attention: outputs, saved bytes, CPU time of forward and backward."""
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama.modeling_llama import eager_attention_forward

    from accel_scale.verifying.measured_memory import StorageTracker

    class Module(torch.nn.Module):
        num_key_value_groups, is_causal = 1, True

    module = Module().train()
    rows: dict[str, Values] = {}
    worst = 0.0
    for length in ATTENTION_LENGTHS:
        torch.manual_seed(0)
        query, key, value = (torch.randn(1, HEADS, length, HEAD_SIZE).requires_grad_() for _ in range(3))
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        kept, seconds, outputs = {}, {}, {}
        for name, forward, given in (
            ("eager", eager_attention_forward, mask),
            ("fused", sdpa_attention_forward, None),
        ):

            def run(forward: Any = forward, given: Any = given, inputs: Any = (query, key, value)) -> Any:
                return forward(module, *inputs, given, scaling=HEAD_SIZE**-0.5, dropout=0.0)[0]

            tracker = StorageTracker()
            with tracker:
                output = run()
                kept[name] = float(tracker.live_bytes)
            outputs[name] = output.detach()
            seconds[name] = _cpu_seconds(lambda run=run: run().sum().backward())
        worst = max(worst, float((outputs["eager"] - outputs["fused"]).abs().max()))
        rows[f"attention/{length}"] = {**kept, "speed": seconds["eager"] / seconds["fused"]}
    return {**rows, "attention/exact": {"difference": worst}}


def _cpu_seconds(run: Callable[[], object]) -> float:
    run()
    found = []
    for _ in range(5):
        started = time.process_time()
        run()
        found.append(time.process_time() - started)
    return statistics.median(found)


STAGE = Stage(
    "exact",
    "measured",
    f"The embedded model on {NUM_ROWS} rows of {LENGTH} tokens in fp32, small convolutional networks on random "
    f"images, attention with {HEADS} heads of {HEAD_SIZE}; one process.",
    (
        Work(("exact/underflow",), underflow),
        Work(("exact/accumulation",), accumulation),
        Work(("exact/batch_norm",), batch_norm),
        Work(("exact/convolutions",), convolutions),
        Work(("exact/checkpointing",), checkpointing),
        Work(("exact/epochs",), epochs),
        Work((*(f"attention/{length}" for length in ATTENTION_LENGTHS), "attention/exact"), attention),
        Work(("exact/optimizer_states",), optimizer_states),
    ),
)
