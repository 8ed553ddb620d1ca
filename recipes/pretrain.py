"""Pretrain a causal language model, from nothing or from a model, in a plain Accelerate loop that loses no work.

    accelerate launch recipes/pretrain.py                    # embedded text and model: 2 minutes on two CPU cores
    accelerate launch recipes/pretrain.py --num_params 124M --train_tokenizer --data 'web/*.jsonl' --max_tokens 2.5B
    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/pretrain.py \
        --model_name_or_path meta-llama/Llama-3.1-8B --data law=0.7 web=0.3 --max_steps 2000 --lr_scheduler_type wsd

The same command again goes on where the last good checkpoint left off. `--help` lists the flags, `--config_file` reads
them from YAML, `--print_config` shows what was decided and why.
"""

from __future__ import annotations

import time
from typing import Any

from accel_scale.ending.user_errors import user_errors
from accel_scale.flags.parsing import ParsedFlags, parse_flags
from accel_scale.flags.pretraining import PretrainArguments
from accel_scale.quiet import quiet_imports
from accel_scale.recipe_specs.pretrain import PRETRAIN
from accel_scale.starting.begin import begin
from accel_scale.training.pretrain.run import Run

RECIPE = PRETRAIN  # what doctor, plan, rehearse, scaling-test, launch-script and tune.py know about this file
PROGRAM, FLAG_CLASSES = RECIPE.program, RECIPE.flags
quiet_imports()  # before the libraries that would print at import


def main(argv: list[str] | None = None) -> dict[str, Any] | None:
    """Run the recipe; returns what `run_summary.json` holds."""
    from accel_scale.ending.user_errors import exit_if_not_saved

    started = time.perf_counter()
    parsed = parse_flags(FLAG_CLASSES, argv, program=PROGRAM, description=__doc__)
    run = resolve_run(parsed)
    if run.settings.scale.print_config:
        if run.is_main:
            print(run.settings.as_yaml(FLAG_CLASSES))
        return None
    check(run)
    with run.start.folder.taken(is_main=run.is_main), exit_if_not_saved(PROGRAM):
        load_data(run)
        if finished := run.course.look_ahead():
            run.accelerator.end_training()
            return run.course.say_finished(finished, is_main=run.is_main)
        load_model(run)
        return train(run, started)


# ── Resolve ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def resolve_run(parsed: ParsedFlags) -> Run:
    """Flags, launch and machine brought together; contradictions are refused here."""
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
    flags = [settings.build(cls) for cls in FLAG_CLASSES]
    for group in flags:  # what nobody has set has its default from here on
        settings.values = {**vars(group), **settings.values}
    return Run(settings, start, *flags, layout=layout, embedded=embedded)


def check(run: Run) -> None:
    """Refuse what cannot work before anything is loaded; say what the user may want to change."""
    from accel_scale.launching.memory_cap import cap_device_memory
    from accel_scale.starting.recipe_start import check_settings

    if run.start.announcement:
        run.say(run.start.announcement)
    for line in check_settings(run.settings, run.start):
        run.say(f"warning: {line}")
    if run.args.device_memory:
        device = run.settings.launch.device_type
        cap_device_memory(run.args.device_memory, device_type=device, device_index=run.launch.local_rank)


# ── Load ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_data(run: Run) -> None:
    """Accelerator, tokenizer and data; rank 0 makes what all of them read."""
    from accel_scale.data.default import default_model_path, default_pretraining_text
    from accel_scale.training.checkpoints.going_on import course_of_pretraining
    from accel_scale.training.pretrain.accelerator import plain_accelerator
    from accel_scale.training.pretrain.model import open_data, run_config, run_tokenizer

    args, data_args, settings = run.args, run.data_args, run.settings
    run.accelerator = plain_accelerator(
        mixed_precision=settings.precision.mixed_precision,
        micro_batch_size=args.per_device_train_batch_size,
        accumulation=int(settings.values.get("gradient_accumulation_steps", 1)),
        sync_each_batch=args.sync_each_batch,
        max_grad_norm=args.max_grad_norm,
        output_dir=args.output_dir,
        report_to=args.report_to,
        compile_layers=run.model_args.torch_compile,
        ddp=args,
        collective_timeout=args.collective_timeout,
        ranks_share_model=not run.layout.is_plain,
    )
    with run.accelerator.main_process_first():
        if run.embedded:
            data_args.data = [default_pretraining_text(f"{args.output_dir}/data")]
        run.tokenizer = run_tokenizer(run.model_args, data_args, args.output_dir, default=default_model_path())
    run.data = open_data(args, data_args, run.tokenizer)
    run.model_config = run_config(run.model_args, data_args.max_length, run.tokenizer)
    run.course = course_of_pretraining(run)
    for note in run.data.notes:
        run.say(f"note: {note}")


