"""A trainer of one's own from accel-scale's mixins and TRL's, as docs/model-parallelism.md shows it.

Run by test_sft_sequence_parallel.py under torchrun on two processes; rank 0 prints what they trained with parts of
rows, and then with whole ones.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from accel_scale import FastLossMixin, SequenceParallelMixin
from accel_scale.data.default import default_model_path

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


class LongRowTrainer(SequenceParallelMixin, FastLossMixin, SFTTrainer):
    """LongRowTrainer(model, args=…, train_dataset=…, sp_size=2); no sp_size in the launch file."""


def losses(sp_size: int, rows_per_rank: int, attention: str) -> list[float]:
    """Of four steps over two rows each, of lengths that two does not divide."""
    tokenizer = AutoTokenizer.from_pretrained(default_model_path())
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, vocab_size=len(tokenizer), num_key_value_heads=2, attn_implementation=attention)
    texts = ["one " * (3 + 2 * number) + "two three" for number in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, per_device_train_batch_size=rows_per_rank, max_steps=4, learning_rate=1e-2, logging_steps=1,
            report_to="none", save_strategy="no", use_cpu=True, max_length=64, bf16=False, disable_tqdm=True,
        )  # fmt: skip
        trainer = LongRowTrainer(
            LlamaForCausalLM(config), args=args, train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=tokenizer, sp_size=sp_size,
        )  # fmt: skip
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    found: dict[str, Any] = {}
    for attention in ("sdpa", "eager"):
        found[attention] = {"parts": losses(2, 2, attention), "whole": losses(1, 1, attention)}
    if dist.get_rank() == 0:
        print(json.dumps({"case": "losses", **found}))


if __name__ == "__main__":
    main()
