"""All rules, applied to one case."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_scale.checks.case import Case, Finding, Launch
from accel_scale.checks.checkpoint_rules import CHECKPOINT_RULES
from accel_scale.checks.ddp_rules import DDP_RULES
from accel_scale.checks.deepspeed_rules import DEEPSPEED_RULES
from accel_scale.checks.launch_rules import LAUNCH_RULES
from accel_scale.checks.machine_rules import MACHINE_RULES
from accel_scale.checks.precision_rules import PRECISION_RULES
from accel_scale.checks.recipe_rules import RECIPE_RULES

if TYPE_CHECKING:
    from accel_scale.checks.run_settings import RunSettings
    from accel_scale.launching.machine import LocalMachine


def check_run(run: RunSettings, launch: Launch, machine: LocalMachine) -> list[Finding]:
    """All findings of all rules, errors first. Pure: depends only on its arguments."""
    case = Case(run, launch, machine)
    rules = (*PRECISION_RULES, *RECIPE_RULES, *LAUNCH_RULES, *DEEPSPEED_RULES, *DDP_RULES)
    rules += (*CHECKPOINT_RULES, *MACHINE_RULES)
    findings = [finding for rule in rules if (finding := rule(case)) is not None]
    return sorted(findings, key=lambda finding: finding.level)
