"""Code shared by the recipes with TRL's trainers: a run's parts, its checks before loading, its model, its summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_scale.flags.guard import TrainerGuardArguments, guard_for
from accel_scale.flags.library import FlagClass, load_classes
from accel_scale.starting.recipe_start import RecipeRun

if TYPE_CHECKING:  # torch and TRL are slow to import: only after the command line has been checked
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from trl import ScriptArguments

    from accel_scale.data.loading import LoadedData
    from accel_scale.flags.guard_settings import GuardSettings
    from accel_scale.settings.planned import RunPlan
    from accel_scale.settings.trl_config import RecipeConfig, RecipeModelConfig
    from accel_scale.start_check import Verdict
    from accel_scale.trainers.recipe_mixin import RecipeTrainerMixin
    from accel_scale.training.checkpoints.going_on import Course
    from accel_scale.verifying.measured_memory import MemoryWatch


@dataclass
class TrainerRun(RecipeRun):
    """Everything decided before training, step by step; later attributes have no value before their step."""

    script: ScriptArguments
    model_args: RecipeModelConfig
    sp_size: int = 1  # ranks that share each row
    # Set by `check`:
    guard: GuardSettings = field(init=False)
    model_config: PreTrainedConfig = field(init=False)
    tokenizer: PreTrainedTokenizerBase = field(init=False)
    checked: Verdict = field(init=False)
    plan: RunPlan | None = field(init=False)
    # Set by `load_data` and later:
    data: LoadedData = field(init=False)
    questions: list[dict[str, object]] = field(default_factory=list)
    course: Course = field(init=False)
    # Set by `make_trainer`:
    parameters: tuple[int, int] = field(init=False)  # all, trained
    watch: MemoryWatch | None = field(init=False)

    @property
    def model_name(self) -> str:
        """A folder or an id on the hub."""
        return str(self.settings.values["model_name_or_path"])


def check_run(run: TrainerRun) -> None:
    """Refuse what cannot work before anything is loaded; warn about settings the user may want to change."""
    from accel_scale.launching.memory_cap import cap_device_memory
    from accel_scale.modeling.attention import check_packing_strategy, choose_kernels, resolve_attention
    from accel_scale.modeling.loading import load_config, load_tokenizer
    from accel_scale.parallel.sequence_checks import check_sequence_parallel
    from accel_scale.settings.model_settings import check_model
    from accel_scale.settings.planned import plan_run
    from accel_scale.settings.planned_setup import recipe_value
    from accel_scale.start_check import check_sft_start, settle_open
    from accel_scale.starting.recipe_start import check_settings

    run.say_start()
    settings, values = run.settings, run.settings.values
    optim, max_grad_norm, longest = (recipe_value(settings, name) for name in ("optim", "max_grad_norm", "max_length"))
    warnings = check_settings(settings, run.start, optim=optim, max_grad_norm=max_grad_norm)
    run.guard, unguarded = guard_for(settings.build(TrainerGuardArguments), optim, settings.sources.get("guard"))
    for line in [*warnings, *filter(None, [unguarded])]:
        run.say(f"warning: {line}")
    if cap := settings.scale.device_memory:
        cap_device_memory(cap, device_type=run.device_type, device_index=run.launch.local_rank)
    revision = run.model_args.model_revision
    trusts = bool(values.get("trust_remote_code"))
    known = settings.model_config  # read by --plan auto
    run.model_config = known or load_config(
        run.model_name,
        revision=revision,
        trust_remote_code=trusts,
        dropout=settings.scale.model_dropout,
        rewards=settings.recipe.rewards,
        images=settings.recipe.has_images,
    )
    run.tokenizer = load_tokenizer(run.model_name, revision=revision, trust_remote_code=trusts)
    check_model(settings, run.model_config, run.tokenizer, default_length=longest)
    packing = bool(recipe_value(settings, "packing"))
    if packing:
        check_packing_strategy(values.get("packing_strategy", "bfd"))
    attention = resolve_attention(
        run.model_args.attn_implementation,
        device=settings.launch.device,
        dtype=settings.precision.compute_dtype,
        packing=packing or bool(values.get("padding_free")),
        model_config=run.model_config,
    )
    choose_kernels(settings.launch.device, lengths_vary=True)
    check_sequence_parallel(run.model_config, run.sp_size, run.sp_size, attention)
    settle_open(settings, run.launch, run.model_config, attention, run.say)
    run.checked = check_sft_start(settings, run.model_args, run.model_config, attention, say=run.say)
    run.plan = plan_run(settings, run.launch, run.model_config, run.checked.attention, run.say)


def course_of_run(run: TrainerRun, flag_classes: Sequence[FlagClass]) -> Course:
    """Determine whether the run starts, resumes or is finished."""
    from accel_scale.training.checkpoints.going_on import course_of_sft

    settings = run.settings
    return course_of_sft(
        settings.values,
        settings.sources,
        settings.outcome,
        load_classes(flag_classes),
        model_config=run.model_config,
        model_name=run.model_name,
        rows=run.data.train,
    )


def load_run_model(run: TrainerRun, args: RecipeConfig) -> PreTrainedModel:
    """Load the model in its training dtype, quantised if its base is frozen; ZeRO-3 shards it at load."""
    from accel_scale.modeling import adapters, loading, model_class, precision
    from accel_scale.modeling.adapter_targets import unquantised_modules
    from accel_scale.modeling.fused.liger import fuse_agreed

    settings = run.settings
    options = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}  # TRL has parsed text by now
    quantization = adapters.quantization_config(
        run.model_args, precision=settings.precision, strategy=run.launch.strategy
    )
    if quantization is not None and settings.recipe.has_images:
        quantization.llm_int8_skip_modules = unquantised_modules(loading.skeleton_of(run.model_config))
    model = loading.load_model(
        run.model_name,
        dtype=settings.precision.frozen_dtype if settings.trains_adapters else settings.precision.model_dtype,
        attn_implementation=run.checked.attention,
        quantization_config=quantization,
        revision=run.model_args.model_revision,
        trust_remote_code=args.trust_remote_code,
        rewards=settings.recipe.rewards,
        images=settings.recipe.has_images,
        **{**model_class.dropouts_of(run.model_config), **options},
    )
    fuse_agreed(settings.fused, model, settings.checkpointing, device_type=settings.launch.device_type)
    args.model_init_kwargs = None  # TRL's trainer does not need them once the model is loaded
    if quantization is not None:
        adapters.prepare_quantized_base(model, use_reentrant=settings.use_reentrant)
    if settings.precision.fp8:
        precision.convert_to_fp8(model, emulate=settings.precision.fp8_emulate)
    return model


def settle_data(run: TrainerRun) -> None:
    """Settle what depends on the rows: their memory, refused if there is not enough, and how they are read."""
    from accel_scale.data.loaders import loader_settings

    settings = run.settings
    run.plan = run.plan and run.plan.for_data(run.data.train, run.tokenizer)
    for name, value in loader_settings(
        device_type=run.device_type,
        num_rows=run.data.num_rows,
        processes_on_node=run.launch.local_world_size,
        num_shards=getattr(run.data.train, "num_shards", None) if run.data.num_rows is None else None,
        explicit={name: value for name, value in settings.values.items() if name.startswith("dataloader_")},
    ).items():
        settings.set(name, value, "derived from cores and data")


def prepare_chat(run: TrainerRun, *, assistant_only_loss: bool = False, chat_template_path: str | None = None) -> str:
    """Give the tokenizer a template suitable for training on turns; returns the token that ends a turn."""
    from accel_scale.data.chat import ensure_chat_template, ensure_stop_token

    conversational = run.data.conversational
    ensure_chat_template(
        run.tokenizer,
        conversational=conversational,
        assistant_only_loss=assistant_only_loss,
        chat_template_path=chat_template_path,
    )
    return ensure_stop_token(run.tokenizer, conversational=conversational, chat_template_path=chat_template_path)


def trainer_options(run: TrainerRun, args: RecipeConfig, model: PreTrainedModel) -> dict[str, Any]:
    """The arguments for `RecipeTrainerMixin` and any TRL trainer."""
    from accel_scale.optimization.optimizers import optimizer_cls_and_kwargs

    settings = run.settings
    if args.ddp_find_unused_parameters is None:
        args.ddp_find_unused_parameters = bool(run.checked.untrained)  # searching takes time
    return {
        "model": model,
        "args": args,
        "train_dataset": run.data.train,
        "eval_dataset": run.data.test if args.eval_strategy != "no" else None,
        "processing_class": run.tokenizer,
        "peft_config": run.checked.adapter,
        "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs(
            args.optimizer_name,
            args,
            model=model,
            device_type=run.device_type,
            strategy=run.launch.strategy,
            offload_optimizer=run.launch.parallel.offloads_optimizer,
        ),
        "schedule": settings.schedule,
        "adapter_dtype": settings.precision.adapter_dtype if settings.trains_adapters else None,
        "verify_first_checkpoint": settings.scale.verify_first_checkpoint,
        "recover_from_oom": settings.scale.recover_from_oom,
        "guard": run.guard,
        "questions": run.questions,
        "flags": settings.scale,
    }


def settle_trainer(run: TrainerRun, trainer: RecipeTrainerMixin, stop_token: str | None = None) -> None:
    """Apply settings to the trainer's model: checkpointing, the token that ends its answers, measurements."""
    from accel_scale.modeling.activation_checkpointing import apply_checkpointing
    from accel_scale.modeling.loading import add_stop_token, count_parameters
    from accel_scale.settings.planned_checkpointing import full_checkpointing
    from accel_scale.verifying import measured_memory

    settings = run.settings
    apply_checkpointing(trainer.model, settings.checkpointing, use_reentrant=(again := run.checked.use_reentrant))
    trainer.recompute_more = full_checkpointing(trainer.model, settings, run.course.settings, use_reentrant=again)
    if stop_token is not None:
        add_stop_token(trainer.model, run.tokenizer, stop_token)
    run.parameters, run.watch = count_parameters(trainer.model), measured_memory.watch(trainer, run.plan)


