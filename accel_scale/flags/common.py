"""The recipe's own flags, beside TRL's `ScriptArguments`, `SFTConfig` and `ModelConfig`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accel_scale.facts.names import DECAY_SHAPES, FUSED_KERNELS, METHODS, PRECISIONS, SCHEDULE_NAMES
from accel_scale.facts.optimizer_specs import OPTIMIZER_NAMES
from accel_scale.facts.precisions import REDUCE_DTYPES

PLANS = ("off", "check", "auto")


def _flag(default: Any, text: str, *, choices: tuple[str, ...] | None = None) -> Any:
    metadata: dict[str, object] = {"help": text}
    if choices:
        metadata["choices"] = list(choices)
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class OptimizerArguments:
    """Optimizer, schedule and reduction of gradients: transformers' flags with more choices, in both recipes."""

    optim: str = _flag("adamw_torch_fused", "The optimizer.", choices=OPTIMIZER_NAMES)
    lr_scheduler_type: str = _flag(
        "cosine", "Learning rate schedule; wsd is warmup_stable_decay.", choices=SCHEDULE_NAMES
    )
    sync_each_batch: bool = _flag(
        False,
        "FSDP2 with accumulation: reduce and shard gradients after every micro-batch. Otherwise every rank keeps "
        "whole gradients until the last micro-batch of a step: more memory, less communication.",
    )


@dataclass
class SharedArguments:
    """Flags of both recipes that neither TRL nor transformers has. `None`: the launch file or the device decides."""

    precision: str | None = _flag(
        None,
        "Arithmetic of forward and backward: fp32; fp16 (mixed, dynamic loss scaling); bf16 (mixed); bf16_true "
        "(weights, gradients and optimizer states in bf16); fp8 (matrix products, rest bf16). Default: the launch "
        "file's, else bf16 where the device has it.",
        choices=PRECISIONS,
    )
    checkpointing_policy: str | None = _flag(
        None,
        "Activation checkpointing: none, full (every layer), every_2, every_3, … (every n-th layer), selective "
        "(attention and matrix product outputs kept), attention or mlp (only that part of each layer), segments_2, … "
        "(that many layers together, which keeps fewer inputs), segments (of about √N of N layers), offload (layer "
        "inputs kept in host memory), auto (the fastest of none, selective, every_2 and full that the plan expects to "
        "fit). Default: auto on a GPU, none on a CPU.",
    )
    long_rows: bool = _flag(
        False,
        "Rows as long as the card takes: MLPs and norms run over slices of the rows, one at a time, forward and "
        "backward, and layer inputs wait in host memory (--checkpointing_policy offload, unless you set another). "
        "Gradients stay as they are.",
    )
    fused_kernels: str = _flag(
        "auto",
        "Norms, gated MLPs and rotary embeddings in few kernels: on CUDA Liger's, on a CPU this project's, which keep "
        "less for the backward pass. auto: where liger-kernel is installed (CUDA), the model's layers are known, "
        "and a tiny model of the same configuration gives the same gradients with them; on: or refuse to start; off: "
        "the model's own layers.",
        choices=FUSED_KERNELS,
    )
    global_batch_size: int | None = _flag(
        None,
        "Rows per optimizer step over all ranks; gradient accumulation is derived from it. Default: one micro-batch "
        "on each rank, times --gradient_accumulation_steps where the recipe has it.",
    )
    device_memory: str | None = _flag(
        None,
        "Limit for the CUDA allocator, e.g. 24GiB: lets a large card stand in for a small one.",
    )
    plan_gpu: str | None = _flag(
        None, "Plan for this card instead of the one here: a name like 4090, or its memory like 24GiB."
    )
    warmup_ratio: float | None = _flag(
        None, "Share of the steps spent warming up. Default: 0.02 in pretraining, 0.03 in fine-tuning."
    )
    min_lr_ratio: float | None = _flag(
        None, "Floor of the schedule as a share of the peak. Default: 0.1 for a cosine in fine-tuning, else 0."
    )
    decay_ratio: float = _flag(
        0.1, "WSD schedule: share of the steps spent decaying at the end; 0 gives a trunk to branch off."
    )
    decay_shape: str = _flag("1-sqrt", "WSD schedule: shape of the decay.", choices=DECAY_SHAPES)
    scale_lr_from_batch_size: str | None = _flag(
        None,
        "Scale --learning_rate by global batch ÷ --lr_base_batch_size, linearly or by its square root.",
        choices=("linear", "sqrt"),
    )
    lr_base_batch_size: int = _flag(32, "Global batch size at which --learning_rate was tuned.")
    model_dropout: float | None = _flag(
        None,
        "Dropout in training, with this probability, wherever the model has one: in Llama and its kin in attention "
        "alone, in GPT-2 and its kin also after embeddings and layers. Default: the model's own.",
    )
    loss_scale: float | None = _flag(
        None, "fp16: what the loss is multiplied by at first; it is adapted from there on. Default: 65536."
    )
    reduce_dtype: str | None = _flag(
        None,
        "Dtype in which ranks add up gradients, under DDP, FSDP2 and DeepSpeed. Default: DDP fp32, or what "
        "--ddp_comm_hook says; FSDP2 and DeepSpeed that of the products.",
        choices=tuple(REDUCE_DTYPES),
    )
    fp8_emulate: bool = _flag(False, "Emulate fp8 matrix products on devices without them (for tests; slow).")
    allow_changed_settings: bool = _flag(
        False, "Continue from a checkpoint although data, batch, schedule or model have changed."
    )
    profile_steps: int = _flag(
        0, "Record this many steps, after three of warm-up, with torch.profiler, in profile/ of the output folder."
    )
    memory_summary: bool = _flag(
        False,
        "Write what lies in memory after the last step, with the allocator's table, for each rank in memory/ of the "
        "output folder. When memory runs out, it is written anyway.",
    )
    print_config: bool = _flag(False, "Print every resolved setting and where its value came from, then stop.")


