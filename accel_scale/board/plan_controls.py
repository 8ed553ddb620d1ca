"""What the tab "Plan" asks for: flags of `accel-scale plan`, and a command line with the same answer."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import NETWORK_GBIT_PER_SECOND, catalogue
from accel_scale.facts.names import METHODS, PRECISIONS
from accel_scale.facts.optimizer_specs import LEAN_OPTIMIZERS
from accel_scale.launching.hub_reach import require_on_hub
from accel_scale.planning.models.catalogue import full_names, is_on_hub
from accel_scale.planning.search.recipe_choices import PLANNED_RECIPES
from accel_scale.planning.search.wish import Wish

Value = str | int | bool | None
MODEL, NO_PACKING = "model", "no_packing"
# Flags that say what a job costs; they are no part of the request.
BUDGET = ("tokens", "price_per_gpu_hour")
_LONGEST_TEXT = 200  # characters
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Control:
    """One flag on the page.

    Attributes:
        name: Of the flag, without dashes.
        label: Above it.
        value: At the start; None: open.
        choices: To pick from.
        takes_others: Whether anything else may be typed.
        most: The largest number; 0 for text.
        info: Below the label.
        is_basic: Whether it is seen before "More" is opened.
    """

    name: str
    label: str
    value: Value = None
    choices: tuple[str, ...] = ()
    takes_others: bool = False
    most: int = 0
    info: str = ""
    is_basic: bool = False


CONTROLS: tuple[Control, ...] = (
    Control(
        MODEL, "Model", "meta-llama/Llama-3.1-8B", full_names(), takes_others=True, is_basic=True,
        info="of the catalogue, or owner/name on the hub",
    ),
    Control(
        "gpu", "Card", "RTX 4090", tuple(gpu.name for gpu in catalogue()), takes_others=True, is_basic=True,
        info="or its memory, like 24GiB",
    ),
    Control("num_gpus", "GPUs", 1, most=65_536, is_basic=True, info="all together"),
    Control("method", "Method", "auto", (*METHODS, "auto"), is_basic=True, info="auto: any of them"),
    Control("max_length", "Row length", 2048, most=16_777_216, is_basic=True, info="tokens"),
    Control(
        "global_batch_size", "Batch per step", int(Wish.global_batch_size), most=1_048_576, is_basic=True,
        info="sequences, all GPUs",
    ),
    Control("recipe", "Recipe", str(Wish.recipe), tuple(PLANNED_RECIPES)),
    Control("precision", "Precision", None, PRECISIONS, info="open: bf16 if supported"),
    Control("optim", "Optimizer", None, LEAN_OPTIMIZERS, takes_others=True, info="open: fused AdamW, or 8-bit states"),
    Control(
        "checkpointing_policy", "Activation checkpointing", None, ("none", "selective", "full", "offload"),
        takes_others=True, info="open: the fastest that fits",
    ),
    Control(
        "per_device_train_batch_size", "Micro-batch", None, most=1_048_576, info="open: the fastest that fits"
    ),
    Control("lora_r", "LoRA rank", int(Wish.lora_r), most=65_536),
    Control(NO_PACKING, "Padded, not packed", False),
    Control("gpus_per_node", "GPUs per server", None, most=65_536, info="open: 8"),
    Control(
        "network", "Network between servers", None, tuple(NETWORK_GBIT_PER_SECOND), takes_others=True,
        info="or bytes per second, like 25GB",
    ),
    Control("host_memory", "Host memory of a server", None, info="like 512GiB; open: not checked"),
    Control("nvme", "Speed of NVMe drives", None, info="per second, like 6GB"),
    Control("tokens", "Token budget", None, info="like 1B: adds hours"),
    Control("price_per_gpu_hour", "Price of a GPU and hour", None, info="any currency; needs a token budget"),
)  # fmt: skip


def settings_of(values: Sequence[Value]) -> dict[str, str | bool]:
    """What was set, flag by flag, as text; switches as they are.

    Args:
        values: One for each of `CONTROLS`.

    Raises:
        ConfigError: for a number out of range, text that is too long, or a model that is a path.
    """
    found: dict[str, str | bool] = {}
    for control, value in zip(CONTROLS, values, strict=True):
        if isinstance(control.value, bool):
            found |= {control.name: True} if value else {}
        elif value is not None and (text := _text(control, value)):
            found[control.name] = text
    _check_model(str(found.get(MODEL, "")))
    return found


def wish_of(settings: Mapping[str, str | bool]) -> Wish:
    """The same as the planner takes it."""
    words = {name: value for name, value in settings.items() if name not in (*BUDGET, NO_PACKING)}
    return Wish(**words, packing=not settings.get(NO_PACKING, False))  # type: ignore[arg-type]


def command_of(settings: Mapping[str, str | bool], *more: str) -> str:
    """The command line that answers the same, with the words `more` after it."""
    words = ["accel-scale", "plan", str(settings[MODEL])]
    for name, value in settings.items():
        if value is True:
            words.append(f"--{name}")
        elif name != MODEL and value != getattr(Wish, name, None):
            words += [f"--{name}", str(value)]
    return shlex.join([*words, *more])


def _text(control: Control, value: Value) -> str:
    text = str(value).strip()
    place = f"--{control.name}"
    if len(text) > _LONGEST_TEXT:
        raise ConfigError(f"{len(text):,} characters are too many.", place=place, fix=f"use {_LONGEST_TEXT} or fewer.")
    if not text.isprintable():
        raise ConfigError("holds characters that cannot be printed.", place=place, fix="remove them.")
    if control.most and text:
        if not text.isascii() or not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{text!r} is not a whole number above 0.", place=place, fix="write it like 8.")
        if int(text) > control.most:
            raise ConfigError(f"{text} is too large.", place=place, fix=f"use {control.most:,} or less.")
    return text


def _check_model(name: str) -> None:
    """The page reads no files of its host: a model is a name of the catalogue or the hub.

    Raises:
        ConfigError: for a path, and for a name on the hub that cannot be had.
    """
    if not _NAME.fullmatch(name) or ".." in name or name.startswith(".") or Path(name).exists():
        raise ConfigError(
            f"{name!r} is no name of a model." if name else "no model is named.",
            place="MODEL",
            fix="use one of the list or owner/name of the hub; for a folder, accel-scale plan FOLDER in a terminal.",
        )
    if is_on_hub(name):
        require_on_hub(name, kind="model", place="MODEL")
