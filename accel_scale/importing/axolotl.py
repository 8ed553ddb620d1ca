"""axolotl's configuration: keys that must be read together."""

from __future__ import annotations

from collections.abc import Mapping

from accel_scale.importing.axolotl_data import read_data
from accel_scale.importing.axolotl_keys import ATTENTION, ROWS
from accel_scale.importing.draft import (
    CHECK,
    LOST,
    MAPPED,
    NO_EFFECT,
    Draft,
    NoCounterpart,
    is_off,
    number,
)
from accel_scale.importing.launches import deepspeed_launch, fsdp_launch

_RL = {
    "dpo": ("dpo", {}),
    "ipo": ("dpo", {"loss_type": "ipo"}),
    "kto": ("kto", {}),
    "grpo": ("grpo", {}),
    "gdpo": ("grpo", {"multi_objective_aggregation": "normalize_then_sum"}),
}


def convert(draft: Draft) -> None:
    """Fill `draft` from axolotl's keys."""
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
        # Without sharding axolotl trains bf16 weights; FSDP and DeepSpeed also keep fp32 copies.
        precision = "bf16_true" if whole or draft.get(chosen) == "full" else "bf16"
    draft.set("precision", precision, chosen)


def _kernels(draft: Draft) -> None:
    given = draft.get("attn_implementation")
    old = next((key for key in ATTENTION if draft.is_on(key)), None)
    if given:
        draft.set("attn_implementation", given, "attn_implementation")
    elif old:
        draft.set("attn_implementation", ATTENTION[old], old)
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
            kind = LOST if name in ("eos_token", "additional_special_tokens") else CHECK
            text = (
                f"{name} is the tokenizer's own; where {token} is another, set it there and save it beside the model"
            )
            draft.note("special_tokens", kind, text)


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
            # As a fraction of all steps.
            draft.set(f"{what}_steps", round(1 / (number(times, per_epoch) * epochs), 6), per_epoch)
        elif what == "eval":
            draft.flags["eval_strategy"] = "epoch"


def _hub_and_trackers(draft: Draft) -> None:
    if draft.get("hub_model_id"):
        draft.flags["push_to_hub"] = True
        draft.set("hub_model_id", draft.get("hub_model_id"), "hub_model_id")
    if draft.is_on("wandb_project"):
        draft.flags["report_to"] = "wandb"
        draft.set("project", draft.get("wandb_project"), "wandb_project")
    elif draft.is_on("use_tensorboard"):
        draft.set("report_to", "tensorboard", "use_tensorboard")
