"""The pretraining recipe's tokenizer and model: loaded, trained, or with random weights."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError
from accel_scale.flags.pretraining import PretrainDataArguments, PretrainModelArguments
from accel_scale.modeling.scratch import config_from_file, config_of_size, model_from_nothing, parse_count
from accel_scale.parallel.mapped_weights import fits_on_each

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from accel_scale.data.pretraining.opened import PretrainingData
    from accel_scale.launching.environment import LaunchEnvironment
    from accel_scale.modeling.precision import Precision
    from accel_scale.parallel.layout import ParallelLayout
    from accel_scale.pretraining.run import Run

_BUILT_IN = ("byte", "char")
_ALL_BYTES = 2**62
TOKENIZER_FOLDER = "tokenizer"


def run_tokenizer(
    model_args: PretrainModelArguments, data_args: PretrainDataArguments, output_dir: str, *, default: str
) -> PreTrainedTokenizerBase:
    """The run's tokenizer. One created from the data is stored in the output folder and reused from there.

    Args:
        model_args, data_args: The recipe's flags.
        output_dir: Folder of the run.
        default: Folder of the embedded tokenizer, for the embedded model.

    Raises:
        ConfigError: if there is no tokenizer, or the stored one is not the requested one.
    """
    from accel_scale.data.pretraining.sampling import sample_texts
    from accel_scale.data.pretraining.tokenizers import load_pretraining_tokenizer, train_tokenizer
    from accel_scale.modeling.loading import load_tokenizer

    name = model_args.tokenizer
    if not model_args.train_tokenizer and name not in _BUILT_IN:
        beside = model_args.model_config and str(_folder_of(model_args.model_config))
        found = name or model_args.model_name_or_path or beside or default
        place = "--tokenizer" if name else "--model_config" if beside else "--model_name_or_path"
        return load_tokenizer(
            str(found),
            revision=model_args.model_revision,
            trust_remote_code=model_args.trust_remote_code,
            place=place,
        )
    kept = Path(output_dir) / TOKENIZER_FOLDER
    if kept.is_dir() and (name == "char" or model_args.train_tokenizer):
        tokenizer = load_tokenizer(str(kept))
        _check_kept(tokenizer, model_args, kept)
        return tokenizer
    if name == "byte":
        return load_pretraining_tokenizer("byte")
    texts = sample_texts(
        data_args.data,
        text_column=data_args.text_column,
        text_documents=data_args.text_documents,
        **({"max_bytes": _ALL_BYTES} if name == "char" else {}),
    )
    if name == "char":
        tokenizer = load_pretraining_tokenizer("char", texts=texts)
    else:
        tokenizer = train_tokenizer(texts, model_args.vocab_size)
    tokenizer.save_pretrained(kept)
    return tokenizer


def _check_kept(tokenizer: PreTrainedTokenizerBase, model_args: PretrainModelArguments, folder: Path) -> None:
    if model_args.train_tokenizer and len(tokenizer) > model_args.vocab_size:
        raise ConfigError(
            f"{folder} holds a tokenizer of {len(tokenizer):,} tokens from an earlier run.",
            place="--vocab_size",
            fix="use another --output_dir, or remove that folder.",
        )


def _folder_of(config: str) -> Path:
    path = Path(config).expanduser()
    return path if path.is_dir() else path.parent


def open_data(data_args: PretrainDataArguments, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> PretrainingData:
    """Open the run's text according to the flags."""
    from accel_scale.data.pretraining.opening import open_pretraining_data

    return open_pretraining_data(
        data_args.data,
        tokenizer=tokenizer,
        row_length=data_args.max_length,
        seed=seed,
        text_column=data_args.text_column,
        text_documents=data_args.text_documents,
        validation_data=data_args.validation_data or None,
        validation_share=0.0 if data_args.validation_data else data_args.validation_share,
        isolate_documents=data_args.isolate_documents,
    )


