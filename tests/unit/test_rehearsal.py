"""When a launch is rehearsed on CPU processes, with how many threads, and what this relies on in other libraries."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys

import pytest
import torch

from accel_scale.launching.rehearsal import (
    _limit_threads,
    is_distributed_launch,
    let_trainers_run_on_cpu,
    threads_per_process,
)

RANK_OF_TWO = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
NO_ACCELERATOR = not torch.accelerator.is_available()
cpu_only = pytest.mark.skipif(not NO_ACCELERATOR, reason="rehearsal is for machines without an accelerator")

PROBE = """
import json, os
import torch
from accel_scale.launching.rehearsal import enable_rehearsal_if_needed
line = enable_rehearsal_if_needed()
from accelerate.state import PartialState
from torch.distributed.fsdp import CPUOffloadPolicy
print("PROBE" + json.dumps({
    "line": line,
    "backend": [str(x) for x in PartialState._prepare_backend(None)],
    "pinned": CPUOffloadPolicy().pin_memory,
    "device": os.environ.get("ACCELERATE_TORCH_DEVICE"),
    "threads": torch.get_num_threads(),
    "rank": os.environ.get("RANK"),
}))
"""


def probe(**environment: str) -> dict:
    """Report a fresh process's state with these launch variables after `enable_rehearsal_if_needed`."""
    launch_prefixes = ("ACCELERATE_", "FSDP_", "OMP_", "DS_")
    launch_names = {*RANK_OF_TWO, "MASTER_ADDR", "MASTER_PORT"}
    clean = {k: v for k, v in os.environ.items() if not k.startswith(launch_prefixes) and k not in launch_names}
    ran = subprocess.run(
        [sys.executable, "-c", PROBE], env={**clean, **environment}, capture_output=True, text=True, check=True
    )
    return json.loads(next(x for x in ran.stdout.splitlines() if x.startswith("PROBE")).removeprefix("PROBE"))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "1"}, False),
        (RANK_OF_TWO, True),
        ({**RANK_OF_TWO, "ACCELERATE_USE_CPU": "True"}, False),
        ({"ACCELERATE_USE_FSDP": "true", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, True),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, True),
        ({"ACCELERATE_USE_FSDP": "false"}, False),
    ],
)
def test_which_launches_are_distributed(environment: dict, expected: bool) -> None:
    assert is_distributed_launch(environment) is expected


@pytest.mark.parametrize(
    ("cores", "ranks", "chosen", "expected"),
    [(2, 2, None, 1), (16, 2, "1", 1), (16, 2, None, 8), (16, 2, "3", 3), (2, 4, None, 1), (16, 2, "", 8)],
)
def test_threads_are_an_equal_share_unless_chosen(cores: int, ranks: int, chosen: str | None, expected: int) -> None:
    assert threads_per_process(cores, ranks, chosen) == expected


def test_the_private_method_is_still_what_is_replaced() -> None:
    """Accelerate's method still has this name, these arguments and this result: ``(backend, kind of launch)``."""
    from accelerate.state import PartialState

    arguments = list(inspect.signature(PartialState._prepare_backend).parameters)
    assert arguments == ["self", "cpu", "sagemaker_dp", "backend"]
    assert "backend, distributed_type = self._prepare_backend(" in inspect.getsource(PartialState.__init__)


def test_arguments_are_still_validated_before_a_device_is_looked_for() -> None:
    from transformers import TrainingArguments

    source = inspect.getsource(TrainingArguments.__post_init__)
    order = ["self._validate_args()", "self.device\n", "if self.tf32:"]
    assert [source.index(part) for part in order] == sorted(source.index(part) for part in order)
    assert "self.use_cpu" in inspect.getsource(inspect.unwrap(TrainingArguments._validate_args))


@cpu_only
def test_arguments_of_a_gpu_script_are_accepted_on_a_cpu(tmp_path, monkeypatch) -> None:
    """bf16 is TRL's default; checks of the device are skipped in a rehearsal and kept in an ordinary run."""
    from transformers import TrainingArguments

    theirs = inspect.unwrap(TrainingArguments._validate_args)
    monkeypatch.setattr(TrainingArguments, "_validate_args", theirs)
    let_trainers_run_on_cpu()
    let_trainers_run_on_cpu()
    given = TrainingArguments(str(tmp_path), bf16=True, tf32=True, use_cpu=True)
    assert (given.bf16, given.tf32, given.use_cpu) == (True, None, True)
    assert TrainingArguments(str(tmp_path), bf16=True).use_cpu is False
    with pytest.raises(ValueError, match="At most one of fp16 and bf16"):
        TrainingArguments(str(tmp_path), bf16=True, fp16=True)


def test_the_offload_policy_still_pins_by_default() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    assert inspect.signature(CPUOffloadPolicy.__init__).parameters["pin_memory"].default is True


def test_deepspeed_still_asks_the_table_of_ops_before_compiling() -> None:
    comm = pytest.importorskip("deepspeed.comm.torch")
    assert "deepspeed.ops.__compatible_ops__.get(builder.NAME" in inspect.getsource(comm.build_shm_op)


@pytest.mark.slow
@cpu_only
def test_ddp_becomes_gloo_and_says_so() -> None:
    seen = probe(**RANK_OF_TWO)
    assert seen["backend"] == ["gloo", "DistributedType.MULTI_CPU"]
    assert seen["device"] == "cpu"
    assert "rehearsing DDP on 2 CPU processes" in seen["line"]
    assert seen["pinned"] is True, "only FSDP's own default is touched"


@pytest.mark.slow
@cpu_only
@pytest.mark.parametrize(("at_launch", "expected"), [(None, None), ("1", 1)])
def test_one_thread_is_a_choice_only_where_the_launch_was_started(
    monkeypatch: pytest.MonkeyPatch, at_launch: str | None, expected: int | None
) -> None:
    """The launcher exports 1 to its ranks by itself; a 1 in the user's shell is deliberate."""
    monkeypatch.setattr("psutil.Process.environ", lambda self: {"OMP_NUM_THREADS": at_launch} if at_launch else {})
    environment = {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1"}
    before = torch.get_num_threads()
    try:
        _limit_threads(environment)
        assert torch.get_num_threads() == (expected or len(os.sched_getaffinity(0)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@cpu_only
def test_fsdp_becomes_gloo_with_unpinned_offload() -> None:
    seen = probe(**RANK_OF_TWO, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", OMP_NUM_THREADS="3")
    assert seen["backend"] == ["gloo", "DistributedType.MULTI_GPU"]
    assert seen["pinned"] is False
    assert seen["threads"] == 3
    assert "rehearsing FSDP2" in seen["line"]


@pytest.mark.slow
def test_a_plain_run_is_left_alone() -> None:
    seen = probe()
    assert seen["line"] is None
    assert seen["device"] is None
    assert seen["rank"] is None
    assert seen["backend"] == ["None", "DistributedType.NO"]