def report_start(run: TrainerRun, trainer: RecipeTrainerMixin, program: str) -> None:
    """Print the table before the first step: model, data and settings; also written to ``run_starts.jsonl``."""
    from accel_scale.reporting.run_tables import data_text
    from accel_scale.reporting.tables import format_count, print_table
    from accel_scale.settings.trl_config import RecipeSFTConfig
    from accel_scale.training.evaluation.progress import StartCallback

    if not run.is_main:
        return
    args, settings = trainer.args, run.settings
    known = run.record(program, parameters=run.parameters, attention=run.checked.attention)
    trainer.add_callback(StartCallback({**known, "plan": run.plan and run.plan.as_dict()}))
    total, trainable = run.parameters
    per_step = f"{settings.global_batch_size} = {args.per_device_train_batch_size} × "
    per_step += f"{args.gradient_accumulation_steps} accumulated × {settings.launch.world_size} "
    per_step += "ranks" if run.sp_size == 1 else f"groups of {run.sp_size} ranks that share rows"
    packed = "padded"
    if isinstance(args, RecipeSFTConfig) and args.packing:
        packed = f"packed into rows of {args.max_length} tokens"
    length = f"{args.max_steps} steps" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
    print_table(
        program.removesuffix(".py"),
        {
            "model": f"{run.model_name}, {format_count(total)} parameters",
            "method": f"{settings.method}, {format_count(trainable)} trainable",
            "precision": settings.precision.name,
            "strategy": f"{run.launch.parallel.label}, {run.launch.world_size} × {run.start.machine.device_name}",
            "data": data_text(run.data.num_rows, run.data.format, run.data.sources),
            "skipped rows": ", ".join(f"{count} {why}" for why, count in run.data.skipped_reasons.items()) or None,
            "batch": f"{per_step}, {packed}",
            "attention": run.checked.attention,
            "memory": run.plan and run.plan.text,
            "fused kernels": settings.fused_label,
            "checkpointing": settings.checkpointing.label,
            "optimizer": f"{args.optimizer_name}, {args.schedule_name} from {args.learning_rate:g}, {length}",
            "output": args.output_dir,
        },
    )


