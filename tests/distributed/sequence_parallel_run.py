"""Processes that share each row, compared with one process that has it whole: losses, weights, isolation, memory.

Run by test_sequence_parallel.py under torchrun; rank 0 prints one JSON line per case. The argument is ``pair`` (two
processes) or ``sharded`` (four: with weights sharded, tensor parallelism, a pipeline).
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from accel_scale.ending.leaving import leave_process_group
from accel_scale.errors import ConfigError
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.modeling.packed_attention import register_packed_attention
from accel_scale.optimization.fast_loss import add_fast_lm_head, language_model_loss
from accel_scale.optimization.loss import count_loss_tokens
from accel_scale.parallel.layout import ParallelLayout, build_mesh
from accel_scale.parallel.pipelines.pipeline import Pipeline, PipelineSettings, split_model, stages_of_rank
from accel_scale.parallel.sequence import check_sequence_parallel, check_ulysses, cut_batch, enable_ulysses, uncut_rows
from accel_scale.parallel.tensor import apply_tensor_parallel
from accel_scale.verifying.measured_memory import StorageTracker

VOCAB, LENGTH, STEPS = 96, 48, 4
SHAPE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": VOCAB}
GROUPED = {**SHAPE, "num_key_value_heads": 2, "intermediate_size": 96, "pad_token_id": 0}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen3": {
        **GROUPED, "head_dim": 16, "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    },
    "phi3": {
        **GROUPED, "max_position_embeddings": 64, "original_max_position_embeddings": 30,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 30,
            "short_factor": [1.0] * 8, "long_factor": [1.0 + 0.5 * i for i in range(8)],
        },
    },
    "gemma": {**GROUPED, "head_dim": 16},
    "gemma2": {**GROUPED, "head_dim": 16, "sliding_window": 10},
    "gemma3_text": {**GROUPED, "head_dim": 16, "sliding_window": 10, "num_key_value_heads": 1},
    "gpt2": {
        "n_embd": 64, "n_head": 4, "n_layer": 4, "vocab_size": VOCAB, "n_positions": 128,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
}  # fmt: skip
# Name: (architecture, attention, packed rows, checkpointing policy, autocast).
CASES: dict[str, tuple[str, str, bool, str, bool]] = {
    "llama": ("llama", "sdpa", False, "none", False),
    "llama, packed": ("llama", "sdpa_packed", True, "none", False),
    "llama, packed, eager": ("llama", "eager", True, "none", False),
    "llama, packed, selective": ("llama", "sdpa_packed", True, "selective", False),
    "llama, packed, segments": ("llama", "sdpa_packed", True, "segments_2", False),
    "llama, packed, offload": ("llama", "sdpa", True, "offload", False),
    "llama, packed, bf16": ("llama", "sdpa_packed", True, "full", True),
    "qwen3, packed": ("qwen3", "sdpa_packed", True, "none", False),
    "qwen3, dynamic frequencies": ("qwen3", "sdpa_packed", False, "full", False),
    "phi3, long frequencies": ("phi3", "sdpa", False, "none", False),
    "gemma": ("gemma", "sdpa_packed", False, "none", False),
    "gemma2, packed": ("gemma2", "eager", True, "every_2", False),
    "gemma3, one key head": ("gemma3_text", "sdpa", False, "none", False),
    "gemma3, one key head, packed": ("gemma3_text", "sdpa_packed", True, "none", False),
    "gpt2": ("gpt2", "sdpa", False, "none", False),
    "gpt2, packed": ("gpt2", "sdpa_packed", True, "none", False),
}


def build(kind: str, attention: str, policy: str = "none") -> Any:
    """A small model with the same weights on every rank."""
    torch.manual_seed(0)
    register_packed_attention()
    config = CONFIG_MAPPING[kind](**FIELDS[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    with torch.no_grad():  # norms of 1 and biases of 0 would hide a wrong gradient
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    add_fast_lm_head(model)
    apply_checkpointing(model, CheckpointingPolicy.parse(policy))
    return model


def rows(step: int, *, packed: bool, num_rows: int = 2, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Rows that differ in their documents and unlabelled parts; documents cross every cut into two."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(1, VOCAB, (num_rows, length), generator=generator)
    labels = ids.clone()
    labels[0, : length // 3] = -100
    batch = {"input_ids": ids, "labels": labels}
    if packed:
        borders = [(7 + 5 * row, length // 2 - 6 + 3 * row, length // 2 + 9 + row) for row in range(num_rows)]
        batch["position_ids"] = torch.stack([restarting(length, border) for border in borders])
    return batch


def restarting(length: int, borders: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(end - begin) for begin, end in zip((0, *borders), (*borders, length), strict=True)])


def autocast(wanted: bool) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16) if wanted else nullcontext()


def train(model: Any, batches: list[Any], totals: list[Any], group: Any, *, bf16: bool, factor: float = 1.0) -> Any:
    """Train with AdamW; returns (losses, whole weights). Sums losses and, for whole weights, gradients in `group`."""
    # Some gradients are zero but for rounding (GPT-2's key biases): a larger epsilon keeps Adam from scaling that up.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, eps=1e-6)
    losses = []
    for batch, total in zip(batches, totals, strict=True):
        with autocast(bf16):
            loss = language_model_loss(model, batch, total)
        (loss * factor).backward()
        loss = loss.detach().clone()
        if group is not None:
            dist.all_reduce(loss, group=group)
            for parameter in model.parameters():
                if not hasattr(parameter, "full_tensor"):
                    dist.all_reduce(parameter.grad, group=group)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
    return losses, {name: weight.detach() for name, weight in weights.items()}


def compare(found: Any, expected: Any) -> dict[str, float]:
    (losses, weights), (expected_losses, expected_weights) = found, expected
    assert set(weights) == set(expected_weights)
    difference = {name: (weights[name] - w).abs().max() / w.abs().max() for name, w in expected_weights.items()}
    return {
        "loss": max(abs(a - b) / b for a, b in zip(losses, expected_losses, strict=True)),
        "weights": max(difference.values()).item(),
        "learned": expected_losses[0] - expected_losses[-1],
    }


def parity(name: str, group: Any) -> dict[str, Any]:
    kind, attention, packed, policy, bf16 = CASES[name]
    rank, size = group.rank(), group.size()
    batches = [rows(step % 2, packed=packed) for step in range(STEPS)]
    totals = [int(count_loss_tokens(batch["labels"])) for batch in batches]
    expected = train(build(kind, attention, policy), batches, totals, None, bf16=bf16)
    model = build(kind, attention, policy)
    check_sequence_parallel(model.config, size, LENGTH, attention)
    enable_ulysses(model, group)
    forward_difference = check_ulysses(model, group)
    parts = [cut_batch(batch, rank, size) for batch in batches]
    found = train(model, parts, totals, group, bf16=bf16)
    return {**compare(found, expected), "forward": forward_difference}


def refusal(group: Any) -> dict[str, list[bool]]:
    """Which ranks refuse a model whose last rank computes something different on its part of a row."""
    model = build("llama", "sdpa").eval()
    enable_ulysses(model, group)
    is_last = group.rank() == group.size() - 1

    def shifted(_: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output + 1 if is_last and inputs[0].shape[1] == 16 else output

    hook = model.base_model.norm.register_forward_hook(shifted)
    try:
        check_ulysses(model, group)
        refused = False
    except ConfigError:
        refused = True
    hook.remove()
    refusals: list[bool] = [False] * group.size()
    dist.all_gather_object(refusals, refused, group=group)
    return {"refused": refusals}


def isolation(group: Any) -> dict[str, float]:
    """Loss of the document that crosses the cut: which changes affect it, and which do not."""
    rank, size = group.rank(), group.size()
    model = build("llama", "sdpa_packed").eval()
    enable_ulysses(model, group)
    batch = rows(0, packed=True, num_rows=1)
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    begin, end = starts[2], starts[3]
    assert begin < LENGTH // 2 < end
    labels = torch.full_like(batch["labels"], -100)
    labels[:, begin + 1 : end] = batch["input_ids"][:, begin + 1 : end]
    batch["labels"] = labels

    def loss(changed: slice | None = None, **replaced: torch.Tensor) -> float:
        ids = batch["input_ids"].clone()
        if changed is not None:
            ids[:, changed] = (ids[:, changed] + 7) % VOCAB
        with torch.no_grad():
            part = cut_batch({**batch, "input_ids": ids, **replaced}, rank, size)
            value = language_model_loss(model, part, 1)
        dist.all_reduce(value, group=group)
        return value.item()

    with torch.no_grad(), uncut_rows():
        whole = language_model_loss(model, batch, 1).item()
    # What a cut without the shift would lose: each part would shift only its own labels.
    mine = slice(rank * LENGTH // size, (rank + 1) * LENGTH // size)
    unshifted = batch["labels"][:, mine]
    unshifted = torch.nn.functional.pad(unshifted[:, 1:], (0, 1), value=-100)
    part = {**cut_batch(batch, rank, size), "shift_labels": unshifted}
    with torch.no_grad():
        lost = language_model_loss(model, part, 1)
    dist.all_reduce(lost, group=group)
    return {
        "whole": whole,
        "cut": loss(),
        "other_documents_changed": loss(slice(0, begin)),
        "beginning_changed": loss(slice(begin, begin + 1)),
        "not_isolated": loss(position_ids=torch.arange(LENGTH)[None]),
        "shifted_after_the_cut": lost.item(),
    }


def generation(group: Any) -> dict[str, Any]:
    """Generation uses whole rows on each rank, as before."""
    model = build("llama", "sdpa_packed").eval()
    prompt = rows(0, packed=False)["input_ids"][:, :12]
    keywords = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    before = model.generate(prompt, attention_mask=torch.ones_like(prompt), **keywords)
    enable_ulysses(model, group)
    after = model.generate(prompt, attention_mask=torch.ones_like(prompt), **keywords)
    return {"same": bool(torch.equal(before, after)), "length": after.shape[1]}


def memory(group: Any) -> dict[str, Any]:
    """Bytes that a forward pass keeps for the backward pass, and the peak, with the row cut and whole."""
    batch = rows(0, packed=True, num_rows=1, length=1024)
    found = {}
    for size in (1, group.size()):
        model = build("llama", "sdpa_packed")
        if size > 1:
            enable_ulysses(model, group)
        part = cut_batch(batch, group.rank(), size) if size > 1 else batch
        tracker = StorageTracker()
        with tracker:
            loss = language_model_loss(model, part, 1)
            found[f"kept_bytes_{size}"] = tracker.live_bytes
            loss.backward()
        found[f"peak_bytes_{size}"] = tracker.peak_bytes
    return found


class Exchanges(TorchDispatchMode):
    """Counts all-to-alls and the bytes that this rank passes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        if "all_to_all" in str(func):
            self.count += 1
            self.num_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def exchanges(name: str, group: Any) -> dict[str, Any]:
    """All-to-alls of a micro-batch of two rows."""
    kind, attention, packed, policy, bf16 = CASES[name]
    model = build(kind, attention, policy)
    enable_ulysses(model, group)
    part = cut_batch(rows(0, packed=packed), group.rank(), group.size())
    with Exchanges() as seen:
        with autocast(bf16):
            loss = language_model_loss(model, part, 1)
        loss.backward()
    return {"count": seen.count, "num_bytes": seen.num_bytes}


