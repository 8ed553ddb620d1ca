"""A checked launch on several nodes, and the command that each node runs, for any kind of script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_scale.checks.case import Case
from accel_scale.checks.launch_rules import hybrid_sizes
from accel_scale.checks.run_settings import RunSettings
from accel_scale.errors import ConfigError
from accel_scale.flags.command_line import RecipeCommand
from accel_scale.launching.launch_file import LaunchFile, read_launch_file
from accel_scale.launching.machine import LocalMachine
from accel_scale.planning.search.recipe_writing import planned_script
from accel_scale.recipe_specs.finding import find_recipe
from accel_scale.secrets import is_secret, mask

# Files written by `accel-scale plan --write DIR`.
_PLANNED_LAUNCH, _PLANNED_RECIPE = "launch.yaml", "recipe.yaml"
_SAFE_WORD = re.compile(r"[A-Za-z0-9_./:@%+,=-]+")
# A worker asked to stop finishes its step and saves before the launcher may kill it.
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
# Environment variables of every agent.
#
# In torch 2.13 agents keep one store for the workers of all rounds, also with the static rendezvous: after a restart
# workers find the addresses of dead ones in it and fail. With this variable, every round of c10d gets a new store.
AGENT_ENVIRONMENT = {"PET_SIGNALS_TO_HANDLE": SIGNALS, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True)
class ClusterJob:
    """One launch over all nodes.

    Attributes:
        launch: The launch file; the script's flags override its nodes, address and rendezvous.
        recipe: The recipe and its flags.
        num_nodes: Nodes, each with one agent (`accelerate launch`).
        gpus_per_node: Processes that each agent starts.
        max_restarts: How often an agent restarts its workers after one of them has failed.
        join_timeout_seconds: How long agents wait for each other, at the start and after a failure.
        workdir: Working folder of the command, the same on all nodes; None keeps the folder where the shell starts.
        setup: Shell commands to run before it, e.g. ``source .venv/bin/activate``.
    """

    launch: LaunchFile
    recipe: RecipeCommand
    num_nodes: int
    gpus_per_node: int
    max_restarts: int = 3
    join_timeout_seconds: int = 900
    workdir: str | None = None
    setup: str | None = None

    @property
    def num_processes(self) -> int:
        """Number of processes on all nodes together."""
        return self.num_nodes * self.gpus_per_node

    @property
    def about(self) -> str:
        """Description for the first line of a script."""
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        file = in_comment(str(self.launch.path))
        return f"{self.launch.parallel.label} on {nodes} × {self.gpus_per_node} GPUs ({file})"

    def agent_command(self, *, rank: str, address: str, port: str) -> str:
        """The command of one node as shell text; `rank`, `address` and `port` name the variables that hold them.

        c10d is the elastic rendezvous: a worker's failure restarts all workers, and a node that returns can rejoin. It
        must be given on the command line: accelerate 1.15 ignores `rdzv_backend` and `same_network` of a launch file,
        because its own flags have defaults. Under c10d the rank only determines who hosts the rendezvous, which torch
        would otherwise guess from host names.
        """
        words = ["accelerate", "launch", "--config_file", str(self.launch.path)]
        words += ["--num_machines", str(self.num_nodes), "--num_processes", str(self.num_processes)]
        text = shlex.join(words)
        if self.num_nodes > 1:
            text += f' --machine_rank "${rank}" --main_process_ip "${address}" --main_process_port "${port}"'
            text += f" --rdzv_backend c10d --rdzv_conf is_host=$(({rank} == 0)),{self._waiting}"
        else:
            text += " --main_process_port 0"
        text += f" --max_restarts {self.max_restarts}"
        return f"{text} {shlex.join([str(self.recipe.script), *self.recipe.words])}"

    def signalled_agent(self, agent: str) -> str:
        """Shell text that runs `agent`, forwards SIGUSR1 to its workers and returns when they have saved.

        torchrun does this itself. The launcher of a single process would be killed by the signal, and the step with
        it, while its worker is saving.
        """
        if not self.launch.parallel.kind.is_single:
            return f"exec {agent}"
        return "\n".join(
            [
                f"(trap '' USR1; exec {agent}) &",
                "agent=$!",
                """trap 'pkill -USR1 -P "$agent"' USR1""",
                'while wait "$agent"; status=$?; [ "$status" -gt 128 ] && kill -0 "$agent" 2>/dev/null; do :; done',
                'exit "$status"',
            ]
        )

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the agents; a single node must request the elastic rendezvous in this way."""
        return {**AGENT_ENVIRONMENT, **({"PET_STANDALONE": "1"} if self.num_nodes == 1 else {})}

    @property
    def _waiting(self) -> str:
        return f"join_timeout={self.join_timeout_seconds},read_timeout={min(300, self.join_timeout_seconds)}"

    def setup_lines(self) -> list[str]:
        """Shell lines to run before the agent's command."""
        lines = [f"cd {shlex.quote(self.workdir)} || exit 1"] if self.workdir else []
        return [*lines, self.setup] if self.setup else lines


