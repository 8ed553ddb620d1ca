"""Contradictions between recipe, launch file and machine that can be seen before a launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from accel_scale.errors import ConfigError
from accel_scale.facts.device import CPU
from accel_scale.facts.names import AUTO_POLICY

if TYPE_CHECKING:
    from accel_scale.checks.run_settings import RunSettings
    from accel_scale.facts.device import Device
    from accel_scale.launching.machine import LocalMachine
    from accel_scale.launching.strategy import LaunchStrategy


@dataclass(frozen=True)
class Finding:
    """One contradiction.

    Attributes:
        level: ``error`` stops the run; ``warning`` is something the user may want and can act on.
        place: ``file:line`` or ``--flag``.
        problem: One sentence.
        fix: One imperative sentence.
    """

    level: Literal["error", "warning"]
    place: str
    problem: str
    fix: str

    def one_line(self) -> str:
        """``place: problem Fix: fix``."""
        return f"{self.place}: {self.problem} Fix: {self.fix}"


class Launch(Protocol):
    """The parts of a launch that rules read: a `LaunchFile` before the launch, a `LaunchEnvironment` inside it."""

    @property
    def parallel(self) -> LaunchStrategy: ...
    @property
    def mixed_precision(self) -> str | None: ...
    @property
    def num_processes(self) -> int | None: ...
    @property
    def local_world_size(self) -> int | None: ...
    @property
    def file_values(self) -> dict[str, Any]: ...
    def place(self, key: str) -> str: ...


@dataclass(frozen=True)
class Case:
    """The recipe's settings, launch and machine that a rule compares."""

    run: RunSettings
    launch: Launch
    machine: LocalMachine

    @property
    def parallel(self) -> LaunchStrategy:
        """The launch's strategy."""
        return self.launch.parallel

    @property
    def device(self) -> Device:
        """The device that the run computes on: the processor if launch or recipe asks for it."""
        found, on_cpu = self.machine.accelerator, self.parallel.use_cpu or self.run.use_cpu
        return CPU if on_cpu and found.type != "cpu" else found

    @property
    def model_ranks(self) -> int:
        """Ranks that share the model, and therefore read the same rows: tensor, sequence and pipeline parallelism."""
        tensor = max(self.parallel.tensor_parallel_size, self.run.tp_size or 1)
        sequence = max(self.parallel.context_parallel_size, self.run.sp_size or 1)
        return tensor * sequence * (self.run.pp_size or 1)

    @property
    def precision(self) -> str:
        """The resolved precision: ``--precision``, else that of the flags, else the launch's, else the device's."""
        if self.run.precision:
            return self.run.precision
        if self.run.bf16 or self.run.fp16:
            return "bf16" if self.run.bf16 else "fp16"
        launch = self.launch.mixed_precision
        if launch:
            return "fp32" if launch == "no" else launch
        return self.device.default_precision

    @property
    def precision_place(self) -> str:
        """The place where `precision` was set."""
        if self.run.precision:
            return self.run.place("precision")
        if self.run.bf16 or self.run.fp16:
            return self.run.place("bf16" if self.run.bf16 else "fp16")
        return self.launch.place("mixed_precision")

    @property
    def checkpoints(self) -> bool:
        """True if the recipe recomputes activations; if that is left to the plan, it may on an accelerator."""
        if self.run.checkpointing_policy not in (None, AUTO_POLICY):
            return self.run.checkpointing_policy != "none"
        if self.run.activation_checkpointing is not None:
            return self.run.activation_checkpointing
        return self.device.type != "cpu"


Rule = Callable[[Case], "Finding | None"]


def error(place: str, problem: str, fix: str) -> Finding:
    """A finding that stops the run."""
    return Finding("error", place, problem, fix)


def warning(place: str, problem: str, fix: str) -> Finding:
    """A finding that does not stop the run."""
    return Finding("warning", place, problem, fix)


def refuse_errors(findings: Sequence[Finding]) -> None:
    """Raise the first error among `findings`, mentioning how many more there are.

    Raises:
        ConfigError: if any finding is an error.
    """
    errors = [finding for finding in findings if finding.level == "error"]
    if not errors:
        return
    first, more = errors[0], len(errors) - 1
    problem = first.problem + (f" ({more} more: accel-scale doctor lists all.)" if more else "")
    raise ConfigError(problem, place=first.place, fix=first.fix)
