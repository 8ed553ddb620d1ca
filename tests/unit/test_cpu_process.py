"""Freed memory is used again without the kernel, and a user's own allocator settings are left alone."""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys

import pytest
import torch

from accel_scale.launching import cpu_process
from accel_scale.launching.cpu_process import (
    keep_freed_memory,
    threads_are_chosen,
    use_cores_of_host,
    use_onednn_in_fp32,
)
from accel_scale.launching.environment import current_launch
from accel_scale.starting.recipe_start import steps_on_host

_FAULTS = """
import resource
from accel_scale.launching.environment import current_launch
from accel_scale.launching import cpu_process
from accel_scale.launching.cpu_process import keep_freed_memory, threads_are_chosen, use_cores_of_host
from accel_scale.starting.recipe_start import steps_on_host
assert keep_freed_memory() is %s
blocks = lambda: [b"x" * (48 << 20) for _ in range(2)]
blocks()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    blocks()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*, done: bool, **environment: str) -> int:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "LD_PRELOAD"}
    kept.pop("GLIBC_TUNABLES", None)
    words = [sys.executable, "-c", _FAULTS % done]
    return int(subprocess.run(words, env=kept | environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_second_step_touches_no_new_page() -> None:
    assert page_faults(done=True) < page_faults(done=False, GLIBC_TUNABLES="glibc.malloc.check=0") / 20


_SHAPES = """
import resource
import torch
from accel_scale.launching.cpu_process import tune_cpu_process
tune_cpu_process()
def multiply(lengths):
    for length in lengths:
        torch.ones(length, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)
multiply(range(1, 101))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
multiply(range(101, 301))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_rows_of_many_lengths_do_not_pile_up_compiled_products() -> None:
    def growth_kib(**environment: str) -> int:
        kept = {k: v for k, v in os.environ.items() if not k.endswith("CACHE_CAPACITY")}
        words = [sys.executable, "-c", _SHAPES]
        return int(subprocess.run(words, env=kept | environment, capture_output=True, text=True, check=True).stdout)

    # Torch's defaults, here as a user's own word, which wins.
    without = growth_kib(ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024", LRU_CACHE_CAPACITY="1024")
    if without < 50_000:
        pytest.skip("this processor's bf16 products are not compiled")
    assert growth_kib() < without / 10


def _cpu(vendor: str, *flags: str) -> str:
    return f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu sse2 {' '.join(flags)}\n\nprocessor\t: 1\n"


@pytest.fixture
def fp32_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield torch.get_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def test_fp32_products_go_to_onednn_where_no_digit_is_lost(fp32_precision, monkeypatch) -> None:
    monkeypatch.delenv("ONEDNN_DEFAULT_FPMATH_MODE", raising=False)
    exact = torch.randn(64, 256, dtype=torch.float64)
    product = (exact.float() @ exact.float().T).double()
    assert use_onednn_in_fp32(_cpu("AuthenticAMD", "avx512f")) is (fp32_precision() == "medium")
    # Whether this machine's oneDNN rounds to bf16 or not: what the process is left with computes in fp32.
    again = (exact.float() @ exact.float().T).double()
    wanted = exact @ exact.T
    assert (again - wanted).abs().max() < 4 * (product - wanted).abs().max() < 1e-3


@pytest.mark.parametrize(
    "cpu",
    [
        _cpu("GenuineIntel", "avx512f"),
        _cpu("AuthenticAMD", "avx2"),
        _cpu("AuthenticAMD", "avx512f", "amx_bf16", "amx_tile"),
        "",
    ],
)
def test_other_processors_keep_torchs_products(cpu: str, fp32_precision, monkeypatch) -> None:
    monkeypatch.delenv("ONEDNN_DEFAULT_FPMATH_MODE", raising=False)
    assert not use_onednn_in_fp32(cpu)
    assert fp32_precision() == "highest"


def test_a_chosen_precision_of_products_stays(fp32_precision, monkeypatch) -> None:
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT")
    assert not use_onednn_in_fp32(_cpu("AuthenticAMD", "avx512f"))
    monkeypatch.delenv("ONEDNN_DEFAULT_FPMATH_MODE")
    torch.set_float32_matmul_precision("high")
    assert not use_onednn_in_fp32(_cpu("AuthenticAMD", "avx512f"))
    assert fp32_precision() == "high"


class Rounded(torch.Tensor):
    """What is multiplied with it is rounded to bf16 first, as oneDNN does on CPUs with AMX."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        plain = [value.as_subclass(torch.Tensor) if isinstance(value, cls) else value for value in args]
        first, *rest = plain
        return func(first.bfloat16().float() if first.is_floating_point() else first, *rest, **(kwargs or {}))


@pytest.mark.parametrize(("rounds", "precision"), [(True, "highest"), (False, "medium")])
def test_a_processor_that_rounds_keeps_torchs_products(
    rounds: bool, precision: str, fp32_precision, monkeypatch
) -> None:
    monkeypatch.delenv("ONEDNN_DEFAULT_FPMATH_MODE", raising=False)
    unit = torch.eye(128)
    monkeypatch.setattr(torch, "eye", lambda size: unit.as_subclass(Rounded) if rounds else unit)
    text = _cpu("AuthenticAMD", "avx512f")
    monkeypatch.setattr(cpu_process, "open", lambda *given, **options: io.StringIO(text), raising=False)
    assert use_onednn_in_fp32() is not rounds
    assert fp32_precision() == precision


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_own_settings_are_left_alone(name: str) -> None:
    assert not keep_freed_memory({name: "4"})


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(64, 8, 8), (13, 8, 1), (4, 8, 1), (16, 1, 16)])
def test_a_step_in_host_memory_has_the_nodes_cores(monkeypatch, cores: int, ranks: int, threads: int) -> None:
    import torch

    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    # What a launcher that nobody told of threads leaves in its worker.
    monkeypatch.setattr(cpu_process, "_launcher_environment", lambda: {"PATH": "/bin"})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert use_cores_of_host(cores, ranks) == threads
    assert found == [threads]
    # A user's own number stays, whether the launcher was told or there is none.
    for environment in ({"OMP_NUM_THREADS": "4"}, None):
        monkeypatch.setattr(cpu_process, "_launcher_environment", lambda said=environment: said)
        assert use_cores_of_host(cores, ranks) is None
    assert found == [threads]


def test_a_process_that_trains_keeps_few_compiled_products_unless_told_otherwise(monkeypatch) -> None:
    flushed, kept = [], []
    monkeypatch.setattr(torch, "set_flush_denormal", flushed.append)
    monkeypatch.setattr(cpu_process, "keep_freed_memory", lambda: kept.append(True))
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "put back")
    del os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]
    cpu_process.tune_cpu_process()
    assert (flushed, kept) == ([True], [True])
    assert [os.environ[name] for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")] == ["7", "24"]


def test_without_a_launcher_nothing_set_is_nothing_chosen(monkeypatch) -> None:
    monkeypatch.setattr(cpu_process, "_launcher_environment", lambda: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert not threads_are_chosen()


@pytest.mark.parametrize(
    ("settings", "optimizer", "expected"),
    [
        ({}, None, False),
        ({}, "adamw_torch_fused", False),
        ({}, "adamw_cpu_offload", True),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, None, False),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
            "paged_adamw_32bit",
            True,
        ),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, None, True),
    ],
)
def test_which_runs_step_in_host_memory(settings: dict[str, str], optimizer: str | None, expected: bool) -> None:
    assert steps_on_host(current_launch(settings), optimizer) == expected
