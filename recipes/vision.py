"""Fine-tune a vision-language model on questions and answers about images.

    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/vision.py \\
        --model_name_or_path HuggingFaceTB/SmolVLM-256M-Instruct --dataset_name data/train.jsonl --method lora

Rows have `messages`, or `prompt` and `completion`, and `images` (or `image`): paths relative to the file, or the bytes
of a parquet file or of a data set on the hub. Images appear where a turn has a part `{"type": "image"}` or the text
`<image>`, otherwise before the first question; `--columns images=photo` maps other names. Every image is read once
before the first step. The language model is trained; the vision tower and the projector are frozen, unless
`--train_vision`. Rows are neither packed nor truncated, and every row needs an image.
Flags are TRL's `ScriptArguments`, `SFTConfig` and `ModelConfig` and our `ScaleArguments`: `--help` lists them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from accel_scale.ending.user_errors import exit_if_not_saved, user_errors
from accel_scale.flags.library import load_classes
from accel_scale.flags.parsing import parse_flags
from accel_scale.quiet import quiet_imports
from accel_scale.recipe_specs.trl import VISION
from accel_scale.report_page.leaving import held_folder
from accel_scale.starting.begin import begin
from accel_scale.trainers.trainer_run import (
    course_of_run,
    report_end,
    report_start,
    settle_data,
    settle_trainer,
    trainer_options,
)
from accel_scale.trainers.trainer_start import load_rows
from accel_scale.trainers.vision_run import (
    VisionRun,
    check_vision_run,
    load_vision_model,
    prepare_images_chat,
    read_images,
    resolve_vision_run,
)

if TYPE_CHECKING:  # torch and TRL are slow to import: only after the command line has been checked
    from accel_scale.trainers.sft_trainer import ScaleSFTTrainer

RECIPE = VISION  # the description that doctor, rehearse, scaling-test, launch-script and tune.py use
PROGRAM, FLAG_CLASSES = RECIPE.program, RECIPE.flags
quiet_imports()  # before importing libraries that print at import


def main(argv: list[str] | None = None) -> dict[str, object] | None:
    """Run the recipe; returns the contents of `run_summary.json`."""
    started = time.perf_counter()
    parsed = parse_flags(FLAG_CLASSES, argv, program=PROGRAM, description=__doc__)
    RECIPE.refuse(parsed)
    run = resolve_vision_run(parsed, RECIPE.plan)
    if run.settings.scale.print_config:
        run.say(run.settings.as_yaml(load_classes(FLAG_CLASSES)))
        return None
    check_vision_run(run)
    with held_folder(run), exit_if_not_saved(PROGRAM):
        load_rows(run, None, rows_with="images", questions=False)
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


def make_trainer(run: VisionRun) -> ScaleSFTTrainer:
    """Create TRL's trainer with the model, its processor, the data, and their resolved settings."""
    from accel_scale.settings.trl_config import RecipeVisionConfig
    from accel_scale.trainers.sft_trainer import ScaleSFTTrainer

    settle_data(run)
    args = run.settings.build(RecipeVisionConfig)
    stop_token = prepare_images_chat(run, args)
    model = load_vision_model(run, args)
    options = {**trainer_options(run, args, model), "processing_class": run.processor}
    trainer = ScaleSFTTrainer(**options, program=PROGRAM, loss_from_logits=run.checked.loss_from_logits)
    read_images(trainer)
    settle_trainer(run, trainer, stop_token)
    return trainer


if __name__ == "__main__":
    begin(PROGRAM, FLAG_CLASSES, RECIPE.refuse)
    with user_errors(PROGRAM):
        main()
