"""What is trained: every weight, LoRA adapters, or LoRA adapters on a 4-bit base."""

from __future__ import annotations

from collections.abc import Callable

from accel_scale.errors import ConfigError
from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.facts.names import METHODS


def resolve_method(
    method: str | None,
    *,
    use_peft: bool | None,
    load_in_4bit: bool | None,
    load_in_8bit: bool | None,
    place: Callable[[str], str] = "--{}".format,
) -> str:
    """One of ``full``, ``lora``, ``qlora`` from ``--method`` and TRL's switches (`None`: not given).

    An 8-bit base trains LoRA adapters, so ``--method lora --load_in_8bit`` goes together.

    Raises:
        ConfigError: if they contradict each other, or a quantised base would be trained without adapters.
    """
    if method is not None and method not in METHODS:
        raise ConfigError(f"{method!r} is not a method.", place=place("method"), fix=f"use {', '.join(METHODS)}.")
    if load_in_4bit and load_in_8bit:
        raise ConfigError(
            "a base cannot be loaded in 4 and in 8 bits.", place=place("load_in_8bit"), fix="keep one of the two."
        )
    if method is not None:
        facts = METHOD_FACTS[method]
        for name, value, needed in (
            ("use_peft", use_peft, facts.trains_adapters),
            ("load_in_4bit", load_in_4bit, facts.quantises_base),
        ):
            if value is not None and value != needed:
                raise ConfigError(
                    f"--method {method} and {name} {str(value).lower()} contradict each other.",
                    place=place(name),
                    fix=f"remove {name}; --method says it all.",
                )
        if load_in_8bit and method != "lora":
            raise ConfigError(
                f"--method {method} does not go with an 8-bit base.",
                place=place("load_in_8bit"),
                fix="use --method lora with it, or remove it.",
            )
        return method
    if (load_in_4bit or load_in_8bit) and not use_peft:
        raise ConfigError(
            "a quantised base cannot be trained itself; it needs adapters.",
            place=place("load_in_4bit" if load_in_4bit else "load_in_8bit"),
            fix="use --method qlora." if load_in_4bit else "add --use_peft.",
        )
    if use_peft:
        return "qlora" if load_in_4bit else "lora"
    return "full"
