"""Pretrain a causal language model, from scratch or from a checkpoint, in a plain Accelerate loop that loses no work.

    accelerate launch recipes/pretrain.py                    # embedded text and model: 2 minutes on two CPU cores
    accelerate launch recipes/pretrain.py --num_params 124M --train_tokenizer --data 'web/*.jsonl' --max_tokens 2.5B
    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/pretrain.py \\
        --model_name_or_path meta-llama/Llama-3.1-8B --data law=0.7 web=0.3 --max_steps 2000 --lr_scheduler_type wsd

Run the same command again to continue from the last good checkpoint. `--help` lists the flags, `--config_file` reads
them from YAML, `--print_config` shows what was decided and why.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from accel_scale.ending.user_errors import exit_if_not_saved, user_errors
from accel_scale.flags.guard import GuardArguments
from accel_scale.flags.library import load_classes
from accel_scale.flags.parallel import ParallelArguments
from accel_scale.flags.parsing import ParsedFlags, parse_flags
from accel_scale.flags.pretraining import PretrainArguments, PretrainDataArguments, PretrainModelArguments
from accel_scale.pretraining.run import Run
from accel_scale.quiet import quiet_imports
from accel_scale.recipe_specs.pretrain import PRETRAIN
from accel_scale.report_page.leaving import held_folder
from accel_scale.starting.begin import begin

if TYPE_CHECKING:  # torch is slow to import: only after the command line has been checked
    import torch

    from accel_scale.optimization.batch_splitting import Part
    from accel_scale.plugin.loop_watch import LoopWatch
    from accel_scale.pretraining.report import PretrainReport
    from accel_scale.training.checkpoints.manager import CheckpointManager
    from accel_scale.training.guard.guard import Guard
    from accel_scale.training.guard.guarded_step import GuardedStep
    from accel_scale.training.saving.verification import VerifyResult

RECIPE = PRETRAIN  # the description that doctor, plan, rehearse, scaling-test, launch-script and tune.py use
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
    check(run)
    with held_folder(run), exit_if_not_saved(PROGRAM):
        load_data(run)
        if finished := run.course.look_ahead():
            run.accelerator.end_training()
            return run.course.say_finished(finished, is_main=run.is_main)
        load_model(run)
        return train(run, started)


# ── Resolve ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def resolve_run(parsed: ParsedFlags) -> Run:
    """Combine flags, launch and machine; contradictions are refused here."""
    from accel_scale.data.default import DEFAULT_PRETRAINING
    from accel_scale.settings.resolve import resolve
    from accel_scale.starting.layout import layout_of, with_layout
    from accel_scale.starting.recipe_start import start_recipe

    start = start_recipe(parsed, output_dir=parsed.explicit.get("output_dir", PretrainArguments.output_dir))
    RECIPE.refuse(parsed)
    layout = layout_of(parsed, start.launch)
    start = with_layout(start, layout)
    embedded = not parsed.explicit.get("data")
    settings = resolve(parsed, start.facts, preset=DEFAULT_PRETRAINING if embedded else None)
    for flags in load_classes(FLAG_CLASSES):  # from here on, unset flags have their defaults
        settings.values = {**vars(settings.build(flags)), **settings.values}
    return Run(
        settings=settings,
        start=start,
        model_args=settings.build(PretrainModelArguments),
        data_args=settings.build(PretrainDataArguments),
        args=settings.build(PretrainArguments),
        parallel_args=settings.build(ParallelArguments),
        guard_args=settings.build(GuardArguments),
        layout=layout,
        embedded=embedded,
    )


def check(run: Run) -> None:
    """Refuse what cannot work before anything is loaded; warn about settings the user may want to change."""
    from accel_scale.launching.memory_cap import cap_device_memory
    from accel_scale.starting.recipe_start import check_settings

    run.say_start()
    args = run.args
    for line in check_settings(run.settings, run.start, optim=args.optim, max_grad_norm=args.max_grad_norm):
        run.say(f"warning: {line}")
    if args.device_memory:
        cap_device_memory(args.device_memory, device_type=run.device_type, device_index=run.launch.local_rank)


# ── Load ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_data(run: Run) -> None:
    """Create the accelerator, tokenizer and data; rank 0 writes the files that all ranks read."""
    from accel_scale.data.default import default_model_path, default_pretraining_text
    from accel_scale.pretraining.accelerator import plain_accelerator
    from accel_scale.pretraining.model import open_data, run_config, run_tokenizer
    from accel_scale.training.checkpoints.going_on import course_of_pretraining

    args, data_args, settings = run.args, run.data_args, run.settings
    run.accelerator = plain_accelerator(
        args, settings, compile_layers=bool(run.model_args.torch_compile), ranks_share_model=not run.layout.is_plain
    )
    with run.accelerator.main_process_first():
        if run.embedded:
            data_args.data = [default_pretraining_text(f"{args.output_dir}/data")]
        run.tokenizer = run_tokenizer(run.model_args, data_args, args.output_dir, default=default_model_path())
    run.data = open_data(data_args, run.tokenizer, seed=args.seed)
    run.model_config = run_config(run.model_args, data_args.max_length, run.tokenizer, dropout=args.model_dropout)
    run.course = course_of_pretraining(
        args, settings.values, settings.sources, settings.outcome, model_config=run.model_config, files=run.data.files
    )
    for note in run.data.notes:
        run.say(f"note: {note}")


def load_model(run: Run) -> None:
    """Create model, optimizer and schedule, prepared for the launch's strategy."""
    from accel_scale.modeling.attention import choose_kernels, resolve_attention
    from accel_scale.modeling.fused.liger import fuse_agreed
    from accel_scale.modeling.loading import count_parameters
    from accel_scale.optimization.fast_loss import add_fast_lm_head, tell_zero3
    from accel_scale.optimization.router_loss import RouterLoss
    from accel_scale.optimization.schedules import create_schedule
    from accel_scale.plugin.preparing import prepare_model, step_once_per_update
    from accel_scale.pretraining.model import build_model
    from accel_scale.pretraining.parallel import check_layout, planned_sharing, prepare_all, share_model
    from accel_scale.pretraining.resolve import make_optimizer, run_length, schedule_settings
    from accel_scale.pretraining.trunk import schedule_record, trunk_step
    from accel_scale.settings.planned import plan_run
    from accel_scale.start_check import check_pretrain_start, settle_open

    settings, launch, layout, config = run.settings, run.launch, run.layout, run.model_config
    isolates = run.data_args.isolate_documents
    attention = resolve_attention(
        run.model_args.attn_implementation,
        device=settings.launch.device,
        dtype=settings.precision.compute_dtype,
        packing=isolates,
        model_config=config,
    )
    choose_kernels(settings.launch.device, lengths_vary=isolates)
    sharing = planned_sharing(layout, run.parallel_args)
    settle_open(settings, launch, config, attention, run.say, shared=sharing)
    check_layout(layout, settings, run.parallel_args, config, attention)
    checked = check_pretrain_start(
        settings, run.model_args, config, attention, isolate_documents=isolates, layout=layout, say=run.say
    )
    run.attention = checked.attention
    run.course.keep(settings.values, "checkpointing_policy", "fused_kernels")
    run.plan = plan_run(settings, launch, config, run.attention, run.say, shared=sharing)
    base = build_model(
        run.model_args, config, settings.precision, run.attention, seed=run.args.seed, launch=launch, layout=layout
    )
    fuse_agreed(settings.fused, base, settings.checkpointing, device_type=run.device_type)
    add_fast_lm_head(base, from_logits=checked.loss_from_logits)
    if not checked.loss_from_logits:
        tell_zero3(base)
    model = prepare_model(
        base,
        strategy=launch.parallel.kind,
        device_type=run.device_type,
        precision=settings.precision,
        policy=settings.checkpointing,
        adapter=checked.adapter,
    )
    run.parameters = count_parameters(model)
    run.length = run_length(settings, trunk_step=trunk_step(run.args.decay_from), num_params=run.parameters[0])
    run.parallel = share_model(run.accelerator, model, layout, settings, run.parallel_args, launch)
    run.router = RouterLoss.of(run.accelerator, config)
    optimizer = make_optimizer(run.parallel or model, settings, launch)
    rates = schedule_settings(settings, run.length)
    schedule, run.schedule_record = create_schedule(optimizer, **rates), schedule_record(rates)
    run.model, run.optimizer, run.schedule = prepare_all(run.accelerator, model, run.parallel, optimizer, schedule)
    step_once_per_update(run.schedule)


