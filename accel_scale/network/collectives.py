"""Cost of a collective over N workers: messages and bytes of each algorithm, and seconds over a link.

K is the size as nccl-tests counts it: the whole tensor. In an all-gather, reduce-scatter, scatter, gather or
all-to-all, each of the N workers holds one N-th of it. Sources: Thakur, Rabenseifner, Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005) for the logarithmic algorithms and pairwise exchange; Patarasuk,
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009) for rings; nccl-tests,
PERFORMANCE.md, for algorithm and bus bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from accel_scale.errors import ConfigError

OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "point_to_point",
)


@dataclass(frozen=True)
class Link:
    """The link of one worker in the α–β model, where a message of K bytes takes α + K/β.

    Measured links may have a knee: a worker sends bytes beyond `knee_bytes` at another speed, because they no
    longer fit a cache, or because the library switches protocols.

    Attributes:
        bytes_per_second: β, one way.
        latency_seconds: α, of each message.
        knee_bytes: Bytes of one collective up to which β holds; None: always.
        bytes_per_second_beyond: β of the remaining bytes.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0
    knee_bytes: float | None = None
    bytes_per_second_beyond: float | None = None

    def seconds(self, messages: float, num_bytes: float) -> float:
        """Time of `messages` sent one after the other, `num_bytes` in total."""
        sending = num_bytes / self.bytes_per_second
        if self.knee_bytes is not None and self.bytes_per_second_beyond and num_bytes > self.knee_bytes:
            beyond = (num_bytes - self.knee_bytes) / self.bytes_per_second_beyond
            sending = self.knee_bytes / self.bytes_per_second + beyond
        return messages * self.latency_seconds + sending

    def shared_by(self, workers: float) -> Link:
        """The link left to each of `workers` that send through this one at the same time."""
        beyond = self.bytes_per_second_beyond
        return Link(
            self.bytes_per_second / workers,
            self.latency_seconds,
            self.knee_bytes,
            None if beyond is None else beyond / workers,
        )


@dataclass(frozen=True)
class Steps:
    """The critical path of an algorithm.

    Attributes:
        messages: Messages sent one after the other; each costs a latency.
        num_bytes: Bytes through the link of the busiest worker. Consecutive phases add up; traffic in both directions
            within a phase counts once, because links carry both at full speed.
    """

    messages: float
    num_bytes: float


@dataclass(frozen=True)
class Cost:
    """One collective over N workers.

    Attributes:
        bytes_per_worker: As in `Steps.num_bytes`.
        seconds: Time until all workers are done.
    """

    bytes_per_worker: float
    seconds: float


# K bytes and N > 1 workers → the critical path.
Formula = Callable[[float, int], Steps]


def rounds(workers: int) -> int:
    """⌈log2 N⌉: the rounds needed if each doubles the number of workers reached."""
    return math.ceil(math.log2(workers))


def _share(num_bytes: float, workers: int) -> float:
    """(N−1)K/N: all but one worker's part."""
    return (workers - 1) / workers * num_bytes


