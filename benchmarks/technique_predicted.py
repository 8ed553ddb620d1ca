"""`techniques.py`: the planner's part, with the ladder on one H100, strategies on eight, and limits of cards."""

from __future__ import annotations

import functools
from dataclasses import replace

from technique_rows import PARALLEL_RUNGS, RUNGS, Stage, Values, Work, ladder, with_ratios

import accel_scale
from accel_scale.facts.hardware import Machine, find_gpu
from accel_scale.planning.cost.flops import trained_params
from accel_scale.planning.cost.memory import MemoryEstimate, predict_memory
from accel_scale.planning.cost.timing import TimeEstimate, predict_time
from accel_scale.planning.cost.transfers import transfers
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.parameters import parameter_groups
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup

GPU = "H100-SXM"
SMALL, MIDDLE, LARGE = "Qwen/Qwen3-1.7B", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"
# Total bytes per second of a server's four PCIe 4.0 drives.
NVME = 24e9
HOST_MEMORY = 2 * 2**40
LADDER = TrainingSetup(checkpointing="none", packing=False, micro_batch_size=8, sequence_length=2048)
SPREAD = TrainingSetup(micro_batch_size=1, sequence_length=4096)
GLOBAL_BATCH = 64


def machine(num_gpus: int) -> Machine:
    """A server with `num_gpus` GPUs."""
    return Machine(find_gpu(GPU), num_gpus, 8, host_memory_bytes=HOST_MEMORY, nvme_bytes_per_second=NVME)


def one_gpu() -> dict[str, Values]:
    """Predict the ladder on one GPU."""
    facts = load_model_facts(SMALL, allow_download=False)
    figures: dict[str, dict[str, float]] = {}
    for name, setup in ladder(LADDER).items():
        memory, time = predict_memory(facts, setup), predict_time(facts, setup, machine(1))
        figures[name] = {
            "bytes": memory.needed_bytes,
            "activation_bytes": memory.step.saved_bytes,
            "optimizer_bytes": memory.states.optimizer_bytes,
            "weight_bytes": memory.states.weight_bytes,
            "trained_params": float(trained_params(facts, setup)),
            # Per token, not per micro-batch: accumulation runs four of them per step.
            "seconds": time.step_seconds / setup.tokens_per_step,
            "tokens_per_second": time.tokens_per_second,
            "fits": float(memory.high_bytes <= machine(1).gpu.memory_bytes),
        }
    return {f"h100/{name}": values for name, values in with_ratios(figures).items()}


def eight_gpus(model: str, prefix: str) -> dict[str, Values]:
    """Compare strategies with DDP at one global batch; for DDP itself, the last column is scaling from one GPU."""
    facts = load_model_facts(model, allow_download=False)
    rows: dict[str, dict[str, float | str]] = {}
    for name, _, make in PARALLEL_RUNGS:
        memory, time = _spread(facts, make(8), 8)
        rows[name] = {
            "bytes": memory.needed_bytes,
            "host_bytes": memory.host_bytes,
            "tokens_per_second": time.tokens_per_second,
            "exposed_share": time.exposed_communication_seconds / time.step_seconds,
            "bubble_share": time.bubble_seconds / time.step_seconds,
            "fits": float(memory.high_bytes <= find_gpu(GPU).memory_bytes),
        }
    for row in rows.values():
        row["speed"] = float(row["tokens_per_second"]) / float(rows["ddp"]["tokens_per_second"])
        row["bytes_total"] = float(row["bytes"]) / float(rows["ddp"]["bytes"])
        row["times_smaller"] = 1 / row["bytes_total"]
    return {f"{prefix}/{name}": row for name, row in rows.items()}


def _spread(facts: ModelFacts, parallel: ParallelSetup, num_gpus: int) -> tuple[MemoryEstimate, TimeEstimate]:
    accumulation = GLOBAL_BATCH // (SPREAD.micro_batch_size * parallel.data_parallel)
    setup = replace(SPREAD, accumulation=accumulation, parallel=parallel)
    return predict_memory(facts, setup), predict_time(facts, setup, machine(num_gpus))


