"""An ordinary training loop with Accelerate."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_scheduler


def main(argv=None):
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--data", "--output_dir"):
        parser.add_argument(flag, required=True)
    args = parser.parse_args(argv)
    rows = torch.tensor(json.loads(Path(args.data).read_text()))

    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(rows, batch_size=2)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    model.train()
    history = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            learning_rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        history.append((accelerator.gather(loss.detach()).mean().item(), learning_rate))

    accelerator.save_state(f"{args.output_dir}/state")
    if accelerator.is_main_process:
        Path(args.output_dir, "history.json").write_text(json.dumps(history))
    return accelerator, model, optimizer, history


if __name__ == "__main__":
    main()
