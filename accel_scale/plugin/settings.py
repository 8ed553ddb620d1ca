"""The settings of a `ScalePlugin`: reading, checking, and resolving them for a launch and a device."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.facts.device import ATTENTION_NAMES
from accel_scale.facts.names import DECAY_SHAPES, PRECISIONS, SCHEDULE_NAMES
from accel_scale.facts.optimizer_specs import optimizer_spec
from accel_scale.flags.guard_settings import TRAINER_POLICIES
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy
from accel_scale.optimization.batch import derive_accumulation
from accel_scale.optimization.optimizers import parse_optim_args
from accel_scale.optimization.schedules import create_schedule, scaled_learning_rate, schedule_name
from accel_scale.plugin.checks import refuse_what_does_nothing
from accel_scale.plugin.field_words import words_of_fields
from accel_scale.units import parse_bytes

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from peft import PeftConfig

    from accel_scale.flags.guard_settings import GuardSettings
    from accel_scale.launching.environment import LaunchEnvironment
    from accel_scale.modeling.precision import Precision

ENVIRONMENT_PREFIX = "ACCEL_SCALE_"
_FALSE, _TRUE = ("0", "false", "no", "off"), ("1", "true", "yes", "on")


@dataclass
class ScaleSettings:
    """The checked fields of `ScalePlugin`, which documents them, and the values derived from them."""

    precision: str | None = None
    checkpointing_policy: str | None = None
    attention: str | None = None
    adapter: PeftConfig | None = None
    optimizer: str | None = None
    optim_args: str | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    lr_schedule: str | None = None
    num_training_steps: int | None = None
    warmup_ratio: float | None = None
    min_lr_ratio: float | None = None
    decay_ratio: float | None = None
    decay_shape: str | None = None
    scale_lr_from_batch_size: str | None = None
    lr_base_batch_size: int | None = None
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    device_memory: str | None = None
    fp8_emulate: bool | None = None
    sync_batch_norm: bool | None = None
    verify_first_checkpoint: bool | None = None
    guard: str | None = None
    guard_threshold: float | None = None
    guard_max_skips: int | None = None

    def __post_init__(self) -> None:
        self._from_environment: set[str] = set()
        for field in fields(self):
            text = os.environ.get(ENVIRONMENT_PREFIX + field.name.upper())
            if text is not None and getattr(self, field.name) is None and field.name != "adapter":
                self._from_environment.add(field.name)
                setattr(self, field.name, self._parse(field.name, str(field.type), text))
        self.verify_first_checkpoint = self.verify_first_checkpoint is not False
        with self.in_words_of_fields():
            self._validate()
        self._rehearse()

    def _place(self, name: str) -> str:
        from_environment = name in self._from_environment
        return ENVIRONMENT_PREFIX + name.upper() if from_environment else f"ScalePlugin({name}=)"

    def _parse(self, name: str, kind: str, text: str) -> object:
        try:
            if kind.startswith("bool"):
                return {**dict.fromkeys(_FALSE, False), **dict.fromkeys(_TRUE, True)}[text.lower()]
            return {"int": int, "float": float, "str": str}[kind.split()[0]](text)
        except (ValueError, KeyError):
            kinds = {"bool": "true or false", "int": "a whole number", "float": "a number"}
            wanted = kinds[kind.split()[0]]
            raise ConfigError(f"{text!r} is not {wanted}.", place=self._place(name), fix=f"write {wanted}.") from None

    def _validate(self) -> None:
        self._choose("precision", PRECISIONS)
        self._choose("decay_shape", DECAY_SHAPES)
        self._choose("scale_lr_from_batch_size", ("linear", "sqrt"))
        self._choose("guard", TRAINER_POLICIES)
        if self.lr_schedule is not None:
            self.lr_schedule = schedule_name(self.lr_schedule)
            self._choose("lr_schedule", SCHEDULE_NAMES)
        if self.attention is not None and "/" not in self.attention:  # otherwise the name of a kernel
            self._choose("attention", ATTENTION_NAMES)
        for name in ("warmup_ratio", "min_lr_ratio", "decay_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"{value:g} is not a share.", place=self._place(name), fix="use 0 to 1.")
        for name in ("num_training_steps", "global_batch_size", "micro_batch_size", "lr_base_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{value} is too small.", place=self._place(name), fix="use 1 or more.")
        for name in ("learning_rate", "weight_decay"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{value:g} is negative.", place=self._place(name), fix="use 0 or more.")
        if self.optimizer is not None:
            parse_optim_args(self.optimizer, self.optim_args)
        if self.device_memory is not None:
            parse_bytes(self.device_memory, place=self._place("device_memory"))
        self.policy = (
            CheckpointingPolicy.parse(self.checkpointing_policy, place=self._place("checkpointing_policy"))
            if self.checkpointing_policy is not None
            else None
        )
        refuse_what_does_nothing(vars(self), place=self._place)
        if self.lr_schedule is not None:
            self._try_schedule()

    def _try_schedule(self) -> None:
        """Refuse ratios that contradict each other or that the schedule does not take, before anything is loaded."""
        import torch

        self.schedule(torch.optim.SGD([torch.zeros(1)], lr=1.0), self.num_training_steps or 1000)

    def _choose(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value is not None and value not in choices:
            raise ConfigError(f"{value!r} is unknown.", place=self._place(name), fix=f"use {', '.join(choices)}.")

    def _rehearse(self) -> None:
        from accel_scale.launching.environment import current_launch, tell_deepspeed_file
        from accel_scale.launching.rehearsal import enable_rehearsal_if_needed, let_trainers_run_on_cpu

        self.launch: LaunchEnvironment = current_launch()
        tell_deepspeed_file(self.launch)
        announcement = enable_rehearsal_if_needed()
        let_trainers_run_on_cpu()
        if announcement and self.launch.rank == 0:
            print(announcement, flush=True)

    def check_rehearsal(self, world_size: int) -> None:
        """Refuse a launch whose processes became independent before the plugin was created."""
        if world_size != self.launch.world_size:
            raise ConfigError(
                f"this launch has {self.launch.world_size} processes, but each believes it is alone.",
                place="ScalePlugin",
                fix="make it before the first Accelerator or TrainingArguments.",
            )

    def check_checkpoints(self) -> None:
        """Refuse checkpoints that could not be resumed: FSDP2 whole-model checkpoints of torchao's 8-bit states."""
        spec = optimizer_spec(self.optimizer) if self.optimizer is not None else None
        if spec is not None and not spec.whole_checkpoints and self.launch.parallel.saves_whole_checkpoints:
            raise ConfigError(
                f"whole-model checkpoints of {self.optimizer} under FSDP2 cannot be resumed.",
                place=self.launch.place("fsdp_config.fsdp_state_dict_type"),
                fix="write fsdp_state_dict_type: SHARDED_STATE_DICT there.",
            )

    def resolve_precision(self, device_type: str, *, trains_adapters: bool) -> Precision | None:
        """The precision that plugin, launch and device agree on; None if the plugin leaves it to the script."""
        if self.precision is None:
            return None
        from accel_scale.launching.machine import detect_device
        from accel_scale.modeling.precision import resolve_precision

        return resolve_precision(
            self.precision,
            launch_mixed_precision=self.launch.mixed_precision,
            launch_place=self.launch.place("mixed_precision"),
            device=detect_device(device_type),
            fp8_emulate=bool(self.fp8_emulate),
            strategy=self.launch.strategy,
            trains_adapters=trains_adapters,
            place=self._place,
        )

    def accumulation(self, micro_batch_size: int, world_size: int) -> int | None:
        """Gradient accumulation steps for the global batch; None if no global batch is set."""
        if self.global_batch_size is None:
            return None
        return derive_accumulation(self.global_batch_size, micro_batch_size, world_size)

    @property
    def moves_rates(self) -> bool:
        """True if the plugin changes the optimizer or its learning rate."""
        given = {self.optimizer, self.lr_schedule, self.learning_rate, self.scale_lr_from_batch_size}
        return given != {None}

    def learning_rate_factor(self, global_batch_size: int) -> float:
        """The factor for the learning rate at `global_batch_size` sequences."""
        return scaled_learning_rate(
            1.0,
            global_batch_size=global_batch_size,
            base_batch_size=self.lr_base_batch_size or 32,
            rule=self.scale_lr_from_batch_size,
        )

    def schedule(
        self, optimizer: torch.optim.Optimizer, num_training_steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """The plugin's schedule over `optimizer`, stepped once per optimizer step."""
        return create_schedule(
            optimizer,
            self.lr_schedule,
            num_training_steps=num_training_steps,
            warmup_ratio=self.warmup_ratio,
            min_lr_ratio=self.min_lr_ratio,
            decay_ratio=self.decay_ratio if self.decay_ratio is not None else 0.1,
            decay_shape=self.decay_shape or "1-sqrt",
        )

    def guard_settings(self) -> GuardSettings | None:
        """Settings for `GuardMixin`; None if the guard is not set."""
        if self.guard is None:
            return None
        from accel_scale.flags.guard_settings import GuardSettings

        given: dict[str, Any] = {"threshold": self.guard_threshold, "max_skips": self.guard_max_skips}
        return GuardSettings(policy=self.guard, **{k: v for k, v in given.items() if v is not None})

    def cap_memory(self, device_type: str, device_index: int) -> None:
        """Apply `device_memory`."""
        if self.device_memory is not None:
            from accel_scale.launching.memory_cap import cap_device_memory

            cap_device_memory(self.device_memory, device_type=device_type, device_index=device_index)

    def in_words_of_fields(self) -> AbstractContextManager[None]:
        """Make errors of code shared with the recipes name fields instead of flags."""
        return words_of_fields(self.field_names, place=self._place)

    @property
    def field_names(self) -> list[str]:
        return [field.name for field in fields(self)]
