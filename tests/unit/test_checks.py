"""Each rule both ways: it fires where it should, with level, place and fix, and stays silent in neighbouring cases."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import pytest

from accel_scale.checks import case as checks
from accel_scale.checks.case import Finding, refuse_errors
from accel_scale.checks.checkpoint_rules import CHECKPOINT_RULES
from accel_scale.checks.deepspeed_rules import DEEPSPEED_RULES, KEYS_OF_DEEPSPEED_FILE
from accel_scale.checks.launch_rules import LAUNCH_RULES
from accel_scale.checks.machine_rules import MACHINE_RULES
from accel_scale.checks.precision_rules import PRECISION_RULES
from accel_scale.checks.recipe_rules import RECIPE_RULES
from accel_scale.checks.registry import check_run
from accel_scale.checks.run_settings import RunSettings, deepspeed_ranks_in_checkpoint
from accel_scale.errors import ConfigError
from accel_scale.facts.device import Device, device_named
from accel_scale.launching.build_locks import remove_abandoned_locks, stale_build_locks, unheld_build_locks
from accel_scale.launching.environment import LaunchEnvironment, current_launch
from accel_scale.launching.launch_file import LaunchFile, read_launch_file
from accel_scale.launching.machine import PACKAGES, LocalMachine, is_writable

ROOT = Path(__file__).parents[2]
ALL_RULES = {
    rule.__name__: rule
    for rules in (PRECISION_RULES, RECIPE_RULES, LAUNCH_RULES, DEEPSPEED_RULES, CHECKPOINT_RULES, MACHINE_RULES)
    for rule in rules
}
TOOLS: dict[str, Any] = {
    "packages": dict.fromkeys(PACKAGES, "1"),
    "has_compiler": True,
    "has_ninja": True,
    "has_libaio": True,
}
LAPTOP = LocalMachine(**TOOLS, num_cores=4)
HOPPER = LocalMachine(**TOOLS, accelerator=device_named("H100"), num_devices=8, num_cores=64)
AMPERE = dataclasses.replace(HOPPER, accelerator=device_named("A100 80GB SXM"))
TURING = dataclasses.replace(HOPPER, accelerator=device_named("T4"))

# What the tests prove about each rule; filled as they run, compared with the rules at the end.
PROVEN: set[str] = set()
STARTED: set[str] = set()  # tests of this file that have started in this process


def bare(machine: LocalMachine, *missing: str) -> LocalMachine:
    """`machine` without some packages."""
    return dataclasses.replace(machine, packages={k: v for k, v in machine.packages.items() if k not in missing})


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch, request):
    monkeypatch.chdir(ROOT)
    STARTED.add(request.node.originalname)


def shipped(name: str) -> LaunchFile:
    return read_launch_file(f"accelerate_configs/{name}.yaml")


@pytest.fixture
def edited(tmp_path):
    """A shipped launch file with some text replaced, together with its DeepSpeed file."""

    def edit(name: str, old: str = "", new: str = "", *, json: tuple[str, str] = ("", "")) -> LaunchFile:
        text = Path(f"accelerate_configs/{name}.yaml").read_text()
        inner = Path("accelerate_configs/deepspeed/zero_infinity.json").read_text()
        assert old in text
        assert json[0] in inner
        config = tmp_path / "ds.json"
        config.write_text(inner.replace(*json) if json[0] else inner)
        text = text.replace("accelerate_configs/deepspeed/zero_infinity.json", str(config))
        path = tmp_path / f"{name}.yaml"
        path.write_text(text.replace(old, new) if old else text + new)
        return read_launch_file(path)

    return edit


def single(**changes: Any) -> LaunchEnvironment:
    """The launch of a plain `python recipes/sft.py`."""
    return dataclasses.replace(current_launch({}), **changes)


def rule_findings(rule: str, run: RunSettings, launch: checks.Launch, machine: LocalMachine) -> list[Finding]:
    """The findings of one rule, which the public function must report as well."""
    found = ALL_RULES[rule](checks.Case(run, launch, machine))
    assert (found is None) or (found in check_run(run, launch, machine))
    return [] if found is None else [found]


def fires(rule, run, launch, machine, *, place: str, level: str = "error", says: str = "", fix: str = "") -> Finding:
    PROVEN.add(f"{rule} fires")
    [found] = rule_findings(rule, run, launch, machine)
    assert found.level == level
    assert found.place == place
    assert says in found.problem
    assert fix in found.fix
    for text in (found.problem, found.fix):
        assert text.strip()
        assert "None" not in text
    return found


def silent(rule, run, launch, machine) -> None:
    PROVEN.add(f"{rule} is silent")
    assert rule_findings(rule, run, launch, machine) == []


def test_both_half_precisions():
    rule = "both_half_precisions"
    fires(rule, RunSettings(fp16=True, bf16=True), single(), HOPPER, place="--fp16", fix="keep one")
    silent(rule, RunSettings(fp16=False, bf16=True), single(), HOPPER)


def test_precision_and_flags():
    rule = "precision_and_flags"
    run = RunSettings(precision="fp32", bf16=True, places={"bf16": "a.yaml:3"})
    fires(rule, run, single(), HOPPER, place="a.yaml:3", says="fp32", fix="remove bf16")
    silent(rule, RunSettings(precision="bf16", bf16=True), single(), HOPPER)
    silent(rule, RunSettings(precision="fp8", bf16=True, fp16=False), single(), HOPPER)


@pytest.mark.parametrize(
    ("precision", "launch", "agree"),
    [
        ("fp32", "fsdp2", False),
        ("fp16", "fsdp2", False),
        ("bf16", "fsdp2", True),
        ("bf16_true", "fsdp2", False),
        ("fp8", "fsdp2", False),
        (None, "fsdp2", True),
        ("fp32", "zero_infinity", True),
    ],
)
def test_launch_precision(precision, launch, agree):
    file, run = shipped(launch), RunSettings(precision=precision)
    if agree:
        silent("launch_precision", run, file, HOPPER)
        return
    found = fires("launch_precision", run, file, HOPPER, place=file.place("mixed_precision"), says="bf16, but --pre")
    path, line = found.place.split(":")
    assert Path(path).read_text().splitlines()[int(line) - 1] == "mixed_precision: bf16"
    if precision == "fp32":
        assert "mixed_precision: 'no'" in found.fix


def test_launch_precision_agrees_with_the_training_code():
    from accel_scale.checks.precision_rules import LAUNCH_PRECISIONS
    from accel_scale.facts.names import PRECISIONS
    from accel_scale.modeling.precision import resolve_precision

    assert set(LAUNCH_PRECISIONS) == set(PRECISIONS)
    for precision, launches in LAUNCH_PRECISIONS.items():
        for launch in ("no", "fp16", "bf16", "fp8"):
            try:
                resolve_precision(precision, launch_mixed_precision=launch, device=HOPPER.accelerator)
                accepted = True
            except ConfigError:
                accepted = False
            assert accepted == (launch in launches), (precision, launch)


def test_deepspeed_precision(edited):
    rule = "deepspeed_precision"
    file = edited("zero_infinity", json=('"bf16": {"enabled": "auto"}', '"bf16": {"enabled": true}'))
    fires(rule, RunSettings(precision="fp32"), file, HOPPER, place=file.place("bf16.enabled"), fix="auto")
    silent(rule, RunSettings(precision="bf16"), file, HOPPER)
    silent(rule, RunSettings(precision="fp32"), shipped("zero_infinity"), HOPPER)


def test_bf16_support():
    file = shipped("ddp")
    fires("bf16_support", RunSettings(), file, TURING, place=file.place("mixed_precision"), says="T4", fix="fp16")
    silent("bf16_support", RunSettings(), file, AMPERE)
    silent("bf16_support", RunSettings(), single(), TURING)


def test_fp8_support():
    run = RunSettings(precision="fp8")
    fires("fp8_support", run, single(), AMPERE, place="--precision", says="A100", fix="bf16")
    silent("fp8_support", run, single(), HOPPER)
    silent("fp8_support", RunSettings(precision="fp8", fp8_emulate=True), single(), LAPTOP)


def test_fp8_package():
    run = RunSettings(precision="fp8")
    fires("fp8_package", run, single(), bare(HOPPER, "torchao"), place="--precision", fix="accel-scale[fp8]")
    silent("fp8_package", run, single(), HOPPER)


def test_fp16_weights():
    run = RunSettings(precision="fp16", dtype="float16", method="full")
    fires("fp16_weights", run, single(), AMPERE, place="--dtype", says="unscale")
    silent("fp16_weights", dataclasses.replace(run, method="lora"), single(), AMPERE)
    silent("fp16_weights", dataclasses.replace(run, dtype=None), single(), AMPERE)


def test_two_quantisations():
    run = RunSettings(load_in_4bit=True, load_in_8bit=True, use_peft=True)
    fires("two_quantisations", run, single(), AMPERE, place="--load_in_8bit")
    silent("two_quantisations", dataclasses.replace(run, load_in_8bit=False), single(), AMPERE)


def test_quantised_without_adapters():
    rule = "quantised_without_adapters"
    fires(rule, RunSettings(load_in_4bit=True), single(), AMPERE, place="--load_in_4bit", fix="--method qlora")
    full = RunSettings(load_in_8bit=True, method="full")
    fires(rule, full, single(), AMPERE, place="--load_in_8bit", says="--method full", fix="--method lora")
    silent(rule, RunSettings(load_in_4bit=True, use_peft=True), single(), AMPERE)
    silent(rule, RunSettings(method="qlora"), single(), AMPERE)
    silent(rule, RunSettings(method="full"), single(), AMPERE)


def test_quantisation_package():
    machine = bare(AMPERE, "bitsandbytes")
    fires("quantisation_package", RunSettings(method="qlora"), single(), machine, place="--method")
    silent("quantisation_package", RunSettings(method="qlora"), single(), AMPERE)
    silent("quantisation_package", RunSettings(method="lora"), single(), machine)


def test_quant_storage():
    run = RunSettings(method="qlora", bnb_4bit_quant_storage="uint8")
    fires("quant_storage", run, shipped("fsdp2"), AMPERE, place="--bnb_4bit_quant_storage", says="shard")
    silent("quant_storage", run, shipped("ddp"), AMPERE)
    silent("quant_storage", dataclasses.replace(run, bnb_4bit_quant_storage="bfloat16"), shipped("fsdp2"), AMPERE)
    silent("quant_storage", RunSettings(method="qlora"), shipped("fsdp2"), AMPERE)


def test_eight_bit_base_sharded():
    run = RunSettings(method="lora", load_in_8bit=True)
    fires("eight_bit_base_sharded", run, shipped("fsdp2"), AMPERE, place="--load_in_8bit", fix="qlora")
    silent("eight_bit_base_sharded", run, shipped("ddp"), AMPERE)
    silent("eight_bit_base_sharded", run, shipped("zero3"), AMPERE)


def test_optimizer_package():
    run = RunSettings(optim="adamw_torch_8bit")
    fires("optimizer_package", run, single(), bare(AMPERE, "torchao"), place="--optim", says="torchao", fix="pip")
    silent("optimizer_package", run, single(), AMPERE)
    silent("optimizer_package", RunSettings(), single(), LocalMachine())


def test_optimizer_and_launch():
    rule, eight_bit = "optimizer_and_launch", RunSettings(optim="adamw_bnb_8bit")
    fires(rule, eight_bit, shipped("fsdp2"), AMPERE, place="--optim", says="FSDP2", fix="adamw_torch_8bit")
    silent(rule, eight_bit, shipped("zero3"), AMPERE)
    silent(rule, eight_bit, shipped("ddp"), AMPERE)
    silent(rule, RunSettings(optim="adamw_torch_8bit"), shipped("fsdp2"), AMPERE)
    offloaded = RunSettings(optim="adamw_cpu_offload")
    fires(rule, offloaded, single(), LAPTOP, place="--optim", says="no accelerator")
    silent(rule, offloaded, single(), AMPERE)


def test_paged_without_cuda():
    run = RunSettings(optim="paged_adamw_8bit")
    fires("paged_without_cuda", run, single(), LAPTOP, place="--optim", level="warning", says="plain memory")
    silent("paged_without_cuda", run, single(), AMPERE)
    silent("paged_without_cuda", RunSettings(optim="adamw_bnb_8bit"), single(), LAPTOP)


def test_flash_attention():
    rule, two = "flash_attention", RunSettings(attn_implementation="flash_attention_2")
    place = "--attn_implementation"
    fires(rule, two, single(), LAPTOP, place=place, says="CUDA", fix="sdpa")
    fires(rule, two, single(), TURING, place=place, says="8.0, and T4 has 7.5")
    fires(rule, two, single(), bare(AMPERE, "flash-attn", "kernels"), place=place, says="not installed", fix="pip")
    fires(rule, dataclasses.replace(two, precision="fp32"), single(), AMPERE, place=place, says="fp16 and bf16 only")
    three = RunSettings(attn_implementation="flash_attention_3")
    fires(rule, three, single(), AMPERE, place=place, says="9.0, and A100 80GB SXM has 8.0")
    silent(rule, two, single(), AMPERE)
    silent(rule, three, single(), HOPPER)
    silent(rule, RunSettings(attn_implementation="sdpa"), single(), LAPTOP)


def test_packing_mixes_documents():
    run = RunSettings(packing_strategy="wrapped")
    fires("packing_mixes_documents", run, single(), LAPTOP, place="--packing_strategy", fix="bfd")
    silent("packing_mixes_documents", dataclasses.replace(run, packing=False), single(), LAPTOP)
    silent("packing_mixes_documents", RunSettings(), single(), LAPTOP)


def test_compiled_packing():
    rule, long = "compiled_packing", RunSettings(torch_compile=True, max_length=2048)
    fires(rule, long, single(), AMPERE, place="--torch_compile", says="16,384 × 16,384", fix="flash_attention_2")
    sdpa = dataclasses.replace(long, attn_implementation="sdpa")
    with_flash = dataclasses.replace(AMPERE.accelerator, flash=("flash_attention_2",))
    fast = dataclasses.replace(AMPERE, accelerator=with_flash)
    fires(rule, sdpa, single(), fast, place="--torch_compile", says="mask")
    fires(rule, dataclasses.replace(long, precision="fp32"), single(), fast, place="--torch_compile", says="mask")
    turing = dataclasses.replace(TURING.accelerator, flash=("flash_attention_2",))  # installed, but useless there
    fires(rule, long, single(), dataclasses.replace(TURING, accelerator=turing), place="--torch_compile", says="mask")
    silent(rule, long, single(), fast)
    silent(rule, long, single(), LAPTOP)
    silent(rule, dataclasses.replace(long, attn_implementation="flex_attention"), single(), AMPERE)
    silent(rule, dataclasses.replace(long, per_device_train_batch_size=2), single(), AMPERE)
    silent(rule, dataclasses.replace(long, packing=False), single(), AMPERE)
    silent(rule, dataclasses.replace(long, torch_compile=False), single(), AMPERE)
    silent(rule, dataclasses.replace(long, pp_size=1), single(), AMPERE)  # layers are compiled, but not their masks


def test_packing_attention():
    run = RunSettings(attn_implementation="someone/linear-attention")
    fires("packing_attention", run, single(), LAPTOP, place="--attn_implementation", fix="--packing false")
    silent("packing_attention", dataclasses.replace(run, packing=False), single(), LAPTOP)
    silent("packing_attention", RunSettings(attn_implementation="sdpa"), single(), LAPTOP)


def test_context_parallelism(edited):
    sizes = "parallelism_config:\n  parallelism_config_cp_size: 2\n"
    file = edited("fsdp2", new=sizes)
    fires("packing_context_parallel", RunSettings(), file, HOPPER, place="--packing", says="mask")
    silent("packing_context_parallel", RunSettings(packing=False), file, HOPPER)
    silent("packing_context_parallel", RunSettings(), shipped("fsdp2"), HOPPER)
    place = file.place("parallelism_config.parallelism_config_cp_size")
    assert place.rpartition(":")[2].isdigit()
    fires("ring_context_parallelism", RunSettings(), file, HOPPER, place=place, says="drops attention masks")
    fires("ring_context_parallelism", RunSettings(packing=False), file, LAPTOP, place=place, says="CUDA only")
    silent("tensor_parallelism_unsupported", RunSettings(), file, HOPPER)
    tensor = edited("fsdp2", new=sizes.replace("cp_size", "tp_size"))
    place = tensor.place("parallelism_config.parallelism_config_tp_size")
    fires("tensor_parallelism_unsupported", RunSettings(), tensor, HOPPER, place=place, says="tp_size")
    silent("tensor_parallelism_unsupported", RunSettings(pp_size=1), tensor, HOPPER)
    silent("tensor_parallelism_unsupported", RunSettings(), shipped("fsdp2_hybrid"), HOPPER)


def test_sequence_parallelism(edited):
    sizes = "parallelism_config:\n  parallelism_config_sp_size: 2\n"
    for name in ("fsdp2", "zero3", "ddp"):
        file = edited(name, new=sizes)
        place = file.place("parallelism_config.parallelism_config_sp_size")
        assert place.rpartition(":")[2].isdigit()
        rule = "deepspeed_sequence_parallelism"
        if name == "zero3":
            fires(rule, RunSettings(), file, HOPPER, place=place, says="drops the masks", fix="--sp_size")
            fires(rule, RunSettings(pp_size=1), file, HOPPER, place=place, fix="recipes/pretrain.py with FSDP2")
        else:  # the recipes share rows themselves: masks are kept, so documents may be packed
            silent(rule, RunSettings(), file, HOPPER)
        silent("packing_context_parallel", RunSettings(pp_size=1), file, HOPPER)
        silent("ring_context_parallelism", RunSettings(), file, HOPPER)


def test_streaming_needs_steps():
    run = RunSettings(dataset_streaming=True)
    fires("streaming_needs_steps", run, single(), LAPTOP, place="--dataset_streaming", fix="--max_steps")
    silent("streaming_needs_steps", dataclasses.replace(run, max_steps=100), single(), LAPTOP)
    silent("streaming_needs_steps", RunSettings(), single(), LAPTOP)


def test_slow_tokenisation():
    run = RunSettings(dataset_bytes=20_000_000_000)
    found = fires(
        "slow_tokenisation", run, shipped("ddp"), HOPPER, place="--ddp_timeout", level="warning", says="20.0 GB"
    )
    assert "--dataset_num_proc 64" in found.fix
    silent("slow_tokenisation", dataclasses.replace(run, dataset_num_proc=64), shipped("ddp"), HOPPER)
    silent("slow_tokenisation", dataclasses.replace(run, ddp_timeout=100_000), shipped("ddp"), HOPPER)
    silent("slow_tokenisation", dataclasses.replace(run, dataset_streaming=True), shipped("ddp"), HOPPER)
    silent("slow_tokenisation", run, single(), HOPPER)


def test_changing_batch():
    run = RunSettings(auto_find_batch_size=True, global_batch_size=64)
    fires("changing_batch", run, single(), AMPERE, place="--auto_find_batch_size")


def test_dropout_where_it_would_not_be_that_of_the_model():
    run = RunSettings(model_dropout=0.1, attn_implementation="flex_attention", tp_size=1)
    fires("dropout_with_flex", run, single(), AMPERE, place="--model_dropout", fix="--attn_implementation sdpa")
    silent("dropout_with_flex", dataclasses.replace(run, model_dropout=None), single(), AMPERE)
    silent("dropout_in_shared_layers", run, single(), AMPERE)
    run = dataclasses.replace(run, attn_implementation="sdpa", tp_size=2)
    fires("dropout_in_shared_layers", run, single(), AMPERE, place="--model_dropout")
    silent("dropout_with_flex", run, single(), AMPERE)
    silent("changing_batch", dataclasses.replace(run, global_batch_size=None), single(), AMPERE)


def test_vllm_needs_a_gpu_a_package_and_weights_that_trl_can_give_it():
    rule, run = "vllm_generation", RunSettings(use_vllm=True, vllm_tensor_parallel_size=2)
    lora, four_bit = (dataclasses.replace(run, method=name) for name in ("lora", "qlora"))
    vllm = bare(AMPERE, "vllm")
    fires(rule, run, shipped("ddp"), vllm, place="--use_vllm", says="not installed", fix="'accel-scale[vllm]'")
    fires(rule, run, shipped("ddp"), LAPTOP, place="--use_vllm", says="CUDA GPUs, and this run computes on cpu")
    fires(rule, lora, shipped("fsdp2"), AMPERE, place="--use_vllm", says="FSDP shards", fix="DDP or DeepSpeed")
    fires(rule, four_bit, shipped("ddp"), AMPERE, place="--use_vllm", says="rounds", fix="--method lora or full")
    odd = dataclasses.replace(run, vllm_tensor_parallel_size=3)
    fires(rule, odd, shipped("ddp"), AMPERE, place="--vllm_tensor_parallel_size", says="not groups of 3")
    silent(rule, dataclasses.replace(odd, vllm_mode="server"), shipped("ddp"), AMPERE)
    silent(rule, dataclasses.replace(odd, use_vllm=False), shipped("ddp"), LAPTOP)
    for name in ("ddp", "fsdp2", "zero2", "zero3"):
        silent(rule, run, shipped(name), AMPERE)
    for name in ("ddp", "zero3"):
        silent(rule, lora, shipped(name), AMPERE)


def test_global_batch():
    run = RunSettings(global_batch_size=24, per_device_train_batch_size=8)
    fires("global_batch", run, shipped("ddp"), AMPERE, place="--global_batch_size", fix="multiple of 16")
    silent("global_batch", dataclasses.replace(run, global_batch_size=32), shipped("ddp"), AMPERE)
    silent("global_batch", run, single(), AMPERE)


def test_output_folder():
    run = RunSettings(output_dir="/proc/out")
    locked = dataclasses.replace(LAPTOP, folders={"/proc/out": False})
    fires("output_folder", run, single(), locked, place="--output_dir")
    silent("output_folder", run, single(), dataclasses.replace(LAPTOP, folders={"/proc/out": True}))


def test_data_parallel_fallback():
    rule = "data_parallel_fallback"
    fires(rule, RunSettings(), single(), AMPERE, place="accelerate launch", says="8 GPUs", fix="ddp.yaml")
    silent(rule, RunSettings(), single(), dataclasses.replace(AMPERE, num_devices=1))
    silent(rule, RunSettings(), shipped("single_gpu"), AMPERE)
    silent(rule, RunSettings(), shipped("cpu"), AMPERE)
    silent(rule, RunSettings(), shipped("ddp"), AMPERE)


def test_more_processes_than_devices(edited):
    rule, file = "more_processes_than_devices", edited("ddp", "num_processes: 2", "num_processes: 16")
    fires(rule, RunSettings(), file, AMPERE, place=file.place("num_processes"), fix="num_processes to 8")
    silent(rule, RunSettings(), file, LAPTOP)
    silent(rule, RunSettings(), shipped("ddp_multinode"), AMPERE)
    four = dataclasses.replace(AMPERE, num_devices=4)
    multinode = shipped("ddp_multinode")
    fires(rule, RunSettings(), multinode, four, place=multinode.place("num_processes"), fix="num_processes to 8")


def test_one_process_only(edited):
    file = edited("ddp", "MULTI_GPU", "MULTI_CPU")
    fires("one_process_only", RunSettings(), file, LAPTOP, place=file.place("distributed_type"), fix="ddp.yaml")
    mpi = edited(
        "ddp", "distributed_type: MULTI_GPU", "distributed_type: MULTI_CPU\nmpirun_config:\n  mpirun_hostfile: h"
    )
    silent("one_process_only", RunSettings(), mpi, LAPTOP)
    silent("one_process_only", RunSettings(), shipped("ddp"), LAPTOP)


def test_uneven_nodes(edited):
    file = edited("ddp_multinode", "num_processes: 16  #", "num_processes: 15  #")
    fires("uneven_nodes", RunSettings(), file, AMPERE, place=file.place("num_processes"), says="2 nodes")
    silent("uneven_nodes", RunSettings(), shipped("ddp_multinode"), AMPERE)


def test_main_address(edited):
    line = "main_process_ip: 127.0.0.1"
    file = shipped("ddp_multinode")
    place = file.place("main_process_ip")
    fires("main_address", RunSettings(), file, AMPERE, place=place, level="warning", says="127.0.0.1")
    missing = edited("ddp_multinode", line, "debug: false")
    fires("main_address", RunSettings(), missing, AMPERE, place=missing.place("num_machines"), fix="main_process_ip")
    silent("main_address", RunSettings(), edited("ddp_multinode", line, "main_process_ip: 10.0.0.1"), AMPERE)
    silent("main_address", RunSettings(), shipped("ddp"), AMPERE)


def test_hybrid_sizes(edited):
    file = edited("fsdp2_hybrid", "num_processes: 4", "num_processes: 8")
    place = file.place("parallelism_config.parallelism_config_dp_replicate_size")
    fires("hybrid_sizes", RunSettings(), file, AMPERE, place=place, says="2 replicas × 2 shards are not 8")
    flat = edited("fsdp2_hybrid", "dp_shard_size: 2  # shards", "dp_shard_size: 1  # shards")
    fires("hybrid_sizes", RunSettings(), flat, AMPERE, place=place, says="are not 4")
    text = Path(flat.path).read_text().replace("num_processes: 4", "num_processes: 2")
    Path(flat.path).write_text(text)
    fires("hybrid_sizes", RunSettings(), read_launch_file(flat.path), AMPERE, place=place, fix="ddp.yaml")
    silent("hybrid_sizes", RunSettings(), shipped("fsdp2_hybrid"), AMPERE)
    silent("hybrid_sizes", RunSettings(), shipped("fsdp2"), AMPERE)


def test_device_without_collectives():
    rule, apple = "device_without_collectives", dataclasses.replace(HOPPER, accelerator=Device("mps", "Apple M4"))
    fires(
        rule, RunSettings(), shipped("ddp"), apple, place="accelerate_configs/ddp.yaml:10", says="Apple M4", fix="one"
    )
    silent(rule, RunSettings(), single(), apple)
    silent(rule, RunSettings(use_cpu=True), shipped("ddp"), apple)
    silent(rule, RunSettings(), shipped("ddp"), HOPPER)


def test_kernels_of_this_build():
    built = dataclasses.replace(device_named("T4"), built_for=("sm_80", "sm_90"))
    old = dataclasses.replace(HOPPER, accelerator=built)
    fires("kernels_of_this_build", RunSettings(), single(), old, place="torch", says="capability 7.5", fix="cu126")
    silent("kernels_of_this_build", RunSettings(), single(), TURING)


def test_fsdp_version(edited):
    file = edited("fsdp2", "fsdp_version: 2", "fsdp_version: 1")
    place = file.place("fsdp_config.fsdp_version")
    fires("fsdp_version", RunSettings(), file, AMPERE, place=place, fix="fsdp_version: 2")
    silent("fsdp_version", RunSettings(), shipped("fsdp2"), AMPERE)


def test_fsdp1_keys(edited):
    file = edited("fsdp2", "fsdp_version: 2", "fsdp_version: 2\n  fsdp_sharding_strategy: FULL_SHARD")
    place = file.place("fsdp_config.fsdp_sharding_strategy")
    fires("fsdp1_keys", RunSettings(), file, AMPERE, place=place, level="warning", fix="reshard_after_forward")
    silent("fsdp1_keys", RunSettings(), shipped("fsdp2"), AMPERE)


def test_fsdp_reshard(edited):
    file = edited("fsdp2", "reshard_after_forward: true", "reshard_after_forward: FULL_SHARD")
    place = file.place("fsdp_config.fsdp_reshard_after_forward")
    fires("fsdp_reshard", RunSettings(), file, AMPERE, place=place, fix="true for FULL_SHARD")
    silent("fsdp_reshard", RunSettings(), shipped("fsdp2_grad_op"), AMPERE)


def test_fsdp_wrapping(edited):
    file = edited("fsdp2", "TRANSFORMER_BASED_WRAP", "NO_WRAP")
    place = file.place("fsdp_config.fsdp_auto_wrap_policy")
    fires("fsdp_wrapping", RunSettings(), file, AMPERE, place=place, level="warning", fix="TRANSFORMER_BASED_WRAP")
    silent("fsdp_wrapping", RunSettings(), shipped("fsdp2"), AMPERE)


def test_whole_checkpoint_of_quantised_states(edited):
    rule, run = "whole_checkpoint_of_quantised_states", RunSettings(optim="adamw_torch_8bit")
    place = shipped("fsdp2").place("fsdp_config.fsdp_state_dict_type")
    fires(rule, run, shipped("fsdp2"), AMPERE, place=place, fix="SHARDED_STATE_DICT")
    silent(rule, run, edited("fsdp2", "FULL_STATE_DICT", "SHARDED_STATE_DICT"), AMPERE)
    silent(rule, dataclasses.replace(run, save_strategy="no"), shipped("fsdp2"), AMPERE)
    silent(rule, run, shipped("ddp"), AMPERE)
    silent(rule, RunSettings(), shipped("fsdp2"), AMPERE)


def test_fused_kernels():
    rule, asked = "fused_kernels", RunSettings(fused_kernels="on")
    sliced = dataclasses.replace(asked, long_rows=True)
    fires(rule, sliced, shipped("fsdp2"), LAPTOP, place="--fused_kernels", fix="--fused_kernels auto")
    ligers = RunSettings(use_liger_kernel=True)
    fires(rule, ligers, shipped("fsdp2"), LAPTOP, place="--use_liger_kernel", says="need a CUDA device")
    silent(rule, asked, shipped("fsdp2"), LAPTOP)
    silent(rule, RunSettings(), shipped("fsdp2"), LAPTOP)


def test_checkpointing_twice(edited):
    rule = "checkpointing_twice"
    file = edited("fsdp2", "fsdp_activation_checkpointing: false", "fsdp_activation_checkpointing: true")
    place = file.place("fsdp_config.fsdp_activation_checkpointing")
    fires(rule, RunSettings(), file, AMPERE, place=place, fix="--checkpointing_policy none")
    fires(rule, RunSettings(checkpointing_policy="every_2"), file, LAPTOP, place=place)
    silent(rule, RunSettings(), file, LAPTOP)
    silent(rule, RunSettings(checkpointing_policy="none"), file, AMPERE)
    silent(rule, RunSettings(), shipped("fsdp2"), AMPERE)


def test_segments_of_sharded_layers():
    rule, run = "segments_of_sharded_layers", RunSettings(checkpointing_policy="segments_3")
    for name, label in (("fsdp2", "FSDP2"), ("zero3", "ZeRO-3")):
        fires(rule, run, shipped(name), AMPERE, place="--checkpointing_policy", says=f"{label} gathers", fix="full")
        silent(rule, RunSettings(checkpointing_policy="every_2"), shipped(name), AMPERE)
    for name in ("ddp", "zero2", "single_gpu"):
        silent(rule, run, shipped(name), AMPERE)


def test_compiled_segments():
    rule, run = "compiled_segments", RunSettings(checkpointing_policy="segments", torch_compile=True)
    fires(rule, run, shipped("ddp"), LAPTOP, place="--torch_compile", says="segments", fix="full")
    silent(rule, dataclasses.replace(run, checkpointing_policy="full"), shipped("ddp"), LAPTOP)
    silent(rule, dataclasses.replace(run, torch_compile=False), shipped("ddp"), LAPTOP)


def test_trainer_launch_flags():
    fires("trainer_launch_flags", RunSettings(deepspeed="ds.json"), single(), AMPERE, place="--deepspeed")
    fires("trainer_launch_flags", RunSettings(fsdp="full_shard"), single(), AMPERE, place="--fsdp")
    silent("trainer_launch_flags", RunSettings(), shipped("zero3"), AMPERE)


def test_cpu_flag():
    fires("cpu_flag", RunSettings(use_cpu=True), shipped("fsdp2"), LAPTOP, place="--use_cpu", says="FSDP2")
    silent("cpu_flag", RunSettings(use_cpu=True), single(), LAPTOP)
    silent("cpu_flag", RunSettings(), shipped("fsdp2"), LAPTOP)


def test_reentrant_needed():
    rule, run = "reentrant_needed", RunSettings(method="lora", checkpointing_policy="selective")
    fires(rule, run, shipped("zero3"), AMPERE, place="--checkpointing_policy", fix="full")
    silent(rule, dataclasses.replace(run, checkpointing_policy="offload"), shipped("zero3"), AMPERE)
    silent(rule, dataclasses.replace(run, checkpointing_policy="every_2"), shipped("zero3"), AMPERE)
    explicit = RunSettings(method="lora", activation_checkpointing=True, use_reentrant=False)
    fires(rule, explicit, shipped("zero3"), AMPERE, place="--activation_checkpointing_kwargs")
    silent(rule, run, shipped("fsdp2"), AMPERE)
    silent(rule, dataclasses.replace(run, method="full"), shipped("zero3"), AMPERE)
    silent(rule, dataclasses.replace(explicit, use_reentrant=None), shipped("zero3"), AMPERE)


def test_deepspeed_package():
    file, machine = shipped("zero3"), bare(AMPERE, "deepspeed")
    place = file.place("distributed_type")
    fires("deepspeed_package", RunSettings(), file, machine, place=place, fix="accel-scale[deepspeed]")
    silent("deepspeed_package", RunSettings(), file, AMPERE)
    silent("deepspeed_package", RunSettings(), shipped("fsdp2"), machine)


def test_deepspeed_arithmetic():
    for precision in ("bf16_true", "fp8"):
        run = RunSettings(precision=precision)
        fires("deepspeed_arithmetic", run, shipped("zero_infinity"), HOPPER, place="--precision", fix="bf16")
        silent("deepspeed_arithmetic", run, shipped("fsdp2"), HOPPER)
    silent("deepspeed_arithmetic", RunSettings(), shipped("zero3"), HOPPER)


@pytest.mark.parametrize(
    ("name", "tool", "package"),
    [
        ("zero2_offload", "has_compiler", "g++"),
        ("zero3_offload", "has_ninja", "ninja-build"),
        ("zero_infinity", "has_libaio", "libaio-dev"),
    ],
)
def test_compilers(name, tool, package):
    file, run = shipped(name), RunSettings()
    [found] = rule_findings("compilers", run, file, dataclasses.replace(AMPERE, **{tool: False}))
    fires("compilers", run, file, dataclasses.replace(AMPERE, **{tool: False}), place=found.place, fix=package)
    assert found.fix.endswith(f"apt install {package}.")
    assert found.place.rpartition(":")[2].isdigit()
    silent("compilers", run, file, AMPERE)


def test_compilers_where_they_are_not_needed():
    without = dataclasses.replace(AMPERE, has_compiler=False, has_ninja=False, has_libaio=False)
    silent("compilers", RunSettings(), shipped("zero3"), without)
    silent("compilers", RunSettings(), shipped("fsdp2_offload"), without)
    # libaio is needed for NVMe only.
    silent("compilers", RunSettings(), shipped("zero3_offload"), dataclasses.replace(AMPERE, has_libaio=False))
    # On a CPU DeepSpeed compiles its collectives in every stage.
    file = shipped("zero1")
    laptop = dataclasses.replace(LAPTOP, has_compiler=False)
    fires("compilers", RunSettings(), file, laptop, place=file.place("distributed_type"), fix="g++")


def test_killed_build(tmp_path, monkeypatch):
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    old = time.time() - 1000
    os.utime(lock, (old, old))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with lock.open():
        assert stale_build_locks() == unheld_build_locks() == (), "a process holds it"
        assert remove_abandoned_locks() == ()
    assert stale_build_locks() == (str(lock),)
    (lock.parent / "cpu_adam.o").touch()
    assert stale_build_locks() == (), "a build that still writes is alive"
    machine = dataclasses.replace(LAPTOP, stale_locks=(str(lock),))
    fires("killed_build", RunSettings(), shipped("zero2"), machine, place=str(lock), fix=f"rm {lock}")
    silent("killed_build", RunSettings(), shipped("fsdp2"), machine)
    silent("killed_build", RunSettings(), shipped("zero2"), LAPTOP)
    # An optimizer may be compiled even without DeepSpeed's launch.
    fires("killed_build", RunSettings(optim="deepspeed_cpu_adam"), shipped("ddp"), machine, place=str(lock), fix="rm")
    killed_now = dataclasses.replace(LAPTOP, unheld_locks=unheld_build_locks())
    fires("killed_build", RunSettings(), shipped("zero2"), killed_now, level="warning", place=str(lock), fix="rm")
    assert remove_abandoned_locks() == (str(lock),)
    assert not lock.exists()


def test_offload_stage(edited):
    file = edited("zero3_offload", "zero_stage: 3", "zero_stage: 2")
    place = file.place("deepspeed_config.offload_optimizer_device")
    fires("offload_stage", RunSettings(), file, AMPERE, place=place, says="ZeRO-2", fix="stage 3")
    nvme = edited("zero_infinity", json=('"stage": 3', '"stage": 2'))
    place = nvme.place("zero_optimization.offload_optimizer.device")
    fires("offload_stage", RunSettings(), nvme, AMPERE, place=place, says="NVMe")
    for name in ("zero2_offload", "zero3_offload", "zero_infinity", "zero1"):
        silent("offload_stage", RunSettings(), shipped(name), AMPERE)


def test_nvme_keys(edited):
    file = edited(
        "zero3", "zero_stage: 3", "zero_stage: 3\n  offload_param_device: nvme\n  offload_param_nvme_path: /n"
    )
    place = file.place("deepspeed_config.offload_param_device")
    fires("nvme_keys", RunSettings(), file, AMPERE, place=place, fix="deepspeed_config_file")
    silent("nvme_keys", RunSettings(), shipped("zero_infinity"), AMPERE)
    silent("nvme_keys", RunSettings(), shipped("zero3_offload"), AMPERE)


def test_accelerate_really_drops_the_nvme_path(monkeypatch):
    """The reason for `nvme_keys`; when this fails, Accelerate passes the path on and the rule can be removed."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    flags = ["--use_deepspeed", "--zero_stage", "3", "--offload_param_device", "nvme", "--offload_param_nvme_path"]
    args = launch_command_parser().parse_args([*flags, "/somewhere", "--main_process_port", "0", "script.py"])
    args.num_processes, args.num_machines, args.mixed_precision, args.dynamo_backend = 2, 1, "no", "no"
    args.deepspeed_fields_from_accelerate_config = ""
    _, environment = prepare_deepspeed_cmd_env(args)
    assert environment["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"] == "nvme"
    assert "/somewhere" not in environment.values()


