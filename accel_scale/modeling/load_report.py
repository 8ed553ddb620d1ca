"""Check that a checkpoint holds exactly the model's weights; transformers' report is turned into one error."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MAX_LISTED = 3


def refuse_partial_load(
    model: PreTrainedModel,
    info: Mapping[str, Any],
    *,
    name: str,
    place: str,
    may_lack: Collection[str] = (),
    may_leave: Collection[str] = (),
) -> None:
    """Refuse a model with weights that the checkpoint lacks, or a checkpoint with weights that the model lacks.

    Weights that the model's class declares as optional do not count, nor does a head that is tied.

    Args:
        info: The second result of ``from_pretrained(output_loading_info=True)``.
        name: Name of the checkpoint.
        place: The setting that named it.
        may_lack: Weights of the model that may be missing in the checkpoint.
        may_leave: Weights of the checkpoint that may be missing in the model.

    Raises:
        ConfigError: with the number and the first names of the weights that do not match.
    """
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if _is_loaded_by_zero3():  # transformers does not check them there
        unexpected = _not_in_model(model, name)
    missing = [key for key in missing if key not in may_lack]
    unexpected = [key for key in unexpected if key not in may_leave]
    mismatched = sorted(info["mismatched_keys"])
    problems = []
    if missing:
        problems.append(f"{_count(missing, 'weight')} of the model {_are(missing)} not in it ({_some(missing)})")
    if unexpected:
        problems.append(
            f"{_count(unexpected, 'weight')} in it {_are(unexpected)} not in the model ({_some(unexpected)})"
        )
    if mismatched:
        shapes = [f"{key}: {list(stored)} in the file, {list(own)} in the model" for key, stored, own in mismatched]
        problems.append(
            f"{_count(shapes, 'weight')} {'has' if len(shapes) == 1 else 'have'} another shape ({_some(shapes)})"
        )
    if problems:
        raise ConfigError(
            f"the checkpoint {name!r} is not the model of its config.json: {'; '.join(problems)}.",
            place=place,
            fix="check the number of layers and the sizes in config.json, and that all of the weights are there.",
        )


def fit_of(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, Any]:
    """The same report from the names in a checkpoint's files alone; shapes are not compared."""
    from transformers.utils.loading_report import LoadStateDictInfo

    from accel_scale.modeling.checkpoint_names import StoredWeights

    names = list(stored)
    weights = StoredWeights(model, names)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    info = LoadStateDictInfo(
        missing_keys={name for name in model.state_dict() if not weights.names_for(name)} - tied,
        unexpected_keys={name for name in names if name not in weights.group_of},
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    # Checked on transformers 5.23; tests/unit/test_load_report.py fails if it changes.
    model._adjust_missing_and_unexpected_keys(info)
    return info.to_dict()


def _is_loaded_by_zero3() -> bool:
    from transformers.integrations import is_deepspeed_zero3_enabled

    return is_deepspeed_zero3_enabled()


def _not_in_model(model: PreTrainedModel, name: str) -> list[str]:
    from accel_scale.modeling.stored_weights import SafetensorsReader, local_folder

    try:
        reader = SafetensorsReader(local_folder(name, place="--model_name_or_path"))
    except ConfigError:  # formats other than safetensors
        return []
    return sorted(fit_of(model, reader.file_of)["unexpected_keys"])


def _count(items: list[str], what: str) -> str:
    return f"{len(items):,} {what}{'' if len(items) == 1 else 's'}"


def _are(items: list[str]) -> str:
    return "is" if len(items) == 1 else "are"


def _some(items: list[str]) -> str:
    return ", ".join(items[:_MAX_LISTED]) + (", …" if len(items) > _MAX_LISTED else "")
