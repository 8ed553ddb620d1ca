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
from accel_scale.settings.trl_refused import refuse_settings

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
    ("args", "place", "says"),
    [
        ("--lora_r 64", "--lora_r", "under --method full, which trains no adapter"),
        ("--method full --use_dora", "--use_dora", "trains no adapter"),
        (
            "--method lora --use_bnb_nested_quant",
            "--use_bnb_nested_quant",
            "under --method lora, which has no 4-bit base",
        ),
        ("--use_peft --load_in_8bit --bnb_4bit_quant_type fp4", "--bnb_4bit_quant_type", "has no 4-bit base"),
    ],
)
def test_flags_of_another_method_are_refused(args: str, place: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        refuse_settings(parse_flags(CLASSES, args.split(), program="sft.py"))
    assert caught.value.place == place


def test_flags_of_another_method_are_accepted_where_the_method_is_replaced_or_chosen(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("method: qlora\nlora_r: 8\nbnb_4bit_quant_type: nf4\n")
    for args in ([], ["--method", "full"], ["--method", "lora"]):
        refuse_settings(parse_flags(CLASSES, ["--config_file", str(file), *args], program="sft.py"))
    refuse_settings(parse_flags(CLASSES, ["--plan", "auto", "--lora_r", "8"], program="sft.py"))
    file.write_text("lora_r: 8\n")
    with pytest.raises(ConfigError, match="does nothing") as caught:
        refuse_settings(parse_flags(CLASSES, ["--config_file", str(file)], program="sft.py"))
    assert caught.value.place == f"{file}:1"


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
        ("", GPU, "full"),  # until the plan says that a cheaper policy fits
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
    # The trainer must not enable it a second time.
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
    unset = settle(preset={"checkpointing_policy": "none"})
    assert unset.sources["checkpointing_policy"] == "preset of the embedded data set"


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


# ── Each branch of each step ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("args", "policy", "source"),
    [
        (["--checkpointing_policy full", "--gradient_checkpointing true"], "full", "--checkpointing_policy"),
        (["--checkpointing_policy none", "--gradient_checkpointing false"], "none", "--checkpointing_policy"),
        (["--checkpointing_policy every_2", '--gradient_checkpointing_kwargs {"use_reentrant":false}'], "every_2",
         "--checkpointing_policy"),
        (["--activation_checkpointing_kwargs", '{"offload":true}'], "offload", "--activation_checkpointing_kwargs"),
        (["--activation_checkpointing_kwargs", '{"selective":false}'], "full", "--activation_checkpointing_kwargs"),
        (["--gradient_checkpointing false", '--gradient_checkpointing_kwargs {"selective":true}'], "none",
         "--gradient_checkpointing"),
        (["--gradient_checkpointing true", '--gradient_checkpointing_kwargs {"every_n_layers":4}'], "every_4",
         "--gradient_checkpointing"),
        (["--checkpointing_policy auto"], "full", "--checkpointing_policy"),
        ([], "full", "derived: left to the plan"),
        (["--long_rows"], "offload", "derived: --long_rows keeps layer inputs in host memory"),
    ],
)  # fmt: skip
def test_where_a_checkpointing_policy_comes_from(args: list[str], policy: str, source: str) -> None:
    settings = settle(*args, launch=GPU)
    assert str(settings.checkpointing) == policy
    assert settings.sources["checkpointing_policy"] == source
    is_open = args in ([], ["--checkpointing_policy auto"])
    assert settings.checkpointing_is_open is is_open
    assert settings.values["checkpointing_policy"] == settings.scale.checkpointing_policy
    assert settings.values["checkpointing_policy"] == ("auto" if is_open else policy)
    left = {*settings.values, *settings.sources}
    assert not [name for name in left if name.startswith(("gradient_checkpointing", "activation_checkpointing"))]


@pytest.mark.parametrize(
    ("args", "place", "says"),
    [
        (["--checkpointing_policy full", "--gradient_checkpointing false"], "--gradient_checkpointing", "full and"),
        (["--checkpointing_policy none", "--activation_checkpointing true"], "--activation_checkpointing", "none and"),
        (["--checkpointing_policy auto", "--gradient_checkpointing true"], "--gradient_checkpointing", "auto and"),
        (["--checkpointing_policy full", '--activation_checkpointing_kwargs {"offload":true}'],
         "--activation_checkpointing_kwargs", "full and activation_checkpointing_kwargs"),
        (["--activation_checkpointing_kwargs", '{"offload":true,"selective":true}'],
         "--activation_checkpointing_kwargs", "cannot be combined"),
        (["--gradient_checkpointing_kwargs", '{"debug":true}'], "--gradient_checkpointing_kwargs", "debug"),
        (["--use_liger_kernel true", "--fused_kernels off"], "--use_liger_kernel", "off and use_liger_kernel"),
        (["--global_batch_size 16 --gradient_accumulation_steps 3"], "--gradient_accumulation_steps",
         "needs 2 accumulation steps (8 sequences × 1 processes), but 3"),
    ],
)  # fmt: skip
def test_two_switches_for_one_thing_are_refused_where_they_differ(args: list[str], place: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settle(*args, launch=GPU)
    assert refused.value.place == place
    assert says in refused.value.problem


def test_trls_switch_of_fused_kernels_is_this_projects() -> None:
    for args, kernels in (
        ("", "auto"), ("--use_liger_kernel", "on"), ("--use_liger_kernel false", "off"),
        ("--use_liger_kernel false --fused_kernels auto", "auto"), ("--use_liger_kernel --fused_kernels on", "on"),
        ("--fused_kernels off", "off"),
    ):  # fmt: skip
        settings = settle(args)
        assert settings.scale.fused_kernels == kernels, args
        assert "use_liger_kernel" not in {*settings.values, *settings.sources}


def test_batches_that_agree_are_kept_and_said() -> None:
    settings = settle("--global_batch_size 16 --gradient_accumulation_steps 2")
    assert settings.values["gradient_accumulation_steps"] == 2
    assert (
        settings.sources["gradient_accumulation_steps"] == "derived: global batch 16 ÷ (micro-batch 8 × 1 processes)"
    )
    assert "gradient_accumulation_steps" not in settle("").values


def test_what_was_not_given_is_scaled_from_its_default() -> None:
    args = "--scale_lr_from_batch_size linear --global_batch_size 64 --per_device_train_batch_size 8"
    settings = settle(args)
    assert settings.values["learning_rate"] == pytest.approx(2e-5 * 64 / settings.scale.lr_base_batch_size)
    assert settings.sources["learning_rate"].startswith("derived: 2e-05 scaled (linear) from batch 32 to 64")
    assert settle("--warmup_ratio 0.1 --warmup_steps 0").scale.warmup_ratio == 0.1


def test_gradients_are_reduced_in_one_dtype() -> None:
    ddp = LaunchFacts(world_size=2, strategy="ddp")
    settings = settle("--reduce_dtype bf16 --ddp_comm_hook bf16", launch=ddp)
    assert settings.sources["ddp_comm_hook"] == "derived from reduce_dtype bf16"
    assert settle("--precision fp16 --loss_scale 1024", launch=replace(GPU)).scale.loss_scale == 1024
    with pytest.raises(ConfigError) as refused:
        settle("--reduce_dtype fp32 --ddp_comm_hook bf16", launch=ddp)
    assert refused.value.place == "--reduce_dtype"


def test_a_preset_of_another_precision_than_the_launchs_gives_way() -> None:
    launch = LaunchFacts(mixed_precision="no", mixed_precision_place="x.yaml:3")
    assert settle(launch=launch, preset={"precision": "bf16"}).precision.name == "fp32"
    assert settle("--fp16 true", launch=GPU, preset={"precision": "bf16"}).precision.name == "fp16"
    assert settle(launch=GPU, preset={"precision": "fp16"}).precision.name == "fp16"
    for given, gone in (
        ("--long_rows", "checkpointing_policy"),
        ("--gradient_accumulation_steps 2", "global_batch_size"),
    ):
        preset = {"checkpointing_policy": "full", "global_batch_size": 64}
        assert settle(given, launch=GPU, preset=preset).sources.get(gone) != "preset of the embedded data set"


@pytest.mark.parametrize(
    ("flags", "place", "fix"),
    [
        ("--precision fp8 --fp8_emulate", "--long_rows", "leave --long_rows out"),
        ("--loss_type dft --checkpointing_policy full", "--loss_type", "use --checkpointing_policy full in place"),
    ],
)
def test_whole_rows_beside_long_ones_name_the_way_out(flags: str, place: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settle(f"--long_rows {flags}")
    assert refused.value.place == place
    assert fix in refused.value.fix
    assert settle(flags).scale.long_rows is False