def comparisons() -> dict[str, Values]:
    """Scaling of DDP, cost of offloading, and layers that FSDP has in flight."""
    facts = load_model_facts(MIDDLE, allow_download=False)
    speed = {n: _spread(facts, ParallelSetup("ddp" if n > 1 else "single", n), n)[1].tokens_per_second for n in (1, 4)}
    zero3 = _spread(facts, ParallelSetup("zero3", 8), 8)[1].step_seconds
    rows: dict[str, Values] = {"h100x4/ddp_scaling": {"speed": speed[4] / speed[1]}}
    for where in ("cpu", "nvme"):
        parallel = ParallelSetup("zero3", 8, offload_params=where, offload_optimizer=where)
        rows[f"h100x8/offload_cost_{where}"] = {"slower": _spread(facts, parallel, 8)[1].step_seconds / zero3 - 1}
    setup = replace(SPREAD, parallel=ParallelSetup("fsdp2", 8))
    groups = parameter_groups(facts, setup)
    outside = (groups.base - facts.layer_params) * setup.compute_bytes
    in_flight = transfers(facts, setup).gathered_bytes - outside
    rows["h100x8/in_flight"] = {"layers": in_flight / (groups.largest_layer * setup.compute_bytes)}
    return rows


def choices() -> dict[str, Values]:
    """Answers of `plan` along the decision tree."""
    asked = {
        "fits": {"model": "Qwen/Qwen3-0.6B", "gpu": GPU, "num_gpus": "1"},
        "tight": {"model": "Qwen/Qwen3-1.7B", "gpu": "4090", "num_gpus": "1"},
        "slow": {"model": "Qwen/Qwen3-0.6B", "gpu": GPU, "num_gpus": "8"},
        "sharded": {"model": MIDDLE, "gpu": GPU, "num_gpus": "8"},
        "large": {
            "model": LARGE,
            "gpu": GPU,
            "num_gpus": "64",
            "network": "infiniband-8xndr",
            "recipe": "pretrain",
            "tp_size": "4",
            "pp_size": "4",
        },
        "offloaded_70b": {
            "model": LARGE,
            "gpu": "A100-80GB-SXM",
            "num_gpus": "8",
            "strategy": ["zero3_offload"],
            "host_memory": "2048GiB",
        },
    }
    return {f"plan/{name}": _choice(**words) for name, words in asked.items()}


def _choice(model: str, **words: str | list[str]) -> Values:
    best = accel_scale.plan(model, **words).best  # type: ignore[arg-type]
    if best is None:
        return {"label": "nothing fits", "bytes": 0.0, "host_bytes": 0.0}
    setup = best.setup
    label = f"{best.choice.label}, {setup.precision}, micro-batch {setup.micro_batch_size} × {setup.accumulation}"
    return {
        "label": f"{label}, checkpointing {setup.checkpointing}",
        "bytes": best.memory.needed_bytes,
        "host_bytes": best.memory.host_bytes,
    }


PARALLEL_NAMES = tuple(name for name, _, _ in PARALLEL_RUNGS)
STAGE = Stage(
    "predicted",
    "predicted",
    f"By the planner, for {GPU}. One GPU: {SMALL}, full fine-tuning of rows of 2,048 tokens, micro-batch 8. Eight "
    f"GPUs: a global batch of {GLOBAL_BATCH} rows of 4,096 tokens, bf16, every layer checkpointed.",
    (
        Work(tuple(f"h100/{rung.name}" for rung in RUNGS), one_gpu),
        Work(tuple(f"h100x8/{name}" for name in PARALLEL_NAMES), functools.partial(eight_gpus, MIDDLE, "h100x8")),
        Work(
            tuple(f"h100x8_70b/{name}" for name in PARALLEL_NAMES), functools.partial(eight_gpus, LARGE, "h100x8_70b")
        ),
        Work(
            ("h100x4/ddp_scaling", "h100x8/offload_cost_cpu", "h100x8/offload_cost_nvme", "h100x8/in_flight"),
            comparisons,
        ),
        Work(tuple(f"plan/{n}" for n in ("fits", "tight", "slow", "sharded", "large", "offloaded_70b")), choices),
    ),
)
