"""Rules on the launch: processes, nodes, FSDP."""

from __future__ import annotations

from accel_scale.checks.case import Case, Finding, Rule, error, warning
from accel_scale.facts.checkpointing import SEGMENTS, kind_of
from accel_scale.launching.strategy import is_true

# Keys that FSDP2 does not have; Accelerate drops them silently.
FSDP1_KEYS = (
    "fsdp_sharding_strategy",
    "fsdp_backward_prefetch",
    "fsdp_use_orig_params",
    "fsdp_sync_module_states",
)


def data_parallel_fallback(case: Case) -> Finding | None:
    """One process that sees several GPUs: transformers would wrap the model in `DataParallel`."""
    p, machine = case.parallel, case.machine
    if not p.kind.is_single or p.use_cpu or machine.num_devices < 2 or case.launch.file_values.get("gpu_ids"):
        return None
    return error(
        case.launch.place("num_processes"),
        f"one process sees {machine.num_devices} GPUs, and transformers would use the slow DataParallel.",
        "launch with --config_file accelerate_configs/ddp.yaml, or set CUDA_VISIBLE_DEVICES=0.",
    )


def more_processes_than_devices(case: Case) -> Finding | None:
    """More processes on this node than GPUs; without any GPU the launch is a rehearsal on CPU processes."""
    local, devices = case.launch.local_world_size or 1, case.machine.num_devices
    if devices == 0 or local <= devices or case.parallel.use_cpu:
        return None
    return error(
        case.launch.place("num_processes"),
        f"{local} processes on this node, but it has {devices} GPUs.",
        f"set num_processes to {devices * _num_machines(case)}.",
    )


def one_process_only(case: Case) -> Finding | None:
    """``MULTI_CPU`` without MPI: `accelerate launch` starts a single process, whatever num_processes says."""
    values = case.launch.file_values
    if values.get("distributed_type") != "MULTI_CPU" or values.get("mpirun_config"):
        return None
    if (values.get("num_processes") or 1) < 2:
        return None
    return error(
        case.launch.place("distributed_type"),
        "accelerate launch starts one process for MULTI_CPU unless mpirun_config is given.",
        "use accelerate_configs/ddp.yaml: without a GPU it runs on CPU processes.",
    )


def uneven_nodes(case: Case) -> Finding | None:
    """A number of processes that does not divide evenly over the nodes."""
    total, machines = case.launch.num_processes, _num_machines(case)
    if total is None or total % machines == 0:
        return None
    return error(
        case.launch.place("num_processes"),
        f"{total} processes do not divide over {machines} nodes.",
        f"use a multiple of {machines}: num_processes counts the GPUs of all nodes together.",
    )


def main_address(case: Case) -> Finding | None:
    """Several nodes, but no address at which the others can reach node 0."""
    values = case.launch.file_values
    if _num_machines(case) == 1 or not values:
        return None
    address = values.get("main_process_ip")
    if not address:
        return error(
            case.launch.place("num_machines"),
            "the address of node 0 is missing.",
            "add main_process_ip and main_process_port.",
        )
    if str(address) in ("127.0.0.1", "localhost"):
        return warning(
            case.launch.place("main_process_ip"),
            f"other nodes cannot reach node 0 at {address}.",
            "write its address there, or pass --main_process_ip to accelerate launch.",
        )
    return None


def tensor_parallelism_unsupported(case: Case) -> Finding | None:
    """Tensor parallelism in a launch file, for a recipe that does not split its model."""
    if case.run.shares_model or case.parallel.tensor_parallel_size == 1:
        return None
    return error(
        case.launch.place("parallelism_config.parallelism_config_tp_size"),
        "the recipe does not support tp_size above 1.",
        "set it to 1 and shard with FSDP2 (dp_shard_size), or use recipes/pretrain.py with FSDP2.",
    )


def deepspeed_sequence_parallelism(case: Case) -> Finding | None:
    """Accelerate's sequence parallelism through DeepSpeed, which loses masks; the recipes have their own flag."""
    p = case.parallel
    if not p.is_deepspeed or p.sequence_parallel_size == 1 or case.run.sp_size is not None:
        return None
    fix = "set it to 1 and use recipes/pretrain.py with FSDP2."
    return error(
        case.launch.place("parallelism_config.parallelism_config_sp_size"),
        "DeepSpeed's sequence parallelism drops the masks that keep packed documents and windows apart.",
        fix if case.run.shares_model else "set it to 1 and share rows by the recipe's own --sp_size.",
    )


def ring_context_parallelism(case: Case) -> Finding | None:
    """Ring attention, for which torch has only CUDA kernels and Accelerate drops every mask."""
    if case.parallel.context_parallel_size == case.parallel.sequence_parallel_size:
        return None
    place = case.launch.place("parallelism_config.parallelism_config_cp_size")
    fix = "set it to 1, and share rows by Ulysses: --sp_size."
    if case.device.type != "cuda":
        return error(place, f"torch's ring attention has kernels for CUDA only, and this is {case.device.type}.", fix)
    return error(place, "the recipes do not run ring context parallelism, which drops attention masks.", fix)


def device_without_collectives(case: Case) -> Finding | None:
    """Several processes on a device without collectives, such as Apple's."""
    if case.device.collective_backend is not None or (case.launch.num_processes or 1) == 1:
        return None
    return error(
        case.launch.place("num_processes"),
        f"torch has no collectives for {case.device.name} ({case.device.type}), so several processes cannot share it.",
        "launch one process, or run on the processor with accelerate launch --cpu.",
    )


