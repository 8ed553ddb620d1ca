"""A Slurm batch script for a `ClusterJob`: one agent per node; it saves before the time limit and requeues itself."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from accel_scale.cluster.job import ClusterJob, safe_word
from accel_scale.errors import ConfigError

# Part of the time between the signal and the time limit that is reserved for Slurm to end the step.
_END_SECONDS = 30


@dataclass(frozen=True)
class SlurmOptions:
    """Options of a Slurm job.

    Attributes:
        time_seconds: Time limit of one allocation; the job is requeued until it has finished.
        save_seconds: Time before the limit at which Slurm sends SIGUSR1; a step and a save must fit into it.
        step_restarts: How often a failed step is retried on the same nodes.
        max_requeues: How often the job may be requeued.
        extra: Additional ``key=value`` directives.
    """

    job_name: str
    time_seconds: float
    save_seconds: int = 300
    step_restarts: int = 2
    max_requeues: int = 100
    partition: str | None = None
    account: str | None = None
    cpus_per_task: int | None = None
    log: str = "%x-%j.out"
    extra: Sequence[str] = ()


def slurm_script(job: ClusterJob, options: SlurmOptions) -> str:
    """The text of the batch script.

    Raises:
        ConfigError: if a directive cannot be written, or no time would be left before the limit.
    """
    if not _END_SECONDS < options.save_seconds < options.time_seconds:
        raise ConfigError(
            f"{options.save_seconds} s to save do not fit into {options.time_seconds:.0f} s.",
            place="--save_seconds",
            fix=f"use more than {_END_SECONDS} and less than --time.",
        )
    agent = job.agent_command(rank="SLURM_NODEID", address="HEAD_NODE", port="HEAD_PORT")
    cpus = f" --cpus-per-task={options.cpus_per_task}" if options.cpus_per_task else ""
    lines = [
        "#!/bin/bash",
        f"# Written by accel-scale launch-script: {job.about}.",
        "# shellcheck disable=SC1091,SC2016,SC2329 # files here, variables of the nodes, functions of traps",
        *_directives(job, options),
        "set -uo pipefail",
        *job.setup_lines(),
        "",
        "# Agents meet at the first node. A port of the job's own: two jobs may share a node.",
        'HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "HEAD_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        'export HEAD_NODE HEAD_PORT PET_RDZV_ID="$SLURM_JOB_ID"',
        "# An agent that gets SIGUSR1 passes it on, and gives its workers this long to finish a step and save.",
        *(f"export {name}={value}" for name, value in job.environment.items()),
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={options.save_seconds - _END_SECONDS}",
        "",
        f"AGENT={shlex.quote(job.signalled_agent(agent))}",
        f"STEP_RESTARTS={options.step_restarts}",
        f"MAX_REQUEUES={options.max_requeues}",
        _BODY.replace("@CPUS@", cpus),
    ]
    return "\n".join(lines)


def _directives(job: ClusterJob, options: SlurmOptions) -> list[str]:
    given = {
        "job-name": safe_word(options.job_name, "--job_name"),
        "nodes": str(job.num_nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(job.gpus_per_node),
        "cpus-per-task": str(options.cpus_per_task) if options.cpus_per_task else None,
        "time": slurm_time(options.time_seconds),
        "partition": options.partition and safe_word(options.partition, "--partition"),
        "account": options.account and safe_word(options.account, "--account"),
        "output": safe_word(options.log, "--log"),
        "open-mode": "append",
        "signal": f"B:USR1@{options.save_seconds}",
    }
    for item in options.extra:
        key, equals, value = item.partition("=")
        if not equals or not value:
            raise ConfigError(f"{item!r} is not key=value.", place="--sbatch", fix="write it like qos=high.")
        if key in (*given, "requeue"):
            raise ConfigError(f"{key} is written already.", place="--sbatch", fix="use the flag of its own.")
        given[safe_word(key, "--sbatch")] = safe_word(value, "--sbatch")
    return [*(f"#SBATCH --{key}={value}" for key, value in given.items() if value), "#SBATCH --requeue", ""]


def slurm_time(seconds: float) -> str:
    """``days-hours:minutes:seconds``, as Slurm writes a time limit; rounded up to a whole minute."""
    minutes = max(1, -(-int(seconds) // 60))
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"


_BODY = """
stopping=0
step=
# Slurm sends SIGUSR1 to this shell before the time limit; srun hands it on to the agents.
on_signal() {
  stopping=1
  echo "$(date +%FT%T) SIGUSR1: asking the run to save and stop"
  if [ -n "$step" ]; then kill -USR1 "$step"; fi
}
trap on_signal USR1

# One agent per node; the step's status is that of the first agent that failed.
run_step() {
  srun --ntasks-per-node=1@CPUS@ --kill-on-bad-exit=1 --label bash -c "$AGENT" &
  step=$!
  while true; do
    wait "$step"
    status=$?
    # A signal ends `wait` before the step has ended.
    if [ "$status" -gt 128 ] && kill -0 "$step" 2>/dev/null; then continue; fi
    return "$status"
  done
}

for ((attempt = 0; attempt <= STEP_RESTARTS; attempt++)); do
  run_step && exit 0
  if ((stopping)); then break; fi
  echo "$(date +%FT%T) the step ended with status $status (attempt $((attempt + 1)) of $((STEP_RESTARTS + 1)))"
done

# Workers that saved after a signal left with 85, which launchers report as 1: what counts is who asked them to stop.
if ((stopping)) && ((${SLURM_RESTART_COUNT:-0} < MAX_REQUEUES)); then
  echo "$(date +%FT%T) back into the queue, to continue from the last checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
exit "$status"
"""
