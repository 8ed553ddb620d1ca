"""Train a model on verifiable rewards, by GRPO or TRL's related losses.

    accelerate launch --config_file accelerate_configs/zero2.yaml recipes/grpo.py \\
        --model_name_or_path outputs/sft --dataset_name openai/gsm8k --dataset_config main \\
        --columns prompt=question completion=answer --rewards number format='.*####.*' --reward_weights 1.0 0.2

Without data it trains on the embedded questions; `make grpo` first fine-tunes the embedded model a little. Rows have a
prompt and an answer, as in sft.py; rewards compare completions with the answer. `--rewards` also takes your own
function. Each prompt is answered `--num_generations` times with the current weights.
Flags are TRL's `ScriptArguments`, `GRPOConfig` and `ModelConfig` and our `ScaleArguments`: `--help` lists them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from accel_scale.ending.user_errors import exit_if_not_saved, user_errors
from accel_scale.flags.library import load_classes
from accel_scale.flags.parsing import ParsedFlags, parse_flags
from accel_scale.quiet import quiet_imports
from accel_scale.recipe_specs.trl import GRPO
from accel_scale.report_page.leaving import held_folder
from accel_scale.starting.begin import begin
from accel_scale.trainers.rewarded_run import RewardedRun, load_generating_model, load_prompts, resolve_rewarded_run
from accel_scale.trainers.trainer_run import (
    check_run,
    course_of_run,
    report_end,
    report_start,
    settle_data,
    settle_trainer,
    trainer_options,
)

if TYPE_CHECKING:  # torch and TRL are slow to import: only after the command line has been checked
    from accel_scale.trainers.grpo_trainer import ScaleGRPOTrainer

RECIPE = GRPO  # the description that doctor, plan, rehearse, scaling-test, launch-script and tune.py use
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
        load_prompts(run)
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


def resolve_run(parsed: ParsedFlags) -> RewardedRun:
    """Combine flags, launch and machine; contradictions are refused here."""
    RECIPE.refuse(parsed)
    return resolve_rewarded_run(parsed, RECIPE.plan)


def make_trainer(run: RewardedRun) -> ScaleGRPOTrainer:
    """Create TRL's trainer with the model, the rewards, the data, and their resolved settings."""
    from accel_scale.settings.trl_config import RecipeGRPOConfig
    from accel_scale.trainers.grpo_trainer import ScaleGRPOTrainer

    settle_data(run)
    args = run.settings.build(RecipeGRPOConfig)
    model, stop_token = load_generating_model(run, args)
    trainer = ScaleGRPOTrainer(reward_funcs=run.rewards, **trainer_options(run, args, model))
    settle_trainer(run, trainer, stop_token)
    return trainer


if __name__ == "__main__":
    begin(PROGRAM, FLAG_CLASSES, RECIPE.refuse)
    with user_errors(PROGRAM):
        main()
