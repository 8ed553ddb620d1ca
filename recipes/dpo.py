"""Tune a model to preferences, pairs of a better and a worse answer, by DPO or TRL's related losses.

    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/dpo.py \\
        --model_name_or_path outputs/sft --dataset_name trl-lib/ultrafeedback_binarized --method lora --beta 0.1

Rows have `prompt`, `chosen` and `rejected`, as text or turns; `--columns` maps other names. With adapters the
reference is the model without them; full fine-tuning keeps a frozen copy, unless `--precompute_ref_log_probs`. Without
a model and data it tunes the embedded model on pairs made from the embedded rows.
Flags are TRL's `ScriptArguments`, `DPOConfig` and `ModelConfig` and our `ScaleArguments`: `--help` lists them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from accel_scale.ending.user_errors import exit_if_not_saved, user_errors
from accel_scale.flags.library import load_classes
from accel_scale.flags.parsing import ParsedFlags, parse_flags
from accel_scale.quiet import quiet_imports
from accel_scale.recipe_specs.trl import DPO
from accel_scale.report_page.leaving import held_folder
from accel_scale.starting.begin import begin
from accel_scale.trainers.reference import load_with_reference
from accel_scale.trainers.trainer_run import (
    TrainerRun,
    check_run,
    course_of_run,
    prepare_chat,
    report_end,
    report_start,
    settle_data,
    settle_trainer,
    trainer_options,
)
from accel_scale.trainers.trainer_start import load_rows, resolve_trainer_run

if TYPE_CHECKING:  # torch and TRL are slow to import: only after the command line has been checked
    from accel_scale.trainers.sft_trainer import ScaleDPOTrainer

RECIPE = DPO  # the description that doctor, plan, rehearse, scaling-test, launch-script and tune.py use
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


def resolve_run(parsed: ParsedFlags) -> TrainerRun:
    """Combine flags, launch and machine; contradictions are refused here."""
    RECIPE.refuse(parsed)
    from accel_scale.data.default import DEFAULT_PREFERENCES

    return resolve_trainer_run(parsed, RECIPE.plan, preset=DEFAULT_PREFERENCES)


def load_data(run: TrainerRun) -> None:
    """Load pairs to train on, pairs to evaluate if asked for, and the questions of the exact-match report."""
    from accel_scale.data.default import default_pairs

    load_rows(run, lambda folder, heldout: default_pairs(folder, heldout=heldout), rows_with="pairs")


def make_trainer(run: TrainerRun) -> ScaleDPOTrainer:
    """Create TRL's trainer with the model, its reference, the data, and their resolved settings."""
    from accel_scale.settings.trl_config import RecipeDPOConfig
    from accel_scale.trainers.sft_trainer import ScaleDPOTrainer

    settle_data(run)
    args = run.settings.build(RecipeDPOConfig)
    stop_token = prepare_chat(run)
    model, reference = load_with_reference(run, args)
    trainer = ScaleDPOTrainer(ref_model=reference, **trainer_options(run, args, model))
    settle_trainer(run, trainer, stop_token)
    return trainer


if __name__ == "__main__":
    begin(PROGRAM, FLAG_CLASSES, RECIPE.refuse)
    with user_errors(PROGRAM):
        main()
