"""`techniques.py`: strategies of recipes/pretrain.py under its launch files on CPU processes, each compared with DDP.

Every launch is a real `accelerate launch` at the same global batch, in fp32. Bytes are torch's own count of CPU
allocations on the fullest rank during one step, including buffers of reducers and of DeepSpeed. Time is wall time of
turns: DDP and the single process are paused while another launch has its turn, and ratios are between turns of one
round.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
for folder in (BENCHMARKS, BENCHMARKS.parent / "tests", BENCHMARKS.parent / "tests" / "distributed"):
    sys.path.insert(0, str(folder))

from technique_rows import PARALLEL_RUNGS, TOO_LARGE_ON_FOUR, Stage, Values, Work  # noqa: E402

ROUNDS, TURN_STEPS, TRACED_STEP, WARM_UP = 4, 2, 3, 4
GLOBAL_BATCH, MICRO_BATCH, LENGTH = 8, 2, 128
SHAPE = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": LENGTH, "vocab_size": 768,
    "tie_word_embeddings": False,
}  # fmt: skip
# Settings in addition to a launch's file, by row; `launch` words go to accelerate, the others to the recipe.
LAUNCH_FILES = {"sp": "fsdp2_sp"}
LAUNCH_WORDS = {
    "tp": ("--parallelism_config_tp_size", "{processes}"),
    "sp": ("--parallelism_config_dp_shard_size", "1", "--parallelism_config_sp_size", "{processes}"),
}
RECIPE_WORDS = {"pp": ("--pp_size", "{processes}")}
ON_FOUR = (*(name for name, _, _ in PARALLEL_RUNGS if name not in TOO_LARGE_ON_FOUR), "fsdp2_hybrid")
STEP = "technique::step"


class Launch:
    """One run of the recipe, which pauses between its turns.

    Args:
        name: Name of its row, or ``single``.
        processes: Number of ranks.
        folder: Folder for its pipes, log and results.
    """

    def __init__(self, name: str, processes: int, folder: Path) -> None:
        import parity

        folder.mkdir(parents=True)
        self.folder, self.seconds = folder, list[float]()
        for pipe in ("asked", "told"):
            os.mkfifo(folder / pipe)

        def filled(words: dict[str, tuple[str, ...]]) -> list[str]:
            return [word.format(processes=processes) for word in words.get(name, ())]

        launch_file = "cpu" if name == "single" else LAUNCH_FILES.get(name, name)
        [command] = parity.launch_commands(launch_file, folder)
        if name != "single":
            command += ["--num_processes", str(processes), *filled(LAUNCH_WORDS)]
        words = filled(RECIPE_WORDS)
        command += [__file__, str(folder), *recipe_words(folder), *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self.log = folder / "log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=BENCHMARKS.parent, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        # Opened for reading and writing, so that opening does not wait for a process that may never start.
        self._ask = os.open(folder / "asked", os.O_RDWR)
        self._told = os.open(folder / "told", os.O_RDWR)
        try:
            self._wait()
        except BaseException:
            self.end()
            raise

    def take(self) -> float:
        """Run one turn; returns its seconds."""
        os.write(self._ask, f"{TURN_STEPS}\n".encode())
        self.seconds.append(self._wait())
        return self.seconds[-1]

    def result(self) -> dict[str, Any]:
        """Result of the fullest rank."""
        found = [json.loads(path.read_text()) for path in self.folder.glob("rank*.json")]
        return max(found, key=lambda rank: rank["bytes"])

    def end(self) -> None:
        """End the launch, whatever its state."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        os.close(self._ask)
        os.close(self._told)

    def _wait(self, limit_seconds: float = 400.0) -> float:
        deadline = time.monotonic() + limit_seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            if select.select([self._told], [], [], 1.0)[0]:
                return float(os.read(self._told, 100).split()[-1])
        tail = self.log.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise RuntimeError(f"{self.folder.name} gave no answer:\n{tail}")


def recipe_words(folder: Path) -> list[str]:
    """Flags of the recipe."""
    from accel_scale.data.default import default_model_path, default_pretraining_text

    (folder / "config.json").write_text(json.dumps(SHAPE))
    flags = {
        "model_config": folder / "config.json", "tokenizer": default_model_path(),
        "data": default_pretraining_text(str(folder), num_documents=400), "output_dir": folder / "run",
        "max_length": LENGTH, "global_batch_size": GLOBAL_BATCH, "per_device_train_batch_size": MICRO_BATCH,
        "max_steps": 1000, "precision": "fp32", "checkpointing_policy": "none", "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "logging_steps": 1, "eval_steps": 0, "save_steps": 0, "sample_tokens": 0,
        "dataloader_num_workers": 0,
    }  # fmt: skip
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


