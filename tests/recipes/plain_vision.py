"""TRL's own `SFTTrainer` on rows with images, without this package: the reference for recipes/vision.py."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch
from datasets import Dataset, Features, Image, List, Value
from peft import LoraConfig
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import SFTConfig, SFTTrainer

FROZEN = {"all": "^$", "projector": "vision", "none": "vision|project|connector"}


def rows_of(folder: Path) -> Dataset:
    """Rows in the form of TRL's documentation, with `images` as `datasets`' own feature."""
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for row in rows:
        row["images"] = [str(folder / file) for file in row["images"]]
    turn = {"role": Value("string"), "content": Value("string")}
    return Dataset.from_list(rows, features=Features({"images": List(Image()), "messages": List(turn)}))


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("model", "data", "out", "train_vision", "method", "steps"):
        parser.add_argument(f"--{flag}")
    given = parser.parse_args()
    model = AutoModelForImageTextToText.from_pretrained(given.model, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not re.search(FROZEN[given.train_vision], name))
    peft = None
    if given.method == "lora":
        peft = LoraConfig(
            r=16, lora_alpha=32, lora_dropout=0.0, target_modules=r".*(language|text)_model.*\.(q_proj|v_proj)"
        )
    args = SFTConfig(
        output_dir=given.out,
        max_steps=int(given.steps),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        seed=7,
        max_length=None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
    )
    processor = AutoProcessor.from_pretrained(given.model)
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=rows_of(Path(given.data)), processing_class=processor, peft_config=peft
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    (Path(given.out) / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
