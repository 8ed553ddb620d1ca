"""Two processes: MLPs in tiles under DDP, FSDP2 and ZeRO-3, compared with the same MLPs without tiles.

Run by test_long_rows.py; prints one JSON line per case on rank 0: how far gradients and weights after a step are from
those without tiles, and how many collectives of each kind the step took.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from accel_scale.ending.leaving import leave_process_group
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing

TILES = 5
ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    # Every weight is partitioned and soon released, as large weights are.
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    },
}


class Counted(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def tiny_model(method: str) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=3, **sizes)).train()
    if method == "lora":
        model = get_peft_model(
            model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")
        ).train()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def batch(rank: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (1, 32 * TILES), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids}


def policy_of(text: str, in_tiles: bool) -> CheckpointingPolicy:
    return CheckpointingPolicy(text, in_tiles=in_tiles)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


@contextmanager
def counted() -> Iterator[Counted]:
    dist.barrier()
    with Counted() as counts:
        yield counts


def torch_step(wrap, method: str, text: str, in_tiles: bool):
    model = tiny_model(method)
    apply_checkpointing(model, policy_of(text, in_tiles))
    model = wrap(model)
    with counted() as counts:
        model(**batch(dist.get_rank())).loss.backward()
    return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}, counts.counts


def zero3_step(method: str, text: str, in_tiles: bool):
    import deepspeed

    model = tiny_model(method)
    apply_checkpointing(model, policy_of(text, in_tiles), use_reentrant=method == "lora" and text != "none")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(trained, lr=1.0), config=ZERO3)
    for _ in range(2):  # DeepSpeed records the order of modules in its first step
        with counted() as counts:
            engine.backward(engine(**batch(dist.get_rank())).loss)
            engine.step()
    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        weights = {n: p.detach().clone() for n, p in parameters.items() if p.requires_grad}
    engine.destroy()
    return weights, counts.counts


def compare(case: str, step, *settings: str) -> None:
    expected, plain = step(*settings, False)
    found, tiled = step(*settings, True)
    assert found.keys() == expected.keys()
    worst = max((found[name] - value).abs().max().item() for name, value in expected.items())
    if dist.get_rank() == 0:
        line = {"case": case, "difference": worst, "tensors": len(found), "plain": plain, "tiled": tiled}
        print(json.dumps(line), flush=True)


def main() -> None:
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    telling_transformers = HfDeepSpeedConfig(ZERO3)
    for method, text in (("full", "full"), ("lora", "offload")):
        compare(f"zero3, {method}, {text}", zero3_step, method, text)
    del telling_transformers
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def fsdp2(model):
        for module in list(model.modules()):
            if type(module).__name__ == "LlamaDecoderLayer":
                fully_shard(module, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    for name, wrap in {"ddp": DistributedDataParallel, "fsdp2": fsdp2}.items():
        for method, text in (("full", "none"), ("lora", "offload")):
            compare(f"{name}, {method}, {text}", lambda *s: torch_step(wrap, *s), method, text)  # noqa: B023
    leave_process_group()


if __name__ == "__main__":
    main()
