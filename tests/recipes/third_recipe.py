"""Preference tuning in sixty lines: TRL's DPO trainer, known to doctor, plan and rehearse through its `RECIPE`."""

from __future__ import annotations

from dataclasses import dataclass

from accel_scale import ConfigError, RecipeSpec
from accel_scale.data.default import default_model_path


@dataclass
class DPOArguments:
    model_name_or_path: str = default_model_path()
    output_dir: str = "outputs/dpo"
    beta: float = 0.1
    learning_rate: float = 1e-5
    max_length: int = 512
    max_steps: int = 20
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 1
    optim: str = "adamw_torch_fused"
    gradient_checkpointing: bool = False
    bf16: bool = False
    save_steps: int = 10
    logging_steps: int = 5
    resume_from_checkpoint: str | None = None


def refuse(parsed) -> None:
    if parsed.explicit.get("beta", 1) <= 0:
        raise ConfigError("must be above 0.", place=parsed.place("beta"), fix="use 0.1.")


DPO = RecipeSpec.Plan(has_reference_model=True, rows_per_example=2)  # a chosen and a rejected answer
RECIPE = RecipeSpec(flags=(DPOArguments,), refuse=refuse, plan=DPO)


def main() -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from accel_scale.flags.parsing import parse_flags

    args = DPOArguments(**parse_flags(RECIPE.flags, program=__file__).explicit)
    values = {name: value for name, value in vars(args).items() if name != "model_name_or_path"}
    pairs = [{"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": f" {n}"} for n in range(64)]
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(args.model_name_or_path),
        args=DPOConfig(**values, report_to=[], disable_tqdm=True),
        train_dataset=Dataset.from_list(pairs),
        processing_class=AutoTokenizer.from_pretrained(args.model_name_or_path),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
