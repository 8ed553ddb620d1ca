"""The launch environment, from variables and from real `accelerate launch` commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from accel_scale.launching.environment import (
    current_launch,
    find_launch_command,
    parse_launch_arguments,
    values_from_environment,
)
from accel_scale.launching.launch_keys import SWITCHES

ROOT = Path(__file__).parents[2]
REPORT = """
import json, os, sys
from accel_scale.launching.environment import current_launch, tell_deepspeed_file
launch = current_launch()
tell_deepspeed_file(launch)
if launch.rank == 0:
    print("REPORT" + json.dumps({
        "label": launch.parallel.label, "strategy": launch.strategy, "precision": launch.mixed_precision,
        "world": launch.world_size, "local": launch.local_world_size,
        "place": launch.place("mixed_precision"),
        "nvme": launch.place("zero_optimization.offload_param.nvme_path"),
        "file": str(launch.launch_file.path) if launch.launch_file else None,
        "address": launch.file_values.get("main_process_ip"),
        "deepspeed": os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"),
    }))
"""


def launch(tmp_path: Path, *flags: str, cwd: Path = ROOT) -> dict:
    """What a process that `accelerate launch` started with `flags` sees; its script has its own --config_file."""
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        *flags,
        "--main_process_port",
        "0",
    ]
    done = subprocess.run(
        [*command, str(script), "--config_file", "recipe.yaml"], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.partition("REPORT")[2].splitlines()[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "label", "precision", "world"),
    [
        ("single_gpu", "one process", "bf16", 1),
        ("ddp", "DDP", "bf16", 2),
        ("fsdp2_offload", "FSDP2, CPU offload", "bf16", 2),
        ("fsdp2_hybrid", "FSDP2 hybrid, 2 replicas × 2 shards", "bf16", 4),
        ("zero3_offload", "ZeRO-3, CPU offload", "bf16", 2),
        ("zero_infinity", "ZeRO-3, NVMe offload", None, 2),
    ],
)
def test_real_launch_is_read_back(tmp_path, name, label, precision, world):
    path = f"accelerate_configs/{name}.yaml"
    report = launch(tmp_path, "--config_file", path)
    assert (report["label"], report["precision"]) == (label, precision)
    assert report["world"] == report["local"] == world
    assert report["file"] == path
    lines = (ROOT / path).read_text().splitlines()
    if precision:
        place, line = report["place"].split(":")
        assert place == path
        assert lines[int(line) - 1] == f"mixed_precision: {precision}"
    if name == "zero_infinity":
        assert report["nvme"].startswith("accelerate_configs/deepspeed/zero_infinity.json:")


@pytest.mark.slow
def test_command_line_overrides_the_file(tmp_path):
    report = launch(
        tmp_path, "--config_file", "accelerate_configs/ddp_multinode.yaml", "--mixed_precision", "no",
        "--num_machines", "1", "--num_processes", "2", "--main_process_ip", "localhost",
    )  # fmt: skip
    assert (report["precision"], report["world"], report["address"]) == ("no", 2, "localhost")
    assert report["place"] == "accelerate launch --mixed_precision"


@pytest.mark.slow
def test_relative_path_is_relative_to_the_launcher(tmp_path):
    report = launch(tmp_path, "--config_file", "ddp.yaml", cwd=ROOT / "accelerate_configs")
    assert (report["strategy"], report["file"]) == ("ddp", "ddp.yaml")
    # DeepSpeed's file is named relative to the repository, two folders above this launch file.
    report = launch(tmp_path, "--config_file", str(ROOT / "accelerate_configs" / "zero_infinity.yaml"), cwd=tmp_path)
    assert report["label"] == "ZeRO-3, NVMe offload"
    assert report["deepspeed"] == str(ROOT / "accelerate_configs" / "deepspeed" / "zero_infinity.json")


def test_unlaunched_process_is_single():
    found = current_launch({})
    assert (found.strategy, found.mixed_precision, found.world_size, found.launch_file) == ("single", None, 1, None)


def test_this_process_has_no_launcher():
    assert find_launch_command() is None


def test_switches_are_those_of_the_installed_accelerate():
    from accelerate.commands.launch import launch_command_parser

    installed = {
        option if not option.startswith("--") else "--" + option[2:].replace("-", "_")
        for action in launch_command_parser()._actions
        if action.nargs == 0
        for option in action.option_strings
    }
    assert installed == SWITCHES


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["--config_file", "a.yaml", "s.py", "--config_file", "b.yaml"], {"config_file": "a.yaml"}),
        (["s.py", "--config_file", "b.yaml"], {}),
        (["--config-file=a.yaml", "--cpu", "s.py", "--debug"], {"config_file": "a.yaml", "cpu": "true"}),
        (["-m", "--num_processes", "2", "pkg.train", "--config_file", "b"], {"m": "true", "num_processes": "2"}),
    ],
)
def test_only_the_launchers_own_flags_are_read(words, flags):
    assert parse_launch_arguments(words) == flags


def test_torchrun_without_accelerate_is_ddp():
    found = current_launch({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "RANK": "9", "LOCAL_RANK": "1"})
    assert (found.strategy, found.world_size, found.local_world_size, found.rank) == ("ddp", 16, 8, 9)


def test_fsdp_version_defaults_to_1_as_in_accelerate():
    assert current_launch({"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2"}).strategy == "fsdp1"


def test_deepspeed_defaults_to_stage_2_as_in_accelerate():
    env = {"ACCELERATE_USE_DEEPSPEED": "true", "WORLD_SIZE": "2"}
    assert values_from_environment(env)["deepspeed_config"] == {"zero_stage": 2}
    assert current_launch(env).strategy == "zero2"


def test_reading_the_environment_is_light():
    code = (
        "import sys; import accel_scale.launching.environment; print('torch' in sys.modules, 'psutil' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
