"""TRL's vLLM flags in recipes/grpo.py and rloo.py: which go together, and which flags do not go with vLLM."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError
from accel_scale.facts.vllm import why_no_vllm

if TYPE_CHECKING:
    from accel_scale.flags.parsing import ParsedFlags

MODES = ("colocate", "server")
# Flags that TRL reads in one mode only (1.16).
_OF_COLOCATE = (
    "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model_length", "vllm_enable_sleep_mode",
    "vllm_model_impl",
)  # fmt: skip
_OF_SERVER = (
    "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
)  # fmt: skip
_OF_BOTH = (
    "vllm_mode", "vllm_structured_outputs_regex", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_cap",
)  # fmt: skip
VLLM_FLAGS = ("use_vllm", *_OF_BOTH, *_OF_COLOCATE, *_OF_SERVER)
_OF_TRANSFORMERS = ("cache_implementation", "use_transformers_continuous_batching", "use_transformers_paged")


def refuse_vllm_flags(parsed: ParsedFlags) -> None:
    """Refuse vLLM flags that contradict each other or would be ignored.

    Raises:
        ConfigError: for the first one found.
    """
    given = parsed.explicit
    if not given.get("use_vllm"):
        for name in VLLM_FLAGS:
            if given.get(name) is not None and name != "use_vllm":
                raise ConfigError(
                    "vLLM does not generate, so it would be ignored.",
                    place=parsed.place(name),
                    fix="add --use_vllm true, or remove it.",
                )
        return
    mode = given.get("vllm_mode", MODES[0])
    if mode not in MODES:
        raise ConfigError(f"{mode} is no mode.", place=parsed.place("vllm_mode"), fix=f"use {' or '.join(MODES)}.")
    other = MODES[mode == MODES[0]]
    for name in _OF_SERVER if mode == "colocate" else _OF_COLOCATE:
        if given.get(name) is not None:
            fix = f"add --vllm_mode {other}, or remove it." if mode == "colocate" else "give it to `vllm serve`."
            raise ConfigError(f"it is of mode {other}, and vLLM runs in {mode}.", place=parsed.place(name), fix=fix)
    for name in ("vllm_server_host", "vllm_server_port"):
        if given.get("vllm_server_base_url") and given.get(name) is not None:
            raise ConfigError(
                "--vllm_server_base_url names host and port already.", place=parsed.place(name), fix="remove it."
            )
    for name in _OF_TRANSFORMERS:
        if given.get(name):
            raise ConfigError(
                "it says how transformers generates, and vLLM does.",
                place=parsed.place(name),
                fix="remove it, or --use_vllm.",
            )
    if given.get("ds3_gather_for_generation") is False:
        raise ConfigError(
            "vLLM is given whole weights.", place=parsed.place("ds3_gather_for_generation"), fix="remove it."
        )


def require_vllm(given: Mapping[str, object], *, place: str, device_type: str | None) -> None:
    """Refuse ``--use_vllm`` if vLLM cannot generate here, without importing it.

    Args:
        given: Flag → value, as the user set them.
        place: Where ``--use_vllm`` was set.
        device_type: As in `why_no_vllm`.

    Raises:
        ConfigError: naming what is missing.
    """
    if not given.get("use_vllm"):
        return
    is_installed = importlib.util.find_spec("vllm") is not None
    if reason := why_no_vllm(is_installed=is_installed, device_type=device_type):
        raise ConfigError(reason[0], place=place, fix=reason[1])