def test_nvme_folder(edited):
    file = shipped("zero_infinity")
    place = file.place("zero_optimization.offload_param.nvme_path")
    locked = dataclasses.replace(AMPERE, folders={"nvme_offload": False})
    fires("nvme_folder", RunSettings(), file, locked, place=place, says="nvme_offload")
    silent("nvme_folder", RunSettings(), file, AMPERE)
    nowhere = edited("zero_infinity", json=('"nvme_path": "nvme_offload"', '"fast_init": false'))
    fires("nvme_folder", RunSettings(), nowhere, AMPERE, place=nowhere.place("zero_optimization.offload_param.x"))


def test_offload_replaces_optimizer(edited):
    rule = "offload_replaces_optimizer"
    for optim in ("sgd", "adamw_bnb_8bit", "adamw_torch_8bit"):
        run = RunSettings(optim=optim)
        fires(rule, run, shipped("zero2_offload"), AMPERE, place="--optim", says=f"replace {optim}", fix="adamw_torch")
        silent(rule, run, shipped("zero2"), AMPERE)
    for optim in ("adamw_torch_fused", "adamw_torch", "deepspeed_cpu_adam"):
        silent(rule, RunSettings(optim=optim), shipped("zero_infinity"), AMPERE)
    own = edited("zero_infinity", json=('"aio": {', '"zero_force_ds_cpu_optimizer": false,\n  "aio": {'))
    silent(rule, RunSettings(optim="sgd"), own, AMPERE)


