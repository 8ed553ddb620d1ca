"""Merge a LoRA, rsLoRA, DoRA or QLoRA adapter into its base, one module and one shard in memory at a time."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.launching.run_folder import OutputFolder
from accel_scale.merging.files import ShardWriter
from accel_scale.merging.weights import AdapterMerger, dtype_of
from accel_scale.modeling.files import PROCESSOR_FILES
from accel_scale.modeling.quantization_record import QUANTIZATION_FILE, read_quantization
from accel_scale.modeling.stored_weights import local_folder
from accel_scale.training.checkpoints.staging import save_atomically
from accel_scale.units import parse_bytes

BASE_WEIGHTS = ("auto", "original", "dequantized")
QLORA_DEFAULTS: dict[str, Any] = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}
# Initialisations that change the base itself; the adapter alone does not record that change.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class MergeResult:
    """Summary of a merge; `check` says how the logits compare or why they were not compared."""

    base_model: str
    base_weights: str
    base_weights_reason: str
    num_merged_modules: int
    num_replaced_tensors: int
    num_shards: int
    total_bytes: int
    dtype: str
    check: str
    max_logit_diff: float | None


def merge_adapter(
    adapter: str | Path,
    output_dir: str | Path,
    *,
    base_model: str | None = None,
    dtype: str | None = None,
    max_shard_size: str | int = "2GB",
    base_weights: str = "auto",
    check: bool = True,
) -> MergeResult:
    """Write base + adapter as one ordinary model to `output_dir`.

    PEFT does the arithmetic in float32, one module at a time; at most about two output shards are in memory.

    Args:
        adapter: Folder with `adapter_config.json` and `adapter_model.safetensors`.
        base_model: Folder or Hub id; None uses the one named in `adapter_config.json`.
        dtype: Dtype of the result, e.g. ``bfloat16``; None uses the base's.
        max_shard_size: Largest file written, e.g. ``2GB``.
        base_weights: ``dequantized`` merges into the dequantised weights that a 4-bit base computes with, ``original``
            into the base as published; ``auto`` chooses ``dequantized`` if `quantization_config.json` next to the
            adapter says that it was trained on 4 bits.
        check: Compare the logits of the result with those of base + adapter, if they fit in memory.

    Raises:
        ConfigError: if adapter and base do not match, or the adapter is of an unsupported kind.
    """
    adapter = local_folder(str(adapter), place="ADAPTER")
    peft_config = _read_adapter_config(adapter)
    base_name = base_model or peft_config.base_model_name_or_path
    if not base_name:
        raise ConfigError(
            "the adapter does not name its base.", place=str(adapter / "adapter_config.json"), fix="pass --base_model."
        )
    base = local_folder(base_name, place="--base_model" if base_model else str(adapter / "adapter_config.json"))
    inputs = {"ADAPTER": [str(adapter)], "--base_model": [str(base)]}
    folder = OutputFolder(Path(output_dir), "accel-scale merge", inputs, made_of=str(adapter.resolve()))
    folder.check_writable()
    max_shard_bytes = parse_bytes(max_shard_size, place="--max_shard_size")
    quantization, reason = _quantization(adapter, base, base_weights)
    merger = AdapterMerger(base, adapter, peft_config, quantization, dtype)
    with save_atomically(output_dir) as staging:
        writer = ShardWriter(staging, max_shard_bytes)
        merger.write(writer)
        num_shards = writer.finish()
        _write_small_files(merger, adapter, base, staging)
        max_diff, outcome = None, "not asked for"
        if check:
            from accel_scale.merging.check import compare_logits

            max_diff, outcome = compare_logits(base, adapter, staging, quantization)
        folder.mark()
    return MergeResult(
        base_model=str(base_name),
        base_weights="dequantized" if quantization else "original",
        base_weights_reason=reason,
        num_merged_modules=len(merger.modules),
        num_replaced_tensors=len(merger.replaced),
        num_shards=num_shards,
        total_bytes=writer.total_bytes,
        dtype=str(merger.dtype).removeprefix("torch."),
        check=outcome,
        max_logit_diff=max_diff,
    )


def _read_adapter_config(adapter: Path) -> Any:
    from peft import PeftConfig, PeftType

    place = str(adapter / "adapter_config.json")
    if not Path(place).is_file():
        raise ConfigError("there is no adapter_config.json.", place=str(adapter), fix="give the adapter's folder.")
    config = PeftConfig.from_pretrained(str(adapter))
    if config.peft_type != PeftType.LORA:
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise ConfigError(
            f"{kind} adapters cannot be merged shard by shard.", place=place, fix="load with PEFT, merge_and_unload()."
        )
    init = str(config.init_lora_weights).lower()
    if init.startswith(_BASE_CHANGING_INITS):
        raise ConfigError(
            f"{init} initialisation changed the base, and the adapter does not hold that change.",
            place=place,
            fix="save it with path_initial_model_for_weight_conversion, which makes an ordinary LoRA of it.",
        )
    for setting in ("layer_replication", "alora_invocation_tokens"):
        if getattr(config, setting, None):
            raise ConfigError(
                f"adapters with {setting} cannot be merged shard by shard.",
                place=place,
                fix="load with PEFT and call merge_and_unload().",
            )
    return config


def _quantization(adapter: Path, base: Path, base_weights: str) -> tuple[dict[str, Any] | None, str]:
    """The 4-bit configuration to apply to the base, or None to leave it as published, and the reason."""
    if base_weights not in BASE_WEIGHTS:
        raise ConfigError(
            f"{base_weights!r} is unknown.", place="--base_weights", fix=f"choose from {', '.join(BASE_WEIGHTS)}."
        )
    recorded = read_quantization(adapter)
    if base_weights == "original":
        trained = "; the adapter was trained on 4 bits" if recorded else ""
        return None, f"weights as published, as asked{trained}"
    if recorded is None and base_weights == "auto":
        return None, f"weights as published; no {QUANTIZATION_FILE} beside the adapter"
    settings = recorded or QLORA_DEFAULTS
    # If not recorded: `from_pretrained` loads in the dtype that the base is stored in.
    settings = {"base_dtype": dtype_of(base), **settings}
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    why = "as in training" if recorded else "with double quantisation, as asked"
    return settings, f"weights dequantised from {kind}, {why}"


def _write_small_files(merger: AdapterMerger, adapter: Path, base: Path, folder: Path) -> None:
    """Write the configuration, the generation configuration, the tokenizer from training, and processor files."""
    from transformers import AutoTokenizer

    merger.config.dtype = merger.dtype
    for source in (adapter, base):
        if (source / "generation_config.json").is_file() and not merger.rewards:
            shutil.copy(source / "generation_config.json", folder)
            break
    for source in (adapter, base):
        if (source / "tokenizer_config.json").is_file():
            tokenizer = AutoTokenizer.from_pretrained(source)
            tokenizer.save_pretrained(folder)
            if merger.rewards:  # scores are read at the last token that is not padding
                merger.config.get_text_config().pad_token_id = tokenizer.pad_token_id
            break
    for source in (adapter, base):  # a model that takes images also has a processor
        if found := [source / name for name in PROCESSOR_FILES if (source / name).is_file()]:
            for file in found:
                shutil.copy(file, folder)
            break
    merger.config.save_pretrained(folder)
