"""The embedded default: a tiny base model and instruction data with checkable answers, offline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from datasets import Dataset

# Defaults of the recipe's flags on the embedded data; measured, see the assets' README.
DEFAULT_TRAINING = MappingProxyType(
    {
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0.05,
        "adam_beta2": 0.95,
        # In fp32, two micro-batches of two rows are as fast as one of four and hold a third less memory.
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_length": 512,
        "packing": True,
        "assistant_only_loss": True,
        "num_train_epochs": 2.0,
        "precision": "bf16",
        "checkpointing_policy": "none",
        "logging_steps": 20,
        "save_strategy": "no",
    }
)
# Differences where hardware computes bf16: larger products are faster there, by a quarter or more.
DEFAULT_TRAINING_BF16 = MappingProxyType({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1})

# Defaults of the pretraining recipe's flags on the embedded text.
DEFAULT_PRETRAINING = MappingProxyType(
    {
        "learning_rate": 3e-3,
        "lr_scheduler_type": "wsd",
        "decay_ratio": 0.5,
        "decay_shape": "linear",
        "weight_decay": 0.0,
        "per_device_train_batch_size": 16,
        "max_length": 128,
        "max_steps": 400,
        "precision": "bf16",
        "checkpointing_policy": "none",
        "logging_steps": 10,
        "save_steps": 0,
    }
)

# Defaults of the flags of recipes/dpo.py on the embedded pairs. The base model has not been tuned to answer yet, so
# the likelihood of the better answer is trained along with the preference (RPO: Pang et al. 2024, section 2).
DEFAULT_PREFERENCES = MappingProxyType(
    {
        "loss_type": ["sigmoid", "sft"],
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0.05,
        "adam_beta2": 0.95,
        "per_device_train_batch_size": 16,
        "max_length": 128,
        "max_steps": 300,
        "precision": "bf16",
        "checkpointing_policy": "none",
        "logging_steps": 20,
        "save_strategy": "no",
    }
)

# Defaults of the flags of recipes/kto.py on the embedded answers. Wrong answers weigh little: the base model has not
# been tuned to answer yet, and with equal weights it unlearns that (no held-out question is right afterwards).
DEFAULT_LABELS = MappingProxyType(
    {
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0.05,
        "adam_beta2": 0.95,
        "undesirable_weight": 0.1,
        "per_device_train_batch_size": 32,
        "max_length": 128,
        "max_steps": 200,
        "precision": "fp32",  # TRL sums log-probabilities in the run's precision
        "checkpointing_policy": "none",
        "logging_steps": 20,
        "save_strategy": "no",
    }
)

# Defaults of the flags of recipes/grpo.py on the embedded questions.
DEFAULT_REWARDING = MappingProxyType(
    {
        "learning_rate": 5e-4,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0.1,
        "adam_beta2": 0.95,
        "per_device_train_batch_size": 64,
        "num_generations": 16,
        "max_completion_length": 16,
        "temperature": 0.4,
        "max_steps": 200,
        "precision": "bf16",
        "checkpointing_policy": "none",
        "logging_steps": 10,
        "save_strategy": "no",
    }
)


# Defaults of the flags of recipes/reward.py on the embedded pairs: the held-out pairs are ranked before the first step
# and after the last.
DEFAULT_SCORING = MappingProxyType(
    {
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0.05,
        "adam_beta2": 0.95,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 50,
        "max_length": 128,
        "max_steps": 100,
        "precision": "bf16",
        "checkpointing_policy": "none",
        "logging_steps": 10,
        "eval_strategy": "steps",
        "eval_steps": 100,
        "eval_on_start": True,
        "save_strategy": "no",
    }
)


def default_model_path() -> str:
    """Folder of the embedded base model and tokenizer, for `from_pretrained`."""
    return str(files("accel_scale.assets").joinpath("default", "model"))


def default_data_paths() -> tuple[str, str]:
    """Paths of the training rows and of the held-out questions (JSON lines)."""
    folder = files("accel_scale.assets").joinpath("default", "data")
    return str(folder.joinpath("train.jsonl")), str(folder.joinpath("heldout.jsonl"))


def default_dataset() -> tuple[Dataset, Dataset]:
    """Training rows and held-out questions: ``messages``, ``answer``, ``task`` and ``wording`` (seen or new).

    Any prefix is balanced over the tasks; no held-out problem occurs in the training rows or in the base model's text.
    """
    import json

    from datasets import Dataset

    def read(path: str) -> Dataset:
        with open(path, encoding="utf-8") as lines:
            return Dataset.from_list([json.loads(line) for line in lines])

    train_path, heldout_path = default_data_paths()
    return read(train_path), read(heldout_path)


def pairs_of(rows: Iterable[Mapping[str, Any]], *, of_any_task: bool = False) -> Iterator[dict[str, object]]:
    """Rows of ``messages`` as pairs: ``prompt``, ``chosen`` and ``rejected``, as turns.

    The rejected answer is the right answer to the previous question of the same ``task``: equally well formed, but
    wrong. With `of_any_task` it is the answer to the previous question of any task, which mostly asks for something
    else.
    """
    last: dict[str, str] = {}
    for row in rows:
        *prompt, answer = row["messages"]
        task = "" if of_any_task else row["task"]
        other = last.get(task, answer["content"])
        last[task] = answer["content"]
        if other != answer["content"]:
            yield {"prompt": prompt, "chosen": [answer], "rejected": [{**answer, "content": other}]}


def labelled_of(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, object]]:
    """Rows of ``messages`` as single answers: ``prompt``, ``completion`` and ``label``, in a fixed random order.

    Every question comes twice: with its right answer and with the wrong one from `pairs_of`. Rows are shuffled because
    KTO compares a prompt with the answer of another row of its micro-batch.
    """
    import random

    labelled: list[dict[str, object]] = [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for pair in pairs_of(rows)
        for name in ("chosen", "rejected")
    ]
    random.Random(0).shuffle(labelled)
    return labelled


def write_pictured(path: Path, rows: Iterable[Mapping[str, object]], *, count: int) -> None:
    """Write the first `count` rows of ``messages`` to `path`, each with a plain picture beside it (``images``)."""
    import itertools
    import json

    from PIL import Image

    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(itertools.islice(rows, count)):
            picture = f"picture-{number}.png"
            Image.new("RGB", (96, 96), (number * 8 % 256, 128, 255 - number * 8 % 256)).save(path.parent / picture)
            file.write(json.dumps({"messages": row["messages"], "images": [picture]}) + "\n")


def default_pairs(folder: str, *, heldout: bool = False, of_any_task: bool = False) -> str:
    """Path of the embedded rows as pairs in `folder` (JSON lines), written there if missing.

    Args:
        heldout: Use the held-out questions instead of the training rows.
        of_any_task: As for `pairs_of`.
    """
    return _written(folder, "pairs", lambda rows: pairs_of(rows, of_any_task=of_any_task), heldout=heldout)


def default_labelled(folder: str, *, heldout: bool = False) -> str:
    """`default_pairs` for single answers, each with a label."""
    return _written(folder, "labelled", labelled_of, heldout=heldout)


def _written(
    folder: str,
    name: str,
    made_of: Callable[[Iterable[Mapping[str, Any]]], Iterable[dict[str, object]]],
    *,
    heldout: bool,
) -> str:
    import json
    import os
    from pathlib import Path

    path = Path(folder) / f"{'heldout_' * heldout}{name}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".partial-{os.getpid()}")  # every rank writes the same content
        with (
            open(default_data_paths()[heldout], encoding="utf-8") as rows,
            open(partial, "w", encoding="utf-8") as file,
        ):
            file.writelines(json.dumps(row) + "\n" for row in made_of(map(json.loads, rows)))
        partial.replace(path)
    return str(path)


def default_pretraining_text(folder: str, *, num_documents: int = 40_000) -> str:
    """Path of the embedded base model's training text in `folder` (JSON lines), unpacked there if missing."""
    import itertools
    import lzma
    from pathlib import Path

    path = Path(folder) / f"base_text_{num_documents}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        packed = files("accel_scale.assets").joinpath("default", "data", "base_text.jsonl.xz")
        with packed.open("rb") as raw, lzma.open(raw) as lines, open(partial, "wb") as file:
            file.writelines(itertools.islice(lines, num_documents))
        partial.replace(path)
    return str(path)
