"""Allowed numbers for each flag: one table for all recipes, checked when flags are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accel_scale.errors import ConfigError


@dataclass(frozen=True)
class FlagRange:
    """Numbers from `least` to `most`, both included by default.

    Attributes:
        above: Whether `least` itself is excluded.
        below: Whether `most` itself is excluded.
        also: One more allowed number, which means "not set" to the libraries.
        whole_from: From this number on, only whole ones: the libraries read smaller numbers as a share of the run.
    """

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    below: bool = False
    also: float | None = None
    whole_from: float | None = None

    def holds(self, value: float) -> bool:
        """True if `value` is in the range; NaN and infinity never are."""
        if value == self.also:
            return True
        if not math.isfinite(value) or (self.whole_from is not None and value >= self.whole_from and value % 1):
            return False
        low = value > self.least if self.above else value >= self.least
        return low and (value < self.most if self.below else value <= self.most)

    def describe(self) -> str:
        """The range in words, for a fix: ``use more than 0 and less than 1.``"""
        parts = []
        if math.isfinite(self.least):
            parts.append(f"more than {self.least:g}" if self.above else f"{self.least:g} or more")
        if math.isfinite(self.most):
            parts.append(f"less than {self.most:g}" if self.below else f"at most {self.most:g}")
        text = " and ".join(parts) or "a finite number"
        if self.whole_from is not None:
            text += f", a whole number from {self.whole_from:g} on"
        return f"use {text}." if self.also is None else f"use {text}, or {self.also:g} to leave it open."


_ANY = FlagRange()
_POSITIVE = FlagRange(0, above=True)
_NOT_NEGATIVE = FlagRange(0)
_SHARE = FlagRange(0, 1)
_DECAY = FlagRange(0, 1, below=True)  # decay of a moment: 1 never forgets
_COUNT = FlagRange(1)
_STEPS_OR_SHARE = FlagRange(0, above=True, whole_from=1)

RANGES: Mapping[str, FlagRange] = {
    # length
    "max_steps": FlagRange(1, also=-1),
    "num_train_epochs": _POSITIVE,
    "decay_steps": _COUNT,
    "max_length": FlagRange(2),  # one token predicts nothing
    # batch
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "eval_accumulation_steps": _COUNT,
    "global_batch_size": _COUNT,
    "lr_base_batch_size": _COUNT,
    "pad_to_multiple_of": _COUNT,
    # optimizer and schedule
    "learning_rate": _POSITIVE,
    "weight_decay": _NOT_NEGATIVE,
    "adam_beta1": _DECAY,
    "adam_beta2": _DECAY,
    "adam_epsilon": _NOT_NEGATIVE,
    "max_grad_norm": _NOT_NEGATIVE,
    "warmup_steps": FlagRange(0, whole_from=1),
    "warmup_ratio": _SHARE,
    "min_lr_ratio": _SHARE,
    "decay_ratio": _SHARE,
    "label_smoothing_factor": _DECAY,
    "label_smoothing": _DECAY,
    "center_rewards_coefficient": _NOT_NEGATIVE,
    "desirable_weight": _NOT_NEGATIVE,
    "undesirable_weight": _NOT_NEGATIVE,
    "neftune_noise_alpha": _POSITIVE,
    "router_aux_loss_coef": _NOT_NEGATIVE,
    # adapters and model
    "lora_r": _COUNT,
    "lora_alpha": _COUNT,
    "lora_dropout": _DECAY,
    "loss_scale": _POSITIVE,
    "model_dropout": _DECAY,
    "vocab_size": _COUNT,
    # logging, evaluation, saving
    "logging_steps": _STEPS_OR_SHARE,
    "eval_steps": FlagRange(0, whole_from=1),
    "eval_delay": _NOT_NEGATIVE,
    "eval_rows": _COUNT,
    "exact_match_samples": _NOT_NEGATIVE,
    "sample_tokens": _NOT_NEGATIVE,
    "save_steps": FlagRange(0, whole_from=1),
    "save_total_limit": _COUNT,
    "keep_last": _COUNT,
    "keep_every": _COUNT,
    "profile_steps": _NOT_NEGATIVE,
    "torch_empty_cache_steps": _COUNT,
    # data
    "dataloader_num_workers": _NOT_NEGATIVE,
    "dataloader_prefetch_factor": _COUNT,
    "dataset_num_proc": _COUNT,
    "validation_share": _DECAY,
    "seed": FlagRange(0, 2**32, below=True),  # NumPy's limit
    "data_seed": FlagRange(0, 2**32, below=True),
    # ranks
    "ddp_bucket_cap_mb": _COUNT,
    "ddp_timeout": _COUNT,
    "local_rank": FlagRange(-1),
    "powersgd_rank": _COUNT,
    "powersgd_start_step": _COUNT,
    "sp_size": _COUNT,
    "tp_size": _COUNT,
    "pp_size": _COUNT,
    "pp_stages_per_rank": _COUNT,
    # vLLM
    "vllm_gpu_memory_utilization": FlagRange(0, 1, above=True),
    "vllm_max_model_length": _COUNT,
    "vllm_tensor_parallel_size": _COUNT,
    "vllm_server_port": FlagRange(1, 65535),
    "vllm_group_port": FlagRange(1, 65535),
    "vllm_server_timeout": _POSITIVE,
    # guard
    "guard_window": FlagRange(4),
    "guard_min_steps": FlagRange(2),
    "guard_threshold": _POSITIVE,
    "guard_max_skips": _NOT_NEGATIVE,
    "guard_skip_window": _COUNT,
    "guard_lr_factor": FlagRange(0, 1, above=True, below=True),
    "guard_lr_steps": _COUNT,
    # search
    "num_trials": _COUNT,
    "prune_after": _NOT_NEGATIVE,
    "timeout": _POSITIVE,
    "trial_timeout": _POSITIVE,
}


def check_ranges(values: Mapping[str, Any], place: Callable[[str], str]) -> None:
    """Refuse the first number that its flag cannot take.

    Args:
        values: Flag → value, as the user set them.
        place: Flag → where it was set.

    Raises:
        ConfigError: naming the value, its place and what the flag takes.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        allowed = RANGES.get(name, _ANY)
        if not allowed.holds(value):
            raise ConfigError(f"{name} cannot be {value:g}.", place=place(name), fix=allowed.describe())