def test_deepspeed_optimizer(edited):
    file = edited("zero_infinity", json=('"aio": {', '"optimizer": {"type": "AdamW"},\n  "aio": {'))
    fires("deepspeed_optimizer", RunSettings(), file, AMPERE, place=file.place("optimizer"), says="--optim")
    silent("deepspeed_optimizer", RunSettings(), shipped("zero_infinity"), AMPERE)


def test_deepspeed_fixed_batch(edited):
    rule, file = (
        "deepspeed_fixed_batch",
        edited("zero3", "gradient_accumulation_steps: auto", "gradient_accumulation_steps: 4"),
    )
    place = file.place("deepspeed_config.gradient_accumulation_steps")
    fires(rule, RunSettings(), file, AMPERE, place=place, says="at 4", fix="auto")
    silent(rule, RunSettings(gradient_accumulation_steps=4), file, AMPERE)
    silent(rule, RunSettings(), shipped("zero3"), AMPERE)
    micro = edited("zero_infinity", json=('micro_batch_size_per_gpu": "auto"', 'micro_batch_size_per_gpu": 1'))
    fires(rule, RunSettings(), micro, AMPERE, place=micro.place("train_micro_batch_size_per_gpu"), says="at 1")


def test_deepspeed_clipping(edited):
    file = edited("zero_infinity", json=(',\n  "gradient_clipping": "auto"', ""))
    place = file.place("zero_optimization")
    fires("deepspeed_clipping", RunSettings(), file, AMPERE, place=place, fix='"gradient_clipping": "auto"')
    silent("deepspeed_clipping", RunSettings(max_grad_norm=0), file, AMPERE)
    silent("deepspeed_clipping", RunSettings(), shipped("zero3"), AMPERE)


