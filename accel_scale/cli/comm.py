"""What collectives cost: predicted by algorithm, and measured on this launch.

  accel-scale comm --op all_reduce --size 1GiB --gpu h100 --nodes 2 --gpus_per_node 8
  accel-scale comm --op all --size 64KiB..1GiB --link nvlink-a100 --gpus_per_node 8 --step_factor 16
  accel-scale comm --measure --processes 2 --save links.json
  torchrun --nproc_per_node 8 --no-python accel-scale comm --measure
  accel-scale comm --catalogue

Sizes and bandwidths are nccl-tests': K is the whole tensor, algbw is K ÷ time, busbw what each link carried.
A measurement writes a file from which `accel-scale plan --links FILE` predicts communication.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from accel_scale.cli.comm_cluster import parse_ops, parse_sizes
from accel_scale.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `accel-scale comm`."""
    what = parser.add_argument_group("what")
    what.add_argument("--op", nargs="+", metavar="OP", help="all_reduce, all_gather … or all (default: all_reduce)")
    what.add_argument("--size", nargs="+", metavar="SIZE", help="K: 1GiB, several, or a range 64KiB..1GiB")
    what.add_argument(
        "--step_factor", metavar="X", default="2", help="factor between the sizes of a range (default: 2)"
    )
    what.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    what.add_argument("--catalogue", action="store_true", help="list links with known speeds")
    where = parser.add_argument_group("predicted on")
    where.add_argument("--gpu", help="a card, for its link, e.g. H100 (default: those of this machine)")
    where.add_argument("--nodes", metavar="N", help="servers (default: 1)")
    where.add_argument("--gpus_per_node", metavar="N", help="GPUs of each (default: 8)")
    where.add_argument("--link", help="between GPUs of a server, e.g. nvlink-h100, pcie4, ethernet-25")
    where.add_argument("--network", help="between servers, e.g. ib-ndr, ethernet-100, or 25GB (per second)")
    where.add_argument("--links", metavar="FILE", help="measured by --measure; `measured`: the last ones here")
    where.add_argument("--bandwidth", metavar="SPEED", help="of a GPU's link, one way, as reached, e.g. 12.5GB")
    where.add_argument("--latency", metavar="TIME", help="of a message between GPUs of a server, e.g. 20us")
    where.add_argument("--network_latency", metavar="TIME", help="of a message between servers")
    run = parser.add_argument_group("measured")
    run.add_argument("--measure", action="store_true", help="run the collectives, fit the links and save them")
    run.add_argument("--processes", metavar="N", help="to start here (default: one for each GPU, or 2 on the CPU)")
    run.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl where there is a GPU for each process")
    run.add_argument("--repeats", metavar="N", help="most timings of each size (default: 300)")
    run.add_argument(
        "--save", metavar="FILE", help="file for the links (default: accel_scale/links.json in the cache)"
    )


# Flags that apply to only one way of using the command.
_ONLY_PREDICTED = (
    "gpu", "nodes", "gpus_per_node", "link", "network", "links", "bandwidth", "latency", "network_latency",
)  # fmt: skip
_ONLY_RUN = ("processes", "backend", "save")


def run(args: argparse.Namespace) -> int:
    """Predict or measure."""
    if args.catalogue:
        return _catalogue(args)
    if args.measure:
        _refuse(args, _ONLY_PREDICTED, "says what to predict on, and this measures.")
        from accel_scale.cli.comm_measure import run_measurement

        return run_measurement(args)
    _refuse(args, _ONLY_RUN, "belongs to measurements: add --measure.")
    return _predict(args)


def _refuse(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} {why}", place=f"--{name}", fix="remove it.")


def _catalogue(args: argparse.Namespace) -> int:
    from accel_scale.planning.cost.links import named_links
    from accel_scale.reporting.comm_tables import print_links

    links = list(named_links().values())
    if args.json:
        document = [
            {
                "name": entry.name,
                "peak_bytes_per_second": entry.peak_bytes_per_second,
                "bytes_per_second": entry.link.bytes_per_second,
                "latency_seconds": entry.link.latency_seconds,
            }
            for entry in links
        ]
        print(json.dumps({"links": document}, indent=2))
    else:
        print_links(links)
    return 0


def _predict(args: argparse.Namespace) -> int:
    from accel_scale.cli.comm_cluster import cluster_of_flags
    from accel_scale.planning.cost.links import predict
    from accel_scale.reporting.comm_tables import prediction_dict, print_predictions

    cluster, title, notes = cluster_of_flags(args)
    if cluster.workers == 1:
        raise ConfigError("one worker sends nothing.", place="--gpus_per_node", fix="use 2 or more.")
    groups = [
        predict(op, size, cluster)
        for op in parse_ops(args.op, ("all_reduce",))
        for size in parse_sizes(args.size or ["1GiB"], args.step_factor)
    ]
    if args.json:
        rows = [prediction_dict(entry, is_best=index == 0) for group in groups for index, entry in enumerate(group)]
        print(json.dumps({"on": title, "notes": notes, "predictions": rows}, indent=2))
    else:
        print_predictions(title, groups, notes)
    return 0
