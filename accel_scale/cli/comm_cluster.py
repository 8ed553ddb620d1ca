"""Turn the flags of `accel-scale comm` into a cluster, with the assumptions made."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import Gpu, detect_local, find_gpu, network_bytes_per_second
from accel_scale.network.collectives import Link
from accel_scale.network.link_fit import MeasuredLinks, load_links
from accel_scale.planning.cost.links import (
    ACHIEVED_LINK_FRACTION,
    INTERNODE_LATENCY_SECONDS,
    INTRANODE_LATENCY_SECONDS,
    Cluster,
    NamedLink,
    find_link,
)
from accel_scale.planning.search.request_words import whole
from accel_scale.reporting.comm_tables import gigabytes
from accel_scale.units import parse_bytes

# Default of --gpus_per_node: the usual server.
_GPUS_PER_NODE = 8


def cluster_of_flags(args: argparse.Namespace) -> tuple[Cluster, str, list[str]]:
    """The cluster, a one-line description of it, and the assumptions made, one sentence each.

    Raises:
        ConfigError: if flags contradict each other, or none determines the speed of a link.
    """
    given = [name for name in ("gpu", "link", "bandwidth", "links") if getattr(args, name) is not None]
    if len(given) > 1:
        problem = f"--{given[0]} and --{given[1]} both say how fast links are."
        raise ConfigError(problem, place=f"--{given[1]}", fix="keep one.")
    nodes = 1 if args.nodes is None else whole(args.nodes, "--nodes")
    per_node = None if args.gpus_per_node is None else whole(args.gpus_per_node, "--gpus_per_node")
    for name in ("network", "network_latency"):
        if nodes == 1 and getattr(args, name) is not None:
            raise ConfigError("one server has no network.", place=f"--{name}", fix="add --nodes, or remove it.")
    if args.links is not None:
        return _measured(args, nodes, per_node)
    gpu, found = (find_gpu(args.gpu), 0) if args.gpu is not None else (None, 0)
    if not given:
        gpu, found = _here()
    per_node = per_node or found or _GPUS_PER_NODE
    inside, text = _inside(args, gpu)
    if nodes == 1:
        return Cluster(1, per_node, inside), f"{per_node} GPUs, {text}", []
    between, network, notes = _between(args, gpu, per_node)
    return Cluster(nodes, per_node, inside, between), f"{nodes} servers × {per_node} GPUs, {text}; {network}", notes


def _here() -> tuple[Gpu, int]:
    here = detect_local()
    if here is None:
        raise ConfigError(
            "there is no GPU here to predict for.",
            place="--gpu",
            fix="name a card like H100, a --link like nvlink-h100, a --bandwidth like 12.5GB, or use --measure.",
        )
    return here.gpu, here.num_gpus


def _inside(args: argparse.Namespace, gpu: Gpu | None) -> tuple[Link, str]:
    """A GPU's link to the others in its server, and its description."""
    if args.bandwidth is not None:
        speed = float(parse_bytes(args.bandwidth, place="--bandwidth"))
        link, text = Link(speed, INTRANODE_LATENCY_SECONDS), f"{gigabytes(speed)} GB/s"
    else:
        if args.link is not None:
            named, name = find_link(args.link), args.link
        else:
            assert gpu is not None
            kind = "pcie" if gpu.link == "pcie" else "nvlink"
            named, name = NamedLink(gpu.link, kind, gpu.link_bandwidth()), f"{gpu.name} over {gpu.link}"
        link = named.link
        text = f"{name} at {gigabytes(link.bytes_per_second)} of {gigabytes(named.peak_bytes_per_second)} GB/s"
    latency = parse_latency(args.latency, "--latency")
    link = link if latency is None else replace(link, latency_seconds=latency)
    return link, f"{text}, {link.latency_seconds * 1e6:.3g} µs a message"


def _between(args: argparse.Namespace, gpu: Gpu | None, per_node: int) -> tuple[Link, str, list[str]]:
    """A server's link to the others, its description, and the assumptions made about it."""
    notes: list[str] = []
    if args.network is not None:
        name, peak = args.network, _network(args.network)
    else:
        port = _usual_port(gpu)
        if port is None:
            raise ConfigError(
                "the network between servers is not known.",
                place="--network",
                fix="name it, like ib-ndr or ethernet-100, or give its speed like 25GB.",
            )
        name, peak = f"{per_node} × {port}", per_node * find_link(port).peak_bytes_per_second
        notes.append(f"assumed between servers: a port of {port} for each GPU. --network says otherwise.")
    latency = parse_latency(args.network_latency, "--network_latency")
    link = Link(peak * ACHIEVED_LINK_FRACTION, INTERNODE_LATENCY_SECONDS if latency is None else latency)
    text = f"{name} at {gigabytes(link.bytes_per_second)} of {gigabytes(peak)} GB/s for a server"
    return link, f"{text}, {link.latency_seconds * 1e6:.3g} µs a message", notes