def load_model(run: Run) -> None:
    """Model, optimizer and schedule, prepared for the launch's strategy."""
    from accel_scale.modeling import attention
    from accel_scale.modeling.loading import count_parameters
    from accel_scale.optimization.fast_loss import add_fast_lm_head, tell_zero3
    from accel_scale.optimization.router_loss import RouterLoss
    from accel_scale.optimization.schedules import create_schedule
    from accel_scale.plugin.preparing import prepare_model, step_once_per_update
    from accel_scale.start_check import check_pretrain_start
    from accel_scale.training.pretrain import resolve as pretrain_resolve
    from accel_scale.training.pretrain import trunk
    from accel_scale.training.pretrain.model import build_model, plan_memory
    from accel_scale.training.pretrain.parallel import build_to_share, check_layout, prepare_all, share_model

    args, settings, device_type = run.args, run.settings, run.settings.launch.device_type
    run.attention = attention.resolve_attention(
        run.model_args.attn_implementation,
        device=settings.launch.device,
        dtype=settings.precision.compute_dtype,
        packing=run.data_args.isolate_documents,
        model_config=run.model_config,
    )
    attention.choose_kernels(settings.launch.device, lengths_vary=run.data_args.isolate_documents)
    check_layout(run)
    verdict = check_pretrain_start(run)
    run.attention = verdict.attention
    run.plan = plan_memory(run)
    model = build_to_share(
        run,
        lambda: build_model(
            run.model_args, run.model_config, settings.precision, run.attention, seed=args.seed, launch=run.launch
        ),
    )
    add_fast_lm_head(model, from_logits=verdict.loss_from_logits)
    if not verdict.loss_from_logits:
        tell_zero3(model)
    model = prepare_model(
        model,
        strategy=run.launch.parallel.kind,
        device_type=device_type,
        precision=settings.precision,
        policy=settings.checkpointing,
        adapter=verdict.adapter,
    )
    run.parameters = count_parameters(model)
    trunk_step = trunk.trunk_step(args.decay_from)
    run.length = pretrain_resolve.run_length(settings, trunk_step=trunk_step, num_params=run.parameters[0])
    run.parallel, run.router = share_model(run, model), RouterLoss.of(run.accelerator, run.model_config)
    optimizer = pretrain_resolve.make_optimizer(run.parallel or model, settings, run.launch)
    rates = pretrain_resolve.schedule_settings(settings, run.length)
    schedule, run.schedule_record = create_schedule(optimizer, **rates), trunk.schedule_record(rates)
    run.model, run.optimizer, run.schedule = prepare_all(run, model, optimizer, schedule)
    step_once_per_update(run.schedule)


