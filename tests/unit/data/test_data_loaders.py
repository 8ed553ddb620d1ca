"""Data loader settings derived from cores, device and data; values set by the user are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_scale.data.loaders import available_cores, loader_settings, outlive_signals

NAMES = {
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_prefetch_factor",
    "dataloader_persistent_workers",
}


@pytest.mark.parametrize(
    ("cores", "processes", "workers"),
    [
        (128, 8, 8),
        (64, 8, 7),
        (48, 8, 5),
        (16, 8, 1),
        (8, 8, 0),
        (16, 1, 8),
        (6, 1, 5),
        (2, 1, 1),
        (1, 1, 0),
        (4, 8, 0),
    ],
)
def test_workers_on_accelerators(cores, processes, workers) -> None:
    got = loader_settings(device_type="cuda", num_rows=1000, processes_on_node=processes, num_cores=cores)
    assert got == {
        "dataloader_num_workers": workers,
        "dataloader_pin_memory": True,
        "dataloader_prefetch_factor": 2 if workers else None,
        "dataloader_persistent_workers": workers > 0,
    }


@pytest.mark.parametrize(
    ("num_rows", "cores", "workers"), [(2000, 16, 0), (500_000, 16, 1), (None, 16, 1), (None, 2, 0), (500_000, 2, 0)]
)
def test_on_a_cpu_the_cores_are_the_models(num_rows, cores, workers) -> None:
    got = loader_settings(device_type="cpu", num_rows=num_rows, processes_on_node=2, num_cores=cores)
    assert got["dataloader_num_workers"] == workers
    assert got["dataloader_pin_memory"] is False


def test_no_more_workers_than_a_stream_has_shards() -> None:
    got = loader_settings(device_type="cuda", num_rows=None, num_cores=32, num_shards=3)
    assert got["dataloader_num_workers"] == 3


def test_what_the_user_set_decides_the_rest() -> None:
    got = loader_settings(device_type="cuda", num_rows=9, num_cores=32, explicit={"dataloader_num_workers": 0})
    assert got == {
        "dataloader_pin_memory": True,
        "dataloader_prefetch_factor": None,
        "dataloader_persistent_workers": False,
    }


@given(
    device_type=st.sampled_from(["cpu", "cuda", "xpu", "mps"]),
    num_rows=st.none() | st.integers(1, 10**7),
    processes=st.integers(1, 16),
    cores=st.integers(1, 256),
    chosen=st.sets(st.sampled_from(sorted(NAMES))),
)
def test_never_overrides_never_oversubscribes_and_torch_takes_it(
    device_type, num_rows, processes, cores, chosen
) -> None:
    defaults = {
        "dataloader_num_workers": 3,
        "dataloader_pin_memory": False,
        "dataloader_prefetch_factor": None,
        "dataloader_persistent_workers": False,
    }
    explicit = {name: defaults[name] for name in chosen}
    got = loader_settings(
        device_type=device_type, num_rows=num_rows, processes_on_node=processes, num_cores=cores, explicit=explicit
    )
    assert set(got) == NAMES - chosen
    workers = {**got, **explicit}["dataloader_num_workers"]
    assert 0 <= workers <= 8
    if "dataloader_num_workers" in got:
        assert workers * processes <= cores
    if "dataloader_prefetch_factor" in got:
        assert (got["dataloader_prefetch_factor"] is None) == (workers == 0)


@pytest.mark.slow
def test_the_trainers_arguments_take_them(tmp_path) -> None:
    from torch.utils.data import DataLoader
    from transformers import TrainingArguments

    for device_type in ("cuda", "cpu"):
        got = loader_settings(device_type=device_type, num_rows=None, num_cores=3)
        arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **got)
        DataLoader(
            list(range(4)),
            num_workers=arguments.dataloader_num_workers,
            prefetch_factor=arguments.dataloader_prefetch_factor,
            persistent_workers=arguments.dataloader_persistent_workers,
        )


def test_cores_are_those_of_this_process() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="needs sigwaitinfo")
def test_a_worker_ends_with_its_owner_and_with_nobody_else() -> None:
    """Launchers and terminals signal the run's whole process group, and the run must save before its workers end."""
    told, tell = os.pipe()
    done = (0, 0)
    child = os.fork()
    if child == 0:
        try:
            outlive_signals()
            outlive_signals(3)  # as a second loader would call it
            os.write(tell, b".")
            time.sleep(60)
        finally:
            os._exit(7)
    try:
        assert os.read(told, 1) == b"."
        for name in ("INT", "USR1", "TERM", "TERM"):  # sent by another process
            subprocess.run(["kill", f"-{name}", str(child)], check=True)
        time.sleep(0.1)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, signal.SIGTERM)
        end = time.monotonic() + 20
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
            time.sleep(0.01)
        assert done == (child, 0)
    finally:
        if done == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(told)
        os.close(tell)


def test_cores_where_the_system_does_not_say_which_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for told, cores in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda told=told: told)
        assert available_cores() == cores
