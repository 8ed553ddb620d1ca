"""Refusals before anything is loaded: hooks and buckets without DDP, and PowerSGD where it cannot be honoured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from accel_scale.checks.registry import check_run
from accel_scale.checks.run_settings import RunSettings
from accel_scale.flags.parsing import parse_flags
from accel_scale.flags.pretraining import PretrainArguments
from accel_scale.launching.machine import LocalMachine
from accel_scale.launching.strategy import LaunchStrategy
from accel_scale.settings.trl_config import RecipeSFTConfig
from accel_scale.training.ddp.hooks import DdpSettings


@dataclass
class Launch:
    """The parts of a launch that the rules read."""

    parallel: LaunchStrategy
    mixed_precision: str | None = None
    num_processes: int | None = 2
    local_world_size: int | None = 2

    @property
    def file_values(self) -> dict[str, Any]:
        return {}

    def place(self, key: str) -> str:
        return key


def found(strategy: str, machine: LocalMachine, **flags: Any) -> list[str]:
    run = RunSettings.from_flags(flags)
    names = ("ddp_", "powersgd_", "sync_", "reduce_")
    findings = check_run(run, Launch(LaunchStrategy(strategy)), machine)
    return [f"{f.level}: {f.one_line()}" for f in findings if f.place.startswith(tuple(f"--{n}" for n in names))]


@pytest.fixture(scope="module")
def machine() -> LocalMachine:
    from accel_scale.launching.machine import detect_machine

    return detect_machine(["."])


@pytest.mark.parametrize("strategy", ["single", "fsdp2", "zero1", "zero3"])
@pytest.mark.parametrize(
    "flags",
    [{"ddp_comm_hook": "bf16"}, {"ddp_bucket_cap_mb": 50}, {"ddp_comm_hook": "powersgd", "powersgd_rank": 2}],
)
def test_without_ddp_they_are_refused(strategy: str, flags: dict[str, Any], machine: LocalMachine) -> None:
    (line,) = found(strategy, machine, **flags)
    assert line.startswith(f"error: --{next(iter(flags))}")
    assert ("one process sends no gradients" if strategy == "single" else "no DDP buckets") in line
    assert found("ddp", machine, **flags) == []


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"ddp_bucket_cap_mb": 0}, "a bucket of 0 MB"),
        ({"powersgd_rank": 4}, "is PowerSGD's"),
        ({"ddp_comm_hook": "bf16", "powersgd_start_step": 10}, "is PowerSGD's"),
        ({"ddp_comm_hook": "powersgd", "powersgd_rank": 0}, "factors of rank 0"),
        ({"ddp_comm_hook": "powersgd", "powersgd_start_step": 2}, "cannot begin with step 2"),
        ({"ddp_comm_hook": "powersgd", "max_steps": 50}, "begins with step 100, and the run has 50"),
        ({"ddp_comm_hook": "powersgd", "precision": "fp16"}, "loss scale changes"),
        ({"ddp_comm_hook": "bf16", "precision": "bf16_true"}, "16 bits already"),
    ],
)
def test_what_cannot_be_honoured_is_said(flags: dict[str, Any], problem: str, machine: LocalMachine) -> None:
    (line,) = found("ddp", machine, **flags)
    assert problem in line


def test_ranks_that_share_a_model_have_no_buckets(machine: LocalMachine) -> None:
    (line,) = found("ddp", machine, ddp_comm_hook="bf16", tp_size=2, pp_size=1)
    assert "share a model" in line


@pytest.mark.parametrize(
    ("strategy", "flags", "why"),
    [
        ("fsdp2", {}, None),
        ("fsdp2", {"tp_size": 2, "pp_size": 1}, "share a model"),
        ("fsdp2", {"sp_size": 2}, "share a model"),
        ("ddp", {}, "saves no memory"),
        ("single", {}, "saves no memory"),
        ("zero2", {}, "DeepSpeed decides"),
    ],
)
def test_gradients_of_every_micro_batch_are_fsdp2s(
    strategy: str, flags: dict[str, Any], why: str | None, machine: LocalMachine
) -> None:
    lines = found(strategy, machine, sync_each_batch=True, **flags)
    assert len(lines) == (why is not None)
    assert why is None or (why in lines[0] and lines[0].startswith("error: --sync_each_batch"))
    assert found(strategy, machine, sync_each_batch=False, **flags) == []


def test_the_trainer_is_told_to_reduce_every_micro_batch(tmp_path: Path) -> None:
    from accelerate.utils import GradientAccumulationPlugin

    given = {"gradient_accumulation_kwargs": {"sync_with_dataloader": False}, "even_batches": False}
    config = RecipeSFTConfig(output_dir=str(tmp_path), sync_each_batch=True, accelerator_config=given)
    kept = config.accelerator_config
    assert not kept.even_batches
    plugin = GradientAccumulationPlugin(**kept.gradient_accumulation_kwargs)
    assert plugin.sync_each_batch
    assert not plugin.sync_with_dataloader
    assert not RecipeSFTConfig(output_dir=str(tmp_path)).accelerator_config.gradient_accumulation_kwargs


def test_both_recipes_have_the_flags() -> None:
    words = ["--ddp_comm_hook", "powersgd", "--powersgd_rank", "8", "--ddp_bucket_cap_mb", "50"]
    for cls in (PretrainArguments, RecipeSFTConfig):
        args = cls(**parse_flags((cls,), words, program="recipe.py").explicit)
        assert DdpSettings.of(args) == DdpSettings(50, "powersgd", 8, 100)
        assert DdpSettings.of(cls()) == DdpSettings()


@pytest.mark.parametrize(
    ("strategy", "flags", "says"),
    [
        ("single", {"reduce_dtype": "bf16"}, "one process adds up no gradients"),
        ("ddp", {"reduce_dtype": "bf16"}, None),
        ("fsdp2", {"reduce_dtype": "fp32"}, None),
        ("zero3", {"reduce_dtype": "fp32"}, None),
        ("fsdp2", {"reduce_dtype": "bf16", "tp_size": 2, "pp_size": 1}, "add up gradients in fp32"),
        ("fsdp2", {"reduce_dtype": "fp32", "tp_size": 2, "pp_size": 1}, None),
        ("ddp", {"reduce_dtype": "fp32", "precision": "bf16_true"}, "as they are"),
        ("fsdp2", {"reduce_dtype": "fp32", "precision": "bf16_true"}, None),
    ],
)
def test_the_dtype_of_reductions_where_it_cannot_be_chosen(
    strategy: str, flags: dict[str, Any], says: str | None, machine: LocalMachine
) -> None:
    lines = found(strategy, machine, **flags)
    assert [says in line for line in lines] == ([True] if says else [])
