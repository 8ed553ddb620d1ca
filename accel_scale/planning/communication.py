"""What ranks send each other: bytes and seconds of collectives, and the collectives of every strategy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accel_scale.planning.flops import recomputed_fraction, trained_params
from accel_scale.planning.hardware import Machine
from accel_scale.planning.model_facts import ModelFacts
from accel_scale.planning.training_setup import TrainingSetup

# NCCL rings reach about this share of a link's peak ("bus bandwidth" of large messages, nccl-tests on A100 and H100:
# 230–240 of 300 GB/s, 360–370 of 450); networks are alike. Over PCIe most cards go through host memory: two crossings.
ACHIEVED_LINK_FRACTION = 0.8
ACHIEVED_PCIE_FRACTION = 0.4
# Per hop: an NCCL kernel's start and synchronisation inside a server, a network message between servers.
INTRANODE_LATENCY_SECONDS = 5e-6
INTERNODE_LATENCY_SECONDS = 20e-6
# NF4 with double quantisation: 4 bits + 0.127 bit of constants per weight.
NF4_BYTES_PER_PARAM = (4 + 0.127) / 8


@dataclass(frozen=True)
class Link:
    """What one worker sends through: the α–β model of a message of K bytes, α + K/β.

    Attributes:
        bytes_per_second: β, one way.
        latency_seconds: α.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0


@dataclass(frozen=True)
class Cost:
    """One collective over N workers.

    Attributes:
        bytes_per_worker: What the busiest worker sends.
        seconds: Until all workers are done.
    """

    bytes_per_worker: float
    seconds: float


def broadcast(num_bytes: float, workers: int, link: Link) -> Cost:
    """A binary tree, pipelined: the root sends K twice, the last worker starts after log2 N hops."""
    copies = min(2, workers - 1)
    return _cost(copies * num_bytes, math.ceil(math.log2(workers)), link)


def reduce(num_bytes: float, workers: int, link: Link) -> Cost:
    """To one worker; a broadcast backwards."""
    return broadcast(num_bytes, workers, link)


def reduce_then_broadcast(num_bytes: float, workers: int, link: Link) -> Cost:
    """All-reduce through one worker, which receives (N−1)K and sends (N−1)K: 2(N−1)K go through its link."""
    return _cost(2 * (workers - 1) * num_bytes, 2 * (workers - 1), link)


def all_gather(num_bytes: float, workers: int, link: Link) -> Cost:
    """A ring: everybody ends with K bytes and sends (N−1)K/N of them."""
    return _cost((workers - 1) / workers * num_bytes, workers - 1, link)


def reduce_scatter(num_bytes: float, workers: int, link: Link) -> Cost:
    """A ring: everybody starts with K bytes, ends with K/N reduced ones, and sends (N−1)K/N."""
    return all_gather(num_bytes, workers, link)


def all_reduce(num_bytes: float, workers: int, link: Link) -> Cost:
    """A ring: reduce-scatter, then all-gather; each worker sends 2(N−1)K/N."""
    return _cost(2 * (workers - 1) / workers * num_bytes, 2 * (workers - 1), link)


def all_to_all(num_bytes: float, workers: int, link: Link) -> Cost:
    """Each worker holds K bytes and keeps one N-th: it sends (N−1)K/N, one message to each."""
    return _cost((workers - 1) / workers * num_bytes, workers - 1, link)


def point_to_point(num_bytes: float, workers: int, link: Link) -> Cost:
    """To the next stage; `workers` > 1."""
    return _cost(num_bytes, 1, link)


COLLECTIVES = {
    "broadcast": broadcast,
    "reduce": reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "all_to_all": all_to_all,
    "point_to_point": point_to_point,
}