def sharded(layout: ParallelLayout, kind: str, attention: str) -> dict[str, Any]:
    """Train with weights sharded by FSDP2, which averages gradients over `mesh["grad"]`, and by tensor parallelism."""
    mesh = build_mesh(layout, "cpu")
    rank = dist.get_rank()
    place, data_rank = layout.coordinate(rank), layout.data_rank(rank)
    num_rows = layout.data_ranks
    batches = [rows(step % 2, packed=True, num_rows=num_rows) for step in range(STEPS)]
    totals = [int(count_loss_tokens(batch["labels"])) for batch in batches]
    expected = train(build(kind, attention, "full"), batches, totals, None, bf16=False)
    model = build(kind, attention, "full")
    if layout.tp > 1:
        apply_tensor_parallel(model, mesh["tp"])
    enable_ulysses(model, mesh["sp"])
    check_ulysses(model, mesh["sp"])
    for block in [*model.model.layers, model]:
        fully_shard(block, mesh=mesh["shard"])
    mine = [{n: t[data_rank : data_rank + 1] for n, t in batch.items()} for batch in batches]
    parts = [cut_batch(batch, place["sp"], layout.sp) for batch in mine]
    found = train(model, parts, totals, mesh["grad"].get_group(), bf16=False, factor=layout.gradient_ranks)
    return compare(found, expected)