def test_deepspeed_keys_twice(edited):
    rule = "deepspeed_keys_twice"
    file = edited("zero_infinity", "distributed_type: DEEPSPEED", "distributed_type: DEEPSPEED\nmixed_precision: bf16")
    fires(rule, RunSettings(), file, AMPERE, place=file.place("mixed_precision"), says="refuses mixed_precision")
    stage = edited("zero_infinity", "  zero3_init_flag: true", "  zero3_init_flag: true\n  zero_stage: 3")
    fires(rule, RunSettings(), stage, AMPERE, place=stage.place("deepspeed_config.zero_stage"))
    silent(rule, RunSettings(), shipped("zero_infinity"), AMPERE)
    silent(rule, RunSettings(), shipped("zero3"), AMPERE)


def test_accelerate_really_refuses_those_keys(monkeypatch):
    from accelerate.utils import DeepSpeedPlugin

    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "accelerate_configs/deepspeed/zero_infinity.json")
    DeepSpeedPlugin()
    for key in (*KEYS_OF_DEEPSPEED_FILE, "mixed_precision"):
        monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", f"deepspeed_config_file,{key}")
        with pytest.raises(ValueError, match="will be ignored"):
            DeepSpeedPlugin()


def test_zero3_saving(edited):
    file = edited("zero3", "zero3_save_16bit_model: true", "zero3_save_16bit_model: false")
    place = file.place("deepspeed_config")
    fires("zero3_saving", RunSettings(), file, AMPERE, place=place, level="warning", fix="zero3_save_16bit_model")
    silent("zero3_saving", RunSettings(), shipped("zero3"), AMPERE)
    silent("zero3_saving", RunSettings(), shipped("zero_infinity"), AMPERE)
    silent("zero3_saving", RunSettings(), shipped("zero2"), AMPERE)


