"""axolotl's configuration, key by key (its schema of July 2026)."""

from __future__ import annotations

from collections.abc import Mapping

from accel_scale.importing.axolotl_data import DATA_ROWS, read_data
from accel_scale.importing.draft import (
    CHECK,
    LOST,
    MAPPED,
    NO_EFFECT,
    Draft,
    NoCounterpart,
    is_off,
    joins,
    leaves,
    number,
    optimizer,
    takes,
)
from accel_scale.importing.launches import deepspeed_launch, fsdp_launch

_SCHEDULES = (
    "cosine",
    "linear",
    "constant",
    "constant_with_warmup",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_restarts",
)
_RL = {
    "dpo": ("dpo", {}),
    "ipo": ("dpo", {"loss_type": "ipo"}),
    "grpo": ("grpo", {}),
    "gdpo": ("grpo", {"multi_objective_aggregation": "normalize_then_sum"}),
}
_ATTENTION = {
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
    *takes("dpo_label_smoothing", flag="label_smoothing"),
    *takes("precompute_ref_log_probs", "max_prompt_len"),
    *takes("dpo_use_weighting", flag="use_weighting"),
    *takes("dpo_loss_type", flag="loss_type"),
    *takes("dpo_loss_weights", flag="loss_weights"),
    *joins(
        "adapter", "load_in_4bit", "load_in_8bit", "lora_target_linear", "lora_target_modules", "sample_packing",
        "bf16", "bfloat16", "fp16", "float16", "float32", "fp8", *_ATTENTION, "attn_implementation",
        "gradient_checkpointing", "deepspeed", "fsdp", "fsdp_config", "fsdp_version", "dp_replicate_size",
        "context_parallel_size", "sequence_parallel_degree", "rl", "reward_model", "special_tokens", "hub_model_id",
        "wandb_project", "use_tensorboard", "evals_per_epoch", "eval_steps", "eval_strategy", "saves_per_epoch",
        "save_steps", "save_strategy",
    ),
    *leaves(
        "the class follows from the model's config.json and its tokenizer's", "model_type", "tokenizer_type",
        "tokenizer_use_fast", "processor_type", "is_llama_derived_model", "is_mistral_derived_model",
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
        "experts_implementation", "chunked_cross_entropy", "chunked_cross_entropy_num_chunks", changes=False,
    ),
    *leaves(
        "activation checkpointing gives the same numbers either way", "gradient_checkpointing_kwargs", changes=False
    ),
    *leaves("--long_rows does MLPs in tiles", "tiled_mlp", "tiled_mlp_num_shards", changes=False),
    *leaves("the launcher's --num_processes says it", "world_size", "local_rank", "ddp", "gpu_count", changes=False),
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
            "process_reward_model", "orpo_alpha", "simpo_gamma", "cpo_alpha", "kto_desirable_weight",
            "kto_undesirable_weight", "reinit_weights", "curriculum_sampling", "trainer_cls", "use_pose",
            "lr_quadratic_warmup", "cosine_constant_lr_ratio", "center_rewards_coefficient"),
)  # fmt: skip


def convert(draft: Draft) -> None:
    """Fill `draft`."""
    _recipe(draft)
    read_data(draft)
    _method(draft)
    deepspeed_launch(draft)
    fsdp_launch(draft)
    _ranks(draft)
    _precision(draft)
    _kernels(draft)
    _schedule_of_saves(draft)
    _hub_and_trackers(draft)
    draft.apply(ROWS)
    draft.default(max_length=512, num_train_epochs=1.0, per_device_train_batch_size=1)
    draft.training_defaults()
    if draft.recipe == "pretrain" and not {"warmup_ratio", "warmup_steps"} & draft.flags.keys():
        draft.default(warmup_ratio=0.03)
    if draft.recipe == "sft":
        draft.default(packing=False)
    if draft.flags.get("method") in ("lora", "qlora"):
        draft.default(lora_dropout=0.0)


def _recipe(draft: Draft) -> None:
    kind = draft.get("rl")
    if kind:
        if kind not in _RL:
            raise NoCounterpart(f"rl: no recipe of ours trains by {kind}")
        draft.recipe, flags = _RL[str(kind)]
        draft.flags |= flags
        draft.note("rl", MAPPED, f"the recipe {draft.recipe}")
    elif draft.is_on("reward_model"):
        draft.recipe = "reward"
        draft.note("reward_model", MAPPED, "the recipe reward")
    elif draft.is_on("pretraining_dataset"):
        draft.recipe = "pretrain"


def _method(draft: Draft) -> None:
    adapter = draft.get("adapter")
    if adapter not in (None, "", "lora", "qlora"):
        draft.note("adapter", LOST, f"{adapter} adapters: ours are LoRA")
    four = draft.is_on("load_in_4bit") or adapter == "qlora"
    draft.set("method", ("qlora" if four else "lora") if adapter else "full", "adapter")
    if draft.get("load_in_4bit") is not None:
        draft.note("load_in_4bit", MAPPED, f"method: {draft.flags['method']}")
    if draft.is_on("load_in_8bit"):
        draft.set("load_in_8bit", True, "load_in_8bit")
    if not adapter:
        return
    targets = draft.get("lora_target_modules")
    if draft.is_on("lora_target_linear"):
        draft.set("lora_target_modules", ["all-linear"], "lora_target_linear")
        if targets:
            draft.note("lora_target_modules", CHECK, "every linear layer has an adapter, which includes these")
    elif targets:
        draft.set("lora_target_modules", targets, "lora_target_modules")


