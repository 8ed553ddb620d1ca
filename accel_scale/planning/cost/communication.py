"""Communication between ranks: the collectives of every strategy, their bytes, and their seconds on a machine."""

from __future__ import annotations

from dataclasses import dataclass

from accel_scale.facts.hardware import Machine
from accel_scale.network.collectives import USUAL, Link, collective_cost, steps
from accel_scale.planning.cost.flops import recomputed_fraction, trained_params
from accel_scale.planning.cost.links import (
    ACHIEVED_LINK_FRACTION,
    ACHIEVED_PCIE_FRACTION,
    INTERNODE_LATENCY_SECONDS,
    INTRANODE_LATENCY_SECONDS,
)
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.parameters import quantised_weights
from accel_scale.planning.models.training_setup import TrainingSetup

# NF4 with double quantisation: 4 bits + 0.127 bit of constants per weight.
NF4_BYTES_PER_PARAM = (4 + 0.127) / 8


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in an optimizer step.

    Attributes:
        name: What is sent, e.g. ``weights for the forward pass``.
        kind: A name in `collectives.OPS`; it runs its `collectives.USUAL` algorithm.
        num_bytes: K of each.
        workers: N.
        count: Number of them per step and rank.
        spread: Distance in ranks between neighbours of the group, which spans workers × spread ranks.
        overlaps: Whether computation continues in the meantime.
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
        """Bytes that a rank sends in a step."""
        return self.count * steps(self.kind, USUAL[self.kind], self.num_bytes, self.workers).num_bytes


