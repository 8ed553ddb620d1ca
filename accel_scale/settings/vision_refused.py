"""Refuse flags of recipes/vision.py that cannot work together, or not with rows of images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from accel_scale.data.images import require_pillow
from accel_scale.errors import ConfigError
from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.modeling.files import PROCESSOR_FILES
from accel_scale.settings.method import method_of
from accel_scale.settings.stored_model import refuse_stored_model
from accel_scale.settings.trl_refused import refuse_model_alone, refuse_rows, refuse_settings

if TYPE_CHECKING:
    from accel_scale.flags.parsing import ParsedFlags


def refuse_vision(parsed: ParsedFlags) -> None:
    """`refuse_contradictions` for recipes/vision.py, plus flags that rows with images do not support.

    Raises:
        ConfigError: for the first one found.
    """
    require_pillow()
    refuse_settings(parsed)
    given = parsed.explicit
    template = str(given.get("chat_template_path") or "")
    adapters = METHOD_FACTS[method_of(parsed)].trains_adapters
    sees = str(given.get("train_vision") or "none")
    refused: dict[str, tuple[bool, str, str]] = {
        "packing": (bool(given.get("packing")), "rows with images are not packed", "remove it"),
        "eval_packing": (bool(given.get("eval_packing")), "rows with images are not packed", "remove it"),
        "padding_free": (bool(given.get("padding_free")), "rows with images are padded", "remove it"),
        "long_rows": (bool(given.get("long_rows")), "rows with images are not computed in tiles", "remove it"),
        "truncation_mode": (
            given.get("truncation_mode") == "keep_end",
            "the end of a row is kept without the images before it",
            "use keep_start",
        ),
        "dataset_streaming": (
            bool(given.get("dataset_streaming")),
            "images are read through before training, not while it goes on",
            "remove it",
        ),
        "train_sampling_strategy": (
            given.get("train_sampling_strategy") in ("group_by_length", "batch_rebalance"),
            "how long a row is with its images is not known before it is read",
            "use random or sequential",
        ),
        "shuffle_dataset": (bool(given.get("shuffle_dataset")), "TRL shuffles rows of text alone", "remove it"),
        "dataset_num_proc": (
            given.get("dataset_num_proc") is not None,
            "rows with images are not tokenised before training",
            "remove it, and use --dataloader_num_workers",
        ),
        "dataset_kwargs": (given.get("dataset_kwargs") is not None, "rows with images are not prepared", "remove it"),
        "exact_match_samples": (
            bool(given.get("exact_match_samples")),
            "questions on images are not answered during training",
            "remove it; --eval_strategy reports the loss on held-out rows",
        ),
        "chat_template_path": (
            bool(template) and not template.endswith((".jinja", ".j2")),
            "a template that brings tokens along would not be the processor's",
            "name a .jinja file",
        ),
        "plan": (
            given.get("plan") in ("auto", "check"),
            "memory is not predicted for images: the vision tower and the tokens of images are not counted",
            "remove it, and try one step with --max_steps 1",
        ),
        "plan_gpu": (given.get("plan_gpu") is not None, "memory is not predicted for images", "remove it"),
        "train_vision": (
            adapters and sees != "none",
            f"{sees} is trained as it is, not by adapters",
            "use --method full, or --lora_modules_to_save with the projector's name",
        ),
    }
    for name, (is_refused, why, fix) in refused.items():
        if is_refused:
            raise ConfigError(f"{why}.", place=parsed.place(name), fix=f"{fix}.")
    if given.get("model_name_or_path") is None:
        raise ConfigError(
            "no model that takes images comes with the package.",
            place="command line",
            fix="name one with --model_name_or_path, e.g. HuggingFaceTB/SmolVLM-256M-Instruct.",
        )
    refuse_model_alone(parsed)
    _refuse_no_processor(parsed)
    refuse_stored_model(parsed)
    refuse_rows(parsed, rows_with="images")


def _refuse_no_processor(parsed: ParsedFlags) -> None:
    """Refuse a local folder without the processor that turns images into a model's inputs."""
    folder = Path(str(parsed.explicit["model_name_or_path"])).expanduser()
    if (folder / "config.json").is_file() and not any((folder / name).is_file() for name in PROCESSOR_FILES[:2]):
        raise no_processor(str(folder), parsed.place("model_name_or_path"))


def no_processor(name: str, place: str = "--model_name_or_path", why: str = "") -> ConfigError:
    """The error for a model without a processor for images."""
    return ConfigError(
        f"{name} has no processor for images{f' ({why})' if why else ''}.",
        place=place,
        fix=f"give a model that takes images, with {' or '.join(PROCESSOR_FILES[:2])} beside its weights.",
    )
