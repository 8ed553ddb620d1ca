"""Collectives between servers by hand: bytes that each algorithm sends through each kind of link, and its time."""

from __future__ import annotations

import pytest

from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import Machine, find_gpu
from accel_scale.network.collectives import OPS, Link
from accel_scale.planning.cost.communication import Collective, collective_seconds
from accel_scale.planning.cost.links import Cluster, cluster_cost, find_link, named_links, predict

K = 8e9
INSIDE, BETWEEN = Link(4e9, 1e-3), Link(1e9, 1.0)
# Two servers of four: consecutive messages inside and between servers, then bytes in units of K through a GPU's link
# inside and a whole server's link between. The four GPUs that share their server's link get a quarter of it each.
BY_HAND = {
    ("all_reduce", "ring"): (0, 14, 0, 1.75),  # every step waits for the link between: 2 · 7 messages, 2 · 7/8 K
    ("all_reduce", "tree"): (4, 2, 4, 2),
    ("all_reduce", "central"): (6, 8, 6, 8),  # four of the 7 others are on the other server
    ("all_reduce", "hierarchical"): (6, 2, 1.5, 1),  # between servers K/4 of each GPU, in halves there and back
    ("all_gather", "ring"): (0, 7, 0, 0.875),
    ("all_gather", "tree"): (2, 1, 0.75, 0.5),
    ("all_gather", "central"): (6, 8, 3, 4),
    ("all_gather", "hierarchical"): (3, 1, 0.75, 0.5),
    ("reduce_scatter", "ring"): (0, 7, 0, 0.875),
    ("reduce_scatter", "tree"): (2, 1, 0.75, 0.5),
    ("reduce_scatter", "central"): (6, 8, 3.375, 4.5),  # 7 K to the centre, 7/8 K from it
    ("reduce_scatter", "hierarchical"): (3, 1, 0.75, 0.5),
    ("all_to_all", "ring"): (0, 7, 0, 3.5),
    ("all_to_all", "tree"): (2, 1, 1, 2),
    ("all_to_all", "central"): (6, 8, 5.25, 7),
    ("all_to_all", "direct"): (0, 4, 0, 2),  # the three messages inside are sent meanwhile
    ("all_to_all", "hierarchical"): (3, 1, 0.75, 2),
    ("broadcast", "ring"): (0, 7, 0, 1),
    ("broadcast", "tree"): (2, 1, 2, 1),
    ("broadcast", "central"): (3, 4, 3, 4),
    ("broadcast", "hierarchical"): (3, 1, 1, 1),
    ("scatter", "ring"): (0, 7, 0, 0.875),
    ("scatter", "tree"): (2, 1, 0.375, 0.5),  # half of K to the other server, three quarters of that on to its others
    ("scatter", "central"): (3, 4, 0.375, 0.5),
    ("scatter", "hierarchical"): (3, 1, 0.375, 0.5),
    ("point_to_point", "direct"): (0, 1, 0, 1),
}
LIKE = {"reduce": "broadcast", "gather": "scatter"}


@pytest.mark.parametrize("op", OPS)
def test_every_algorithm_between_two_servers_of_four(op: str) -> None:
    found = {entry.algorithm: entry for entry in predict(op, K, Cluster(2, 4, INSIDE, BETWEEN))}
    expected = {name: row for (of, name), row in BY_HAND.items() if of == LIKE.get(op, op)}
    assert set(found) == set(expected)
    for name, (near, away, near_bytes, away_bytes) in expected.items():
        seconds = near * 1e-3 + away * 1.0 + K * (near_bytes / 4e9 + away_bytes / 1e9)
        assert found[name].seconds == pytest.approx(seconds), name
        assert found[name].algorithm_bandwidth == pytest.approx(K / seconds)
        assert found[name].workers == 8
    times = [entry.seconds for entry in predict(op, K, Cluster(2, 4, INSIDE, BETWEEN))]
    assert times == sorted(times)


def test_bytes_of_two_levels_are_added_up() -> None:
    cluster = Cluster(2, 4, INSIDE, BETWEEN)
    for algorithm, sent in (("ring", 1.75), ("hierarchical", 0.25 + 1.5), ("tree", 2 + 4), ("central", 14)):
        assert cluster_cost("all_reduce", algorithm, K, cluster).bytes_per_worker == pytest.approx(sent * K)
    assert cluster_cost("all_to_all", "direct", K, cluster).bytes_per_worker == pytest.approx(0.875 * K)


def test_where_the_links_inside_are_the_slower_ones_they_are_waited_for() -> None:
    cluster = Cluster(2, 4, Link(1e8, 1.0), Link(1e12, 1e-6))
    assert cluster_cost("all_reduce", "ring", K, cluster).seconds == pytest.approx(14 + 1.75 * K / 1e8)
    assert cluster_cost("all_to_all", "direct", K, cluster).seconds == pytest.approx(3 + 0.375 * K / 1e8)


def test_links_that_were_measured_for_one_operation_are_used_for_it() -> None:
    cluster = Cluster(2, 4, INSIDE, BETWEEN, lambda op: Link(len(op) * 1e9), lambda op: Link(len(op) * 1e6))
    assert cluster.inside_link("reduce") == Link(6e9)
    assert cluster.between_link("reduce") == Link(6e6)
    assert (cluster.workers, Cluster(1, 8, INSIDE).between) == (8, None)
    assert cluster == Cluster(2, 4, INSIDE, BETWEEN), "how fast is no part of which"


