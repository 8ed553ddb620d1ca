"""The layout of ranks that results from flags, launch and launch file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.facts.names import STAGES_PER_RANK
from accel_scale.flags.parallel import ParallelArguments
from accel_scale.parallel.layout import ParallelLayout

if TYPE_CHECKING:
    from accel_scale.checks.case import Launch
    from accel_scale.flags.parsing import ParsedFlags
    from accel_scale.starting.recipe_start import Start


def layout_of(parsed: ParsedFlags, launch: Launch) -> ParallelLayout:
    """The layout on which the given flags and the launch agree.

    Args:
        launch: The launch of this process, or a launch file that sets the number of processes.

    Raises:
        ConfigError: if they contradict each other or do not divide evenly.
    """
    values = parsed.explicit
    places = {name: parsed.place(name) for name in values}
    tp = _size("tp", values, launch.parallel.tensor_parallel_size, places)
    sp = _size("sp", values, launch.parallel.sequence_parallel_size, places)
    pp = _size("pp", values, 1, places)
    if launch.parallel.context_parallel_size > launch.parallel.sequence_parallel_size:
        raise ConfigError(
            "ring context parallelism is not available in a plain loop.",
            place=launch.place("parallelism_config.parallelism_config_cp_size"),
            fix="share rows by Ulysses: --sp_size.",
        )
    for name in ("pp_schedule", "pp_stages_per_rank"):
        if values.get(name) is not None and pp == 1:
            raise ConfigError(
                f"--{name} does nothing without a pipeline.", place=places.get(name, f"--{name}"), fix="add --pp_size."
            )
    shared, num_processes = tp * sp * pp, launch.num_processes or 1
    if shared == 1:
        return _data_parallel(launch, num_processes)
    asked = " × ".join(f"--{n}_size {s}" for n, s in (("tp", tp), ("sp", sp), ("pp", pp)) if s > 1)
    place = next((places[f"{n}_size"] for n in ("tp", "sp", "pp") if f"{n}_size" in places), "launch file")
    if num_processes % shared:
        raise ConfigError(
            f"the {num_processes} launched cannot be divided by {asked}.",
            place=place,
            fix=f"launch a multiple of {shared} processes (--num_processes).",
        )
    if not (launch.parallel.kind.is_replicated or launch.parallel.kind.is_fsdp2):
        raise ConfigError(
            f"{launch.parallel.label} shards by itself and does not go with {asked}.",
            place=place,
            fix="use accelerate_configs/ddp.yaml or accelerate_configs/fsdp2.yaml.",
        )
    if launch.parallel.offloads_params:
        raise ConfigError(
            f"CPU offload does not go with {asked}.",
            place=launch.place("fsdp_config.fsdp_offload_params"),
            fix="set fsdp_offload_params: false.",
        )
    return replace(_data_parallel(launch, num_processes // shared), tp=tp, sp=sp, pp=pp)


def _size(name: str, values: Mapping[str, Any], in_file: int, places: Mapping[str, str]) -> int:
    given = values.get(f"{name}_size")
    if given is None:
        return in_file
    place = places.get(f"{name}_size", f"--{name}_size")
    if given < 1:
        raise ConfigError(f"{given} is too small.", place=place, fix="use 1 or more.")
    if in_file not in (1, given):
        raise ConfigError(
            f"--{name}_size is {given}, and the launch file says {in_file}.", place=place, fix="remove one of the two."
        )
    return int(given)


def _data_parallel(launch: Launch, ranks: int) -> ParallelLayout:
    """The layout of `ranks` with their own rows: all shards, replicas of shards, or replicas, by the launch file."""
    if not launch.parallel.kind.is_fsdp2:
        return ParallelLayout(dp_replicate=ranks)
    replicas = launch.parallel.num_replicas
    if ranks % replicas:
        raise ConfigError(
            f"{ranks} data-parallel ranks cannot form {replicas} replicas.",
            place=launch.place("parallelism_config.parallelism_config_dp_replicate_size"),
            fix="make dp_replicate_size a divisor of the ranks that tensor, sequence and pipeline sizes leave.",
        )
    return ParallelLayout(dp_replicate=replicas, dp_shard=ranks // replicas, fsdp=True)


def stages_per_rank(args: ParallelArguments) -> int:
    """Number of stages that each rank of a pipeline holds."""
    return args.pp_stages_per_rank or STAGES_PER_RANK.get(args.pp_schedule or "1f1b", 1)


def with_layout(start: Start, layout: ParallelLayout) -> Start:
    """`start` for a recipe whose batch counts only data-parallel ranks."""
    if layout.is_plain:
        return start
    return replace(start, facts=replace(start.facts, world_size=layout.data_ranks))


def row_group_size(parsed: ParsedFlags, launch: Launch) -> int:
    """Ranks that share each row if the engine treats all ranks as data-parallel; 1: none do.

    Raises:
        ConfigError: if the launched processes do not form such groups, or their engine does not support it.
    """
    in_file = launch.parallel.sequence_parallel_size
    size = _size("sp", parsed.explicit, in_file, {"sp_size": parsed.place("sp_size")})
    if size == 1:
        return 1
    if in_file > 1 and launch.parallel.is_deepspeed:
        raise ConfigError(
            "DeepSpeed's sequence parallelism drops the masks that keep packed documents and windows apart.",
            place=launch.place("parallelism_config.parallelism_config_sp_size"),
            fix=f"set it to 1 there and add --sp_size {size}, the recipe's own.",
        )
    place = parsed.place("sp_size") if parsed.explicit.get("sp_size") else "launch file"
    num_processes = launch.num_processes or 1
    if num_processes % size:
        raise ConfigError(
            f"the {num_processes} launched cannot be divided by --sp_size {size}.",
            place=place,
            fix=f"launch a multiple of {size} processes (--num_processes).",
        )
    kind = launch.parallel.kind
    if not (kind.is_ddp or kind.is_fsdp2 or kind.is_deepspeed):
        raise ConfigError(
            f"{launch.parallel.label} does not go with --sp_size.",
            place=place,
            fix="use accelerate_configs/ddp.yaml, accelerate_configs/fsdp2.yaml or one of DeepSpeed's.",
        )
    return size


def rows_in_groups(parsed: ParsedFlags, start: Start) -> tuple[Start, int]:
    """`start` for a trainer whose batch counts groups of ranks with the same rows, and the size of a group.

    What Accelerate reads of the launch file is changed too: its own sequence parallelism is DeepSpeed's, and weights
    are sharded over all ranks of a group.

    Raises:
        ConfigError: as `row_group_size`.
    """
    from accel_scale.launching.strategy import is_true

    launch = start.launch
    size = row_group_size(parsed, launch)
    if size == 1:
        return start, 1
    if is_true(os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false")):
        shards = int(os.environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1"))
        os.environ |= {"PARALLELISM_CONFIG_SP_SIZE": "1", "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(shards * size)}
        if launch.parallel.kind.is_ddp:
            os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "false"
    parallel = replace(launch.parallel, sequence_parallel_size=size, context_parallel_size=size)
    facts = replace(start.facts, world_size=launch.world_size // size)
    return replace(start, launch=replace(launch, parallel=parallel), facts=facts), size
