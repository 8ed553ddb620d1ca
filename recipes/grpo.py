"""Train a model on rewards that can be verified, by GRPO and the losses that TRL has beside it.

    accelerate launch --config_file accelerate_configs/zero2.yaml recipes/grpo.py \\
        --model_name_or_path outputs/sft --dataset_name openai/gsm8k --dataset_config main \\
        --columns prompt=question completion=answer --rewards number format='.*####.*' --reward_weights 1.0 0.2

Without data it trains on the embedded questions; `make grpo` fine-tunes the embedded model a little before that.
Rows have a prompt and an answer, as those of sft.py; the answer is what rewards compare with. `--rewards` also takes a
function of your own. Each prompt is answered `--num_generations` times with the weights as they are.
Flags are TRL's `ScriptArguments`, `GRPOConfig` and `ModelConfig` and our `ScaleArguments`: `--help` lists them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accel_scale.ending.user_errors import user_errors
from accel_scale.flags.library import load_classes
from accel_scale.flags.parsing import ParsedFlags, parse_flags
from accel_scale.flags.rewards import RewardArguments
from accel_scale.quiet import quiet_imports
from accel_scale.recipe_specs.grpo import GRPO
from accel_scale.starting.begin import begin
from accel_scale.trainers.trainer_run import (
    TrainerRun,
    check_run,
    course_of_run,
    load_run_model,
    prepare_chat,
    report_end,
    report_start,
    set_loaders,
    settle_trainer,
    trainer_options,
)
from accel_scale.trainers.trainer_start import load_rows, resolve_trainer_run

if TYPE_CHECKING:  # torch and TRL are slow to import: not before the command line has been checked
    from accel_scale.trainers.grpo_trainer import ScaleGRPOTrainer
    from accel_scale.trainers.rewards import RewardFunction

RECIPE = GRPO  # what doctor, plan, rehearse, scaling-test, launch-script and tune.py know about this file
PROGRAM, FLAG_CLASSES = RECIPE.program, RECIPE.flags
quiet_imports()  # before the libraries that would print at import


@dataclass
class GRPORun(TrainerRun):
    """As every run with a trainer, with what it rewards."""

    rewards: list[RewardFunction] = field(default_factory=list)


def main(argv: list[str] | None = None) -> dict[str, object] | None:
    """Run the recipe; returns what `run_summary.json` holds."""
    from accel_scale.ending.user_errors import exit_if_not_saved
    from accel_scale.report_page.leaving import held_folder

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
    trainer.accelerator.end_training()  # torch warns of process groups that are left to the interpreter's end
    return summary


def resolve_run(parsed: ParsedFlags) -> GRPORun:
    """Flags, launch and machine brought together; contradictions are refused here."""
    RECIPE.refuse(parsed)
    from accel_scale.data.default import DEFAULT_REWARDING
    from accel_scale.trainers.rewards import reward_functions

    run = resolve_trainer_run(parsed, RECIPE.plan, preset=DEFAULT_REWARDING)
    settings = run.settings
    rewards = reward_functions(settings.build(RewardArguments).rewards, weights=settings.values.get("reward_weights"))
    return GRPORun(settings=settings, start=run.start, script=run.script, model_args=run.model_args, rewards=rewards)


def load_data(run: GRPORun) -> None:
    """Prompts and answers to train on, others to evaluate where asked for, and the questions of exact match."""
    from accel_scale.data.default import default_data_paths
    from accel_scale.trainers.prompts import as_prompts

    load_rows(run, lambda heldout: default_data_paths()[heldout])
    run.data = as_prompts(run.data, place=run.settings.sources.get("dataset_name", "--dataset_mixture"))
    run.plan = run.plan and run.plan.for_data(run.data.train, run.tokenizer)


def make_trainer(run: GRPORun) -> ScaleGRPOTrainer:
    """TRL's trainer with the model, the rewards, the data, and what was decided about them."""
    from accel_scale.modeling.loading import add_stop_token
    from accel_scale.settings.trl_config import RecipeGRPOConfig
    from accel_scale.trainers.grpo_trainer import ScaleGRPOTrainer

    set_loaders(run)
    args = run.settings.build(RecipeGRPOConfig)
    stop_token = prepare_chat(run)
    model = load_run_model(run, args)
    add_stop_token(model, run.tokenizer, stop_token)  # TRL looks up what ends an answer when it makes the trainer
    trainer = ScaleGRPOTrainer(reward_funcs=run.rewards, **trainer_options(run, args, model))
    settle_trainer(run, trainer, stop_token)
    return trainer


if __name__ == "__main__":
    begin(PROGRAM, FLAG_CLASSES, RECIPE.refuse)
    with user_errors(PROGRAM):
        main()
