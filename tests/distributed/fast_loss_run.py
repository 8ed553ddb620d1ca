"""Two processes: gradients of the lean loss under FSDP2 and DDP, compared with one process on all tokens.

Run by test_fast_loss_sharded.py; prints one JSON line per case on rank 0.
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from accel_scale.ending.leaving import leave_process_group
from accel_scale.modeling.packed_attention import register_packed_attention
from accel_scale.optimization.fast_loss import add_fast_lm_head

VOCAB = 64


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config._attn_implementation = register_packed_attention()
    model = LlamaForCausalLM(config).train()
    add_fast_lm_head(model)
    return model


def packed_batch(rank: int) -> dict[str, torch.Tensor]:
    """A packed row; the number of labelled tokens differs between ranks."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, VOCAB, (1, 48), generator=generator)
    labels = ids.clone()
    labels[:, : 5 + 30 * rank] = -100
    position_ids = torch.cat([torch.arange(20), torch.arange(28)])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": position_ids}


def gradient(model, batches, *, num_items: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    for batch in batches:
        output = model(**batch, fast_lm_head=True, num_items_in_batch=num_items)
        (output.loss * scale).backward()
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        grads[name.removeprefix("module.")] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return grads


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    batches = [packed_batch(r) for r in range(world_size)]
    num_items = sum(int(b["labels"][:, 1:].ne(-100).sum()) for b in batches)
    expected = gradient(tiny_model(), batches, num_items=num_items)

    def fsdp2(model, *parts):
        for part in (*model.model.layers, *parts, model):
            fully_shard(part, mesh=mesh)
        return model

    cases = {
        "ddp": lambda model: DistributedDataParallel(model),
        "fsdp2": lambda model: fsdp2(model),
        "fsdp2_head_apart": lambda model: fsdp2(model, model.lm_head),
    }
    for name, wrap in cases.items():
        # Each rank's loss counts every rank's tokens, and gradients are averaged: hence the factor.
        found = gradient(wrap(tiny_model()), [batches[rank]], num_items=num_items, scale=world_size)
        worst = max((found[key] - grad).abs().max().item() for key, grad in expected.items())
        largest = max(grad.abs().max().item() for grad in expected.values())
        if rank == 0:
            print(json.dumps({"case": name, "difference": worst, "largest": largest, "num_grads": len(found)}))
    leave_process_group()


if __name__ == "__main__":
    main()