# ── Train ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(run: Run, started: float) -> dict[str, Any]:
    """The loop: draw, forward, backward, step; log, validate and save when it is time."""
    from accel_scale.facts.exit_statuses import EXIT_STOPPED
    from accel_scale.flags.guard_settings import settings_from
    from accel_scale.measuring.meters import ThroughputMeter, clock_of
    from accel_scale.measuring.profiling import step_profiler
    from accel_scale.plugin.loop_watch import LoopWatch
    from accel_scale.reporting.metrics_log import MetricsLog
    from accel_scale.training.checkpoints.manager import CheckpointManager
    from accel_scale.training.guard.guard import Guard
    from accel_scale.training.guard.guarded_step import GuardedStep, stop_run
    from accel_scale.training.guard.learning import WeightsBefore, refuse_unlearnt
    from accel_scale.training.pretrain.report import PretrainReport

    accelerator, args, length = run.accelerator, run.args, run.length
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
        accelerator, run.model, run.optimizer, run.schedule, guard=guard, max_grad_norm=args.max_grad_norm,
        output_dir=args.output_dir, first_step=run.step + 1,
    )  # fmt: skip
    metrics = MetricsLog(args.output_dir, run.is_main, resumed_step=run.step)
    report = PretrainReport(run, metrics, ThroughputMeter(clock_of(accelerator.device.type)), started)
    if run.guard_args.guard == "rollback" and run.step == 0:
        manager.save(0, run_state(run, report))  # there must be something to roll back to
    watch = LoopWatch(accelerator, run.model, run.optimizer, report.meter, run.plan)
    report.start()
    before, first_step = WeightsBefore.of(run.model), run.step
    run.model.train()
    why_stopped = None
    with step_profiler(args.profile_steps, args.output_dir, is_main=run.is_main) as profiler:
        while run.step < length.num_steps and why_stopped is None:
            report.meter.start_step()
            drawn = next(run.batches)
            report.meter.fetched()
            run.drawn += 1
            if run.drawn in run.avoided:
                continue
            forward_backward(run, step, watch, drawn)
            step.step_number = run.step + 1  # a skipped step does not count
            rate, outcome = run.learning_rate, step.finish()
            watch.stepped()
            if outcome.action == "stop":
                stop_run(accelerator, outcome, program=PROGRAM)
            if outcome.action == "rollback":
                roll_back(run, manager, guard, report)
                continue
            run.step += outcome.taken
            tokens = run.settings.global_batch_size * run.data_args.max_length
            report.stepped(outcome, rate, tokens=tokens, row_ids=drawn.row_ids)
            profiler.step()
            why_stopped = reason_to_stop(run, manager, started)
            is_end = run.step == length.num_steps or why_stopped is not None
            if why_stopped != "a signal" and outcome.taken and is_due(run.step, length.eval_steps, is_end):
                evaluate(run, report)
            if why_stopped or (outcome.taken and length.save_steps and is_due(run.step, length.save_steps, is_end)):
                manager.save(run.step, run_state(run, report), final=is_end)
            watch.resume_watch()
    manager.finish()
    if run.step > first_step and why_stopped != "a signal":
        refuse_unlearnt(run.model, before=before, num_steps=run.step - first_step, last_loss=report.last_loss)
    verified = save_model(run, report, why_stopped)
    summary = report.end(verified, why_stopped, watch.report())
    manager.close()
    accelerator.end_training()
    if why_stopped == "a signal":
        run.say_stopped(
            f"saved checkpoint-{run.step} after {manager.stopped_by}; the same command continues from there"
        )
        raise SystemExit(EXIT_STOPPED)
    return summary


def forward_backward(run: Run, step: Any, watch: Any, drawn: Any) -> None:
    """Gradients of one optimizer step: of its micro-batches one by one, or in the order of a pipeline's schedule."""
    from accel_scale.optimization.fast_loss import language_model_loss
    from accel_scale.training.evaluation.validation import total_over_ranks
    from accel_scale.training.pretrain.parallel import run_pipeline

    device = run.accelerator.device
    num_tokens = total_over_ranks(run.accelerator, drawn.num_predicted)
    if run.layout.pp > 1:
        run_pipeline(run, step, drawn, num_tokens)
        return
    for index, (batch, row_ids) in enumerate(zip(drawn.micro_batches, drawn.row_ids, strict=True)):
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        batch = run.parallel.local(batch) if run.parallel else batch
        is_last = index + 1 == len(drawn.row_ids)
        with step.micro_batch(is_last=is_last, row_ids=row_ids), watch.micro_batch(batch):
            with run.accelerator.autocast():
                parts = {"router": run.router, "num_micro_batches": len(drawn.row_ids)}
                loss = language_model_loss(run.model, batch, num_tokens, **parts)
            step.backward(loss * step.loss_factor)


def is_due(step: int, every: int, is_end: bool) -> bool:
    """Whether something happens after `step`: at multiples of `every`, and at the end."""
    return is_end or (every > 0 and step % every == 0)


