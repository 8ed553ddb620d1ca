"""docs/choosing.md: a section for every branch; its plan is on that branch, and its command passes the doctor."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from accel_scale.checks.registry import check_run
from accel_scale.checks.run_settings import RunSettings
from accel_scale.cli.main import main
from accel_scale.facts.device import device_named
from accel_scale.flags.parsing import parse_flags
from accel_scale.launching.launch_file import read_launch_file
from accel_scale.launching.machine import PACKAGES, LocalMachine
from accel_scale.planning.search.branches import BRANCHES
from accel_scale.recipe_specs.pretrain import PRETRAIN
from accel_scale.recipe_specs.trl import SFT

ROOT = Path(__file__).parents[2]
SECTIONS = {
    part.splitlines()[0]: [
        shlex.split(line)
        for line in re.search(r"```bash\n(.*?)```", part, re.DOTALL)[1].replace("\\\n", " ").splitlines()
    ]
    for part in (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8").split("\n## ")[1:]
}
SERVER = LocalMachine(
    packages=dict.fromkeys(PACKAGES, "1"), has_compiler=True, has_ninja=True, has_libaio=True,
    accelerator=device_named("H100"), num_devices=8, num_cores=64,
)  # fmt: skip
PLANS = {name: command for name, commands in SECTIONS.items() for command in commands if command[0] == "accel-scale"}


def test_every_branch_has_a_section_in_order() -> None:
    assert list(SECTIONS) == [branch.name for branch in BRANCHES]


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_of_a_section_is_on_its_branch(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLANS[name][1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["branch"] == name


@pytest.mark.parametrize("name", SECTIONS)
def test_the_command_of_a_section_contradicts_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    [command] = [command for command in SECTIONS[name] if command[:2] == ["accelerate", "launch"]]
    spec = PRETRAIN if "recipes/pretrain.py" in command else SFT
    flags = command[command.index(f"recipes/{spec.program}") + 1 :]
    parsed = parse_flags(spec.flags, flags, program=spec.program)
    spec.refuse(parsed)
    values = {**parsed.explicit, **({"pp_size": parsed.explicit.get("pp_size", 1)} if spec is PRETRAIN else {})}
    launch = read_launch_file(command[command.index("--config_file") + 1])
    findings = check_run(RunSettings.from_flags(values), launch, SERVER)
    assert [found.one_line() for found in findings if found.level == "error"] == []
