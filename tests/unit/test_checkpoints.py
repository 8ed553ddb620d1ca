"""Checkpoints of a plain loop on one process: a resume gives the same numbers, and damaged files are never used."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from accel_scale import CheckpointManager, ConfigError
from accel_scale.ending.launcher import is_launcher
from accel_scale.ending.user_errors import CheckpointNotSaved
from accel_scale.facts.exit_statuses import EXIT_STOPPED
from accel_scale.training.checkpoints import pickles
from accel_scale.training.checkpoints.atomic import checkpoint_problems
from accel_scale.training.checkpoints.contents import host_copy
from accel_scale.training.checkpoints.manifest import Damaged, read_manifest
from accel_scale.training.checkpoints.pickles import load_safely, refuse_unsafe_folder
from accel_scale.training.checkpoints.random_states import derive_random_states, put_random_states, take_random_states


class Tied(nn.Module):
    """A model with a tied embedding, dropout and a buffer."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, size)
        self.middle = nn.Linear(size, size)
        self.head = nn.Linear(size, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids):
        self.seen += 1
        hidden = nn.functional.dropout(self.middle(self.embedding(ids)), 0.2, self.training)
        return nn.functional.cross_entropy(self.head(hidden), ids.roll(1))


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self):
        return {"value": self.value, "history": [0.1, None, float("inf")]}

    def load_state_dict(self, state):
        self.value = state["value"]