def piped(layout: ParallelLayout) -> dict[str, Any]:
    """Train pipeline stages on rows that are cut; compares losses only, since no rank has all weights."""
    mesh = build_mesh(layout, "cpu")
    place = layout.coordinate(dist.get_rank())
    batches = [rows(step % 2, packed=True) for step in range(STEPS)]
    totals = [int(count_loss_tokens(batch["labels"])) for batch in batches]
    expected, _ = train(build("llama", "sdpa_packed", "full"), batches, totals, None, bf16=False)
    settings = PipelineSettings("interleaved", stages_per_rank=2)
    stages = stages_of_rank(settings, layout.pp, place["pp"])
    boundaries = [range(stage, stage + 1) for stage in range(4)]
    parts = split_model(build("llama", "sdpa_packed", "full"), boundaries, stages)
    group = mesh["sp"].get_group()
    for part in parts:
        enable_ulysses(part, group)
    pipeline = Pipeline(parts, stages, 4, mesh["pp"].get_group(), "cpu", settings, 2)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], 3e-3, weight_decay=0.1, eps=1e-6)
    found = []
    for batch, total in zip(batches, totals, strict=True):
        part = cut_batch(batch, place["sp"], layout.sp)
        micro = [{name: tensor[row : row + 1] for name, tensor in part.items()} for row in range(2)]
        losses = pipeline.forward_backward(micro, total)
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        dist.all_reduce(loss)
        found.append(loss.item())
        for stage in parts:
            for parameter in stage.parameters():
                dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": max(abs(a - b) / b for a, b in zip(found, expected, strict=True)), "learned": found[0] - found[-1]}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if sys.argv[1] == "pair":
        group = dist.new_group([0, 1])
        results: dict[str, Any] = {name: parity(name, group) for name in CASES}
        results["isolation"] = isolation(group)
        results["refusal"] = refusal(group)
        results["generation"] = generation(group)
        results["memory"] = memory(group)
        for name in ("llama", "llama, packed, bf16", "gemma2, packed", "gemma3, one key head"):
            results[f"exchanges of {name}"] = exchanges(name, group)
        results["fsdp2"] = sharded(ParallelLayout(sp=2), "llama", "sdpa_packed")
    else:
        results = {
            "fsdp2": sharded(ParallelLayout(dp_shard=2, sp=2), "llama", "sdpa_packed"),
            "fsdp2, gemma2": sharded(ParallelLayout(dp_shard=2, sp=2), "gemma2", "eager"),
            "four ranks, two key heads": sharded(ParallelLayout(sp=4), "qwen3", "sdpa"),
            "tensor parallel": sharded(ParallelLayout(sp=2, tp=2), "llama", "sdpa_packed"),
            "pipeline": piped(ParallelLayout(pp=2, sp=2)),
        }
    if dist.get_rank() == 0:
        for name, result in results.items():
            print(json.dumps({"case": name, **result}))
    leave_process_group()


if __name__ == "__main__":
    main()