# ── Train ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(run: Run, started: float) -> dict[str, object]:
    """The training loop: draw, forward, backward, clip, step; log, validate and save when due."""
    from accel_scale.facts.exit_statuses import EXIT_STOPPED
    from accel_scale.flags.guard_settings import settings_from
    from accel_scale.measuring.meters import ThroughputMeter, clock_of
    from accel_scale.plugin.loop_watch import LoopWatch
    from accel_scale.pretraining.compile_trial import CompileTrial
    from accel_scale.pretraining.recovery import memory_recovery
    from accel_scale.pretraining.report import PretrainReport
    from accel_scale.reporting.metrics_log import MetricsLog
    from accel_scale.training.checkpoints.manager import CheckpointManager
    from accel_scale.training.evaluation.validation import evaluate_loss, total_over_ranks
    from accel_scale.training.guard.guard import Guard
    from accel_scale.training.guard.guarded_step import GuardedStep, stop_run
    from accel_scale.training.guard.learning import WeightsBefore, refuse_unlearnt

    accelerator, model, args, length = run.accelerator, run.model, run.args, run.length
    manager = CheckpointManager(
        accelerator,
        args.output_dir,
        keep_last=args.keep_last,
        keep_every=args.keep_every,
        asynchronous=args.async_save,
        settings=run.course.settings,
        allow_changed_settings=args.allow_changed_settings,
    )
    guard = Guard(settings_from(run.guard_args))
    manager.register("guard", guard)
    resume(run, manager, run.course.how)
    step = GuardedStep(
        accelerator, model, run.optimizer, guard=guard, max_grad_norm=args.max_grad_norm, first_step=run.step + 1
    )
    metrics = MetricsLog(args.output_dir, run.is_main, resumed_step=run.step)
    report = PretrainReport(run, metrics, ThroughputMeter(clock_of(accelerator.device.type)), started)
    if run.guard_args.guard == "rollback" and run.step == 0:
        manager.save(0, run_state(run, report))  # there must be something to roll back to
    watch = LoopWatch(accelerator, model, run.optimizer, report.meter, run.plan)
    compiling = CompileTrial.of(run)
    report.start()
    before, first_step = WeightsBefore.of(model), run.step
    tokens_per_step = run.settings.global_batch_size * run.data_args.max_length
    model.train()
    why_stopped = None
    recovery = memory_recovery(run, step, report, program=PROGRAM)
    with report.watched_steps() as profiler, recovery:
        while run.step < length.num_steps and why_stopped is None:
            report.meter.start_step()
            drawn = next(run.batches)
            report.meter.fetched()
            run.drawn += 1
            if run.drawn in run.avoided:
                continue
            step.step_number = recovery.step_number = run.step + 1  # a skipped step does not count
            num_tokens = total_over_ranks(accelerator, drawn.num_predicted)
            num_micro_batches = len(drawn.micro_batches)
            if run.parallel is not None and run.parallel.pipeline is not None:
                batches = [run.on_device(rows) for rows in drawn.micro_batches]
                losses = run.parallel.pipeline.forward_backward(batches, num_tokens, step.loss_factor)
                step.record(losses, drawn.row_ids)
            else:
                one_pass = partial(forward_backward, run, step, watch, num_tokens, num_micro_batches)
                for number, (rows, row_ids) in enumerate(zip(drawn.micro_batches, drawn.row_ids, strict=True), 1):
                    # One pass, or several smaller passes with the same gradients after memory has run out.
                    recovery.micro_batch({**rows, "row_ids": row_ids}, one_pass, is_last=number == num_micro_batches)
            grad_norm = step.clip()  # clips to --max_grad_norm; returns the norm before clipping
            outcome = step.judge(grad_norm)  # the verdict of --guard on loss and norm
            learning_rate = run.learning_rate
            if step.optimizer_step(outcome):
                run.schedule.step()
            watch.stepped()
            if outcome.action == "stop":
                stop_run(accelerator, outcome, program=PROGRAM)
            if outcome.action == "rollback":
                roll_back(run, manager, guard, report)
                continue
            run.step += outcome.taken
            report.stepped(outcome, learning_rate, tokens=tokens_per_step, row_ids=drawn.row_ids)
            compiling.stepped(report.meter.since_start(), length.num_steps - run.step, taken=outcome.taken)
            profiler.step()
            why_stopped = length.reason_to_stop(manager, started)
            is_end = run.step == length.num_steps or why_stopped is not None
            is_evaluated = outcome.taken and is_due(run.step, length.eval_steps, is_end)
            if run.held_out is not None and is_evaluated and why_stopped != "a signal":
                report.evaluated(evaluate_loss(accelerator, model, run.held_out))
            if why_stopped or (outcome.taken and length.save_steps and is_due(run.step, length.save_steps, is_end)):
                manager.save(run.step, run_state(run, report), final=is_end)
            watch.resume_watch()
    compiling.close()
    manager.finish()
    if run.step > first_step and why_stopped != "a signal":
        refuse_unlearnt(model, before=before, num_steps=run.step - first_step, last_loss=report.last_loss)
    summary = report.end(save_model(run, report, why_stopped), why_stopped, watch.report())
    manager.close()
    accelerator.end_training()
    if why_stopped == "a signal":
        run.say_stopped(
            f"saved checkpoint-{run.step} after {manager.stopped_by}; the same command continues from there"
        )
        raise SystemExit(EXIT_STOPPED)
    return summary


