"""Rules on checkpoints: refuse runs whose checkpoints could not be resumed."""

from __future__ import annotations

from accel_scale.checks.case import Case, Finding, Rule, error
from accel_scale.facts.optimizer_specs import optimizer_spec


def whole_checkpoint_of_quantised_states(case: Case) -> Finding | None:
    """Quantised states in a whole-model checkpoint of FSDP2 cannot be read back; sharded checkpoints can resume."""
    if optimizer_spec(case.run.optim).whole_checkpoints or not case.parallel.saves_whole_checkpoints:
        return None
    if case.run.save_strategy == "no":
        return None
    return error(
        case.launch.place("fsdp_config.fsdp_state_dict_type"),
        f"whole-model checkpoints of {case.run.optim} under FSDP2 cannot be resumed.",
        "write fsdp_state_dict_type: SHARDED_STATE_DICT there (the final model stays whole), or --save_strategy no.",
    )


def resumed_ranks(case: Case) -> Finding | None:
    """DeepSpeed cannot resume a folder without a manifest on a different number of ranks."""
    before, now = case.run.resume_num_ranks, case.launch.num_processes
    if not case.parallel.is_deepspeed or before is None or now is None or before == now:
        return None
    return error(
        case.run.place("resume_from_checkpoint"),
        f"{case.run.resume_from_checkpoint} was written by {before} ranks, and DeepSpeed cannot resume it on {now}.",
        f"launch {before} processes, or start over from its weights with --model_name_or_path.",
    )


def resumed_nvme(case: Case) -> Finding | None:
    """Optimizer states on NVMe are in no checkpoint: DeepSpeed 0.19.8 resumes without them and says nothing.

    A checkpoint found by `auto` is refused when it is found.
    """
    is_new = str(case.run.resume_from_checkpoint).lower() in ("none", "", "false", "no", "auto")
    if is_new or case.parallel.offload_optimizer != "nvme":
        return None
    return error(
        case.run.place("resume_from_checkpoint"),
        "DeepSpeed does not restore optimizer states that are on NVMe.",
        "start over from the checkpoint's weights with --model_name_or_path; zero3_offload.yaml can resume.",
    )


CHECKPOINT_RULES: tuple[Rule, ...] = (whole_checkpoint_of_quantised_states, resumed_ranks, resumed_nvme)
