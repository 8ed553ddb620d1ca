"""From flags, launch and device to one consistent set of settings, each with its origin."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from accel_scale.errors import ConfigError
from accel_scale.facts.device import CPU, Device
from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.flags.common import ScaleArguments
from accel_scale.flags.parsing import ParsedFlags
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy
from accel_scale.modeling.precision import Precision, resolve_precision
from accel_scale.optimization.batch import derive_accumulation
from accel_scale.optimization.schedules import scaled_learning_rate
from accel_scale.secrets import mask
from accel_scale.settings.method import resolve_method
from accel_scale.settings.trl_refused import refuse_trl_flags

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

T = TypeVar("T")

_CREDENTIALS = ("hub_token", "push_to_hub_token")
# Of each group the preset of the embedded data set gives way as a whole once the user has set one.
_PRESET_GROUPS = (
    ("warmup_ratio", "warmup_steps"),
    ("global_batch_size", "gradient_accumulation_steps", "per_device_train_batch_size"),
    ("max_steps", "num_train_epochs"),
    ("precision", "bf16", "fp16", "dtype"),
)


@dataclass(frozen=True)
class LaunchFacts:
    """What the launch and the device decide, as plain values.

    Attributes:
        world_size: data-parallel processes.
        strategy: A name of `facts.strategies`.
        mixed_precision: the launch file's, if there is one.
        mixed_precision_place: file and line that say so.
        device: what each process computes on.
    """

    world_size: int = 1
    strategy: str = "single"
    mixed_precision: str | None = None
    mixed_precision_place: str | None = None
    device: Device = CPU

    @property
    def device_type(self) -> str:
        """``cuda``, ``cpu`` …"""
        return self.device.type


@dataclass
class Resolved:
    """Settings with every default applied and every conflict refused.

    `values` are keyword arguments for the configuration classes; `sources` says for each where it came from:
    ``--flag``, ``file.yaml:12``, ``default``, or a sentence beginning with ``derived``. `on_card` is what the same
    flags come to on the card of ``--plan_gpu``, where that is not a device like the one here. `model_config` is the
    model's, where ``--plan auto`` has read it.
    """

    values: dict[str, Any]
    sources: dict[str, str]
    scale: ScaleArguments
    method: str
    precision: Precision
    checkpointing: CheckpointingPolicy
    use_reentrant: bool
    launch: LaunchFacts
    notes: list[str] = field(default_factory=list)
    on_card: Resolved | None = None
    model_config: PreTrainedConfig | None = None

    def set(self, name: str, value: Any, source: str) -> None:
        """Decide `name`; the source is kept for ``--print_config``."""
        self.values[name] = value
        self.sources[name] = source

    def build(self, cls: type[T]) -> T:
        """An instance of dataclass `cls` from the values that belong to it."""
        names = {f.name for f in fields(cls) if f.init}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in self.values.items() if name in names})

    @property
    def outcome(self) -> dict[str, str | int]:
        """What several flags come to together: method, precision and global batch."""
        return {
            "method": self.method,
            "precision": self.precision.name,
            "global_batch_size": self.global_batch_size,
        }

    @property
    def accumulation(self) -> int:
        """Micro-batches of each rank per optimizer step."""
        return int(self.values.get("gradient_accumulation_steps", 1))

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return int(self.values.get("per_device_train_batch_size", 8)) * self.accumulation * self.launch.world_size

    @property
    def schedule(self) -> dict[str, Any]:
        """Keyword arguments of `create_schedule` that come from `ScaleArguments`."""
        names = ("warmup_ratio", "min_lr_ratio", "decay_ratio", "decay_shape")
        return {name: getattr(self.scale, name) for name in names}

    def as_yaml(self, classes: Sequence[type]) -> str:
        """Every setting as ``name: value  # where it came from``; `--config_file` reads it back."""
        lines = []
        for cls in classes:
            lines.append(f"# {cls.__name__}")
            for f in fields(cls):  # type: ignore[arg-type]
                if not f.init or f.name in ("print_config", *_CREDENTIALS):
                    continue
                default = f.default_factory() if f.default_factory is not MISSING else f.default
                value = self.values.get(f.name, default)
                # An empty text is the default of some flags and a value of none.
                comment = "# " if value == "" else ""
                lines.append(f"{comment}{f.name}: {mask(_plain(value))}  # {self.sources.get(f.name, 'default')}")
        return "\n".join(lines)


