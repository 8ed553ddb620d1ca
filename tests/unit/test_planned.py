"""The planner inside the recipe: how it reads the settings, what it refuses, what it chooses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trl import ScriptArguments

from accel_scale.errors import ConfigError
from accel_scale.facts.device import Device
from accel_scale.flags.common import ScaleArguments
from accel_scale.flags.parsing import parse_flags
from accel_scale.launching.environment import LaunchEnvironment
from accel_scale.launching.strategy import LaunchStrategy
from accel_scale.modeling import loading
from accel_scale.modeling.loading import load_config
from accel_scale.planning.models.catalogue import catalogue_config
from accel_scale.settings.planned import RunPlan, plan_run, with_interval
from accel_scale.settings.planned_choice import resolve_planned
from accel_scale.settings.planned_setup import parallel_of, setup_of
from accel_scale.settings.resolved import LaunchFacts, Resolved
from accel_scale.settings.trl_config import RecipeModelConfig, RecipeSFTConfig

FLAG_CLASSES = (ScriptArguments, RecipeSFTConfig, RecipeModelConfig, ScaleArguments)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama 3.1 8B's configuration without weights."""
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(catalogue_config("meta-llama/Llama-3.1-8B")))
    return folder


def launched(strategy: LaunchStrategy = LaunchStrategy("single"), world_size: int = 1) -> LaunchEnvironment:  # noqa: B008
    return LaunchEnvironment(strategy, None, world_size, world_size, 0, 0)


def resolved(model: Path, flags: str, launch: LaunchEnvironment | None = None) -> Resolved:
    launch = launch or launched()
    argv = ["--model_name_or_path", str(model), "--dataset_name", "x", *flags.split()]
    facts = LaunchFacts(world_size=launch.world_size, strategy=launch.strategy, device=Device(fast_bf16=False))
    return resolve_planned(parse_flags(FLAG_CLASSES, argv, program="sft.py"), facts, launch)


def planned(model: Path, flags: str, launch: LaunchEnvironment | None = None) -> tuple[RunPlan | None, list[str]]:
    from transformers import AutoConfig

    lines: list[str] = []
    settings = resolved(model, flags, launch)
    config = AutoConfig.from_pretrained(model)
    return plan_run(settings, launch or launched(), config, "sdpa_packed", lines.append), lines


def test_what_does_not_fit_is_refused_with_what_would(model: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(model, "--plan check --plan_gpu 4090 --method lora --max_length 2048")
    line = refused.value.one_line()
    assert line.startswith("--plan_gpu: this run would not fit: predicted ")
    assert "of 23.5 GiB (RTX 4090)" in line
    assert "the largest part is " in line
    assert "--method qlora" in line
    assert "--per_device_train_batch_size" in line
    assert "\n" not in line


def test_a_flash_kernel_from_the_hub_is_planned_like_flash_attention(model: Path) -> None:
    settings = resolved(model, "--plan check --plan_gpu A100-80GB --method lora --precision bf16")
    names = ("flash_attention_2", "kernels-community/flash-attn2", "sdpa_packed", "sdpa")
    flash, kernel, packed, sdpa = (setup_of(settings, launched(), name) for name in names)
    assert flash == kernel
    assert packed == sdpa
    with pytest.raises(ConfigError, match="attention"):
        setup_of(settings, launched(), "owner/another")


@pytest.mark.parametrize("length", [2048, 8192])
def test_every_change_it_names_fits(model: Path, length: int) -> None:
    flags = f"--plan check --plan_gpu 4090 --max_length {length}"
    with pytest.raises(ConfigError) as refused:
        planned(model, f"{flags} --method lora")
    first, _, rest = refused.value.fix.rpartition(" together with ")
    changes = [text.split(" (")[0] for text in rest.split(", or ")]
    assert 1 <= len(changes) <= 3
    for change in changes:
        if change.startswith("--"):  # other changes are launch files
            method = "" if "--method" in change else "--method lora"
            plan, _ = planned(model, f"{flags} {method} {first} {change}")
            assert plan is not None
            assert plan.fits


def test_a_laptop_plans_for_what_the_card_would_run(model: Path) -> None:
    plan, _ = planned(model, "--plan_gpu 4090 --method qlora --per_device_train_batch_size 1")
    assert plan is not None
    # This CPU has no native bf16 and uses no checkpointing; the GPU would.
    assert (plan.setup.precision, plan.setup.checkpointing) == ("bf16", "full")
    assert plan.here is not None
    assert (plan.here.precision, plan.here.checkpointing) == ("fp32", "none")
    assert plan.time is not None
    assert plan.time.step_seconds > 0


def test_off_is_the_default_without_a_gpu_and_says_nothing(model: Path) -> None:
    assert planned(model, "") == (None, [])
    with pytest.raises(ConfigError, match="plans for no card"):
        planned(model, "--plan off --plan_gpu 4090")
    with pytest.raises(ConfigError, match="RTX 4090"):
        planned(model, "--plan check --plan_gpu 4009")


def test_a_model_that_is_not_modelled_goes_on_unplanned_or_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "num_layers": 2}))
    plan, lines = planned(tmp_path, "--plan check --plan_gpu 24GiB --packing false --attn_implementation eager")
    assert plan is None
    assert len(lines) == 1
    assert "cannot be predicted: " in lines[0]
    assert "'t5' is not modelled and cannot be built from its config" in lines[0]
    with pytest.raises(ConfigError, match="t5"):
        resolved(tmp_path, "--plan auto --plan_gpu 24GiB --packing false --attn_implementation eager")