def _ranks(draft: Draft) -> None:
    if int(number(draft.get("dp_replicate_size") or 1, "dp_replicate_size")) > 1 and draft.launch:
        draft.launch = "fsdp2_hybrid"
        draft.note("dp_replicate_size", MAPPED, "--launch fsdp2_hybrid; set its replicas there")
    for key in ("context_parallel_size", "sequence_parallel_degree"):
        if (size := int(number(draft.get(key) or 1, key))) > 1:
            draft.set("sp_size", size, key)


def _precision(draft: Draft) -> None:
    keys = [key for key in ("bf16", "bfloat16", "fp16", "float16", "fp8", "float32") if draft.is_on(key)]
    chosen = keys[0] if keys else None
    whole = draft.flags.get("method") == "full" and draft.launch is None
    if chosen is None or draft.get(chosen) == "auto":
        if chosen:
            more = (
                ", with fp32 weights; theirs are bf16: --precision bf16_true" if whole else ", as without --precision"
            )
            draft.note(chosen, CHECK if whole else MAPPED, f"bf16 where the device has it{more}")
        return
    precision = {"fp16": "fp16", "float16": "fp16", "fp8": "fp8", "float32": "fp32"}.get(chosen)
    if precision is None:
        # Without sharding theirs trains bf16 weights; FSDP and DeepSpeed keep fp32 ones beside them.
        precision = "bf16_true" if whole or draft.get(chosen) == "full" else "bf16"
    draft.set("precision", precision, chosen)


def _kernels(draft: Draft) -> None:
    given = draft.get("attn_implementation")
    old = next((key for key in _ATTENTION if draft.is_on(key)), None)
    if given:
        draft.set("attn_implementation", given, "attn_implementation")
    elif old:
        draft.set("attn_implementation", _ATTENTION[old], old)
    checkpointing = draft.get("gradient_checkpointing")
    if checkpointing is not None:
        policy = {True: "full", False: "none"}.get(checkpointing) if isinstance(checkpointing, bool) else "offload"
        draft.set("checkpointing_policy", policy, "gradient_checkpointing")
    if draft.recipe == "sft" and draft.get("sample_packing") is not None:
        draft.set("packing", draft.is_on("sample_packing"), "sample_packing")
    tokens = draft.get("special_tokens")
    for name, token in (tokens if isinstance(tokens, Mapping) else {}).items():
        if draft.recipe == "sft" and name in ("pad_token", "eos_token"):
            draft.set(str(name), token, "special_tokens")
        elif name == "pad_token":
            draft.note("special_tokens", NO_EFFECT, "padding is left out of the loss, whatever its token")
        else:
            draft.note("special_tokens", LOST, f"{name}: set it in the tokenizer and save it beside the model")


def _schedule_of_saves(draft: Draft) -> None:
    epochs = number(draft.get("num_epochs") or 1, "num_epochs")
    for what, per_epoch in (("eval", "evals_per_epoch"), ("save", "saves_per_epoch")):
        steps, strategy, times = (draft.get(key) for key in (f"{what}_steps", f"{what}_strategy", per_epoch))
        evaluates = what == "save" or "dataset_test_split" in draft.flags or draft.recipe == "pretrain"
        if not evaluates:
            for key in (f"{what}_steps", f"{what}_strategy", per_epoch):
                if not is_off(draft.get(key)):
                    draft.note(key, NO_EFFECT, "there are no rows to evaluate on")
        elif strategy:
            draft.set(f"{what}_strategy", strategy, f"{what}_strategy")
            if steps:
                draft.set(f"{what}_steps", steps, f"{what}_steps")
        elif steps:
            draft.flags[f"{what}_strategy"] = "steps"
            draft.set(f"{what}_steps", steps, f"{what}_steps")
        elif times and number(times, per_epoch) == 1:
            draft.set(f"{what}_strategy", "epoch", per_epoch)
        elif times:
            draft.flags[f"{what}_strategy"] = "steps"
            # A share of all steps.
            draft.set(f"{what}_steps", round(1 / (number(times, per_epoch) * epochs), 6), per_epoch)
        elif what == "eval":
            draft.flags["eval_strategy"] = "epoch"


def _hub_and_trackers(draft: Draft) -> None:
    if draft.get("hub_model_id"):
        draft.flags["push_to_hub"] = True
        draft.set("hub_model_id", draft.get("hub_model_id"), "hub_model_id")
    if draft.is_on("wandb_project"):
        draft.set("report_to", "wandb", "wandb_project")
        draft.note("wandb_project", CHECK, f"set WANDB_PROJECT={draft.get('wandb_project')} in the environment")
    elif draft.is_on("use_tensorboard"):
        draft.set("report_to", "tensorboard", "use_tensorboard")