def resolve(parsed: ParsedFlags, launch: LaunchFacts, *, preset: Mapping[str, Any] | None = None) -> Resolved:
    """Apply, in order: what the user set, `preset` (the embedded default's settings), then derived values.

    Raises:
        ConfigError: for every pair of settings that contradict each other, with the place of one and the fix.
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
        trains_adapters=method != "full",
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
    _set_checkpointing(resolved, parsed)
    _set_batch(resolved, parsed)
    _set_schedule(resolved, parsed)
    refuse_trl_flags(values, parsed.place, device_type=launch.device_type)
    return resolved


def _preset_left_open(preset: Mapping[str, Any], parsed: ParsedFlags, launch: LaunchFacts) -> dict[str, Any]:
    """The part of `preset` that neither the user nor the launch file has decided otherwise."""
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


def _set_checkpointing(resolved: Resolved, parsed: ParsedFlags) -> None:
    """One policy from ``--checkpointing_policy`` or transformers' own switches, never both."""
    values, scale = resolved.values, resolved.scale
    switches = ("activation_checkpointing", "gradient_checkpointing")
    given = [name for name in switches if values.get(name) is not None]
    options_name = next((n for n in (f"{s}_kwargs" for s in switches) if values.get(n) is not None), None)
    options = _as_dict(values.get(options_name)) if options_name else {}
    resolved.use_reentrant = bool(options.pop("use_reentrant", False))
    if scale.checkpointing_policy is not None:
        if options or (given and values[given[0]] != (scale.checkpointing_policy != "none")):
            other = given[0] if given else str(options_name)
            raise ConfigError(
                f"--checkpointing_policy {scale.checkpointing_policy} and {other} contradict each other.",
                place=parsed.place(other),
                fix=f"keep --checkpointing_policy and remove {other}.",
            )
        text, source = scale.checkpointing_policy, parsed.place("checkpointing_policy")
    elif given or options:
        on = values[given[0]] if given else True
        text = _policy_of_options(options, parsed.place(str(options_name))) if on else "none"
        source = parsed.place(given[0] if given else str(options_name))
    elif resolved.launch.device_type == "cpu":
        text, source = "none", "derived: on a CPU recomputing costs time and saves nothing scarce"
    else:
        text, source = "full", "derived: default on an accelerator"
    resolved.checkpointing = CheckpointingPolicy.parse(text, place=source)
    resolved.set("checkpointing_policy", str(resolved.checkpointing), source)
    # transformers and TRL must not switch it on a second time.
    for name in (*switches, *(f"{s}_kwargs" for s in switches)):
        resolved.values.pop(name, None)
        resolved.sources.pop(name, None)
    resolved.scale = replace(scale, checkpointing_policy=text)


def _plain(value: Any) -> str:
    """`value` in YAML's flow style, on one line."""
    value = getattr(value, "value", value)
    if isinstance(value, str) and value.startswith("{"):
        return value
    return json.dumps(value, default=str)


def _as_dict(value: Any) -> dict[str, Any]:
    return dict(json.loads(value)) if isinstance(value, str) else dict(value or {})


def _policy_of_options(options: dict[str, Any], place: str) -> str:
    """transformers' ``activation_checkpointing_kwargs`` as a policy."""
    known = {k: v for k, v in options.items() if k in ("every_n_layers", "offload", "selective") and v}
    if len(known) > 1 or set(options) - {"every_n_layers", "offload", "selective"}:
        raise ConfigError(
            f"these checkpointing options cannot be combined: {options}.",
            place=place,
            fix="use --checkpointing_policy none, full, every_2, selective or offload.",
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