def reason_to_stop(run: Run, manager: Any, started: float) -> str | None:
    """A signal on any rank, or the time limit by rank 0's clock; the same answer on all of them."""
    from accel_scale.modeling.gathering import broadcast_from_main

    if manager.should_stop():
        return "a signal"
    if run.length.seconds is None:
        return None
    return "--max_train_time" if broadcast_from_main(time.perf_counter() - started > run.length.seconds) else None


def evaluate(run: Run, report: Any) -> None:
    """Loss on held-out rows, if there are any."""
    from accel_scale.training.evaluation.validation import evaluate_loss

    if run.held_out is not None:
        report.evaluated(evaluate_loss(run.accelerator, run.model, run.held_out))


# ── Save and resume ──────────────────────────────────────────────────────────────────────────────────────────────────


def run_state(run: Run, report: Any) -> dict[str, Any]:
    """What a checkpoint holds beside weights, optimizer, schedule and random states; collective."""
    from accelerate.utils import gather_object

    from accel_scale.data.pretraining import merge_states

    return {
        "drawn": run.drawn,
        "avoided": run.avoided,
        "tokens": run.tokens,
        "counted": report.counters(),
        "data": merge_states(gather_object([run.batches.state_dict()])),
        "schedule": run.schedule_record,
    }


def resume(run: Run, manager: Any, how: str) -> None:
    """Take up a checkpoint where there is one; the data goes on from its position, without a replay."""
    resumed = manager.resume(how)
    if resumed is None and run.args.decay_from:
        resumed = manager.resume(run.args.decay_from, compare=False)  # a branch begins; its own checkpoints come first
    state = resumed.state if resumed else {}
    run.step, run.drawn, run.tokens = resumed.step if resumed else 0, state.get("drawn", 0), state.get("tokens", 0)
    run.avoided = sorted({*run.avoided, *state.get("avoided", [])})
    run.counted = state.get("counted", {})
    open_batches(run, state.get("data"))


def open_batches(run: Run, position: dict[str, Any] | None) -> None:
    """The endless batches from a position on, and the held-out rows."""
    from accel_scale.training.pretrain.model import num_workers

    rank = {"rank": run.layout.data_rank(run.launch.rank), "world_size": run.layout.data_ranks}
    device_type = run.accelerator.device.type
    micro = run.args.per_device_train_batch_size
    if run.batches is not None:
        run.batches.close()
    run.batches = run.data.train_loader(
        global_batch_size=run.settings.global_batch_size,
        micro_batch_size=micro,
        num_workers=num_workers(run.data_args, run.launch, device_type=device_type, embedded=run.embedded),
        state=position,
        pin_memory=device_type == "cuda",
        **rank,
    )
    if run.data.has_validation:
        run.held_out = run.data.validation_loader(micro_batch_size=micro, max_rows=run.args.eval_rows, **rank)


def roll_back(run: Run, manager: Any, guard: Any, report: Any) -> None:
    """Back to the last good checkpoint, to go around the batch that was just drawn."""
    kept, bad = guard.state_dict(), run.drawn
    run.avoided.append(bad)
    resume(run, manager, "auto")
    restored = guard.state_dict()
    guard.load_state_dict(kept)  # events since the checkpoint stay counted, so that there is an end to it
    guard.roll_back(restored)
    report.rolled_back()
    run.say(f"rolled back to step {run.step:,}; batch {bad:,} will be left out")


def save_model(run: Run, report: Any, why_stopped: str | None) -> Any:
    """The final folder, which plain `from_pretrained` loads, and a sample of what the model writes."""
    from accel_scale.training.evaluation.validation import beginning_of, sample_text
    from accel_scale.training.pretrain.parallel import save_model_of

    if why_stopped == "a signal":
        return None  # little time is left, and the checkpoint is there
    if run.args.sample_tokens:
        prompt = run.args.sample_prompt or beginning_of(run.held_out, run.tokenizer)
        options = {"max_new_tokens": run.args.sample_tokens, "seed": run.args.seed}
        report.sample = f"{prompt}▸{sample_text(run.accelerator, run.model, run.tokenizer, prompt, **options)}"
    return save_model_of(run)


if __name__ == "__main__":
    begin(PROGRAM, FLAG_CLASSES, RECIPE.refuse)
    with user_errors(PROGRAM):
        main()
