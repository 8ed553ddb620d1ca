"""The planner for Python, in the words of `accel-scale plan`: plans, memory, and a function for each question."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields

from accel_scale.errors import ConfigError
from accel_scale.planning.cost import inference
from accel_scale.planning.cost.inference import InferenceEstimate
from accel_scale.planning.cost.memory import MemoryEstimate
from accel_scale.planning.models import catalogue
from accel_scale.planning.search import questions
from accel_scale.planning.search.plan import Plan
from accel_scale.planning.search.prices import prices_of
from accel_scale.planning.search.questions import PlanDifference, PricedPlan
from accel_scale.planning.search.requests import build_request, flag_places
from accel_scale.planning.search.search import search
from accel_scale.planning.search.wish import LISTS, SWITCHES, Wish

Setting = str | int | float | bool | Sequence[str] | None
_SETTINGS = tuple(field.name for field in fields(Wish) if field.name != "model")


def plan(model: str, **settings: Setting) -> Plan:
    """Plan a run: what fits, fastest first, and why the rest does not. Loads no weights and no torch.

        best = plan("Qwen/Qwen3-8B", gpu="H100", num_gpus=8, method="full", max_length=4096).best
        best.choice.label, best.memory.device_bytes, best.time.step_seconds

    Args:
        model: A name in the catalogue, a folder, a config.json or a name on the hub.
        settings: Flags of `accel-scale plan` without their dashes, e.g. ``gpu="24GiB"``, ``strategy=["FSDP2"]``,
            ``packing=False``. Anything left out is chosen, or read from this machine.

    Returns:
        `Plan`: ``best`` (None if nothing fits), ``candidates``, ``rejections``, ``nearest_miss``.

    Raises:
        ConfigError: for a setting that is unknown, impossible, or contradicts another.
    """
    request = build_request(_wish(model, settings, "plan()"))
    with flag_places():
        return search(request)


def longest_row(model: str, **settings: Setting) -> Plan:
    """The plan for the longest rows that fit, one on each GPU at a time.

        longest_row("meta-llama/Llama-3.1-8B", gpu="4090", method="qlora").request.sequence_length

    Args:
        model, settings: As for `plan`; without ``max_length``.

    Raises:
        ConfigError: as `plan`, and if not even 256 tokens fit.
    """
    request = build_request(_wish(model, settings, "longest_row()"))
    with flag_places():
        return questions.longest_row(request)


def largest_batch(model: str, **settings: Setting) -> Plan:
    """The plan for the largest micro-batch that fits, with one pass of every GPU per step.

        largest_batch("Qwen/Qwen3-8B", gpu="H100", method="lora", max_length=4096).best.setup.micro_batch_size

    Args:
        model, settings: As for `plan`; ``global_batch_size`` follows from the answer.

    Raises:
        ConfigError: as `plan`, and if not even one example fits.
    """
    wish = _wish(model, {"global_batch_size": 2**20, **settings}, "largest_batch()")
    with flag_places():
        return questions.largest_batch(build_request(wish))


def cheapest(model: str, prices: Mapping[str, object], tokens: float, **settings: Setting) -> list[PricedPlan]:
    """The machines of a price table, cheapest for a job first.

        first = cheapest("Qwen/Qwen3-8B", {"H100": 2.4, "RTX 4090": 0.4}, 1e9, method="lora")[0]
        first.price.card, first.price.num_gpus, first.budget.price

    Args:
        model, settings: As for `plan`; without ``gpu`` and ``num_gpus``.
        prices: Per GPU and hour, by card, or ``{"price": 2.4, "num_gpus": [8, 16]}``; else 1, 2, 4 and 8 are tried.
        tokens: Tokens to train on, without padding.

    Raises:
        ConfigError: for an unknown card or setting.
    """
    machines = [price for name, entry in prices.items() for price in prices_of(name, entry, place="prices")]
    return questions.cheapest_plans(_wish(model, settings, "cheapest()"), machines, tokens)


def what_if(model: str, changes: Sequence[str], **settings: Setting) -> list[PlanDifference]:
    """The best setting, and the best setting with each change on its own.

        base, second_card, longer = what_if("Qwen/Qwen3-8B", ["num_gpus=2", "max_length=x2"], gpu="H100")
        longer.memory_bytes, longer.step_seconds  # more than the base's

    Args:
        model, settings: The base, as for `plan`.
        changes: Each ``flag=value``; ``x2`` is twice the base's value.

    Raises:
        ConfigError: as `plan`, and for a change that cannot be read.
    """
    with flag_places():
        return questions.compare(_wish(model, settings, "what_if()"), changes)


def inference_memory(model: str, *, batch: int, length: int) -> tuple[InferenceEstimate, ...]:
    """Memory for answering with the trained model, with weights in 16 and in 4 bits.

        for found in inference_memory("Qwen/Qwen3-8B", batch=8, length=4096):
            found.weights, found.weight_bytes, found.cache_bytes, found.device_bytes

    Args:
        model: As for `plan`.
        batch: Answers generated at the same time.
        length: Tokens of prompt and answer together.

    Raises:
        ConfigError: for a model whose cache is not modelled, or sizes below 1.
    """
    for name, value in (("batch", batch), ("length", length)):
        if value < 1:
            raise ConfigError(f"{name} is {value}.", place="inference_memory()", fix="give a number above 0.")
    return inference.inference_memory(catalogue.load_model_facts(model), batch=batch, length=length)


def predict_memory(model: str, **settings: Setting) -> MemoryEstimate:
    """Peak memory of one rank, for the setting that `plan` would choose or, if none fits, for the nearest to fitting.

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


def _wish(model: str, settings: Mapping[str, Setting], place: str) -> Wish:
    for name in settings:
        if name not in _SETTINGS:
            near = difflib.get_close_matches(name, _SETTINGS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"there is no setting {name!r}.", place=place, fix=f"{hint}use one of {', '.join(_SETTINGS)}."
            )
    words = {name: _as_typed(name, value) for name, value in settings.items() if value is not None}
    return Wish(model, **words)  # type: ignore[arg-type]


def _as_typed(name: str, value: Setting) -> str | bool | tuple[str, ...]:
    """The value as `Wish` holds it: text as on the command line, except lists and flags with a boolean default."""
    if name in LISTS:
        return (value,) if isinstance(value, str) else tuple(str(item) for item in value)  # type: ignore[union-attr]
    if isinstance(value, bool):
        return str(value).lower() if name in SWITCHES else value
    return str(value)
