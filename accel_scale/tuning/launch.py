"""One background launch of a recipe, with its log in a file and reliable termination."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.launching.launch_file import LaunchFile, read_launch_file

GRACE_SECONDS = 10.0


class TrialLaunch:
    """Runs `command` under a guard process that outlives this process just long enough to end the command.

    Args:
        command: What to run.
        log: File for everything it prints.
        grace_seconds: Time between asking its processes to end and killing them.
    """

    def __init__(self, command: Sequence[str], log: Path, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self._grace_seconds = grace_seconds
        guarded = [sys.executable, "-m", "accel_scale.tuning.process_guard", str(grace_seconds), *command]
        with log.open("wb") as output:
            # A new session, so that Ctrl-C in the terminal reaches only the search, which then ends the launch.
            self._guard = subprocess.Popen(
                guarded, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def pid(self) -> int:
        """PID of the guard, whose descendants are the launch."""
        return self._guard.pid

    def wait(self, seconds: float) -> int | None:
        """The exit status, or `None` if the launch still runs after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._guard.wait(seconds)
        return None

    def end(self) -> None:
        """End every process of the launch; returns once they are gone."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()  # the guard then ends the launch, as it would if this process were killed
        if self.wait(self._grace_seconds + 30) is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.wait()


def read_trial_launch_file(path: str | Path) -> LaunchFile:
    """Read and check the launch file of the trials.

    Raises:
        ConfigError: as `read_launch_file`, and if the launch spans several machines.
    """
    launch_file = read_launch_file(path)
    if (launch_file.values.get("num_machines") or 1) > 1:
        raise ConfigError(
            "a trial is launched from one machine, and this launch needs several.",
            place=launch_file.place("num_machines"),
            fix="search on one machine with num_machines: 1; several machines can share a study by --storage.",
        )
    return launch_file


def launch_command(recipe: Path, flags: Path, launch_file: LaunchFile | None) -> list[str]:
    """The `accelerate launch` command of `recipe` with a YAML file of flags."""
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    if launch_file is not None:
        command += ["--config_file", str(launch_file.path)]
        if launch_file.num_processes != 1:
            # Other trials may run on this machine, so let the launcher pick a free port.
            command += ["--main_process_port", "0"]
    return [*command, str(recipe), "--config_file", str(flags)]