class Beside:
    """References for every row: DDP on as many processes and a single process, which live until this process ends."""

    def __init__(self, processes: int) -> None:
        from warm_python import WarmPython

        self._ends = contextlib.ExitStack()
        atexit.register(self._ends.close)
        self.folder = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="techniques-")))
        self.processes, warm = processes, WarmPython()
        self._ends.callback(warm.close)
        # Launches start in a process that has imported the libraries, as in the tests.
        self._python, self._warm = sys.executable, str(warm.executable)
        self.ddp, self.single = self.start("ddp", self._ends), self.start("single", self._ends)

    def start(self, name: str, ends: contextlib.ExitStack) -> Launch:
        """Start a launch that is ready for its first turn and is ended by `ends`."""
        sys.executable = self._warm
        try:
            launch = Launch(name, self.processes, self.folder / f"{name}-{len(list(self.folder.iterdir()))}")
        finally:
            sys.executable = self._python
        ends.callback(launch.end)
        return launch


beside_ddp = functools.cache(Beside)


def measure(name: str, processes: int) -> dict[str, Values]:
    """Measure one strategy's row."""
    prefix = "ranks" if processes == 2 else f"ranks{processes}"
    return {f"{prefix}/{name}": _figures(name, beside_ddp(processes))}


def _figures(name: str, beside: Beside) -> Values:
    with contextlib.ExitStack() as ends:
        ddp = beside.ddp
        own = ddp if name == "ddp" else beside.start(name, ends)
        pairs = [(ddp.take() if own is not ddp else 0.0, beside.single.take(), own.take()) for _ in range(ROUNDS)]
        found, reference = own.result(), ddp.result()
    ratios = [(other or mine) / mine for other, _, mine in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    losses = zip(found["losses"], reference["losses"], strict=False)
    return {
        "speed": middle,
        "speed_low": low,
        "speed_high": high,
        "scaling": statistics.median(alone / mine for _, alone, mine in pairs),
        "bytes": float(found["bytes"]),
        "bytes_total": found["bytes"] / reference["bytes"],
        "loss_difference": max(abs(a - b) / abs(b) for a, b in losses),
        "backend": found["backend"],
        "log_lines": float(found["log_lines"]),
    }


def work() -> None:
    """Run the recipe on one rank, profiling its first steps and taking later ones in turns."""
    import torch
    from turns import StepClock

    folder, words = Path(sys.argv[1]), sys.argv[2:]
    sys.path.insert(0, str(BENCHMARKS.parent / "recipes"))
    torch.set_num_threads(1)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    profiler.start()
    import pretrain

    from accel_scale.pretraining.report import PretrainReport

    stepped, mark, losses = PretrainReport.stepped, torch.profiler.record_function(STEP), list[float]()
    rank = int(os.environ.get("RANK", "0"))
    clock: StepClock | None = None

    def watched(self: Any, outcome: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal clock
        stepped(self, outcome, *args, **kwargs)
        losses.append(outcome.loss)
        if len(losses) == TRACED_STEP - 1:
            mark.__enter__()
        elif len(losses) == TRACED_STEP:
            mark.__exit__(None, None, None)
            profiler.stop()
            lines = folder / "run" / "metrics.jsonl"
            num_lines = sum('"loss"' in line for line in lines.read_text().splitlines()) if lines.is_file() else 0
            backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else "none"
            found = {"bytes": _peak_bytes(profiler, folder / f"trace{rank}.json"), "losses": losses}
            found |= {"backend": backend, "log_lines": num_lines / len(losses)}
            (folder / f"rank{rank}.json").write_text(json.dumps(found))
        elif len(losses) == WARM_UP and rank == 0:
            # The other ranks wait for this one in the next collective.
            asked, told = (os.open(folder / pipe, os.O_RDWR) for pipe in ("asked", "told"))
            clock = StepClock(asked, told, warm_up=1)
        elif clock is not None:
            clock.tick()

    PretrainReport.stepped = watched  # type: ignore[method-assign]
    pretrain.main(words)


def _peak_bytes(profiler: Any, trace: Path) -> int:
    """Peak bytes allocated by the CPU allocator during the marked step."""
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    trace.unlink()
    step = next(event for event in events if event.get("name") == STEP and "dur" in event)
    end = step["ts"] + step["dur"]
    memory = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    return max(int(e["args"]["Total Allocated"]) for e in memory if step["ts"] <= e["ts"] <= end)


NAMES = tuple(name for name, _, _ in PARALLEL_RUNGS)
STAGE = Stage(
    "ranks",
    "measured",
    f"recipes/pretrain.py, {GLOBAL_BATCH} rows of {LENGTH} tokens a step, a Llama of 4 layers of 256, fp32, one "
    f"thread a rank on two shared cores; {ROUNDS} rounds of {TURN_STEPS} steps, wall time.",
    (
        *(Work((f"ranks/{name}",), functools.partial(measure, name, 2)) for name in NAMES),
        *(Work((f"ranks4/{name}",), functools.partial(measure, name, 4)) for name in ON_FOUR),
    ),
)

if __name__ == "__main__":
    work()
