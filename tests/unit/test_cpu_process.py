"""Freed memory is reused without going through the kernel, and a user's own allocator settings are left alone."""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
from pathlib import Path

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

    # Torch's defaults, given here by the user, whose values win.
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
    # Whether or not this machine's oneDNN rounds to bf16, the process ends up computing in fp32.
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
    """A tensor whose products round the first factor to bf16, as oneDNN does on CPUs with AMX."""

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
    info = Path("/proc/cpuinfo")
    if not rounds and info.exists() and "amx_bf16" in info.read_text(encoding="utf-8").split():
        pytest.skip("this processor rounds by itself")
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
    # The value that a launcher without a thread setting leaves in its worker.
    monkeypatch.setattr(cpu_process, "_launcher_environment", lambda: {"PATH": "/bin"})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert use_cores_of_host(cores, ranks) == threads
    assert found == [threads]
    # A user's own number is kept, whether it was given to the launcher or there is no launcher.
    for environment in ({"OMP_NUM_THREADS": "4"}, None):
        monkeypatch.setattr(cpu_process, "_launcher_environment", lambda said=environment: said)
        assert use_cores_of_host(cores, ranks) is None
    assert found == [threads]


def test_a_process_that_trains_keeps_few_compiled_products_unless_told_otherwise(monkeypatch) -> None:
    flushed, kept = [], []
    monkeypatch.setattr(torch, "set_flush_denormal", flushed.append)
    monkeypatch.setattr(cpu_process, "keep_freed_memory", lambda: kept.append(True))
    monkeypatch.setattr(cpu_process, "_multiplies_bf16", lambda: True)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "put back")
    del os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]
    cpu_process.tune_cpu_process()
    assert (flushed, kept) == ([True], [True])
    assert [os.environ[name] for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")] == ["7", "40"]


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


_PRODUCTS_IN_FP32 = """
import warnings
warnings.simplefilter("error")
import torch
from accel_scale.launching.cpu_process import multiply_bf16_in_fp32
torch.manual_seed(0)
a, b, c, d, e, f = (torch.randn(n, m) for n, m in [(96, 64), (64, 80), (1, 80), (4, 1536), (4, 1024), (4, 1152)])
batch = [x.view(4, *size) for x, size in ((d, (48, 32)), (e, (32, 32)), (f, (36, 32)))]
cases = {
    "mm": lambda to: to(a) @ to(b),
    "linear": lambda to: torch.nn.functional.linear(to(a), to(b).T, to(c)[0]),
    "addmm": lambda to: torch.addmm(to(c), to(a), to(b), beta=0.5, alpha=2),
    "bmm": lambda to: to(batch[0]) @ to(batch[1]),
    "baddbmm": lambda to: torch.baddbmm(to(c)[:, :32, None][:, :1], to(batch[0]), to(batch[1]), beta=3),
}
exact = {name: case(lambda x: x.bfloat16().double()) for name, case in cases.items()}
plain = {name: case(lambda x: x) for name, case in cases.items()}
multiply_bf16_in_fp32()
multiply_bf16_in_fp32()
for name, case in cases.items():
    found = case(lambda x: x.bfloat16())
    assert found.dtype is torch.bfloat16, name
    # Rounded once: half of a last place of 8 bits.
    torch.testing.assert_close(found.double(), exact[name], rtol=2**-8, atol=1e-6, msg=name)
    assert torch.equal(case(lambda x: x), plain[name]), name
left, right = a.bfloat16().requires_grad_(), b.bfloat16().requires_grad_()
(left @ right).sum().backward()
assert left.grad.dtype is right.grad.dtype is torch.bfloat16
torch.testing.assert_close(left.grad[0].float(), right.detach().float().sum(1), rtol=2**-7, atol=1e-3)
with torch.autocast("cpu", torch.bfloat16):
    assert torch.equal(a @ b, a.bfloat16() @ b.bfloat16())
try:
    a.bfloat16() @ b
except RuntimeError as error:
    assert "dtype" in str(error)
else:
    raise AssertionError("two dtypes")
"""


def test_bf16_products_in_fp32_are_rounded_once_and_other_dtypes_stay() -> None:
    done = subprocess.run([sys.executable, "-c", _PRODUCTS_IN_FP32], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


_SPEED = """
import time
import torch
from accel_scale.launching.cpu_process import multiply_bf16_in_fp32
torch.set_num_threads(1)
a, b = torch.ones(512, 256, dtype=torch.bfloat16), torch.ones(256, 512, dtype=torch.bfloat16)
def seconds():
    a @ b
    times = []
    for _ in range(3):
        before = time.process_time()
        a @ b
        times.append(time.process_time() - before)
    return min(times)
before = seconds()
multiply_bf16_in_fp32()
print(before / seconds())
"""


@pytest.mark.skipif(cpu_process._multiplies_bf16(), reason="oneDNN multiplies bf16 on this CPU")
def test_bf16_products_in_fp32_take_a_fraction_of_torchs_time() -> None:
    done = subprocess.run([sys.executable, "-c", _SPEED], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 4


@pytest.mark.parametrize("has_products", [True, False])
def test_a_process_that_trains_multiplies_bf16_in_fp32_where_the_cpu_cannot(monkeypatch, has_products) -> None:
    done: list[bool] = []
    monkeypatch.setattr(cpu_process, "_multiplies_bf16", lambda: has_products)
    monkeypatch.setattr(cpu_process, "multiply_bf16_in_fp32", lambda: done.append(True))
    monkeypatch.setattr(cpu_process, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(torch, "set_flush_denormal", lambda on: True)
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.setenv(name, "24")
    cpu_process.tune_cpu_process()
    assert bool(done) is not has_products