def pipeline_bubble(stages: int, micro_batches: int) -> float:
    """Share of a 1F1B step in which a stage waits: (p−1)/(m+p−1)."""
    return (stages - 1) / (micro_batches + stages - 1)


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in an optimizer step.

    Attributes:
        name: What is sent, e.g. ``weights for the forward pass``.
        kind: A name in `COLLECTIVES`.
        num_bytes: K of each.
        workers: N.
        count: How many run in a step, for each rank.
        spread: Ranks between neighbours of the group: workers × spread ranks lie between first and last.
        overlaps: Whether computation goes on meanwhile.
    """

    name: str
    kind: str
    num_bytes: float
    workers: int
    count: float
    spread: int = 1
    overlaps: bool = True

    @property
    def bytes_per_rank(self) -> float:
        """What a rank sends in a step."""
        return self.count * COLLECTIVES[self.kind](self.num_bytes, self.workers, Link(1)).bytes_per_worker


def collective_seconds(collective: Collective, machine: Machine) -> float:
    """Seconds per step of a collective on a machine: one ring inside a server, two levels between servers.

    Between servers, every server first works inside, then the shards of its g ranks travel at once through its network
    (a hierarchical all-reduce: reduce-scatter inside, all-reduce of K/g between, all-gather inside).

    Raises:
        ConfigError: where a link's speed is not known.
    """
    workers, size = collective.workers, collective.num_bytes
    if workers == 1 or size == 0:
        return 0.0
    run = COLLECTIVES[collective.kind]
    inside = max(1, min(workers, machine.gpus_per_node // collective.spread))
    if inside == workers:
        return collective.count * run(size, workers, _intranode(machine)).seconds
    nodes = -(-workers // inside)
    # All groups of a server share its network: `spread` groups of `inside` ranks each.
    network = machine.internode_bandwidth() / min(machine.gpus_per_node, inside * collective.spread)
    between = Link(network * ACHIEVED_LINK_FRACTION, INTERNODE_LATENCY_SECONDS)
    if collective.kind == "point_to_point":
        return collective.count * run(size, 2, between).seconds
    if collective.kind == "all_to_all":
        outside = size * (workers - inside) / workers
        return collective.count * _cost(outside, workers - inside, between).seconds
    seconds = run(size / inside, nodes, between).seconds
    if inside > 1:
        seconds += run(size, inside, _intranode(machine)).seconds
    return collective.count * seconds


def step_collectives(facts: ModelFacts, setup: TrainingSetup) -> tuple[Collective, ...]:
    """Every collective of an optimizer step, for one rank.

    DDP, ZeRO-1: gradients once per step (and updated weights, ZeRO). ZeRO-2 reduces gradients at every micro-batch.
    FSDP, ZeRO-3: weights gathered for forward and backward, gradients scattered, at every micro-batch; a frozen base
    has no gradients and needs the two gathers only. Tensor parallelism: two all-reduces of activations per layer and
    pass. Ulysses: four all-to-alls per layer and pass. Pipeline: one message per boundary and pass.
    """
    parallel = setup.parallel
    model_ranks = parallel.tensor_parallel * parallel.pipeline_parallel
    collectives: list[Collective] = []
    if parallel.shards_weights:
        collectives += _sharded(facts, setup, model_ranks)
    else:
        collectives += _replicated(facts, setup, model_ranks)
    collectives += _tensor(facts, setup) + _pipeline(facts, setup) + _sequence(facts, setup)
    return tuple(entry for entry in collectives if entry.workers > 1 and entry.num_bytes > 0)


def gathered_weight_bytes(facts: ModelFacts, setup: TrainingSetup) -> float:
    """Bytes of all weights as they travel: trained ones in the compute dtype, frozen ones as they are stored."""
    trained = trained_params(facts, setup)
    if setup.method == "full":
        return float(trained * setup.compute_bytes)
    quantised = quantised_params(facts) if setup.method == "qlora" else 0
    plain = facts.num_params - quantised
    return trained * setup.compute_bytes + quantised * NF4_BYTES_PER_PARAM + plain * setup.frozen_bytes


def quantised_params(facts: ModelFacts) -> int:
    """Weights that a 4-bit load stores in 4 bits: those of linear layers, not embeddings, head and norms."""
    return sum(
        layer.count * linear.copies * linear.in_features * linear.out_features
        for layer in facts.layers
        for linear in layer.linears
        if linear.quantisable
    )


def _sharded(facts: ModelFacts, setup: TrainingSetup, model_ranks: int) -> list[Collective]:
    parallel = setup.parallel
    weights = gathered_weight_bytes(facts, setup) / model_ranks
    gradients = trained_params(facts, setup) * setup.compute_bytes / model_ranks
    times, shards = setup.accumulation, parallel.num_shards
    spread = parallel.tensor_parallel
    gathers = 2 if parallel.reshard_after_forward else 1
    found = [
        _per_layer(facts, "weights", "all_gather", weights, shards, times * gathers, spread),
        _per_layer(facts, "gradients", "reduce_scatter", gradients, shards, times, spread),
    ]
    if parallel.num_replicas > 1:
        shard = gradients / shards
        found.append(Collective("replicas", "all_reduce", shard, parallel.num_replicas, times, spread * shards))
    return found


def _replicated(facts: ModelFacts, setup: TrainingSetup, model_ranks: int) -> list[Collective]:
    parallel = setup.parallel
    ranks = parallel.data_parallel * parallel.sequence_parallel
    params = trained_params(facts, setup) / model_ranks
    spread = parallel.tensor_parallel
    if not parallel.shards_states:
        return [Collective("gradients", "all_reduce", params * setup.trained_bytes, ranks, 1, spread)]
    num_bytes = params * setup.compute_bytes
    reductions = setup.accumulation if parallel.shards_gradients else 1
    return [
        Collective("gradients", "reduce_scatter", num_bytes, ranks, reductions, spread),
        Collective("updated weights", "all_gather", num_bytes, ranks, 1, spread, overlaps=False),
    ]


def _per_layer(
    facts: ModelFacts, name: str, kind: str, num_bytes: float, workers: int, times: int, spread: int
) -> Collective:
    """One collective for each layer, so that latency counts."""
    return Collective(name, kind, num_bytes / facts.num_layers, workers, times * facts.num_layers, spread)


def _activation_bytes(facts: ModelFacts, setup: TrainingSetup) -> float:
    """One hidden state of a micro-batch on a rank."""
    tokens = setup.micro_batch_size * setup.sequence_length / setup.parallel.sequence_parallel
    return tokens * facts.hidden_size * setup.compute_bytes


def _passes(setup: TrainingSetup) -> float:
    return 2 + recomputed_fraction(setup.checkpointing)


def _tensor(facts: ModelFacts, setup: TrainingSetup) -> list[Collective]:
    parallel = setup.parallel
    layers = facts.num_layers / parallel.pipeline_parallel
    count = 2 * layers * _passes(setup) * setup.accumulation
    size = _activation_bytes(facts, setup)
    return [Collective("tensor parallel", "all_reduce", size, parallel.tensor_parallel, count, overlaps=False)]


def _pipeline(facts: ModelFacts, setup: TrainingSetup) -> list[Collective]:
    parallel = setup.parallel
    spread = parallel.num_gpus // parallel.pipeline_parallel
    size = _activation_bytes(facts, setup)
    stages = parallel.pipeline_parallel
    return [Collective("pipeline", "point_to_point", size, stages, 2 * setup.accumulation, spread, overlaps=False)]


def _sequence(facts: ModelFacts, setup: TrainingSetup) -> list[Collective]:
    parallel = setup.parallel
    heads = facts.num_heads + facts.num_kv_heads
    # Queries, keys, values and the attention's output: 2 × (heads + kv heads) × head size values per token.
    size = _activation_bytes(facts, setup) / facts.hidden_size * heads * facts.head_dim / 2
    count = 4 * facts.num_layers / parallel.pipeline_parallel * _passes(setup) * setup.accumulation
    ranks, spread = parallel.sequence_parallel, parallel.tensor_parallel
    return [Collective("sequence parallel", "all_to_all", size, ranks, count, spread, overlaps=False)]


def _intranode(machine: Machine) -> Link:
    fraction = ACHIEVED_PCIE_FRACTION if machine.gpu.link == "pcie" else ACHIEVED_LINK_FRACTION
    return Link(machine.gpu.link_bandwidth() * fraction, INTRANODE_LATENCY_SECONDS)


def _cost(num_bytes: float, hops: int, link: Link) -> Cost:
    return Cost(num_bytes, hops * link.latency_seconds + num_bytes / link.bytes_per_second)
