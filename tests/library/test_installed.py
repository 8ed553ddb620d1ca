"""What an installed wheel provides without a checkout: recipes, launch files, and commands that use them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from accel_scale.data.default import default_data_paths, default_model_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
WARM_PYTHON = False  # that process has already imported the checkout
REPOSITORY = Path(__file__).resolve().parents[2]


class Installed:
    """The content of a wheel in a folder, used from an empty working folder."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder, self.work = folder, work

    def __call__(self, line: str, *, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run ``accel-scale …`` with the installed package ahead of all others."""
        words = [sys.executable, "-m", "accel_scale.cli.main", *shlex.split(line)]
        path = {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            words, cwd=self.work, env={**os.environ, **path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stdout[-2000:] + done.stderr[-3000:]
        return done


@pytest.fixture(scope="module")
def wheel_content(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    built = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(REPOSITORY)]
    subprocess.run(built, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


@pytest.fixture
def accel_scale(wheel_content: Path, tmp_path: Path) -> Installed:
    return Installed(wheel_content, tmp_path)


def test_recipes_are_listed_found_and_copied_once(accel_scale: Installed) -> None:
    listed = accel_scale("recipes list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == sorted(path.stem for path in REPOSITORY.glob("recipes/*.py"))
    path = Path(accel_scale("recipes path dpo").stdout.strip())
    assert path.is_relative_to(accel_scale.folder)
    accel_scale("recipes copy sft mine")
    assert (accel_scale.work / "mine/sft.py").read_bytes() == (REPOSITORY / "recipes/sft.py").read_bytes()
    assert "exists already" in accel_scale("recipes copy sft mine", status=2).stderr
    assert "there is no recipe 'sfft'" in accel_scale("recipes copy sfft", status=2).stderr


def test_a_recipe_runs_under_a_launch_file_by_its_name(accel_scale: Installed) -> None:
    flags = "--max_steps 2 --output_dir out --exact_match_samples 0"
    accel_scale(f"sft {flags} --launch fsdp2 --num_processes 2")
    summary = json.loads((accel_scale.work / "out" / "run_summary.json").read_text())
    assert (summary["steps"], summary["world_size"], summary["strategy"]) == (2, 2, "fsdp2")
    page = (accel_scale.work / "out" / "report.html").read_text()
    accel_scale("report out -o again.html")
    assert (accel_scale.work / "again.html").read_text() == page
    assert '<span class="state finished">' in page
    assert str(accel_scale.folder) not in page
    wrong = accel_scale("sft --max_step 2", status=1).stderr
    assert "--max_step" in wrong


def test_mistakes_are_named_before_anything_is_launched(accel_scale: Installed) -> None:
    assert re.search("no launch file 'fsdp3'.*fsdp2", accel_scale("sft --launch fsdp3", status=2).stderr)
    assert "use 1 or more" in accel_scale("dpo --num_processes 0", status=2).stderr
    assert "launches the recipe itself" in accel_scale("tune --launch ddp", status=2).stderr
    assert "No contradictions" in accel_scale("doctor --config_file zero3 sft --method lora").stdout
    assert "--beta" in accel_scale("dpo --recipe_help").stdout


def test_commands_of_a_written_plan_run(accel_scale: Installed) -> None:
    rows = default_data_paths()[0]
    line = f"plan {default_model_path()} --gpu rtx4090 --method lora --dataset_name {rows} --max_length 64 --write p"
    said = accel_scale(line).stdout
    command = re.search(r"^run +accel-scale (.*)$", said, re.MULTILINE)
    assert command is not None, said
    flags = "--max_steps 2 --attn_implementation sdpa_packed --plan off --output_dir out"
    accel_scale(f"{command[1]} {flags}")
    assert (accel_scale.work / "out" / "adapter_config.json").is_file()
