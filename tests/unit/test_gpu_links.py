"""Links between the GPUs of a machine, from tables in the format of ``nvidia-smi topo -m`` (tests/unit/links)."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from accel_scale.checks.case import Finding
from accel_scale.checks.doctor import describe_machine
from accel_scale.checks.registry import check_run
from accel_scale.checks.run_settings import RunSettings
from accel_scale.facts.device import device_named
from accel_scale.launching.gpu_links import (
    describe_links,
    pairs_without_nvlink,
    parse_links,
    visible_links,
    with_gpu_links,
)
from accel_scale.launching.launch_file import read_launch_file
from accel_scale.launching.machine import PACKAGES, LocalMachine

ROOT = Path(__file__).parents[2]
SERVER = LocalMachine(
    packages=dict.fromkeys(PACKAGES, "1"), accelerator=device_named("A100 80GB SXM"), num_devices=8, num_cores=64
)
KNOWN = {
    "a100_nvswitch": (8, "NVLink (NV12) between all"),
    "a100_pcie": (8, "NODE, PXB, SYS; no NVLink"),
    "rtx3090_bridge": (2, "NVLink (NV4) between all"),
    "rtx3090_pairs": (4, "NVLink joins 0-1, 2-3; else PHB"),
}


def text_of(name: str) -> str:
    return (Path(__file__).parent / "links" / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("pasted", [False, True])
def test_tables_as_printed_and_as_pasted_with_blanks(name: str, pasted: bool) -> None:
    count, words = KNOWN[name]
    links = parse_links(text_of(name).expandtabs(8) if pasted else text_of(name))
    assert [len(row) for row in links] == [count] * count
    assert describe_links(links) == words
    for a in range(count):
        assert [links[a][b] for b in range(count)] == [links[b][a] for b in range(count)]


def test_each_kind_where_it_stands() -> None:
    links = parse_links(text_of("a100_pcie"))
    assert (links[0][1], links[0][2], links[0][4], links[6][7], links[5][5]) == ("PXB", "NODE", "SYS", "PXB", "X")
    assert pairs_without_nvlink(parse_links(text_of("rtx3090_pairs")), range(4)) == [(0, 2), (0, 3), (1, 2), (1, 3)]


def test_one_gpu_has_no_pairs() -> None:
    links = parse_links(text_of("one_gpu"))
    assert links == (("X",),)
    assert pairs_without_nvlink(links, range(1)) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No devices were found\n",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        "Failed to initialize NVML: Driver/library version mismatch\n",
        "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-31\n",  # a row is missing
        "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \t???\t0-31\nGPU1\tNV4\t X \t0-31\n",
        "\tGPU0\tGPU1\tCPU Affinity\nGPU0\tNV4\tNV4\t0-31\nGPU1\tNV4\t X \t0-31\n",
        "\tGPU1\tGPU2\tCPU Affinity\nGPU1\t X \tNV4\nGPU2\tNV4\t X \n",
        "GPU0",
    ],
)
def test_what_is_no_table_tells_nothing(text: str) -> None:
    assert parse_links(text) == ()


def test_links_are_those_of_the_devices_that_are_chosen() -> None:
    links = parse_links(text_of("a100_pcie"))
    assert visible_links(links, None) == links
    assert visible_links(links, "1,0,4") == (("X", "PXB", "SYS"), ("PXB", "X", "SYS"), ("SYS", "SYS", "X"))
    assert visible_links(links, "GPU-8c0b,GPU-11aa") == ()
    assert visible_links(links, "0,8") == ()
    assert visible_links((), "0,1") == ()


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `nvidia-smi` on the path that prints the content of a file."""
    table, script = tmp_path / "table.txt", tmp_path / "nvidia-smi"
    script.write_text(f'#!/bin/sh\n[ "$*" = "topo -m" ] && cat {table}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return table


def test_the_machine_is_asked_and_its_chosen_devices_are_kept(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked.write_text(text_of("rtx3090_pairs"))
    four = dataclasses.replace(SERVER, num_devices=4)
    assert describe_machine(with_gpu_links(four))["links"] == "NVLink joins 0-1, 2-3; else PHB"
    assert describe_links(with_gpu_links(four, "2,3").gpu_links) == "NVLink (NV4) between all"
    assert with_gpu_links(four, "all").gpu_links == with_gpu_links(four).gpu_links
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert describe_links(with_gpu_links(four).gpu_links) == "PHB; no NVLink"
    asked.unlink()  # `nvidia-smi` then exits with an error
    assert with_gpu_links(four).gpu_links == ()
    assert "links" not in describe_machine(with_gpu_links(four))


def test_other_machines_are_not_asked(asked: Path) -> None:
    asked.write_text(text_of("rtx3090_pairs"))
    for machine in (LocalMachine(), dataclasses.replace(SERVER, num_devices=1)):
        assert with_gpu_links(machine) is machine


def found(name: str, links: str, **run: int) -> Finding | None:
    machine = dataclasses.replace(SERVER, gpu_links=parse_links(text_of(links)))
    findings = check_run(RunSettings(**{"pp_size": 1, **run}), read_launch_file(ROOT / name), machine)  # type: ignore[arg-type]
    return next((finding for finding in findings if "NVLink" in finding.problem), None)


@pytest.mark.parametrize("name", ["tp", "fsdp2_tp", "3d"])
def test_tensor_parallelism_over_pcie_is_a_warning_in_each_launch_file(name: str) -> None:
    file = f"accelerate_configs/{name}.yaml"
    assert found(file, "a100_nvswitch") is None
    finding = found(file, "a100_pcie")
    assert finding is not None
    assert finding.level == "warning"
    ranks = {"tp": "0-1 are", "fsdp2_tp": "0-1, 2-3 are", "3d": "0-1, 2-3, 4-5, 6-7 are"}[name]
    assert f"the GPUs of ranks {ranks} joined by PXB, not NVLink" in finding.problem
    assert finding.fix.startswith("use accelerate_configs/fsdp2.yaml")
    assert finding.place.startswith(str(ROOT / file))


def test_groups_that_bridges_join_are_the_fix(tmp_path: Path) -> None:
    four = tmp_path / "four.yaml"
    text = (ROOT / "accelerate_configs/tp.yaml").read_text()
    four.write_text(text.replace("num_processes: 2", "num_processes: 4").replace("tp_size: 2", "tp_size: 4"))
    finding = found(str(four), "rtx3090_pairs")
    assert finding is not None
    assert "ranks 0-2, 0-3, 1-2, 1-3 are joined by PHB" in finding.problem
    assert finding.fix.startswith("use groups of 2, which NVLink joins, or accelerate_configs/fsdp2.yaml")
    wide = found(str(four), "a100_pcie")
    assert wide is not None
    assert "ranks 0-1, 0-2, 0-3, 1-2 and 2 more pairs are joined by NODE and PXB" in wide.problem
    assert found("accelerate_configs/fsdp2_tp.yaml", "rtx3090_pairs") is None


def test_the_recipes_own_flag_counts_as_the_launch_files() -> None:
    finding = found("accelerate_configs/fsdp2.yaml", "a100_pcie", tp_size=2)
    assert finding is not None
    assert finding.place == "--tp_size"
    assert found("accelerate_configs/fsdp2.yaml", "a100_pcie") is None
