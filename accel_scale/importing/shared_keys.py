"""Keys with the same meaning everywhere: flags of transformers' `TrainingArguments` (5.23) that the recipes have."""

from __future__ import annotations

from accel_scale.importing.draft import leaves, optimizer, takes

TRAINER_ROWS = (
    *takes("optim", convert=optimizer),
    *takes(
        "output_dir", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
        "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
        "warmup_ratio", "optim_args", "optim_target_modules", "weight_decay", "adam_beta1", "adam_beta2",
        "adam_epsilon", "max_grad_norm", "label_smoothing_factor", "neftune_noise_alpha", "seed", "data_seed",
        "full_determinism", "logging_steps", "logging_strategy", "logging_first_step", "report_to", "run_name",
        "project", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps",
        "save_strategy", "save_steps", "save_total_limit", "save_only_model", "load_best_model_at_end",
        "metric_for_best_model", "greater_is_better", "push_to_hub", "hub_model_id", "hub_strategy",
        "hub_private_repo", "hub_revision", "tf32", "torch_compile", "torch_compile_backend", "torch_compile_mode",
        "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_drop_last",
        "dataloader_persistent_workers", "train_sampling_strategy", "length_column_name", "ddp_timeout",
        "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_broadcast_buffers", "ddp_static_graph",
        "resume_from_checkpoint", "auto_find_batch_size", "trust_remote_code", "disable_tqdm", "log_level",
        "torch_empty_cache_steps", "average_tokens_across_devices", "use_cpu", "model_revision",
    ),
    *leaves("the recipe trains when it is started", "do_train", "do_predict", changes=False),
    *leaves(
        "our runs refuse a folder of other things and continue their own", "overwrite_output_dir", changes=False
    ),
    *leaves("weights are always saved as safetensors", "save_safetensors", changes=False),
    *leaves("columns that training does not need are left out", "remove_unused_columns", changes=False),
    *leaves(
        "keep credentials out of files: hf auth login, or HF_TOKEN in the environment", "hub_token", changes=False
    ),
)  # fmt: skip
