"""Rules on sending gradients: settings of DDP and FSDP2 under other strategies, and where PowerSGD fails."""

from __future__ import annotations

from accel_scale.checks.case import Case, Finding, Rule, error, warning
from accel_scale.facts.names import FIRST_POWERSGD_STEP, POWERSGD_STEP


def _powersgd_flag(case: Case) -> str | None:
    names = ("powersgd_rank", "powersgd_start_step")
    return next((name for name in names if getattr(case.run, name) is not None), None)


def needs_ddp(case: Case) -> Finding | None:
    """Buckets and hooks are DDP's; other strategies reduce gradients in their own way, a single process not at all."""
    run, parallel = case.run, case.parallel
    flag = "ddp_comm_hook" if run.ddp_comm_hook != "none" else "ddp_bucket_cap_mb"
    shares_model = run.shares_model and any(
        (getattr(run, name, None) or 1) > 1 for name in ("tp_size", "sp_size", "pp_size")
    )
    is_ddp = parallel.kind.is_ddp and not shares_model
    if is_ddp or (flag == "ddp_bucket_cap_mb" and run.ddp_bucket_cap_mb is None):
        return None
    if shares_model:
        why = "ranks that share a model reduce gradients without DDP's buckets"
    elif parallel.kind.is_single:
        why = "one process sends no gradients"
    else:
        why = f"{parallel.label} has no DDP buckets"
    return error(
        run.place(flag),
        f"{why}: --{flag} would change nothing.",
        "remove it, or launch with accelerate_configs/ddp.yaml.",
    )


def needs_fsdp2(case: Case) -> Finding | None:
    """``--sync_each_batch`` is for FSDP2: DeepSpeed itself decides when to reduce; elsewhere it saves no memory."""
    run, parallel = case.run, case.parallel
    if not run.sync_each_batch:
        return None
    degrees = (run.tp_size, run.sp_size, run.pp_size, parallel.tensor_parallel_size, parallel.context_parallel_size)
    if any((size or 1) > 1 for size in (*degrees, parallel.sequence_parallel_size)):
        why = "ranks that share a model reduce gradients once per step"
    elif parallel.kind.reduces_each_batch:
        return None
    elif parallel.is_deepspeed:
        why = "DeepSpeed decides when gradients are reduced"
    else:
        why = f"under {parallel.label} gradients are whole all the time, and sending them more often saves no memory"
    return error(run.place("sync_each_batch"), f"{why}.", "remove it, or launch with accelerate_configs/fsdp2.yaml.")


def reduction_has_a_dtype(case: Case) -> Finding | None:
    """One process reduces nothing, ranks that share a model reduce in fp32, and DDP in the dtype of the gradients."""
    run, parallel = case.run, case.parallel
    if run.reduce_dtype is None:
        return None
    place = run.place("reduce_dtype")
    if parallel.kind.is_single:
        return error(place, "one process adds up no gradients.", "remove it, or launch on several.")
    degrees = (run.tp_size, run.pp_size, parallel.tensor_parallel_size)
    if any((size or 1) > 1 for size in degrees) or (run.shares_model and (run.sp_size or 1) > 1):
        if run.reduce_dtype == "fp32":
            return None
        return error(place, "ranks that share a model add up gradients in fp32.", "remove it.")
    if parallel.is_fsdp and not parallel.kind.is_fsdp2:
        return error(place, f"{parallel.label} reduces as its own mixed precision says.", "use fsdp_version: 2.")
    if parallel.kind.is_ddp and run.reduce_dtype == "fp32" and case.precision == "bf16_true":
        return error(place, "DDP adds up the bf16 gradients of bf16_true as they are.", "remove it, or use FSDP2.")
    return None


def bucket_size(case: Case) -> Finding | None:
    """A bucket size below 1 MB."""
    size = case.run.ddp_bucket_cap_mb
    if size is None or size >= 1:
        return None
    return error(case.run.place("ddp_bucket_cap_mb"), f"a bucket of {size} MB holds nothing.", "use 1 or more.")


def powersgd_flags(case: Case) -> Finding | None:
    """PowerSGD settings without PowerSGD, or out of range."""
    run, flag = case.run, _powersgd_flag(case)
    if flag is not None and run.ddp_comm_hook != "powersgd":
        return error(run.place(flag), f"--{flag} is PowerSGD's.", "add --ddp_comm_hook powersgd, or remove it.")
    if run.powersgd_rank is not None and run.powersgd_rank < 1:
        return error(run.place("powersgd_rank"), f"factors of rank {run.powersgd_rank}.", "use 1 or more, like 4.")
    start = run.powersgd_start_step
    if start is not None and start < FIRST_POWERSGD_STEP:
        problem = f"PowerSGD cannot begin with step {start}: DDP builds its buckets again after the first."
        return error(run.place("powersgd_start_step"), problem, f"use {FIRST_POWERSGD_STEP} or more.")
    return None


def powersgd_never_begins(case: Case) -> Finding | None:
    """A run that ends before PowerSGD starts."""
    run = case.run
    start = run.powersgd_start_step or POWERSGD_STEP
    if run.ddp_comm_hook != "powersgd" or not 0 < run.max_steps < start:
        return None
    problem = f"PowerSGD begins with step {start}, and the run has {run.max_steps}."
    return error(run.place("ddp_comm_hook"), problem, "give a smaller --powersgd_start_step, or remove it.")


def powersgd_fp16(case: Case) -> Finding | None:
    """PowerSGD with fp16: error feedback would carry gradients from one loss scale into the next."""
    if case.run.ddp_comm_hook != "powersgd" or case.precision != "fp16":
        return None
    return error(
        case.run.place("ddp_comm_hook"),
        "PowerSGD keeps an error from step to step, and fp16's loss scale changes between them.",
        "use --precision bf16, or --ddp_comm_hook fp16.",
    )


def cast_saves_nothing(case: Case) -> Finding | None:
    """Casting gradients that already have 16 bits."""
    if case.run.ddp_comm_hook not in ("bf16", "fp16") or case.precision != "bf16_true":
        return None
    return warning(
        case.run.place("ddp_comm_hook"), "gradients of bf16_true have 16 bits already.", "remove --ddp_comm_hook."
    )


DDP_RULES: tuple[Rule, ...] = (
    needs_ddp,
    needs_fsdp2,
    reduction_has_a_dtype,
    bucket_size,
    powersgd_flags,
    powersgd_never_begins,
    powersgd_fp16,
    cast_saves_nothing,
)
