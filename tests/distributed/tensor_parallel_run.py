"""Processes that share each matrix product, compared with one process that computes it whole.

Run by test_tensor_parallel.py under torchrun; rank 0 prints one JSON line per case. The argument is ``pair`` (two
processes) or ``sharded`` (four: weights divided by tensor parallelism over two, and by FSDP2 over two).
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from accel_scale.ending.leaving import leave_process_group
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.modeling.packed_attention import register_packed_attention
from accel_scale.optimization.fast_loss import add_fast_lm_head, language_model_loss
from accel_scale.optimization.loss import count_loss_tokens
from accel_scale.parallel.gradient_norm import clip_gradients, global_grad_norm
from accel_scale.parallel.layout import ParallelLayout, build_mesh
from accel_scale.parallel.tensor import apply_tensor_parallel, plain_shapes

VOCAB, LENGTH, STEPS, MICRO_BATCHES = 96, 32, 5, 2
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
GROUPED = {**SHAPE, "num_key_value_heads": 2, "intermediate_size": 96, "pad_token_id": 50}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {**GROUPED, "attention_bias": True, "mlp_bias": True, "vocab_size": 97},
    "qwen3": {**GROUPED, "head_dim": 16},
    "gemma": {**GROUPED, "head_dim": 16},
    "gemma2": {**GROUPED, "head_dim": 16, "sliding_window": 10},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": VOCAB, "n_positions": 32, **NO_DROPOUT},
}
# Name: (architecture, attention, packed rows, checkpointing policy, autocast).
CASES: dict[str, tuple[str, str, bool, str, bool]] = {
    "llama": ("llama", "sdpa", False, "none", False),
    "llama, packed, selective": ("llama", "sdpa_packed", True, "selective", False),
    "llama, packed, segments": ("llama", "sdpa_packed", True, "segments_2", False),
    "qwen3, bf16": ("qwen3", "sdpa_packed", True, "full", True),
    "qwen3, packed": ("qwen3", "sdpa_packed", True, "offload", False),
    "gemma": ("gemma", "sdpa", False, "none", False),
    "gemma2, packed": ("gemma2", "eager", True, "every_2", False),
    "gpt2": ("gpt2", "eager", False, "none", False),
    "gpt2, packed": ("gpt2", "sdpa_packed", True, "full", False),
}


ARCHITECTURES = (
    *("apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma3_text", "glm", "glm4", "gpt_neox"),
    *("granite", "helium", "mistral", "nemotron", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "seed_oss"),
    *("smollm3", "starcoder2"),
)


class Traffic(TorchDispatchMode):
    """Counts collectives and the bytes passed to them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not re.search("wait|wrap", str(func)):
            self.calls += 1
            self.num_bytes += sum(t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


def build(kind: str, attention: str = "sdpa", policy: str = "none", **fields: Any) -> Any:
    """A small model with the same weights on every rank."""
    torch.manual_seed(0)
    register_packed_attention()
    config = CONFIG_MAPPING[kind](**{**FIELDS[kind], **fields})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    with torch.no_grad():  # norms of 1 and biases of 0 would hide a wrong gradient
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    add_fast_lm_head(model)
    apply_checkpointing(model, CheckpointingPolicy.parse(policy))
    return model


def micro_batch(seed: int, *, packed: bool) -> dict[str, torch.Tensor]:
    """Two rows, partly unlabelled, with a padding token in each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (2, LENGTH), generator=generator)
    ids[:, 7] = 50
    labels = ids.clone()
    labels[:, : 3 + seed % 5] = -100
    batch = {"input_ids": ids, "labels": labels}
    if packed:
        batch["position_ids"] = torch.cat([torch.arange(11), torch.arange(LENGTH - 11)]).expand(2, -1)
    return batch


def train(model: Any, *, packed: bool = False, autocast: bool = False, rank: int = 0, ranks: int = 1) -> dict:
    """Losses and gradient norms of `STEPS` steps of AdamW, on every `ranks`-th micro-batch starting at `rank`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, eps=1e-6)
    losses, norms = [], []
    for _ in range(STEPS):
        batches = [micro_batch(i, packed=packed) for i in range(MICRO_BATCHES * 2)]
        num_tokens = sum(int(count_loss_tokens(b["labels"])) for b in batches)
        total = torch.zeros(())
        for batch in batches[rank::ranks]:
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = language_model_loss(model, batch, num_tokens)
            (loss * ranks).backward()  # gradients are averaged over the ranks with other rows
            total += loss.detach()
        losses.append(total)
        norms.append(clip_gradients(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack(losses), "norms": torch.stack(norms)}


def compare(found: dict, expected: dict, state: dict, model: Any) -> dict[str, float]:
    """Largest relative differences from the single process; weights are relative to each tensor's largest entry."""
    reference = model.state_dict()
    weights = {n: float((state[n] - reference[n]).abs().max() / reference[n].abs().max()) for n in reference}
    assert set(state) == set(reference)
    return {
        "loss": float(((found["losses"] - expected["losses"]) / expected["losses"]).abs().max()),
        "norm": float(((found["norms"] - expected["norms"]) / expected["norms"]).abs().max()),
        "weights": max(weights.values()),
        "worst": max(weights, key=lambda name: weights[name]),
        "learned": float(expected["losses"][0] - expected["losses"][-1]),
        "clipped": float(expected["norms"].min()),
    }


def reload_difference(model: Any, state: dict, kind: str, batch: dict) -> float:
    """Difference between the divided model's logits and those of plain transformers after loading its files."""
    inputs = {"input_ids": batch["input_ids"]}
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
    if not state:
        return 0.0
    with tempfile.TemporaryDirectory() as folder:
        build(kind, "eager").save_pretrained(folder, state_dict=state)
        plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return float((plain(**inputs).logits - logits).abs().max())


def same_on_ranks(tensors: list[torch.Tensor], group: Any = None) -> bool:
    """True if all ranks hold the same bits."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, [tensor.detach().float().numpy().tobytes() for tensor in tensors], group=group)
    return all(one == everyone[0] for one in everyone)


def replicated(model: Any) -> list[torch.Tensor]:
    return [p.to_local() for p in model.parameters() if isinstance(p, DTensor) and p.placements[-1].is_replicate()]


def pair() -> None:
    mesh: Any = build_mesh(ParallelLayout(tp=2), "cpu")
    for name, (kind, attention, packed, policy, autocast) in CASES.items():
        options = {"packed": packed, "autocast": autocast}
        plain = build(kind, attention, policy)
        expected = train(plain, **options)
        model = build(kind, attention, policy)
        apply_tensor_parallel(model, mesh["tp"])
        found = train(model, **options)
        state = gather_state(model)
        line = compare(found, expected, state, plain) if state else {}
        line["reload"] = reload_difference(model, state, kind, micro_batch(77, packed=False))
        line["same"] = same_on_ranks([*found["losses"], *found["norms"], *replicated(model)])
        held = sum(p.to_local().numel() for p in model.parameters())
        line["held"] = held / sum(p.numel() for p in plain.parameters())
        line["tied"] = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        show(name, **line)
    show("dropout", same=dropout_is_alike(mesh))
    for kind in ("llama", "gpt2", "qwen3"):
        show(f"traffic of {kind}", **traffic_per_layer(kind, mesh))
    show("evaluation", **evaluation(mesh))
    show("architectures", **{kind: gradient_difference(kind, mesh) for kind in ARCHITECTURES})


def gather_state(model: Any) -> dict[str, torch.Tensor]:
    """The plain model's whole state dictionary, in host memory, on rank 0; an empty one elsewhere. Collective.

    Tied names share a tensor. The plain model's `load_state_dict` and `save_pretrained(state_dict=…)` accept it.
    """
    shapes, is_main = plain_shapes(model), dist.get_rank() == 0
    copies: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in copies:
            whole: Any = tensor.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            copies[id(tensor)] = whole.reshape(shapes.get(name, whole.shape)).cpu() if is_main else torch.empty(0)
        state[name] = copies[id(tensor)]
    return state if is_main else {}


def gradient_difference(kind: str, mesh: Any) -> float:
    """Largest difference of any gradient from a single process's, relative to the largest gradient."""
    known = vars(CONFIG_MAPPING[kind]())
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16, "sliding_window": 10}
    fields = SHAPE | GROUPED | {name: value for name, value in special.items() if name in known}
    FIELDS[kind] = fields | {name: 0.0 for name, value in known.items() if "drop" in name and isinstance(value, float)}
    plain, model = build(kind, "eager"), build(kind, "eager")
    apply_tensor_parallel(model, mesh["tp"])
    for one in (plain, model):
        language_model_loss(one, micro_batch(1, packed=False), 60).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = {name: gradient(p) for name, p in model.named_parameters() if p.grad is not None}
    assert set(found) == set(expected)
    largest = max(float(grad.abs().max()) for grad in expected.values())
    return max(float((found[name] - grad).abs().max()) for name, grad in expected.items()) / largest


