"""Run an unmodified script on the CPU processes of a launch: ``run_on_cpu.py script.py --its flags``.

When a GPU launch finds no GPU, a script on Accelerate or a transformers Trainer takes itself for a single process.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Set up a CPU process group for the launch, then run the script as `python script.py` would."""
    from accel_scale.ending.leaving import leave_groups_safely, let_go_of_collectives
    from accel_scale.launching.rehearsal import enable_rehearsal_if_needed, let_trainers_run_on_cpu

    enable_rehearsal_if_needed()
    let_trainers_run_on_cpu()
    leave_groups_safely()
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        let_go_of_collectives()


if __name__ == "__main__":
    main()
