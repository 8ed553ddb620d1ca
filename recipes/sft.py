"""Fine-tune a causal language model on instructions, under any launch file, by any method.

    accelerate launch recipes/sft.py                      # embedded model and data: about a minute on two CPU cores
    accelerate launch recipes/sft.py --config_file recipes/configs/qlora_guanaco_7b.yaml
    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/sft.py \\
        --model_name_or_path meta-llama/Llama-3.1-8B --dataset_name data/train.jsonl --method lora

Flags are TRL's `ScriptArguments`, `SFTConfig` and `ModelConfig` and our `ScaleArguments`: `--help` lists them,
`--config_file` reads them from YAML, `--print_config` shows what was decided and why.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from accel_scale.ending.user_errors import exit_if_not_saved, user_errors
from accel_scale.flags.library import load_classes
from accel_scale.flags.parsing import ParsedFlags, parse_flags
from accel_scale.quiet import quiet_imports
from accel_scale.recipe_specs.trl import SFT
from accel_scale.report_page.leaving import held_folder
from accel_scale.starting.begin import begin
from accel_scale.trainers.trainer_run import (
    TrainerRun,
    check_run,
    course_of_run,
    load_run_model,
    prepare_chat,
    report_end,
    report_start,
    settle_data,
    settle_trainer,
    trainer_options,
)
from accel_scale.trainers.trainer_start import load_rows, resolve_trainer_run

if TYPE_CHECKING:  # torch and TRL are slow to import: only after the command line has been checked
    from accel_scale.trainers.sft_trainer import ScaleSFTTrainer

RECIPE = SFT  # the description that doctor, plan, rehearse, scaling-test, launch-script and tune.py use
PROGRAM, FLAG_CLASSES = RECIPE.program, RECIPE.flags
quiet_imports()  # before importing libraries that print at import


def main(argv: list[str] | None = None) -> dict[str, object] | None:
    """Run the recipe; returns the contents of `run_summary.json`."""
    started = time.perf_counter()
    parsed = parse_flags(FLAG_CLASSES, argv, program=PROGRAM, description=__doc__)
    run = resolve_run(parsed)
    if run.settings.scale.print_config:
        run.say(run.settings.as_yaml(load_classes(FLAG_CLASSES)))
        return None
    check_run(run)
    with held_folder(run), exit_if_not_saved(PROGRAM):
        load_data(run)
        run.course = course_of_run(run, FLAG_CLASSES)
        if finished := run.course.look_ahead():
            return run.course.say_finished(finished, is_main=run.is_main)
        trainer = make_trainer(run)
        run.course.follow(trainer, started)
        report_start(run, trainer, PROGRAM)
        trainer.train(resume_from_checkpoint=run.course.choice)
        trainer.save_model(trainer.args.output_dir)
        summary = report_end(run, trainer, PROGRAM)
    trainer.accelerator.end_training()  # torch warns about process groups that are still open at exit
    return summary


# ── Resolve ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def resolve_run(parsed: ParsedFlags) -> TrainerRun:
    """Combine flags, launch and machine; contradictions are refused here."""
    RECIPE.refuse(parsed)
    from accel_scale.data.default import DEFAULT_TRAINING, DEFAULT_TRAINING_BF16

    return resolve_trainer_run(parsed, RECIPE.plan, preset=DEFAULT_TRAINING, preset_bf16=DEFAULT_TRAINING_BF16)


# ── Load ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_data(run: TrainerRun) -> None:
    """Load training rows, evaluation rows if asked for, and the questions of the exact-match report."""
    from accel_scale.data.default import default_data_paths
    from accel_scale.settings.trl_config import RecipeSFTConfig
    from accel_scale.training.guard.learning import refuse_long_prompts

    load_rows(run, lambda _, heldout: default_data_paths()[heldout])
    refuse_long_prompts(run.data.train, run.tokenizer, run.settings.values, max_length=RecipeSFTConfig.max_length)


def make_trainer(run: TrainerRun) -> ScaleSFTTrainer:
    """Create TRL's trainer with the model, the data, and their resolved settings."""
    from accel_scale.settings.trl_config import RecipeSFTConfig
    from accel_scale.trainers.sft_trainer import ScaleSFTTrainer

    settle_data(run)
    args = run.settings.build(RecipeSFTConfig)
    stop_token = prepare_chat(
        run, assistant_only_loss=args.assistant_only_loss, chat_template_path=args.chat_template_path
    )
    if (args.chat_template_path or "").endswith((".jinja", ".j2")):
        args.chat_template_path = None  # the tokenizer already has it, with an end of turn if that was missing
    model = load_run_model(run, args)
    options = trainer_options(run, args, model)
    trainer = ScaleSFTTrainer(
        **options,
        sp_size=run.sp_size,
        loss_from_logits=run.checked.loss_from_logits,
        skips_unlabelled=run.checked.skips_unlabelled,
    )
    settle_trainer(run, trainer, stop_token)
    return trainer


if __name__ == "__main__":
    begin(PROGRAM, FLAG_CLASSES, RECIPE.refuse)
    with user_errors(PROGRAM):
        main()
