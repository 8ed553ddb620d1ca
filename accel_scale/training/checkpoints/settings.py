"""Settings that define a run: recorded with every checkpoint, and compared when a run continues from one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.modeling.model_class import numbers_of_layers

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig

# Flags and arguments of recipes, transformers and TRL that change what is learned. Others are left out: how many ranks
# and micro-batches a global batch is split into, logging and saving, data loader processes.
MEANING = (
    "method", "precision", "global_batch_size", "seed", "data_seed", "model_revision",
    # data
    "dataset_config", "dataset_train_split", "dataset_mixture", "columns", "on_bad_row", "max_length", "packing",
    "packing_strategy", "padding_free", "isolate_documents", "completion_only_loss", "assistant_only_loss",
    "truncation_mode",
    "chat_template_path", "eos_token", "train_sampling_strategy", "validation_share", "text_column",
    "text_documents", "train_tokenizer", "vocab_size", "shuffle_dataset", "max_prompt_length",
    "max_completion_length",
    # model and adapters
    "num_params", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant",
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save",
    "use_rslora", "use_dora", "model_dropout",
    # optimizer and schedule
    "optim", "optim_args", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "max_grad_norm", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "min_lr_ratio",
    "decay_ratio", "decay_shape", "decay_from",
    # loss
    "loss_type", "label_smoothing_factor", "neftune_noise_alpha", "average_tokens_across_devices", "beta",
    "num_generations", "temperature", "desirable_weight", "undesirable_weight", "loss_weights", "label_smoothing",
    "f_divergence_type", "f_alpha_divergence_coef", "discopop_tau", "ld_alpha", "use_weighting", "sync_ref_model",
    "ref_model_mixup_alpha", "ref_model_sync_steps", "disable_dropout", "center_rewards_coefficient",
    "router_aux_loss_coef",
    # answers and their rewards
    "rewards", "reward_weights", "multi_objective_aggregation", "scale_rewards", "normalize_advantages",
    "reward_clip_range", "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "chat_template_kwargs",
    "num_iterations", "epsilon", "epsilon_high", "delta", "importance_sampling_level", "mask_truncated_completions",
    "off_policy_mask_threshold", "use_bias_correction_kl", "top_entropy_quantile", "entropy_coef",
    "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target",
    "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
    "vespo_lambda_neg",
)  # fmt: skip
# Choices that a run may have made itself and keeps when it resumes; changing them does not make it another run.
KEPT = ("checkpointing_policy", "fused_kernels")
ALLOW_FLAG = "--allow_changed_settings"
_HASHED_BYTES = 256 * 2**20
_SAMPLED_ROWS, _STREAMED_ROWS, _ENDS_BYTES = 256, 8, 2**16
# Schedules that do not depend on the number of steps.
_ENDLESS = ("constant", "constant_with_warmup")
_SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_local_experts", "num_experts", "n_embd", "n_layer", "n_head",
)  # fmt: skip


def meaning_of(*sources: object, **more: object) -> dict[str, Any]:
    """Collect the values of `MEANING` and `KEPT` from `sources` (flags by name, or objects with them); `more` wins."""
    found: dict[str, Any] = {}
    for source in sources:
        values = source if isinstance(source, Mapping) else vars(source)
        found |= {name: _plain(values[name]) for name in (*MEANING, *KEPT) if name in values and name not in found}
    if more.get("method") == "full":
        found = {
            name: value for name, value in found.items() if not name.startswith(("lora_", "use_rslora", "use_dora"))
        }
    if more.get("length", "") is None:
        del more["length"]  # not compared
    return {**found, **{name: _plain(value) for name, value in more.items()}}


def with_defaults(values: Mapping[str, Any], classes: Iterable[type]) -> dict[str, Any]:
    """`values` of flags, plus the defaults of the flags of `classes` that are missing."""
    defaults: dict[str, Any] = {}
    for cls in classes:
        for flag in fields(cls):  # type: ignore[arg-type]
            made = flag.default_factory() if flag.default_factory is not MISSING else flag.default
            defaults[flag.name] = None if made is MISSING else made
    return {**defaults, **values}


def schedule_length(schedule: str, steps: int, epochs: float, *, limited_by_time: bool = False) -> str | None:
    """Length of the schedule; None if it does not depend on a length, or the clock decides."""
    if schedule in _ENDLESS or limited_by_time:
        return None
    return f"{steps} steps" if steps > 0 else f"{epochs:g} epochs"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One text for each setting in both records that differs: ``learning_rate 0.0002 → 0.0001``."""
    one, other = _flat(before), _flat(json.loads(json.dumps(now)))
    changed = [name for name in one if name in other and one[name] != other[name] and name not in KEPT]
    return [f"{name} {_shown(one[name])} → {_shown(other[name])}" for name in changed]


