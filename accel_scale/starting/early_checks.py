"""Check what a command line names before the slow imports: paths that do not exist, a hub out of reach, a folder that
does not belong to the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from accel_scale.data.default import DEFAULT_REWARDING
from accel_scale.data.sources import find_source, looks_local
from accel_scale.errors import ConfigError
from accel_scale.facts.device import check_attention_name
from accel_scale.facts.names import AUTO_POLICY
from accel_scale.flags.command_line import RecipeCommand
from accel_scale.flags.guard import GuardArguments
from accel_scale.flags.library import FlagClass
from accel_scale.flags.parsing import ParsedFlags, parse_flags
from accel_scale.flags.paths import DATA_FLAGS, MODEL_FLAGS, RESUME_FLAGS, named_inputs, resume_choice
from accel_scale.flags.trackers import require_trackers
from accel_scale.launching.hub_reach import require_on_hub
from accel_scale.launching.machine import is_surely_cpu
from accel_scale.launching.run_folder import OutputFolder
from accel_scale.launching.strategy import is_true
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy
from accel_scale.modeling.files import check_stored_row_length
from accel_scale.modeling.stored_weights import stored_shapes
from accel_scale.optimization.batch import derive_accumulation
from accel_scale.optimization.optimizers import parse_optim_args
from accel_scale.settings.trl_refused import refuse_trl_flags
from accel_scale.settings.vllm_flags import require_vllm
from accel_scale.units import parse_duration

_ONLY_TELL = {"--help", "-h", "--print_config", "--print-config"}
_TRAINERS_BATCH = 8  # transformers' default of --per_device_train_batch_size
BUILT_IN_TOKENIZERS = ("byte", "char")


def check_command_line(
    program: str,
    script: str,
    words: Sequence[str],
    flag_classes: Sequence[FlagClass],
    refuse: Callable[[ParsedFlags], None],
) -> None:
    """Refuse everything that can be refused without the libraries.

    Args:
        flag_classes: The recipe's flags.
        refuse: Refuses flags of the recipe that cannot work together.

    Raises:
        ConfigError: naming the flag, or file and line of the flag.
    """
    if _ONLY_TELL & set(words):
        return
    command = RecipeCommand.parse(script, words)
    parsed = parse_flags(flag_classes, words, program=program)
    inputs = named_inputs(command.values)
    for flag, names in inputs.items():
        for name in names:
            if flag in MODEL_FLAGS and name not in BUILT_IN_TOKENIZERS:
                check_model(name, place=command.place(flag))
            elif flag in DATA_FLAGS:
                check_data(name, place=command.place(flag))
    for flag in RESUME_FLAGS:
        check_checkpoint(command.value(flag), place=command.place(flag))
    output_dir = command.value("output_dir")
    if output_dir and os.environ.get("RANK", "0") == "0":
        OutputFolder(
            Path(str(output_dir)),
            program,
            {command.place(flag): names for flag, names in inputs.items()},
            resumes_from=command.value("resume_from_checkpoint") or command.value("resume"),
            place=command.place("output_dir"),
        ).check_writable()
    folder, longest = Path(str(command.value("model_name_or_path"))).expanduser(), parsed.explicit.get("max_length")
    if longest is not None and folder.is_dir():
        check_stored_row_length(folder, longest, place=parsed.place("max_length"))
    refuse_unreadable(parsed, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    refuse(parsed)
    require_trackers(parsed.explicit.get("report_to"), place=parsed.place("report_to"))
    on_cpu = is_surely_cpu(parsed.explicit.get("use_cpu") or is_true(os.environ.get("ACCELERATE_USE_CPU", "false")))
    require_vllm(parsed.explicit, place=parsed.place("use_vllm"), device_type="cpu" if on_cpu else None)
    if on_cpu:
        refuse_trl_flags(parsed.explicit, parsed.place, device_type="cpu")


def refuse_unreadable(parsed: ParsedFlags, *, world_size: int | None = None) -> None:
    """Refuse values that the run would refuse with the same message after importing the libraries.

    Args:
        world_size: Number of processes that train; None if not known.

    Raises:
        ConfigError: naming the flag, or file and line of the flag.
    """
    given, place = parsed.explicit, parsed.place
    if given.get("checkpointing_policy") not in (None, AUTO_POLICY):
        CheckpointingPolicy.parse(given["checkpointing_policy"], place=place("checkpointing_policy"))
    if given.get("attn_implementation"):
        check_attention_name(given["attn_implementation"], place=place("attn_implementation"))
    if given.get("collective_timeout"):
        parse_duration(given["collective_timeout"], place=place("collective_timeout"))
    if given.get("optim_args"):
        parse_optim_args(given.get("optim", "adamw_torch_fused"), given["optim_args"])
    batch, micro = given.get("global_batch_size"), given.get("per_device_train_batch_size")
    if batch and micro and world_size == 1 and "gradient_accumulation_steps" not in given:
        derive_accumulation(batch, micro, 1)
    if world_size is not None:
        refuse_groups(parsed, world_size)
    guard = parsed.for_class(GuardArguments)
    if guard:
        GuardArguments(**guard).settings()


def refuse_groups(parsed: ParsedFlags, world_size: int) -> None:
    """Refuse a number of answers per prompt that does not divide the number of answers written at the same time.

    Raises:
        ConfigError: also for a single answer, which has no other to compare with.
    """
    given = parsed.explicit
    group, place = given.get("num_generations"), parsed.place("num_generations")
    if group is None or given.get("plan") == "auto":
        return
    if group < 2:
        raise ConfigError("one answer has none to compare with.", place=place, fix="use 2 or more.")
    has_data = given.get("dataset_name") or given.get("dataset_mixture")
    usual = _TRAINERS_BATCH if has_data else DEFAULT_REWARDING["per_device_train_batch_size"]
    on_all = int(given.get("per_device_train_batch_size") or str(usual)) * world_size
    turns = given.get("steps_per_generation") or given.get("gradient_accumulation_steps")
    turns = turns or (given.get("global_batch_size") or on_all) // on_all
    together = given.get("generation_batch_size") or on_all * turns
    if together % group:
        raise ConfigError(
            f"{together} answers, as many as are written at the same time, are not groups of {group}.",
            place=place,
            fix=f"use a number that divides {together}, or another --per_device_train_batch_size.",
        )


def check_model(name: str, *, place: str) -> None:
    """Refuse a model, tokenizer or configuration that does not exist."""
    path = Path(name).expanduser()
    if path.is_dir():
        for stem in ("model", "adapter_model"):
            stored_shapes(path, stem)  # refuses incomplete files
    if path.exists():
        return
    if _is_meant_as_path(name):
        raise ConfigError(f"there is no folder {name!r}.", place=place, fix="check the path, or give a hub id.")
    require_on_hub(name, kind="model", place=place)


def check_checkpoint(name: object, *, place: str) -> None:
    """Refuse to continue from a missing checkpoint; an existing one is read before the model is loaded."""
    how = resume_choice("auto" if name is None else name)
    if how not in ("auto", "no") and not Path(how).is_dir():
        raise ConfigError(
            f"there is no folder {how!r}.",
            place=place,
            fix="check the path, or use auto, which takes the newest good one.",
        )


def check_data(name: str, *, place: str) -> None:
    """Refuse data that do not exist."""
    if Path(name).expanduser().exists():
        return
    hub_id = name if looks_local(name) else name.partition(":")[0]
    try:
        found = find_source(hub_id)  # raises for a wrong path, suggesting the nearest that exists
    except ConfigError as error:
        raise ConfigError(error.problem, place=place, fix=error.fix) from None
    if found.kind == "hub":
        require_on_hub(hub_id, kind="dataset", place=place)


def _is_meant_as_path(name: str) -> bool:
    return looks_local(name) or name.count("/") > 1 or name.endswith((".json", ".yaml"))
