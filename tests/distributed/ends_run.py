"""A worker without torch for tests of how launches end: ``ends_run.py MODE FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from accel_scale.ending.user_errors import user_errors
from accel_scale.errors import ConfigError
from accel_scale.starting.begin import begin_process, end_at_interrupt

PROGRAM = "ends_run.py"


def main(mode: str, folder: Path) -> None:
    rank = os.environ.get("RANK", "0")
    if mode == "refuse":
        raise ConfigError("is wrong.", place="--flag", fix="fix it.")
    if mode == "crash on the last rank" and int(rank) + 1 == int(os.environ.get("WORLD_SIZE", "1")):
        raise KeyError("no such thing")
    if mode == "before training":
        end_at_interrupt(PROGRAM)
    if mode == "stuck":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()  # as a data loader's worker, or a worker of a pool that prepares data
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(120)
        os._exit(0)
    (folder / f"{rank}.part").write_text(f"{os.getpid()} {child}")
    (folder / f"{rank}.part").rename(folder / f"{rank}.pids")
    time.sleep(120)


if __name__ == "__main__":
    with user_errors(PROGRAM):
        begin_process()
        main(sys.argv[1], Path(sys.argv[2]))
