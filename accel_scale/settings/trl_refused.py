"""Refuse TRL flags that do nothing in the fine-tuning recipe or mean something else, with the fix."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.data.chat import refuse_plain_rows
from accel_scale.data.loading import check_local_data
from accel_scale.errors import ConfigError
from accel_scale.facts.checkpointing import refuse_compiled_segments
from accel_scale.facts.names import RowsWith
from accel_scale.flags.paths import as_list, named_inputs
from accel_scale.flags.rewards import RewardArguments, check_rewards
from accel_scale.flags.trackers import refuse_unknown_trackers
from accel_scale.modeling.model_class import DROPOUTS
from accel_scale.modeling.precision import wanted_precision
from accel_scale.settings.method import refuse_idle_flags
from accel_scale.settings.preference_losses import refuse_losses
from accel_scale.settings.stored_model import refuse_stored_model
from accel_scale.settings.vllm_flags import refuse_vllm_flags

if TYPE_CHECKING:
    from accel_scale.flags.parsing import ParsedFlags

# Options that the recipe sets itself when it loads a model → the flag for them.
_HAS_A_FLAG = {
    "attn_implementation": "--attn_implementation",
    "device_map": None,
    "dtype": "--precision or --dtype",
    "quantization_config": "--method qlora, --load_in_4bit or --load_in_8bit",
    "revision": "--model_revision",
    "torch_dtype": "--precision or --dtype",
    "trust_remote_code": "--trust_remote_code",
}


def refuse_trl_flags(values: Mapping[str, Any], place: Callable[[str], str], *, device_type: str) -> None:
    """Refuse flags that would be ignored, or crash after the model is loaded.

    Args:
        values: Flag → value, for flags that are set.
        place: Flag → where it was set.

    Raises:
        ConfigError: for the first that is found.
    """
    for name in keys_of(values.get("model_init_kwargs"), place("model_init_kwargs")):
        if name in _HAS_A_FLAG:
            flag = _HAS_A_FLAG[name]
            raise ConfigError(
                f"{name} is not for model_init_kwargs.",
                place=place("model_init_kwargs"),
                fix=f"use {flag}." if flag else "remove it: the launch file says where weights go.",
            )
        if name in DROPOUTS and values.get("model_dropout") is not None:
            raise ConfigError(
                f"--model_dropout and {name} both say how much is dropped.",
                place=place("model_init_kwargs"),
                fix="keep one of them.",
            )
    if values.get("dataset_text_field", "text") != "text":
        field = values["dataset_text_field"]
        raise ConfigError(
            f"columns are named by --columns, so dataset_text_field {field} would be ignored.",
            place=place("dataset_text_field"),
            fix=f"use --columns text={field}.",
        )
    if values.get("activation_offloading") and device_type == "cpu":
        raise ConfigError(
            "activations on a CPU are in host memory already.", place=place("activation_offloading"), fix="remove it."
        )
    for name in ("lr_scheduler_kwargs", "dataset_kwargs"):
        keys_of(values.get(name), place(name))


def flag_of_whole_logits(values: Mapping[str, Any]) -> str | None:
    """The flag whose loss needs all logits at once, as all of TRL's losses but the plain one do; None if none does."""
    if values.get("loss_type") not in (None, "nll", "chunked_nll"):
        return "loss_type"
    return "label_smoothing_factor" if values.get("label_smoothing_factor") else None


def refuse_contradictions(parsed: ParsedFlags) -> None:
    """Refuse flags of the fine-tuning recipe that cannot work together, whatever the launch and the machine.

    Raises:
        ConfigError: for the first that is found.
    """
    refuse_settings(parsed)
    refuse_model_alone(parsed)
    refuse_stored_model(parsed)
    refuse_rows(parsed)


