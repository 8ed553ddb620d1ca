"""Freed memory is used again without the kernel, and a user's own allocator settings are left alone."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from accel_scale.training.cpu_process import keep_freed_memory

_FAULTS = """
import resource
from accel_scale.training.cpu_process import keep_freed_memory
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


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_own_settings_are_left_alone(name: str) -> None:
    assert not keep_freed_memory({name: "4"})
