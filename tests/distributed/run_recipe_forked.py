"""Run a recipe several times in one launch: each rank imports the libraries once and forks one child per run.

    accelerate launch --config_file F tests/distributed/run_recipe_forked.py runs.json

``runs.json`` lists ``{"recipe", "argv", "log"}``. Every child is a whole, fresh run of the recipe as ``__main__``,
with the launch's environment and its own rendezvous; imports, most of a small run's time, are paid once. Children
write to ``log`` with their rank appended. The exit status is that of the first run that failed. If a rank fails, the
other ranks are ended instead of waiting for it.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# Time for the other ranks to fail by themselves once one has failed.
GRACE_SECONDS = 90.0


def main() -> int:
    """Import, then fork and wait, run by run."""
    runs = json.loads(Path(sys.argv[1]).read_text())
    preload()
    gc.collect()
    gc.freeze()  # otherwise every child looks at, and copies, what the libraries allocated
    worst = 0
    for run in runs:
        child = os.fork()
        if child == 0:
            os._exit(run_once(run))
        status = status_of(child, Path(run["log"]))
        worst = worst or status
    return worst


def status_of(child: int, log: Path) -> int:
    """The exit status of this rank's process, which is ended if another rank has failed and it keeps running."""
    failed, deadline = log.with_suffix(".failed"), None
    while True:
        pid, code = os.waitpid(child, os.WNOHANG)
        if pid:
            status = os.waitstatus_to_exitcode(code)
            if status:
                failed.touch()
            return status
        if deadline is None and failed.exists():
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline = None
        time.sleep(0.02)


def own_rendezvous(log: Path) -> Any:
    """Give the ranks of a run their own store; the return value keeps it open, on rank 0.

    The launcher's store remembers the previous run, and a port chosen in advance may be taken by the time it is
    used: rank 0 would fail and the others would wait. So rank 0 opens the store here, on any free port, and tells the
    others where; in this process `init_process_group` finds it open.
    """
    from torch.distributed import TCPStore

    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    launch = os.environ.get("MASTER_PORT", "0")  # so that no other launch's file is read
    store, told = None, log.with_name(f"{log.name}.{launch}.port")
    if os.environ.get("RANK", "0") == "0":
        store = TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, multi_tenant=True, wait_for_workers=False)
        part = told.with_suffix(".part")
        part.write_text(str(store.port))
        part.rename(told)
    while not told.exists():
        time.sleep(0.01)
    os.environ["MASTER_PORT"] = told.read_text()
    return store


def preload() -> None:
    """Import what every run imports anyway; nothing here reads the launch or starts a thread pool."""
    from accel_scale.quiet import quiet_imports

    quiet_imports()
    import bitsandbytes  # noqa: F401
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import trl.trainer.sft_trainer  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # compiles a thousand expressions, once for all runs
    asked = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: F401  (Accelerate imports it in every run)

    if asked is None:
        del os.environ["DS_ACCELERATOR"]


def run_once(run: dict) -> int:
    """One run of the recipe in this process; returns its exit status."""
    log = os.open(f"{run['log']}.{os.environ.get('RANK', '0')}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    store = own_rendezvous(Path(run["log"])) if "MASTER_ADDR" in os.environ else None
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
    if status:
        Path(run["log"]).with_suffix(".failed").touch()
    del store
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