def refuse_rows(parsed: ParsedFlags, *, rows_with: RowsWith | None = None) -> None:
    """Refuse local files of rows that cannot be trained on; a rehearsal replaces files that are not here.

    Raises:
        ConfigError: for the first that is found.
    """
    given = parsed.explicit
    named = named_inputs(lambda flag: as_list(given.get(flag)))
    names = [name for flag in ("dataset_name", "dataset_mixture") for name in named.get(flag, ())]
    if names and all(Path(name).expanduser().exists() for name in names):
        evaluates = str(given.get("eval_strategy", "no")) != "no"
        layouts = check_local_data(
            given.get("dataset_name"),
            split=given.get("dataset_train_split") or "train",
            test_split=(given.get("dataset_test_split") or "test") if evaluates else None,
            columns=given.get("columns") or (),
            mixture=given.get("dataset_mixture") or (),
            rows_with=rows_with,
            on_bad_row=given.get("on_bad_row") or "error",
        )
        if given.get("assistant_only_loss") and layouts and not any(layout.conversational for layout in layouts):
            refuse_plain_rows(parsed.place("assistant_only_loss"))


def refuse_model_alone(parsed: ParsedFlags) -> None:
    """Refuse a model without data to train it on.

    Raises:
        ConfigError: if there is no data.
    """
    given = parsed.explicit
    if given.get("model_name_or_path") and not (given.get("dataset_name") or given.get("dataset_mixture")):
        raise ConfigError(
            "a model is given but nothing to train it on.",
            place=parsed.place("model_name_or_path"),
            fix="add --dataset_name with a hub id, a file or a folder.",
        )


def refuse_dpo(parsed: ParsedFlags) -> None:
    """`refuse_contradictions` for recipes/dpo.py, plus flags that TRL or the planner does not support for pairs.

    Raises:
        ConfigError: for the first that is found.
    """
    refuse_settings(parsed)
    given = parsed.explicit
    refused = {
        "padding_free": "TRL pads pairs all the same",
        "long_rows": "the log-probabilities of a pair are not computed in tiles",
    }
    for name, why in refused.items():
        if given.get(name):
            raise ConfigError(f"{why}.", place=parsed.place(name), fix="remove it.")
    refuse_losses(parsed)
    _refuse_reference(parsed)
    refuse_model_alone(parsed)
    refuse_stored_model(parsed)
    refuse_rows(parsed, rows_with="pairs")


def _refuse_reference(parsed: ParsedFlags) -> None:
    given = parsed.explicit
    for name in ("sync_ref_model", "dataset_streaming"):
        if given.get("precompute_ref_log_probs") and given.get(name):
            raise ConfigError(
                f"--precompute_ref_log_probs and --{name} exclude each other.",
                place=parsed.place(name),
                fix="keep one.",
            )


def refuse_kto(parsed: ParsedFlags) -> None:
    """`refuse_contradictions` for recipes/kto.py, plus flags that its KL term and labelled answers do not allow.

    The KL term is estimated on the prompts of a micro-batch, each with the answer of another row.

    Raises:
        ConfigError: for the first that is found.
    """
    refuse_settings(parsed)
    given = parsed.explicit
    has_kl = given.get("loss_type", "kto") == "kto"
    refused = {
        "long_rows": (bool(given.get("long_rows")), "log-probabilities are not computed in tiles", "remove it"),
        "per_device_train_batch_size": (
            has_kl and given.get("per_device_train_batch_size") == 1,
            "a row alone has no other answer to estimate the KL term with",
            "use 2 or more, or --loss_type apo_zero_unpaired",
        ),
        "train_sampling_strategy": (
            has_kl and given.get("train_sampling_strategy", "sequential") != "sequential",
            "rows of a micro-batch are each other's in the KL term before training, so their order is the data's",
            "remove it, and shuffle the rows of the file, or use --loss_type apo_zero_unpaired",
        ),
        "auto_find_batch_size": (
            has_kl and bool(given.get("auto_find_batch_size")),
            "the KL term belongs to micro-batches of one size",
            "remove it",
        ),
    }
    for name, (is_refused, why, fix) in refused.items():
        if is_refused:
            raise ConfigError(f"{why}.", place=parsed.place(name), fix=f"{fix}.")
    _refuse_reference(parsed)
    refuse_model_alone(parsed)
    refuse_stored_model(parsed)
    refuse_rows(parsed, rows_with="labels")


