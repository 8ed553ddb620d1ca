"""Links by name, clusters of servers, and the cost of each algorithm on them, with two levels between servers."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import NETWORK_GBIT_PER_SECOND, PCIE_GIGATRANSFERS, find_gpu, pcie_bytes_per_second
from accel_scale.network.collectives import Cost, Link, algorithms_of, bus_factor, collective_cost, steps

# NCCL rings reach about this share of a link's peak ("bus bandwidth" of large messages, nccl-tests on A100 and H100:
# 230–240 of 300 GB/s, 360–370 of 450); networks are similar. Over PCIe most cards go via host memory: two crossings.
ACHIEVED_LINK_FRACTION = 0.8
ACHIEVED_PCIE_FRACTION = 0.4
# Per hop: an NCCL kernel's start and synchronisation inside a server, a network message between servers.
INTRANODE_LATENCY_SECONDS = 5e-6
INTERNODE_LATENCY_SECONDS = 20e-6
_NVLINKS = {"v100": "V100 32GB", "a100": "A100 80GB SXM", "h100": "H100 SXM", "b200": "B200"}


@dataclass(frozen=True)
class NamedLink:
    """A link of the catalogue.

    Attributes:
        name: Name such as ``nvlink-h100``.
        kind: ``nvlink``, ``pcie`` or ``network``.
        peak_bytes_per_second: Vendor's figure, one way; per server for networks, per GPU for the others.
    """

    name: str
    kind: str
    peak_bytes_per_second: float

    @property
    def link(self) -> Link:
        """The link at the share of the peak that collectives reach, with the latency of a message."""
        fraction = ACHIEVED_PCIE_FRACTION if self.kind == "pcie" else ACHIEVED_LINK_FRACTION
        latency = INTERNODE_LATENCY_SECONDS if self.kind == "network" else INTRANODE_LATENCY_SECONDS
        return Link(self.peak_bytes_per_second * fraction, latency)


@functools.cache
def named_links() -> dict[str, NamedLink]:
    """The catalogue: PCIe x16 by generation, NVLink by GPU, networks."""
    found = [
        NamedLink(f"pcie{generation}", "pcie", pcie_bytes_per_second(generation)) for generation in PCIE_GIGATRANSFERS
    ]
    found += [
        NamedLink(f"nvlink-{name}", "nvlink", find_gpu(card).link_bandwidth()) for name, card in _NVLINKS.items()
    ]
    found += [NamedLink(_short(name), "network", gbit * 1e9 / 8) for name, gbit in NETWORK_GBIT_PER_SECOND.items()]
    return {entry.name: entry for entry in found}


def _short(name: str) -> str:
    """``infiniband-hdr`` → ``ib-hdr``, ``ethernet-25g`` → ``ethernet-25``."""
    name = name.replace("infiniband", "ib")
    return name.removesuffix("g") if name.startswith("ethernet") else name


def find_link(text: str, *, place: str = "--link") -> NamedLink:
    """The link called `text`, in any of its spellings (``ib-ndr``, ``infiniband-ndr``, ``Ethernet 25G``).

    Raises:
        ConfigError: naming the nearest.
    """
    key = _short(text.strip().lower().replace("_", "-").replace(" ", "-"))
    known = named_links()
    if key in known:
        return known[key]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"{text!r} is not a known link.", place=place, fix=f"{hint}use one of {', '.join(known)}.")


@dataclass(frozen=True)
class Cluster:
    """Identical servers with identical GPUs.

    Attributes:
        nodes: Number of servers.
        gpus_per_node: Number of GPUs in each.
        inside: A GPU's link to the others of its server.
        between: A server's link to the others, all its ports together; None for one server.
        inside_of: The link for an operation, if each was measured separately; None: always `inside`.
        between_of: The same between servers.
    """

    nodes: int
    gpus_per_node: int
    inside: Link
    between: Link | None = None
    inside_of: Callable[[str], Link] | None = field(default=None, compare=False)
    between_of: Callable[[str], Link] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}.", place=f"--{name}", fix="give 1 or more.")
        if self.nodes > 1 and self.between is None:
            raise ConfigError(
                "the network between servers is not known.", place="--network", fix="name it, like ib-ndr."
            )

    @property
    def workers(self) -> int:
        """Number of GPUs in all servers."""
        return self.nodes * self.gpus_per_node

    def inside_link(self, op: str) -> Link:
        """A GPU's link for `op`."""
        return self.inside_of(op) if self.inside_of else self.inside

    def between_link(self, op: str) -> Link:
        """A server's link for `op`."""
        assert self.between is not None
        return self.between_of(op) if self.between_of else self.between


@dataclass(frozen=True)
class Prediction:
    """One algorithm for one collective on a cluster.

    Attributes:
        op, algorithm, num_bytes, workers: The collective that is predicted.
        seconds: Time until all workers are done.
        bytes_per_worker: Bytes through the link of the busiest worker, over both levels.
        algorithm_bandwidth: K ÷ seconds, bytes per second.
        bus_bandwidth: Algorithm bandwidth times nccl-tests' factor, see `bus_factor`.
    """

    op: str
    algorithm: str
    num_bytes: float
    workers: int
    seconds: float
    bytes_per_worker: float

    @property
    def algorithm_bandwidth(self) -> float:
        return self.num_bytes / self.seconds if self.seconds else 0.0

    @property
    def bus_bandwidth(self) -> float:
        return self.algorithm_bandwidth * bus_factor(self.op, self.workers)


