"""The planner for Python: `plan` and `predict_memory`, in the words of `accel-scale plan`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields

from accel_scale.errors import ConfigError
from accel_scale.planning.cost.memory import MemoryEstimate
from accel_scale.planning.search.plan import Plan
from accel_scale.planning.search.requests import SWITCHES, Wish, build_request, flag_places
from accel_scale.planning.search.search import search

Setting = str | int | float | bool | Sequence[str] | None
_SETTINGS = tuple(field.name for field in fields(Wish) if field.name != "model")
_LISTS = ("lora_target_modules", "strategy")


def plan(model: str, **settings: Setting) -> Plan:
    """What fits, fastest first, and why the rest does not; loads no weights and no torch.

        best = plan("Qwen/Qwen3-8B", gpu="H100", num_gpus=8, method="full", max_length=4096).best
        best.choice.label, best.memory.device_bytes, best.time.step_seconds

    Args:
        model: A name of the catalogue, a folder, a config.json or a name on the hub.
        settings: Flags of `accel-scale plan` without their dashes, e.g. ``gpu="24GiB"``, ``strategy=["FSDP2"]``,
            ``packing=False``. What is left out is chosen, or read from this machine.

    Returns:
        `Plan`: ``best`` (None if nothing fits), ``candidates``, ``rejections``, ``nearest_miss``.

    Raises:
        ConfigError: for a setting that is unknown, impossible, or contradicts another.
    """
    for name in settings:
        if name not in _SETTINGS:
            near = difflib.get_close_matches(name, _SETTINGS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"there is no setting {name!r}.", place="plan()", fix=f"{hint}use one of {', '.join(_SETTINGS)}."
            )
    words = {name: _as_typed(name, value) for name, value in settings.items() if value is not None}
    request = build_request(Wish(model, **words))  # type: ignore[arg-type]
    with flag_places():
        return search(request)


def predict_memory(model: str, **settings: Setting) -> MemoryEstimate:
    """Peak memory of one rank: of the setting that `plan` would choose, or of the one that comes nearest to fitting.

        predict_memory("Qwen/Qwen3-8B", gpu="24GiB", method="qlora", max_length=2048, global_batch_size=8).high_bytes

    Args:
        model, settings: As for `plan`. Give everything to predict one setting.

    Returns:
        `MemoryEstimate`, all in bytes: ``device_bytes`` and its interval ``low_bytes`` to ``high_bytes``,
        ``peak_bytes`` in tensors, ``host_bytes``, and the terms of each phase in ``phases``.

    Raises:
        ConfigError: as `plan`, and where no setting can run at all.
    """
    found = plan(model, **settings)
    if found.best is not None:
        return found.best.memory
    miss = found.nearest_miss
    if miss is None or miss.memory is None:
        reasons = "; ".join(f"{rejection.label}: {rejection.reason}" for rejection in found.rejections)
        raise ConfigError(f"no setting can run: {reasons}.", place="predict_memory()", fix="leave more of it open.")
    return miss.memory


def _as_typed(name: str, value: Setting) -> str | bool | tuple[str, ...]:
    """The value as `Wish` has it: text as on the command line, except switches and lists."""
    if name in _LISTS:
        return (value,) if isinstance(value, str) else tuple(str(item) for item in value)  # type: ignore[union-attr]
    if isinstance(value, bool):
        return str(value).lower() if name in SWITCHES else value
    return str(value)