def refuse_changes(
    folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], *, place: str, allow: str = ALLOW_FLAG
) -> None:
    """Refuse to continue from `folder` with settings that would make it another run.

    Raises:
        ConfigError: naming every changed setting with its old and new value.
    """
    changed = differences(before, now)
    if len(changed) == 1 and changed[0].startswith("global_batch_size "):  # as on another number of ranks
        allow = f"{allow}; --global_batch_size {before['global_batch_size']} keeps the batch on these ranks"
    if changed:
        raise ConfigError(
            f"{folder} was saved with other settings: {', '.join(changed)}.",
            place=place,
            fix=f"restore the old values, start over in another output folder, or allow it with {allow}.",
        )


def model_record(config: PreTrainedConfig, name: str | None) -> dict[str, Any]:
    """The architecture's dimensions, and the weights that training started from."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    numbers = {field: found for field in _SHAPE if (found := numbers_of_layers(text, field))}
    shape = {field: found[0] if len(found) == 1 else found for field, found in numbers.items()}
    vocabulary = getattr(text, "vocab_size", None)
    record = {"type": getattr(config, "model_type", type(config).__name__), **shape, "vocabulary": vocabulary}
    return {**record, "weights": _weights_name(name)} if name else record


def _weights_name(name: str) -> str:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return name
    kept = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin") or path.name == "config.json"]
    return f"files {files_fingerprint(kept)}"  # wherever they are


def files_fingerprint(paths: Iterable[Path]) -> str:
    """Fingerprint of names, sizes, beginnings and ends, so that it is fast at any size."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(paths, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            digest.update(file.read(_ENDS_BYTES))
            file.seek(max(0, size - _ENDS_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


def rows_fingerprint(dataset: Dataset) -> str:
    """Number of rows and a checksum: over all rows if small, a sample if large, the first rows of a stream."""
    from datasets import Dataset, IterableDataset

    digest = hashlib.blake2b(digest_size=8)
    if isinstance(dataset, Dataset) and (dataset.data.nbytes or 0) <= _HASHED_BYTES:
        for batch in dataset.with_format("arrow").iter(1000):
            _add_table(digest, batch)
        return f"{len(dataset)} rows {digest.hexdigest()}"
    if isinstance(dataset, IterableDataset):
        for row in dataset.take(_STREAMED_ROWS):
            digest.update(repr(sorted(row.items())).encode())
        return f"stream {digest.hexdigest()}"
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return "rows that cannot be read twice"
    step = max(1, len(dataset) // _SAMPLED_ROWS)
    for index in range(0, len(dataset), step):
        digest.update(_row_text(dataset[index]).encode())
    return f"{len(dataset)} rows {digest.hexdigest()}"


def _add_table(digest: Any, table: Any) -> None:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    plain = table.replace_schema_metadata(None).combine_chunks()
    with pa.ipc.new_stream(sink, plain.schema) as writer:
        writer.write_table(plain)
    digest.update(sink.getvalue())


def _row_text(row: object) -> str:
    import torch

    if isinstance(row, torch.Tensor):
        return repr(row.tolist())
    if isinstance(row, Mapping):
        return repr([(key, _row_text(row[key])) for key in sorted(row)])
    return repr([_row_text(item) for item in row]) if isinstance(row, (list, tuple)) else repr(row)


def _plain(value: object) -> Any:
    """Return `value` as it would come back from JSON."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(_shown, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
