"""Parameters and peak memory of a step on ranks that share a model, one JSON line for each rank and case.

Run by test_parallel_memory.py under torchrun: ``parallel_memory_run.py OUTPUT CASE …``, a case being the sizes of a
`ParallelLayout` and how it is trained, such as ``pp=2,micro_batches=4,precision=bf16``.
"""

from __future__ import annotations

import gc
import json
import sys
import types
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from accel_scale.ending.leaving import leave_process_group
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.modeling.packed_attention import register_packed_attention
from accel_scale.optimization.fast_loss import add_fast_lm_head, language_model_loss
from accel_scale.parallel.layout import DIMENSIONS, ParallelLayout
from accel_scale.parallel.model_parallel import ModelParallel, parallelize
from accel_scale.parallel.pipelines.pipeline import PipelineSettings
from accel_scale.verifying.measured_memory import StorageTracker, resident_tensors

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
}
ROWS, LENGTH = 2, 256


def parse(case: str) -> dict[str, Any]:
    """Parse ``tp=2,checkpointing=full`` into a dictionary."""
    pairs = (item.split("=") for item in case.split(","))
    return {name: int(value) if value.isdecimal() else value for name, value in pairs}


def micro_batch(index: int) -> dict[str, torch.Tensor]:
    """Rows with one document each."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, SHAPE["vocab_size"], (ROWS, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand(ROWS, -1).contiguous()
    return {"input_ids": tokens, "labels": tokens.clone(), "position_ids": positions}


def shared_model(settings: dict[str, Any]) -> tuple[ModelParallel, Any]:
    """A model over all ranks, and the context of its forward passes."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING["llama"](**{**SHAPE, "tie_word_embeddings": bool(settings.get("tied"))})
    config._attn_implementation = register_packed_attention()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    add_fast_lm_head(model)
    apply_checkpointing(model, CheckpointingPolicy.parse(settings.get("checkpointing", "none")))
    is_16_bit = settings.get("precision") == "bf16"

    def autocast() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16) if is_16_bit else nullcontext()

    accelerator = types.SimpleNamespace(device=torch.device("cpu"), autocast=autocast)
    schedule = settings.get("schedule", "1f1b")
    shared = parallelize(
        accelerator,
        model,
        ParallelLayout(**{name: settings[name] for name in DIMENSIONS if name in settings}),
        reshard_after_forward=settings.get("reshard", "true") == "true",
        compute_dtype=torch.bfloat16 if is_16_bit else None,
        pipeline=PipelineSettings(schedule, settings.get("stages_per_rank", 1)) if settings.get("pp", 1) > 1 else None,
        num_micro_batches=settings.get("micro_batches", 1),
        row_length=LENGTH,
    )
    return shared, autocast


def passes(shared: ModelParallel, autocast: Any, num_micro_batches: int, tracker: Any = None) -> None:
    """Forward and backward passes of one step."""
    batches = [shared.local(micro_batch(index)) for index in range(num_micro_batches)]
    if shared.pipeline is not None:
        shared.pipeline.forward_backward(batches, 1000)
        return
    for index, batch in enumerate(batches):
        shared.sync_gradients(index + 1 == len(batches))
        with autocast():
            loss = language_model_loss(shared.parts[0], batch, 1000)
        loss.backward()
        if tracker is not None:
            tracker.reset_mod_stats()


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Parameters of this rank, and the peak bytes of a step that starts with the optimizer's states in place."""
    shared, autocast = shared_model(settings)
    parameters = [parameter for part in shared.parts for parameter in part.parameters()]
    held = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=False)
    num = settings.get("micro_batches", 1)
    passes(shared, autocast, num)
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    found = {"parameters": sum(tensor.numel() for tensor in held)}
    # FSDP resizes storages without going through the dispatcher; torch's tracker accounts for that.
    if shared.layout.gradient_ranks > 1:
        tracker: Any = FSDPMemTracker(shared.parts[0], optimizer)
        with tracker:
            passes(shared, autocast, num, tracker)
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        return {**found, "peak": snapshot["Total"], "parts": {str(k): v for k, v in snapshot.items()}}
    tracker = StorageTracker()
    for part in shared.parts:
        tracker.adopt(resident_tensors(part, optimizer))
    resident = tracker.live_bytes
    with tracker:
        passes(shared, autocast, num)
    return {**found, "peak": tracker.peak_bytes, "resident": resident, "live": tracker.live_bytes}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, list[Any]] = {}
    for case in sys.argv[2:]:
        mine = measure(parse(case))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        found[case] = everyone
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    leave_process_group()
