"""Output of `accel-scale launch-script`: scripts that bash parses, a TrainJob that YAML parses, one-line refusals."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_scale.cli.main import main
from accel_scale.cluster.slurm import slurm_time

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "accelerate_configs"
SHELLCHECK = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
RECIPE = ["recipes/pretrain.py", "--data", "web/*.jsonl", "--max_steps", "100", "--run_name", "it's"]
ELASTIC = "--rdzv_backend c10d --rdzv_conf is_host={},join_timeout=900,read_timeout=300 --max_restarts 3"


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def written(tmp_path: Path, kind: str, *words: str, recipe: list[str] = RECIPE) -> str:
    """The content of the file that the command writes."""
    path = tmp_path / "script"
    assert main(["launch-script", kind, *words, "--output", str(path), *recipe]) == 0
    return path.read_text()


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which the command refuses its arguments."""
    with pytest.raises(SystemExit) as leaving:
        main(["launch-script", *words])
    assert leaving.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def check_bash(text: str, tmp_path: Path) -> None:
    path = tmp_path / "checked.sh"
    path.write_text(text)
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""
    if SHELLCHECK:
        found = subprocess.run([SHELLCHECK, "--shell=bash", str(path)], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


def agent_words(script: str) -> list[str]:
    """Words of the agent's command as bash splits them, with variables expanded."""
    variables = "SLURM_NODEID=1 NODE_RANK=1 HEAD_NODE=node7 HEAD_PORT=23456"
    line = next(line for line in script.splitlines() if line.startswith("AGENT="))
    program = (
        f'{variables}\nset -f\n{line}\nexec() {{ "$@"; }}\naccelerate() {{ printf "%s\\n" "$@"; }}\neval "$AGENT"'
    )
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout.splitlines()


def test_slurm_script_asks_for_the_launch_files_nodes_and_saves_before_the_limit(tmp_path: Path) -> None:
    flags = ["--config_file", "accelerate_configs/fsdp2_multinode.yaml", "--time", "36h", "--partition", "gpu"]
    flags += ["--account", "lab", "--cpus_per_task", "64", "--save_seconds", "240", "--sbatch", "qos=high"]
    text = written(tmp_path, "slurm", *flags, "--setup", "source .venv/bin/activate")
    check_bash(text, tmp_path)
    directives = {line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")}
    assert directives == {
        "job-name=pretrain", "nodes=2", "ntasks-per-node=1", "gpus-per-node=8", "cpus-per-task=64", "time=1-12:00:00",
        "partition=gpu", "account=lab", "qos=high", "output=%x-%j.out", "open-mode=append", "signal=B:USR1@240",
        "requeue",
    }  # fmt: skip
    words = agent_words(text)
    assert words[:7] == ["launch", "--config_file", "accelerate_configs/fsdp2_multinode.yaml", "--num_machines", "2",
                         "--num_processes", "16"]  # fmt: skip
    address = "--main_process_ip node7 --main_process_port 23456"
    assert " ".join(words[7:19]) == f"--machine_rank 1 {address} {ELASTIC.format(0)}"
    assert words[19:] == RECIPE  # quotes and globs arrive as typed
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=210" in text
    assert text.index(f"cd {REPOSITORY}") < text.index("source .venv/bin/activate") < text.index("AGENT=")


def run_slurm(tmp_path: Path, text: str, *, srun: str, sends_signal: bool = False) -> tuple[int, list[str]]:
    """Run the batch script with stand-ins for Slurm's commands; returns its status and the recorded calls."""
    bin_folder, calls = tmp_path / "bin", tmp_path / "calls"
    bin_folder.mkdir()
    (bin_folder / "srun").write_text(f"#!/bin/bash\necho srun >>{calls}\n{srun}\n")
    (bin_folder / "scontrol").write_text(
        f'#!/bin/bash\nif [ "$1" = show ]; then printf \'node7\\nnode8\\n\'; else echo "scontrol $*" >>{calls}; fi\n'
    )
    for command in bin_folder.iterdir():
        command.chmod(0o755)
    (tmp_path / "job.sbatch").write_text(text)
    environment = {"PATH": f"{bin_folder}:/usr/bin:/bin", "SLURM_JOB_ID": "4321", "SLURM_JOB_NODELIST": "node[7-8]"}
    process = subprocess.Popen(["bash", str(tmp_path / "job.sbatch")], env=environment, stdout=subprocess.DEVNULL)
    if sends_signal:
        while not calls.exists():
            assert process.poll() is None
        process.send_signal(signal.SIGUSR1)
    return process.wait(30), calls.read_text().splitlines()


SLURM = ["--config_file", "accelerate_configs/ddp_multinode.yaml"]


def test_a_signal_before_the_time_limit_sends_the_job_back_into_the_queue(tmp_path: Path) -> None:
    text = written(tmp_path, "slurm", *SLURM)
    # An agent whose workers saved and left exits with 1, whatever their status was.
    srun = "trap 'kill $!; exit 1' USR1\nsleep 20 &\nwait"
    status, calls = run_slurm(tmp_path, text, srun=srun, sends_signal=True)
    assert (status, calls) == (0, ["srun", "scontrol requeue 4321"])


def test_a_failing_step_is_tried_again_on_the_same_nodes_and_then_given_up(tmp_path: Path) -> None:
    text = written(tmp_path, "slurm", *SLURM, "--step_restarts", "1")
    assert run_slurm(tmp_path, text, srun="exit 3") == (3, ["srun", "srun"])


def test_a_step_that_succeeds_ends_the_job(tmp_path: Path) -> None:
    assert run_slurm(tmp_path, written(tmp_path, "slurm", *SLURM), srun="exit 0") == (0, ["srun"])


def test_trainjob_has_the_launch_files_nodes_and_the_runtimes_rendezvous(tmp_path: Path) -> None:
    flags = ["--config_file", "accelerate_configs/zero3_multinode.yaml", "--image", "registry/accel-scale:1"]
    flags += ["--cpus", "96", "--memory", "1500Gi", "--volume_claim", "runs", "--mount_path", "/runs"]
    text = written(tmp_path, "kubernetes", *flags, "--workdir", "/opt/accel-scale", "--time", "2d")
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    spec: dict[str, Any] = job["spec"]
    assert spec["runtimeRef"] == {"name": "torch-distributed"}
    assert spec["activeDeadlineSeconds"] == 172800
    trainer = spec["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (2, 8, "registry/accel-scale:1")
    wanted = {"cpu": "96", "memory": "1500Gi", "nvidia.com/gpu": 8}
    assert trainer["resourcesPerNode"] == {"requests": wanted, "limits": wanted}
    (shell,) = trainer["args"]
    assert trainer["command"] == ["bash", "-c"]
    check_bash(shell, tmp_path)
    assert '--machine_rank "$PET_NODE_RANK" --main_process_ip "$PET_MASTER_ADDR"' in shell
    assert ELASTIC.format("$((PET_NODE_RANK == 0))") in shell
    pod = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    containers = pod["template"]["spec"]["template"]["spec"]["containers"]
    assert containers == [{"name": "node", "volumeMounts": [{"name": "run", "mountPath": "/runs"}]}]
    assert not any("TOKEN" in item["name"] or "KEY" in item["name"] for item in trainer["env"])


def test_ssh_script_is_bash_and_names_every_host_once(tmp_path: Path) -> None:
    text = written(tmp_path, "ssh", *SLURM, "--hosts", "me@node1,node2", "--port", "29600", "--node_restarts", "2")
    check_bash(text, tmp_path)
    for line in ("HOSTS=(me@node1 node2)", "HEAD_NODE=node1", "HEAD_PORT=${HEAD_PORT:-29600}", "NODE_RESTARTS=2"):
        assert line in text.splitlines()


def test_a_folder_of_plan_write_is_enough(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    command = ["plan", "meta-llama/Llama-3.1-8B", "--gpu", "H100", "--num_gpus", "16", "--write", str(plan)]
    assert main(command) == 0
    text = written(tmp_path, "slurm", "--config_file", str(plan), recipe=[])
    assert f"recipes/sft.py --config_file {plan}/recipe.yaml --resume_from_checkpoint auto" in text
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8"} <= set(text.splitlines())


def test_one_node_needs_no_rendezvous(tmp_path: Path) -> None:
    text = written(tmp_path, "slurm", "--config_file", "accelerate_configs/ddp.yaml")
    words = " ".join(agent_words(text))
    assert "--num_machines 1 --num_processes 2 --main_process_port 0 --max_restarts 3" in words
    assert "c10d" not in words
    assert "export PET_STANDALONE=1" in text.splitlines()  # without this, torch 2.13 finds addresses of dead workers


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["slurm", *SLURM, "--nodes", "3"], ["3 nodes × 5 GPUs", "ddp_multinode.yaml:13"]),
        (["slurm", *SLURM, "--nodes", "4", "--gpus_per_node", "8"], ["32 processes", "num_processes: 32"]),
        (["slurm", *SLURM, "--time", "soon"], ["--time", "90m"]),
        (["slurm", *SLURM, "--time", "2m"], ["--save_seconds", "120 s"]),
        (["slurm", *SLURM, "--partition", "a b"], ["--partition", "'a b'"]),
        (["slurm", *SLURM, "--hosts", "a,b"], ["--hosts", "slurm"]),
        (["slurm", *SLURM, "--sbatch", "nodes=3"], ["--sbatch", "nodes"]),
        (["slurm", *SLURM, "--step_restarts", "-1"], ["--step_restarts", "negative"]),
        (["kubernetes", *SLURM], ["--image"]),
        (["kubernetes", *SLURM, "--image", "i", "--memory", "much"], ["--memory", "512Gi"]),
        (["kubernetes", *SLURM, "--image", "i", "--job_name", "My_job"], ["--job_name", "My_job"]),
        (["ssh", *SLURM], ["--hosts"]),
        (["ssh", *SLURM, "--hosts", "a,b,c"], ["3 hosts", "2 nodes"]),
        (["ssh", *SLURM, "--hosts", "a,a"], ["a is named twice"]),
        (["ssh", *SLURM, "--hosts", "a,$(reboot)"], ["--hosts", "is not a host"]),
        (["slurm", "--config_file", "accelerate_configs/single_gpu.yaml", "--nodes", "2"], ["one process"]),
        (["slurm", "--config_file", "accelerate_configs/missing.yaml"], ["missing.yaml", "cannot be read"]),
    ],
)
def test_what_cannot_be_started_is_refused_in_one_line(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, *words, *RECIPE)
    assert all(part in line for part in parts), line


def test_a_run_that_could_not_go_on_after_a_restart_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--resume" in refusal(capsys, "slurm", *SLURM, *RECIPE, "--resume", "no")
    assert "no recipe" in refusal(capsys, "slurm", *SLURM)
    assert "no recipe 'recipes/other.py'" in refusal(capsys, "slurm", *SLURM, "recipes/other.py")


def test_deepspeed_must_not_start_the_nodes_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (CONFIGS / "zero3_multinode.yaml").read_text().replace("  deepspeed_multinode_launcher: standard\n", "")
    (tmp_path / "zero3.yaml").write_text(text)
    line = refusal(capsys, "slurm", "--config_file", str(tmp_path / "zero3.yaml"), *RECIPE)
    assert "deepspeed_multinode_launcher: standard" in line


def test_somebody_elses_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text("mine\n")
    assert "run.sh" in refusal(capsys, "slurm", *SLURM, "--output", str(tmp_path / "run.sh"), *RECIPE)
    assert (tmp_path / "run.sh").read_text() == "mine\n"


@pytest.mark.parametrize(("seconds", "text"), [(90, "0-00:02:00"), (86400, "1-00:00:00"), (5400, "0-01:30:00")])
def test_slurm_time(seconds: float, text: str) -> None:
    assert slurm_time(seconds) == text
