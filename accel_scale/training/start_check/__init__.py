"""The start check: what a run will do, done first with a small model of the same configuration, in about a second."""

from accel_scale.training.start_check.check import PlannedRun, Verdict, check_start

__all__ = ["PlannedRun", "Verdict", "check_start"]
