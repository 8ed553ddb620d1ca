"""Writes a plan's launch file for `accelerate launch`, and DeepSpeed's own file if it needs one."""

from __future__ import annotations

import json
import math
from pathlib import Path

from accel_scale.facts.optimizer_specs import modelled_optimizer
from accel_scale.facts.precisions import PRECISION_FACTS
from accel_scale.facts.zero_buffers import DEEPSPEED_BUFFERS
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup
from accel_scale.planning.search.search import Candidate

DEEPSPEED = "deepspeed.json"
_AUTOMATIC = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
MARK = "Written by accel-scale plan"


def launch_yaml(candidate: Candidate, command: str, folder: Path) -> str:
    """The launch file of `candidate`, to be written to `folder`; `command` is shown in its comment."""
    parallel, setup = candidate.setup.parallel, candidate.setup
    several = "MULTI_GPU" if parallel.num_gpus > 1 else "'NO'"
    kinds = {"none": several, "ddp": "MULTI_GPU", "fsdp": "FSDP", "deepspeed": "DEEPSPEED"}
    uses_file = needs_file(parallel)
    lines = [f"# {about(candidate)}", "#", *_nodes_comment(parallel), f"#   {command}"]
    lines += ["compute_environment: LOCAL_MACHINE", f"distributed_type: {kinds[parallel.kind.engine]}"]
    precision = PRECISION_FACTS[setup.precision]
    if not precision.is_fp8 and not uses_file:  # fp8 is left to the recipe, which converts the layers itself
        lines.append(f"mixed_precision: {precision.launch}".replace(" no", " 'no'"))  # YAML's no is false
    nodes = num_nodes(parallel)
    total = "  # GPUs of all nodes together" if nodes > 1 else "  # the number of GPUs"
    lines += [f"num_machines: {nodes}", f"num_processes: {parallel.num_gpus}{total}"]
    if parallel.num_gpus == 1 and parallel.kind.is_single:
        lines += ["# Only this GPU is made visible: with several, the Trainer would fall back to DataParallel."]
        lines += ["gpu_ids: '0'"]
    if nodes > 1:
        lines += _NODES
    if parallel.kind.is_fsdp:
        lines += _shared_fsdp(parallel) if parallel.is_divided else _fsdp(setup)
    if parallel.is_deepspeed:
        lines += _deepspeed(parallel, folder)
    return "\n".join(lines) + "\n"


def _nodes_comment(parallel: ParallelSetup) -> list[str]:
    if num_nodes(parallel) == 1:
        return []
    return ["# Start the same command once on every node with its own rank, all with the address of node 0:"]


_NODES = (
    "machine_rank: 0  # 0 on the first node, 1 on the second, …",
    "main_process_ip: 127.0.0.1  # the address of node 0 as the other nodes see it",
    "main_process_port: 29500  # free on node 0 and open between the nodes",
    "same_network: true",
    "rdzv_backend: static",
)


def _fsdp(setup: TrainingSetup) -> list[str]:
    parallel, lines = setup.parallel, []
    checkpoints = [
        "  # Checkpoints are whole models that `from_pretrained` loads.",
        "  fsdp_state_dict_type: FULL_STATE_DICT",
    ]
    if not modelled_optimizer(setup.optimizer).whole_checkpoints:
        checkpoints = [
            f"  # In shards: whole checkpoints of {setup.optimizer} cannot be resumed. The final model is whole.",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        ]
    if parallel.num_replicas > 1:
        lines += [
            "# Sharded inside each node, replicated between nodes.",
            "parallelism_config:",
            f"  parallelism_config_dp_replicate_size: {parallel.num_replicas}",
            f"  parallelism_config_dp_shard_size: {parallel.num_gpus // parallel.num_replicas}",
        ]
    freed = "freed after its forward and gathered again" if parallel.reshard_after_forward else "kept until"
    host = "live in host memory" if parallel.offloads_params else "stay on the GPU"
    return [
        *lines,
        "fsdp_config:",
        "  fsdp_version: 2",
        f"  # A block's gathered weights are {freed} for its backward.",
        f"  fsdp_reshard_after_forward: {str(parallel.reshard_after_forward).lower()}",
        f"  # Sharded weights, gradients and optimizer states {host}.",
        f"  fsdp_offload_params: {str(parallel.offload_params != 'none').lower()}",
        "  # The model's own `_no_split_modules` (its transformer blocks) are the units: no class name to give.",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        "  # Rank 0 alone reads the checkpoint and sends each rank its shard.",
        "  fsdp_cpu_ram_efficient_loading: true",
        *checkpoints,
        "  # Left to the recipe's checkpointing_policy.",
        "  fsdp_activation_checkpointing: false",
    ]


