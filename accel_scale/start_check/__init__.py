"""The start check: tries out a run with a small model of the same configuration, in about a second."""

from accel_scale.start_check.check import check_start
from accel_scale.start_check.plan import PlannedRun, Verdict
from accel_scale.start_check.recipes import check_pretrain_start, check_sft_start, settle_open

__all__ = ["PlannedRun", "Verdict", "check_pretrain_start", "check_sft_start", "check_start", "settle_open"]