def test_resumed_ranks(tmp_path):
    states = tmp_path / "global_step10"
    states.mkdir()
    for rank in range(4):
        (states / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    assert deepspeed_ranks_in_checkpoint(tmp_path) == 4
    run = RunSettings.from_flags({"resume_from_checkpoint": str(tmp_path)})
    fires("resumed_ranks", run, shipped("zero3"), AMPERE, place="--resume_from_checkpoint", says="by 4 ranks")
    silent("resumed_ranks", dataclasses.replace(run, resume_num_ranks=2), shipped("zero3"), AMPERE)
    silent("resumed_ranks", run, shipped("fsdp2"), AMPERE)
    assert RunSettings.from_flags({"resume_from_checkpoint": str(states)}).resume_num_ranks is None


def test_resumed_nvme():
    run = RunSettings(resume_from_checkpoint="outputs/sft/checkpoint-10")
    fires(
        "resumed_nvme",
        run,
        shipped("zero_infinity"),
        AMPERE,
        place="--resume_from_checkpoint",
        says="does not restore optimizer states",
        fix="--model_name_or_path",
    )
    by_file = RunSettings(resume_from_checkpoint="true", places={"resume_from_checkpoint": "a.yaml:3"})
    fires("resumed_nvme", by_file, shipped("zero_infinity"), AMPERE, place="a.yaml:3")
    silent("resumed_nvme", RunSettings(resume_from_checkpoint="false"), shipped("zero_infinity"), AMPERE)
    silent("resumed_nvme", RunSettings(), shipped("zero_infinity"), AMPERE)
    silent("resumed_nvme", run, shipped("zero3_offload"), AMPERE)
    silent("resumed_nvme", run, shipped("fsdp2_offload"), AMPERE)


def test_native_windows():
    windows = dataclasses.replace(LAPTOP, system="Windows 11")
    fires("native_windows", RunSettings(), single(), windows, place="this machine", says="NCCL, DeepSpeed", fix="WSL2")
    in_it = dataclasses.replace(LAPTOP, system="Linux 5.15.153.1-microsoft-standard-WSL2")
    silent("native_windows", RunSettings(), single(), in_it)


def test_tensor_parallelism_without_nvlink():
    rule, run = "tensor_parallelism_without_nvlink", RunSettings(pp_size=1)
    bridged = dataclasses.replace(AMPERE, gpu_links=(("X", "NV4"), ("NV4", "X")))
    apart = dataclasses.replace(AMPERE, gpu_links=(("X", "SYS"), ("SYS", "X")))
    file = shipped("tp")
    place = file.place("parallelism_config.parallelism_config_tp_size")
    found = fires(rule, run, file, apart, place=place, level="warning", says="ranks 0-1 are joined by SYS")
    assert "accelerate_configs/fsdp2.yaml" in found.fix
    for machine in (bridged, AMPERE, dataclasses.replace(apart, accelerator=LAPTOP.accelerator)):
        silent(rule, run, file, machine)
    silent(rule, run, shipped("fsdp2"), apart)
    silent(rule, RunSettings(), file, apart)  # a recipe that does not share its model; that is refused elsewhere


def test_settings_from_flags(tmp_path):
    data = tmp_path / "d"
    data.mkdir()
    (data / "a.jsonl").write_text("x" * 100)
    run = RunSettings.from_flags(
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": '{"use_reentrant": false}',
            "dataset_name": str(data),
            "method": "qlora",
            "lora_r": 8,
        },
        {"method": "a.yaml:2"},
    )
    assert (run.activation_checkpointing, run.use_reentrant, run.dataset_bytes) == (True, False, 100)
    assert (run.is_4bit, run.trains_adapters, run.place("method"), run.place("optim")) == (
        True, True, "a.yaml:2", "--optim",
    )  # fmt: skip


