"""Resolve flags, launch and device to one consistent set of settings, each with its origin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.facts.checkpointing import POLICY_CHOICES
from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.facts.names import AUTO_POLICY
from accel_scale.facts.strategies import strategy_named
from accel_scale.flags.common import OptimizerArguments, ScaleArguments
from accel_scale.flags.parsing import ParsedFlags
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy
from accel_scale.modeling.precision import resolve_precision
from accel_scale.optimization.batch import derive_accumulation
from accel_scale.optimization.schedules import scaled_learning_rate, schedule_name
from accel_scale.settings.method import resolve_method
from accel_scale.settings.resolved import LaunchFacts, Resolved
from accel_scale.settings.trl_refused import flag_of_whole_logits, refuse_trl_flags

_LEFT_TO_PLAN = "derived: left to the plan"
_USUAL_WARMUP_RATIO, _USUAL_FLOOR = 0.03, 0.1
# Groups in which the preset of the embedded data set gives way as a whole once the user sets one of the flags.
_PRESET_GROUPS = (
    ("checkpointing_policy", "long_rows"),
    ("warmup_ratio", "warmup_steps"),
    ("global_batch_size", "gradient_accumulation_steps", "per_device_train_batch_size"),
    ("max_steps", "num_train_epochs"),
    ("eval_strategy", "eval_on_start"),
    ("precision", "bf16", "fp16", "dtype"),
)


def resolve(parsed: ParsedFlags, launch: LaunchFacts, *, preset: Mapping[str, Any] | None = None) -> Resolved:
    """Apply, in order: what the user set, `preset` (the embedded default's settings), then derived values.

    Raises:
        ConfigError: for any two settings that contradict each other, with the place of one and the fix.
    """
    values, sources = dict(parsed.explicit), dict(parsed.origins)
    for name, value in _preset_left_open(preset or {}, parsed, launch).items():
        values[name], sources[name] = value, "preset of the embedded data set"
    scale = ScaleArguments(**{k: v for k, v in values.items() if k in ScaleArguments.__dataclass_fields__})
    method = resolve_method(
        scale.method,
        use_peft=values.get("use_peft"),
        load_in_4bit=values.get("load_in_4bit"),
        load_in_8bit=values.get("load_in_8bit"),
        place=parsed.place,
    )
    precision = resolve_precision(
        scale.precision,
        launch_mixed_precision=launch.mixed_precision,
        launch_place=launch.mixed_precision_place,
        fp16_flag=values.get("fp16"),
        bf16_flag=values.get("bf16"),
        dtype_flag=values.get("dtype"),
        device=launch.device,
        fp8_emulate=scale.fp8_emulate,
        strategy=launch.strategy,
        trains_adapters=METHOD_FACTS[method].trains_adapters,
        place=parsed.place,
    )
    resolved = Resolved(
        values,
        sources,
        scale,
        method,
        precision,
        CheckpointingPolicy("none"),
        use_reentrant=False,
        launch=launch,
    )
    _set_method(resolved)
    _set_precision(resolved)
    _set_reduction(resolved, parsed)
    _set_checkpointing(resolved, parsed)
    _refuse_whole_rows(resolved, parsed)
    _set_fused(resolved, parsed)
    _set_batch(resolved, parsed)
    _set_schedule(resolved, parsed)
    refuse_trl_flags(values, parsed.place, device_type=launch.device_type)
    return resolved


def _preset_left_open(preset: Mapping[str, Any], parsed: ParsedFlags, launch: LaunchFacts) -> dict[str, Any]:
    """The part of `preset` that neither the user nor the launch file has set."""
    taken = set(parsed.explicit)
    if launch.mixed_precision is not None or not launch.device.native_bf16:
        taken.add("precision")
    for group in _PRESET_GROUPS:
        if taken.intersection(group):
            taken.update(group)
    return {name: value for name, value in preset.items() if name not in taken}


def _set_method(resolved: Resolved) -> None:
    for flag, value in METHOD_FACTS[resolved.method].trl_flags.items():
        resolved.set(flag, value, f"derived from method {resolved.method}")


def _set_precision(resolved: Resolved) -> None:
    for flag, value in resolved.precision.trainer_flags.items():
        resolved.set(flag, value, f"derived from precision {resolved.precision.name}")


def _set_reduction(resolved: Resolved, parsed: ParsedFlags) -> None:
    """Set the dtype of reductions, which DDP takes from a hook that has its own flag."""
    wanted, hook = resolved.scale.reduce_dtype, resolved.values.get("ddp_comm_hook", "none")
    if resolved.scale.loss_scale is not None and not resolved.precision.grad_scaler:
        raise ConfigError(
            f"in {resolved.precision.name} the loss is not scaled.", place=parsed.place("loss_scale"), fix="remove it."
        )
    if wanted is None or not strategy_named(resolved.launch.strategy).is_ddp:
        return
    if hook not in ("none", wanted):
        raise ConfigError(
            f"--reduce_dtype {wanted} and --ddp_comm_hook {hook} both say how gradients travel.",
            place=parsed.place("reduce_dtype"),
            fix="keep one of them.",
        )
    if wanted == "bf16":
        resolved.set("ddp_comm_hook", "bf16", "derived from reduce_dtype bf16")


def _set_checkpointing(resolved: Resolved, parsed: ParsedFlags) -> None:
    """Set one policy from ``--checkpointing_policy`` or transformers' own switches, never both.

    If none is set, on an accelerator the choice is left to the plan (`settle_checkpointing`); it is full until then.
    """
    values, scale = resolved.values, resolved.scale
    switches = ("activation_checkpointing", "gradient_checkpointing")
    given = [name for name in switches if values.get(name) is not None]
    options_name = next((n for n in (f"{s}_kwargs" for s in switches) if values.get(n) is not None), None)
    options = _as_dict(values.get(options_name)) if options_name else {}
    resolved.use_reentrant = bool(options.pop("use_reentrant", False))
    wanted, is_open = scale.checkpointing_policy, False
    contradicted = options or (given and (wanted == AUTO_POLICY or values[given[0]] != (wanted != "none")))
    if wanted is not None and contradicted:
        other = given[0] if given else str(options_name)
        raise ConfigError(
            f"--checkpointing_policy {wanted} and {other} contradict each other.",
            place=parsed.place(other),
            fix=f"keep --checkpointing_policy and remove {other}.",
        )
    if wanted not in (None, AUTO_POLICY):
        text = wanted
        source = resolved.sources.get("checkpointing_policy", parsed.place("checkpointing_policy"))
    elif given or options:
        on = values[given[0]] if given else True
        text = _policy_of_options(options, parsed.place(str(options_name))) if on else "none"
        source = parsed.place(given[0] if given else str(options_name))
    elif scale.long_rows and resolved.launch.device_type != "cpu":
        text, source = "offload", "derived: --long_rows keeps layer inputs in host memory"
    elif scale.long_rows:
        text, source = "full", "derived: --long_rows, on a CPU, whose memory is the host's"
    elif resolved.launch.device_type == "cpu":
        text, source = "none", "derived: on a CPU recomputing costs time and saves nothing scarce"
    else:
        text, source, is_open = "full", parsed.origins.get("checkpointing_policy", _LEFT_TO_PLAN), True
    resolved.checkpointing = replace(CheckpointingPolicy.parse(text, place=source), in_tiles=scale.long_rows)
    resolved.set("checkpointing_policy", AUTO_POLICY if is_open else str(resolved.checkpointing), source)
    # transformers and TRL must not switch it on a second time.
    for name in (*switches, *(f"{s}_kwargs" for s in switches)):
        resolved.values.pop(name, None)
        resolved.sources.pop(name, None)
    resolved.scale = replace(scale, checkpointing_policy=resolved.values["checkpointing_policy"])


def _set_fused(resolved: Resolved, parsed: ParsedFlags) -> None:
    """Merge TRL's own switch into ``--fused_kernels``; TRL itself must not patch the model again."""
    values, switch = resolved.values, "use_liger_kernel"
    wanted = values.get("fused_kernels")
    said = "on" if values.get(switch) else "off" if values.get(switch) is False and wanted is None else None
    if said and wanted == "off":
        raise ConfigError(
            f"--fused_kernels {wanted} and {switch} contradict each other.",
            place=parsed.place(switch),
            fix=f"remove {switch}.",
        )
    if said:
        resolved.set("fused_kernels", said, parsed.place(switch))
        resolved.scale = replace(resolved.scale, fused_kernels=said)
    values.pop(switch, None)
    resolved.sources.pop(switch, None)


def _refuse_whole_rows(resolved: Resolved, parsed: ParsedFlags) -> None:
    """Refuse settings that need all tokens of a row at once if ``--long_rows`` is set."""
    if not resolved.scale.long_rows:
        return
    if resolved.precision.fp8:
        raise ConfigError(
            "fp8 scales a product by the largest value of all of its tokens, which a tile does not know.",
            place=parsed.place("long_rows"),
            fix="use --precision bf16, or leave --long_rows out.",
        )
    if flag := flag_of_whole_logits(resolved.values):
        raise ConfigError(
            f"--{flag} {resolved.values[flag]} needs the logits of whole rows, which --long_rows is there to avoid.",
            place=parsed.place(flag),
            fix=f"remove it, or use --checkpointing_policy {resolved.checkpointing} in place of --long_rows.",
        )


def _as_dict(value: Any) -> dict[str, Any]:
    return dict(json.loads(value)) if isinstance(value, str) else dict(value or {})


def _policy_of_options(options: dict[str, Any], place: str) -> str:
    """The policy of transformers' ``activation_checkpointing_kwargs``."""
    known = {k: v for k, v in options.items() if k in ("every_n_layers", "offload", "selective") and v}
    if len(known) > 1 or set(options) - {"every_n_layers", "offload", "selective"}:
        raise ConfigError(
            f"these checkpointing options cannot be combined: {options}.",
            place=place,
            fix=f"use --checkpointing_policy {POLICY_CHOICES}.",
        )
    if "every_n_layers" in known:
        return f"every_{known['every_n_layers']}"
    return next(iter(known), "full")


def _set_batch(resolved: Resolved, parsed: ParsedFlags) -> None:
    values = resolved.values
    world = resolved.launch.world_size
    micro = values.get("per_device_train_batch_size", 8)
    wanted = resolved.scale.global_batch_size
    if wanted is None:
        return
    accumulation = derive_accumulation(wanted, micro, world)
    if "gradient_accumulation_steps" in parsed.explicit and values["gradient_accumulation_steps"] != accumulation:
        raise ConfigError(
            f"--global_batch_size {wanted} needs {accumulation} accumulation steps ({micro} sequences × {world} "
            f"processes), but {values['gradient_accumulation_steps']} are asked for.",
            place=parsed.place("gradient_accumulation_steps"),
            fix="remove one of the two.",
        )
    resolved.set(
        "gradient_accumulation_steps",
        accumulation,
        f"derived: global batch {wanted} ÷ (micro-batch {micro} × {world} processes)",
    )


def set_usual_schedule(resolved: Resolved) -> None:
    """Set fine-tuning's default schedule: a short warm-up, and a cosine that ends above zero."""
    values = resolved.values
    name = schedule_name(values.get("lr_scheduler_type", OptimizerArguments.lr_scheduler_type))
    usual = {}
    if name != "constant" and not {"warmup_ratio", "warmup_steps"} & values.keys():
        room = 1 - resolved.scale.decay_ratio if name == "warmup_stable_decay" else 1.0
        usual["warmup_ratio"] = min(_USUAL_WARMUP_RATIO, room)
    if name == "cosine" and "min_lr_ratio" not in values:
        usual["min_lr_ratio"] = _USUAL_FLOOR
    for flag, value in usual.items():
        resolved.set(flag, value, "default of fine-tuning")
        setattr(resolved.scale, flag, value)


def _set_schedule(resolved: Resolved, parsed: ParsedFlags) -> None:
    scale, values = resolved.scale, resolved.values
    if scale.warmup_ratio is not None and parsed.explicit.get("warmup_steps"):
        raise ConfigError(
            "--warmup_ratio and --warmup_steps both set the warm-up.",
            place=parsed.place("warmup_steps"),
            fix="keep one of them.",
        )
    if scale.scale_lr_from_batch_size:
        base = values.get("learning_rate", 2e-5)
        batch = resolved.global_batch_size
        scaled = scaled_learning_rate(
            base,
            global_batch_size=batch,
            base_batch_size=scale.lr_base_batch_size,
            rule=scale.scale_lr_from_batch_size,
        )
        rule = scale.scale_lr_from_batch_size
        resolved.set(
            "learning_rate",
            scaled,
            f"derived: {base:g} scaled ({rule}) from batch {scale.lr_base_batch_size} to {batch}",
        )
