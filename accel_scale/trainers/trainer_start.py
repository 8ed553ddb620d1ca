"""Start of the recipes with TRL's trainers: combine flags, launch and machine, then load the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from types import MappingProxyType

from accel_scale.facts.names import RowsWith
from accel_scale.flags.parsing import ParsedFlags
from accel_scale.planning.search.recipe_choices import PlannedRecipe
from accel_scale.trainers.trainer_run import TrainerRun

EMBEDDED_QUESTIONS = 200  # for exact match, if the embedded rows are trained on


def resolve_trainer_run(
    parsed: ParsedFlags,
    plan: PlannedRecipe,
    *,
    preset: Mapping[str, object],
    preset_bf16: Mapping[str, object] = MappingProxyType({}),
) -> TrainerRun:
    """Resolve a run's settings from flags, launch and machine.

    Args:
        plan: The planner's description of the recipe, with the name of its configuration.
        preset: Defaults for training on the embedded rows.
        preset_bf16: Those that differ if the device computes bf16 in hardware.

    Raises:
        ConfigError: for settings that contradict each other, the launch file or the machine.
    """
    from accel_scale.starting.sparing_imports import import_peft_without_bitsandbytes, unwrap_without_deepspeed

    import_peft_without_bitsandbytes()
    unwrap_without_deepspeed()
    from trl import ScriptArguments  # slow, as all of TRL is

    from accel_scale.data.default import default_model_path
    from accel_scale.settings import trl_config
    from accel_scale.settings.planned_choice import resolve_planned
    from accel_scale.starting.layout import rows_in_groups
    from accel_scale.starting.recipe_start import start_recipe

    given = parsed.explicit
    usual_folder = getattr(trl_config, plan.config_class).output_dir
    start = start_recipe(parsed, output_dir=str(given.get("output_dir") or usual_folder))
    sp_size = 1
    if plan.shared_by:
        start, sp_size = rows_in_groups(parsed, start)
    defaults: Mapping[str, object] | None = None
    if not given.get("dataset_name") and not given.get("dataset_mixture"):
        defaults = {**preset, **(preset_bf16 if start.facts.device.native_bf16 else {})}
    settings = resolve_planned(parsed, start.facts, start.launch, preset=defaults, recipe=plan)
    if not settings.values.get("model_name_or_path"):
        settings.set("model_name_or_path", default_model_path(), "the embedded model")
    script, model_args = settings.build(ScriptArguments), settings.build(trl_config.RecipeModelConfig)
    return TrainerRun(settings=settings, start=start, script=script, model_args=model_args, sp_size=sp_size)


def load_rows(
    run: TrainerRun,
    embedded_path: Callable[[str, bool], str] | None,
    *,
    rows_with: RowsWith | None = None,
    questions: bool = True,
) -> None:
    """Load `run.data`, with rows to evaluate if asked for, and `run.questions` of the exact-match report.

    Args:
        embedded_path: Returns the path of the embedded rows: of the held-out ones for True, otherwise of those to
            train on. Files that it has to create first go to the given folder. None if there are no embedded rows.
        rows_with: Set if rows are pairs of a better and a worse answer, answers with labels, or have images.
        questions: True if the recipe reports exact match.

    Raises:
        ConfigError: for any problem with the data that the user must solve.
    """
    from accel_scale.data.default import default_dataset
    from accel_scale.data.loading import load_training_data
    from accel_scale.settings.planned_setup import recipe_value

    script, scale, values = run.script, run.settings.scale, run.settings.values
    evaluates = str(values.get("eval_strategy", "no")) != "no"
    embedded = embedded_path is not None and not script.dataset_name and not scale.dataset_mixture
    usual = EMBEDDED_QUESTIONS if embedded else 0
    num_questions = (usual if scale.exact_match_samples is None else scale.exact_match_samples) if questions else 0
    folder = f"{recipe_value(run.settings, 'output_dir')}/data" if embedded else ""
    run.data = load_training_data(
        embedded_path(folder, False) if embedded and embedded_path else script.dataset_name,
        config=script.dataset_config,
        split=script.dataset_train_split,
        test_split=script.dataset_test_split if (evaluates or num_questions) and not embedded else None,
        columns=scale.columns,
        on_bad_row=scale.on_bad_row,
        streaming=script.dataset_streaming,
        mixture=scale.dataset_mixture,
        seed=int(values.get("seed", 42) if values.get("data_seed") is None else values["data_seed"]),
        chat=rows_with is not None
        or run.tokenizer.chat_template is not None
        or values.get("chat_template_path") is not None,
        rows_with=rows_with,
    )
    if embedded and embedded_path and evaluates:
        run.data = run.data.with_test(load_training_data(embedded_path(folder, True), rows_with=rows_with).train)
    asked = default_dataset()[1] if embedded else run.data.test  # the embedded rows name their task
    run.questions = list(islice((row for row in asked or () if row.get("label", True)), num_questions))
