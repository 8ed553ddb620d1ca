"""A saved model or adapter: checked from its files alone, then loaded for generation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from accel_scale.errors import ConfigError
from accel_scale.launching.run_folder import ADAPTER_CONFIG
from accel_scale.modeling.quantization_record import read_quantization
from accel_scale.modeling.stored_weights import SafetensorsReader, local_folder, rows_of_embedding, stored_shapes
from accel_scale.starting.early_checks import check_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_PICKLES = ("pytorch_model*.bin", "adapter_model.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class SavedModel:
    """A saved model to load.

    Attributes:
        folder: Folder of the model or adapter.
        base: Folder of an adapter's base; None for a whole model.
    """

    folder: Path
    base: Path | None


def find_saved(name: str, *, base_model: str | None = None, place: str = "FOLDER") -> SavedModel:
    """Check a folder, or the files of a Hub id, without importing torch.

    Args:
        base_model: Overrides the base that an adapter names.
        place: Argument to name in errors.

    Raises:
        ConfigError: if there is no model, its weights are incomplete or not safetensors, or a base is missing.
    """
    check_model(name, place=place)
    folder = local_folder(str(Path(name).expanduser()) if Path(name).expanduser().exists() else name, place=place)
    if not (folder / ADAPTER_CONFIG).is_file():
        if base_model is not None:
            raise ConfigError(f"{name} is a whole model.", place="--base_model", fix="leave it out.")
        _require_weights(folder, "config.json", "model", place=place)
        _refuse_scores(folder / "config.json")
        return SavedModel(folder, None)
    _require_weights(folder, ADAPTER_CONFIG, "adapter_model", place=place)
    _refuse_scores(folder / ADAPTER_CONFIG)
    source, fix = str(folder / ADAPTER_CONFIG), "pass --base_model."
    named = base_model or _named_base(folder / ADAPTER_CONFIG)
    if not named:
        raise ConfigError("the adapter does not name its base.", place=source, fix=fix)
    base_place = "--base_model" if base_model else source
    try:
        check_model(named, place=base_place)
    except ConfigError as error:
        raise ConfigError(error.problem, place=base_place, fix=error.fix if base_model else fix) from None
    base = local_folder(named, place=base_place)
    _require_weights(base, "config.json", "model", place=base_place)
    return SavedModel(folder, base)


def _refuse_scores(path: Path) -> None:
    """Refuse the reward models that recipes/reward.py saves: they do not generate answers."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        kinds = [values.get("task_type"), *(values.get("architectures") or ())]
    except (ValueError, TypeError, AttributeError):
        return  # loading reports what is wrong
    if any(str(kind) == "SEQ_CLS" or str(kind).endswith("ForSequenceClassification") for kind in kinds):
        raise ConfigError(
            "a reward model gives rows a score and does not answer.",
            place=str(path),
            fix="load it with transformers' AutoModelForSequenceClassification.",
        )


def _named_base(path: Path) -> str | None:
    try:
        named = json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, TypeError, KeyError):
        return None
    return named if isinstance(named, str) else None


def _require_weights(folder: Path, config: str, stem: str, *, place: str) -> None:
    if not (folder / config).is_file():
        checkpoints = sorted((path.parent.name for path in folder.glob(f"*/{config}")), key=len)
        fix = f"name the checkpoint itself: {folder / checkpoints[-1]}." if checkpoints else "give the folder of one."
        raise ConfigError(f"there is no model in {folder}.", place=place, fix=fix)
    if stored_shapes(folder, stem):
        return
    pickles = next((path.name for pattern in _PICKLES for path in folder.glob(pattern)), None)
    problem = f"{pickles} is a pickle, which can run code when it is read." if pickles else "it holds no weights."
    fix = f"save the model again with save_pretrained, which writes {stem}.safetensors."
    raise ConfigError(problem, place=str(folder), fix=fix)


def load_saved(
    saved: SavedModel, *, device: torch.device | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer in the saved dtype. The base of a QLoRA adapter is quantised as in training.

    Args:
        device: Device for the model; None uses all available accelerators.

    Raises:
        ConfigError: if they cannot be loaded.
    """
    import torch

    from accel_scale.modeling.loading import load_model, load_tokenizer

    source = saved.base or saved.folder
    place: str | dict[str, torch.device] | None = "auto" if torch.accelerator.is_available() else None
    if device is not None and device.type != "cpu":
        place = {"": device}
    with _placed(source):
        model = load_model(
            str(source),
            dtype="auto",
            quantization_config=quantization_of_base(saved),
            device_map=place,
            use_safetensors=True,
        )
    if saved.base is not None:
        model = cast("PreTrainedModel", with_adapter(model, saved.folder))
    own = saved.base is None or (saved.folder / "tokenizer_config.json").is_file()
    tokenizer_folder = saved.folder if own else source
    tokenizer = load_tokenizer(str(tokenizer_folder), place=str(tokenizer_folder))
    return model.eval(), tokenizer


@contextmanager
def _placed(folder: Path) -> Iterator[None]:
    """Make errors name the folder instead of a recipe's flag."""
    try:
        yield
    except ConfigError as error:
        place = str(folder) if error.place == "--model_name_or_path" else error.place
        raise ConfigError(error.problem, place=place, fix=error.fix) from None


def quantization_of_base(saved: SavedModel) -> object | None:
    """bitsandbytes settings of the base in training; None for a whole model or an unquantised base."""
    values = None if saved.base is None else read_quantization(saved.folder)
    if values is None:
        return None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig.from_dict({name: value for name, value in values.items() if name != "base_dtype"})


def with_adapter(model: PreTrainedModel, adapter: Path) -> object:
    """Add the adapter to the base with PEFT, after resizing the base's vocabulary if it grew in training."""
    from peft import PeftModel

    num_rows = rows_of_embedding(SafetensorsReader(adapter, "adapter_model"))
    if num_rows not in (None, model.config.get_text_config().vocab_size):
        model.resize_token_embeddings(num_rows)
    return PeftModel.from_pretrained(model, str(adapter))
