"""First steps of every recipe: detect launch and device, and refuse what cannot work there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accel_scale.flags.parsing import ParsedFlags
from accel_scale.settings.resolved import LaunchFacts, Resolved

if TYPE_CHECKING:
    from accel_scale.launching.environment import LaunchEnvironment
    from accel_scale.launching.machine import LocalMachine
    from accel_scale.launching.run_folder import OutputFolder


@dataclass(frozen=True)
class Start:
    """How and where a recipe was started.

    Attributes:
        launch: How it was launched.
        machine: This machine.
        announcement: The line that announces a rehearsal on CPU processes; None in an ordinary run.
        facts: Launch and machine in the terms of `resolve`.
        folder: The output folder, with what must not be in it.
        notes: What the user should know about the trackers.
    """

    launch: LaunchEnvironment
    machine: LocalMachine
    announcement: str | None
    facts: LaunchFacts
    folder: OutputFolder
    notes: tuple[str, ...] = ()


@dataclass
class RecipeRun:
    """Base class with what every recipe's run has.

    Attributes:
        settings: Every flag that was set or derived, with its origin.
        start: How and where this process was started.
    """

    settings: Resolved
    start: Start

    @property
    def launch(self) -> LaunchEnvironment:
        """How this process was launched."""
        return self.start.launch

    @property
    def device_type(self) -> str:
        """Where tensors live: ``cuda``, ``cpu`` …"""
        return self.settings.launch.device_type

    @property
    def is_main(self) -> bool:
        """True if this process prints."""
        return self.launch.rank == 0

    def record(
        self, program: str, *, parameters: tuple[int, int], attention: str, strategy: str | None = None
    ) -> dict[str, object]:
        """A description of the run, for `run_summary.json` and `run_starts.jsonl`.

        Args:
            program: The recipe.
            parameters: Numbers of all and of trained parameters.
            attention: The attention implementation that runs.
            strategy: The strategy, if it is not the launch's.
        """
        return {
            "recipe": program,
            "parameters": {"total": parameters[0], "trainable": parameters[1]},
            "strategy": strategy or self.launch.strategy,
            "world_size": self.launch.world_size,
            "rehearsal": self.start.announcement is not None,
            "attention": attention,
            "precision": self.settings.precision.name,
            "settings": self.settings.values,
            "origins": self.settings.sources,
        }

    def say_start(self) -> None:
        """Print the announcement and notes of the start, on one process."""
        for line in filter(None, (self.start.announcement, *self.start.notes)):
            self.say(line)

    def say(self, line: str) -> None:
        """Print one line, on one process."""
        if self.is_main:
            print(line, flush=True)


def start_recipe(parsed: ParsedFlags, *, output_dir: str) -> Start:
    """Call before anything asks torch.distributed or Accelerate for a device; sets up the console too."""
    from accel_scale.launching.build_locks import use_own_ninja
    from accel_scale.launching.cpu_process import tune_cpu_process, use_cores_of_host
    from accel_scale.launching.environment import check_launch_variables, current_launch, tell_deepspeed_file
    from accel_scale.launching.gpu_links import with_gpu_links
    from accel_scale.launching.machine import detect_device, detect_machine
    from accel_scale.launching.rehearsal import enable_rehearsal_if_needed
    from accel_scale.reporting.console import set_up_console

    check_launch_variables(os.environ)
    announcement = enable_rehearsal_if_needed()
    launch = current_launch()
    tell_deepspeed_file(launch)
    if launch.parallel.is_deepspeed or _compiles_step(parsed.explicit.get("optim")):
        use_own_ninja()
    machine = detect_machine([output_dir, *launch.parallel.nvme_paths])
    if max(launch.parallel.tensor_parallel_size, parsed.explicit.get("tp_size") or 1) > 1:
        machine = with_gpu_links(machine)
    set_up_console(is_main=launch.rank == 0, verbose="log_level" in parsed.explicit)
    on_cpu = parsed.explicit.get("use_cpu") or launch.parallel.use_cpu
    facts = LaunchFacts(
        world_size=launch.world_size,
        strategy=launch.strategy,
        mixed_precision=launch.mixed_precision,
        mixed_precision_place=launch.place("mixed_precision"),
        device=detect_device("cpu") if on_cpu else machine.accelerator,
    )
    if facts.device_type == "cpu":
        tune_cpu_process()
    elif steps_on_host(launch, parsed.explicit.get("optim")):
        use_cores_of_host(machine.num_cores, launch.local_world_size)
    notes = tuple(_settle_trackers(parsed))
    return Start(launch, machine, announcement, facts, output_folder(parsed, output_dir), notes)


def _settle_trackers(parsed: ParsedFlags) -> list[str]:
    """Check and configure trackers before their libraries are imported; returns notes for the user."""
    from accel_scale.flags.trackers import DEFAULT_PROJECT, chosen_trackers, require_trackers
    from accel_scale.reporting.trackers import settle_trackers

    given = parsed.explicit
    require_trackers(given.get("report_to"), place=parsed.place("report_to"))
    names = chosen_trackers(given.get("report_to"), in_trainer=True)
    project = str(given.get("project") or DEFAULT_PROJECT)
    return settle_trackers(names, os.environ, project=project, is_chosen="project" in given)


def output_folder(parsed: ParsedFlags, output_dir: str) -> OutputFolder:
    """The output folder of a recipe's run, with everything that the run reads."""
    from accel_scale.flags.paths import as_list, named_inputs
    from accel_scale.launching.run_folder import OutputFolder

    inputs = named_inputs(lambda flag: as_list(parsed.explicit.get(flag)))
    return OutputFolder(
        folder=Path(output_dir),
        program=parsed.program,
        inputs={parsed.place(flag): paths for flag, paths in inputs.items()},
        resumes_from=parsed.explicit.get("resume_from_checkpoint") or parsed.explicit.get("resume"),
        place=parsed.place("output_dir"),
    )