def refuse_grpo(parsed: ParsedFlags) -> None:
    """`refuse_contradictions` for recipes/grpo.py and rloo.py, plus flags that generation does not support.

    Raises:
        ConfigError: for the first that is found.
    """
    refuse_settings(parsed)
    given = parsed.explicit
    for name in ("generation_batch_size", "steps_per_generation"):
        if given.get("plan") == "auto" and given.get(name):
            raise ConfigError(
                "--plan auto writes all answers of a step at the same time.",
                place=parsed.place(name),
                fix="remove it, or use --plan check.",
            )
    refused = {
        "long_rows": "the log-probabilities of completions are not computed in tiles",
        "dataset_streaming": "prompts are repeated within a batch, by their numbers",
        "log_completions": "completions are printed by one process among its lines of progress",
        "auto_find_batch_size": "groups of completions must stay whole",
    }
    for name, why in refused.items():
        if given.get(name):
            raise ConfigError(f"{why}.", place=parsed.place(name), fix="remove it.")
    refuse_vllm_flags(parsed)
    check_rewards(given.get("rewards") or RewardArguments().rewards, given.get("reward_weights"))
    clip = given.get("reward_clip_range")
    if clip is not None and not (len(clip) == 2 and clip[0] < clip[1]):
        raise ConfigError(
            f"{' '.join(f'{end:g}' for end in clip)} is no range.",
            place=parsed.place("reward_clip_range"),
            fix="give a smaller number and a larger one, e.g. -1 1.",
        )
    if given.get("model_name_or_path") is None:
        raise ConfigError(
            "rewards need a model that answers already.",
            place="command line",
            fix="name --model_name_or_path, e.g. the --output_dir of recipes/sft.py.",
        )
    refuse_stored_model(parsed)
    refuse_rows(parsed)


def refuse_reward(parsed: ParsedFlags) -> None:
    """`refuse_contradictions` for recipes/reward.py, plus flags that scored rows do not support.

    Raises:
        ConfigError: for the first that is found.
    """
    refuse_settings(parsed)
    given = parsed.explicit
    template, saved = str(given.get("chat_template_path") or ""), given.get("lora_modules_to_save") or ()
    refused = {
        "long_rows": (bool(given.get("long_rows")), "scored rows are not computed in tiles", "remove it"),
        "exact_match_samples": (
            bool(given.get("exact_match_samples")),
            "a reward model answers no questions",
            "remove it; --eval_strategy and --eval_on_start report the share of pairs that it ranks",
        ),
        "pad_token": (given.get("pad_token") is not None, "TRL gives it up", "set it in the tokenizer's files"),
        "chat_template_path": (
            bool(template) and not template.endswith((".jinja", ".j2")),
            "a template that brings tokens along would need embeddings of its own",
            "name a .jinja file",
        ),
        "lora_modules_to_save": ("lm_head" in saved, "a reward model has no lm_head", "remove it"),
    }
    for name, (is_refused, why, fix) in refused.items():
        if is_refused:
            raise ConfigError(f"{why}.", place=parsed.place(name), fix=f"{fix}.")
    refuse_model_alone(parsed)
    refuse_stored_model(parsed, rewards=True)
    refuse_rows(parsed, rows_with="pairs")


def refuse_settings(parsed: ParsedFlags) -> None:
    """Refuse flags that cannot work together in any recipe with TRL's trainers.

    Raises:
        ConfigError: for the first that is found.
    """
    given = parsed.explicit
    refuse_trl_flags(given, parsed.place, device_type="not known yet")
    refuse_unknown_trackers(given.get("report_to"), place=parsed.place("report_to"), in_trainer=True)
    refuse_idle_flags(parsed)
    refuse_compiled_segments(given, parsed.place)
    if given.get("eval_on_start") and str(given.get("eval_strategy") or "no") == "no":
        raise ConfigError(
            "nothing is evaluated.", place=parsed.place("eval_on_start"), fix="add --eval_strategy steps or epoch."
        )
    precision, fp16, bf16, dtype = (given.get(name) for name in ("precision", "fp16", "bf16", "dtype"))
    wanted_precision(precision, fp16, bf16, dtype, False, parsed.place)


def keys_of(given: Any, place: str) -> list[str]:
    """The keys of a flag that takes a JSON object; none if it is not set."""
    if given is None:
        return []
    try:
        found = json.loads(given) if isinstance(given, str) else dict(given)
        return list(found.keys())
    except (ValueError, AttributeError, TypeError):
        raise ConfigError(f"{given!r} is not a JSON object.", place=place, fix='write e.g. {"key": 1}.') from None
