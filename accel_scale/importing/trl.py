"""TRL's YAML: its flags match ours, except for the list of data sets and the launcher's keys."""

from __future__ import annotations

import yaml

from accel_scale.errors import ConfigError
from accel_scale.flags.datasets_key import KEY, flags_of_datasets
from accel_scale.importing.draft import LOST, MAPPED, Draft, NoCounterpart

# TRL's launch files by name (1.16).
_LAUNCHES = {"fsdp1": "fsdp2", "fsdp2": "fsdp2", "zero1": "zero1", "zero2": "zero2", "zero3": "zero3",
             "multi_gpu": "ddp", "single_gpu": "single_gpu"}  # fmt: skip
# Keys that identify a trainer other than SFT's; the first match wins.
_TRAINERS = {
    "kto": {"desirable_weight", "undesirable_weight"},
    "rloo": {"normalize_advantages", "reward_clip_range"},
    "grpo": {"num_generations", "max_completion_length", "reward_funcs", "reward_weights"},
    "dpo": {"beta", "ref_model_sync_steps", "precompute_ref_log_probs", "disable_dropout"},
}


def convert(draft: Draft) -> None:
    """Fill `draft`; the recipe's parser later reports flags that it does not have."""
    keys = set(draft.values)
    draft.recipe = next((recipe for recipe, own in _TRAINERS.items() if keys & own), "sft")
    if draft.values.get("loss_type") in ("kto", "apo_zero_unpaired"):
        draft.recipe = "kto"
    root = yaml.compose(draft.path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    for key, value in draft.values.items():
        if key == KEY:
            node = next(node for name, node in root.value if name.value == KEY)  # type: ignore[union-attr]
            try:
                draft.flags |= flags_of_datasets(node, draft.path)
            except ConfigError as error:
                draft.note(key, LOST, f"{error.problem} {error.fix}")
            else:
                draft.note(key, MAPPED, "dataset_name or dataset_mixture")
        elif key == "accelerate_config":
            name = _LAUNCHES.get(str(value))
            if name is None:
                raise NoCounterpart(f"accelerate_config: {value} is no launch file of TRL's; give --launch yourself")
            draft.launch = name
            draft.note(key, MAPPED, f"--launch {name}")
        elif key in ("num_processes", "num_machines"):
            draft.note(key, MAPPED, f"--{key} of the launcher")
        elif key == "streaming" and KEY in keys:
            draft.set("dataset_streaming", value, key)
        elif key == "reward_funcs":
            draft.note(key, LOST, "--rewards takes exact_match, number, format=REGEX or FILE.py:FUNCTION")
        elif key == "test_split_size":
            draft.note(
                key, LOST, "cut the rows in two: --dataset_train_split train[:90%] --dataset_test_split train[90%:]"
            )
        elif value is not None:
            draft.set(key, value, key)
