"""Two processes, one of which runs out of memory at one place of one step: many models and places in one launch.

    accelerate launch --config_file F memory_recovery_cases.py

Run by test_memory_recovery_sharded.py; rank 0 prints one JSON line per case. The reference is one process without
sharding on all samples.
"""

from __future__ import annotations

import gc
import json

import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from accel_scale.ending.leaving import let_go_of_collectives
from accel_scale.launching.rehearsal import enable_rehearsal_if_needed
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.optimization.fast_loss import add_fast_lm_head
from accel_scale.training.resilience.memory_recovery import MemoryRecovery

VOCAB, NUM_LAYERS, NUM_STEPS, NUM_BATCHES, ROWS = 64, 3, 3, 2, 4
MODELS = {"untied": {}, "tied": {"tied": True}, "checkpointing": {"checkpointing": True}, "lora": {"lora": True}}
# Model, place, micro-batch of the step (gradients are reduced in the last one, 1), rank that fails.
CASES = (
    ("untied", "forward", 0, 1),
    ("untied", "forward", 1, 0),
    ("untied", "backward", 0, 0),
    ("untied", "backward", 1, 1),
    ("untied", "head", 1, 1),
    ("untied", "before", 0, 1),
    ("untied", "before", 1, 0),
    ("tied", "forward", 1, 1),
    ("tied", "backward", 1, 0),
    ("tied", "head", 1, 0),
    ("checkpointing", "recompute", 0, 0),
    ("checkpointing", "recompute", 1, 1),
    ("lora", "forward", 1, 1),
    ("lora", "backward", 1, 0),
    ("lora", "head", 1, 1),
)


def build(*, tied: bool = False, checkpointing: bool = False, lora: bool = False):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).train()
    add_fast_lm_head(model)
    if checkpointing:
        apply_checkpointing(model, CheckpointingPolicy("full"), use_reentrant=False)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model


def batches_of(step: int, rank: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    batches = []
    for _ in range(NUM_BATCHES):
        ids = torch.randint(0, VOCAB, (ROWS, 10), generator=generator)
        labels = ids.clone()
        for row in range(ROWS):
            labels[row, : 1 + row + 2 * rank] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


class Fault:
    """Raises in passes of ROWS rows, at `place` of micro-batch `index` of step 1."""

    def __init__(self, model, place: str, index: int) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.place, self.index, self.count, self.is_armed = place, index, 0, False
        mlp = base.model.layers[1].mlp
        self.forward, mlp.forward = mlp.forward, self.in_layer

    def begin(self, part: dict, step: int) -> None:
        """Must be called before each pass."""
        self.is_armed = step == 1 and len(part["input_ids"]) == ROWS and self.count == self.index
        self.count += 1
        if self.is_armed and self.place == "before":
            raise_out_of_memory()

    def in_layer(self, hidden_states):
        is_recomputing = torch._C._current_graph_task_id() != -1
        if self.is_armed and self.place == ("recompute" if is_recomputing else "forward"):
            raise_out_of_memory()
        output = self.forward(hidden_states)
        if self.is_armed and self.place == "backward" and output.requires_grad:
            output.register_hook(raise_out_of_memory)
        return output


def raise_out_of_memory(*unused) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def train(accelerator, options, rows_of, *, fault: tuple[str, int, int] | None = None):
    """Final trained weights by name, the losses of the steps, and the lines of output."""
    import accel_scale.optimization.head_loss as loss_module

    model = build(**options)
    rank, world_size = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    planted = Fault(model, fault[0], fault[1]) if fault and fault[2] == rank else None
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    lines: list[str] = []
    recovery = None
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        recovery = MemoryRecovery(accelerator, model, say=lines.append)
    default_chunk_size = loss_module.default_chunk_size

    def in_head(*args, **options):
        if planted and planted.is_armed and planted.place == "head":
            raise_out_of_memory()
        return default_chunk_size(*args, **options)

    loss_module.default_chunk_size = in_head
    losses = []
    for step in range(NUM_STEPS):
        batches = rows_of(step)
        num_items = sum(int(b["labels"][:, 1:].ne(-100).sum()) for r in range(2) for b in batches_of(step, r))
        if planted:
            planted.count = 0

        def loss_of(part, step=step, num_items=num_items):
            if planted:
                planted.begin(part, step)
            return model(**part, fast_lm_head=True, num_items_in_batch=num_items).loss * world_size

        if recovery is None:
            total = sum(loss_of(batch) for batch in batches)
            total.backward()
        else:
            total = recovery.step(batches, loss_of)
        losses.append(float(total.detach()))
        optimizer.step()
        optimizer.zero_grad()
    loss_module.default_chunk_size = default_chunk_size
    weights = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            weights[name.removeprefix("module.")] = whole.detach().clone()
    if recovery is not None:
        recovery.close()
        accelerator.free_memory()
    return weights, losses, lines, recovery


def main() -> None:
    enable_rehearsal_if_needed()
    gc.freeze()  # recovery collects garbage, and need not look at what the libraries allocated at import
    accelerator = Accelerator()
    rank = accelerator.process_index
    references = {
        name: train(None, options, lambda step: batches_of(step, 0) + batches_of(step, 1))
        for name, options in MODELS.items()
    }
    for name, *fault in CASES:
        expected, losses, _, _ = references[name]
        found, mine, lines, recovery = train(
            accelerator, MODELS[name], lambda step: batches_of(step, rank), fault=tuple(fault)
        )
        total = torch.tensor(mine)
        dist.all_reduce(total)
        if rank == 0:
            case = {
                "case": [name, *fault],
                "names_agree": found.keys() == expected.keys(),
                "difference": max(float((found[k] - w).norm() / w.norm()) for k, w in expected.items()),
                "loss_difference": max(abs(a / 2 - b) for a, b in zip(total.tolist(), losses, strict=True)),
                "lines": lines,
                "steps": recovery.recovered_steps,
            }
            print(json.dumps(case), flush=True)
    let_go_of_collectives()
    accelerator.end_training()


if __name__ == "__main__":
    main()
