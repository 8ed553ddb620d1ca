"""Let a GPU launch file run on CPU processes over gloo, unchanged, when no accelerator is present.

Without an accelerator, Accelerate ignores a distributed launch: every process believes it is alone, and all of them
write to the same folder. `enable_rehearsal_if_needed` turns the same launch into a real process group instead, so that
DDP, FSDP2 and every DeepSpeed stage shard, communicate and save on a laptop exactly as they will on GPUs, only slower.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import TrainingArguments

_TRUE = {"1", "true", "yes", "on"}


def enable_rehearsal_if_needed() -> str | None:
    """Turn a distributed launch without an accelerator into a real one on CPU processes over gloo.

    Call before the first `Accelerator`, `PartialState` or `TrainingArguments`. Does nothing if there is an accelerator
    or the launch is not distributed (one process with neither FSDP nor DeepSpeed), except that such a process computes
    on all cores unless the user chose otherwise.

    Returns:
        One line that rank 0 should print, or None if nothing was changed.
    """
    if _accelerator_name() is not None:
        return None
    if not is_distributed_launch(os.environ):
        _use_all_cores(os.environ)
        return None
    _complete_environment(os.environ)
    _limit_threads(os.environ)
    _answer_gloo_as_backend()
    if _uses(os.environ, "FSDP"):
        _offload_to_unpinned_memory()
    if _uses(os.environ, "DEEPSPEED"):
        _skip_shared_memory_op()
    num_processes = int(os.environ["WORLD_SIZE"])
    plural = "process" if num_processes == 1 else "processes"
    return (
        f"No accelerator found: rehearsing {_strategy_name(os.environ)} on {num_processes} CPU {plural} over gloo. "
        "Speed and memory will differ on GPUs; sharding, saving and numbers will not."
    )


def let_trainers_run_on_cpu() -> None:
    """Let every `TrainingArguments` created from now on train without an accelerator.

    Replaces `TrainingArguments._validate_args`, which `__post_init__` calls before it looks for a device (private API,
    checked on transformers 5.23; tests/unit/test_rehearsal.py fails if it changes).
    """
    import torch

    if torch.accelerator.is_available():
        return
    from transformers import TrainingArguments

    check = TrainingArguments._validate_args
    if hasattr(check, "__wrapped__"):
        return

    @functools.wraps(check)
    def _validate_args(self: TrainingArguments) -> None:
        validate_on_cpu(self, functools.partial(check, self))
        if is_distributed_launch(os.environ):
            # Every process is on the CPU already. These settings would take it out of its gloo group.
            self.use_cpu, self.ddp_backend = False, None
        self.tf32 = None  # only GPUs have it
        self.dataloader_pin_memory = False

    TrainingArguments._validate_args = _validate_args  # type: ignore[method-assign]


def validate_on_cpu(arguments: TrainingArguments, check: Callable[[], None]) -> None:
    """transformers' own `check` of `arguments`, except that bf16 is allowed on a CPU.

    transformers allows it only with ``use_cpu``, which would also make every rank of a launch a run of its own
    (checked on 5.23; tests/unit/test_config.py fails if it changes).
    """
    kept = arguments.use_cpu
    arguments.use_cpu = True
    try:
        check()
    finally:
        arguments.use_cpu = kept


def is_distributed_launch(environment: Mapping[str, str]) -> bool:
    """True if `environment` is that of a rank of a distributed launch, or of an FSDP or DeepSpeed launch of any size.

    `accelerate launch --cpu` (and `use_cpu: true`) is Accelerate's own way to run on CPU processes and is left alone.
    """
    if environment.get("ACCELERATE_USE_CPU", "false").lower() in _TRUE:
        return False
    if int(environment.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in environment:
        return True
    return _uses(environment, "FSDP") or _uses(environment, "DEEPSPEED")


def _uses(environment: Mapping[str, str], engine: str) -> bool:
    return environment.get(f"ACCELERATE_USE_{engine}", "false").lower() in _TRUE


def _accelerator_name() -> str | None:
    """``cuda``, ``xpu``, … or None. Apple's MPS counts as none: it has no collectives, so it cannot be launched on."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None or accelerator.type == "mps" else accelerator.type