def run_config(
    model_args: PretrainModelArguments,
    max_length: int,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dropout: float | None = None,
) -> PreTrainedConfig:
    """The model's configuration: from a model, a config.json, a size, or the embedded model.

    `dropout` is set wherever the model has a dropout; None leaves it as it is.

    Raises:
        ConfigError: if it cannot be read, or does not support rows of `max_length` tokens.
    """
    from accel_scale.data.default import default_model_path
    from accel_scale.modeling.files import check_model_files, check_row_length
    from accel_scale.modeling.loading import load_config
    from accel_scale.modeling.model_class import set_dropout

    if model_args.model_name_or_path:
        config = load_config(
            model_args.model_name_or_path,
            revision=model_args.model_revision,
            trust_remote_code=model_args.trust_remote_code,
        )
    elif model_args.model_config:
        config = config_from_file(
            model_args.model_config, tokenizer=tokenizer, trust_remote_code=model_args.trust_remote_code
        )
    elif model_args.num_params:
        size = parse_count(model_args.num_params, place="--num_params")
        config = config_of_size(size, vocab_size=len(tokenizer), max_length=max_length, tokenizer=tokenizer)
    else:
        config = load_config(default_model_path())
        config.name_or_path, config.dtype = "", None  # the embedded model's shape, not its weights
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    check_row_length(config, max_length)
    if dropout is not None:
        set_dropout(config, dropout)
    if model_args.model_name_or_path:
        check_model_files(model_args.model_name_or_path, config, tokenizer)
    return config


def build_model(
    model_args: PretrainModelArguments,
    config: PreTrainedConfig,
    precision: Precision,
    attention: str,
    *,
    seed: int,
    launch: LaunchEnvironment,
    layout: ParallelLayout,
) -> PreTrainedModel:
    """The model on the host, its weights loaded or drawn from `seed`; built once per server if ranks share it."""

    def build() -> PreTrainedModel:
        return _own_model(model_args, config, precision, attention, seed=seed, launch=launch)

    if layout.is_plain or launch.local_world_size == 1:
        return build()
    from accel_scale.modeling.loading import skeleton_of
    from accel_scale.parallel.mapped_weights import build_once_per_server

    def skeleton() -> PreTrainedModel:
        return skeleton_of(config, attention, trust_remote_code=model_args.trust_remote_code)

    num_params = skeleton().num_parameters()
    return build_once_per_server(
        build,
        skeleton,
        local_rank=launch.local_rank,
        num_bytes=4 * num_params,
        fits_on_each=fits_on_each(num_params, launch.local_world_size),
    )


def _own_model(
    model_args: PretrainModelArguments,
    config: PreTrainedConfig,
    precision: Precision,
    attention: str,
    *,
    seed: int,
    launch: LaunchEnvironment,
) -> PreTrainedModel:
    """Build the model on this rank's host.

    Under ZeRO-3 loaded weights are partitioned as they arrive. Random weights are drawn whole if the host has room for
    them on each of its ranks, so that every strategy starts with the same weights.
    """
    from transformers import set_seed

    from accel_scale.modeling.loading import load_model, plain_loading, skeleton_of
    from accel_scale.modeling.model_class import dropouts_of

    dtype = precision.frozen_dtype if model_args.method == "lora" else precision.model_dtype
    if not model_args.model_name_or_path:
        fits = fits_on_each(skeleton_of(config).num_parameters(), launch.local_world_size)
        context = plain_loading() if fits else contextlib.nullcontext()
        with context:
            return model_from_nothing(config, dtype=dtype, attention=attention, seed=seed)
    set_seed(seed)  # for adapters and dropout
    return load_model(
        model_args.model_name_or_path,
        dtype=dtype,
        attn_implementation=attention,
        revision=model_args.model_revision,
        trust_remote_code=model_args.trust_remote_code,
        **dropouts_of(config),  # type: ignore[arg-type]  # none of them is called like a parameter
    )


def num_workers(
    data_args: PretrainDataArguments, launch: LaunchEnvironment, *, device_type: str, embedded: bool
) -> int:
    """Number of worker processes of each rank's loader: as set, or derived from the cores."""
    from accel_scale.data.loaders import loader_settings

    if data_args.dataloader_num_workers is not None:
        return data_args.dataloader_num_workers
    rows = 1 if embedded else None
    settings = loader_settings(device_type=device_type, num_rows=rows, processes_on_node=launch.local_world_size)
    return int(settings["dataloader_num_workers"])


def open_batches(run: Run, position: Mapping[str, object] | None) -> None:
    """Open the endless batches, starting from `position`, and the held-out rows."""
    rank = {"rank": run.layout.data_rank(run.launch.rank), "world_size": run.layout.data_ranks}
    device_type, micro = run.accelerator.device.type, run.args.per_device_train_batch_size
    run.batches = run.data.train_loader(
        global_batch_size=run.settings.global_batch_size,
        micro_batch_size=micro,
        num_workers=num_workers(run.data_args, run.launch, device_type=device_type, embedded=run.embedded),
        state=position,
        pin_memory=device_type == "cuda",
        **rank,
    )
    if run.data.has_validation:
        run.held_out = run.data.validation_loader(micro_batch_size=micro, max_rows=run.args.eval_rows, **rank)