def test_one_server_and_servers_of_one_have_one_level() -> None:
    assert "hierarchical" not in {entry.algorithm for entry in predict("all_reduce", K, Cluster(1, 8, INSIDE))}
    alone = {entry.algorithm: entry.seconds for entry in predict("all_reduce", K, Cluster(8, 1, INSIDE, BETWEEN))}
    assert set(alone) == {"ring", "tree", "central"}
    assert alone["ring"] == pytest.approx(14 + 1.75 * K / 1e9)
    assert predict("broadcast", 0.0, Cluster(1, 2, Link(1e9)))[0].algorithm_bandwidth == 0.0


@pytest.mark.parametrize(
    ("sizes", "says", "place"),
    [((0, 4), "nodes is 0", "--nodes"), ((2, 0), "gpus_per_node is 0", "--gpus_per_node"), ((2, 4), "network", "--n")],
)
def test_clusters_that_are_none(sizes: tuple[int, int], says: str, place: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        Cluster(*sizes, INSIDE)
    assert refused.value.place.startswith(place)


def test_a_named_link_reaches_a_share_of_its_peak() -> None:
    """Eight tenths for NVLink and networks, half of that through host memory; latency is longer between servers."""
    links = named_links()
    assert links["nvlink-h100"].link == Link(0.8 * 450e9, 5e-6)
    assert links["ib-ndr"].link == Link(0.8 * 50e9, 20e-6)
    assert links["pcie4"].link.bytes_per_second == pytest.approx(0.4 * 16 * 16e9 / 8 * 128 / 130)
    assert links["pcie4"].link.latency_seconds == 5e-6
    assert [links[name].kind for name in ("nvlink-b200", "ethernet-100", "pcie5")] == ["nvlink", "network", "pcie"]
    assert find_link("Ethernet 25G").name == find_link(" ETHERNET_25g ").name == "ethernet-25"
    assert find_link("infiniband-8xndr").name == "ib-8xndr"
    with pytest.raises(ConfigError) as refused:
        find_link("wet string", place="--inside")
    assert (refused.value.place, refused.value.fix[:10]) == ("--inside", "use one of")


# ── In a step ────────────────────────────────────────────────────────────────────────────────────────────────────────

H100 = Machine(find_gpu("H100"), num_gpus=32, gpus_per_node=8, internode_bytes_per_second=400e9)
NEAR, AWAY = 0.8 * 450e9, 0.8 * 400e9


def seconds(kind: str, workers: int, spread: int = 1, count: float = 1, num_bytes: float = K) -> float:
    return collective_seconds(Collective("x", kind, num_bytes, workers, count, spread), H100)


def test_inside_a_server_a_collective_is_one_ring() -> None:
    assert seconds("all_reduce", 8) == pytest.approx(14 * 5e-6 + 1.75 * K / NEAR)
    assert seconds("all_gather", 4, spread=2, count=3) == pytest.approx(3 * (3 * 5e-6 + 0.75 * K / NEAR))
    assert seconds("all_gather", 1) == seconds("all_gather", 8, num_bytes=0) == 0.0


def test_between_servers_every_card_sends_its_part_through_a_share_of_the_network() -> None:
    # 32 ranks, 8 in each of 4 servers: K/8 across the 4 servers through an eighth of the network, and K inside.
    away, near = 2 * 3 / 4 * K / 8 / (AWAY / 8), 1.75 * K / NEAR
    assert seconds("all_reduce", 32) == pytest.approx(6 * 20e-6 + away + 14 * 5e-6 + near)
    # Eight ranks, two in each of four servers: groups of the other ranks use the network as well.
    away, near = 3 / 4 * K / 2 / (AWAY / 8), 1 / 2 * K / NEAR
    assert seconds("all_gather", 8, spread=4) == pytest.approx(3 * 20e-6 + away + 5e-6 + near)
    # One rank in each server: nothing is sent inside.
    assert seconds("all_gather", 4, spread=8) == pytest.approx(3 * 20e-6 + 3 / 4 * K / (AWAY / 8))
    assert seconds("all_gather", 2, spread=16) == pytest.approx(20e-6 + K / 2 / (AWAY / 8))


def test_what_goes_to_each_other_rank_crosses_but_for_those_of_the_server() -> None:
    assert seconds("all_to_all", 8) == pytest.approx(7 * 5e-6 + 7 / 8 * K / NEAR)
    assert seconds("all_to_all", 16) == pytest.approx(8 * 20e-6 + K / 2 / (AWAY / 8))
    # A pipeline's message goes to the next stage, whatever the number of stages.
    assert seconds("point_to_point", 8, count=2) == pytest.approx(2 * (5e-6 + K / NEAR))
    assert seconds("point_to_point", 4, spread=8, count=2) == pytest.approx(2 * (20e-6 + K / (AWAY / 8)))


def test_cards_on_a_bus_share_host_memory() -> None:
    bus = Machine(find_gpu("RTX 4090"), num_gpus=4)
    found = collective_seconds(Collective("x", "all_reduce", K, 4, 1), bus)
    assert found == pytest.approx(6 * 5e-6 + 1.5 * K / (0.4 * bus.gpu.link_bandwidth()))
