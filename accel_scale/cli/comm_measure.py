"""`accel-scale comm --measure`: measure on this launch or on new processes, then fit and print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.ending.leaving import leave_process_group
from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from accel_scale.network.link_fit import MeasuredLinks

# The collectives that the planner needs.
_DEFAULT_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "point_to_point")
_DEFAULT_SIZES = {"gloo": "4KiB..16MiB", "nccl": "64KiB..1GiB"}


def run_measurement(args: argparse.Namespace) -> int:
    """Measure, fit, save, print."""
    from accel_scale.cli.comm_cluster import parse_ops, parse_sizes
    from accel_scale.launching.local_processes import choose_backend
    from accel_scale.measuring.collective_runs import DEFAULT_REPEATS, measure_levels
    from accel_scale.network.link_fit import default_path, save_links, worst_and_median
    from accel_scale.planning.search.request_words import whole
    from accel_scale.reporting.comm_tables import print_measured

    ops, repeats = (
        parse_ops(args.op, _DEFAULT_OPS),
        whole(args.repeats, "--repeats") if args.repeats else DEFAULT_REPEATS,
    )
    processes = num_processes(args)
    backend = choose_backend(args.backend, processes)
    sizes = parse_sizes(args.size or [_DEFAULT_SIZES[backend]], args.step_factor)
    if len(sizes) < 2:
        raise ConfigError("one size shows no bandwidth.", place="--size", fix="give a range, like 4KiB..64MiB.")
    found = on_processes(args, measure_levels, processes, ops, sizes, repeats)
    if found is None:
        return 0  # another rank prints
    links = links_of(found)
    path = Path(args.save).expanduser() if args.save else default_path()
    save_links(links, path)
    error = worst_and_median([*links.inside.values(), *links.between.values()])
    if args.json:
        print(json.dumps(_as_dict(links, path, error), indent=2))
        return 0
    print_measured(links)
    if error is not None:
        print(f"on sizes that were not fitted: median error {error[0]:.1%}, worst {error[1]:.1%}")
    print(f"saved      {path}, for accel-scale plan --links and accel-scale comm --links")
    return 0


def links_of(found: dict[str, Any]) -> MeasuredLinks:
    """Fit the measurements that `measure_levels` returned."""
    from accel_scale.network.link_fit import MeasuredLinks, Sample, fit_op

    levels: dict[str, Any] = {"inside": {}, "between": {}}
    sharing = 1
    for level in found["levels"]:
        samples = [Sample(**entry) for entry in level["samples"]]
        ops = dict.fromkeys(sample.op for sample in samples)
        levels[level["name"]] = {op: fit_op([s for s in samples if s.op == op]) for op in ops}
        sharing = max(sharing, level["sharing"])
    return MeasuredLinks(
        found["backend"],
        found["device"],
        **levels,
        sharing=sharing,
        versions=found["versions"],
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _as_dict(links: MeasuredLinks, path: Path, error: tuple[float, float] | None) -> dict[str, Any]:
    from dataclasses import asdict

    rows = [
        {
            "level": level,
            **asdict(sample),
            "algorithm_bandwidth": sample.algorithm_bandwidth,
            "bus_bandwidth": sample.bus_bandwidth,
            "predicted_seconds": fit.predicted_seconds(sample.num_bytes),
            "fitted": sample.num_bytes in fit.fitted_bytes,
        }
        for level, fits in (("inside", links.inside), ("between", links.between))
        for fit in fits.values()
        for sample in fit.samples
    ]
    document = asdict(links)
    for level in ("inside", "between"):
        for fit in document[level].values():
            del fit["samples"]
    found = {"median": error[0], "worst": error[1]} if error else None
    return {**document, "source": str(path), "held_out_error": found, "measurements": rows}


def num_processes(args: argparse.Namespace) -> int:
    """Number of processes of this launch, or to start.

    Raises:
        ConfigError: if both are given, or only one process is asked for.
    """
    import torch

    from accel_scale.launching.local_processes import launched_processes
    from accel_scale.planning.search.request_words import whole

    launched = launched_processes()
    if launched and args.processes is not None:
        problem = f"this is one of {launched} launched processes already."
        raise ConfigError(problem, place="--processes", fix="remove it.")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and args.backend != "gloo" else 0
    default = str(gpus) if gpus > 1 else "2"
    count = launched or whole(default if args.processes is None else args.processes, "--processes")
    if count == 1:
        raise ConfigError("one process sends nothing.", place="--processes", fix="use 2 or more.")
    return count


def on_processes(args: argparse.Namespace, work: Callable[..., Any], processes: int, *rest: object) -> Any:
    """Run `work` on the processes; returns its result on rank 0, None on the other ranks of a launch."""
    from accel_scale.launching.local_processes import join_launch, launched_processes, run_locally
    from accel_scale.quiet import quiet_imports

    quiet_imports()
    if not launched_processes():
        print(f"running on {processes} processes of this machine", file=sys.stderr)
        return run_locally(work, processes, args.backend, *rest)

    place = join_launch(args.backend)
    try:
        found = work(place, *rest)
    finally:
        leave_process_group()
    return found if place.rank == 0 else None
