"""One training run for `test_saving_strategies.py`: saves, reads back, resumes, and reports what it saw.

accelerate launch --config_file F saving_run.py --method lora --output_dir D
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Trainer, TrainingArguments

from accel_scale.ending.leaving import leave_process_group
from accel_scale.launching.rehearsal import enable_rehearsal_if_needed
from accel_scale.modeling.gathering import wait_for_everyone
from accel_scale.trainers.saving_mixin import AtomicSavingMixin
from accel_scale.training.saving.final_model import save_final
from accel_scale.training.saving.verification import CheckpointMismatch, verify_checkpoint

TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, "


class SavingTrainer(AtomicSavingMixin, Trainer):
    """An ordinary trainer that saves atomically."""


def build(base: str, method: str):
    """The model of `method`: whole, with adapters, or with adapters on a 4-bit base."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    settings = {}
    if method == "qlora":
        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_quant_storage=torch.float32,
        )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **settings)
    if method == "full":
        return model
    if method == "qlora":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def trainer(args: argparse.Namespace, tokenizer, **overrides) -> SavingTrainer:
    """A trainer for four steps at a global batch of four, with a checkpoint every two steps."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    settings = {
        "per_device_train_batch_size": 4 // world_size,
        "max_steps": 4,
        "save_steps": 2,
        "save_total_limit": 2,
        "learning_rate": 1e-3,
        "disable_tqdm": True,
        "report_to": "none",
        "logging_steps": 1,
        "seed": 1,
    }
    ids = tokenizer(TEXT * 3)["input_ids"]
    rows = [{"input_ids": ids[k : k + 24], "labels": ids[k : k + 24]} for k in range(16)]
    return SavingTrainer(
        args=TrainingArguments(output_dir=args.output_dir, **{**settings, **overrides}),
        model=build(args.base, args.method),
        train_dataset=rows,
        processing_class=tokenizer,
    )


def corrupted_is_caught(run: SavingTrainer, folder: Path) -> str:
    """Flip a bit in a copy of `folder`'s weights and verify the copy; returns the message, raised on every rank."""
    if not any([*folder.glob("*model.safetensors"), *folder.glob("pytorch_model_fsdp_0")]):
        return "nothing but DeepSpeed's own shards"
    copy = folder.parent / "copy"
    if run.args.should_save:
        shutil.copytree(folder, copy)
        path = next(iter([*copy.glob("*model.safetensors"), *copy.glob("pytorch_model_fsdp_0/__0_*.distcp")]))
        content = bytearray(path.read_bytes())
        content[_inside_a_weight(run, path, content)] ^= 0x20
        path.write_bytes(bytes(content))
    wait_for_everyone()
    try:
        verify_checkpoint(run.model, copy)
    except CheckpointMismatch as error:
        message = error.problem
    else:
        message = ""
    wait_for_everyone()
    if run.args.should_save:
        shutil.rmtree(copy)
    return message


def _inside_a_weight(run: SavingTrainer, path: Path, content: bytearray) -> int:
    if path.suffix == ".safetensors":
        return len(content) - 1  # weights extend to the end
    parameter = next(p for p in run.model.parameters() if p.requires_grad)
    start = content.find(parameter.detach().to_local().numpy().tobytes()[:64])
    assert start > 0
    return start + 3


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--base", "--method", "--output_dir"):
        parser.add_argument(flag, required=True)
    args = parser.parse_args()
    enable_rehearsal_if_needed()
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    folder = Path(args.output_dir)

    first = trainer(args, tokenizer)
    first.train()
    report = {"checkpoint": dataclasses.asdict(first.first_verification)}
    report["last"] = dataclasses.asdict(verify_checkpoint(first.model, folder / "checkpoint-4"))
    report["corrupted"] = corrupted_is_caught(first, folder / "checkpoint-4")
    if first.args.should_save:  # as after a kill while the last checkpoint was being saved
        shutil.rmtree(folder / "checkpoint-4")
        (folder / ".partial" / "checkpoint-4").mkdir(parents=True)
    wait_for_everyone()
    report["losses"] = [entry["loss"] for entry in first.state.log_history if "loss" in entry]

    resumed = trainer(args, tokenizer)
    resumed.train(resume_from_checkpoint=True)
    report["resumed_losses"] = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    report["checkpoints"] = sorted(path.name for path in folder.iterdir() if path.is_dir())
    resumed.save_model()
    report["final"] = dataclasses.asdict(verify_checkpoint(resumed.model, folder))
    save_final((resumed.accelerator, resumed.model, None), folder / "half", dtype=torch.bfloat16)
    messages = [None] * resumed.accelerator.num_processes
    if resumed.accelerator.num_processes > 1:
        torch.distributed.all_gather_object(messages, report["corrupted"])
        report["caught_everywhere"] = len(set(messages)) == 1
    if resumed.args.should_save:
        (folder / "report.json").write_text(json.dumps(report))
    leave_process_group()


if __name__ == "__main__":
    main()
