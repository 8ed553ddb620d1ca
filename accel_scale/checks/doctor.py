"""Diagnose recipe, launch and machine together; print it for a terminal, a log or a program."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from accel_scale.checks.case import Finding, Launch
from accel_scale.checks.registry import check_run
from accel_scale.checks.run_settings import RunSettings
from accel_scale.launching.gpu_links import describe_links
from accel_scale.launching.machine import PACKAGES, LocalMachine
from accel_scale.units import format_bytes


@dataclass(frozen=True)
class Diagnosis:
    """The result of a diagnosis.

    Attributes:
        machine: This machine.
        launch: Rows of a table of launch settings; empty without a usable launch.
        findings: Contradictions, errors first.
    """

    machine: LocalMachine
    launch: Mapping[str, str]
    findings: Sequence[Finding]

    @property
    def has_errors(self) -> bool:
        """True if the run would not work."""
        return any(finding.level == "error" for finding in self.findings)


def diagnose(run: RunSettings, launch: Launch, machine: LocalMachine, *, more: Sequence[Finding] = ()) -> Diagnosis:
    """Check `run`, `launch` and `machine` against each other; `more` are findings from reading their files."""
    found = check_run(run, launch, machine)
    known = {finding.place for finding in found}
    # Parsers name one problem per place; a rule that knows the launch explains it better.
    findings = found + [finding for finding in more if finding.place not in known]
    return Diagnosis(machine, describe_launch(launch), sorted(findings, key=lambda finding: finding.level))


def describe_launch(launch: Launch) -> dict[str, str]:
    """Rows for a table."""
    rows = {"strategy": launch.parallel.label, "processes": str(launch.num_processes or "not said")}
    rows["mixed precision"] = launch.mixed_precision or "left to the recipe"
    if launch.parallel.nvme_paths:
        rows["NVMe folder"] = ", ".join(str(Path(path).absolute()) for path in launch.parallel.nvme_paths)
    return rows


def describe_machine(machine: LocalMachine) -> dict[str, str]:
    """Rows for a table."""
    own = machine.accelerator
    if machine.num_devices:
        memory = f", {format_bytes(own.memory_bytes)} each" if own.memory_bytes else ""
        device = f"{machine.num_devices} × {machine.device_name}{memory}"
    else:
        device = "none: distributed launches run on CPU processes over gloo"
    arithmetic = [name for name, there in (("bf16", own.supports_bf16), ("fp8", own.supports_fp8)) if there]
    tools = {"C++ compiler": machine.has_compiler, "ninja": machine.has_ninja, "libaio": machine.has_libaio}
    return {
        "system": f"{machine.system}, Python {machine.python_version}",
        "accelerators": device,
        **({"links": describe_links(machine.gpu_links)} if machine.gpu_links else {}),
        "arithmetic": ", ".join(["fp32", "fp16", *arithmetic]),
        "host": f"{machine.num_cores} cores, {format_bytes(machine.host_memory_bytes)}",
        "DeepSpeed builds with": ", ".join(f"{name} {'yes' if there else 'NO'}" for name, there in tools.items()),
        "installed": ", ".join(f"{name} {version}" for name, version in machine.packages.items()),
        "not installed": ", ".join(name for name in PACKAGES if not machine.has(name)) or "none",
    }


def as_json(diagnosis: Diagnosis) -> str:
    """Machine, launch and findings as one JSON object."""
    content: dict[str, Any] = {
        "machine": dataclasses.asdict(diagnosis.machine),
        "launch": dict(diagnosis.launch),
        "findings": [dataclasses.asdict(finding) for finding in diagnosis.findings],
    }
    return json.dumps(content, indent=2)


def print_diagnosis(diagnosis: Diagnosis, file: TextIO) -> None:
    """Tables on a terminal, plain lines elsewhere."""
    sections = {"Machine": describe_machine(diagnosis.machine), "Launch": diagnosis.launch}
    if file.isatty():
        _print_tables(sections, diagnosis.findings, file)
    else:
        _print_plain(sections, diagnosis.findings, file)


def _print_plain(sections: Mapping[str, Mapping[str, str]], findings: Sequence[Finding], file: TextIO) -> None:
    for title, rows in sections.items():
        for name, value in rows.items():
            print(f"{title.lower()}: {name}: {value}", file=file)
    for finding in findings:
        print(f"{finding.level}: {finding.one_line()}", file=file)
    print(_verdict(findings), file=file)


def _print_tables(sections: Mapping[str, Mapping[str, str]], findings: Sequence[Finding], file: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=file, highlight=False)
    for title, rows in sections.items():
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(name, Text(value))
        console.print(table)
    if findings:
        table = Table("", "where", "what", "fix", title="Findings", title_justify="left", title_style="bold")
        for finding in findings:
            style = "bold red" if finding.level == "error" else "yellow"
            # Text: brackets in paths and lists are not markup.
            cells = (Text(finding.level, style), Text(finding.place), Text(finding.problem), Text(finding.fix))
            table.add_row(*cells)
        console.print(table)
    console.print(Text(_verdict(findings), "bold"))


def _verdict(findings: Sequence[Finding]) -> str:
    errors = sum(finding.level == "error" for finding in findings)
    warnings = len(findings) - errors
    if not findings:
        return "No contradictions found."
    return f"{_plural(errors, 'error')}, {_plural(warnings, 'warning')}."


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
