"""One rank of a run that measures FSDP2's memory: ``fsdp_memory_run.py OUTPUT`` under torchrun."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from accel_scale.ending.leaving import leave_process_group
from accel_scale.modeling.fsdp2_preparation import gather_ahead

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
}
# Its first layer is of another kind than the rest: it is dense.
WITH_EXPERTS = {
    **SHAPE,
    "head_dim": 32,
    "num_hidden_layers": 10,
    "vocab_size": 512,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
}
SHAPES = {"llama": SHAPE, "glm4_moe": WITH_EXPERTS}
AHEAD = "full, gathered ahead"
# name: reshard after forward, parameter dtype, micro-batches per step, whether each of them reduces its gradients
CASES = {
    "full": (True, None, 1, False),
    AHEAD: (True, None, 1, False),
    "grad_op": (False, None, 1, False),
    "full bf16": (True, torch.bfloat16, 1, False),
    "accumulated": (True, None, 3, False),
    "accumulated bf16": (True, torch.bfloat16, 3, False),
    "accumulated, each reduced": (True, None, 3, True),
    "accumulated bf16, each reduced": (True, torch.bfloat16, 3, True),
    "glm4_moe": (True, None, 1, False),
    "glm4_moe, each reduced": (True, None, 3, True),
}


def peak_bytes(
    reshard: bool,
    dtype: torch.dtype | None,
    micro_batches: int,
    reduce_each: bool,
    *,
    ahead: bool,
    model_type: str = "llama",
) -> int:
    """The peak of the second step over all of the tracker's categories."""
    config = AutoConfig.for_model(model_type, **SHAPES[model_type])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    settings = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), "reshard_after_forward": reshard}
    if dtype is not None:
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype)
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    if ahead:
        gather_ahead(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    tokens = torch.randint(0, config.vocab_size, (1, 64))
    peak = 0
    for _ in range(2):
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((tokens,))
        with tracker:
            for index in range(micro_batches):
                model.set_requires_gradient_sync(reduce_each or index == micro_batches - 1)
                model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
                tracker.reset_mod_stats()  # the tracker can follow only one pass of each module
            optimizer.step()
            optimizer.zero_grad()
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        peak = snapshot["Total"]
    return peak


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name, case in CASES.items():
        model_type = name.partition(",")[0] if name.startswith("glm4_moe") else "llama"
        found[name] = peak_bytes(*case, ahead=name == AHEAD, model_type=model_type)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    leave_process_group()