def _network(text: str) -> float:
    """Bytes per second of a server, given as a link's name or an amount."""
    if text.strip()[:1].isdigit():
        return network_bytes_per_second(text)
    return find_link(text, place="--network").peak_bytes_per_second


def _usual_port(gpu: Gpu | None) -> str | None:
    """The port that DGX and HGX servers have for each GPU: HDR for A100s, NDR for H100s and later; None for others."""
    if gpu is None or gpu.link != "nvlink" or gpu.compute_capability is None:
        return None
    major = int(gpu.compute_capability.partition(".")[0])
    return None if major < 8 else "ib-hdr" if major == 8 else "ib-ndr"


def _measured(args: argparse.Namespace, nodes: int, per_node: int | None) -> tuple[Cluster, str, list[str]]:
    links: MeasuredLinks = load_links(args.links)
    for name in ("latency", "network", "network_latency"):
        if getattr(args, name) is not None:
            problem = "measured links have their own speed and latency."
            raise ConfigError(problem, place=f"--{name}", fix="remove it, or --links.")
    per_node = per_node or (next(iter(links.inside.values())).workers if links.inside else 1)
    inside, between = links.inside_link("all_reduce"), links.between_link("all_reduce")
    if per_node > 1 and inside is None:
        problem = f"{links.source} has links between servers only."
        raise ConfigError(problem, place="--links", fix="use --gpus_per_node 1, or measure with more processes.")
    if nodes > 1 and between is None:
        problem = f"{links.source} has links inside a server only."
        raise ConfigError(problem, place="--nodes", fix="use 1, or measure on several servers.")
    cluster = Cluster(
        nodes,
        per_node,
        inside or Link(1.0),
        between,
        inside_of=lambda op: links.inside_link(op) or Link(1.0),
        between_of=lambda op: links.between_link(op) or Link(1.0),
    )
    servers = f"{nodes} servers × {per_node} processes" if nodes > 1 else f"{per_node} processes"
    return cluster, f"{servers}, {links.line}", []


def parse_latency(text: str | None, place: str) -> float | None:
    """Seconds in ``20us``, ``0.1ms`` or ``2e-5``; None for None.

    Raises:
        ConfigError: for anything else.
    """
    if text is None:
        return None
    units = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
    number = text.strip().lower()
    unit = next(name for name in units if number.endswith(name))
    try:
        seconds = float(number.removesuffix(unit)) * units[unit]
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"{text!r} is not a latency.", place=place, fix="write it like 20us.")
    return seconds


def parse_ops(words: Sequence[str] | None, default: Sequence[str]) -> tuple[str, ...]:
    """Names of collectives; ``all`` means every one.

    Raises:
        ConfigError: for an unknown name, suggesting the nearest.
    """
    from accel_scale.network.collectives import OPS
    from accel_scale.planning.search.request_words import one_of

    if words is None:
        return tuple(default)
    chosen = [op.replace("-", "_") for op in words]
    found = OPS if chosen == ["all"] else [one_of(op, (*OPS, "all"), "--op") for op in chosen]
    if "all" in found:
        raise ConfigError("all is every one of them.", place="--op", fix="write --op all alone.")
    return tuple(dict.fromkeys(found))


def parse_sizes(words: Sequence[str], factor_text: str) -> list[int]:
    """Bytes in sizes like ``1GiB`` and in ranges like ``64KiB..1GiB``, both ends included.

    Raises:
        ConfigError: for anything else.
    """
    from accel_scale.planning.laws.scaling_laws import parse_count
    from accel_scale.units import parse_bytes

    factor = parse_count(factor_text, place="--step_factor")
    if factor <= 1:
        raise ConfigError(f"{factor_text} does not grow.", place="--step_factor", fix="use more than 1.")
    sizes: list[int] = []
    for word in words:
        first, dots, last = word.partition("..")
        low = parse_bytes(first, place="--size")
        high = parse_bytes(last, place="--size") if dots else low
        if high < low:
            raise ConfigError(f"{word} ends before it begins.", place="--size", fix=f"write {last}..{first}.")
        size = float(low)
        while size < high * 0.999:
            sizes.append(round(size))
            size *= factor
        sizes.append(high)
    return list(dict.fromkeys(sizes))
