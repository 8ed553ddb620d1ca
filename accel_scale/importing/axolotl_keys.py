"""Table of axolotl's keys (schema of July 2026)."""

from __future__ import annotations

from accel_scale.importing.axolotl_data import DATA_ROWS
from accel_scale.importing.draft import NoCounterpart, joins, leaves, optimizer, takes

_SCHEDULES = (
    "cosine",
    "linear",
    "constant",
    "constant_with_warmup",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_restarts",
)
ATTENTION = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "flex_attention": "flex_attention",
    "eager_attention": "eager",
}


def _schedule(value: object) -> object:
    if value in _SCHEDULES:
        return value
    raise NoCounterpart(f"lr_scheduler_type: {value} is not among ours")


def _rewards(value: object) -> object:
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    return [":".join(name.rsplit(".", 1)) for name in names]


def _scale_rewards(value: object) -> object:
    return {True: "group", False: "none"}.get(value, value) if isinstance(value, bool) else value


ROWS = (
    *DATA_ROWS,
    *takes("base_model", flag="model_name_or_path"),
    *takes("revision_of_model", flag="model_revision"),
    *takes("sequence_len", flag="max_length"),
    *takes("micro_batch_size", flag="per_device_train_batch_size"),
    *takes("eval_batch_size", flag="per_device_eval_batch_size"),
    *takes("num_epochs", flag="num_train_epochs"),
    *takes("optimizer", flag="optim", convert=optimizer),
    *takes("lr_scheduler", flag="lr_scheduler_type", convert=_schedule),
    *takes("cosine_min_lr_ratio", flag="min_lr_ratio"),
    *takes("peft_use_dora", flag="use_dora"),
    *takes("peft_use_rslora", flag="use_rslora"),
    *takes("group_by_length", flag="train_sampling_strategy", convert=lambda v: "group_by_length" if v else "random"),
    *takes("wandb_name", flag="run_name"),
    *takes(
        "gradient_accumulation_steps", "max_steps", "learning_rate", "weight_decay", "optim_args",
        "lr_scheduler_kwargs", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "warmup_steps",
        "warmup_ratio", "logging_steps",
        "save_total_limit", "save_only_model", "seed", "output_dir", "hub_strategy", "hub_revision", "lora_r",
        "lora_alpha", "lora_dropout", "lora_modules_to_save", "lora_target_parameters", "dataloader_num_workers",
        "dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_drop_last", "ddp_timeout",
        "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_broadcast_buffers", "neftune_noise_alpha", "tf32",
        "torch_compile", "torch_compile_backend", "torch_compile_mode", "trust_remote_code", "load_best_model_at_end",
        "metric_for_best_model", "greater_is_better", "resume_from_checkpoint", "activation_offloading",
        "auto_find_batch_size", "optim_target_modules", "torch_empty_cache_steps",
    ),
    *takes(*(f"trl.{key}" for key in (
        "beta", "max_completion_length", "num_generations", "temperature", "top_p", "top_k", "min_p", "use_vllm",
        "repetition_penalty", "vllm_mode", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
        "generation_batch_size", "log_completions", "num_completions_to_print", "importance_sampling_level",
        "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "num_iterations", "epsilon", "epsilon_high",
        "loss_type", "mask_truncated_completions", "reward_weights", "multi_objective_aggregation",
        "vllm_enable_sleep_mode", "generation_kwargs", "chat_template_kwargs",
    ))),
    *takes("trl.reward_funcs", flag="rewards", convert=_rewards),
    *takes("trl.scale_rewards", convert=_scale_rewards),
    *takes("rl_beta", flag="beta"),
    *takes("kto_desirable_weight", flag="desirable_weight"),
    *takes("kto_undesirable_weight", flag="undesirable_weight"),
    *takes("dpo_label_smoothing", flag="label_smoothing"),
    *takes("precompute_ref_log_probs", "max_prompt_len", "center_rewards_coefficient"),
    *takes("dpo_use_weighting", flag="use_weighting"),
    *takes("dpo_loss_type", flag="loss_type"),
    *takes("dpo_loss_weights", flag="loss_weights"),
    *joins(
        "adapter", "load_in_4bit", "load_in_8bit", "lora_target_linear", "lora_target_modules", "sample_packing",
        "bf16", "bfloat16", "fp16", "float16", "float32", "fp8", *ATTENTION, "attn_implementation",
        "gradient_checkpointing", "deepspeed", "fsdp", "fsdp_config", "fsdp_version", "dp_replicate_size",
        "context_parallel_size", "sequence_parallel_degree", "rl", "reward_model", "special_tokens", "hub_model_id",
        "wandb_project", "use_tensorboard", "evals_per_epoch", "eval_steps", "eval_strategy", "saves_per_epoch",
        "save_steps", "save_strategy",
    ),
    *leaves(
        "the class follows from the model's config.json and its tokenizer's", "model_type", "tokenizer_type",
        "tokenizer_use_fast",
        "tokenizer_legacy", "num_labels", "processor_type", "is_llama_derived_model", "is_mistral_derived_model",
        "is_qwen_derived_model", "is_falcon_derived_model", "low_cpu_mem_usage", changes=False,
    ),
    *leaves(
        "WANDB_ENTITY, WANDB_LOG_MODEL and the like in the environment say it", "wandb_entity", "wandb_watch",
        "wandb_log_model", "wandb_run_id", changes=False,
    ),
    *leaves(
        "Liger's kernels are used on CUDA where they agree with the model: --fused_kernels on insists", "plugins",
        "liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_layer_norm", "liger_rms_norm_gated",
        "liger_fused_linear_cross_entropy", "liger_cross_entropy", changes=False,
    ),
    *leaves(
        "kernels of theirs: results are the same up to rounding", "lora_mlp_kernel", "lora_qkv_kernel",
        "lora_o_kernel", "lora_embedding_kernel", "use_kernels", "flash_attn_cross_entropy", "fused_attn_kernel",
        "experts_implementation", "flash_attn_fuse_mlp",
        "flash_attn_rms_norm", "flash_optimum", "cut_cross_entropy", "use_scattermoe",
        "chunked_cross_entropy", "chunked_cross_entropy_num_chunks", changes=False,
    ),
    *leaves(
        "activation checkpointing gives the same numbers either way", "gradient_checkpointing_kwargs", changes=False
    ),
    *leaves("--long_rows does MLPs in tiles", "tiled_mlp", "tiled_mlp_num_shards", changes=False),
    *leaves("the launcher's --num_processes says it", "dp_shard_size", "world_size", "local_rank",
            "ddp", "gpu_count", changes=False),
    *leaves("our recipes have a guard: --guard, on by default", "loss_watchdog_threshold", "loss_watchdog_patience",
            changes=False),
    *leaves("weights are always saved as safetensors", "save_safetensors", changes=False),
    *leaves("a recipe continues its own run by itself", "auto_resume_from_checkpoints", changes=False),
    *leaves("their own checks and memory on one device", "strict", "device_map", "max_memory", "gpu_memory_limit",
            "debug", "include_tokens_per_second", "include_tkps", "experimental_skip_move_to_device", changes=False),
    *leaves("--profile_steps N records steps", "profiler_steps", "profiler_steps_start", changes=False),
    *leaves("continue from adapters with --resume_from_checkpoint, or merge them first", "lora_model_dir"),
    *leaves("ours has one learning rate", "loraplus_lr_ratio", "loraplus_lr_embedding", "embedding_lr",
            "embedding_lr_scale", "lr_groups"),
    *leaves("add tokens to the tokenizer and save it beside the model first", "tokens", "added_tokens_overrides",
            "resize_token_embeddings_to_32x"),
    *leaves("train every weight, or adapters", "unfrozen_parameters", "freeze_mm_modules"),
    *leaves("write it into the model's config.json", "model_config", "overrides_of_model_config", "rope_scaling"),
    *leaves("accel-scale pretrain trains under fsdp2_tp, for whole models", "tensor_parallel_size"),
    *leaves("experts are not divided among ranks here", "expert_parallel_size"),
    *leaves("stop by --max_steps, and keep the best by --load_best_model_at_end", "early_stopping_patience"),
    *leaves("our quantised bases are bitsandbytes' nf4, and 8 bits", "gptq", "bnb_config_kwargs", "qat",
            "quantization", "model_quantization_config", "quantize_moe_experts"),
    *leaves("a training method that our recipes do not have", "relora", "ebft", "diffusion", "use_eaft",
            "process_reward_model", "orpo_alpha", "simpo_gamma", "cpo_alpha", "reinit_weights",
            "curriculum_sampling", "trainer_cls", "use_pose",
            "lr_quadratic_warmup", "cosine_constant_lr_ratio"),
)  # fmt: skip