def test_folder_facts(tmp_path):
    assert is_writable(tmp_path / "new" / "deeper")
    file = tmp_path / "file"
    file.touch()
    assert not is_writable(file / "below")


def test_errors_come_first_and_the_first_is_raised():
    run = RunSettings(optim="paged_adamw_8bit", dataset_streaming=True, fp16=True, bf16=True)
    findings = check_run(run, single(), LAPTOP)
    assert [finding.level for finding in findings] == ["error", "error", "warning"]
    with pytest.raises(ConfigError, match=r"^--fp16: .*1 more: accel-scale doctor") as caught:
        refuse_errors(findings)
    assert caught.value.fix == "keep one of them."
    refuse_errors([finding for finding in findings if finding.level == "warning"])


# ── Every branch of the rules on the launch ──────────────────────────────────────────────────────────────────────────


def test_replicas_shards_and_ranks_that_share_the_model(edited):
    """The product of all sizes, including the recipe's own, is the number of processes."""
    eight = edited("fsdp2_hybrid", "num_processes: 4", "num_processes: 8")
    place = eight.place("parallelism_config.parallelism_config_dp_replicate_size")
    for flags in ({"pp_size": 2}, {"tp_size": 2}, {"sp_size": 2}):
        silent("hybrid_sizes", RunSettings(**flags), eight, AMPERE)
    says = "2 replicas × 2 shards × 2 ranks that share the model are not 4 processes"
    four = shipped("fsdp2_hybrid")
    place = four.place("parallelism_config.parallelism_config_dp_replicate_size")
    fires("hybrid_sizes", RunSettings(pp_size=2), four, AMPERE, place=place, says=says, fix="--pp_size included")
    unknown = edited("fsdp2_hybrid", "num_processes: 4", "num_processes: -1")
    silent("hybrid_sizes", RunSettings(), unknown, AMPERE)