def dropout_is_alike(mesh: Any) -> bool:
    """True if ranks with different random states at division drop the same activations afterwards."""
    model = build("gpt2", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    torch.manual_seed(dist.get_rank())
    apply_tensor_parallel(model, mesh["tp"])
    losses = train(model)["losses"]
    return same_on_ranks([*losses, *replicated(model)])


def traffic_per_layer(kind: str, mesh: Any) -> dict[str, float]:
    """Collectives per layer in one forward and backward pass, and their bytes in units of the hidden states'."""
    seen = {}
    for layers in (1, 2):
        model = build(kind, **{"n_layer" if kind == "gpt2" else "num_hidden_layers": layers})
        apply_tensor_parallel(model, mesh["tp"])
        with Traffic() as seen[layers]:
            language_model_loss(model, micro_batch(0, packed=False), 1).backward()
    hidden_bytes = 2 * LENGTH * SHAPE["hidden_size"] * 4
    return {
        "calls": seen[2].calls - seen[1].calls,
        "hidden_states": (seen[2].num_bytes - seen[1].num_bytes) / hidden_bytes,
        "calls_beside_layers": 2 * seen[1].calls - seen[2].calls,
    }


def evaluation(mesh: Any) -> dict[str, Any]:
    """Accuracy, gradients from the head when it is large (computed in the backward pass), and generation."""
    from accel_scale.optimization import loss

    loss.HEAD_GRAD_IN_FORWARD_BYTES = 0
    plain, model = build("gemma2", "eager"), build("gemma2", "eager")
    apply_tensor_parallel(model, mesh["tp"])
    outputs = []
    batch = micro_batch(5, packed=False)
    with torch.no_grad():
        likely = plain(input_ids=batch["input_ids"]).logits.argmax(-1)
    batch["labels"][:, 9:20] = likely[:, 8:19]
    for one in (plain, model):
        output = one(**batch, fast_lm_head=True, with_accuracy=True)
        output.loss.backward()
        outputs.append(output)
    grads = [gradient(one.get_input_embeddings().weight) for one in (plain, model)]
    prompt = {"input_ids": batch["input_ids"][:, :6], "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    texts = [one.eval().generate(**prompt, max_new_tokens=8, do_sample=False) for one in (plain, model)]
    return {
        "correct": [int(output.num_correct) for output in outputs],
        "head_gradient": float((grads[0] - grads[1]).abs().max() / grads[0].abs().max()),
        "generated": bool(torch.equal(*texts)),
    }


def gradient(parameter: Any) -> torch.Tensor:
    return parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad


def sharded() -> None:
    mesh: Any = build_mesh(ParallelLayout(dp_shard=2, tp=2), "cpu")
    for kind in ("llama", "gpt2"):
        plain = build(kind)
        expected = train(plain)
        for head_apart in (False, True) if kind == "llama" else (False,):
            model = build(kind)
            divide(model, mesh, head_apart=head_apart)
            found = train(model, rank=mesh["shard"].get_local_rank(), ranks=2)
            dist.all_reduce(found["losses"], group=mesh["shard"].get_group())
            state = gather_state(model)
            line = compare(found, expected, state, plain) if state else {}
            line["reload"] = reload_difference(model, state, kind, micro_batch(77, packed=False))
            line["same"] = same_on_ranks([*found["losses"], *found["norms"]])
            held = sum(p.to_local().numel() for p in model.parameters())
            line["held"] = held / sum(p.numel() for p in plain.parameters())
            line["resumed"] = checkpoint_difference(model, kind, mesh)
            show(f"{kind}, head apart" if head_apart else kind, **line)
    show("mixed meshes", **mixed_norm(mesh))


def divide(model: Any, mesh: Any, *, head_apart: bool = False) -> None:
    apply_tensor_parallel(model, mesh["tp"])
    layers = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
    for block in [*layers, *([model.lm_head] if head_apart else []), model]:
        fully_shard(block, mesh=mesh["shard"])


def checkpoint_difference(model: Any, kind: str, mesh: Any) -> float:
    """Difference after tensor parallelism alone loads a checkpoint that was written together with FSDP2."""
    other = build(kind)
    apply_tensor_parallel(other, mesh["tp"])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folder)
    dist_cp.save(model.state_dict(), checkpoint_id=folder[0])
    dist_cp.load(other.state_dict(), checkpoint_id=folder[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(str(folder[0]))
    found, expected = gather_state(other), gather_state(model)
    assert not plain_shapes(other) or kind == "gpt2"
    return max((float((found[name] - expected[name]).abs().max()) for name in expected), default=0.0)


def mixed_norm(mesh: Any) -> dict[str, float]:
    """Norm of gradients on every kind of mesh, one of them a partial sum, with a separate stage for each rank."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(7, 6, generator=generator) for _ in range(6)]
    shard, tp, both = mesh["shard"], mesh["tp"], mesh["dp_shard", "tp"]
    parameters = [torch.nn.Parameter(torch.zeros(7, 6))]
    parameters[0].grad = whole[0].clone()
    placed = [(tp, [Shard(1)]), (shard, [Shard(0)]), (both, [Shard(0), Shard(1)]), (both, [Shard(0), Replicate()])]
    for gradient_, (where, placements) in zip(whole[1:5], placed, strict=True):
        parameters.append(torch.nn.Parameter(distribute_tensor(torch.zeros(7, 6), where, placements)))
        parameters[-1].grad = distribute_tensor(gradient_, where, placements)
    parameters.append(torch.nn.Parameter(distribute_tensor(torch.zeros(7, 6), tp, [Replicate()])))
    part = whole[5] * (0.25 if tp.get_local_rank() == 0 else 0.75)
    parameters[-1].grad = DTensor.from_local(part, tp, [Partial()])
    expected = torch.stack([gradient_.norm() for gradient_ in whole]).norm()
    norm = global_grad_norm(parameters)
    stages = global_grad_norm(parameters, dist.group.WORLD)  # as if each of the four ranks held a stage
    clip_gradients(parameters, 1.0)
    return {
        "norm": abs(float(norm / expected) - 1),
        "stages": abs(float(stages / expected) - 2),
        "after": abs(float(global_grad_norm(parameters)) - 1),
    }


def show(case: str, **values: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps({"case": case, **values}), flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    {"pair": pair, "sharded": sharded}[sys.argv[1]]()
    leave_process_group()


if __name__ == "__main__":
    main()
