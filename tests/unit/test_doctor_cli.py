"""`accel-scale` and `accel-scale doctor` as a user runs them."""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from accel_scale.checks.case import Finding
from accel_scale.checks.doctor import Diagnosis, print_diagnosis
from accel_scale.cli import main as main_module
from accel_scale.cli.doctor import arrange
from accel_scale.launching.machine import LocalMachine, detect_machine

ROOT = Path(__file__).parents[2]


def accel_scale(*words: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from accel_scale.cli.main import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=280)


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_is_fast_and_light():
    seconds = []
    for _ in range(3):
        before = cpu_seconds_of_children()
        done = accel_scale("--help")
        seconds.append(cpu_seconds_of_children() - before)
    assert done.returncode == 0
    assert all(name in done.stdout for name in main_module.COMMANDS)
    # CPU time is wall-clock time on an otherwise idle machine.
    assert min(seconds) <= 0.3
    code = (
        "import sys; from accel_scale.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'rich', 'yaml', 'psutil') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_command_line_errors():
    done = accel_scale("docter")
    assert done.returncode == 2
    assert "doctor" in done.stderr
    assert accel_scale().returncode == 0
    assert accel_scale("--version").stdout.startswith("accel-scale ")


@pytest.mark.slow
def test_doctor_of_this_machine_passes():
    done = accel_scale("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "machine: system: " in done.stdout
    assert f"accelerate {detect_machine().packages['accelerate']}" in done.stdout
    assert done.stdout.endswith("No contradictions found.\n")


@pytest.mark.slow
def test_doctor_json_lists_a_launch_files_findings(tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 1\n")
    done = accel_scale("doctor", "--config_file", str(path), "--json")
    content = json.loads(done.stdout)
    assert done.returncode == 1
    assert [f["place"] for f in content["findings"] if f["level"] == "error"] == [f"{path}:4"]
    assert content["launch"]["strategy"] == "FSDP1"
    assert content["machine"]["num_cores"] == detect_machine().num_cores


@pytest.mark.slow
def test_doctor_explains_swapped_files(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("method: lora\n")
    done = accel_scale("doctor", "--config_file", str(path))
    assert done.returncode == 1
    assert f"error: {path}:1: 'method' is a recipe's flag" in done.stdout


@pytest.mark.slow
def test_doctor_reads_the_recipes_own_flags(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("# flags\nprecision: fp32\noptim: adamw_bnb_8bit\n")
    done = accel_scale(
        "doctor", "--config_file", "accelerate_configs/fsdp2.yaml", "recipes/sft.py",
        "--config_file", str(recipe), "--dataset_streaming", "true",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(errors) == 3, done.stdout
    assert done.stderr == "", "import messages of the libraries are silenced"
    assert any("accelerate_configs/fsdp2.yaml:" in e and f"{recipe}:2 asks for fp32" in e for e in errors)
    assert any(e.startswith(f"error: {recipe}:3: adamw_bnb_8bit") for e in errors)
    assert any("--max_steps" in e for e in errors)


@pytest.mark.slow
def test_doctor_reports_what_only_the_recipe_refuses(capsys):
    words = ["doctor", "--warmup_ratio", "0.1", "--warmup_steps", "5", "--optim", "galore_adamw"]
    assert main_module.main(words) == 1
    errors = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error: ")]
    assert [error.split(":")[1].strip() for error in errors] == ["--warmup_steps", "--optim"]
    assert "galore_torch" in errors[1]


@pytest.mark.slow
def test_doctor_reports_a_launch_file_given_to_the_recipe(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["doctor", "recipes/sft.py", "--config_file", "accelerate_configs/ddp.yaml"]
    assert main_module.main(words) == 1
    assert "accelerate launch --config_file accelerate_configs/ddp.yaml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "arranged"),
    [
        ([], []),
        (["--json"], ["--json"]),
        (
            ["--config_file", "a", "r.py", "--config_file", "b"],
            ["--config_file", "a", "--", "r.py", "--config_file", "b"],
        ),
        (["--config_file=a", "--method", "lora"], ["--config_file=a", "--", "--method", "lora"]),
    ],
)
def test_words_after_the_recipe_are_the_recipes(words, arranged):
    assert arrange(words) == arranged


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_gets_tables_and_a_log_gets_lines():
    findings = [Finding("error", "a.yaml:3", "says [x].", "write y.")]
    diagnosis = Diagnosis(LocalMachine(), {"strategy": "DDP"}, findings)
    terminal, log = Terminal(), io.StringIO()
    print_diagnosis(diagnosis, terminal)
    print_diagnosis(diagnosis, log)
    assert "│" in terminal.getvalue()
    assert "a.yaml:3" in terminal.getvalue()
    assert "[x]" in terminal.getvalue()
    assert log.getvalue().splitlines()[-2:] == ["error: a.yaml:3: says [x]. Fix: write y.", "1 error, 0 warnings."]
    assert all(len(line) < 2000 and "│" not in line for line in log.getvalue().splitlines())


@pytest.mark.slow
def test_the_pretraining_recipe_is_read_by_its_own_flags():
    launch = ("--config_file", "accelerate_configs/ddp.yaml", "recipes/pretrain.py")
    for flags, expected in (
        (("--max_steps", "5", "--max_tokens", "1M"), "both say how long"),
        (("--max_stps", "5"), "did you mean --max_steps?"),
    ):
        done = accel_scale("doctor", *launch, *flags)
        assert done.returncode == 1
        assert expected in " ".join(done.stdout.split())
