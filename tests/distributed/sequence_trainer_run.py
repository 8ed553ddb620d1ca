"""A custom trainer made of accel-scale's mixins and TRL's trainer, as in docs/model-parallelism.md.

Run by test_sft_sequence_parallel.py under torchrun on four processes; rank 0 prints the results with parts of
rows, and then with whole ones.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from accel_scale import FastLossMixin, SequenceParallelMixin
from accel_scale.data.default import default_model_path
from accel_scale.ending.leaving import leave_process_group
from accel_scale.parallel import sequence_exchange

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


class LongRowTrainer(SequenceParallelMixin, FastLossMixin, SFTTrainer):
    """LongRowTrainer(model, args=…, train_dataset=…, sp_size=2); no sp_size in the launch file."""


@contextlib.contextmanager
def groups_of_exchanges() -> Iterator[list[Any]]:
    """Records the process groups over which parts of rows are exchanged."""
    found: list[Any] = []
    exchange = sequence_exchange.exchange

    def noted(parts: torch.Tensor, group: Any) -> torch.Tensor:
        found.append(group)
        return exchange(parts, group)

    sequence_exchange.exchange = noted
    try:
        yield found
    finally:
        sequence_exchange.exchange = exchange


def train(sp_size: int, rows_per_rank: int, attention: str) -> dict[str, Any]:
    """Four steps of four rows each, of odd lengths, evaluated twice on seven rows."""
    tokenizer = AutoTokenizer.from_pretrained(default_model_path())
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, vocab_size=len(tokenizer), num_key_value_heads=2, attn_implementation=attention)
    texts = ["one " * (3 + 2 * number) + "two three" for number in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, per_device_train_batch_size=rows_per_rank, max_steps=4, learning_rate=1e-2, logging_steps=1,
            report_to="none", save_strategy="no", use_cpu=True, max_length=64, bf16=False, disable_tqdm=True,
            per_device_eval_batch_size=1, eval_strategy="steps", eval_steps=2,
        )  # fmt: skip
        with groups_of_exchanges() as groups:
            trainer = LongRowTrainer(
                LlamaForCausalLM(config), args=args, train_dataset=Dataset.from_dict({"text": texts}),
                eval_dataset=Dataset.from_dict({"text": texts[:7]}), processing_class=tokenizer, sp_size=sp_size,
            )  # fmt: skip
        # The run's group may support accelerator tensors only, so checks on the host use a group of their own.
        is_apart = bool(groups) and not any(group is trainer._sp_group for group in groups)
        trainer.train()
    history = trainer.state.log_history
    return {
        "is_checked_apart": is_apart,
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "evaluated": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "accuracy": [entry["eval_mean_token_accuracy"] for entry in history if "eval_loss" in entry],
        "tokens": [entry["num_tokens"] for entry in history if "loss" in entry],
    }


def main() -> None:
    found: dict[str, Any] = {}
    for attention in ("sdpa", "eager"):
        found[attention] = {"parts": train(2, 2, attention), "whole": train(1, 1, attention)}
    if dist.get_rank() == 0:
        print(json.dumps({"case": "runs", **found}))
    leave_process_group()


if __name__ == "__main__":
    main()