def forward_backward(
    run: Run, step: GuardedStep, watch: LoopWatch, num_tokens: torch.Tensor, num_micro_batches: int, part: Part
) -> torch.Tensor:
    """Run one pass over a micro-batch or a part of it; returns its share of the global batch's mean loss."""
    from accel_scale.optimization.fast_loss import language_model_loss

    rows, is_last = part.inputs, run.accelerator.sync_gradients
    batch = run.on_device(rows)
    with step.micro_batch(is_last=is_last, row_ids=rows["row_ids"]), watch.micro_batch(batch):
        with run.accelerator.autocast():
            loss = part.factor * language_model_loss(
                run.model,
                batch,
                num_tokens,
                router=run.router,
                num_micro_batches=num_micro_batches,
                facts=run.facts(rows),
            )
        step.backward(loss * step.loss_factor)
    return loss.detach()


def is_due(step: int, every: int, is_end: bool) -> bool:
    """True at multiples of `every`, and at the end."""
    return is_end or (every > 0 and step % every == 0)


# ── Save and resume ──────────────────────────────────────────────────────────────────────────────────────────────────


def run_state(run: Run, report: PretrainReport) -> dict[str, object]:
    """The contents of a checkpoint besides weights, optimizer, schedule and random states; collective."""
    from accelerate.utils import gather_object

    from accel_scale.data.pretraining import merge_states

    return {
        "drawn": run.drawn,
        "avoided": run.avoided,
        "tokens": run.tokens,
        "counted": report.counters(),
        "compiling": run.compiling,
        "data": merge_states(gather_object([run.batches.state_dict()])),
        "schedule": run.schedule_record,
    }


