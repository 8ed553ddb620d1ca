"""Train a reward model on pairs of a better and a worse answer, with a head that gives each row one score.

    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/reward.py \\
        --model_name_or_path outputs/sft --dataset_name trl-lib/ultrafeedback_binarized --method lora

Rows have `chosen` and `rejected`, and `prompt` if it is not part of them, as text or turns; `--columns` maps other
names. The model is a language model, which gets the head, or an existing reward model to train further; the result
loads with `AutoModelForSequenceClassification`. Without a model and data it trains the embedded model on pairs made
from the embedded rows, and ranks held-out pairs before and after.
Flags are TRL's `ScriptArguments`, `RewardConfig` and `ModelConfig` and our `ScaleArguments`: `--help` lists them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from accel_scale.ending.user_errors import exit_if_not_saved, user_errors
from accel_scale.flags.library import load_classes
from accel_scale.flags.parsing import ParsedFlags, parse_flags
from accel_scale.quiet import quiet_imports
from accel_scale.recipe_specs.trl import REWARD
from accel_scale.report_page.leaving import held_folder
from accel_scale.starting.begin import begin
from accel_scale.trainers.trainer_run import (
    TrainerRun,
    check_run,
    course_of_run,
    load_run_model,
    report_end,
    report_start,
    settle_data,
    settle_trainer,
    trainer_options,
)
from accel_scale.trainers.trainer_start import load_rows, resolve_trainer_run

if TYPE_CHECKING:  # torch and TRL are slow to import: only after the command line has been checked
    from accel_scale.trainers.reward_trainer import ScaleRewardTrainer

RECIPE = REWARD  # the description that doctor, plan, rehearse, scaling-test, launch-script and tune.py use
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
    from accel_scale.data.default import DEFAULT_SCORING

    return resolve_trainer_run(parsed, RECIPE.plan, preset=DEFAULT_SCORING)


def load_data(run: TrainerRun) -> None:
    """Load pairs to train on, and pairs to rank if asked for."""
    from accel_scale.data.default import default_pairs

    load_rows(
        run,
        lambda folder, heldout: default_pairs(folder, heldout=heldout, of_any_task=True),
        rows_with="pairs",
        questions=False,
    )


def make_trainer(run: TrainerRun) -> ScaleRewardTrainer:
    """Create TRL's trainer with the model, the data, and their resolved settings."""
    from transformers import set_seed

    from accel_scale.data.chat import ensure_chat_template
    from accel_scale.settings.trl_config import RecipeRewardConfig
    from accel_scale.trainers.reward_trainer import ScaleRewardTrainer

    settle_data(run)
    args = run.settings.build(RecipeRewardConfig)
    ensure_chat_template(
        run.tokenizer, conversational=run.data.conversational, chat_template_path=args.chat_template_path
    )
    set_seed(args.seed)  # a language model's layers get a new head, with random weights
    trainer = ScaleRewardTrainer(**trainer_options(run, args, load_run_model(run, args)))
    settle_trainer(run, trainer)
    return trainer


if __name__ == "__main__":
    begin(PROGRAM, FLAG_CLASSES, RECIPE.refuse)
    with user_errors(PROGRAM):
        main()
