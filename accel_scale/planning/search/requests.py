"""Turns a user's words into a `Request`. Every word is checked, and errors say what to write instead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.facts import hardware
from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.facts.names import AUTO_POLICY, PRECISIONS
from accel_scale.facts.optimizer_specs import modelled_optimizer
from accel_scale.facts.precisions import PRECISION_FACTS
from accel_scale.network.link_fit import load_links
from accel_scale.planning.laws.scaling_laws import parse_count
from accel_scale.planning.models import catalogue
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.parameters import lora_params
from accel_scale.planning.models.training_setup import ATTENTIONS, LoraSetup
from accel_scale.planning.search.preferences import preference_fields
from accel_scale.planning.search.recipe_choices import PLANNED_RECIPES, PlannedRecipe
from accel_scale.planning.search.request_strategy import degrees_of, methods_of, schedule_of, strategy_label
from accel_scale.planning.search.request_words import one_of, share, whole
from accel_scale.planning.search.search import Request, may_share
from accel_scale.planning.search.settings import trace_ahead
from accel_scale.planning.search.stacks import stack_named
from accel_scale.planning.search.wish import SWITCHES, Wish
from accel_scale.planning.tape.families import has_kernel
from accel_scale.units import parse_bytes

DEFAULT_LENGTH = 2048
# The planner's names for values that the user sets by flags.
_FLAGS = {
    "model": "MODEL",
    "checkpointing": "--checkpointing_policy",
    "attention": "--attn_implementation",
    "lora targets": "--lora_target_modules",
    "lora rank": "--lora_r",
    "sequence_length": "--max_length",
    "long_rows": "--long_rows",
    "mean_length": "--mean_length",
    "nvme": "--nvme",
}


def build_request(wish: Wish, *, detect: Callable[[], hardware.Machine | None] | None = None) -> Request:
    """Build the `Request` for what the user typed.

    Args:
        detect: Finds the local machine if no card is named; None: `hardware.detect_local`.

    Raises:
        ConfigError: for a value that is unknown, impossible or contradicts another, or if no card is named or found.
    """
    with flag_places():
        model = catalogue.load_model_facts(wish.model)
        machine = _machine(wish, detect or hardware.detect_local)
        recipe = _recipe(wish.recipe)
        stack = stack_named(wish.stack, recipe)
        if stack.precision is not None and wish.precision is None:
            wish = replace(wish, precision=stack.precision)
        model = model.as_reward_model() if recipe.rewards else model
        fixed = _fixed(wish, recipe, model, machine.gpu)
        batch = whole(wish.global_batch_size, "--global_batch_size")
        if recipe.always_packs and not wish.packing:
            raise ConfigError(f"{recipe.script} fills its rows.", place="--no_packing", fix="remove it.")
        batch *= recipe.rows_per_example
        fixed |= {**preference_fields(wish, recipe, batch, model, machine.gpu.memory_bytes)}
        generation = fixed.get("generation")
        request = Request(
            model,
            machine,
            global_batch_size=batch,
            sequence_length=_length(wish, model) if generation is None else generation.total_length,
            methods=methods_of(wish.method, recipe),
            fixed=fixed,
            strategies=tuple(strategy_label(text, machine, model, recipe) for text in wish.strategy),
            recipe=recipe,
            degrees=degrees_of({"tp": wish.tp_size, "pp": wish.pp_size, "sp": wish.sp_size}, recipe, machine.num_gpus),
            schedule=schedule_of(wish.pp_schedule, wish.pp_size),
            stack=wish.stack,
        )
        trace_ahead(request)
        if not may_share(request):
            _check_batch(batch, machine.num_gpus, fixed.get("micro_batch_size"))
        return request


def with_lengths(request: Request, *, mean_tokens: float, longest_tokens: int, packed_fill: float) -> Request:
    """The request for rows of measured lengths: the longest bounds padded rows, the mean tells what is not padding.

    Args:
        mean_tokens: Mean tokens per document, after truncation.
        longest_tokens: Tokens of the longest document, after truncation.
        packed_fill: Share of positions that packing fills.
    """
    if request.fixed["packing"]:
        fixed = {**request.fixed, "mean_length": packed_fill * request.sequence_length}
        return replace(request, fixed=fixed, document_length=mean_tokens)
    fixed = {**request.fixed, "mean_length": mean_tokens}
    return replace(request, fixed=fixed, sequence_length=min(request.sequence_length, longest_tokens))


def model_for_recipe(model: str) -> str:
    """`model` as a recipe can load it: the folder of a local model, the full hub name of one from the catalogue."""
    path = Path(model).expanduser()
    if path.exists():
        return str((path.parent if path.is_file() else path).resolve())
    wanted = model.lower()
    return next(
        (name for name in catalogue.full_names() if wanted in (name.lower(), name.lower().rpartition("/")[2])), model
    )


@contextlib.contextmanager
def flag_places() -> Iterator[None]:
    """Make errors from inside the planner name the flag that set the value."""
    try:
        yield
    except ConfigError as error:
        if error.place not in _FLAGS:
            raise
        raise ConfigError(error.problem, place=_FLAGS[error.place], fix=error.fix) from None


def _machine(wish: Wish, detect: Callable[[], hardware.Machine | None]) -> hardware.Machine:
    if wish.gpu is None:
        base = detect()
        if base is None:
            raise ConfigError(
                "there is no GPU here to plan for.",
                place="--gpu",
                fix="name a card, like --gpu 4090 or --gpu H100, or its memory, like --gpu 24GiB.",
            )
    else:
        base = hardware.Machine(hardware.find_gpu(wish.gpu))
    total = base.num_gpus if wish.num_gpus is None else whole(wish.num_gpus, "--num_gpus")
    per_node = base.gpus_per_node if wish.gpus_per_node is None else whole(wish.gpus_per_node, "--gpus_per_node")
    if total > per_node and total % per_node:
        raise ConfigError(
            f"{total} GPUs do not fill servers of {per_node}.",
            place="--num_gpus",
            fix=f"use a multiple of {per_node}, or say how many a server has with --gpus_per_node.",
        )
    network, host, speed, nvme = wish.network, wish.host_memory, wish.host_bandwidth, wish.nvme
    return replace(
        base,
        num_gpus=total,
        gpus_per_node=min(total, per_node),
        internode_bytes_per_second=hardware.network_bytes_per_second(network) if network else None,
        host_memory_bytes=parse_bytes(host, place="--host_memory") if host else base.host_memory_bytes,
        host_bandwidth=float(parse_bytes(speed, place="--host_bandwidth")) if speed else None,
        nvme_bytes_per_second=float(parse_bytes(nvme, place="--nvme")) if nvme else None,
        links=load_links(wish.links) if wish.links else None,
    )


def _recipe(wished: str | PlannedRecipe) -> PlannedRecipe:
    recipe = (
        wished if isinstance(wished, PlannedRecipe) else PLANNED_RECIPES[one_of(wished, PLANNED_RECIPES, "--recipe")]
    )
    if recipe.has_images:
        raise ConfigError(
            "nothing is planned for images: the vision tower and the tokens of images are not counted.",
            place="--recipe",
            fix=f"try one step of {recipe.script} with --max_steps 1, or plan the language model alone with sft.",
        )
    return recipe


def _fixed(wish: Wish, recipe: PlannedRecipe, model: ModelFacts, gpu: hardware.Gpu) -> dict[str, Any]:
    """The fields of `TrainingSetup` that are already decided."""
    targets, dropout = tuple(wish.lora_target_modules), share(wish.lora_dropout, "--lora_dropout")
    dropout = 0.0 if recipe.disables_dropout else dropout
    saved = ("score",) if recipe.rewards else ()
    lora = LoraSetup(whole(wish.lora_r, "--lora_r"), targets, wish.use_dora, saved, dropout)
    if any(METHOD_FACTS[method].trains_adapters for method in methods_of(wish.method, recipe)):
        lora_params(model, lora)
    else:
        _refuse_adapter_flags(wish)
    packing = recipe.packs(wish.packing)
    fixed: dict[str, Any] = {"precision": _precision(wish, gpu), "packing": packing, "lora": lora}
    if wish.optim is not None:
        modelled_optimizer(wish.optim)
        fixed["optimizer"] = wish.optim
    if wish.checkpointing_policy not in (None, AUTO_POLICY):
        fixed["checkpointing"] = wish.checkpointing_policy
    if wish.attn_implementation is not None:
        fixed["attention"] = one_of(wish.attn_implementation, ATTENTIONS, "--attn_implementation")
    elif not has_kernel(model, "sdpa"):
        fixed["attention"] = "eager"
    if wish.mean_length is not None:
        fixed["mean_length"] = parse_count(wish.mean_length, place="--mean_length")
    if wish.per_device_train_batch_size is not None:
        examples = whole(wish.per_device_train_batch_size, "--per_device_train_batch_size")
        fixed["micro_batch_size"] = examples * recipe.rows_per_example
    for name in SWITCHES:
        if (text := getattr(wish, name)) is not None:
            fixed[name] = one_of(text.lower(), ("true", "false"), f"--{name}") == "true"
    if fixed.get("long_rows"):
        fixed.setdefault("checkpointing", "offload")
    return fixed


def _refuse_adapter_flags(wish: Wish) -> None:
    for name in ("lora_r", "lora_target_modules", "lora_dropout", "use_dora"):
        if getattr(wish, name) != Wish.__dataclass_fields__[name].default:
            raise ConfigError(
                f"does nothing under --method {wish.method}, which trains no adapter.",
                place=f"--{name}",
                fix="add --method lora, or remove it.",
            )


def _precision(wish: Wish, gpu: hardware.Gpu) -> str:
    """The requested precision, if the card supports it; by default bf16, or fp16 on cards without bf16."""
    if wish.precision is None:
        return "fp16" if gpu.supports_bf16 is False else "bf16"
    precision = one_of(wish.precision, PRECISIONS, "--precision")
    if precision == "fp8" and gpu.supports_fp8 is False:
        raise ConfigError(f"{gpu.name} has no fp8 matrix units.", place="--precision", fix="use bf16.")
    if PRECISION_FACTS[precision].needs_bf16 and gpu.supports_bf16 is False:
        raise ConfigError(f"{gpu.name} does not compute in bf16.", place="--precision", fix="use fp16.")
    return precision


def _length(wish: Wish, model: ModelFacts) -> int:
    longest = model.max_positions or DEFAULT_LENGTH
    if wish.max_length is None:
        return min(DEFAULT_LENGTH, longest)
    length = whole(wish.max_length, "--max_length")
    if model.position_params and length > longest:
        raise ConfigError(
            f"{model.name} has learned {longest} positions, not {length}.",
            place="--max_length",
            fix=f"use {longest} or less.",
        )
    return length


def _check_batch(batch: int, num_gpus: int, micro_batch: int | None) -> None:
    per_step = num_gpus * (micro_batch or 1)
    if batch % per_step == 0:
        return
    parts = f"{num_gpus} GPU" + "s" * (num_gpus > 1) + (f" × {micro_batch} sequences each" if micro_batch else "")
    raise ConfigError(
        f"a global batch of {batch} does not divide among {parts}.",
        place="--global_batch_size",
        fix=f"use a multiple of {per_step}.",
    )


def amount(text: str | None, place: str) -> float | None:
    """A positive number like ``2``, ``1e9`` or ``10B``; None for None.

    Raises:
        ConfigError: for anything else.
    """
    return None if text is None else parse_count(text, place=place)