def _strategy_name(environment: Mapping[str, str]) -> str:
    if _uses(environment, "DEEPSPEED"):
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
        return f"DeepSpeed ZeRO-{stage}" if stage else "DeepSpeed"
    if _uses(environment, "FSDP"):
        return f"FSDP{environment.get('FSDP_VERSION', '1')}"
    return "DDP"


def _complete_environment(environment: MutableMapping[str, str]) -> None:
    """Point Accelerate and DeepSpeed to the CPU, and make a single process a world of one."""
    environment["ACCELERATE_TORCH_DEVICE"] = "cpu"
    environment["DS_ACCELERATOR"] = "cpu"
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
        environment.setdefault(name, value)
    environment.setdefault("MASTER_ADDR", "127.0.0.1")
    environment.setdefault("MASTER_PORT", "0")  # any free port: nobody else has to know it


def threads_per_process(num_cores: int, num_local_processes: int, chosen: str | None) -> int:
    """Number of threads for each rank: the user's choice, else an equal share of the cores."""
    if chosen is not None and chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    return max(1, num_cores // max(1, num_local_processes))


def _limit_threads(environment: MutableMapping[str, str]) -> None:
    import torch

    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chosen = environment.get("OMP_NUM_THREADS")
    if chosen == "1":
        chosen = _threads_chosen_at_launch()
    num_threads = threads_per_process(num_cores, int(environment.get("LOCAL_WORLD_SIZE", "1")), chosen)
    environment["OMP_NUM_THREADS"] = str(num_threads)
    torch.set_num_threads(num_threads)


def _use_all_cores(environment: MutableMapping[str, str]) -> None:
    """Undo the single thread that `accelerate launch` gives a single process if the user chose nothing."""
    from accel_scale.launching.environment import find_launch_command

    if environment.get("OMP_NUM_THREADS") != "1" or "ACCELERATE_MIXED_PRECISION" not in environment:
        return
    command = find_launch_command()
    if command is not None and "num_cpu_threads_per_process" not in command.flags:
        _limit_threads(environment)


def _threads_chosen_at_launch() -> str | None:
    """``OMP_NUM_THREADS`` in the environment in which the launcher was started.

    `accelerate launch` and torchrun export 1 to their ranks when nothing was chosen. That suits ranks that feed a GPU,
    but idles most of a CPU that has to do the arithmetic itself.
    """
    import psutil

    try:
        for parent in psutil.Process().parents():
            environment = parent.environ()
            if "LOCAL_RANK" not in environment:
                return environment.get("OMP_NUM_THREADS")
    except psutil.Error:
        return None  # another user's launcher
    return None


def _answer_gloo_as_backend() -> None:
    """Replace `PartialState._prepare_backend`, where Accelerate decides on backend and kind of launch.

    Private API, checked on accelerate 1.15.0. With ``MULTI_GPU`` Accelerate initialises the process group itself and
    goes on to build FSDP; with ``MULTI_CPU`` it does the same for DDP and DeepSpeed, and moves nothing to ``cuda``.
    `tests/unit/test_rehearsal.py` fails if the method, its arguments or its result change.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def _prepare_backend(
        self: object, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str, DistributedType]:
        kind = DistributedType.MULTI_GPU if _uses(os.environ, "FSDP") else DistributedType.MULTI_CPU
        return "gloo", kind

    PartialState._prepare_backend = _prepare_backend  # type: ignore[method-assign]


def _offload_to_unpinned_memory() -> None:
    """Default FSDP2's `CPUOffloadPolicy` to unpinned memory: only an accelerator can pin memory (torch 2.13)."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    CPUOffloadPolicy.__init__.__defaults__ = (False,)


def _skip_shared_memory_op() -> None:
    """Tell DeepSpeed that none of its optional ops is available, before it compiles one that training never calls.

    On a CPU, DeepSpeed 0.19.8 compiles a shared-memory all-reduce for inference when the process group starts, which
    takes minutes at the first run. `deepspeed.ops.__compatible_ops__` is read there only; the ops that offloading
    needs are requested by name and still compiled.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}
