"""One rank of a run that measures DeepSpeed's buffers: ``zero_buffers_run.py JSON`` under torchrun."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoModelForCausalLM, LlamaConfig

from accel_scale.ending.leaving import leave_process_group
from accel_scale.measuring.storages import StorageTracker


def beside(all_reduce: Callable[..., None]) -> Callable[..., None]:
    """`all_reduce` on a copy that the tracker does not see.

    gloo's thread frees memory at its own time, after the caller has gone on. While the thread waits for a CPU, the
    copy in which DeepSpeed reduced a bucket would be counted in addition to the copy of the next bucket.
    DeepSpeed keeps one such copy: on CPUs it reduces one bucket after the other, even with `overlap_comm`.
    """

    def reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            copy = tensor.clone()
            all_reduce(copy, *args, **kwargs)
            tensor.copy_(copy)

    return reduce


def measured(shape: dict[str, int], stage: int, keys: dict[str, Any]) -> dict[str, int]:
    """Bytes between steps, and the peaks that the passes and the optimizer step of the third step add."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **keys},
        "gradient_clipping": 1.0,
    }
    tracker = StorageTracker()
    with tracker:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape, attn_implementation="sdpa"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        tokens = torch.randint(0, shape["vocab_size"], (1, 64))
        for _ in range(3):
            rest = tracker.live_bytes
            tracker.reset_peak()
            engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
            passes = tracker.peak_bytes
            tracker.reset_peak()
            engine.step()
    return {"rest": rest, "passes": passes - rest, "step": tracker.peak_bytes - rest}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.all_reduce = beside(dist.all_reduce)
    deepspeed.init_distributed("gloo", verbose=False)
    asked = json.loads(sys.argv[1])
    for name, (stage, keys) in asked["cases"].items():
        found = measured(asked["shape"], stage, keys)
        if dist.get_rank() == 0:
            print(json.dumps({"case": name, **found}), flush=True)
    leave_process_group()
