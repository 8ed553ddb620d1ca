"""Four processes: pipelines of four and of two stages, compared with one process that trains the same model.

Run by test_pipeline.py; rank 0 prints one JSON line per case.
"""

from __future__ import annotations

import copy
import functools
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from accelerate import PartialState
from pipeline_bubble import measure_timed
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from accel_scale.ending.leaving import leave_process_group
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.modeling.evaluation_mode import evaluating
from accel_scale.modeling.packed_attention import register_packed_attention
from accel_scale.optimization.fast_loss import add_fast_lm_head, language_model_loss
from accel_scale.parallel.layout import ParallelLayout, build_mesh
from accel_scale.parallel.model_parallel import ModelParallel
from accel_scale.parallel.pipelines.pipeline import (
    Pipeline,
    PipelineSettings,
    check_pipeline,
    split_model,
    stage_boundaries,
    stages_of_rank,
)
from accel_scale.parallel.pipelines.split import costs_of, owned_parameters, stage_layers, stage_of
from accel_scale.training.saving.final_shared import save_final_shared

VOCAB, LENGTH, ROWS, MICRO_BATCHES, STEPS = 96, 24, 2, 8, 4
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **GROUPED},
    "qwen3": {"model_type": "qwen3", **GROUPED},
    "gemma": {"model_type": "gemma", **GROUPED},
    "gemma3": {"model_type": "gemma3_text", **GROUPED, "sliding_window": 6},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32},
}


