"""LLaMA-Factory's configuration, key by key (arguments of August 2026)."""

from __future__ import annotations

from accel_scale.importing.draft import (
    CHECK,
    LOST,
    MAPPED,
    NO_EFFECT,
    Draft,
    NoCounterpart,
    joins,
    leaves,
    number,
    takes,
)
from accel_scale.importing.launches import deepspeed_launch, fsdp_launch
from accel_scale.importing.llama_factory_data import DATA_ROWS, read_data
from accel_scale.importing.shared_keys import TRAINER_ROWS

_STAGES = {"sft": "sft", "pt": "pretrain", "dpo": "dpo", "kto": "kto", "rm": "reward"}
_LOSSES = ("sigmoid", "hinge", "ipo")
_ATTENTION = {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "sdpa": "sdpa", "disabled": "eager"}

ROWS = (
    *DATA_ROWS,
    *takes("model_name_or_path", "use_rslora", "use_dora"),
    *takes("lora_rank", flag="lora_r"),
    *takes("lora_alpha", "lora_dropout"),
    *takes("additional_target", flag="lora_modules_to_save", convert=lambda value: str(value).split(",")),
    *takes("pref_beta", flag="beta"),
    *takes("dpo_label_smoothing", flag="label_smoothing"),
    *takes("ld_alpha"),
    *takes("kto_chosen_weight", flag="desirable_weight"),
    *takes("kto_rejected_weight", flag="undesirable_weight"),
    *takes("moe_aux_loss_coef", flag="router_aux_loss_coef"),
    *joins(
        "stage", "finetuning_type", "quantization_bit", "quantization_method", "quantization_type",
        "double_quantization", "lora_target", "pref_loss", "bf16", "fp16", "pure_bf16", "fp8", "flash_attn",
        "gradient_checkpointing", "disable_gradient_checkpointing", "deepspeed", "fsdp", "fsdp_config",
        "enable_liger_kernel", "disable_shuffling", "use_dft_loss",
    ),
    *leaves("activation checkpointing gives the same numbers either way", "use_reentrant_gc",
            "gradient_checkpointing_kwargs", "use_unsloth_gc", changes=False),
    *leaves("metrics.jsonl has every step", "plot_loss", changes=False),
    *leaves("kernels of theirs: results are the same up to rounding", "use_unsloth", "use_v1_kernels", changes=False),
    *leaves("of the tokenizer's and the hub's loading", "use_fast_tokenizer", "cache_dir", "low_cpu_mem_usage",
            "hf_hub_token", "ms_hub_token", "om_hub_token", "print_param_status", changes=False),
    *leaves("for generating after training: accel-scale chat and eval", "predict_with_generate", "do_sample",
            "temperature", "top_p", "top_k", "num_beams", "max_new_tokens", "infer_backend", "infer_dtype",
            "repetition_penalty", "eval_num_beams", "compute_accuracy", changes=False),
    *leaves("accel-scale merge writes one model of base and adapter", "export_dir", "export_size", "export_device",
            "export_hub_model_id", changes=False),
    *leaves("ray starts its processes; ours are accelerate launch's", "ray_run_name", "ray_storage_path",
            "ray_num_workers", "resources_per_worker", "placement_strategy", "ray_init_kwargs", changes=False),
    *leaves("--profile_steps N records steps", "enable_torch_profiler", "profiler_output_dir", changes=False),
    *leaves("the log has tokens per second", "include_effective_tokens_per_second", "include_num_input_tokens_seen",
            changes=False),
    *leaves("merge those adapters first, or continue the run that made them", "adapter_name_or_path"),
    *leaves("a training method that our recipes do not have", "use_galore", "use_apollo", "use_badam", "use_adam_mini",
            "use_muon", "use_llama_pro", "mixture_of_depths", "shift_attn", "use_asft_loss", "use_eaft_loss",
            "pissa_init", "pref_ftx", "pref_bco_weight", "simpo_gamma",
            "use_mca", "use_megatron_bridge", "use_hyper_parallel", "use_kt", "train_from_scratch",
            "upcast_layernorm", "upcast_lmhead_output"),
    *leaves("of a method above", "galore_layerwise", "galore_target", "galore_rank", "galore_scale",
            "galore_update_interval", "apollo_layerwise", "apollo_target", "apollo_rank", "apollo_scale",
            "apollo_scale_type", "badam_mode", "badam_switch_mode", "badam_switch_interval", "pissa_iter",
            "pissa_convert", "freeze_trainable_layers", "freeze_trainable_modules", changes=False),
    *leaves("ours has one learning rate", "loraplus_lr_ratio", "loraplus_lr_embedding"),
    *leaves("the model before training is the reference", "ref_model", "ref_model_adapters",
            "ref_model_quantization_bit"),
    *leaves("add tokens to the tokenizer and save it beside the model first", "resize_vocab", "add_tokens",
            "add_special_tokens", "new_special_tokens_config"),
    *leaves("write it into the model's config.json", "rope_scaling"),
    *leaves("stop by --max_steps, and keep the best by --load_best_model_at_end", "early_stopping_steps"),
    *leaves("of models with images, sound or video: ours train the language model", "freeze_vision_tower",
            "freeze_multi_modal_projector", "image_max_pixels", "image_min_pixels", "video_max_pixels",
            "video_min_pixels", "freeze_language_model", changes=False),
    *TRAINER_ROWS,
)  # fmt: skip


