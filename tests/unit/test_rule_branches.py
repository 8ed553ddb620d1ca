"""Every branch of the launch rules, one row each: what is refused, in which words, and the nearest accepted case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from accel_scale.checks import ddp_rules, deepspeed_rules, launch_rules, precision_rules
from accel_scale.checks.case import Case
from accel_scale.checks.run_settings import RunSettings
from accel_scale.facts.device import CPU, Device, device_named
from accel_scale.launching.machine import PACKAGES, LocalMachine
from accel_scale.launching.strategy import LaunchStrategy

Check = Callable[..., Any]
TOOLS: dict[str, Any] = {
    "packages": dict.fromkeys(PACKAGES, "1"), "has_compiler": True, "has_ninja": True, "has_libaio": True,
}  # fmt: skip
A100 = LocalMachine(**TOOLS, accelerator=device_named("A100 80GB SXM"), num_devices=8)
T4 = replace(A100, accelerator=device_named("T4"))
PROCESSOR = LocalMachine(**TOOLS)


@dataclass
class Launch:
    """A launch as seen by the rules."""

    parallel: LaunchStrategy
    mixed_precision: str | None = None
    num_processes: int | None = 2
    local_world_size: int | None = 2
    file_values: dict[str, Any] = field(default_factory=dict)

    def place(self, key: str) -> str:
        return f"launch {key}"


def said(
    rule: Check, run: dict[str, Any], launch: dict[str, Any] | None = None, machine: LocalMachine = A100,
    **strategy: Any,
) -> str | None:  # fmt: skip
    """The rule's finding about a run under a strategy, as one line with its level; None if it has none."""
    parallel = LaunchStrategy(**{"name": "ddp", **strategy})
    found = rule(Case(RunSettings(**run), Launch(parallel, **(launch or {})), machine))
    return None if found is None else f"{found.level} {found.one_line()}"


def check(rule: Check, words: str | None, *args: Any, **strategy: Any) -> None:
    """Check that the finding contains all pieces of `words`; None means that there is no finding."""
    line = said(rule, *args, **strategy)
    if words is None:
        assert line is None
        return
    assert line is not None
    for piece in words.split(" | "):
        assert piece in line


# ── Processes, nodes, FSDP ───────────────────────────────────────────────────────────────────────────────────────────

