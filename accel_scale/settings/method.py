"""The training method: every weight, LoRA adapters, or LoRA adapters on a 4-bit base."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError
from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.facts.names import METHODS

if TYPE_CHECKING:
    from accel_scale.flags.parsing import ParsedFlags

_OF_ADAPTERS = (
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save",
    "use_rslora", "use_dora",
)  # fmt: skip
_OF_4BIT_BASES = ("bnb_4bit_quant_type", "bnb_4bit_quant_storage", "use_bnb_nested_quant")


def method_of(parsed: ParsedFlags) -> str:
    """The method that the user's flags name.

    Raises:
        ConfigError: as `resolve_method`.
    """
    given = parsed.explicit
    return resolve_method(
        given.get("method"),
        use_peft=given.get("use_peft"),
        load_in_4bit=given.get("load_in_4bit"),
        load_in_8bit=given.get("load_in_8bit"),
        place=parsed.place,
    )


def refuse_idle_flags(parsed: ParsedFlags) -> None:
    """Refuse flags of adapters and of 4-bit bases in a run that has none.

    Flags in a file are not refused if the command line overrides the file's method.

    Raises:
        ConfigError: for the first such flag.
    """
    given = parsed.explicit
    if given.get("plan") == "auto" and given.get("method") is None:
        return  # the method is about to be chosen
    method = method_of(parsed)
    facts, is_overridden = METHOD_FACTS[method], parsed.origins.get("method", "").startswith("--")
    for names, has_them, what, fix in (
        (_OF_ADAPTERS, facts.trains_adapters, "trains no adapter", "add --method lora"),
        (_OF_4BIT_BASES, facts.quantises_base, "has no 4-bit base", "add --method qlora"),
    ):
        for name in () if has_them else names:
            if given.get(name) in (None, False) or (is_overridden and not parsed.place(name).startswith("--")):
                continue
            raise ConfigError(
                f"does nothing under --method {method}, which {what}.",
                place=parsed.place(name),
                fix=f"{fix}, or remove it.",
            )


def resolve_method(
    method: str | None,
    *,
    use_peft: bool | None,
    load_in_4bit: bool | None,
    load_in_8bit: bool | None,
    place: Callable[[str], str] = "--{}".format,
) -> str:
    """Return ``full``, ``lora`` or ``qlora`` from ``--method`` and TRL's switches (`None`: not given).

    An 8-bit base trains LoRA adapters, so ``--method lora`` and ``--load_in_8bit`` go together.

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
