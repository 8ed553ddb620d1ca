"""The keys of an `accelerate launch` file, section by section, and the switches of its command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# accelerate's `ClusterConfig` fields (1.15.0); tests/unit/test_launch_file.py compares them with the installed ones.
TOP_KEYS = _words(
    "compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank "
    "num_machines gpu_ids main_process_ip main_process_port rdzv_backend same_network "
    "main_training_function enable_cpu_affinity fp8_config deepspeed_config fsdp_config "
    "parallelism_config megatron_lm_config mpirun_config downcast_bf16 tpu_name tpu_zone "
    "tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config fp16 "
    "dynamo_backend"
)
# What `accelerate launch` reads from each section; it silently drops every other key.
SECTION_KEYS: Mapping[str, frozenset[str]] = {
    "fsdp_config": _words(
        "fsdp_version fsdp_reshard_after_forward fsdp_offload_params fsdp_auto_wrap_policy "
        "fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap fsdp_state_dict_type "
        "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states fsdp_activation_checkpointing "
        "fsdp_activation_checkpointing_offload fsdp_ignored_modules fsdp_sharding_strategy "
        "fsdp_backward_prefetch fsdp_forward_prefetch fsdp_use_orig_params"
    ),
    "deepspeed_config": _words(
        "zero_stage gradient_accumulation_steps gradient_clipping offload_optimizer_device "
        "offload_param_device offload_optimizer_nvme_path offload_param_nvme_path zero3_init_flag "
        "zero3_save_16bit_model deepspeed_config_file deepspeed_hostfile deepspeed_exclusion_filter "
        "deepspeed_inclusion_filter deepspeed_multinode_launcher deepspeed_moe_layer_cls_names"
    ),
    "parallelism_config": _words(
        "parallelism_config_dp_replicate_size parallelism_config_dp_shard_size "
        "parallelism_config_tp_size parallelism_config_cp_size parallelism_config_cp_backend "
        "parallelism_config_cp_comm_strategy parallelism_config_sp_size parallelism_config_sp_backend "
        "parallelism_config_sp_seq_length parallelism_config_sp_seq_length_is_variable "
        "parallelism_config_sp_attn_implementation"
    ),
}
DISTRIBUTED_TYPES = (
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_XPU",
    "MULTI_NPU",
    "FSDP",
    "DEEPSPEED",
    "MEGATRON_LM",
    "XLA",
)
MIXED_PRECISIONS = ("no", "fp16", "bf16", "fp8")
# Keys that no launch file has: a file with one of them is meant for a recipe.
RECIPE_KEYS = _words(
    "model_name_or_path dataset_name output_dir learning_rate method precision max_length max_steps "
    "num_train_epochs per_device_train_batch_size global_batch_size optim load_in_4bit use_peft "
    "lora_r packing lr_scheduler_type"
)
LAUNCH_ONLY_KEYS = frozenset({"compute_environment", "distributed_type", "fsdp_config", "deepspeed_config"})
# Flags of `accelerate launch` that take no value: the first word after them is the training script.
# tests/unit/test_environment.py compares them with the installed parser.
SWITCHES = _words(
    "-h --help -q --quiet --cpu --multi_gpu --tpu --debug --module -m --no_python --use_deepspeed "
    "--use_fsdp --use_megatron_lm --use_parallelism_config --same_network --enable_cpu_affinity "
    "--downcast_bf16 --tpu_cluster --no_tpu_cluster --tpu_use_sudo --dynamo_use_fullgraph "
    "--dynamo_use_dynamic --dynamo_use_regional_compilation --fp8_use_autocast_during_eval"
)


@dataclass(frozen=True)
class SourceFile:
    """A YAML or JSON file with the line of every key.

    Attributes:
        path: The path as given, so that messages show what the user typed.
        values: The file's content.
        lines: Dotted key → line, counted from 1.
    """

    path: Path
    values: dict[str, Any]
    lines: dict[str, int] = field(repr=False)

    def place(self, key: str) -> str:
        """``path:line`` of `key`, of the nearest section around it, or the path alone."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.path}:{self.lines[key]}" if key else str(self.path)