def predict(op: str, num_bytes: float, cluster: Cluster) -> tuple[Prediction, ...]:
    """Every algorithm for `op` on K = `num_bytes` over all workers of `cluster`, fastest first.

    Raises:
        ConfigError: for an unknown operation.
    """
    names = list(algorithms_of(op))
    if cluster.nodes > 1 and cluster.gpus_per_node > 1 and op != "point_to_point":
        names.append("hierarchical")
    costs = {name: cluster_cost(op, name, num_bytes, cluster) for name in names}
    found = [
        Prediction(op, name, num_bytes, cluster.workers, cost.seconds, cost.bytes_per_worker)
        for name, cost in costs.items()
    ]
    return tuple(sorted(found, key=lambda entry: entry.seconds))


def cluster_cost(op: str, algorithm: str, num_bytes: float, cluster: Cluster) -> Cost:
    """Cost of one algorithm over all workers. Rings and trees between servers are striped over all ports of a server.

    - A flat ring crosses between servers once per server: every step waits for the slower of the two links.
    - Trees and recursive doubling are placed so that rounds between servers carry as little as possible.
    - Through a central worker: one message to each worker, in its own server or in another.
    - Pairwise exchange: traffic to other servers shares the server's link.
    - Hierarchical: see `_hierarchical`.
    """
    nodes, per_node = cluster.nodes, cluster.gpus_per_node
    inside = cluster.inside_link(op)
    if nodes == 1:
        return collective_cost(op, algorithm, num_bytes, per_node, inside)
    between = cluster.between_link(op)
    if per_node == 1:
        return collective_cost(op, algorithm, num_bytes, nodes, between)
    if algorithm == "hierarchical":
        return _hierarchical(op, num_bytes, cluster)
    path = steps(op, algorithm, num_bytes, cluster.workers)
    if algorithm == "ring":
        seconds = max(link.seconds(path.messages, path.num_bytes) for link in (inside, between))
        return Cost(path.num_bytes, seconds)
    if algorithm == "tree":
        return _two_level_tree(op, num_bytes, cluster)
    if op == "point_to_point":
        return Cost(path.num_bytes, between.seconds(path.messages, path.num_bytes))
    crossing = (cluster.workers - per_node) / (cluster.workers - 1)
    if algorithm == "central":
        away = between.seconds(path.messages * crossing, path.num_bytes * crossing)
        near = inside.seconds(path.messages * (1 - crossing), path.num_bytes * (1 - crossing))
        return Cost(path.num_bytes, away + near)
    shared = between.shared_by(per_node)
    away = shared.seconds(path.messages * crossing, path.num_bytes * crossing)
    near = inside.seconds(path.messages * (1 - crossing), path.num_bytes * (1 - crossing))
    return Cost(path.num_bytes, max(away, near))


def _two_level_tree(op: str, num_bytes: float, cluster: Cluster) -> Cost:
    nodes, per_node = cluster.nodes, cluster.gpus_per_node
    inside, between = cluster.inside_link(op), cluster.between_link(op)
    if op in ("scatter", "gather"):
        parts = (num_bytes, between), (num_bytes / nodes, inside)
    elif op in ("all_gather", "reduce_scatter"):
        parts = (num_bytes / per_node, between.shared_by(per_node)), (num_bytes, inside)
    elif op == "all_to_all":
        parts = (num_bytes, between.shared_by(per_node)), (num_bytes, inside)
    else:
        parts = (num_bytes, between), (num_bytes, inside)
    sizes = (nodes, per_node)
    return _sum(collective_cost(op, "tree", k, n, link) for (k, link), n in zip(parts, sizes, strict=True))


def _hierarchical(op: str, num_bytes: float, cluster: Cluster) -> Cost:
    """Each server runs a ring inside; between servers, its g GPUs send their parts at once, sharing its link.

    All-reduce: reduce-scatter inside, all-reduce of K/g between, all-gather inside. All-gather and reduce-scatter:
    K/g between, K inside. All-to-all: sorted by destination inside, then exchanged between. Rooted operations: from
    the root's server to one GPU (scatter: all GPUs) of each other server, and from there inside.
    """
    nodes, per_node = cluster.nodes, cluster.gpus_per_node
    inside, between = cluster.inside_link(op), cluster.between_link(op)
    shared = between.shared_by(per_node)
    if op in ("all_reduce", "all_gather", "reduce_scatter"):
        away = collective_cost(op, "ring", num_bytes / per_node, nodes, shared)
        near = collective_cost(op, "ring", num_bytes, per_node, inside)
    elif op == "all_to_all":
        away = collective_cost(op, "direct", num_bytes, nodes, shared)
        near = collective_cost(op, "direct", num_bytes, per_node, inside)
    elif op in ("scatter", "gather"):
        away = collective_cost(op, "central", num_bytes, nodes, between)
        near = collective_cost(op, "central", num_bytes / nodes, per_node, inside)
    else:
        away = collective_cost(op, "ring", num_bytes, nodes, between)
        near = collective_cost(op, "ring", num_bytes, per_node, inside)
    return _sum((away, near))


def _sum(costs: Iterable[Cost]) -> Cost:
    found = list(costs)
    return Cost(sum(cost.bytes_per_worker for cost in found), sum(cost.seconds for cost in found))