def convert(draft: Draft) -> None:
    """Fill `draft` from LLaMA-Factory's keys."""
    stage = str(draft.get("stage") or "sft")
    if stage not in _STAGES:
        raise NoCounterpart(f"stage: no recipe of ours trains by {stage}")
    draft.recipe = _STAGES[stage]
    draft.note("stage", MAPPED, f"the recipe {draft.recipe}")
    read_data(draft)
    _method(draft)
    _loss(draft)
    deepspeed_launch(draft)
    fsdp_launch(draft)
    _arithmetic(draft)
    draft.apply(ROWS)
    draft.default(learning_rate=5e-5, lr_scheduler_type="linear", max_length=2048, per_device_train_batch_size=8)
    draft.training_defaults()
    if not {"warmup_ratio", "warmup_steps"} & draft.flags.keys():
        draft.default(warmup_ratio=0.0)
    if draft.recipe == "sft":
        draft.default(packing=False)
    if draft.flags.get("method") in ("lora", "qlora"):
        rank = int(number(draft.flags.get("lora_r", 8), "lora_rank"))
        draft.default(lora_r=rank, lora_alpha=2 * rank, lora_dropout=0.0)


def _method(draft: Draft) -> None:
    kind = str(draft.get("finetuning_type") or "lora")
    if kind not in ("lora", "full"):
        draft.note("finetuning_type", LOST, f"{kind}: ours train every weight, or LoRA adapters")
        kind = "lora" if kind == "oft" else "full"
    bits, library = draft.get("quantization_bit"), str(draft.get("quantization_method") or "bnb")
    if bits is not None and library not in ("bnb", "bitsandbytes"):
        draft.note("quantization_method", LOST, f"{library}: our quantised bases are bitsandbytes'")
    elif bits is not None and draft.get("quantization_method") is not None:
        draft.note("quantization_method", MAPPED, "bitsandbytes")
    if bits is not None and int(number(bits, "quantization_bit")) == 8:
        draft.set("load_in_8bit", True, "quantization_bit")
    elif bits is not None and int(number(bits, "quantization_bit")) == 4:
        kind = "qlora"
        draft.note("quantization_bit", MAPPED, "method: qlora")
    elif bits is not None:
        draft.note("quantization_bit", LOST, f"{bits} bits: ours have 4 or 8")
    if draft.get("quantization_type") is not None:
        draft.set("bnb_4bit_quant_type", draft.get("quantization_type"), "quantization_type")
    if draft.get("double_quantization") is not None:
        draft.set("use_bnb_nested_quant", draft.get("double_quantization"), "double_quantization")
    draft.set("method", kind, "finetuning_type")
    target = draft.get("lora_target")
    if kind != "full" and target is not None:
        names = ["all-linear"] if str(target) == "all" else [part.strip() for part in str(target).split(",")]
        draft.set("lora_target_modules", names, "lora_target")


def _loss(draft: Draft) -> None:
    loss = draft.get("pref_loss")
    if loss is not None and loss not in _LOSSES:
        raise NoCounterpart(f"pref_loss: no recipe of ours trains by {loss}")
    if loss is not None and draft.recipe == "dpo":
        draft.set("loss_type", [loss], "pref_loss")
    elif loss is not None:
        draft.note("pref_loss", NO_EFFECT, "there are no pairs")
    if draft.is_on("use_dft_loss"):
        draft.set("loss_type", "dft", "use_dft_loss")
    if draft.is_on("disable_shuffling"):
        draft.set("train_sampling_strategy", "sequential", "disable_shuffling")


def _arithmetic(draft: Draft) -> None:
    chosen = next((key for key in ("pure_bf16", "fp8", "bf16", "fp16") if draft.is_on(key)), None)
    if chosen:
        draft.set("precision", {"pure_bf16": "bf16_true"}.get(chosen, chosen), chosen)
    attention = str(draft.get("flash_attn") or "auto")
    if attention in _ATTENTION:
        draft.set("attn_implementation", _ATTENTION[attention], "flash_attn")
    elif draft.get("flash_attn") is not None:
        draft.note("flash_attn", MAPPED if attention == "auto" else CHECK, "the fastest that this device has")
    if draft.is_on("disable_gradient_checkpointing"):
        draft.set("checkpointing_policy", "none", "disable_gradient_checkpointing")
    elif draft.get("gradient_checkpointing") is not None:
        policy = "full" if draft.is_on("gradient_checkpointing") else "none"
        draft.set("checkpointing_policy", policy, "gradient_checkpointing")
    if draft.get("enable_liger_kernel") is not None:
        draft.set("fused_kernels", "auto" if draft.is_on("enable_liger_kernel") else "off", "enable_liger_kernel")