def test_cpu_flag_under_each_kind_of_sharding():
    run = RunSettings(use_cpu=True, places={"use_cpu": "a.yaml:4"})
    for name, says in (("zero1", "ZeRO-1"), ("zero3", "ZeRO-3"), ("fsdp2", "FSDP2")):
        fires("cpu_flag", run, shipped(name), LAPTOP, place="a.yaml:4", says=says, fix="remove it")
    silent("cpu_flag", run, shipped("ddp"), LAPTOP)
    silent("cpu_flag", RunSettings(), shipped("zero3"), LAPTOP)


def test_nodes_as_the_launch_has_them_and_as_the_file_says(edited):
    """torchrun tells its processes about all nodes and their own; a launch file may state what they cannot know."""
    rule, four = "more_processes_than_devices", dataclasses.replace(AMPERE, num_devices=4)
    two_nodes = single(world_size=16, local_world_size=8)
    place = two_nodes.place("num_processes")
    fires(rule, RunSettings(), two_nodes, four, place=place, says="8 processes on this node", fix="to 8")
    one_node = single(world_size=8, local_world_size=8)
    fires(rule, RunSettings(), one_node, four, place=place, fix="to 4")
    silent(rule, RunSettings(), single(world_size=4, local_world_size=4), four)
    silent("main_address", RunSettings(), two_nodes, four)  # torchrun has already found the other nodes