def cluster_job(
    config_file: str,
    recipe: Sequence[str],
    *,
    num_nodes: int | None = None,
    gpus_per_node: int | None = None,
    max_restarts: int = 3,
    join_timeout_seconds: int = 900,
    workdir: str | None = None,
    setup: str | None = None,
) -> ClusterJob:
    """Read and check a launch for several nodes.

    Args:
        config_file: A launch file, or a folder of `accel-scale plan --write`, which also has the recipe's flags.
        recipe: The recipe and its flags; if empty, a folder's planned recipe is used,
            with the folder's flags.
        num_nodes, gpus_per_node: None uses the launch file's values.

    Raises:
        ConfigError: if settings contradict each other, or the run could not be resumed.
    """
    path, words = Path(config_file), list(recipe)
    if path.is_dir():
        words = words or _planned_words(path / _PLANNED_RECIPE)
        path = path / _PLANNED_LAUNCH
        if not path.is_file():
            raise ConfigError(f"has no {_PLANNED_LAUNCH}.", place=config_file, fix="name a folder of plan --write.")
    if not words:
        raise ConfigError(
            "no recipe is given.", place="command line", fix="end with recipes/pretrain.py and its flags."
        )
    launch = read_launch_file(path)
    command = _resumable(RecipeCommand.parse(words[0], words[1:]))
    nodes = int(launch.values.get("num_machines") or 1) if num_nodes is None else num_nodes
    per_node = gpus_per_node
    if per_node is None:
        per_node = max(1, (launch.num_processes or nodes) // max(nodes, 1))
    _check_strategy(launch, nodes)
    _check_sizes(launch, nodes, per_node)
    for name, value, least in (("--max_restarts", max_restarts, 0), ("--join_timeout", join_timeout_seconds, 1)):
        if value < least:
            raise ConfigError(f"{value} is too small.", place=name, fix=f"use {least} or more.")
    if setup and not setup.isprintable():
        raise ConfigError("is more than one line.", place="--setup", fix="join the commands with &&.")
    _check_texts(command, workdir, setup, str(path))
    return ClusterJob(launch, command, nodes, per_node, max_restarts, join_timeout_seconds, workdir, setup)


def _planned_words(flags: Path) -> list[str]:
    """The recipe of a plan's flags file, with that file as its flags."""
    script = planned_script(flags.read_text(encoding="utf-8")) if flags.is_file() else None
    return [script, "--config_file", str(flags)] if script else []


def in_comment(text: str) -> str:
    """`text` on one line, with unprintable characters such as line ends escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _check_texts(command: RecipeCommand, *others: str | None) -> None:
    """Refuse credentials, which anyone could read in the script, and bytes that a script cannot hold."""
    for name, values in command.flags():
        if (is_secret(name) and values) or any(mask(value) != value for value in values):
            raise ConfigError(
                "a script keeps what is written into it, and this is a credential.",
                place=f"--{name}",
                fix="remove it and set HF_TOKEN, or the service's own variable, in the environment of the nodes.",
            )
    for text in (str(command.script), *command.words, *others):
        if text is not None and mask(text) != text:
            raise ConfigError(
                f"{mask(text)} holds a credential, which a script would keep.",
                place="command line",
                fix="set it in the environment of the nodes.",
            )
        if text is not None and ("\0" in text or not _is_text(text)):
            raise ConfigError(f"{text!a} is not text.", place="command line", fix="rename the file.")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a file name with bytes that are not UTF-8
        return False
    return True


def safe_word(value: str, flag: str) -> str:
    """Return `value` unchanged if it is safe in a script.

    Raises:
        ConfigError: if a scheduler's directive or a shell could misread it.
    """
    if not _SAFE_WORD.fullmatch(value):
        raise ConfigError(
            f"{value!r} cannot be written into a script.", place=flag, fix="use letters, digits, _ . - :"
        )
    return value


def _check_sizes(launch: LaunchFile, nodes: int, per_node: int) -> None:
    for flag, value in (("--nodes", nodes), ("--gpus_per_node", per_node)):
        if value < 1:
            raise ConfigError(f"{value} is too small.", place=flag, fix="use 1 or more.")
    total = launch.num_processes
    if total is not None and total != nodes * per_node:
        raise ConfigError(
            f"{nodes} nodes × {per_node} GPUs are {nodes * per_node} processes, and the launch file says {total}.",
            place=launch.place("num_processes"),
            fix=f"write num_processes: {nodes * per_node} there, or change --nodes or --gpus_per_node.",
        )
    finding = hybrid_sizes(Case(RunSettings(), launch, LocalMachine()))
    if finding is not None:
        raise ConfigError(finding.problem, place=finding.place, fix=finding.fix)


def _check_strategy(launch: LaunchFile, nodes: int) -> None:
    if launch.parallel.kind.is_single and nodes > 1:
        raise ConfigError(
            f"this launch file starts one process, not one on each of {nodes} nodes.",
            place=launch.place("distributed_type"),
            fix="use accelerate_configs/ddp_multinode.yaml or another one for several nodes.",
        )
    section = launch.values.get("deepspeed_config") or {}
    if launch.parallel.is_deepspeed and nodes > 1 and section.get("deepspeed_multinode_launcher") != "standard":
        raise ConfigError(
            "DeepSpeed would start the other nodes itself, by pdsh and a hostfile.",
            place=launch.place("deepspeed_config.deepspeed_multinode_launcher"),
            fix="add deepspeed_multinode_launcher: standard under deepspeed_config: one agent per node, as elsewhere.",
        )


def _resumable(recipe: RecipeCommand) -> RecipeCommand:
    """The recipe, set to resume from its last checkpoint when rerun, which every restart relies on."""
    found = find_recipe(recipe.script)
    if found is None or found.spec.resume_flag is None:
        return recipe
    flag, automatic = found.spec.resume_flag, found.spec.resume_auto
    if str(recipe.value(flag)).lower() == "no":
        raise ConfigError(
            "a run that is started again refuses its own folder.",
            place=recipe.place(flag),
            fix="remove it, or use auto.",
        )
    return recipe.with_flags(**{flag: automatic}) if automatic and recipe.value(flag) is None else recipe
