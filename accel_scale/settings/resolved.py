"""The outcome of resolving a run: every setting with its origin, and the facts of its launch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from accel_scale.facts.device import CPU, Device
from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.facts.names import AUTO_POLICY, FUSED_LABEL
from accel_scale.flags.common import ScaleArguments
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy
from accel_scale.modeling.precision import Precision
from accel_scale.planning.search.recipe_choices import SFT_PLAN, PlannedRecipe
from accel_scale.secrets import mask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

T = TypeVar("T")
_CREDENTIALS = ("hub_token", "push_to_hub_token")


@dataclass(frozen=True)
class LaunchFacts:
    """What the launch and the device determine, as plain values.

    Attributes:
        world_size: data-parallel processes.
        strategy: A name of `facts.strategies`.
        mixed_precision: that of the launch file, if there is one.
        mixed_precision_place: file and line that set it.
        device: the device that each process computes on.
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

    `values` are keyword arguments for the configuration classes; `sources` gives the origin of each: ``--flag``,
    ``file.yaml:12``, ``default``, or a sentence beginning with ``derived``. `on_card` are the settings that the same
    flags lead to on the card of ``--plan_gpu``, if that is not a device like the one here. `model_config` is the
    model's configuration if ``--plan auto`` has read it. `next_policies` are the other activation checkpointing
    policies that fit, the next best first. `agreed_kernels` are the parts of the model that may run in fused kernels.
    `recipe` is what the planner knows about the recipe.
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
    next_policies: tuple[str, ...] = ()
    agreed_kernels: tuple[str, ...] = ()
    recipe: PlannedRecipe = SFT_PLAN

    @property
    def trains_adapters(self) -> bool:
        """True if adapters are trained on a frozen base, False if every weight is trained."""
        return METHOD_FACTS[self.method].trains_adapters

    @property
    def checkpointing_is_open(self) -> bool:
        """True while the policy is left to the plan; until then `checkpointing` is the default without a plan."""
        return bool(self.values.get("checkpointing_policy") == AUTO_POLICY)

    def set_checkpointing(self, policy: str, source: str) -> None:
        """Set the policy that was open."""
        self.checkpointing = replace(CheckpointingPolicy.parse(policy), in_tiles=self.checkpointing.in_tiles)
        self.scale = replace(self.scale, checkpointing_policy=policy)
        self.set("checkpointing_policy", policy, source)

    def set(self, name: str, value: Any, source: str) -> None:
        """Set `name`; the source is kept for ``--print_config``."""
        self.values[name] = value
        self.sources[name] = source

    def build(self, cls: type[T]) -> T:
        """An instance of dataclass `cls` from the values that belong to it."""
        names = {f.name for f in fields(cls) if f.init}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in self.values.items() if name in names})

    @property
    def fused(self) -> tuple[str, ...]:
        """Parts of the model that run in fused kernels; see `fuse_layers` on rotary embeddings."""
        overwrites = self.checkpointing.kind == "selective" and self.launch.device_type != "cpu"
        return tuple(part for part in self.agreed_kernels if not (part == "RoPE" and overwrites))

    @property
    def fused_label(self) -> str | None:
        """The parts in fused kernels, for tables; None if there are none."""
        whose = "" if self.launch.device_type == "cpu" else FUSED_LABEL
        return f"{whose} {', '.join(self.fused)}".strip() if self.fused else None

    @property
    def outcome(self) -> dict[str, str | int]:
        """Values that several flags determine together: method, precision and global batch."""
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


def _plain(value: object) -> str:
    """`value` in YAML's flow style, on one line."""
    value = getattr(value, "value", value)
    if isinstance(value, str) and value.startswith("{"):
        return value
    return json.dumps(value, default=str)
