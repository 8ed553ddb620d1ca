"""Under the SSH script a node is killed and comes back: only the steps since the checkpoint are lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from node_pair import LAUNCH_FILES, REPOSITORY, TwoNodes, differences, make_inputs, metrics

from accel_scale.cli.main import main

BIN = str(Path(sys.executable).parent)
STEPS, SAVE_STEPS = 60, 10
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def transport(tmp_path: Path) -> Path:
    """Stands in for ssh: runs the command line here, whatever the host."""
    path = tmp_path / "transport"
    path.write_text('#!/bin/bash\nshift\nexec bash -c "$*"\n')
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def running(script: Path, transport: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the script; all of its processes are ended afterwards."""
    environment = {**os.environ, "SSH": str(transport), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(["bash", str(script)], stdout=output, stderr=output, env=environment)
    try:
        yield process
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for member in [*family, *([process] if process.poll() is None else [])]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                member.kill()
        process.wait()


def node_processes(process: subprocess.Popen[bytes], node: int) -> list[psutil.Process]:
    """The agent of `node` and its descendants."""
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = child.cmdline()
            if "launch" in words[:4] and f"--machine_rank {node} " in " ".join(words):
                return [child, *child.children(recursive=True)]
    raise AssertionError(f"node {node} does not run")


def ssh_script(nodes: TwoNodes, folder: Path) -> Path:
    """The script that `accel-scale launch-script ssh` writes for the run of `nodes`."""
    launch_file = folder / "two_nodes.yaml"
    text = (REPOSITORY / "accelerate_configs" / "ddp_multinode.yaml").read_text()
    launch_file.write_text(text.replace("num_processes: 16", "num_processes: 2").replace(": bf16", ": 'no'"))
    words = nodes.command(0)
    recipe = words[next(i for i, word in enumerate(words) if word.endswith("pretrain.py")) :]
    script = folder / "run.sh"
    flags = ["--config_file", str(launch_file), "--hosts", "127.0.0.1,localhost", "--port", str(nodes.port)]
    flags += ["--setup", f"export PATH={BIN}:$PATH", "--workdir", str(folder), "--output", str(script)]
    assert main(["launch-script", "ssh", *flags, *recipe]) == 0
    return script


def test_a_killed_node_comes_back_and_the_run_ends_as_if_nothing_had_been(
    inputs: Path, tmp_path: Path, transport: Path
) -> None:
    nodes = TwoNodes("ddp", tmp_path, inputs, steps=STEPS, save_steps=SAVE_STEPS)
    log = tmp_path / "log"
    with running(ssh_script(nodes, tmp_path), transport, log) as process:
        deadline = time.monotonic() + 400
        while nodes.last_step() < SAVE_STEPS + 5:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.02)
        killed_at = nodes.last_step()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for member in node_processes(process, 1):
                member.send_signal(number)
        reference = subprocess.Popen(  # meanwhile, the same ranks on one node, undisturbed
            [*one_node(nodes), "--output_dir", str(tmp_path / "whole")],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        status = process.wait(400)
        assert status == 0, log.read_text()[-3000:]
        assert reference.wait(400) == 0
    text = log.read_text()
    assert "[localhost] ended with status 137: starting it again" in text
    resumed = [int(line.split("(step ")[1].split(")")[0]) for line in text.splitlines() if "resumed from" in line]
    assert len(resumed) == 1
    assert killed_at - SAVE_STEPS <= resumed[0] <= killed_at + SAVE_STEPS
    assert differences(tmp_path / "whole", nodes.out) == []
    assert len(metrics(nodes.out)) == STEPS + 1  # one more line for the evaluation at the end


def one_node(nodes: TwoNodes) -> list[str]:
    """The command of the same run as one launch of two processes."""
    words = nodes.command(0)
    start = next(i for i, word in enumerate(words) if word.endswith("pretrain.py"))
    config = str(REPOSITORY / "accelerate_configs" / "ddp.yaml")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no", "--config_file", config]
    recipe = words[start:]
    out = recipe.index("--output_dir")
    return [*launch, "--main_process_port", "0", *recipe[:out], *recipe[out + 2 :]]


def test_the_first_failing_node_ends_the_others_and_its_status_is_the_scripts(tmp_path: Path, transport: Path) -> None:
    # A stand-in for the launcher: the node of rank 1 fails, while the other one would run for a minute.
    launcher = tmp_path / "bin" / "accelerate"
    launcher.parent.mkdir()
    launcher.write_text(
        "#!/bin/bash\necho started $NODE_RANK at $HEAD_NODE:$HEAD_PORT\n"
        'if [ "$NODE_RANK" = 1 ]; then sleep 0.3; exit 7; fi\n'
        f"trap 'echo saved; touch {tmp_path}/asked; exit 1' TERM\nfor i in {{1..600}}; do sleep 0.1; done\n"
    )
    launcher.chmod(0o755)
    script = tmp_path / "run.sh"
    flags = ["--config_file", str(REPOSITORY / "accelerate_configs" / "ddp_multinode.yaml"), "--hosts", "node1,node2"]
    flags += ["--setup", f"export PATH={launcher.parent}:$PATH", "--workdir", str(tmp_path), "--output", str(script)]
    assert main(["launch-script", "ssh", *flags, str(REPOSITORY / "recipes" / "pretrain.py")]) == 0
    started = time.monotonic()
    with running(script, transport, tmp_path / "log") as process:
        status = process.wait(30)
    lines = (tmp_path / "log").read_text().splitlines()
    assert status == 7, lines
    assert time.monotonic() - started < 20
    assert (tmp_path / "asked").exists()
    assert "[node1] saved" in lines
    assert lines.count("[node2] started 1 at node1:29500") == 2  # one start and one restart: --node_restarts 1
    # When a signal or the death of the script interrupts the run, agents are asked to save.
    for number, expected in ((signal.SIGTERM, 130), (signal.SIGKILL, -9)):
        (tmp_path / "asked").unlink()
        launcher.write_text(launcher.read_text().replace("sleep 0.3; exit 7", "exec sleep 60"))
        with running(script, transport, tmp_path / "log") as process:
            while (tmp_path / "log").read_text().count("started") < 2:
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(number)
            assert process.wait(60) == expected
            deadline = time.monotonic() + 10
            while not (tmp_path / "asked").exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", sorted(LAUNCH_FILES))
def test_every_strategy_survives_every_event(strategy: str, tmp_path: Path) -> None:
    script = REPOSITORY / "benchmarks" / "two_nodes.py"
    done = subprocess.run(
        [sys.executable, str(script), "--strategies", strategy, "--results", str(tmp_path)],
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