def _shared_fsdp(parallel: ParallelSetup) -> list[str]:
    """Lines for FSDP2 with tensor, pipeline or sequence parallelism; stages are set by the recipe's flag."""
    shards = parallel.data_parallel // parallel.num_replicas
    sizes = {"dp_replicate": parallel.num_replicas, "dp_shard": shards}
    sizes |= {"tp": parallel.tensor_parallel, "sp": parallel.sequence_parallel}
    product = " × ".join(["pp_size"] * (parallel.pipeline_parallel > 1) + [n for n, size in sizes.items() if size > 1])
    lines = [f"# num_processes = {product}.", "parallelism_config:"]
    lines += [
        f"  parallelism_config_{name}_size: {size}" for name, size in sizes.items() if size > 1 or name == "dp_shard"
    ]
    if parallel.sequence_parallel > 1:
        lines.append("  parallelism_config_sp_backend: deepspeed  # Accelerate's only name; the recipe's own is used")
    return [
        *lines,
        "fsdp_config:",
        "  fsdp_version: 2",
        "  # The model's own `_no_split_modules` (its transformer blocks) are the units.",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        f"  fsdp_reshard_after_forward: {str(parallel.reshard_after_forward).lower()}",
    ]


def _deepspeed(parallel: ParallelSetup, folder: Path) -> list[str]:
    lines = ["deepspeed_config:"]
    if num_nodes(parallel) > 1:
        lines += ["  # One launcher per node, as torchrun does: no ssh between nodes and no hostfile needed."]
        lines += ["  deepspeed_multinode_launcher: standard"]
    if needs_file(parallel):
        if _uses_nvme(parallel):
            lines += ["  # Its nvme_path (twice) must be on a local NVMe: everything is read and written every step."]
        lines += ["  # Precision, accumulation and clipping are `auto` in there: the recipe's flags rule."]
        lines += [f"  deepspeed_config_file: {json.dumps(str((folder / DEEPSPEED).resolve()))}"]
        return [*lines, *(["  zero3_init_flag: true"] if parallel.shards_weights else [])]
    lines.append(f"  zero_stage: {parallel.kind.zero_stage}")
    for name, device in (("optimizer", parallel.offload_optimizer), ("param", parallel.offload_params)):
        if device != "none":
            lines.append(f"  offload_{name}_device: {device}")
    if parallel.offloads_optimizer:
        lines.append("  # DeepSpeed compiles its CPU Adam at the first run: it needs g++ and ninja.")
    if parallel.shards_weights:
        lines += [
            "  # Build the model already split, so that no rank ever holds all of it.",
            "  zero3_init_flag: true",
        ]
        lines += ["  # Gather the 16-bit weights when saving: checkpoints then load with `from_pretrained`."]
        lines += ["  zero3_save_16bit_model: true"]
    lines += ["  # The recipe's --gradient_accumulation_steps and --max_grad_norm rule."]
    return [*lines, "  gradient_accumulation_steps: auto", "  gradient_clipping: auto"]


def needs_file(parallel: ParallelSetup) -> bool:
    """True if DeepSpeed needs its own file: `accelerate launch` passes on neither disk paths nor buffer sizes."""
    return parallel.is_deepspeed and (_uses_nvme(parallel) or parallel.zero != DEEPSPEED_BUFFERS)


def _uses_nvme(parallel: ParallelSetup) -> bool:
    return "nvme" in (parallel.offload_params, parallel.offload_optimizer)


def deepspeed_json(model: ModelFacts, parallel: ParallelSetup, folder: Path) -> str:
    """Contents of DeepSpeed's own file."""
    if _uses_nvme(parallel):
        content = _infinity(model, parallel, folder)
    else:
        stage = parallel.kind.zero_stage or 0
        zero: dict[str, object] = {"stage": stage, **parallel.zero.as_keys(stage)}
        if parallel.shards_weights:
            zero["stage3_gather_16bit_weights_on_model_save"] = True
        content = {"zero_optimization": zero}
    content |= {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, **dict.fromkeys(_AUTOMATIC, "auto")}
    return json.dumps(content, indent=2) + "\n"


def _infinity(model: ModelFacts, parallel: ParallelSetup, folder: Path) -> dict[str, object]:
    """ZeRO-Infinity's keys. A buffer holds a rank's share of the largest weight, in elements (in whole millions)."""
    largest = max(
        model.embedding_params,
        *(item.in_features * item.out_features * item.copies for layer in model.layers for item in layer.linears),
    )
    nvme = {"device": "nvme", "nvme_path": str((folder / "nvme_offload").resolve()), "pin_memory": True}
    share = math.ceil(largest / parallel.num_gpus / 1e6) * 1_000_000
    zero = {
        "stage": 3,
        "offload_param": {**nvme, "buffer_count": 5, "buffer_size": max(share, 10_000_000)},
        "offload_optimizer": {**nvme, "buffer_count": 4},
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    aio = {"block_size": 2**20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False}
    return {"zero_optimization": zero, "aio": {**aio, "overlap_events": True}}


def about(candidate: Candidate) -> str:
    """The first line of both files."""
    setup, gpus = candidate.setup, candidate.setup.parallel.num_gpus
    where = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    return f"{MARK}: {candidate.choice.label}, {setup.method}, micro-batch {setup.micro_batch_size} on {where}."


def num_nodes(parallel: ParallelSetup) -> int:
    """Number of servers that the launch spans."""
    return max(1, parallel.num_gpus // parallel.gpus_per_node)
