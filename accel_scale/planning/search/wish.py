"""What a user asks of a plan, before any of it is checked."""

from __future__ import annotations

from dataclasses import dataclass

from accel_scale.planning.search.recipe_choices import PlannedRecipe

# Settings that are true or false, and open where they are not given.
SWITCHES = ("sync_each_batch", "long_rows")


@dataclass(frozen=True)
class Wish:
    """What the user typed, flag by flag; None: left open."""

    model: str
    gpu: str | None = None
    num_gpus: str | None = None
    gpus_per_node: str | None = None
    network: str | None = None
    host_memory: str | None = None
    host_bandwidth: str | None = None
    nvme: str | None = None
    links: str | None = None
    method: str = "full"
    precision: str | None = None
    optim: str | None = None
    checkpointing_policy: str | None = None
    attn_implementation: str | None = None
    per_device_train_batch_size: str | None = None
    sync_each_batch: str | None = None
    long_rows: str | None = None
    global_batch_size: str = "64"
    max_length: str | None = None
    mean_length: str | None = None
    packing: bool = True
    lora_r: str = "16"
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    lora_dropout: str = "0.05"
    use_dora: bool = False
    strategy: tuple[str, ...] = ()
    num_generations: str | None = None
    max_prompt_length: str | None = None
    max_completion_length: str | None = None
    beta: str | None = None
    precompute_ref_log_probs: bool = False
    stack: str = "ours"
    recipe: str | PlannedRecipe = "sft"
    tp_size: str | None = None
    pp_size: str | None = None
    sp_size: str | None = None
    pp_schedule: str | None = None
