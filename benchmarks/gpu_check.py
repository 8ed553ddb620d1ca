"""All checks that need a GPU in one command: resumable stages with time limits, reported on one page.

    python benchmarks/gpu_check.py                       # ten minutes on one GPU, ten more where there are several
    python benchmarks/gpu_check.py --stages methods speed
    python benchmarks/gpu_check.py --cpu                 # all of it at a small size, in five minutes on two cores

Running the same command again continues where it stopped: passed stages are skipped, failed and unreached ones are run
(`--fresh` starts over). Needs no network. The page, `gpu_check.md` in the output folder, is written after every stage,
with each stage's output next to it. The exit status is 1 if something failed or was not reached.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from gpu_stages import STAGES, Stage  # noqa: E402
from gpu_stages.page import Ending, read_ending, write_ending, write_page  # noqa: E402

_SHORTEST = 15.0  # a stage with less time left is not started
_RANKS_ON_CPU = 2
_CPU_PATIENCE = 3.0  # limits are for a dedicated GPU; CPU cores are shared


def main() -> int:
    """Run the requested stages that are not done yet."""
    options, started = parse(), time.monotonic()
    if options.stage:
        return run_stage(options)
    prepare_environment(options.cpu)
    device, num_gpus = describe_device(options.cpu)
    out = (options.out or REPOSITORY / "outputs" / ("gpu_check_cpu" if options.cpu else "gpu_check")).resolve()
    if options.fresh:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    check_same_device(out, device)
    page = options.page or out / "gpu_check.md"
    patience = _CPU_PATIENCE if options.cpu else 1.0
    endings = [read_ending(out / name) for name in options.stages]
    is_all_done = all(ending is not None and ending.is_done for ending in endings)
    with warm_processes(options.cpu and not is_all_done) as servers:
        for is_many in (False, True):
            box_ends = time.monotonic() + options.seconds * patience
            for stage in STAGES:
                if (stage.num_gpus > 1) is not is_many or stage.name not in options.stages:
                    continue
                ending = read_ending(out / stage.name)
                if ending is None or not ending.is_done:
                    seconds = min(stage.seconds * patience, box_ends - time.monotonic())
                    write_ending(out / stage.name, end_of(stage, out, options.cpu, num_gpus, seconds, servers))
                write_page(page, STAGES, out, device=device)
    print(write_page(page, STAGES, out, device=device))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # independent of other load on the machine
    print(f"{time.monotonic() - started:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of processors")
    endings = [read_ending(out / name) for name in options.stages]
    return int(not all(ending is not None and ending.is_fine for ending in endings))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stages", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--cpu", action="store_true", help="small sizes on the CPU, processes in the place of GPUs")
    parser.add_argument("--seconds", type=float, default=600.0, help="for one GPU's stages, and again for several's")
    parser.add_argument("--out", type=Path, help="default: outputs/gpu_check, with --cpu outputs/gpu_check_cpu")
    parser.add_argument("--page", type=Path, help="default: gpu_check.md in the output folder")
    parser.add_argument("--fresh", action="store_true", help="forget what is done")
    parser.add_argument("--stage", help=argparse.SUPPRESS)  # in this process
    parser.add_argument("--num_gpus", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_stage(options: argparse.Namespace) -> int:
    """Run one stage in this separate process, which contains crashes, hangs and leaked memory."""
    from gpu_stages.box import Cases

    stage = next(stage for stage in STAGES if stage.name == options.stage)
    cases = Cases(options.out, on_gpu=not options.cpu, num_gpus=options.num_gpus, seconds=options.seconds)
    stage.load()(cases)
    return 0


def end_of(stage: Stage, out: Path, cpu: bool, num_gpus: int, seconds: float, servers: list[int]) -> Ending:
    """Run one stage in its own process with a time limit; returns how it ended."""
    if stage.num_gpus > num_gpus:
        return Ending("lacking", f"needs {stage.num_gpus} GPUs")
    if seconds < _SHORTEST:
        return Ending("unfinished", "not run: the time was up")
    folder = out / stage.name
    folder.mkdir(parents=True, exist_ok=True)
    print(f"── {stage.name}: {stage.title} (at most {seconds:.0f} s)", flush=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--stage", stage.name, "--out", str(folder)]
    command += ["--seconds", str(seconds), "--num_gpus", str(num_gpus), *(["--cpu"] if cpu else [])]
    environment = dict(os.environ)
    if stage.num_gpus == 1 and not cpu:  # a single process, which would refuse several GPUs
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    started = time.monotonic()
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return Ending("unfinished", f"not finished in {seconds:.0f} s", seconds)
        finally:
            end_family(process, servers)
    took = time.monotonic() - started
    if status:
        lines = [line for line in (folder / "log.txt").read_text(errors="replace").splitlines() if line.strip()]
        return Ending("unfinished", f"ended with status {status}: {lines[-1][:240] if lines else 'no output'}", took)
    return Ending("ended", "", took)


def end_family(process: subprocess.Popen[bytes], servers: list[int]) -> None:
    """Kill the stage's process and everything it has started, since ranks run in their own sessions."""
    family = []
    for pid in (process.pid, *servers):
        with contextlib.suppress(psutil.NoSuchProcess):
            family += psutil.Process(pid).children(recursive=True)
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=10)


def prepare_environment(cpu: bool) -> None:
    """Set the environment for all child processes."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_WAIT_POLICY="passive")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    if cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def describe_device(cpu: bool) -> tuple[str, int]:
    """Name and number of the GPUs, queried in another process so that this one uses none of their memory."""
    if cpu:
        return "cpu", _RANKS_ON_CPU
    code = "import json, torch\nc = torch.cuda\nn = c.device_count()\n"
    code += "print(json.dumps([c.get_device_name(0) if n else '', n]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    name, count = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else ("", 0)
    if not count:
        raise SystemExit("gpu_check.py: torch sees no GPU here. Fix: use --cpu, or install torch for this machine.")
    return name, count


def check_same_device(out: Path, device: str) -> None:
    """Refuse to mix results of two devices on one page."""
    path = out / "device.txt"
    if path.is_file() and path.read_text() != device:
        raise SystemExit(f"gpu_check.py: {out} has results of {path.read_text()}. Fix: use --fresh or another --out.")
    path.write_text(device)


@contextlib.contextmanager
def warm_processes(cpu: bool) -> Iterator[list[int]]:
    """On the CPU, fork processes from servers that have imported the libraries; yields the servers' PIDs."""
    from warm_python import WarmPython, is_possible, is_warm

    if not cpu or is_warm() or not is_possible():
        yield []
        return
    warm, python = WarmPython(), sys.executable
    sys.executable = str(warm.executable)
    try:
        yield warm.servers
    finally:
        sys.executable = python
        warm.close()


if __name__ == "__main__":
    sys.exit(main())