@pytest.mark.parametrize("world_size", [1, 2])
def test_auto_keeps_the_global_batch_and_fits(model: Path, world_size: int) -> None:
    launch = launched(LaunchStrategy("ddp" if world_size > 1 else "single"), world_size)
    flags = "--plan auto --plan_gpu 24GiB --method qlora --global_batch_size 24"
    settings = resolved(model, flags, launch)
    values = settings.values
    assert settings.global_batch_size == 24
    assert values["per_device_train_batch_size"] * values["gradient_accumulation_steps"] * world_size == 24
    assert settings.sources["per_device_train_batch_size"] == "planned: fits 24 GiB (24 GiB card)"
    assert len(settings.notes) == 1
    assert settings.notes[0].startswith("planned: --per_device_train_batch_size ")
    plan, lines = planned(model, flags, launch)
    assert plan is not None
    assert plan.fits
    assert lines == settings.notes


def test_auto_reduces_every_micro_batch_where_whole_gradients_do_not_fit(model: Path) -> None:
    launch = launched(LaunchStrategy("fsdp2"), 8)
    flags = (
        "--plan auto --plan_gpu 30GiB --method full --global_batch_size 64 --max_length 2048 --optim adamw_torch_fused"
    )
    assert resolved(model, flags, launch).values["sync_each_batch"] is True
    assert "--sync_each_batch True" in resolved(model, flags, launch).notes[0]
    with pytest.raises(ConfigError, match="nothing that is left open makes this run fit"):
        resolved(model, f"{flags} --sync_each_batch false", launch)
    assert not resolved(model, flags.replace("30GiB", "80GiB"), launch).values.get("sync_each_batch")


def test_check_names_it_among_what_would_fit(model: Path) -> None:
    launch = launched(LaunchStrategy("fsdp2"), 8)
    flags = "--plan check --plan_gpu 30GiB --method full --global_batch_size 64 --per_device_train_batch_size 1"
    with pytest.raises(ConfigError) as refused:
        planned(model, f"{flags} --max_length 2048 --optim adamw_torch_fused --checkpointing_policy full", launch)
    assert "--sync_each_batch true" in refused.value.one_line()
    planned(model, f"{flags} --max_length 2048 --checkpointing_policy full --sync_each_batch true", launch)


def test_auto_reads_the_configuration_once_and_keeps_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(loading, "load_config", lambda *args, **how: read.append(load_config(*args, **how)) or read[0])
    settings = resolved(model, "--plan auto --plan_gpu 48GiB")
    assert read == [settings.model_config]
    assert resolved(model, "--plan check --plan_gpu 48GiB").model_config is None
    assert len(read) == 1


