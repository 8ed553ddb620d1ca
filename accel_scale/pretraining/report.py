"""Reports of the pretraining recipe: figures of every step, validations, tables at start and end."""

from __future__ import annotations

import math
import zlib
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from accel_scale.measuring.meters import (
    Counted,
    ThroughputMeter,
    logged_figures,
    peak_device_bytes,
    peak_host_bytes,
    peak_memory_bytes,
)
from accel_scale.reporting.step_lines import StepFigures, StepLines
from accel_scale.reporting.trackers import tracked_names
from accel_scale.training.ddp.gradient_numbers import loss_scale_of
from accel_scale.training.ddp.hooks import hook_figures
from accel_scale.units import format_bytes, three_digits

if TYPE_CHECKING:
    from accel_scale.measuring.profiling import StepProfiler
    from accel_scale.pretraining.run import Run
    from accel_scale.reporting.metrics_log import MetricsLog
    from accel_scale.training.evaluation.validation import Evaluation
    from accel_scale.training.guard.verdict import StepOutcome
    from accel_scale.training.resilience.memory_recovery import MemoryRecovery
    from accel_scale.training.saving.verification import VerifyResult


class PretrainReport:
    """Reports on one run.

    Args:
        run: The run and its position in training.
        metrics: Log for every figure.
        meter: Told by the loop when a step begins, has its data, and ends.
        started: `time.perf_counter()` at the program's start.
    """

    def __init__(self, run: Run, metrics: MetricsLog, meter: ThroughputMeter, started: float) -> None:
        self.run, self.metrics, self.meter, self.started = run, metrics, meter, started
        self.recovery: MemoryRecovery | None = None
        self.losses: list[float] = []
        self.eval_losses: list[float] = []
        kept = run.counted
        self._before = Counted.of(kept)
        self.num_skipped = int(kept.get("skipped_steps", 0))
        self.sample: str | None = None
        self.flops_per_token = self.peak = 0.0
        self._lines: StepLines | None = None

    def counters(self) -> dict[str, float]:
        """Counts over all starts of the run besides its tokens, as JSON, stored in every checkpoint."""
        counted = asdict(self._counted)
        del counted["tokens"]  # the run counts its own, which a rollback resets
        return {**counted, "skipped_steps": self.num_skipped}

    @property
    def _counted(self) -> Counted:
        return self._before.and_now(self.meter, tokens=0, started=self.started)

    # ── Start ──

    def start(self) -> None:
        """Print the table before the first step; start the trackers and the progress bar."""
        from accel_scale.measuring.peak_flops import model_flops, peak_flops
        from accel_scale.pretraining.accelerator import start_trackers
        from accel_scale.reporting.run_starts import write_start

        run, args = self.run, self.run.args
        self.flops_per_token, counted = model_flops(
            run.model_config, sequence_length=run.data_args.max_length, num_params=run.parameters[0]
        )
        self.peak, origin = peak_flops(run.accelerator.device, run.settings.precision.compute_dtype)
        self._mfu_basis = f"{counted}; peak {three_digits(self.peak / 1e12)} TFLOP/s per rank ({origin})"
        start_trackers(run.accelerator, args, run.settings.values)
        if not run.is_main:
            return
        planned = {"num_steps": run.length.num_steps, "plan": run.plan and run.plan.as_dict()}
        write_start(args.output_dir, step=run.step, content={**self._record(), **planned})
        self._print_start()
        self._lines = StepLines(run.length.num_steps, first_step=run.step)

    def _record(self) -> dict[str, object]:
        run = self.run
        strategy = None if run.layout.is_plain else self._strategy
        return run.record("pretrain.py", parameters=run.parameters, attention=run.attention, strategy=strategy)

    def _print_start(self) -> None:
        from accel_scale.reporting.tables import format_count, print_table

        run, args, settings = self.run, self.run.args, self.run.settings
        total, trainable = run.parameters
        per_step = settings.global_batch_size * run.data_args.max_length
        accumulation = settings.values.get("gradient_accumulation_steps", 1)
        shape = run.model_config.get_text_config()
        print_table(
            "pretrain",
            {
                "model": f"{run.model_config.model_type}, {format_count(total)} parameters: {shape.num_hidden_layers} "
                f"layers of {shape.hidden_size}, vocabulary {shape.vocab_size:,}",
                "weights": run.model_args.model_name_or_path or f"from nothing, seed {args.seed}",
                "method": f"{settings.method}, {format_count(trainable)} trainable",
                "precision": settings.precision.name,
                "strategy": f"{self._strategy}, {run.launch.world_size} × {run.start.machine.device_name}",
                "data": self._data_text(),
                "batch": f"{settings.global_batch_size} rows of {run.data_args.max_length} = "
                f"{args.per_device_train_batch_size} × {accumulation} accumulated × {run.layout.data_ranks} "
                + ("ranks" if run.layout.is_plain else "groups of ranks"),
                "length": f"{run.length.num_steps:,} steps, {format_count(run.length.num_steps * per_step)} tokens"
                + (f", from step {run.step:,} on" if run.step else ""),
                "attention": run.attention + (", documents isolated" if run.data_args.isolate_documents else ""),
                "memory": run.plan and run.plan.text,
                "fused kernels": settings.fused_label,
                "checkpointing": settings.checkpointing.label,
                "optimizer": f"{args.optim}, {run.settings.values['lr_scheduler_type']} from "
                f"{settings.values['learning_rate']:g}",
                "guard": run.guard_args.guard,
                "output": args.output_dir,
            },
        )

    @property
    def _strategy(self) -> str:
        return self.run.launch.parallel.label if self.run.layout.is_plain else self.run.layout.label

    def _data_text(self) -> str:
        from accel_scale.reporting.tables import format_count

        data = self.run.data
        tokens = data.estimate_tokens()
        named = ", ".join(f"{facts.name} ({facts.share:.0%})" for facts in data.sources)
        return f"{named}: {'' if tokens.exact else 'about '}{format_count(tokens.tokens)} tokens in an epoch"

    # ── Steps ──

    def watched_steps(self) -> AbstractContextManager[StepProfiler]:
        """Wrap all steps for ``--profile_steps`` and ``--memory_summary``."""
        from accel_scale.verifying.memory_summary import watched_steps

        return watched_steps(self.run.args, self.run.args.output_dir, self.run.memory_summary)

    def stepped(self, outcome: StepOutcome, learning_rate: float, *, tokens: int, row_ids: list[list[str]]) -> None:
        """Count one judged step; log it if logging is due or the step was not simply taken."""
        run = self.run
        self.num_skipped += not outcome.taken
        if outcome.taken:
            run.tokens += tokens
            self.meter.add_tokens(tokens)
            self.meter.end_step(settle=self._something_follows)
            if self._lines is not None:
                self._lines.stepped(run.step)
        norm = outcome.grad_norm if outcome.grad_norm is not None else math.nan
        if not outcome.taken:
            self._log({"skipped_loss": outcome.loss, "skipped_grad_norm": norm})
            return
        if not self._is_log_point:
            return
        self.losses.append(outcome.loss)
        values = {
            "loss": outcome.loss,
            "grad_norm": norm,
            "learning_rate": learning_rate * outcome.lr_factor,
            "tokens": run.tokens,
        }
        if run.router is not None:
            values["aux_loss"] = run.router.mean()
        scale = loss_scale_of(run.accelerator)
        if scale is not None:
            values["loss_scale"] = scale
        if run.args.log_rows:
            values["rows"] = rows_checksum(row_ids)
        values |= logged_figures(self.meter)
        if "tokens_per_second" in values:
            values["mfu"] = self._mfu_at(values["tokens_per_second"])
        self._log(values)
        if self._lines is not None:
            rate, speed = values["learning_rate"], self.tokens_per_second
            self._lines.log(StepFigures(outcome.loss, rate, speed, self.mfu, peak_memory_bytes(), self.num_skipped))

    @property
    def _is_log_point(self) -> bool:
        step = self.run.step
        return step % self.run.args.logging_steps == 0 or step in (1, self.run.length.num_steps)

    @property
    def _something_follows(self) -> bool:
        """True if something other than the next step follows."""
        length = self.run.length
        due = any(every and self.run.step % every == 0 for every in (length.eval_steps, length.save_steps))
        return due or self._is_log_point

    def _log(self, values: dict[str, float]) -> None:
        self.metrics.write(self.run.step, **values)
        self.run.accelerator.log(tracked_names({**values, "global_step": self.run.step}), step=self.run.step)

    def evaluated(self, evaluation: Evaluation) -> None:
        """Log a validation."""
        self.eval_losses.append(evaluation.loss)
        self._log({"eval_loss": evaluation.loss, "perplexity": evaluation.perplexity})
        if self._lines is not None:
            self._lines.say(f"validation loss {evaluation.loss:.4f}  perplexity {evaluation.perplexity:,.2f}")

    @property
    def last_loss(self) -> float | None:
        """Loss of the last logged step."""
        return self.losses[-1] if self.losses else None

    def rolled_back(self) -> None:
        """Drop what was logged after the step that the run has rolled back to."""
        from accel_scale.reporting.metrics_log import MetricsLog

        self.metrics.close()
        self.metrics = MetricsLog(self.run.args.output_dir, self.run.is_main, resumed_step=self.run.step)

    @property
    def tokens_per_second(self) -> float | None:
        """Rate over all ranks, without padding; `None` before the second step."""
        return self.meter.tokens_per_second

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s ÷ peak FLOP/s of the devices."""
        return self._mfu_at(speed) if (speed := self.tokens_per_second) else None

    def _mfu_at(self, tokens_per_second: float) -> float:
        return tokens_per_second * self.flops_per_token / (self.peak * self.run.launch.world_size)

    # ── End ──

    def end(self, verified: VerifyResult | None, why_stopped: str | None, plan: dict[str, Any]) -> dict[str, object]:
        """Print the table after the last step, and write ``run_summary.json`` beside the model."""
        from accel_scale.report_page.leaving import PAGE_NAME, leave_stopped
        from accel_scale.reporting.model_card import write_card
        from accel_scale.reporting.run_tables import data_bound_advice
        from accel_scale.reporting.summary import write_summary
        from accel_scale.reporting.tables import print_table

        run, args = self.run, self.run.args
        self.metrics.close()
        if self._lines is not None:
            self._lines.close()
        if not run.is_main:
            return {}
        counted = self._counted
        summary = {
            "steps": run.step,
            "losses": self.losses,
            "eval_loss": self.eval_losses[-1] if self.eval_losses else None,
            "eval_losses": self.eval_losses,
            "tokens": run.tokens,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "mfu_basis": self._mfu_basis,
            "data_wait_ratio": counted.data_wait_ratio,
            "skipped_steps": self.num_skipped,
            "memory_recovery": self.recovery.summary(*run.micro_batches) if self.recovery else None,
            "data": {"sources": [facts.name for facts in run.data.sources], "rows": None, "format": "text"},
            "stopped_by": why_stopped,
            "seconds": counted.seconds,
            "peak_host_bytes": peak_host_bytes(),
            "peak_device_bytes": peak_device_bytes(),
            "verified": verified and {"tensors": verified.num_tensors, "max_diff": verified.max_abs_diff},
            "sample": self.sample,
            "ddp": hook_figures(run.model),
            "plan": plan or None,
            "finished": run.course.record() if why_stopped is None else None,
            **self._record(),
        }
        path = write_summary(args.output_dir, summary)
        write_card(path)
        if why_stopped == "a signal":  # the launcher ends this rank as soon as another one has left
            leave_stopped(args.output_dir)
        print_table("done", {**self._end_rows(summary), "saved": f"{args.output_dir} (with {path.name}, {PAGE_NAME})"})
        if plan:
            print(plan["line"])
        if advice := data_bound_advice(counted.data_wait_ratio, or_else="tokenise once with accel-scale prepare"):
            print(advice)
        return summary

    def _end_rows(self, summary: dict[str, Any]) -> dict[str, str | None]:
        from accel_scale.reporting.run_tables import end_rows

        rows = end_rows(summary)
        if self.eval_losses:
            perplexity = math.exp(min(self.eval_losses[-1], 700.0))
            rows["evaluation loss"] = f"{self.eval_losses[-1]:.4f} nats per token, perplexity {perplexity:,.2f}"
        rows["MFU"] = f"{summary['mfu']:.1%}: {self._mfu_basis}" if summary["mfu"] else None
        if ddp := summary["ddp"]:
            sent, whole = ddp["sent_bytes_per_step"], ddp["gradient_bytes"]
            rows["gradients"] = f"{format_bytes(sent)} of {format_bytes(whole)} sent per step and rank"
        rows["skipped steps"] = str(self.num_skipped) if self.num_skipped else None
        rows["stopped early"] = summary["stopped_by"]
        rows["sample"] = self.sample
        return rows


def rows_checksum(row_ids: list[list[str]]) -> int:
    """CRC-32 of the global batch's row ids, independent of the ranks that hold them; collective."""
    from accelerate.utils import gather_object

    names = sorted(gather_object([name for batch in row_ids for name in batch]))
    return zlib.crc32("\n".join(names).encode())