def build(name: str, attention: str = "sdpa", **changes: Any) -> Any:
    """The same random model on every rank."""
    torch.manual_seed(0)
    fields = {**CONFIGS[name], "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **changes}
    config = AutoConfig.for_model(**fields)
    for dropout in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        if hasattr(config, dropout) and dropout not in changes:
            setattr(config, dropout, 0.0)
    config._attn_implementation = register_packed_attention() if attention == "packed" else attention
    return AutoModelForCausalLM.from_config(config).train()


def step_rows(step: int, share: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of packed rows; each has its own places where documents end and labels begin."""
    generator = torch.Generator().manual_seed(1000 * share + step)
    batches = []
    for index in range(MICRO_BATCHES):
        start, stride = torch.randint(0, VOCAB, (2, ROWS, 1), generator=generator)
        ids = 3 + (start + (1 + stride % 2) * torch.arange(LENGTH)) % (VOCAB - 3)  # a pattern that can be learnt
        labels = ids.clone()
        labels[:, : 3 + index] = -100
        cut = 5 + index
        positions = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)]).expand(ROWS, LENGTH)
        batches.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    return batches


def count(batches: list[dict[str, torch.Tensor]]) -> int:
    return sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in batches)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    # Gradients of keys' biases are nothing but rounding errors, which a smaller epsilon would turn into whole steps.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5, weight_decay=0.1)


def train_alone(model: Any, shares: int, autocast: Any) -> tuple[list[float], float]:
    """Train in one process on the rows of all data-parallel ranks; losses of the steps and of a held-out batch."""
    add_fast_lm_head(model)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for step in range(STEPS):
        batches = [batch for share in range(shares) for batch in step_rows(step, share)]
        total, tokens = 0.0, count(batches)
        for batch in batches:
            with autocast():
                loss = language_model_loss(model, batch, tokens)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    with evaluating(model), autocast():
        return losses, language_model_loss(model, step_rows(99, 0)[0], 1).item()


def train_staged(pipeline: Pipeline, share: int, shares: int) -> tuple[list[float], float]:
    """Train the same on this rank's stages; losses only on the last stage's ranks."""
    optimizer = make_optimizer([p for part in pipeline.parts for p in part.parameters()])
    losses = []
    for step in range(STEPS):
        tokens = sum(count(step_rows(step, other)) for other in range(shares))
        found = pipeline.forward_backward(step_rows(step, share), tokens, loss_factor=shares)
        assert len(found) == (MICRO_BATCHES if pipeline.has_last_stage else 0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(found)) if found else 0.0)
        summed = [pipeline.evaluate(step_rows(99, 0)[0]) for _ in range(2)][-1]
    assert (summed is not None) == pipeline.has_last_stage
    return losses, 0.0 if summed is None else summed.item()


def wrap(part: Any, mesh: Any, how: str) -> None:
    if how == "fully_shard":
        for module in (*stage_layers(part), part):
            fully_shard(module, mesh=mesh)
    elif how == "replicate":
        replicate(part, mesh=mesh)


@torch.no_grad()
def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3))


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train one model both ways, save it, load it, and report the differences."""
    name, pp = case["model"], case.get("pp", 4)
    settings = PipelineSettings(case.get("schedule", "1f1b"), case.get("stages_per_rank", 1))
    wrapping, shares = case.get("wrap", ""), 2 if case.get("wrap") else 1
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=case.get("bf16", False))
    options = {"attention": case.get("attention", "sdpa"), **case.get("changes", {})}
    # Without a wrapper, pipelines side by side train alike.
    layout = ParallelLayout(pp=pp, dp_replicate=dist.get_world_size() // pp)
    mesh = build_mesh(layout, "cpu")
    pp_rank, share, group = mesh.get_local_rank("pp"), mesh.get_local_rank("dp_replicate"), mesh.get_group("pp")

    alone = build(name, **options)
    model = copy.deepcopy(alone)
    wanted_losses, wanted_evaluation = train_alone(alone, shares, autocast)

    check_pipeline(model.config, settings, pp, MICRO_BATCHES)
    if case.get("checkpointing"):
        apply_checkpointing(model, CheckpointingPolicy.parse(case["checkpointing"]))
    indices = stages_of_rank(settings, pp, pp_rank)
    num_stages = pp * settings.stages_per_rank
    boundaries = stage_boundaries(costs_of(model, LENGTH), num_stages)
    parts = split_model(model, boundaries, indices)
    held = sum(p.numel() for part in parts for p in part.parameters())
    for part in parts:
        wrap(part, mesh["dp_replicate"], wrapping)
    pipeline = Pipeline(parts, indices, num_stages, group, "cpu", settings, MICRO_BATCHES, autocast=autocast)
    losses, evaluation = train_staged(pipeline, share if wrapping else 0, shares)

    wanted = dict(alone.named_parameters())
    found = {}
    for part in parts:
        for key, parameter in part.named_parameters():
            found[key] = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    embedding = alone.get_input_embeddings().weight
    errors = {key: relative(value.detach(), wanted.get(key, embedding)) for key, value in found.items()}
    owned = [key for part in parts for key in owned_parameters(part)]
    tied = {
        key: found[key].detach().clone() for part in parts for key in [stage_of(part).tied_weight] if key is not None
    }
    save_final_shared(ModelParallel(layout, mesh, parts, pipeline), None, folder)
    report = {"errors": errors, "owned": owned, "tied": tied, "losses": losses, "evaluation": evaluation, "held": held}
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    return {} if dist.get_rank() else compare(case, alone, reports, wanted_losses, wanted_evaluation, folder)


def compare(
    case: dict[str, Any], alone: Any, reports: list[Any], losses: list[float], evaluation: float, folder: Path
) -> dict[str, Any]:
    """The comparison that rank 0 makes."""
    copies = case.get("pp", 4)
    replicas = dist.get_world_size() // copies
    shares = 2 if case.get("wrap") else 1
    # The last stage's report of every data-parallel rank; a loss counts the tokens of its own rows.
    last = reports[-replicas:]
    found = [sum(report["losses"][step] for report in last[:shares]) for step in range(STEPS)]
    owned = sorted(key for report in reports[::replicas] for key in report["owned"])
    tied = [tensor for report in reports for tensor in report["tied"].values()]
    reloaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    trained = copy.deepcopy(alone)
    trained.set_attn_implementation("eager")
    ids = step_rows(7, 0)[0]["input_ids"]
    with torch.no_grad():
        logits, wanted = reloaded.eval()(ids).logits, trained.eval()(ids).logits
    return {
        "case": case["name"],
        "loss_error": max(abs(a - b) / abs(b) for a, b in zip(found, losses, strict=True)),
        "evaluation_error": abs(last[0]["evaluation"] - evaluation) / evaluation,
        "weight_error": max(max(report["errors"].values()) for report in reports),
        "worst_weight": max((e, key) for report in reports for key, e in report["errors"].items())[1],
        "logits_error": relative(logits, wanted),
        "all_owned_once": owned == sorted(dict(alone.named_parameters())),
        "tied_copies": len(tied),
        "tied_equal": all(torch.equal(tensor, tied[0]) for tensor in tied),
        "largest_share": max(report["held"] for report in reports) / sum(p.numel() for p in alone.parameters()),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "dtype_saved": str(reloaded.dtype),
    }


CASES = [
    {"name": "llama", "model": "llama", "attention": "packed"},
    {"name": "qwen3", "model": "qwen3"},
    {"name": "gemma", "model": "gemma"},
    {"name": "gemma3", "model": "gemma3"},
    {"name": "gpt2", "model": "gpt2"},
    {"name": "gpipe", "model": "gpt2", "pp": 2, "schedule": "gpipe", "checkpointing": "selective"},
    {"name": "interleaved", "model": "qwen3", "pp": 2, "schedule": "interleaved", "stages_per_rank": 2},
    {"name": "zero_bubble", "model": "gemma", "pp": 2, "schedule": "zero_bubble", "wrap": "fully_shard"},
    {"name": "replicate", "model": "llama", "pp": 2, "wrap": "replicate", "checkpointing": "full"},
    {"name": "fully_shard", "model": "gemma", "pp": 2, "wrap": "fully_shard"},
    {"name": "bf16", "model": "llama", "pp": 2, "bf16": True, "checkpointing": "every_2"},
]


def main() -> None:
    torch.set_num_threads(1)
    PartialState(cpu=True)  # as in every recipe: saving waits for all processes through it
    chosen = sys.argv[1:]
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    for schedule in ("gpipe", "1f1b"):
        if not chosen or f"bubble_{schedule}" in chosen:
            bubble = measure_timed(schedule, 1, 4, seconds=0.04, steps=3)
            if dist.get_rank() == 0:
                print(json.dumps({"case": f"bubble_{schedule}", **bubble}), flush=True)
    for case in CASES:
        if chosen and case["name"] not in chosen:
            continue
        found = run_case(case, Path(str(folder[0])) / str(case["name"]))
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(str(folder[0]))
    leave_process_group()


if __name__ == "__main__":
    main()
