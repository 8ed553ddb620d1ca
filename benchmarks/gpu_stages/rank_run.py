"""Runs recipes/sft.py in a rank that records its PID and hangs on SIGALRM, like a loader that never returns.

accelerate launch --config_file F benchmarks/gpu_stages/rank_run.py FOLDER [recipe flags]
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    """Write ``FOLDER/rank_N``, then run the recipe."""
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGALRM, lambda number, frame: time.sleep(3600))
    (folder / f"rank_{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "sft.py"
    sys.argv = [str(recipe), *sys.argv[2:]]
    sys.path[0] = str(recipe.parent)
    runpy.run_path(str(recipe), run_name="__main__")


if __name__ == "__main__":
    main()
