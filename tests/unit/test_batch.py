"""Global batch arithmetic and memory caps."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_scale.errors import ConfigError
from accel_scale.launching.memory_cap import cap_device_memory, extends_segments, fragmentation_advice, memory_fraction
from accel_scale.optimization.batch import derive_accumulation

GIB = 1024**3


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 64))
def test_accumulation_gives_the_global_batch_back(accumulation, micro, world):
    assert derive_accumulation(accumulation * micro * world, micro, world) == accumulation


@given(st.integers(1, 2000), st.integers(1, 16), st.integers(1, 64))
def test_every_suggestion_of_a_refusal_works(global_batch, micro, world):
    try:
        assert derive_accumulation(global_batch, micro, world) * micro * world == global_batch
        return
    except ConfigError as error:
        fix = error.fix
    sizes = re.search(r"--global_batch_size (\d+)(?: or (\d+))?", fix)
    suggested = [int(size) for size in sizes.groups() if size]
    assert all(derive_accumulation(size, micro, world) for size in suggested)
    assert min(abs(size - global_batch) for size in suggested) <= micro * world
    if match := re.search(r"--per_device_train_batch_size (\d+)", fix):
        assert derive_accumulation(global_batch, int(match.group(1)), world)


def test_refusal_names_the_nearest_working_sizes():
    with pytest.raises(ConfigError) as error:
        derive_accumulation(100, 8, 4)
    assert error.value.fix == "use --global_batch_size 96 or 128, or --per_device_train_batch_size 5."
    with pytest.raises(ConfigError) as error:
        derive_accumulation(3, 1, 4)
    assert error.value.fix == "use --global_batch_size 4."


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-4, 2, 1)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ConfigError):
        derive_accumulation(*sizes)


def test_memory_cap_is_refused_where_nothing_can_enforce_it():
    with pytest.raises(ConfigError) as error:
        cap_device_memory("24GiB", device_type="cpu")
    assert error.value.place == "--device_memory"
    with pytest.raises(ConfigError, match="not an amount"):
        cap_device_memory("24 bananas", device_type="cuda")


def test_memory_fraction():
    assert memory_fraction(24 * GIB, 96 * GIB) == 0.25
    with pytest.raises(ConfigError, match=r"23\.5 GiB, less than the 24 GiB") as error:
        memory_fraction(24 * GIB, int(23.5 * GIB))
    assert "use 23.5GiB or less" in error.value.fix


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_cap_makes_allocations_beyond_it_fail():
    cap_bytes = cap_device_memory("1GiB", device_type="cuda")
    try:
        torch.empty(cap_bytes // 2, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(cap_bytes + 2**20, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize(
    ("device_type", "environment", "advised"),
    [
        ("cuda", {}, True),
        ("cuda", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}, True),
        ("cuda", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, False),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, False),
        ("cpu", {}, False),
    ],
)
def test_fragmentation_advice(device_type, environment, advised):
    advice = fragmentation_advice(device_type=device_type, environment=environment)
    assert (advice is not None) == advised


@pytest.mark.parametrize(
    ("settings", "extends"),
    [
        ("", False),
        ("max_split_size_mb:128", False),
        ("expandable_segments:False", False),
        ("expandable_segments:True,roundup_power2_divisions:16", True),
        ("backend:cudaMallocAsync", True),
        ("backend:native", False),
    ],
)
def test_what_the_environment_says_of_segments(settings, extends):
    assert extends_segments({"PYTORCH_ALLOC_CONF": settings}) == extends
    assert extends_segments({"PYTORCH_CUDA_ALLOC_CONF": settings}) == extends