NESTED = {"fsdp_config": {"sharding_strategy": "FULL_SHARD"}}
LAUNCH_ROWS: list[tuple[Check, str | None, dict, dict, dict]] = [
    # rule, expected words, run, launch, strategy
    (launch_rules.data_parallel_fallback, "8 GPUs | launch num_processes", {}, {}, {"name": "single"}),
    (launch_rules.data_parallel_fallback, None, {}, {}, {"name": "single", "use_cpu": True}),
    (launch_rules.data_parallel_fallback, None, {}, {"file_values": {"gpu_ids": "0"}}, {"name": "single"}),
    (launch_rules.data_parallel_fallback, None, {}, {}, {"name": "zero1"}),
    (launch_rules.more_processes_than_devices, "9 processes | it has 8 | to 8.", {}, {"local_world_size": 9}, {}),
    (launch_rules.more_processes_than_devices, None, {}, {"local_world_size": 8}, {}),
    (launch_rules.more_processes_than_devices, None, {}, {"local_world_size": None}, {}),
    (launch_rules.more_processes_than_devices, None, {}, {"local_world_size": 9}, {"use_cpu": True}),
    (launch_rules.one_process_only, None, {}, {"file_values": {"distributed_type": "MULTI_CPU"}}, {}),
    (launch_rules.one_process_only, None, {},
     {"file_values": {"distributed_type": "MULTI_CPU", "num_processes": 1}}, {}),
    (launch_rules.one_process_only, "launch distributed_type | mpirun_config", {},
     {"file_values": {"distributed_type": "MULTI_CPU", "num_processes": 2}}, {}),
    (launch_rules.uneven_nodes, None, {}, {"num_processes": None, "file_values": {"num_machines": 2}}, {}),
    (launch_rules.uneven_nodes, "3 processes do not divide over 2 nodes | multiple of 2", {},
     {"num_processes": 3, "local_world_size": 2, "file_values": {"num_machines": 2}}, {}),
    (launch_rules.uneven_nodes, None, {}, {"num_processes": 4, "file_values": {"num_machines": 2}}, {}),
    (launch_rules.main_address, None, {}, {"file_values": {"num_machines": 1}}, {}),
    (launch_rules.main_address, "error launch num_machines", {}, {"file_values": {"num_machines": 2}}, {}),
    (launch_rules.main_address, None, {}, {"file_values": {"num_machines": 2, "main_process_ip": "10.0.0.1"}}, {}),
    (launch_rules.tensor_parallelism_unsupported, "tp_size above 1", {}, {}, {"tensor_parallel_size": 2}),
    (launch_rules.tensor_parallelism_unsupported, None, {"pp_size": 1}, {}, {"tensor_parallel_size": 2}),
    (launch_rules.deepspeed_sequence_parallelism, None, {}, {}, {"name": "fsdp2", "sequence_parallel_size": 2}),
    (launch_rules.deepspeed_sequence_parallelism, None, {}, {}, {"name": "zero3"}),
    (launch_rules.deepspeed_sequence_parallelism, None, {"sp_size": 1}, {},
     {"name": "zero3", "sequence_parallel_size": 2}),
    (launch_rules.ring_context_parallelism, None, {}, {},
     {"context_parallel_size": 2, "sequence_parallel_size": 2}),
    (launch_rules.ring_context_parallelism, "drops attention masks", {}, {}, {"context_parallel_size": 2}),
    (launch_rules.hybrid_sizes, None, {}, {"num_processes": None}, {"name": "fsdp2", "num_shards": 2}),
    (launch_rules.hybrid_sizes, None, {}, {"num_processes": 4}, {"name": "fsdp2", "num_shards": None}),
    (launch_rules.hybrid_sizes, None, {}, {"num_processes": 1}, {"name": "fsdp2", "num_shards": 1}),
    (launch_rules.hybrid_sizes, "one shard each | ddp.yaml", {}, {"num_processes": 4},
     {"name": "fsdp2", "num_shards": 1, "num_replicas": 4}),
    (launch_rules.hybrid_sizes, "2 replicas × 2 shards are not 8 | dp_replicate_size × dp_shard_size", {},
     {"num_processes": 8}, {"name": "fsdp2", "num_shards": 2, "num_replicas": 2}),
    (launch_rules.fsdp_version, "version 1", {}, {}, {"name": "fsdp1"}),
    # Keys may omit their prefix; version 2 silently drops those of version 1.
    (launch_rules.fsdp1_keys, "warning launch fsdp_config.fsdp_sharding_strategy | reshard_after_forward", {},
     {"file_values": NESTED}, {"name": "fsdp2"}),
    (launch_rules.fsdp1_keys, None, {}, {"file_values": NESTED}, {"name": "fsdp1"}),
    (launch_rules.fsdp1_keys, "no fsdp_sync_module_states | remove it", {},
     {"file_values": {"fsdp_config": {"fsdp_sync_module_states": True}}}, {"name": "fsdp2"}),
    (launch_rules.fsdp1_keys, None, {}, {"file_values": {"fsdp_config": {"fsdp_version": 2}}}, {"name": "fsdp2"}),
    (launch_rules.fsdp_reshard, None, {}, {}, {"name": "fsdp2"}),
    *((launch_rules.fsdp_reshard, None, {}, {}, {"name": "fsdp2", "fsdp": {"fsdp_reshard_after_forward": value}})
      for value in (True, False, "true", "FALSE")),
    (launch_rules.fsdp_reshard, "not SHARD_GRAD_OP", {}, {},
     {"name": "fsdp2", "fsdp": {"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}}),
    (launch_rules.fsdp_reshard, None, {}, {}, {"name": "fsdp1", "fsdp": {"fsdp_reshard_after_forward": "x"}}),
    (launch_rules.fsdp_wrapping, "warning launch fsdp_config.fsdp_auto_wrap_policy", {}, {}, {"name": "fsdp2"}),
    (launch_rules.fsdp_wrapping, None, {}, {},
     {"name": "fsdp2", "fsdp": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}}),
    (launch_rules.fsdp_wrapping, None, {}, {}, {"name": "ddp"}),
    (launch_rules.checkpointing_twice, "both recompute", {}, {},
     {"name": "fsdp2", "fsdp": {"fsdp_activation_checkpointing": "true"}}),
    (launch_rules.checkpointing_twice, None, {}, {}, {"name": "fsdp2"}),
    (launch_rules.trainer_launch_flags, "--deepspeed is decided", {"deepspeed": "a", "fsdp": "b"}, {}, {}),
    (launch_rules.trainer_launch_flags, None, {"fsdp": ""}, {}, {}),
    (launch_rules.cpu_flag, None, {"use_cpu": False}, {}, {"name": "fsdp2"}),
    (launch_rules.device_without_collectives, None, {}, {"num_processes": 2}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "words", "run", "launch", "strategy"), LAUNCH_ROWS)
def test_rules_on_the_launch(rule: Check, words: str | None, run: dict, launch: dict, strategy: dict) -> None:
    check(rule, words, run, launch, **strategy)


def test_a_device_between_whose_processes_nothing_can_be_reduced() -> None:
    apple = replace(A100, accelerator=Device("mps", "Apple M4"), num_devices=1)
    for launched, words in ((2, "Apple M4 (mps)"), (1, None), (None, None)):
        check(launch_rules.device_without_collectives, words, {}, {"num_processes": launched}, apple)
    for devices, words in ((0, None), (1, None), (2, "2 GPUs")):
        machine = replace(A100, num_devices=devices)
        check(launch_rules.data_parallel_fallback, words, {}, {}, machine, name="single")
    check(launch_rules.more_processes_than_devices, None, {}, {"local_world_size": 9}, PROCESSOR)


# ── DeepSpeed ────────────────────────────────────────────────────────────────────────────────────────────────────────

OWN_FILE = {"file_values": {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}}
CPU_STATES = {"name": "zero2", "offload_optimizer": "cpu"}
DRIVES = {"name": "zero3", "offload_optimizer": "nvme", "offload_params": "nvme", "nvme_paths": ("a", "b")}


def without(*tools: str, machine: LocalMachine = A100) -> LocalMachine:
    return replace(machine, **dict.fromkeys(tools, False))


@pytest.mark.parametrize(
    ("machine", "launch", "strategy", "words"),
    [
        (without("has_compiler"), {}, CPU_STATES,
         "launch deepspeed_config.offload_optimizer_device | a C++ compiler is missing | apt install g++."),
        (without("has_compiler", "has_ninja"), {}, CPU_STATES,
         "a C++ compiler and ninja are missing | apt install g++ ninja-build."),
        (without("has_compiler", "has_ninja", "has_libaio"), OWN_FILE, DRIVES,
         "launch zero_optimization.offload_optimizer.device | a C++ compiler and ninja and libaio's headers are | "
         "g++ ninja-build libaio-dev."),
        (without("has_libaio"), {}, CPU_STATES, None),
        (without("has_libaio"), {}, {"name": "zero3", "offload_params": "nvme"},
         "launch deepspeed_config.offload_param_device | libaio-dev"),
        (without("has_ninja"), {}, {"name": "zero3", "offload_params": "cpu"}, "offload_param_device | ninja-build"),
        (without("has_compiler"), {}, {"name": "zero2"}, None),
        (without("has_compiler", machine=PROCESSOR), {}, {"name": "zero2"}, "launch distributed_type | g++"),
        (without("has_compiler"), {}, {"name": "fsdp2", "offload_optimizer": "cpu"}, None),
        (A100, {}, DRIVES, None),
    ],
)  # fmt: skip
def test_what_deepspeed_compiles_at_its_first_run(
    machine: LocalMachine, launch: dict, strategy: dict, words: str | None
) -> None:
    check(deepspeed_rules.compilers, words, {}, launch, machine, **strategy)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"name": "zero0"}, None),
        ({"name": "zero0", "offload_optimizer": "cpu"}, "ZeRO-0 cannot offload to the CPU | use stage 3"),
        ({"name": "zero1", "offload_optimizer": "cpu"}, None),
        ({"name": "zero2", "offload_params": "cpu"}, "ZeRO-2 cannot offload to the CPU"),
        ({"name": "zero2", "offload_optimizer": "nvme"}, "ZeRO-2 cannot offload to NVMe"),
        ({"name": "zero3", "offload_optimizer": "nvme", "offload_params": "cpu"}, None),
        ({"name": "fsdp2", "offload_optimizer": "cpu", "offload_params": "cpu"}, None),
    ],
)
def test_what_each_stage_can_offload(strategy: dict, words: str | None) -> None:
    check(deepspeed_rules.offload_stage, words, {}, {}, **strategy)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"zero_stage": 3, "offload_optimizer_device": "nvme"}, "offload_optimizer_device"),
        ({"offload_param_nvme_path": "/a"}, "offload_param_nvme_path"),
        ({"offload_optimizer_device": "cpu", "offload_param_device": "nvme"}, "offload_param_device"),
        ({"offload_optimizer_device": "cpu", "zero_stage": 2}, None),
        ({"deepspeed_config_file": "nvme"}, None),
        ({}, None),
    ],
)
def test_drives_among_the_launch_files_own_keys(section: dict, key: str | None) -> None:
    words = None if key is None else f"launch deepspeed_config.{key}: | deepspeed_config_file"
    check(deepspeed_rules.nvme_keys, words, {}, {"file_values": {"deepspeed_config": section}}, name="zero3")


