"""Cards are found by the names that people and drivers use; unknown names are refused, never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import (
    CONTEXT_BYTES,
    Gpu,
    Machine,
    catalogue,
    detect_local,
    find_gpu,
    host_memory_bytes,
    network_bytes_per_second,
    pcie_bytes_per_second,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe"),
        ("H100", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200 SXM"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("l4", "L4"),
        ("L40S", "L40S"),
        ("3060", "RTX 3060 12GB"),
    ],
)
def test_cards_are_found_by_people_and_driver_names(text: str, name: str) -> None:
    assert find_gpu(text).name == name


def test_a_name_of_several_cards_lists_them() -> None:
    with pytest.raises(ConfigError, match="several cards") as caught:
        find_gpu("a100")
    for name in ("A100 40GB PCIe", "A100 40GB SXM", "A100 80GB PCIe", "A100 80GB SXM"):
        assert name in str(caught.value)


def test_a_misspelt_card_names_the_nearest_on_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        find_gpu("RTX 4900")
    assert "RTX 4090 (nearest)" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "nvidia", "24", "0GB", "-5GiB", "warp drive"])
def test_what_is_no_card_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        find_gpu(text)


def test_a_size_gives_a_card_with_memory_and_no_speed() -> None:
    gpu = find_gpu("24GiB")
    assert gpu.memory_bytes == 24 * GIB
    assert 22 * GIB < gpu.usable_bytes < 24 * GIB - CONTEXT_BYTES + 1
    assert gpu.supports_bf16 is None
    for ask in (lambda: gpu.flops("bf16"), gpu.bandwidth, gpu.link_bandwidth, gpu.pcie_bandwidth):
        with pytest.raises(ConfigError, match="not known"):
            ask()


def test_reported_memory_is_below_the_box_and_usable_below_that() -> None:
    card = find_gpu("4090")
    assert 23.4 * GIB < card.memory_bytes < 24 * GIB
    assert card.usable_bytes == card.memory_bytes - CONTEXT_BYTES


def test_published_peaks() -> None:
    peaks = {"H100": 989, "A100-80GB": 312, "L40S": 362, "4090": 165, "3090": 71, "B200": 2250, "H200": 989}
    for name, teraflops in peaks.items():
        assert find_gpu(name).flops("bf16") / 1e12 == pytest.approx(teraflops, rel=0.02)
    assert find_gpu("A100-80GB").link_bandwidth() * 2 * 8 == 4800e9
    assert find_gpu("H100").link_bandwidth() * 2 * 8 == 7200e9


def test_cards_without_bf16_say_so() -> None:
    card = find_gpu("T4")
    assert card.supports_bf16 is False
    with pytest.raises(ConfigError, match="bf16 speed of T4 does not exist"):
        card.flops("bf16")
    assert card.flops("fp16") == 65e12


def test_the_catalogue_is_consistent() -> None:
    for gpu in catalogue():
        peaks = gpu.peak_flops or {}
        fp16, fp8 = peaks["fp16"], peaks["fp8"]
        assert fp16 is not None
        assert fp16 >= (peaks["fp32"] or 0)
        assert peaks["bf16"] in (None, fp16)
        assert fp8 is None or fp8 == pytest.approx(2 * fp16, rel=0.02)
        assert 0 < gpu.usable_bytes < gpu.memory_bytes
        assert find_gpu(gpu.name) == gpu


def test_pcie_and_network_speeds() -> None:
    assert pcie_bytes_per_second(4) == pytest.approx(31.5e9, rel=1e-3)
    assert pcie_bytes_per_second(5) == 2 * pcie_bytes_per_second(4)
    assert network_bytes_per_second("ethernet-10g") == 1.25e9
    assert network_bytes_per_second("25GB") == 25e9
    with pytest.raises(ConfigError, match="infiniband-hdr"):
        network_bytes_per_second("infiniband-hdrr")


def test_a_machine_counts_servers_and_asks_for_the_network() -> None:
    machine = Machine(find_gpu("H100"), num_gpus=20, gpus_per_node=8)
    assert machine.num_nodes == 3
    with pytest.raises(ConfigError, match="network"):
        machine.internode_bandwidth()
    with pytest.raises(ConfigError, match="num_gpus"):
        Machine(find_gpu("H100"), num_gpus=0)


def test_host_memory_respects_a_containers_limit(tmp_path: Path) -> None:
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal:       1024 kB\nMemFree: 5 kB\n")
    limit.write_text("max\n")
    assert host_memory_bytes(str(meminfo), str(limit)) == 1024 * 1024
    limit.write_text("4096\n")
    assert host_memory_bytes(str(meminfo), str(limit)) == 4096
    assert host_memory_bytes(str(tmp_path / "absent")) is None


def test_the_local_machine_is_what_torch_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Properties:
        name = "NVIDIA H100 80GB HBM3"
        total_memory = 79 * GIB

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    machine = detect_local()
    assert machine is not None
    assert (machine.gpu.name, machine.gpu.memory_bytes, machine.num_gpus) == ("H100 SXM", 79 * GIB, 2)
    Properties.name = "Some New Card"
    machine = detect_local()
    assert machine is not None
    assert machine.gpu == Gpu("Some New Card", 79 * GIB, 79 * GIB - CONTEXT_BYTES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect_local() is None
