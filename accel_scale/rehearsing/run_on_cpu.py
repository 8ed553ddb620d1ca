"""Run a script as it is, on the CPU processes of a launch: ``run_on_cpu.py script.py --its flags``.

A script on Accelerate or a transformers Trainer believes itself alone where a GPU launch finds no GPU.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Make the launch a process group on the CPU, then run the script as `python script.py` would."""
    from accel_scale.launching.rehearsal import enable_rehearsal_if_needed, let_trainers_run_on_cpu

    enable_rehearsal_if_needed()
    let_trainers_run_on_cpu()
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