@dataclass
class ScaleArguments(SharedArguments):
    """Flags of fine-tuning that neither TRL nor transformers has."""

    method: str | None = _flag(
        None,
        "What is trained: every weight, LoRA adapters, or LoRA on a 4-bit base. Default: full, or what "
        "--use_peft / --load_in_4bit say.",
        choices=METHODS,
    )
    plan: str | None = _flag(
        None,
        "Predict memory before loading. check: refuse a run that would not fit and list the cheapest changes. auto: "
        "also choose micro-batch, accumulation, checkpointing, optimizer and method if you did not set them, at the "
        "same global batch. Default: check on CUDA, else off.",
        choices=PLANS,
    )
    dataset_mixture: list[str] = _flag(
        [],
        "Several data sets by weight, e.g. --dataset_mixture a.jsonl=0.7 tatsu-lab/alpaca=0.3. If none has a weight, "
        "all rows of all of them. In YAML also as TRL's list `datasets`.",
    )
    columns: list[str] = _flag([], "Map columns to roles, e.g. --columns prompt=question completion=answer.")
    on_bad_row: str = _flag(
        "error",
        "If a row cannot be read or has no usable content: error stops and names it, skip leaves it out and "
        "counts it.",
        choices=("error", "skip"),
    )
    exact_match_samples: int | None = _flag(
        None,
        "Number of held-out questions to answer before and after training and compare with their answers; 0 turns "
        "it off. Default: 200 on the embedded data set, else 0.",
    )
    verify_first_checkpoint: bool = _flag(
        True, "Reload the first checkpoint and compare it with the weights in memory."
    )
    recover_from_oom: bool = _flag(
        True,
        "When memory runs out in a training step, every process repeats the step with half the micro-batch and the "
        "same samples. If that is impossible, as under FSDP2 and ZeRO, all processes stop with status 75.",
    )