def test_one_process_that_sees_several_devices():
    rule = "data_parallel_fallback"
    two = dataclasses.replace(AMPERE, num_devices=2)
    fires(rule, RunSettings(), single(), two, place="accelerate launch", says="2 GPUs", fix="CUDA_VISIBLE_DEVICES")
    silent(rule, RunSettings(), single(), LAPTOP)


def test_one_process_for_multi_cpu(edited):
    rule = "one_process_only"
    one = edited("ddp", "distributed_type: MULTI_GPU\n", "distributed_type: MULTI_CPU\n")
    text = Path(one.path).read_text()
    for new, fire in (("num_processes: 1", False), ("num_processes: 2", True)):
        Path(one.path).write_text(text.replace("num_processes: 2", new))
        file = read_launch_file(one.path)
        if fire:
            fires(rule, RunSettings(), file, LAPTOP, place=file.place("distributed_type"))
        else:
            silent(rule, RunSettings(), file, LAPTOP)


def test_addresses_that_other_nodes_cannot_reach(edited):
    file = edited("ddp_multinode", "main_process_ip: 127.0.0.1", "main_process_ip: localhost")
    place = file.place("main_process_ip")
    fires("main_address", RunSettings(), file, AMPERE, place=place, level="warning", says="at localhost")


def test_sequence_parallelism_that_is_the_recipes_own(edited):
    file = edited("zero3", new="parallelism_config:\n  parallelism_config_sp_size: 2\n")
    silent("deepspeed_sequence_parallelism", RunSettings(sp_size=2), file, HOPPER)
    silent("deepspeed_sequence_parallelism", RunSettings(), shipped("zero3"), HOPPER)


@pytest.mark.parametrize("key", ["fsdp_backward_prefetch", "fsdp_use_orig_params"])
def test_each_key_of_fsdp1(edited, key):
    file = edited("fsdp2", "fsdp_version: 2", f"fsdp_version: 2\n  {key}: true")
    place = file.place(f"fsdp_config.{key}")
    fires("fsdp1_keys", RunSettings(), file, AMPERE, place=place, level="warning", says=key, fix="remove it")
    one = edited("fsdp2", "fsdp_version: 2", f"fsdp_version: 1\n  {key}: true")
    silent("fsdp1_keys", RunSettings(), one, AMPERE)


def test_rules_of_fsdp2_are_silent_elsewhere():
    for name in ("zero3", "ddp", "single_gpu"):
        for rule in ("fsdp_version", "fsdp1_keys", "fsdp_reshard", "fsdp_wrapping", "checkpointing_twice"):
            silent(rule, RunSettings(), shipped(name), AMPERE)


def test_model_ranks_are_those_of_launch_and_recipe(edited):
    tensor = edited("fsdp2", new="parallelism_config:\n  parallelism_config_tp_size: 2\n")
    for launch, flags, expected in (
        (tensor, {}, 2),
        (tensor, {"tp_size": 2}, 2),  # the same two ranks
        (tensor, {"sp_size": 3, "pp_size": 2}, 12),
        (single(), {"tp_size": 2, "sp_size": 3}, 6),
        (single(), {}, 1),
    ):
        assert checks.Case(RunSettings(**flags), launch, AMPERE).model_ranks == expected


@pytest.fixture(scope="module", autouse=True)
def every_rule_is_proven_both_ways(request):
    """Runs at the end of the file, whatever the order of its tests, unless only some of them were selected."""
    yield
    written = {name for name, value in vars(request.module).items() if name.startswith("test_") and callable(value)}
    if written <= STARTED:
        assert {f"{rule} {what}" for rule in ALL_RULES for what in ("fires", "is silent")} == PROVEN


@pytest.mark.parametrize(
    ("total", "local", "written", "expected"),
    [
        (None, None, 3, 3), (8, None, None, 1), (None, 4, "0", 1), (8, 4, None, 2), (8, 4, 3, 3), (8, 8, 1, 1),
        (12, 4, 2, 3),
    ],
)  # fmt: skip
def test_machines_are_those_of_the_file_or_of_the_processes_if_there_are_more(total, local, written, expected) -> None:
    from types import SimpleNamespace

    from accel_scale.checks.launch_rules import _num_machines

    launch = SimpleNamespace(num_processes=total, local_world_size=local, file_values={"num_machines": written})
    assert _num_machines(SimpleNamespace(launch=launch)) == expected