def test_auto_leaves_alone_what_the_user_set(model: Path) -> None:
    flags = "--per_device_train_batch_size 2 --checkpointing_policy selective --optim sgd --method qlora"
    settings = resolved(model, f"--plan auto --plan_gpu 48GiB --gradient_accumulation_steps 3 {flags}")
    values = settings.values
    assert (values["per_device_train_batch_size"], values["gradient_accumulation_steps"]) == (2, 3)
    assert (values["checkpointing_policy"], values["optim"], settings.method) == ("selective", "sgd", "qlora")
    with pytest.raises(ConfigError, match="nothing that is left open makes this run fit"):
        resolved(model, "--plan auto --plan_gpu 24GiB --method full")


def test_auto_changes_the_method_only_where_it_must(model: Path) -> None:
    methods = {card: resolved(model, f"--plan auto --plan_gpu {card}").method for card in ("12GiB", "24GiB", "B200")}
    assert methods == {"12GiB": "qlora", "24GiB": "lora", "B200": "full"}


def test_strategies_of_launch_files_are_translated() -> None:
    fsdp = LaunchStrategy("fsdp2", num_replicas=2, num_shards=4, fsdp={"fsdp_reshard_after_forward": "false"})
    parallel = parallel_of(fsdp, 8, 4)
    assert (parallel.strategy, parallel.num_gpus, parallel.num_replicas) == ("fsdp2", 8, 2)
    assert parallel.num_shards == 4
    assert not parallel.reshard_after_forward
    zero = parallel_of(LaunchStrategy("zero3", offload_optimizer="cpu", offload_params="nvme"), 2, 2)
    assert (zero.offload_optimizer, zero.offload_params) == ("cpu", "nvme")
    with pytest.raises(ConfigError, match="not modelled"):
        parallel_of(LaunchStrategy("megatron"), 2, 2)


class Words:
    """A tokenizer that gives each word a token."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text.split())))}


def test_padded_rows_are_planned_at_the_length_of_the_data(model: Path) -> None:
    from datasets import Dataset

    flags = "--plan check --plan_gpu 12GiB --method qlora --packing false --max_length 65536"
    plan, _ = planned(model, flags + " --per_device_train_batch_size 1")
    assert plan is not None
    assert not plan.fits
    short = plan.for_data(Dataset.from_dict({"text": ["a b c " * 50, "a b"]}), Words())
    assert short.setup.sequence_length == 151
    assert short.fits
    with pytest.raises(ConfigError, match="would not fit"):
        plan.for_data(Dataset.from_dict({"text": ["word " * 65000]}), Words())


def test_rows_of_the_data_that_differ_keep_blocks_unless_segments_grow(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset

    flags = "--plan check --plan_gpu 80GiB --method lora --packing false --per_device_train_batch_size 8"
    flags += " --max_length 4096 --checkpointing_policy full"
    same, differing = (Dataset.from_dict({"text": ["word " * 1000, "word " * other]}) for other in (1000, 100))
    plan, _ = planned(model, flags)
    assert plan is not None
    alike = plan.for_data(same, Words())
    found = plan.for_data(differing, Words())
    assert found.memory.hoarded_bytes > 2**29
    assert found.memory.hoarded_bytes > alike.memory.hoarded_bytes + 2**28
    assert found.memory.high_bytes <= found.limit_bytes
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    plan, _ = planned(model, flags)
    assert plan is not None
    assert plan.for_data(differing, Words()).memory.hoarded_bytes == 0


def test_a_cap_is_the_limit(model: Path) -> None:
    plan, _ = planned(model, "--plan_gpu 48GiB --device_memory 20GiB --method qlora --per_device_train_batch_size 1")
    assert plan is not None
    assert plan.limit_bytes == 20 * 2**30
    assert replace(plan, memory=replace(plan.memory, high_bytes=20 * 2**30 + 1)).fits is False


def test_intervals_share_a_unit() -> None:
    assert with_interval(5.21 * 2**30, 0.42 * 2**30) == "5.21 ± 0.42 GiB"
    assert with_interval(80 * 2**20, 6.4 * 2**20) == "80 ± 6.4 MiB"
