"""Run a recipe several times in one launch: each rank imports the libraries once and forks one child per run.

    accelerate launch --config_file F tests/distributed/run_recipe_forked.py runs.json

``runs.json`` lists ``{"recipe", "argv", "port", "log"}``. Every child is a whole, fresh run of the recipe as
``__main__``, with the launch's environment and its own rendezvous port; imports, most of a small run's time, are paid
once. Children write to ``log`` with their rank appended. The exit status is that of the first run that failed.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path


def main() -> int:
    """Import, then fork and wait, run by run."""
    runs = json.loads(Path(sys.argv[1]).read_text())
    preload()
    worst = 0
    for run in runs:
        child = os.fork()
        if child == 0:
            os._exit(run_once(run))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        worst = worst or status
    return worst


def preload() -> None:
    """What every run imports anyway; nothing here looks at the launch or starts a thread pool."""
    from accel_scale.quiet import quiet_imports

    quiet_imports()
    import bitsandbytes  # noqa: F401
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import trl.trainer.sft_trainer  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401

    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed  # noqa: F401


def run_once(run: dict) -> int:
    """One run of the recipe in this process; returns its exit status."""
    log = os.open(f"{run['log']}.{os.environ.get('RANK', '0')}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if "MASTER_PORT" in os.environ:
        # The launcher's own store remembers the run before this one.
        os.environ["MASTER_PORT"] = str(run["port"])
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    sys.argv = [run["recipe"], *run["argv"]]
    sys.path[0] = str(Path(run["recipe"]).resolve().parent)
    status = 0
    try:
        runpy.run_path(run["recipe"], run_name="__main__")
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