# Every worker talks to its two neighbours. Rooted operations form a chain, in chunks that are small compared with K.
RING: Mapping[str, Formula] = {
    "broadcast": lambda k, n: Steps(n - 1, k),
    "reduce": lambda k, n: Steps(n - 1, k),
    "scatter": lambda k, n: Steps(n - 1, _share(k, n)),
    "gather": lambda k, n: Steps(n - 1, _share(k, n)),
    "all_gather": lambda k, n: Steps(n - 1, _share(k, n)),
    "reduce_scatter": lambda k, n: Steps(n - 1, _share(k, n)),
    # Reduce-scatter, then all-gather.
    "all_reduce": lambda k, n: Steps(2 * (n - 1), 2 * _share(k, n)),
    # A block for the d-th neighbour travels d hops: K/N × (1 + 2 + … + N−1).
    "all_to_all": lambda k, n: Steps(n - 1, (n - 1) / 2 * k),
}
# ⌈log2 N⌉ rounds. Binomial trees for rooted operations, up and down again for all-reduce; recursive doubling and
# halving for all-gather and reduce-scatter; Bruck's algorithm for all-to-all (half of K in every round).
TREE: Mapping[str, Formula] = {
    "broadcast": lambda k, n: Steps(rounds(n), rounds(n) * k),
    "reduce": lambda k, n: Steps(rounds(n), rounds(n) * k),
    "scatter": lambda k, n: Steps(rounds(n), _share(k, n)),
    "gather": lambda k, n: Steps(rounds(n), _share(k, n)),
    "all_gather": lambda k, n: Steps(rounds(n), _share(k, n)),
    "reduce_scatter": lambda k, n: Steps(rounds(n), _share(k, n)),
    "all_reduce": lambda k, n: Steps(2 * rounds(n), 2 * rounds(n) * k),
    "all_to_all": lambda k, n: Steps(rounds(n), rounds(n) * k / 2),
}
# Everything goes through one worker, whose link is the bottleneck.
CENTRAL: Mapping[str, Formula] = {
    "broadcast": lambda k, n: Steps(n - 1, (n - 1) * k),
    "reduce": lambda k, n: Steps(n - 1, (n - 1) * k),
    "scatter": lambda k, n: Steps(n - 1, _share(k, n)),
    "gather": lambda k, n: Steps(n - 1, _share(k, n)),
    # A gather of (N−1)K/N, then each worker gets the (N−1)K/N it lacks.
    "all_gather": lambda k, n: Steps(2 * (n - 1), (n - 1) * k),
    # A reduce, then a scatter.
    "reduce_scatter": lambda k, n: Steps(2 * (n - 1), (n - 1) * k + _share(k, n)),
    "all_reduce": lambda k, n: Steps(2 * (n - 1), 2 * (n - 1) * k),
    # Each worker sends all but its own part to the centre, and gets as much back.
    "all_to_all": lambda k, n: Steps(2 * (n - 1), 2 * (n - 1) * _share(k, n)),
}
# One message to each of the others (pairwise exchange), or to the next.
DIRECT: Mapping[str, Formula] = {
    "all_to_all": lambda k, n: Steps(n - 1, _share(k, n)),
    "point_to_point": lambda k, n: Steps(1, k),
}
ALGORITHMS: Mapping[str, Mapping[str, Formula]] = {"ring": RING, "tree": TREE, "central": CENTRAL, "direct": DIRECT}
# Algorithms that gloo and NCCL use for large messages; gloo's broadcast is a binomial tree.
USUAL: Mapping[str, str] = {
    "broadcast": "ring",
    "reduce": "ring",
    "scatter": "central",
    "gather": "central",
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "all_reduce": "ring",
    "all_to_all": "direct",
    "point_to_point": "direct",
}


def algorithms_of(op: str) -> tuple[str, ...]:
    """Names in `ALGORITHMS` that implement `op`.

    Raises:
        ConfigError: for an operation that is not in `OPS`.
    """
    found = tuple(name for name, formulas in ALGORITHMS.items() if op in formulas)
    if not found:
        raise ConfigError(f"{op!r} is not a collective.", place="--op", fix=f"use one of {', '.join(OPS)}.")
    return found


def steps(op: str, algorithm: str, num_bytes: float, workers: int) -> Steps:
    """The critical path of `op` on K = `num_bytes` over N = `workers`; empty for one worker."""
    if workers == 1:
        return Steps(0, 0.0)
    return ALGORITHMS[algorithm][op](num_bytes, workers)


def collective_cost(op: str, algorithm: str, num_bytes: float, workers: int, link: Link) -> Cost:
    """Cost of `op` on K = `num_bytes` by `algorithm` over N = `workers` whose links are all `link`."""
    path = steps(op, algorithm, num_bytes, workers)
    return Cost(path.num_bytes, link.seconds(path.messages, path.num_bytes))


def bus_factor(op: str, workers: int) -> float:
    """Bus bandwidth ÷ algorithm bandwidth (K ÷ seconds), as nccl-tests defines it: the least a link must carry.

    2(N−1)/N for all-reduce; (N−1)/N for all-gather, reduce-scatter, all-to-all, scatter and gather; 1 for broadcast,
    reduce and point-to-point.
    """
    if op in ("broadcast", "reduce", "point_to_point"):
        return 1.0
    return (2 if op == "all_reduce" else 1) * (workers - 1) / workers