def steps_on_host(launch: LaunchEnvironment, optimizer: str | None) -> bool:
    """True if the host's cores step the weights while an accelerator does the rest."""
    from accel_scale.facts.optimizer_specs import OPTIMIZERS

    parallel = launch.parallel
    spec = OPTIMIZERS.get(str(optimizer))
    return parallel.offloads or bool(spec and spec.on_host)


def _compiles_step(optimizer: str | None) -> bool:
    """True if a C++ compiler builds the optimizer's step on first use."""
    from accel_scale.facts.optimizer_specs import OPTIMIZERS

    spec = OPTIMIZERS.get(str(optimizer))
    return bool(spec and spec.compilers)


def check_settings(settings: Resolved, start: Start, *, optim: str, max_grad_norm: float) -> list[str]:
    """Refuse contradictions between flags, launch and machine; returns notes on what the user may want to change.

    Args:
        optim, max_grad_norm: The given values, else the recipe's defaults.

    Raises:
        ConfigError: for the first contradiction.
    """
    from accel_scale.checks.case import refuse_errors
    from accel_scale.checks.registry import check_run
    from accel_scale.checks.run_settings import RunSettings
    from accel_scale.launching.memory_cap import fragmentation_advice
    from accel_scale.modeling.adapters import paged_optimizer_advice
    from accel_scale.optimization.optimizers import check_optimizer
    from accel_scale.optimization.schedules import scaling_advice

    device_type, parallel = settings.launch.device_type, start.launch.parallel
    findings = check_run(RunSettings.from_flags(settings.values, settings.sources), start.launch, start.machine)
    refuse_errors(findings)
    notes = check_optimizer(
        optim,
        device_type=device_type,
        strategy=start.launch.strategy,
        offload_optimizer=parallel.offloads_optimizer,
        precision=settings.precision.name,
        max_grad_norm=max_grad_norm,
        gradient_accumulation_steps=settings.accumulation,
        optim_args=settings.values.get("optim_args"),
        place=settings.sources.get("optim", "--optim"),
    )
    advice = (
        fragmentation_advice(device_type=device_type),
        paged_optimizer_advice(method=settings.method, optim=optim, device_type=device_type),
        scaling_advice(
            settings.values, is_set=settings.sources.__contains__, global_batch_size=settings.global_batch_size
        ),
    )
    said = [*notes, *settings.precision.notes, *(line for line in advice if line)]
    return [*(finding.one_line() for finding in findings), *said]
