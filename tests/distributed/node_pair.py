"""Two nodes of one process each on this machine, run by two agents that meet over loopback, and ways to hurt them.

Each agent is an `accelerate launch` of a launch file for several nodes, with the elastic rendezvous that
`accel-scale launch-script` writes. Used by test_two_nodes.py and benchmarks/two_nodes.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from accelerate.utils.other import get_free_port

from accel_scale.cluster.job import AGENT_ENVIRONMENT

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCH_FILES = {"ddp": "ddp_multinode", "fsdp2": "fsdp2_multinode", "zero3": "zero3_multinode"}
# Figures that must be the same in a run that was disturbed.
COMPARED = ("loss", "grad_norm", "learning_rate", "tokens", "rows", "eval_loss")
CONFIG = {
    "model_type": "llama", "vocab_size": 258, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
_RESUMED = re.compile(r"resumed from \S+ \(step (\d+)")


@dataclass
class TwoNodes:
    """One run of recipes/pretrain.py on two nodes.

    Attributes:
        strategy: A key of `LAUNCH_FILES`.
        folder: Holds the run's ``out`` and each node's log.
        inputs: The folder that `make_inputs` wrote.
        extra: Further flags of the recipe.
    """

    strategy: str
    folder: Path
    inputs: Path
    steps: int
    save_steps: int
    extra: list[str] = field(default_factory=list)
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int = field(default_factory=get_free_port)

    @property
    def out(self) -> Path:
        """The run's output folder."""
        return self.folder / "out"

    def command(self, node: int) -> list[str]:
        """The command line of one node."""
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no"]
        launch += ["--config_file", str(REPOSITORY / "accelerate_configs" / f"{LAUNCH_FILES[self.strategy]}.yaml")]
        launch += ["--num_machines", "2", "--num_processes", "2", "--machine_rank", str(node)]
        launch += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(self.port)]
        launch += ["--rdzv_backend", "c10d", "--rdzv_conf", f"join_timeout=300,is_host={int(node == 0)}"]
        launch += ["--max_restarts", "3"]
        flags = {
            "model_config": self.inputs / "config.json", "tokenizer": "byte", "data": self.inputs / "text.jsonl",
            "max_length": 64, "per_device_train_batch_size": 2, "global_batch_size": 8, "max_steps": self.steps,
            "logging_steps": 1, "log_rows": True, "eval_steps": 0, "eval_rows": 8, "save_steps": self.save_steps,
            "precision": "fp32", "sample_tokens": 0, "dataloader_num_workers": 0, "resume": "auto",
            "output_dir": self.out,
        }  # fmt: skip
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        return [*launch, str(REPOSITORY / "recipes" / "pretrain.py"), *words, *self.extra]

    def start(self, *nodes: int) -> None:
        """Start the agents of `nodes`, or restart them if they were killed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **AGENT_ENVIRONMENT, "HF_HUB_OFFLINE": "1"}
        for node in nodes:
            with open(self.log(node), "ab") as log:
                self.agents[node] = subprocess.Popen(
                    self.command(node),
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=environment,
                    cwd=self.folder,
                )

    def log(self, node: int) -> Path:
        """Log file of the agent of `node` and its worker, over all their lives."""
        return self.folder / f"node_{node}.log"

    def family(self, node: int) -> list[psutil.Process]:
        """The agent, then its worker and all further descendants."""
        agent = psutil.Process(self.agents[node].pid)
        return [agent, *agent.children(recursive=True)]

    def worker(self, node: int) -> psutil.Process:
        """The only rank of `node`."""
        return psutil.Process(self.agents[node].pid).children()[0]

    def kill_node(self, node: int) -> None:
        """Kill everything on `node` at once, as in a power failure: no process there notices the end of the others."""
        family = self.family(node)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.send_signal(number)
        self.agents[node].wait()
        psutil.wait_procs(family, timeout=10)

    def kill_worker(self, node: int) -> None:
        """Kill the rank of `node`; its agent stays alive."""
        self.worker(node).kill()

    def wait_for_step(self, step: int, *, timeout_seconds: float = 600.0) -> int:
        """Wait until `step` has been logged; returns the last step logged by then.

        Raises:
            RuntimeError: if an agent ends before that, or it takes too long.
        """
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if (last := self.last_step()) >= step:
                return last
            if any(agent.poll() is not None for agent in self.agents.values()):
                break
            time.sleep(0.02)
        raise RuntimeError(f"step {step} was not reached\n{self.tail()}")

    def wait(self, *nodes: int, timeout_seconds: float = 900.0) -> list[int]:
        """Wait for the agents of `nodes` (default: both); returns their exit statuses."""
        deadline = time.monotonic() + timeout_seconds
        try:
            return [self.agents[n].wait(max(1.0, deadline - time.monotonic())) for n in nodes or sorted(self.agents)]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no end after {timeout_seconds:.0f} s\n{self.tail()}") from None

    def last_step(self) -> int:
        """The last step in ``metrics.jsonl``, or 0 before the file exists."""
        lines = metrics(self.out)
        return int(lines[-1]["step"]) if lines else 0

    def resumed_steps(self) -> list[int]:
        """The steps from which the run was resumed, one for each time."""
        text = "".join(self.log(node).read_text(errors="replace") for node in sorted(self.agents))
        return [int(step) for step in _RESUMED.findall(text)]

    def tail(self) -> str:
        """The end of each node's log."""
        logs = [self.log(node) for node in sorted(self.agents)]
        return "\n".join(
            f"── {path.name}\n{path.read_text(errors='replace')[-2500:]}" for path in logs if path.exists()
        )

    def close(self) -> None:
        """End all processes of the run."""
        for node, agent in self.agents.items():
            if agent.poll() is None:
                self.kill_node(node)


@contextlib.contextmanager
def two_nodes(*args: Any, **kwargs: Any) -> Iterator[TwoNodes]:
    """A `TwoNodes` whose processes are all ended afterwards."""
    nodes = TwoNodes(*args, **kwargs)
    try:
        yield nodes
    finally:
        nodes.close()


def make_inputs(folder: Path) -> Path:
    """Write a text of 2,000 documents and the model's configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    words = ["one", "two", "river", "stone", "walks", "sings", "and", "the", "blue", "runs", "over"]
    with open(folder / "text.jsonl", "w", encoding="utf-8") as file:
        for _ in range(2000):
            text = " ".join(generator.choice(words) for _ in range(generator.randint(3, 60)))
            file.write(json.dumps({"text": text}) + "\n")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def metrics(out: Path) -> list[dict[str, Any]]:
    """The logged figures, without those that depend on the clock."""
    from accel_scale.reporting.metrics_log import read_metrics

    lines = read_metrics(out / "metrics.jsonl")
    return [{name: line[name] for name in ("step", *COMPARED) if name in line} for line in lines]


def differences(reference: Path, other: Path) -> list[str]:
    """Bitwise differences between the logs and final weights of two runs."""
    from safetensors.torch import load_file

    first, second = metrics(reference), metrics(other)
    found = [f"{len(first)} lines against {len(second)}"] if len(first) != len(second) else []
    found += [f"step {a['step']}: {a} against {b}" for a, b in zip(first, second, strict=False) if a != b]
    weights = [load_file(out / "model.safetensors") for out in (reference, other)]
    if weights[0].keys() != weights[1].keys():
        return [*found, "other tensors"]
    worst = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    return [*found, f"weights differ by up to {worst:.3g}"] if worst else found