def report_end(run: TrainerRun, trainer: RecipeTrainerMixin, program: str) -> dict[str, object]:
    """Print the table after the last step, write ``run_summary.json`` and the model card by the model, then push."""
    summary = _report_end(run, trainer, program)
    if trainer.args.push_to_hub:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)
    return summary


def _report_end(run: TrainerRun, trainer: RecipeTrainerMixin, program: str) -> dict[str, object]:
    from accel_scale.measuring.meters import peak_device_bytes, peak_host_bytes
    from accel_scale.report_page.leaving import PAGE_NAME
    from accel_scale.reporting.model_card import write_card
    from accel_scale.reporting.run_tables import data_bound_advice, end_rows
    from accel_scale.reporting.summary import write_summary
    from accel_scale.reporting.tables import print_table

    figures, plan = trainer.figures(), run.watch and run.watch.report()  # collectives: every rank takes part
    if not run.is_main:
        return {}
    verified = trainer.first_verification
    summary = {
        **figures,
        "peak_host_bytes": peak_host_bytes(),
        "peak_device_bytes": peak_device_bytes(),
        "data": {"sources": run.data.sources, "rows": run.data.num_rows, "format": run.data.format},
        "skipped_rows": run.data.skipped_reasons,
        "verified": None if verified is None else {"tensors": verified.num_tensors, "max_diff": verified.max_abs_diff},
        "sp_size": run.sp_size,
        "plan": plan,
        "finished": run.course.record(),
        **run.record(program, parameters=run.parameters, attention=run.checked.attention),
    }
    path = write_summary(str(trainer.args.output_dir), summary)
    write_card(path)
    print_table("done", {**end_rows(summary), "saved": f"{trainer.args.output_dir} (with {path.name}, {PAGE_NAME})"})
    if plan:
        run.say(plan["line"])
    if advice := data_bound_advice(figures["data_wait_ratio"]):
        run.say(advice)
    return summary