def test_folders_on_drives() -> None:
    rule = deepspeed_rules.nvme_folder
    check(rule, None, {}, {}, **DRIVES)
    locked = replace(A100, folders={"a": True, "b": False})
    check(rule, "launch zero_optimization.offload_param.nvme_path | b cannot be written", {}, {}, locked, **DRIVES)
    states = {**DRIVES, "offload_params": "none", "nvme_paths": ()}
    check(rule, "launch zero_optimization.offload_optimizer.nvme_path | has no nvme_path", {}, {}, **states)
    check(rule, None, {}, {}, **{**states, "offload_optimizer": "cpu"})


DEEPSPEED_ROWS: list[tuple[Check, str | None, dict, dict, dict]] = [
    (deepspeed_rules.deepspeed_optimizer, "launch scheduler | --lr_scheduler_type | remove the scheduler", {}, {},
     {"name": "zero2", "deepspeed": {"scheduler": {}}}),
    (deepspeed_rules.deepspeed_optimizer, "launch optimizer | --optim", {}, {},
     {"name": "zero2", "deepspeed": {"scheduler": {}, "optimizer": {}}}),
    *((deepspeed_rules.deepspeed_fixed_batch, words, {flag: 4}, launch, {"name": "zero2", "deepspeed": {key: fixed}})
      for key, flag in (("train_batch_size", "global_batch_size"), ("gradient_clipping", "max_grad_norm"),
                        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
                        ("gradient_accumulation_steps", "gradient_accumulation_steps"))
      for fixed, launch, words in ((4, {}, None), ("auto", {}, None),
                                   (3, {}, f"launch deepspeed_config.{key} | fixes {key} at 3 | write {key}: auto"),
                                   (3, OWN_FILE, f"launch {key}: | at 3"))),
    (deepspeed_rules.deepspeed_clipping, "does not clip", {}, {}, {"name": "zero2"}),
    (deepspeed_rules.deepspeed_clipping, "launch zero_optimization:", {"max_grad_norm": 1.0}, OWN_FILE,
     {"name": "zero2"}),
    (deepspeed_rules.deepspeed_clipping, None, {"max_grad_norm": 0}, {}, {"name": "zero2"}),
    (deepspeed_rules.deepspeed_clipping, None, {}, {}, {"name": "zero2", "deepspeed": {"gradient_clipping": 0.5}}),
    (deepspeed_rules.deepspeed_clipping, None, {}, {}, {"name": "ddp"}),
    (deepspeed_rules.deepspeed_keys_twice, None, {}, {"file_values": {"mixed_precision": "bf16"}}, {"name": "zero2"}),
    (deepspeed_rules.deepspeed_keys_twice, "refuses zero_stage | set it in a.json", {},
     {"file_values": {"mixed_precision": "no",
                      "deepspeed_config": {"zero_stage": 2, "deepspeed_config_file": "a.json"}}}, {"name": "zero2"}),
    (deepspeed_rules.zero3_saving, "warning launch deepspeed_config.zero_optimization | zero3_save_16bit_model: true",
     {}, {}, {"name": "zero3"}),
    (deepspeed_rules.zero3_saving, "launch zero_optimization: | stage3_gather_16bit_weights_on_model_save: true", {},
     OWN_FILE, {"name": "zero3"}),
    (deepspeed_rules.zero3_saving, None, {}, {}, {"name": "zero2"}),
    (deepspeed_rules.zero3_saving, None, {}, {},
     {"name": "zero3", "deepspeed": {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": "true"}}}),
    *((deepspeed_rules.reentrant_needed, f"{policy} checkpointing cannot", {"method": "lora",
       "checkpointing_policy": policy}, {}, {"name": "zero3"}) for policy in ("selective", "mlp", "segments_2")),
    (deepspeed_rules.reentrant_needed, "--activation_checkpointing_kwargs | remove use_reentrant", {"method": "qlora",
      "checkpointing_policy": "full", "use_reentrant": False}, {}, {"name": "zero3"}),
    (deepspeed_rules.reentrant_needed, None, {"method": "lora", "checkpointing_policy": "none",
      "use_reentrant": False}, {}, {"name": "zero3"}),
    (deepspeed_rules.reentrant_needed, None, {"method": "full", "checkpointing_policy": "selective"}, {},
     {"name": "zero3"}),
    (deepspeed_rules.reentrant_needed, None, {"method": "lora", "checkpointing_policy": "selective"}, {},
     {"name": "zero2"}),
    (deepspeed_rules.offload_replaces_optimizer, "ZeRO-2, CPU offload | replace sgd", {"optim": "sgd"}, {},
     CPU_STATES),
    (deepspeed_rules.offload_replaces_optimizer, None, {"optim": "sgd"}, {},
     {"name": "zero3", "offload_params": "cpu"}),
    (deepspeed_rules.offload_replaces_optimizer, None, {"optim": "sgd"}, {},
     {"name": "fsdp2", "offload_optimizer": "cpu"}),
    (deepspeed_rules.offload_replaces_optimizer, None, {"optim": "sgd"}, {},
     {**CPU_STATES, "deepspeed": {"zero_force_ds_cpu_optimizer": False}}),
    (deepspeed_rules.deepspeed_package, None, {}, {}, {"name": "zero2"}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "words", "run", "launch", "strategy"), DEEPSPEED_ROWS)
def test_rules_on_deepspeed(rule: Check, words: str | None, run: dict, launch: dict, strategy: dict) -> None:
    check(rule, words, run, launch, **strategy)


def test_a_lock_that_is_surely_stale_comes_before_one_that_may_be_held_elsewhere() -> None:
    both = replace(A100, stale_locks=("s", "t"), unheld_locks=("s", "t", "u"))
    check(deepspeed_rules.killed_build, "error s: | rm s", {}, {}, both, name="zero2")
    one = replace(A100, unheld_locks=("u", "v"))
    check(deepspeed_rules.killed_build, "warning u: | rm u, unless another machine", {}, {}, one, name="zero2")
    check(deepspeed_rules.killed_build, None, {}, {}, both, name="ddp")
    check(deepspeed_rules.killed_build, "rm s", {"optim": "deepspeed_cpu_adam"}, {}, both, name="ddp")


# ── Precision ────────────────────────────────────────────────────────────────────────────────────────────────────────

OLD_BUILD = replace(
    A100, accelerator=replace(device_named("V100 32GB"), built_for=("sm_90", "sm_75", "sm_80", "compute_90"))
)
NO_BF16 = replace(A100, accelerator=Device("xpu", "a card", computes_bf16=False))
PRECISION_ROWS: list[tuple[Check, str | None, dict, dict, LocalMachine, dict]] = [
    (precision_rules.both_half_precisions, None, {"fp16": True, "bf16": False}, {}, A100, {}),
    (precision_rules.precision_and_flags, "--fp16 | contradicts --precision bf16", {"precision": "bf16", "fp16": True},
     {}, A100, {}),
    (precision_rules.precision_and_flags, None, {"precision": "fp16", "fp16": True}, {}, A100, {}),
    (precision_rules.precision_and_flags, None, {"precision": "fp32", "fp16": False, "bf16": False}, {}, A100, {}),
    (precision_rules.precision_and_flags, None, {"bf16": True}, {}, A100, {}),
    (precision_rules.precision_and_flags, "--bf16", {"precision": "bf16_true", "bf16": True}, {}, A100, {}),
    (precision_rules.launch_precision, None, {"precision": "bf16"}, {"mixed_precision": None}, A100, {}),
    (precision_rules.launch_precision, None, {"precision": "fp64"}, {"mixed_precision": "bf16"}, A100, {}),
    (precision_rules.launch_precision, "mixed_precision: no, but --precision asks for fp8 | mixed_precision: fp8",
     {"precision": "fp8"}, {"mixed_precision": "no"}, A100, {}),
    (precision_rules.launch_precision, "mixed_precision: 'no' there, or drop --precision", {"precision": "bf16_true"},
     {"mixed_precision": "bf16"}, A100, {}),
    (precision_rules.deepspeed_precision, "launch fp16.enabled | fp16 enabled: true | bf16", {"precision": "bf16"}, {},
     A100, {"deepspeed": {"fp16": {"enabled": True}}}),
    (precision_rules.deepspeed_precision, "launch bf16.enabled | enabled: false", {"precision": "bf16"}, {}, A100,
     {"deepspeed": {"bf16": {"enabled": False}}}),
    (precision_rules.deepspeed_precision, None, {"precision": "fp16"}, {}, A100,
     {"deepspeed": {"fp16": {"enabled": True}, "bf16": {"enabled": False}}}),
    (precision_rules.deepspeed_precision, None, {"precision": "bf16"}, {}, A100,
     {"deepspeed": {"fp16": {"enabled": False}, "bf16": None}}),
    (precision_rules.bf16_support, "T4 | Fix: use --precision fp16.", {"precision": "bf16_true"}, {}, T4, {}),
    (precision_rules.bf16_support, "use --precision fp16, and accelerate launch --mixed_precision fp16 or",
     {"precision": "bf16"}, {"mixed_precision": "bf16"}, T4, {}),
    (precision_rules.bf16_support, "a card | use --precision fp32, and accelerate launch --mixed_precision no or",
     {"precision": "bf16"}, {"mixed_precision": "bf16"}, NO_BF16, {}),
    (precision_rules.bf16_support, None, {"precision": "fp8"}, {}, T4, {}),
    (precision_rules.kernels_of_this_build, "compute capability 7.0; the oldest are sm_75", {}, {}, OLD_BUILD, {}),
    (precision_rules.kernels_of_this_build, None, {}, {}, PROCESSOR, {}),
    (precision_rules.fp8_support, None, {"precision": "bf16"}, {}, A100, {}),
    (precision_rules.fp8_package, None, {"precision": "bf16"}, {}, LocalMachine(), {}),
    (precision_rules.fp16_weights, None, {"precision": "bf16", "dtype": "float16"}, {}, A100, {}),
    (precision_rules.two_quantisations, None, {"load_in_4bit": True}, {}, A100, {}),
    (precision_rules.quantised_without_adapters, "--load_in_8bit | use --method lora", {"load_in_8bit": True}, {},
     A100, {}),
    (precision_rules.quantised_without_adapters, "cannot be trained itself. Fix", {"load_in_4bit": True}, {},
     A100, {}),
    (precision_rules.quantised_without_adapters, None, {"load_in_8bit": True, "method": "lora"}, {}, A100, {}),
    *((precision_rules.quantisation_package, f"error {place}: | bitsandbytes", run, {}, LocalMachine(), {})
      for place, run in (("--method", {"method": "qlora"}), ("--load_in_8bit", {"load_in_8bit": True}),
                         ("--load_in_4bit", {"load_in_4bit": True}))),
    (precision_rules.quant_storage, None, {"bnb_4bit_quant_storage": "uint8"}, {}, A100, {"name": "fsdp2"}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "words", "run", "launch", "machine", "strategy"), PRECISION_ROWS)
def test_rules_on_precision(
    rule: Check, words: str | None, run: dict, launch: dict, machine: LocalMachine, strategy: dict
) -> None:
    check(rule, words, run, launch, machine, **strategy)


# ── How gradients are sent ───────────────────────────────────────────────────────────────────────────────────────────

POWERSGD = {"ddp_comm_hook": "powersgd"}
SHARED = {"pp_size": 1}
DDP_ROWS: list[tuple[Check, str | None, dict, dict]] = [
    (ddp_rules.needs_ddp, None, {}, {"name": "single"}),
    (ddp_rules.needs_ddp, "--ddp_comm_hook | one process sends no", {**POWERSGD, "ddp_bucket_cap_mb": 9},
     {"name": "single"}),
    (ddp_rules.needs_ddp, "--ddp_bucket_cap_mb | FSDP2 has no DDP buckets", {"ddp_bucket_cap_mb": 9},
     {"name": "fsdp2"}),
    *((ddp_rules.needs_ddp, "ranks that share a model", {**POWERSGD, **SHARED, name: 2}, {})
      for name in ("tp_size", "sp_size", "pp_size")),
    (ddp_rules.needs_ddp, None, {**POWERSGD, "pp_size": 1, "tp_size": 1, "sp_size": 1}, {}),
    (ddp_rules.needs_ddp, None, {**POWERSGD, "sp_size": 2}, {}),  # only rows are shared, inside the engine
    (ddp_rules.needs_fsdp2, None, {}, {"name": "ddp"}),
    *((ddp_rules.needs_fsdp2, "share a model | --sync_each_batch", {"sync_each_batch": True, **run},
       {"name": "fsdp2", **sizes})
      for run, sizes in (({"tp_size": 2}, {}), ({"sp_size": 2}, {}), ({"pp_size": 2}, {}),
                         ({}, {"tensor_parallel_size": 2}), ({}, {"context_parallel_size": 2}),
                         ({}, {"sequence_parallel_size": 2}))),
    (ddp_rules.needs_fsdp2, None, {"sync_each_batch": True, "tp_size": 1}, {"name": "fsdp2"}),
    (ddp_rules.needs_fsdp2, "under DDP gradients are whole", {"sync_each_batch": True}, {"name": "ddp"}),
    (ddp_rules.reduction_has_a_dtype, None, {}, {"name": "single"}),
    (ddp_rules.reduction_has_a_dtype, "one process", {"reduce_dtype": "fp32"}, {"name": "single"}),
    *((ddp_rules.reduction_has_a_dtype, words, {"reduce_dtype": dtype, **run}, {"name": "fsdp2", **sizes})
      for dtype, words in (("fp32", None), ("bf16", "add up gradients in fp32"))
      for run, sizes in (({"tp_size": 2}, {}), ({"pp_size": 2}, {}), ({"sp_size": 2, "pp_size": 1}, {}),
                         ({}, {"tensor_parallel_size": 2}))),
    (ddp_rules.reduction_has_a_dtype, None, {"reduce_dtype": "bf16", "sp_size": 2}, {"name": "fsdp2"}),
    (ddp_rules.reduction_has_a_dtype, None, {"reduce_dtype": "bf16", "tp_size": 1, "pp_size": 1}, {"name": "fsdp2"}),
    (ddp_rules.reduction_has_a_dtype, "fsdp_version: 2", {"reduce_dtype": "bf16"}, {"name": "fsdp1"}),
    (ddp_rules.reduction_has_a_dtype, "as they are", {"reduce_dtype": "fp32", "precision": "bf16_true"}, {}),
    (ddp_rules.reduction_has_a_dtype, None, {"reduce_dtype": "fp32", "precision": "bf16"}, {}),
    (ddp_rules.reduction_has_a_dtype, None, {"reduce_dtype": "bf16", "precision": "bf16_true"}, {}),
    (ddp_rules.bucket_size, None, {}, {}),
    (ddp_rules.bucket_size, None, {"ddp_bucket_cap_mb": 1}, {}),
    (ddp_rules.bucket_size, "a bucket of 0 MB", {"ddp_bucket_cap_mb": 0}, {}),
    (ddp_rules.powersgd_flags, None, {**POWERSGD, "powersgd_rank": 1, "powersgd_start_step": 3}, {}),
    (ddp_rules.powersgd_flags, "factors of rank 0", {**POWERSGD, "powersgd_rank": 0}, {}),
    (ddp_rules.powersgd_flags, "step 2 | use 3 or more", {**POWERSGD, "powersgd_start_step": 2}, {}),
    (ddp_rules.powersgd_flags, "--powersgd_rank is PowerSGD's", {"powersgd_rank": 4, "powersgd_start_step": 9}, {}),
    (ddp_rules.powersgd_flags, "--powersgd_start_step is", {"powersgd_start_step": 9, "ddp_comm_hook": "bf16"}, {}),
    (ddp_rules.powersgd_never_begins, None, {**POWERSGD}, {}),
    (ddp_rules.powersgd_never_begins, None, {**POWERSGD, "max_steps": 100}, {}),
    (ddp_rules.powersgd_never_begins, "step 100, and the run has 99", {**POWERSGD, "max_steps": 99}, {}),
    (ddp_rules.powersgd_never_begins, None, {**POWERSGD, "max_steps": 99, "powersgd_start_step": 99}, {}),
    (ddp_rules.powersgd_never_begins, "step 200", {**POWERSGD, "max_steps": 1, "powersgd_start_step": 200}, {}),
    (ddp_rules.powersgd_never_begins, None, {"max_steps": 9}, {}),
    (ddp_rules.powersgd_fp16, None, {**POWERSGD, "precision": "bf16"}, {}),
    (ddp_rules.powersgd_fp16, None, {"ddp_comm_hook": "fp16", "precision": "fp16"}, {}),
    *((ddp_rules.cast_saves_nothing, "warning | 16 bits", {"ddp_comm_hook": hook, "precision": "bf16_true"}, {})
      for hook in ("bf16", "fp16")),
    (ddp_rules.cast_saves_nothing, None, {"ddp_comm_hook": "bf16", "precision": "bf16"}, {}),
    (ddp_rules.cast_saves_nothing, None, {**POWERSGD, "precision": "bf16_true"}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "words", "run", "strategy"), DDP_ROWS)
def test_rules_on_sending_gradients(rule: Check, words: str | None, run: dict, strategy: dict) -> None:
    check(rule, words, run, {}, **strategy)


def test_on_the_processor_by_flag_or_launch() -> None:
    for run, strategy, device in (
        ({}, {}, A100.accelerator), ({"use_cpu": True}, {}, CPU), ({}, {"use_cpu": True}, CPU),
    ):  # fmt: skip
        case = Case(RunSettings(**run), Launch(LaunchStrategy("ddp", **strategy)), A100)
        assert case.device == device