class Run:
    """A model being trained, with its checkpoint manager."""

    def __init__(self, folder, *, size: int = 16, seed: int = 0, **settings) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.accelerator = Accelerator(cpu=True)
        model = Tied(size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.manager = CheckpointManager(self.accelerator, folder, **settings)
        self.counter = Counter()
        self.manager.register("counter", self.counter)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            ids = torch.randint(0, 32, (8,)) + random.randint(0, 0)
            loss = self.model(ids)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counter.value += 1
            losses += [loss.item(), random.random(), np.random.rand()]
        return losses


@pytest.fixture
def start(tmp_path):
    """Makes runs in one folder; restores signal handlers and Accelerate's state afterwards."""
    runs = []

    def make(folder=tmp_path / "run", **settings) -> Run:
        runs.append(Run(folder, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.manager._signals.restore()
    AcceleratorState._reset_state(reset_partial_state=True)


def saved(start, steps=(3, 6), **settings) -> tuple[Run, list[float]]:
    """A run with checkpoints at `steps`, and the numbers of the three steps after the last one."""
    run, done = start(**settings), 0
    for step in steps:
        run.steps(step - done)
        done = step
        run.manager.save(step, {"rows": 8 * step})
    return run, run.steps(3)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_going_on_is_bitwise_the_uninterrupted_run(start, asynchronous):
    run, expected = saved(start, asynchronous=asynchronous)
    run.manager.finish()
    again = start(seed=7)
    resumed = again.manager.resume("auto")
    assert (resumed.step, resumed.state, resumed.folder.name) == (6, {"rows": 48}, "checkpoint-6")
    assert again.counter.value == 6
    assert again.steps(3) == expected
    assert again.scheduler.get_last_lr() == run.scheduler.get_last_lr()
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name
    assert again.model.head.weight is again.model.embedding.weight


def test_asynchronous_writes_the_same_bytes(start, tmp_path):
    saved(start, folder=tmp_path / "a")
    run, _ = saved(start, folder=tmp_path / "b", asynchronous=True)
    run.manager.finish()
    for path in sorted((tmp_path / "a" / "checkpoint-6").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / "checkpoint-6" / path.name).read_bytes(), path.name


def test_no_and_nothing_there(start, tmp_path):
    assert start().manager.resume("auto") is None
    saved(start)
    assert start().manager.resume("no") is None
    with pytest.raises(ConfigError, match=r"manifest.json is missing"):
        start().manager.resume(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"holds checkpoints and is none.*name one, e.g. .*checkpoint-6"):
        start().manager.resume(tmp_path / "run")


def truncate(folder: Path) -> str:
    os.truncate(folder / "optimizer.bin", 100)
    return "optimizer.bin has 100 bytes instead of"


def flip(folder: Path) -> str:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    return "model.safetensors was changed"


def remove(folder: Path) -> str:
    (folder / "random_states_0.pt").unlink()
    return "random_states_0.pt is missing"


def flip_manifest(folder: Path) -> str:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 6', '"step": 7'))
    return "manifest.json was changed"


def cut_manifest(folder: Path) -> str:
    os.truncate(folder / "manifest.json", 40)
    return "manifest.json cannot be read"


def remove_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "manifest.json is missing"


def flip_state(folder: Path) -> str:
    (folder / "state.json").write_text((folder / "state.json").read_text().replace("48", "49"))
    return "state.json was changed"


DAMAGE = [truncate, flip, remove, flip_manifest, cut_manifest, remove_manifest, flip_state]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda function: function.__name__)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(start, tmp_path, capsys, damage):
    saved(start)
    expected = damage(tmp_path / "run" / "checkpoint-6")
    with pytest.raises(ConfigError, match=expected):
        start().manager.resume(tmp_path / "run" / "checkpoint-6")
    resumed = start().manager.resume("auto")
    assert resumed.step == 3
    line = next(line for line in capsys.readouterr().out.splitlines() if "damaged" in line)
    assert line.startswith(f"warning: checkpoint-6 is damaged ({expected}")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoint-3", "checkpoint-6.damaged"]


@pytest.mark.slow
def test_every_single_flipped_byte_is_found(start, tmp_path):
    """In the small files only; large files use the same checksum."""
    saved(start, steps=(1,))
    folder = tmp_path / "run" / "checkpoint-1"
    run = start()
    for name in ("scheduler.bin", "state.json", "manifest.json"):
        original = (folder / name).read_bytes()
        for position in range(0, len(original), 7):
            content = bytearray(original)
            content[position] ^= 0x10
            (folder / name).write_bytes(content)
            with pytest.raises(ConfigError, match=r"not a good checkpoint|is damaged"):
                run.manager.resume(folder)
        (folder / name).write_bytes(original)
    assert run.manager.resume(folder).step == 1


def test_nothing_good_left(start, tmp_path, capsys):
    saved(start)
    flip(tmp_path / "run" / "checkpoint-6")
    truncate(tmp_path / "run" / "checkpoint-3")
    assert start().manager.resume("auto") is None
    assert "no good checkpoint is left" in capsys.readouterr().out


def names(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.iterdir()), key=lambda name: int(name.split("-")[1].split(".")[0]))


def test_what_is_kept(start, tmp_path):
    saved(start, steps=range(1, 9), keep_last=2, keep_every=3)
    assert names(tmp_path / "run") == ["checkpoint-3", "checkpoint-6", "checkpoint-7", "checkpoint-8"]


def test_killed_while_an_old_one_is_deleted(start, tmp_path, capsys):
    saved(start, steps=(1, 2))
    (tmp_path / "run" / ".partial").mkdir()
    os.rename(tmp_path / "run" / "checkpoint-1", tmp_path / "run" / ".partial" / "deleted-checkpoint-1")
    assert start().manager.resume("auto").step == 2
    assert names(tmp_path / "run") == ["checkpoint-2"]
    assert "damaged" not in capsys.readouterr().out


@pytest.mark.parametrize("begin", ["auto", "no", "save"])
def test_what_a_killed_run_left_is_put_right_before_anything_else(start, tmp_path, capsys, begin):
    """The newest checkpoint was being replaced, and another one was being written."""
    saved(start, steps=(1, 2))
    folder = tmp_path / "run"
    (folder / ".partial" / "checkpoint-3").mkdir(parents=True)
    os.rename(folder / "checkpoint-2", folder / ".partial" / "replaced-checkpoint-2")
    manager = start(keep_last=3).manager
    if begin == "save":
        manager.save(4)
    else:
        found = manager.resume(begin)
        assert (found and found.step) == (2 if begin == "auto" else None)
    assert names(folder) == ["checkpoint-1", "checkpoint-2", *(["checkpoint-4"] if begin == "save" else [])]
    said = capsys.readouterr().out
    for line in ("put back checkpoint-2", "removed unfinished checkpoint-3"):
        assert said.count(line) == 1


def test_damaged_ones_are_not_counted(start, tmp_path):
    run, _ = saved(start, steps=(1, 2, 3), keep_last=2)
    truncate(tmp_path / "run" / "checkpoint-3")
    run.manager.save(4)
    assert names(tmp_path / "run") == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
    run.manager.save(5)
    assert names(tmp_path / "run") == ["checkpoint-3", "checkpoint-4", "checkpoint-5"]


def test_going_back_makes_the_new_branch_the_newest(start, tmp_path):
    saved(start, steps=(2, 4, 6), keep_last=3)
    run = start(keep_last=2)
    assert run.manager.resume(tmp_path / "run" / "checkpoint-2").step == 2
    run.manager.save(3)
    assert start().manager.resume("auto").step == 3
    assert names(tmp_path / "run") == ["checkpoint-3", "checkpoint-6"]


def test_saving_a_step_again_replaces_it(start, tmp_path):
    run, _ = saved(start, steps=(3,))
    run.manager.save(3, {"rows": "again"})
    assert start().manager.resume("auto").state == {"rows": "again"}
    assert names(tmp_path / "run") == ["checkpoint-3"]


@pytest.fixture
def small_disk(tmp_path):
    """A real filesystem of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=8m") != 0:
        pytest.skip("only root mounts a small filesystem")
    yield folder
    libc.umount2(str(folder).encode(), 2)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("part", [0.0, 0.2, 0.6, 0.99])
def test_a_full_disk_costs_the_new_checkpoint_only(start, small_disk, capsys, part, asynchronous):
    """Room for `part` of a checkpoint: nothing, some weights, some of the optimizer, or all but the manifest."""
    run = start(folder=small_disk / "run", size=512, asynchronous=asynchronous)
    run.steps(2)
    before = shutil.disk_usage(small_disk).free
    run.manager.save(2)
    run.manager.finish()
    needed = before - shutil.disk_usage(small_disk).free
    expected = {path.name: path.read_bytes() for path in (small_disk / "run" / "checkpoint-2").iterdir()}
    free = shutil.disk_usage(small_disk).free
    (small_disk / "filler").write_bytes(bytes(free - int(part * needed)))
    run.steps(2)
    run.manager.save(4)
    run.steps(1)  # training goes on
    with pytest.raises(CheckpointNotSaved, match=r"checkpoint-5 was not saved: the disk is full"):
        run.manager.save(5, final=True)
    out = capsys.readouterr().out
    assert "warning: checkpoint-4 was not saved: " in out
    assert "Older checkpoints are untouched" in out
    assert [path.name for path in (small_disk / "run").iterdir()] == ["checkpoint-2"]
    assert {p.name: p.read_bytes() for p in (small_disk / "run" / "checkpoint-2").iterdir()} == expected
    (small_disk / "filler").unlink()
    assert run.manager.save(6, final=True).name == "checkpoint-6"
    assert start(folder=small_disk / "run", size=512).manager.resume("auto").step == 6


def test_finish_reports_a_last_checkpoint_that_was_not_written(start, small_disk):
    run = start(folder=small_disk / "run", size=512, asynchronous=True)
    run.steps(1)
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 100_000))
    run.manager.save(1)
    with pytest.raises(CheckpointNotSaved, match="checkpoint-1 was not saved: the disk is full"):
        run.manager.finish()


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"a": torch.ones(1)}, r"state\['a'\] is a Tensor"),
        ({"a": [{1: 2}]}, r"state\['a'\]\[0\] has the key 1"),
        ({"a": {"b": {3}}}, r"state\['a'\]\['b'\] is a set"),
    ],
)
def test_state_must_be_json(start, tmp_path, state, problem):
    with pytest.raises(ConfigError, match=problem):
        start().manager.save(1, state)
    assert not (tmp_path / "run").exists()


def test_what_is_registered_must_agree(start):
    saved(start)
    run = start()
    run.manager.register("other", Counter())
    with pytest.raises(ConfigError, match="differ in what is registered: other"):
        run.manager.resume("auto")
    with pytest.raises(ConfigError, match="'other' is registered already"):
        run.manager.register("other", Counter())
    with pytest.raises(ConfigError, match="int has no state_dict"):
        run.manager.register("number", 1)


def test_another_model_is_refused(start):
    saved(start)
    with pytest.raises(
        ConfigError, match=r"checkpoint-6 does not fit this model \(size mismatch for embedding.weight"
    ):
        start(size=8).manager.resume("auto")


def test_what_accelerate_would_pickle_is_refused(start):
    run = start()
    run.accelerator.register_for_checkpointing(run.counter)
    with pytest.raises(ConfigError, match=r"CheckpointManager.register"):
        run.manager.save(1)
    run = start()
    run.accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    with pytest.raises(ConfigError, match=r"hooks of save_state and load_state are not called"):
        run.manager.save(1)


def test_the_loss_scale_of_fp16(start):
    run = start()
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    loss = run.model(torch.arange(8))
    run.accelerator.scaler.scale(loss).backward()
    for _ in range(3):
        run.optimizer.optimizer.zero_grad()
        run.accelerator.scaler.scale(run.model(torch.arange(8))).backward()
        run.accelerator.scaler.step(run.optimizer.optimizer)
        run.accelerator.scaler.update()
    run.manager.save(1)
    again = start()
    again.accelerator.scaler = torch.amp.GradScaler("cpu")
    again.manager.resume("auto")
    assert again.accelerator.scaler.state_dict() == run.accelerator.scaler.state_dict()
    assert again.accelerator.scaler.get_scale() == 16.0
    assert again.accelerator.scaler.state_dict()["_growth_tracker"] == 1


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch '{self.mark}'",)


def test_pickled_code_is_not_run(start, tmp_path, monkeypatch):
    saved(start)
    path, mark = tmp_path / "run" / "checkpoint-6" / "optimizer.bin", tmp_path / "was-here"
    torch.save({"state": Evil(mark)}, path)
    with pytest.raises(ConfigError, match=r"optimizer\.bin holds posix\.system"):
        load_safely(path)
    with pytest.raises(ConfigError, match=r"optimizer\.bin holds posix\.system"):
        refuse_unsafe_folder(path.parent)
    path.unlink()
    (path.parent / "folder.pt").mkdir()
    refuse_unsafe_folder(path.parent)  # a folder is not a pickle itself
    torch.save({"state": Evil(mark)}, path)
    with monkeypatch.context() as patch:  # torch's own guard backs up the project's
        patch.setattr(pickles, "refuse_unsafe", lambda *unused, **more: None)
        with pytest.raises(pickle.UnpicklingError):
            load_safely(path)
    metadata = tmp_path / "other" / "shards" / ".metadata"
    metadata.parent.mkdir(parents=True)
    metadata.write_bytes(pickle.dumps(Evil(mark)))
    # Calling a class can run code, too, and so can anything that a module has imported.
    for place, name in (("subprocess", "Popen"), ("torch.distributed.checkpoint.metadata", "os.system")):
        opcodes = pickle.dumps([0], protocol=2)[:2] + f"c{place}\n{name}\n.".encode()
        metadata.write_bytes(opcodes)
        with pytest.raises(ConfigError, match=r"shards/.metadata holds "):
            refuse_unsafe_folder(tmp_path / "other")
    metadata.write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(ConfigError, match=r"shards/.metadata holds posix.system"):
        refuse_unsafe_folder(tmp_path / "other")
    assert not mark.exists()


def test_other_settings_are_refused_unless_they_are_allowed_or_not_compared(start):
    saved(start, settings={"lr": 1})
    with pytest.raises(ConfigError, match="lr"):
        start(settings={"lr": 2}).manager.resume("auto")
    assert start(settings={"lr": 2}).manager.resume("auto", compare=False).step == 6
    assert start(settings={"lr": 2}, allow_changed_settings=True).manager.resume("auto").step == 6
    assert start(settings={"lr": 1}).manager.resume("auto").step == 6


def test_counts(start):
    with pytest.raises(ConfigError, match="keep_last is 0"):
        start(keep_last=0)
    with pytest.raises(ConfigError, match="keep_every is -1"):
        start(keep_every=-1)


def test_random_states_go_round_and_new_ranks_get_their_own():
    before = take_random_states(torch.device("cpu"))
    drawn = [random.random(), np.random.randn(), torch.rand(()).item()]
    np.random.randn()
    put_random_states(before, torch.device("cpu"))
    assert [random.random(), np.random.randn(), torch.rand(()).item()] == drawn
    seeds = {derive_random_states(1, step, rank) for step in (3, 4) for rank in (2, 3)}
    assert len(seeds) == 4
    derive_random_states(1, 3, 2)
    first = torch.rand(3)
    derive_random_states(1, 3, 2)
    assert torch.equal(torch.rand(3), first)
    put_random_states(before, torch.device("cpu"))


def test_host_copies():
    tensor = torch.arange(6.0)
    value = {"a": tensor, "b": [tensor, tensor[2:4]], "c": (1, "x")}
    kept, copied = host_copy(value, copy=False), host_copy(value, copy=True)
    assert kept["a"].data_ptr() == tensor.data_ptr()
    assert copied["a"] is copied["b"][0]
    assert copied["a"].data_ptr() != tensor.data_ptr()
    assert kept["b"][1].untyped_storage().nbytes() == 8  # a view does not carry its whole storage
    tensor.zero_()
    assert copied["b"][1].tolist() == [2.0, 3.0]


def test_the_manifest_says_what_it_is(start, tmp_path):
    saved(start)
    folder = tmp_path / "run" / "checkpoint-6"
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.world_size, manifest.strategy) == (6, 1, "single")
    assert set(manifest.files) == {p.name for p in folder.iterdir()} - {"manifest.json"}
    assert manifest.versions["torch"] == torch.__version__
    assert checkpoint_problems(folder) == []
    with pytest.raises(Damaged, match=r"manifest\.json is missing"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_remembered(start, number):
    before = signal.getsignal(number)
    run = start()
    assert not run.manager.should_stop()
    os.kill(os.getpid(), number)
    assert run.manager.should_stop()
    run.manager.save(1)
    assert read_manifest(run.manager._output_dir / "checkpoint-1").stopped_by == number.name
    run.manager.close()
    assert signal.getsignal(number) is before


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells a process of its parent's death")
def test_a_parents_death_is_asked_for_only_while_a_run_lasts(start, monkeypatch):
    def asked() -> int:
        number = ctypes.c_int(-1)
        assert ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0) == 0  # PR_GET_PDEATHSIG
        return number.value

    monkeypatch.setattr("accel_scale.training.checkpoints.signals.is_launcher", lambda pid: True)
    before = asked()
    run = start()
    run.manager.should_stop()
    assert (before, asked()) == (0, signal.SIGTERM)
    run.manager.close()
    assert asked() == 0


KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, {here!r})
from test_checkpoints import Run
run = Run({folder!r}, size=2048, asynchronous={asynchronous})
run.steps(1)
run.manager.save(1)
run.manager.finish()
def kill():
    while not Path({folder!r}, ".partial", "checkpoint-2", {file!r}).exists():
        pass
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=kill, daemon=True).start()
run.steps(1)
run.manager.save(2)
run.manager.finish()
"""


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.bin"])
def test_killed_in_the_middle_of_writing(start, tmp_path, asynchronous, file):
    folder = tmp_path / "run"
    script = KILLED.format(here=str(Path(__file__).parent), folder=str(folder), asynchronous=asynchronous, file=file)
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert (folder / ".partial" / "checkpoint-2").is_dir()
    assert not (folder / "checkpoint-2").exists()
    run = start(size=2048)
    assert run.manager.resume("auto").step == 1
    assert [path.name for path in folder.iterdir()] == ["checkpoint-1"]


STOPPED = """
import sys, time
sys.path.insert(0, {here!r})
from test_checkpoints import EXIT_STOPPED, Run
run = Run({folder!r})
for step in range(1, 2000):
    run.steps(1)
    print("step", step, flush=True)
    time.sleep(0.05)
    if run.manager.should_stop():
        run.manager.save(step, final=True)
        run.manager.finish()
        sys.exit(EXIT_STOPPED)
"""


@pytest.mark.slow
def test_the_death_of_a_launcher_that_does_not_forward_signals_stops_the_run(tmp_path):
    """`accelerate launch` of one process dies of SIGTERM and leaves its child running."""
    script = tmp_path / "script.py"
    script.write_text(STOPPED.format(here=str(Path(__file__).parent), folder=str(tmp_path / "run")))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", str(script)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if line.startswith("step"):
            break
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == -signal.SIGTERM
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list((tmp_path / "run").glob("checkpoint-*")):
        time.sleep(0.1)
    launcher.stdout.read()  # until the process has ended as well
    (folder,) = (tmp_path / "run").glob("checkpoint-*")
    assert json.loads((folder / "manifest.json").read_text())["stopped_by"] == "SIGTERM"


def test_launchers_are_told_apart(tmp_path):
    """Only a launcher's death counts as a signal: a shell that starts a run in the background may simply exit."""
    code = "import sys, time; print(0, flush=True); time.sleep(60)"
    commands = {
        "torchrun": [sys.executable, str(tmp_path / "torchrun")],
        "-m": [sys.executable, str(tmp_path / "site-packages" / "accelerate" / "commands" / "launch.py")],
        "shell": [sys.executable, str(tmp_path / "accelerate" / "run.py")],
    }
    found = {}
    for name, command in commands.items():
        Path(command[1]).parent.mkdir(parents=True, exist_ok=True)
        Path(command[1]).write_text(code)
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            found[name] = is_launcher(process.pid)
            process.kill()
    assert found == {"torchrun": True, "-m": True, "shell": False}


@pytest.mark.slow
def test_exit_status_of_a_stopped_process(tmp_path):
    script = STOPPED.format(here=str(Path(__file__).parent), folder=str(tmp_path / "run"))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    process.stdout.read()
    assert process.wait(30) == EXIT_STOPPED
    assert list((tmp_path / "run").glob("checkpoint-*"))
