"""Workloads of `sft_side_by_side.py`: models, rows and the hyperparameters that all contestants share."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Workload:
    """A model folder, a folder with train.jsonl and heldout.jsonl, and the hyperparameters all contestants share."""

    name: str
    description: str
    model: Path
    data: Path
    shared_flags: tuple[str, ...]
    our_flags: tuple[str, ...]
    tokens_per_step: int


def embedded_workload(folder: Path, num_rows: int | None) -> Workload:
    """The model and data inside the package; our recipe runs with its preset."""
    from accel_scale.data.default import (
        DEFAULT_TRAINING,
        DEFAULT_TRAINING_BF16,
        default_data_paths,
        default_model_path,
    )
    from accel_scale.launching.machine import detect_device

    data, model_path = folder / "embedded", folder / "embedded_model"
    shutil.copytree(default_model_path(), model_path)  # one copy for all, in case the package changes meanwhile
    for split, path in zip(("train", "heldout"), default_data_paths(), strict=True):
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        write_rows(data / f"{split}.jsonl", [{"messages": row["messages"]} for row in rows], num_rows or 600)
    preset = {**DEFAULT_TRAINING, **(DEFAULT_TRAINING_BF16 if detect_device("cpu").native_bf16 else {})}
    batch = {name: int(preset[name]) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")}
    length = int(preset["max_length"])
    shared = (
        f"--learning_rate={preset['learning_rate']}",
        f"--lr_scheduler_type={preset['lr_scheduler_type']}",
        f"--adam_beta2={preset['adam_beta2']}",
        "--warmup_steps=0.05",
        "--assistant_only_loss=True",
    )
    # With --dataset_name the preset is not applied, so the flags of its batch are given explicitly.
    ours = (*(f"--{name}={value}" for name, value in batch.items()), f"--max_length={length}")
    return Workload(
        name="embedded",
        description="the embedded base model (2.75 M parameters) and instruction data",
        model=model_path,
        data=data,
        shared_flags=shared,
        our_flags=ours,
        tokens_per_step=math.prod(batch.values()) * length,
    )


def gsm8k_workload(folder: Path, num_rows: int | None) -> Workload:
    """A random mid-size Llama on grade-school word problems; our recipe runs with its defaults."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from accel_scale.data.default import default_model_path

    source = REPOSITORY.parent / "shared" / "data" / "gsm8k"
    data, model_path = folder / "gsm8k", folder / "gsm8k_model"
    for split, name in (("train", "train"), ("heldout", "test")):
        rows = [json.loads(line) for line in (source / f"{name}.jsonl").read_text().splitlines()]
        pairs = [{"prompt": row["question"] + "\n", "completion": row["answer"]} for row in rows]
        write_rows(data / f"{split}.jsonl", pairs, num_rows or 300)
    tokenizer = AutoTokenizer.from_pretrained(default_model_path())
    tokenizer.save_pretrained(model_path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(model_path)
    return Workload(
        name="gsm8k",
        description="a random Llama (6.5 M parameters, vocabulary 8192) on GSM8K",
        model=model_path,
        data=data,
        shared_flags=("--learning_rate=1e-3", "--lr_scheduler_type=cosine", "--warmup_steps=0.05"),
        our_flags=("--min_lr_ratio=0",),  # TRL's cosine ends at zero
        tokens_per_step=8 * 1024,
    )


WORKLOADS = {"embedded": embedded_workload, "gsm8k": gsm8k_workload}


def write_rows(path: Path, rows: list[dict[str, Any]], num_rows: int | None) -> None:
    """Write `rows`, or the first `num_rows` of them, as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:num_rows]))


def document_lengths(workload: Workload, split: str = "train") -> list[int]:
    """Number of tokens in every document, as tokenized by all contestants."""
    return [len(ids) for ids, _ in tokenize(workload, split)]


def tokenize(workload: Workload, split: str) -> list[tuple[list[int], list[int]]]:
    """Token ids and loss mask of every document: chat template with assistant mask, or prompt and completion."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(workload.model)
    documents = []
    for line in (workload.data / f"{split}.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "messages" in row:
            encoded = tokenizer.apply_chat_template(
                row["messages"], return_dict=True, return_assistant_tokens_mask=True
            )
            documents.append((encoded["input_ids"], encoded["assistant_masks"]))
        else:
            prompt = tokenizer(row["prompt"])["input_ids"]
            ids = tokenizer(row["prompt"] + row["completion"] + tokenizer.eos_token)["input_ids"]
            documents.append((ids, [0] * len(prompt) + [1] * (len(ids) - len(prompt))))
    return documents