def resume(run: Run, manager: CheckpointManager, how: str) -> None:
    """Resume from a checkpoint if there is one; the data continues from its position without a replay."""
    from accel_scale.pretraining.model import open_batches

    resumed = manager.resume(how)
    if resumed is None and run.args.decay_from:
        resumed = manager.resume(run.args.decay_from, compare=False)  # a new branch; its own checkpoints come first
    state = resumed.state if resumed else {}
    run.step, run.drawn, run.tokens = resumed.step if resumed else 0, state.get("drawn", 0), state.get("tokens", 0)
    run.avoided = sorted({*run.avoided, *state.get("avoided", [])})
    run.counted, run.compiling = state.get("counted", {}), run.compiling or state.get("compiling", {})
    open_batches(run, state.get("data"))


def roll_back(run: Run, manager: CheckpointManager, guard: Guard, report: PretrainReport) -> None:
    """Return to the last good checkpoint and leave out the batch that was just drawn."""
    kept, bad = guard.state_dict(), run.drawn
    run.avoided.append(bad)
    run.batches.close()
    resume(run, manager, "auto")
    restored = guard.state_dict()
    guard.load_state_dict(kept)  # events since the checkpoint stay counted, so that rollbacks come to an end
    guard.roll_back(restored)
    report.rolled_back()
    run.say(f"rolled back to step {run.step:,}; batch {bad:,} will be left out")


def save_model(run: Run, report: PretrainReport, why_stopped: str | None) -> VerifyResult | None:
    """Write the final folder, which plain `from_pretrained` loads, and generate a sample text."""
    from accel_scale.pretraining.parallel import save_model_of

    if why_stopped == "a signal":
        return None  # there is little time left, and the checkpoint is already saved
    if run.args.sample_tokens and run.layout.can_generate:
        report.sample = run.sample()
    return save_model_of(
        run.accelerator, run.model, run.parallel, run.tokenizer, run.args.output_dir, method=run.settings.method
    )


if __name__ == "__main__":
    begin(PROGRAM, FLAG_CLASSES, RECIPE.refuse)
    with user_errors(PROGRAM):
        main()