def hybrid_sizes(case: Case) -> Finding | None:
    """Replicas × shards must be the number of processes, and a replica must be sharded."""
    p, total = case.parallel, case.launch.num_processes
    if p.num_shards is None or total is None:
        return None
    product = p.num_replicas * p.num_shards * case.model_ranks
    place = case.launch.place("parallelism_config.parallelism_config_dp_replicate_size")
    if product != total:
        return error(
            place,
            f"{p.num_replicas} replicas × {p.num_shards} shards are not {total} processes."
            if case.model_ranks == 1
            else f"{p.num_replicas} replicas × {p.num_shards} shards × {case.model_ranks} ranks that share the model "
            f"are not {total} processes.",
            "make dp_replicate_size × dp_shard_size equal num_processes."
            if case.model_ranks == 1
            else "make the product of all sizes, the recipe's --pp_size included, equal num_processes.",
        )
    if p.num_replicas > 1 and p.num_shards == 1:
        return error(place, "replicas of one shard each are not FSDP.", "use accelerate_configs/ddp.yaml.")
    return None


def fsdp_version(case: Case) -> Finding | None:
    """FSDP version 1, which is Accelerate's default."""
    if case.parallel.kind.fsdp_version != 1:
        return None
    return error(
        case.launch.place("fsdp_config.fsdp_version"),
        "this is FSDP version 1 (Accelerate's default), which torch replaces by version 2.",
        "add fsdp_version: 2 under fsdp_config.",
    )


def fsdp1_keys(case: Case) -> Finding | None:
    """Keys that only FSDP version 1 knows."""
    written = case.launch.file_values.get("fsdp_config") or {}
    found = [key for key in FSDP1_KEYS if key in written or key.removeprefix("fsdp_") in written]
    if not case.parallel.kind.is_fsdp2 or not found:
        return None
    fix = "use fsdp_reshard_after_forward instead." if found[0] == "fsdp_sharding_strategy" else "remove it."
    return warning(case.launch.place(f"fsdp_config.{found[0]}"), f"FSDP2 has no {found[0]}; it is ignored.", fix)


def fsdp_reshard(case: Case) -> Finding | None:
    """FSDP1's strategy names in ``fsdp_reshard_after_forward``."""
    value = case.parallel.fsdp.get("fsdp_reshard_after_forward", True)
    if not case.parallel.kind.is_fsdp2 or str(value).lower() in ("true", "false"):
        return None
    return error(
        case.launch.place("fsdp_config.fsdp_reshard_after_forward"),
        f"FSDP2 takes true or false, not {value}.",
        "write true for FULL_SHARD, false for SHARD_GRAD_OP.",
    )


def fsdp_wrapping(case: Case) -> Finding | None:
    """Without a wrapping policy FSDP gathers the whole model at once."""
    policy = str(case.parallel.fsdp.get("fsdp_auto_wrap_policy", "NO_WRAP"))
    if not case.parallel.kind.is_fsdp2 or policy != "NO_WRAP":
        return None
    return warning(
        case.launch.place("fsdp_config.fsdp_auto_wrap_policy"),
        "without a wrapping policy each step gathers all weights at once.",
        "write fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP.",
    )


def checkpointing_twice(case: Case) -> Finding | None:
    """FSDP's activation checkpointing on top of the recipe's."""
    if not is_true(case.parallel.fsdp.get("fsdp_activation_checkpointing", False)) or not case.checkpoints:
        return None
    return error(
        case.launch.place("fsdp_config.fsdp_activation_checkpointing"),
        "FSDP and the recipe would both recompute activations.",
        "write fsdp_activation_checkpointing: false there, or use --checkpointing_policy none.",
    )


def segments_of_sharded_layers(case: Case) -> Finding | None:
    """FSDP2 and ZeRO-3 gather the weights of one layer at a time, for its forward and its backward pass."""
    policy, kind = case.run.checkpointing_policy, case.parallel.kind
    if policy is None or kind_of(policy) != SEGMENTS or not kind.shards_weights:
        return None
    return error(
        case.run.place("checkpointing_policy"),
        f"{kind.label} gathers weights layer by layer, so that {policy} would gather them once more.",
        "use --checkpointing_policy full, or accelerate_configs/zero2.yaml, which leaves weights whole.",
    )


def trainer_launch_flags(case: Case) -> Finding | None:
    """``--fsdp`` or ``--deepspeed`` of the Trainer beside a launch file."""
    for flag in ("deepspeed", "fsdp"):
        if getattr(case.run, flag):
            return error(
                case.run.place(flag),
                f"--{flag} is decided by the launch file.",
                "remove it and launch with one of accelerate_configs/.",
            )
    return None


def cpu_flag(case: Case) -> Finding | None:
    """``--use_cpu`` with a sharding launch: the process group that sharding needs is never made."""
    if not case.run.use_cpu or not (case.parallel.is_fsdp or case.parallel.is_deepspeed):
        return None
    return error(
        case.run.place("use_cpu"),
        f"--use_cpu does not go with {case.parallel.label}.",
        "remove it: without a GPU the launch runs on CPU processes by itself.",
    )


def _num_machines(case: Case) -> int:
    total, local = case.launch.num_processes, case.launch.local_world_size
    written = int(case.launch.file_values.get("num_machines") or 1)
    return max(written, 1) if not total or not local else max(written, total // local)


LAUNCH_RULES: tuple[Rule, ...] = (
    data_parallel_fallback,
    more_processes_than_devices,
    one_process_only,
    uneven_nodes,
    main_address,
    tensor_parallelism_unsupported,
    deepspeed_sequence_parallelism,
    ring_context_parallelism,
    device_without_collectives,
    hybrid_sizes,
    fsdp_version,
    fsdp1_keys,
    fsdp_reshard,
    fsdp_wrapping,
    checkpointing_twice,
    segments_of_sharded_layers,
    trainer_launch_flags,
    cpu_flag,
)
