"""Costs of collectives: formulas, nccl-tests' factors, clusters of servers, fits to measured links, and their use."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_scale.cli.main import main
from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import Machine, find_gpu
from accel_scale.network.collectives import (
    ALGORITHMS,
    OPS,
    Link,
    algorithms_of,
    bus_factor,
    collective_cost,
    steps,
)
from accel_scale.network.link_fit import (
    MeasuredLinks,
    Sample,
    default_path,
    fit_op,
    load_links,
    save_links,
    worst_and_median,
)
from accel_scale.planning.cost.communication import Collective, collective_seconds
from accel_scale.planning.cost.links import Cluster, find_link, named_links, predict

WORKERS = st.integers(2, 4096)
SIZES = st.floats(1, 1e12)
EVERY = [(op, name) for op in OPS for name in algorithms_of(op)]


@given(WORKERS, SIZES)
def test_volumes_through_the_busiest_worker(n: int, k: float) -> None:
    def sent(op: str, algorithm: str) -> float:
        return steps(op, algorithm, k, n).num_bytes

    assert sent("all_reduce", "ring") == pytest.approx(2 * (n - 1) * k / n)
    assert sent("all_reduce", "central") == pytest.approx(2 * (n - 1) * k)
    assert sent("all_reduce", "ring") == pytest.approx(sent("reduce_scatter", "ring") + sent("all_gather", "ring"))
    assert sent("all_reduce", "ring") <= min(2 * k, sent("all_reduce", "central"))
    assert sent("all_reduce", "central") == pytest.approx(sent("reduce", "central") + sent("broadcast", "central"))
    assert sent("all_reduce", "tree") == pytest.approx(2 * math.ceil(math.log2(n)) * k)
    for name in ("ring", "tree", "central"):  # a root sends all but its own part
        assert sent("scatter", name) == pytest.approx((n - 1) / n * k)
    # No algorithm moves less than what a rank lacks or must give away.
    for op, name in EVERY:
        least = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1, "reduce": 1, "point_to_point": 1}.get(op, (n - 1) / n)
        assert sent(op, name) >= least * k * (1 - 1e-9)


@given(st.sampled_from(EVERY), st.integers(1, 2048), SIZES, st.floats(1.01, 100))
def test_more_bytes_and_more_workers_cost_more(which: tuple[str, str], n: int, k: float, factor: float) -> None:
    op, name = which
    link = Link(1e9, 1e-6)
    cost = collective_cost(op, name, k, n, link)
    larger, wider = collective_cost(op, name, k * factor, n, link), collective_cost(op, name, k, n + 1, link)
    assert wider.seconds >= cost.seconds * (1 - 1e-9)
    assert wider.bytes_per_worker >= cost.bytes_per_worker * (1 - 1e-9)
    if n == 1:
        assert cost.seconds == cost.bytes_per_worker == 0
    else:
        assert larger.seconds > cost.seconds
        assert collective_cost(op, name, k, n, Link(1e9 * factor, 1e-6)).seconds < cost.seconds


def test_small_messages_cost_latency_and_large_ones_bandwidth() -> None:
    link = Link(1e9, 1e-5)
    assert collective_cost("all_reduce", "ring", 4, 8, link).seconds == pytest.approx(14e-5, rel=1e-3)
    assert collective_cost("all_reduce", "tree", 4, 8, link).seconds == pytest.approx(6e-5, rel=1e-3)
    cluster = Cluster(1, 8, link)
    assert predict("all_reduce", 4, cluster)[0].algorithm == "tree"
    assert predict("all_reduce", 1e9, cluster)[0].algorithm == "ring"
    assert predict("all_to_all", 1e9, cluster)[0].algorithm == "direct"


def test_bus_bandwidth_as_nccl_tests_defines_it() -> None:
    """PERFORMANCE.md: 2(n−1)/n for all-reduce, (n−1)/n for the others that exchange parts, 1 for rooted ones."""
    expected = {"all_reduce": 1.75, "broadcast": 1, "reduce": 1, "point_to_point": 1}
    assert {op: bus_factor(op, 8) for op in OPS} == {op: expected.get(op, 0.875) for op in OPS}
    # A ring without latency runs at its link's speed; that is the purpose of the factor.
    for op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"):
        ring = next(p for p in predict(op, 1e9, Cluster(1, 8, Link(3e11))) if p.algorithm == "ring")
        assert ring.bus_bandwidth == pytest.approx(3e11)


def test_named_links() -> None:
    """One way in GB/s; both ways, NVLink has 4,800 and 7,200 Gbit/s on A100 and H100, PCIe 5 x16 has 512 one way."""
    gigabits = {name: 8 * entry.peak_bytes_per_second / 1e9 for name, entry in named_links().items()}
    assert 2 * gigabits["nvlink-a100"] == 4800
    assert 2 * gigabits["nvlink-h100"] == 7200
    assert gigabits["nvlink-b200"] == 7200
    assert [round(gigabits[f"pcie{n}"] / (128 / 130)) for n in (3, 4, 5)] == [128, 256, 512]
    assert [gigabits[name] for name in ("ib-hdr", "ib-ndr")] == [200, 400]
    assert [gigabits[f"ethernet-{n}"] for n in (10, 25, 100)] == [10, 25, 100]
    assert find_link("InfiniBand NDR") == find_link("ib_ndr") == named_links()["ib-ndr"]
    with pytest.raises(ConfigError, match="did you mean nvlink-h100"):
        find_link("nvlink-h10")
    with pytest.raises(ConfigError, match=r"did you mean ib-ndr\?"):
        find_link("ib")


@given(st.sampled_from([op for op in OPS if op != "point_to_point"]), st.floats(1e3, 1e10))
def test_two_levels_agree_with_one_where_there_is_one(op: str, k: float) -> None:
    inside, between = Link(3.6e11, 5e-6), Link(4e10, 2e-5)
    alone = predict(op, k, Cluster(1, 8, inside))
    assert predict(op, k, Cluster(8, 1, inside, between)) == predict(op, k, Cluster(1, 8, between))
    for entry in predict(op, k, Cluster(4, 8, inside, between)):
        same = [other for other in alone if other.algorithm == entry.algorithm]
        assert all(entry.seconds > other.seconds for other in same)


def test_between_servers_the_hierarchy_pays_for_latency_and_the_network_for_bytes() -> None:
    cluster = Cluster(16, 8, Link(3.6e11, 5e-6), Link(3.2e11, 2e-5))
    small = {p.algorithm: p.seconds for p in predict("all_reduce", 2**20, cluster)}
    assert small["hierarchical"] < small["ring"] / 4  # 30 hops between servers and 14 inside instead of 254
    # K/g of each GPU through a g-th of the server's port, 2(n−1)/n times, plus 2(g−1)/g K inside.
    large = {p.algorithm: p.seconds for p in predict("all_reduce", 2**36, cluster)}
    expected = 2**36 * (2 * 15 / 16 / 3.2e11 + 2 * 7 / 8 / 3.6e11)
    assert large["hierarchical"] == pytest.approx(expected, rel=0.01)
    assert large["central"] > 50 * large["ring"]


# ── Fits ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def measured(op: str, link: Link, n: int = 4, noise: float = 0.0, sizes: int = 12) -> list[Sample]:
    randomness = random.Random(0)
    found = []
    for power in range(12, 12 + sizes):
        name = {"all_to_all": "direct", "scatter": "central", "gather": "central"}.get(op, "ring")
        seconds = collective_cost(op, name, 2**power, n, link).seconds * (1 + noise * randomness.uniform(-1, 1))
        found.append(Sample(op, 2**power, n, seconds, seconds))
    return found


def test_a_fit_finds_the_link_and_is_judged_on_sizes_it_has_not_seen() -> None:
    fit = fit_op(measured("all_reduce", Link(2e9, 5e-5)))
    assert fit.link.latency_seconds == pytest.approx(5e-5)
    assert fit.link.bytes_per_second == pytest.approx(2e9)
    assert fit.link.knee_bytes is None
    assert {s.num_bytes for s in fit.held_out} == {2**power for power in range(13, 24, 2)}
    assert max(fit.errors()) < 1e-6
    noisy = fit_op(measured("all_gather", Link(2e9, 5e-5), noise=0.1))
    assert noisy.link.bytes_per_second == pytest.approx(2e9, rel=0.1)
    error = worst_and_median([noisy])
    assert error is not None
    assert 0 < error[0] <= error[1] < 0.2
    assert worst_and_median([fit_op(measured("reduce", Link(1e9, 1e-5), sizes=3))]) is None


def test_a_knee_is_found_where_there_is_one() -> None:
    link = Link(4e9, 5e-5, knee_bytes=2**18, bytes_per_second_beyond=1e9)
    fit = fit_op(measured("broadcast", link, sizes=15))
    assert fit.link.knee_bytes == 2**18  # one of the fitted sizes
    assert fit.link.bytes_per_second_beyond == pytest.approx(1e9)
    assert max(fit.errors()) < 1e-6
    assert link.shared_by(4).seconds(0, 2**20) == pytest.approx(4 * link.seconds(0, 2**20))


def test_times_that_do_not_grow_are_refused() -> None:
    flat = [Sample("all_reduce", 2**power, 2, 1e-3 / 2**power, 1e-3) for power in range(10, 16)]
    with pytest.raises(ConfigError, match="do not grow"):
        fit_op(flat)


def links_of(link: Link, between: Link | None = None) -> MeasuredLinks:
    inside = {op: fit_op(measured(op, link)) for op in ("all_reduce", "all_gather")}
    outside = {} if between is None else {"all_reduce": fit_op(measured("all_reduce", between, n=2))}
    return MeasuredLinks("gloo", "a processor", inside, outside, 4, {"torch": "2"}, "2026-01-02T03:04:05+00:00")


def test_links_survive_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = links_of(Link(2e9, 5e-5), Link(1e9, 1e-4))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "accel_scale" / "links.json"
    save_links(links, default_path())
    assert load_links("measured") == replace(links, source=str(default_path()))
    assert [path.name for path in default_path().parent.iterdir()] == ["links.json"]
    for text, problem in (("{", "holds no measured"), ('{"format": 1}', "not complete")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match=problem):
            load_links(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="comm --measure first"):
        load_links(tmp_path / "none.json")


def test_the_planner_uses_measured_links() -> None:
    links = links_of(Link(2e9, 5e-5), Link(1e9, 1e-4))
    machine = Machine(find_gpu("H100"), num_gpus=4, gpus_per_node=4, links=links)
    inside = Collective("gradients", "all_reduce", 1e9, 4, count=3)
    assert collective_seconds(inside, machine) == pytest.approx(3 * (6 * 5e-5 + 1.5e9 / 2e9))
    assert collective_seconds(inside, replace(machine, links=None)) < 0.05
    # Four ranks of a server shared its network during the measurement, so the server has four times a rank's speed;
    # --network is not needed.
    across = Collective("gradients", "all_reduce", 1e9, 8, count=1)
    wide = replace(machine, num_gpus=8)
    expected = (2 * 1e-4 + 1e9 / 4 / 1e9) + (6 * 5e-5 + 1.5e9 / 2e9)
    assert collective_seconds(across, wide) == pytest.approx(expected)
    # Operations that were not measured use all-reduce's link.
    other = Collective("pipeline", "point_to_point", 1e6, 4, count=1)
    assert collective_seconds(other, machine) == pytest.approx(5e-5 + 1e6 / 2e9)


# ── The command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["comm", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_algorithm_of_a_cluster_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--op", "all_reduce", "--size", "1GiB", "--gpu", "h100", "--nodes", "2", "--gpus_per_node", "8"]
    found = answer(capsys, *words)
    rows = {row["algorithm"]: row for row in found["predictions"]}
    assert set(rows) == {*[name for name in ALGORITHMS if name != "direct"], "hierarchical"}
    assert [row["best"] for row in found["predictions"]] == [True, False, False, False]
    ring = rows["ring"]
    assert ring["bytes_per_worker"] == pytest.approx(2 * 15 / 16 * 2**30)
    assert ring["bus_bandwidth"] == pytest.approx(ring["algorithm_bandwidth"] * 2 * 15 / 16)
    assert ring["bus_bandwidth"] == pytest.approx(8 * 50e9 * 0.8, rel=0.2)  # 8 ports of NDR, assumed and reported
    assert "ib-ndr" in found["notes"][0]
    assert main(["comm", *words]) == 0
    table = capsys.readouterr().out
    assert all(word in table for word in ("hierarchical", "1 GiB", "busbw", "best", "assumed between servers"))


def test_sizes_operations_and_links_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--op", "all", "--size", "1KiB..1MiB", "64MiB", "--step_factor", "32", "--link", "pcie4"]
    rows = answer(capsys, *words, "--gpus_per_node", "4")["predictions"]
    assert {row["op"] for row in rows} == set(OPS)
    assert sorted({row["num_bytes"] for row in rows}) == [2**10, 2**15, 2**20, 2**26]
    plain = ["--size", "1GB", "--bandwidth", "10GB", "--latency", "0us", "--gpus_per_node", "2"]
    (best, *_) = answer(capsys, *plain)["predictions"]
    assert best["seconds"] == pytest.approx(0.1)
    names = {entry["name"] for entry in answer(capsys, "--catalogue")["links"]}
    assert {"pcie3", "pcie4", "pcie5", "nvlink-a100", "nvlink-b200", "ib-hdr", "ethernet-25"} <= names


def test_predictions_from_measured_links(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_links(links_of(Link(2e9, 5e-5)), tmp_path / "links.json")
    file = str(tmp_path / "links.json")
    rows = answer(capsys, "--links", file, "--size", "1MiB")["predictions"]
    ring = next(row for row in rows if row["algorithm"] == "ring")
    assert (ring["workers"], ring["seconds"]) == (4, pytest.approx(6 * 5e-5 + 1.5 * 2**20 / 2e9))
    words = ["plan", "HuggingFaceTB/SmolLM2-135M", "--gpu", "H100", "--num_gpus", "4", "--strategy", "ddp", "--json"]
    assert main(words) == 0
    usual = json.loads(capsys.readouterr().out)
    assert main([*words, "--links", file]) == 0
    slow = json.loads(capsys.readouterr().out)
    seconds = [plan["candidates"][0]["time"]["communication_seconds"] for plan in (usual, slow)]
    assert seconds[1] > 50 * seconds[0]
    assert "gloo" in slow["notes"][0]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--gpu", "h100", "--op", "allreduce"], "did you mean all_reduce"),
        (["--gpu", "h100", "--size", "1GiBs"], "'1GiBs' is not an amount"),
        (["--gpu", "h100", "--size", "1GiB..1MiB"], "ends before it begins"),
        (["--gpu", "h100", "--link", "pcie4"], "both say how fast"),
        (["--gpu", "h100", "--gpus_per_node", "1"], "one worker sends nothing"),
        (["--gpu", "h100", "--network", "ib-ndr"], "one server has no network"),
        (["--gpu", "4090", "--nodes", "2"], "network between servers is not known"),
        (["--link", "nvlink"], "not a known link"),
        (["--gpu", "h100", "--latency", "soon"], "not a latency"),
        (["--gpu", "h100", "--processes", "2"], "belongs to measurements"),
        (["--measure", "--gpu", "h100"], "this measures"),
        (["--measure", "--processes", "1"], "one process sends nothing"),
        (["--measure", "--backend", "nccl", "--processes", "512"], "a GPU for each process"),
        (["--measure", "--size", "1MiB"], "one size shows no bandwidth"),
    ],
)
def test_bad_input_is_one_line(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["comm", *words])
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert problem in said
    assert said.count("\n") == 1
    assert "Fix:" in said
