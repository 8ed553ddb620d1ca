"""Out of memory in a pretraining step: `MemoryRecovery` set up for a run."""

from __future__ import annotations

from accel_scale.ending.out_of_memory import smaller_batch_advice
from accel_scale.facts.optimizer_specs import steps_in_backward
from accel_scale.pretraining.report import PretrainReport
from accel_scale.pretraining.run import Run
from accel_scale.settings.planned_checkpointing import full_checkpointing
from accel_scale.training.guard.guarded_step import GuardedStep
from accel_scale.training.resilience.memory_recovery import MemoryRecovery


def memory_recovery(run: Run, step: GuardedStep, report: PretrainReport, *, program: str) -> MemoryRecovery:
    """Repeat a step that runs out of memory in smaller passes; if that is impossible, stop all ranks."""
    rows = run.args.per_device_train_batch_size

    def advice(level: int) -> str:
        text = smaller_batch_advice(rows // min(2**level, rows), None)
        return f"{text}; the same command continues from the last checkpoint"

    report.recovery = MemoryRecovery(
        run.accelerator,
        run.model,
        obstacle=_obstacle(run),
        advice=advice,
        recompute_more=full_checkpointing(
            run.accelerator.unwrap_model(run.model, keep_torch_compile=False),
            run.settings,
            run.course.settings,
            use_reentrant=False,  # ZeRO-3 needs it under adapters, but no step is repeated there
        ),
        on_discard=step.discard,
        on_out_of_memory=lambda number: run.memory_summary.write(f"out-of-memory-step-{number}"),
        first_step=run.step + 1,
        program=program,
        say=run.say,
    )
    return report.recovery


def _obstacle(run: Run) -> str | None:
    """Why a step of `run` cannot be repeated in parts; None if it can."""
    if steps_in_backward(run.args.optim):
        return f"{run.args.optim} has already changed weights in the backward pass"
    if run.parallel is not None:
        return "ranks share the model, or rows"
    if run.router is not None:
        return "the router's balancing loss depends on the whole micro-batch"
    return None
