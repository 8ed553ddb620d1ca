"""An ordinary training script with the Hugging Face Trainer."""

import argparse
import json
from pathlib import Path

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def main(argv=None):
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--data", "--output_dir"):
        parser.add_argument(flag, required=True)
    args = parser.parse_args(argv)
    rows = [{"input_ids": row, "labels": row} for row in json.loads(Path(args.data).read_text())]

    model = AutoModelForCausalLM.from_pretrained(args.model)
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        num_train_epochs=1,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=2,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=training_args, train_dataset=rows)
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
