"""Flags, launch and device become one consistent set of settings, or one clear refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import ScriptArguments

from accel_scale.errors import ConfigError
from accel_scale.facts.device import Device
from accel_scale.flags.common import ScaleArguments
from accel_scale.flags.parsing import parse_flags
from accel_scale.optimization.schedules import create_schedule
from accel_scale.settings.resolve import resolve, set_usual_schedule
from accel_scale.settings.resolved import LaunchFacts, Resolved
from accel_scale.settings.trl_config import RecipeModelConfig, RecipeSFTConfig

CLASSES = (ScriptArguments, RecipeSFTConfig, RecipeModelConfig, ScaleArguments)
GPU = LaunchFacts(device=Device("cuda"))


def settle(*args: str, launch: LaunchFacts | None = None, preset: dict[str, Any] | None = None) -> Resolved:
    parsed = parse_flags(CLASSES, [a for arg in args for a in arg.split()], program="sft.py")
    return resolve(parsed, launch or LaunchFacts(), preset=preset)


def test_qlora_by_one_flag_and_by_trls_own() -> None:
    for args in (["--method qlora"], ["--use_peft --load_in_4bit"]):
        model = settle(*args).build(RecipeModelConfig)
        assert (model.use_peft, model.load_in_4bit, model.use_bnb_nested_quant) == (True, True, True)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--method full --use_peft", "--method full and use_peft true"),
        ("--method lora --load_in_4bit", "--method lora and load_in_4bit true"),
        ("--load_in_4bit", "use --method qlora"),
        ("--load_in_8bit", "add --use_peft"),
        ("--method qlora --load_in_8bit", "8-bit"),
        ("--load_in_4bit --load_in_8bit", "4 and in 8 bits"),
        ("--precision fp32 --bf16", "bf16"),
        ("--fp16 --bf16", "bf16"),
        ("--precision bf16 --loss_scale 1024", "in bf16 the loss is not scaled"),
        ("--precision fp16_true", "loss scaling cannot unscale"),
        ("--precision transformer_engine", "Use fp8"),
        ("--checkpointing_policy none --gradient_checkpointing", "contradict"),
        ("--checkpointing_policy evry_2", "every_2"),
        ("--global_batch_size 7 --per_device_train_batch_size 2", "6 or 8"),
        ("--global_batch_size 8 --per_device_train_batch_size 2 --gradient_accumulation_steps 2", "needs 4"),
        ("--warmup_ratio 0.1 --warmup_steps 5", "keep one"),
    ],
)
def test_contradictions_are_refused_in_one_line(args: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settle(args)
    assert says in str(caught.value)
    assert "Fix:" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_launch_files_precision_rules_or_is_named_by_line() -> None:
    launch = LaunchFacts(mixed_precision="bf16", mixed_precision_place="accelerate_configs/fsdp2.yaml:7")
    assert settle(launch=launch).precision.name == "bf16"
    assert settle("--precision bf16", launch=launch).precision.autocast_dtype is torch.bfloat16
    with pytest.raises(ConfigError, match=r"accelerate_configs/fsdp2.yaml:7: .*--precision"):
        settle("--precision fp32", launch=launch)
    off = LaunchFacts(mixed_precision="no", mixed_precision_place="x.yaml:3")
    assert settle(launch=off).precision.name == "fp32"


def test_bf16_is_a_default_only_where_the_device_has_it() -> None:
    emulated = LaunchFacts(device=Device(fast_bf16=False))
    assert settle().precision.name == "bf16"
    assert settle(launch=emulated).precision.name == "fp32"
    assert settle(launch=emulated, preset={"precision": "bf16"}).precision.name == "fp32"
    assert settle("--precision bf16", launch=emulated).precision.name == "bf16"


def test_global_batch_is_kept_whatever_the_number_of_ranks() -> None:
    for world, accumulation in ((1, 16), (2, 8), (4, 4), (16, 1)):
        settings = settle(
            "--global_batch_size 64 --per_device_train_batch_size 4", launch=LaunchFacts(world_size=world)
        )
        assert settings.values["gradient_accumulation_steps"] == accumulation
        assert settings.global_batch_size == 64


def test_learning_rate_follows_the_global_batch() -> None:
    args = "--learning_rate 1e-4 --lr_base_batch_size 16 --global_batch_size 64 --scale_lr_from_batch_size"
    assert settle(f"{args} linear").values["learning_rate"] == pytest.approx(4e-4)
    assert settle(f"{args} sqrt").values["learning_rate"] == pytest.approx(2e-4)


@pytest.mark.parametrize(
    ("args", "launch", "policy"),
    [
        ("", LaunchFacts(), "none"),
        ("", GPU, "full"),  # until the plan says that less will do
        ("--checkpointing_policy none", GPU, "none"),
        ("--gradient_checkpointing false", GPU, "none"),
        ("--activation_checkpointing true", LaunchFacts(), "full"),
        ('--activation_checkpointing_kwargs {"every_n_layers":3}', GPU, "every_3"),
        ('--activation_checkpointing_kwargs {"selective":true}', GPU, "selective"),
        ('--gradient_checkpointing_kwargs {"use_reentrant":true}', GPU, "full"),
    ],
)
def test_one_checkpointing_policy_from_any_switch(args: str, launch: LaunchFacts, policy: str) -> None:
    settings = settle(args, launch=launch)
    assert str(settings.checkpointing) == policy
    assert settings.use_reentrant == ("use_reentrant" in args)
    # The trainer must not switch it on a second time.
    assert not {"gradient_checkpointing", "activation_checkpointing"} & set(settings.values)


@pytest.mark.parametrize(
    ("args", "warmup", "floor"),
    [
        ("", 0.03, 0.1),
        ("--warmup_ratio 0.2 --min_lr_ratio 0", 0.2, 0.0),
        ("--warmup_steps 0", None, 0.1),
        ("--lr_scheduler_type linear", 0.03, None),
        ("--lr_scheduler_type constant", None, None),
        ("--lr_scheduler_type wsd --decay_ratio 0.99", pytest.approx(0.01), None),
    ],
)
def test_fine_tuning_warms_up_and_its_cosine_ends_above_zero(
    args: str, warmup: float | None, floor: float | None
) -> None:
    settings = settle(args)
    set_usual_schedule(settings)
    assert (settings.scale.warmup_ratio, settings.scale.min_lr_ratio) == (warmup, floor)
    if not args:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        schedule = create_schedule(optimizer, "cosine", num_training_steps=100, **settings.schedule)
        rates = []
        for _ in range(100):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        assert rates[:4] == pytest.approx([1 / 3, 2 / 3, 1, 1])
        assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_under_ddp_the_dtype_of_reductions_is_that_of_the_hook() -> None:
    ddp = LaunchFacts(world_size=2, strategy="ddp")
    assert settle("--reduce_dtype bf16", launch=ddp).values["ddp_comm_hook"] == "bf16"
    assert "ddp_comm_hook" not in settle("--reduce_dtype fp32", launch=ddp).values
    assert "ddp_comm_hook" not in settle("--reduce_dtype bf16", launch=replace(ddp, strategy="fsdp2")).values
    with pytest.raises(ConfigError, match="both say how gradients travel"):
        settle("--reduce_dtype bf16 --ddp_comm_hook powersgd", launch=ddp)


def test_the_preset_gives_way_by_groups() -> None:
    preset = {"learning_rate": 1.0, "warmup_ratio": 0.1, "max_steps": 9, "per_device_train_batch_size": 3}
    kept = settle("--learning_rate 2 --warmup_steps 4 --num_train_epochs 1 --global_batch_size 8", preset=preset)
    assert kept.values["learning_rate"] == 2
    assert kept.scale.warmup_ratio is None
    assert "max_steps" not in kept.values
    assert "per_device_train_batch_size" not in kept.values
    assert settle(preset=preset).sources["max_steps"] == "preset of the embedded data set"


def test_printed_settings_are_read_back_to_the_same(tmp_path: Path) -> None:
    settings = settle("--method qlora --lora_target_modules q_proj v_proj --max_steps 5 --warmup_ratio 0.1")
    text = settings.as_yaml(CLASSES)
    assert "learning_rate: 2e-05  # default" in text
    assert "max_steps: 5  # --max_steps" in text
    assert "load_in_4bit: true  # derived from method qlora" in text
    assert "hub_token" not in text
    path = tmp_path / "printed.yaml"
    path.write_text(text)
    again = resolve(parse_flags(CLASSES, ["--config_file", str(path)], program="sft.py"), LaunchFacts())
    assert again.method == "qlora"
    assert again.scale.warmup_ratio == 0.1
    assert again.build(RecipeModelConfig) == settings.build(RecipeModelConfig)
