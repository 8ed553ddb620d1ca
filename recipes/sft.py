"""Fine-tune a causal language model on instructions, under any launch file, by any method.

    accelerate launch recipes/sft.py                      # embedded model and data: about a minute on two CPU cores
    accelerate launch recipes/sft.py --config_file recipes/configs/qlora_guanaco_7b.yaml
    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/sft.py \
        --model_name_or_path meta-llama/Llama-3.1-8B --dataset_name data/train.jsonl --method lora

Flags are TRL's `ScriptArguments`, `SFTConfig` and `ModelConfig` and our `ScaleArguments`: `--help` lists them,
`--config_file` reads them from YAML, `--print_config` shows what was decided and why.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_scale.ending.user_errors import user_errors
from accel_scale.flags.guard import TrainerGuardArguments, guard_for
from accel_scale.flags.library import load_classes
from accel_scale.flags.parsing import ParsedFlags, parse_flags
from accel_scale.quiet import quiet_imports
from accel_scale.recipe_specs.sft import SFT
from accel_scale.starting.begin import begin

if TYPE_CHECKING:  # torch and TRL are slow to import: not before the command line has been checked
    from trl import ScriptArguments

    from accel_scale.settings.trl_config import RecipeModelConfig

RECIPE = SFT  # what doctor, plan, rehearse, scaling-test, launch-script and tune.py know about this file
PROGRAM, FLAG_CLASSES = RECIPE.program, RECIPE.flags
quiet_imports()  # before the libraries that would print at import


@dataclass
class Run:
    """Everything decided before training, step by step."""

    settings: Any  # accel_scale.settings.resolve.Resolved
    start: Any  # accel_scale.starting.recipe_start.Start
    script: ScriptArguments
    model_args: RecipeModelConfig
    sp_size: int = 1
    model_config: Any = None
    tokenizer: Any = None
    attention: str = ""
    start_check: Any = None  # accel_scale.start_check.Verdict
    data: Any = None
    questions: list[dict[str, Any]] = field(default_factory=list)
    parameters: tuple[int, int] = (0, 0)
    plan: Any = None  # accel_scale.settings.planned.RunPlan
    watch: Any = None  # accel_scale.verifying.measured_memory.MemoryWatch
    guard: Any = None  # accel_scale.training.guard.guard.GuardSettings
    course: Any = None  # accel_scale.training.checkpoints.going_on.Course

    @property
    def launch(self) -> Any:
        """How this process was launched: an `accel_scale.launching.environment.LaunchEnvironment`."""
        return self.start.launch

    @property
    def device_type(self) -> str:
        """Where tensors live: ``cuda``, ``cpu`` …"""
        return self.settings.launch.device_type

    @property
    def is_main(self) -> bool:
        """Whether this process speaks."""
        return self.launch.rank == 0

    def say(self, line: str) -> None:
        """Print one line, on one process."""
        if self.is_main:
            print(line, flush=True)


def main(argv: list[str] | None = None) -> dict[str, Any] | None:
    """Run the recipe; returns what `run_summary.json` holds."""
    from accel_scale.ending.user_errors import exit_if_not_saved
    from accel_scale.training.checkpoints.going_on import course_of_sft

    started = time.perf_counter()
    parsed = parse_flags(FLAG_CLASSES, argv, program=PROGRAM, description=__doc__)
    run = resolve_run(parsed)
    if run.settings.scale.print_config:
        run.say(run.settings.as_yaml(load_classes(FLAG_CLASSES)))
        return None
    check(run)
    with run.start.folder.taken(is_main=run.is_main), exit_if_not_saved(PROGRAM):
        load_data(run)
        run.course = course_of_sft(run, load_classes(FLAG_CLASSES))
        if finished := run.course.look_ahead():
            return run.course.say_finished(finished, is_main=run.is_main)
        trainer = load(run)
        run.course.follow(trainer, started)
        report_start(run, trainer)
        trainer.train(resume_from_checkpoint=run.course.choice)
        trainer.save_model(trainer.args.output_dir)
        summary = report_end(run, trainer)
    trainer.accelerator.end_training()  # torch warns of process groups that are left to the interpreter's end
    return summary


# ── Resolve ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def resolve_run(parsed: ParsedFlags) -> Run:
    """Flags, launch and machine brought together; contradictions are refused here."""
    RECIPE.refuse(parsed)
    script_class, config_class, model_class, *_ = load_classes(FLAG_CLASSES)  # the slow imports
    from accel_scale.data.default import DEFAULT_TRAINING, default_model_path
    from accel_scale.settings.planned_choice import resolve_planned
    from accel_scale.starting.layout import rows_in_groups
    from accel_scale.starting.recipe_start import start_recipe

    start = start_recipe(parsed, output_dir=parsed.explicit.get("output_dir") or config_class.output_dir)
    start, sp_size = rows_in_groups(parsed, start)
    embedded = not any(parsed.explicit.get(name) for name in ("dataset_name", "dataset_mixture"))
    settings = resolve_planned(parsed, start.facts, start.launch, preset=DEFAULT_TRAINING if embedded else None)
    if not settings.values.get("model_name_or_path"):
        settings.set("model_name_or_path", default_model_path(), "the embedded model")
    return Run(
        settings=settings,
        start=start,
        script=settings.build(script_class),
        model_args=settings.build(model_class),
        sp_size=sp_size,
    )


def check(run: Run) -> None:
    """Refuse what cannot work before anything is loaded; say what the user may want to change."""
    from accel_scale.checks.case import refuse_errors
    from accel_scale.checks.registry import check_run
    from accel_scale.checks.run_settings import RunSettings
    from accel_scale.launching.memory_cap import cap_device_memory, fragmentation_advice
    from accel_scale.modeling.adapters import paged_optimizer_advice
    from accel_scale.modeling.attention import check_packing_strategy, choose_kernels, resolve_attention
    from accel_scale.modeling.loading import load_config, load_tokenizer
    from accel_scale.optimization.optimizers import check_optimizer
    from accel_scale.parallel.sequence_checks import check_sequence_parallel
    from accel_scale.settings.model_settings import check_model
    from accel_scale.settings.planned import plan_run
    from accel_scale.settings.trl_config import RecipeSFTConfig
    from accel_scale.start_check import check_sft_start

    if run.start.announcement:
        run.say(run.start.announcement)
    values = run.settings.values
    findings = check_run(RunSettings.from_flags(values, run.settings.sources), run.launch, run.start.machine)
    refuse_errors(findings)
    optim = values.get("optim", RecipeSFTConfig.optim)
    notes = check_optimizer(
        optim,
        device_type=run.device_type,
        strategy=run.launch.strategy,
        offload_optimizer=run.launch.parallel.offload_optimizer != "none",
        precision=run.settings.precision.name,
        max_grad_norm=values.get("max_grad_norm", RecipeSFTConfig.max_grad_norm),
        gradient_accumulation_steps=values.get("gradient_accumulation_steps", 1),
        optim_args=values.get("optim_args"),
        place=run.settings.sources.get("optim", "--optim"),
    )
    guard_args = run.settings.build(TrainerGuardArguments)
    run.guard, unguarded = guard_for(guard_args, optim, run.settings.sources.get("guard"))
    advice = [
        unguarded,
        fragmentation_advice(device_type=run.device_type),
        paged_optimizer_advice(method=run.settings.method, optim=optim, device_type=run.device_type),
    ]
    notes += [*run.settings.precision.notes, *filter(None, advice)]
    for line in [*(finding.one_line() for finding in findings), *notes]:
        run.say(f"warning: {line}")
    if run.settings.scale.device_memory:
        cap, rank = run.settings.scale.device_memory, run.launch.local_rank
        cap_device_memory(cap, device_type=run.device_type, device_index=rank)
    name = run.model_args.model_name_or_path
    how = {"revision": run.model_args.model_revision, "trust_remote_code": bool(values.get("trust_remote_code"))}
    run.model_config, run.tokenizer = load_config(name, **how), load_tokenizer(name, **how)
    check_model(run.settings, run.model_config, run.tokenizer, default_length=RecipeSFTConfig.max_length)
    if values.get("packing", True):
        check_packing_strategy(values.get("packing_strategy", "bfd"))
    run.attention = resolve_attention(
        run.model_args.attn_implementation,
        device=run.settings.launch.device,
        dtype=run.settings.precision.compute_dtype,
        packing=bool(values.get("packing", True) or values.get("padding_free")),
        model_config=run.model_config,
    )
    choose_kernels(run.settings.launch.device, lengths_vary=True)
    check_sequence_parallel(run.model_config, run.sp_size, run.sp_size, run.attention)
    run.start_check = check_sft_start(run.settings, run.model_args, run.model_config, run.attention, say=run.say)
    run.attention = run.start_check.attention
    run.plan = plan_run(run.settings, run.launch, run.model_config, run.attention, run.say)


# ── Load ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_data(run: Run) -> None:
    """Training rows, evaluation rows where asked for, and the questions of the exact-match report."""
    from accel_scale.data.default import default_data_paths, default_dataset
    from accel_scale.data.loading import load_training_data
    from accel_scale.settings.trl_config import RecipeSFTConfig
    from accel_scale.training.guard.learning import refuse_long_prompts

    script, scale, values = run.script, run.settings.scale, run.settings.values
    evaluates = str(values.get("eval_strategy", "no")) != "no"
    embedded = not script.dataset_name and not scale.dataset_mixture
    num_questions = scale.exact_match_samples if scale.exact_match_samples is not None else (200 if embedded else 0)
    train_path, heldout_path = default_data_paths()
    run.data = load_training_data(
        train_path if embedded else script.dataset_name,
        config=script.dataset_config,
        split=script.dataset_train_split,
        test_split=script.dataset_test_split if (evaluates or num_questions) and not embedded else None,
        columns=scale.columns,
        on_bad_row=scale.on_bad_row,
        streaming=script.dataset_streaming,
        mixture=scale.dataset_mixture,
        seed=int(values.get("seed", 42) if values.get("data_seed") is None else values["data_seed"]),
        chat=run.tokenizer.chat_template is not None or values.get("chat_template_path") is not None,
    )
    if embedded and evaluates:
        run.data = run.data.with_test(load_training_data(heldout_path).train)
    if num_questions:
        heldout = default_dataset()[1] if embedded else run.data.test  # the embedded rows name their task
        run.questions = [row for row, _ in zip(heldout, range(num_questions), strict=False)]
    refuse_long_prompts(run.data.train, run.tokenizer, values, max_length=RecipeSFTConfig.max_length)
    run.plan = run.plan and run.plan.for_data(run.data.train, run.tokenizer)


def load(run: Run) -> Any:
    """Model, adapters and trainer; sharded at load where the launch shards."""
    from accel_scale.data.chat import ensure_chat_template, ensure_stop_token
    from accel_scale.data.loaders import loader_settings
    from accel_scale.modeling import activation_checkpointing, adapters, precision
    from accel_scale.modeling.loading import add_stop_token, count_parameters, load_model
    from accel_scale.optimization.optimizers import optimizer_cls_and_kwargs
    from accel_scale.settings.trl_config import RecipeSFTConfig
    from accel_scale.training.trainers.sft_trainer import ScaleSFTTrainer
    from accel_scale.verifying import measured_memory

    settings = run.settings
    for name, value in loader_settings(
        device_type=run.device_type,
        num_rows=run.data.num_rows,
        processes_on_node=run.launch.local_world_size,
        num_shards=getattr(run.data.train, "num_shards", None) if run.data.num_rows is None else None,
        explicit={name: value for name, value in settings.values.items() if name.startswith("dataloader_")},
    ).items():
        settings.set(name, value, "derived from cores and data")
    args = settings.build(RecipeSFTConfig)
    ensure_chat_template(
        run.tokenizer,
        conversational=run.data.conversational,
        assistant_only_loss=args.assistant_only_loss,
        chat_template_path=args.chat_template_path,
    )
    stop_token = ensure_stop_token(
        run.tokenizer, conversational=run.data.conversational, chat_template_path=args.chat_template_path
    )
    if (args.chat_template_path or "").endswith((".jinja", ".j2")):
        args.chat_template_path = None  # the tokenizer has it by now, with an end of turn if that was missing
    quantization = adapters.quantization_config(
        run.model_args, precision=settings.precision, strategy=run.launch.strategy, device_type=run.device_type
    )
    trains_adapters = settings.method != "full"
    dtype = settings.precision.frozen_dtype if trains_adapters else settings.precision.model_dtype
    model = load_model(
        run.model_args.model_name_or_path,
        dtype=dtype,
        attn_implementation=run.attention,
        quantization_config=quantization,
        revision=run.model_args.model_revision,
        trust_remote_code=args.trust_remote_code,
        **(args.model_init_kwargs or {}),
    )
    args.model_init_kwargs = None
    if args.ddp_find_unused_parameters is None:
        args.ddp_find_unused_parameters = bool(run.start_check.untrained)  # looking takes time
    if quantization is not None:
        adapters.prepare_quantized_base(model, use_reentrant=settings.use_reentrant)
    if settings.precision.fp8:
        precision.convert_to_fp8(model, emulate=settings.precision.fp8_emulate)
    trainer = ScaleSFTTrainer(
        model=model,
        args=args,
        train_dataset=run.data.train,
        eval_dataset=run.data.test if args.eval_strategy != "no" else None,
        processing_class=run.tokenizer,
        peft_config=run.start_check.adapter,
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(
            args.optimizer_name,
            args,
            model=model,
            device_type=run.device_type,
            strategy=run.launch.strategy,
            offload_optimizer=run.launch.parallel.offload_optimizer != "none",
        ),
        schedule=settings.schedule,
        adapter_dtype=settings.precision.adapter_dtype if trains_adapters else None,
        verify_first_checkpoint=settings.scale.verify_first_checkpoint,
        recover_from_oom=settings.scale.recover_from_oom,
        guard=run.guard,
        questions=run.questions,
        sp_size=run.sp_size,
        loss_from_logits=run.start_check.loss_from_logits,
    )
    reentrant = run.start_check.use_reentrant
    activation_checkpointing.apply_checkpointing(trainer.model, settings.checkpointing, use_reentrant=reentrant)
    add_stop_token(trainer.model, run.tokenizer.convert_tokens_to_ids(stop_token))
    run.parameters, run.watch = count_parameters(trainer.model), measured_memory.watch(trainer, run.plan)
    return trainer


# ── Report ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def report_start(run: Run, trainer: Any) -> None:
    """The table before the first step: what will be trained, on what, how."""
    from accel_scale.reporting.run_tables import data_text
    from accel_scale.reporting.tables import format_count, print_table

    if not run.is_main:
        return
    args, settings = trainer.args, run.settings
    total, trainable = run.parameters
    per_step = f"{settings.global_batch_size} = {args.per_device_train_batch_size} × "
    per_step += f"{args.gradient_accumulation_steps} accumulated × {settings.launch.world_size} "
    per_step += "ranks" if run.sp_size == 1 else f"groups of {run.sp_size} ranks that share rows"
    packed = f"packed into rows of {args.max_length} tokens" if args.packing else "padded"
    length = f"{args.max_steps} steps" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
    print_table(
        "sft",
        {
            "model": f"{run.model_args.model_name_or_path}, {format_count(total)} parameters",
            "method": f"{settings.method}, {format_count(trainable)} trainable",
            "precision": settings.precision.name,
            "strategy": f"{run.launch.parallel.label}, {run.launch.world_size} × {run.start.machine.device_name}",
            "data": data_text(run.data.num_rows, run.data.format, run.data.sources),
            "skipped rows": ", ".join(f"{count} {reason}" for reason, count in run.data.skipped_reasons.items())
            or None,
            "batch": f"{per_step}, {packed}",
            "attention": run.attention,
            "memory": run.plan and run.plan.text,
            "checkpointing": str(settings.checkpointing),
            "optimizer": f"{args.optimizer_name}, {args.schedule_name} from {args.learning_rate:g}, {length}",
            "output": args.output_dir,
        },
    )


def report_end(run: Run, trainer: Any) -> dict[str, Any]:
    """The table after the last step, and ``run_summary.json`` beside the model."""
    from accel_scale.measuring.meters import peak_device_bytes, peak_host_bytes
    from accel_scale.reporting.run_tables import end_rows
    from accel_scale.reporting.summary import write_summary
    from accel_scale.reporting.tables import print_table

    figures, plan = trainer.figures(), run.watch and run.watch.report()  # collectives: every rank takes part
    if not run.is_main:
        return {}
    verified = trainer.first_verification
    summary = {
        "recipe": PROGRAM,
        **figures,
        "peak_host_bytes": peak_host_bytes(),
        "peak_device_bytes": peak_device_bytes(),
        "parameters": {"total": run.parameters[0], "trainable": run.parameters[1]},
        "skipped_rows": run.data.skipped_reasons,
        "verified": None if verified is None else {"tensors": verified.num_tensors, "max_diff": verified.max_abs_diff},
        "strategy": run.launch.strategy,
        "world_size": run.launch.world_size,
        "sp_size": run.sp_size,
        "rehearsal": run.start.announcement is not None,
        "attention": run.attention,
        "plan": plan,
        "finished": run.course.record(),
        "settings": run.settings.values,
        "origins": run.settings.sources,
    }
    path = write_summary(trainer.args.output_dir, summary)
    print_table("done", {**end_rows(summary), "saved": f"{trainer.args.output_dir} (with {path.name})"})
    if plan:
        run.say(plan["line"])
    return summary


if __name__ == "__main__":
    begin(PROGRAM, FLAG_CLASSES, RECIPE.refuse)
    with user_errors(PROGRAM):
        main()