def collective_seconds(collective: Collective, machine: Machine) -> float:
    """Seconds per step of a collective on a machine: one ring inside a server, two levels between servers.

    Between servers, every server first works inside, then the shards of its g ranks are sent at once over its network
    (a hierarchical all-reduce: reduce-scatter inside, all-reduce of K/g between, all-gather inside). Measured links
    (`Machine.links`) replace the card's and the network's.

    Raises:
        ConfigError: if a link's speed is unknown.
    """
    workers, size, kind = collective.workers, collective.num_bytes, collective.kind
    if workers == 1 or size == 0:
        return 0.0
    inside = max(1, min(workers, machine.gpus_per_node // collective.spread))
    if inside == workers:
        return collective.count * _seconds(kind, size, workers, _intranode(machine, kind))
    nodes = -(-workers // inside)
    # All groups of a server share its network: `spread` groups of `inside` ranks each.
    between = _internode(machine, kind).shared_by(min(machine.gpus_per_node, inside * collective.spread))
    if kind == "point_to_point":
        return collective.count * _seconds(kind, size, 2, between)
    if kind == "all_to_all":
        outside = size * (workers - inside) / workers
        return collective.count * between.seconds(workers - inside, outside)
    seconds = _seconds(kind, size / inside, nodes, between)
    if inside > 1:
        seconds += _seconds(kind, size, inside, _intranode(machine, kind))
    return collective.count * seconds


def _seconds(kind: str, num_bytes: float, workers: int, link: Link) -> float:
    return collective_cost(kind, USUAL[kind], num_bytes, workers, link).seconds


def _intranode(machine: Machine, kind: str) -> Link:
    """A GPU's link inside its server: measured, or a share of the vendor's figure."""
    measured = machine.links.inside_link(kind) if machine.links else None
    if measured is not None:
        return measured
    fraction = ACHIEVED_PCIE_FRACTION if machine.gpu.link == "pcie" else ACHIEVED_LINK_FRACTION
    return Link(machine.gpu.link_bandwidth() * fraction, INTRANODE_LATENCY_SECONDS)


def _internode(machine: Machine, kind: str) -> Link:
    """A server's link to the others: measured, or a share of the network's speed."""
    measured = machine.links.between_link(kind) if machine.links else None
    if measured is not None:
        return measured
    return Link(machine.internode_bandwidth() * ACHIEVED_LINK_FRACTION, INTERNODE_LATENCY_SECONDS)


def step_collectives(facts: ModelFacts, setup: TrainingSetup) -> tuple[Collective, ...]:
    """Every collective of an optimizer step, for one rank.

    DDP, ZeRO-1: gradients once per step (and updated weights, ZeRO). ZeRO-2 reduces gradients at every micro-batch.
    FSDP, ZeRO-3: weights gathered for forward and backward, gradients scattered, at every micro-batch; a frozen base
    has no gradients and only needs the two gathers. Tensor parallelism: two all-reduces of activations per layer and
    pass. Ulysses: two all-to-alls per layer and pass. Pipeline: one message per boundary and pass.
    """
    parallel = setup.parallel
    model_ranks = parallel.tensor_parallel * parallel.pipeline_parallel
    collectives: list[Collective] = []
    if parallel.shards_weights:
        collectives += _sharded(facts, setup, model_ranks)
    else:
        collectives += _replicated(facts, setup, model_ranks)
    collectives += _tensor(facts, setup) + _pipeline(facts, setup) + _sequence(facts, setup)
    return tuple(entry for entry in collectives if entry.workers > 1)


def gathered_weight_bytes(facts: ModelFacts, setup: TrainingSetup) -> float:
    """Bytes of all weights as they are sent: trained ones in the compute dtype, frozen ones as stored."""
    trained = trained_params(facts, setup)
    if setup.trains_all:
        return float(trained * setup.compute_bytes)
    quantised = quantised_weights(facts) if setup.quantises_base else 0
    plain = facts.num_params - quantised
    return trained * setup.compute_bytes + quantised * NF4_BYTES_PER_PARAM + plain * setup.frozen_bytes


def _sharded(facts: ModelFacts, setup: TrainingSetup, model_ranks: int) -> list[Collective]:
    parallel = setup.parallel
    weights = gathered_weight_bytes(facts, setup) / model_ranks
    gradients = trained_params(facts, setup) * (setup.reduce_bytes or setup.compute_bytes) / model_ranks
    times, shards = setup.accumulation, parallel.num_shards
    # FSDP2 reduces gradients after a step's last micro-batch unless told otherwise, DeepSpeed after each; stages also
    # gather weights once.
    reductions = times if setup.sync_each_batch or parallel.is_deepspeed else 1
    times = 1 if parallel.pipeline_parallel > 1 else times
    spread = parallel.tensor_parallel
    gathers = 2 if parallel.reshard_after_forward else 1
    replicas, shard = parallel.num_replicas, gradients / shards
    return [
        _per_layer(facts, "weights", "all_gather", weights, shards, times * gathers, spread),
        _per_layer(facts, "gradients", "reduce_scatter", gradients, shards, reductions, spread),
        Collective("replicas", "all_reduce", shard, replicas, reductions, spread * shards),
    ]


def _replicated(facts: ModelFacts, setup: TrainingSetup, model_ranks: int) -> list[Collective]:
    parallel = setup.parallel
    ranks = parallel.data_parallel * parallel.sequence_parallel
    params = trained_params(facts, setup) / model_ranks
    spread = parallel.tensor_parallel
    if not parallel.shards_states:
        sent = params * (setup.reduce_bytes or setup.trained_bytes)
        return [Collective("gradients", "all_reduce", sent, ranks, 1, spread)]
    num_bytes = params * setup.compute_bytes
    reductions = setup.accumulation if parallel.shards_gradients else 1
    reduced = setup.reduce_bytes or setup.compute_bytes
    return [
        Collective("gradients", "reduce_scatter", params * reduced, ranks, reductions, spread),
        Collective("updated weights", "all_gather", num_bytes, ranks, 1, spread, overlaps=False),
    ]


def _per_layer(
    facts: ModelFacts, name: str, kind: str, num_bytes: float, workers: int, times: int, spread: int
) -> Collective:
    """One collective for each layer, so that latency counts."""
    return Collective(name, kind, num_bytes / facts.num_layers, workers, times * facts.num_layers, spread)


def _activation_bytes(facts: ModelFacts, setup: TrainingSetup) -> float:
    """Bytes of a micro-batch's hidden states on a rank."""
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
    """Ulysses: an all-to-all of queries, keys and values, and one of attention's output, with their mean size.

    As in `accel_scale.parallel.sequence_exchange`, a key head goes to every rank whose queries share it.
    """
    parallel = setup.parallel
    ranks, tensor = parallel.sequence_parallel, parallel.tensor_parallel
    heads = facts.num_heads / tensor + max(ranks, facts.num_kv_heads / tensor)
    size = _activation_bytes(facts, setup) / facts.hidden_size * heads * facts.head_dim
    count = 2 * facts.num_layers / parallel.pipeline_parallel * _passes(setup) * setup.accumulation
    return [Collective("sequence parallel", "all_to_all", size, ranks, count, tensor, overlaps=False)]
