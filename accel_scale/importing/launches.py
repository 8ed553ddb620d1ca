"""Maps other projects' DeepSpeed and FSDP settings to launch files that ship with the package."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from accel_scale.importing.draft import CHECK, LOST, MAPPED, Draft

# FSDP settings that only change speed, host memory, or how checkpoints are split.
_FSDP_QUIET = (
    "limit_all_gathers", "sync_module_states", "use_orig_params", "cpu_ram_efficient_loading", "state_dict_type",
    "final_state_dict_type", "backward_prefetch", "forward_prefetch", "cpu_offload_pin_memory", "version",
    "transformer_layer_cls_to_wrap", "fsdp_version",
)  # fmt: skip

_DEEPSPEED_KNOWN = {
    "zero_optimization", "bf16", "fp16", "gradient_accumulation_steps", "gradient_clipping", "train_batch_size",
    "train_micro_batch_size_per_gpu", "wall_clock_breakdown", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
}  # fmt: skip


def deepspeed_launch(draft: Draft, key: str = "deepspeed") -> None:
    """Choose the launch file for a DeepSpeed configuration: by its contents if available here, else by its name."""
    given = draft.get(key)
    if not given:
        return
    found = _contents(given, draft.path)
    zero = found.get("zero_optimization") if found is not None else None
    if isinstance(zero, Mapping):
        stage = int(str(zero.get("stage", 0)))
        devices = {name: (zero.get(name) or {}).get("device") for name in ("offload_optimizer", "offload_param")}
        is_offloaded = any(device not in (None, "none") for device in devices.values())
        name = "zero_infinity" if "nvme" in devices.values() else f"zero{stage}{'_offload' * is_offloaded}"
    else:
        match = re.search(r"(?:zero|z)[_-]?([0-3])", Path(str(given)).name.lower())
        if match is None:
            draft.note(
                key, LOST, f"{given} is not here, and its name does not say which stage: --launch zero2 or zero3"
            )
            return
        stage, is_offloaded = int(match[1]), "offload" in str(given).lower()
        name = f"zero{stage}{'_offload' * is_offloaded}"
        # axolotl's own zero2.json keeps the optimizer in host memory.
        name = "zero2_offload" if Path(str(given)).name == "zero2.json" else name
    if "torch_compile" in str(given):
        draft.flags["torch_compile"] = True
    if stage == 0:
        name = "ddp"
    if name == "zero1_offload":
        name = "zero2_offload"
    draft.launch = name
    whole = found is None or {key for key in found if key not in _DEEPSPEED_KNOWN} == set()
    more = "" if whole else "; compare its other settings with the launch file's"
    draft.note(key, MAPPED if whole else CHECK, f"--launch {name}{more}")


def _contents(given: object, path: Path) -> Mapping[str, object] | None:
    if isinstance(given, Mapping):
        return given
    for folder in (Path(), path.parent):
        file = folder / str(given)
        if file.is_file():
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                return None
            return content if isinstance(content, dict) else None
    return None


def fsdp_launch(draft: Draft) -> None:
    """Choose the launch file for ``fsdp`` and ``fsdp_config``, with old names (``fsdp_`` prefix) and new ones."""
    config = draft.get("fsdp_config")
    if not draft.is_on("fsdp") and not config:
        return
    settings = {str(k).removeprefix("fsdp_"): v for k, v in (config if isinstance(config, Mapping) else {}).items()}
    words = " ".join(str(draft.get("fsdp") or "").lower().split())
    sharding = str(settings.pop("sharding_strategy", "")).upper()
    offloads = settings.pop("offload_params", False) or "offload" in words
    keeps = settings.pop("reshard_after_forward", True) is False or "shard_grad_op" in words
    hybrid = "HYBRID" in sharding or "hybrid" in words
    draft.launch = (
        "fsdp2_hybrid"
        if hybrid
        else "fsdp2_offload"
        if offloads
        else "fsdp2_grad_op"
        if keeps or sharding == "SHARD_GRAD_OP"
        else "fsdp2"
    )
    if settings.pop("activation_checkpointing", False):
        draft.flags["checkpointing_policy"] = "full"
    wrap = str(settings.pop("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")).upper()
    left = sorted(set(settings) - set(_FSDP_QUIET))
    for key in ("fsdp", "fsdp_config", "fsdp_version"):
        if draft.get(key) is not None:
            draft.note(key, MAPPED, f"--launch {draft.launch}, which shards layer by layer")
    if "TRANSFORMER" not in wrap or left:
        named = ", ".join([*left, *([] if "TRANSFORMER" in wrap else ["auto_wrap_policy"])])
        draft.note("fsdp_config", CHECK, f"set {named} in a copy of the launch file if you need it")
