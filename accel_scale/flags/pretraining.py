"""Flags of the pretraining recipe; shared flags are named as in transformers and the other recipe."""

from __future__ import annotations

from dataclasses import dataclass

from accel_scale.flags.common import PLANS, OptimizerArguments, SharedArguments, _flag
from accel_scale.flags.ddp import DdpArguments
from accel_scale.flags.trackers import TrackerArguments


@dataclass
class PretrainModelArguments:
    """The model to train: by one of the first three flags, else the embedded tiny one, from nothing."""

    model_name_or_path: str | None = _flag(None, "Continue training this model: a folder or a hub id.")
    model_config: str | None = _flag(None, "Train a model of this config.json (a file or its folder) from nothing.")
    num_params: str | None = _flag(
        None, "Train a Llama of about this size from nothing, e.g. 124M or 1.3B; its shape is chosen and printed."
    )
    tokenizer: str | None = _flag(
        None,
        "A folder or hub id; byte (256 tokens) or char (the characters of the data). Default: the model's own, or the "
        "one beside --model_config.",
    )
    train_tokenizer: bool = _flag(False, "Train a byte-level BPE tokenizer of --vocab_size on the data.")
    vocab_size: int = _flag(32768, "Tokens of a trained tokenizer.")
    model_revision: str = _flag("main", "Branch, tag or commit on the hub.")
    trust_remote_code: bool = _flag(False, "Run the model's own code from the hub.")
    attn_implementation: str | None = _flag(None, "Attention; default: the fastest that keeps documents apart.")
    torch_compile: bool | None = _flag(
        None,
        "Compile each layer with torch.compile. Default: a long run on a CPU whose documents are not "
        "isolated tries it, and keeps it if its steps get faster.",
    )
    method: str | None = _flag(
        None, "Train every weight, or LoRA adapters on --model_name_or_path. Default: full.", choices=("full", "lora")
    )
    lora_r: int = _flag(16, "Rank of the adapters.")
    lora_alpha: int = _flag(32, "Scale of the adapters: alpha ÷ rank.")
    lora_dropout: float = _flag(0.0, "Dropout before the adapters.")
    lora_target_modules: list[str] = _flag(["all-linear"], "Modules that get an adapter.")


@dataclass
class PretrainDataArguments:
    """The data to train on."""

    data: list[str] = _flag(
        [],
        "Files, folders, globs or hub ids (text, jsonl, parquet, arrow, or folders of `accel-scale prepare`), several "
        "with weights as shares of tokens: --data web=0.8 code=0.2. Default: the embedded text.",
    )
    text_column: str = _flag("text", "Column that holds the text.")
    text_documents: str = _flag(
        "file",
        "Unit of a document in a .txt file: the whole file, a line, or a paragraph.",
        choices=("file", "line", "paragraph"),
    )
    validation_data: list[str] = _flag([], "Held-out text, in the form of --data. Default: the end of each --data.")
    validation_share: float = _flag(0.01, "Share of each --data to hold out if there is no --validation_data.")
    max_length: int = _flag(1024, "Tokens per row.")
    isolate_documents: bool = _flag(True, "Attention does not cross documents that share a row.")
    dataloader_num_workers: int | None = _flag(
        None, "Processes that read and tokenise, for each rank. Default: from the cores; 0 for the embedded text."
    )


@dataclass
class PretrainArguments(SharedArguments, OptimizerArguments, TrackerArguments, DdpArguments):
    """How to train. `None`: the launch file, the device or another flag decides."""

    output_dir: str = _flag("outputs/pretrain", "Where checkpoints, logs and the model go.")
    seed: int = _flag(42, "Seed of initial weights, data order and dropout.")
    per_device_train_batch_size: int = _flag(8, "Rows per rank and forward pass (micro-batch).")
    max_steps: int = _flag(-1, "Optimizer steps.")
    max_tokens: str | None = _flag(None, "Tokens to train on, instead of --max_steps, e.g. 2.5B.")
    max_train_time: str | None = _flag(None, "Save and stop after this long, e.g. 90m or 11h30m.")
    optim_args: str | None = _flag(None, "Options of the optimizer: key=value,key=value.")
    learning_rate: float = _flag(6e-4, "Peak learning rate.")
    weight_decay: float = _flag(0.1, "Decay of matrices; norms, biases and embeddings have none.")
    adam_beta1: float = _flag(0.9, "Decay of the first moment.")
    adam_beta2: float = _flag(0.95, "Decay of the second moment.")
    adam_epsilon: float = _flag(1e-8, "Added to the root of the second moment.")
    max_grad_norm: float = _flag(1.0, "Clip gradients to this norm.")
    warmup_steps: float = _flag(0, "Warm-up in steps, instead of --warmup_ratio.")
    decay_from: str | None = _flag(
        None, "WSD: decay from this checkpoint of a stable phase, over --decay_steps; its folder is not changed."
    )
    decay_steps: int | None = _flag(None, "Length of the decay after --decay_from.")
    logging_steps: int = _flag(10, "Steps between lines of the log.")
    log_rows: bool = _flag(
        False, "Also log a checksum of each global batch's row ids, to compare the data order of runs."
    )
    eval_steps: int | None = _flag(None, "Steps between validations. Default: ten in a run; 0: only the last.")
    eval_rows: int = _flag(256, "Most rows of --max_length in a validation.")
    sample_prompt: str | None = _flag(
        None, "Text to continue at the end. Default: the beginning of the held-out text."
    )
    sample_tokens: int = _flag(64, "Tokens of that sample; 0 for none.")
    save_steps: int | None = _flag(None, "Steps between checkpoints. Default: ten in a run; 0: none.")
    keep_last: int = _flag(2, "Number of checkpoints to keep.")
    keep_every: int | None = _flag(None, "Never delete checkpoints at multiples of this step.")
    async_save: bool = _flag(False, "Write checkpoints while training continues, where the format allows it.")
    collective_timeout: str = _flag(
        "30m", "Longest wait of ranks for each other; then the run ends and names the rank that is missing."
    )
    resume: str = _flag(
        "auto", "auto: the newest good checkpoint in --output_dir; no: refuse to overwrite; or a path."
    )
    plan: str | None = _flag(
        None, "check: predict memory before loading, refuse what would not fit. Default: check on CUDA, else off.",
        choices=tuple(p for p in PLANS if p != "auto"),
    )  # fmt: skip
