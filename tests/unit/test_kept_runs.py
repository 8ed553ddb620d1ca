"""A trainer's run is kept like a plain loop's: manifests, settings, signals, full disks, folders of other programs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_saving import make_trainer, rows, tiny_llama
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from accel_scale.ending.launcher import end_with_launcher
from accel_scale.ending.user_errors import CheckpointNotSaved
from accel_scale.errors import ConfigError
from accel_scale.facts.exit_statuses import EXIT_STOPPED
from accel_scale.flags.paths import resume_choice
from accel_scale.training.checkpoints.folders import latest_complete_checkpoint
from accel_scale.training.checkpoints.going_on import Course
from accel_scale.training.checkpoints.manifest import Manifest, describe_files, read_manifest, write_manifest
from accel_scale.training.checkpoints.settings import differences, files_fingerprint, model_record, rows_fingerprint
from accel_scale.training.checkpoints.signals import STOP_SIGNALS, StopSignals


class AtStep(TrainerCallback):
    """Calls a function once, at the beginning of a step."""

    def __init__(self, step, call):
        self.step, self.call = step, call

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            self.call()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Checkpoints 2 and 4 of a four-step run, and its final weights."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    trainer = make_trainer(folder)
    trainer.train()
    return folder, {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


@pytest.fixture
def run(finished, tmp_path):
    """A copy of that run's folder that a test may damage."""
    shutil.copytree(finished[0], tmp_path / "run")
    return tmp_path / "run"


def assert_ended_as(finished, trainer) -> None:
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, finished[1][name]), name


def rehash(folder: Path, manifest: Manifest) -> None:
    """Rewrites the manifest, as someone would who changed a checkpoint and wants to hide it."""
    names = [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json"]
    write_manifest(folder, replace(manifest, files=describe_files(folder, names, manifest.algorithm, sync=False)))


def test_every_file_of_a_trainers_checkpoint_is_in_its_manifest(finished):
    folder = finished[0] / "checkpoint-4"
    manifest = read_manifest(folder)
    assert set(manifest.files) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "random_states_0.pt"} <= set(manifest.files)
    assert (manifest.step, manifest.strategy, manifest.world_size) == (4, "single", 1)
    assert manifest.settings["learning_rate"] == 1e-2
    assert manifest.settings["model"]["hidden_size"] == 32


@pytest.mark.parametrize(
    ("name", "is_flipped"),
    [
        ("model.safetensors", True),
        ("model.safetensors", False),
        ("optimizer.pt", False),
        ("scheduler.pt", False),
        ("random_states_0.pt", False),
        ("trainer_state.json", False),
    ],
)
def test_damage_is_named_and_the_checkpoint_before_is_taken(finished, run, capsys, name, is_flipped):
    """One flipped bit or a missing file never leads silently to wrong weights or a fresh optimizer."""
    path = run / "checkpoint-4" / name
    if is_flipped:
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        problem = f"{name} was changed"
    else:
        path.unlink()
        problem = f"{name} is missing"
    with pytest.raises(ConfigError, match=problem):
        make_trainer(run).train(resume_from_checkpoint=str(run / "checkpoint-4"))
    trainer = make_trainer(run)
    trainer.train(resume_from_checkpoint="auto")
    out = capsys.readouterr().out
    assert f"checkpoint-4 is damaged ({problem}): left as checkpoint-4.damaged, not used." in out
    assert f"resumed from {run / 'checkpoint-2'} (step 2)" in out
    assert_ended_as(finished, trainer)


def test_changed_settings_are_named_one_by_one_and_refused_unless_allowed(run):
    (run / "checkpoint-4").rename(run / "later")
    with pytest.raises(ConfigError) as refused:
        make_trainer(run, learning_rate=5e-3, per_device_train_batch_size=1, max_steps=8).train("auto")
    text = refused.value.one_line()
    assert "learning_rate 0.01 → 0.005" in text
    assert "global_batch_size 2 → 1" in text
    assert "length 4 steps → 8 steps" in text
    assert "\n" not in text
    other = make_trainer(run)
    other.train_dataset = rows(15)
    with pytest.raises(ConfigError, match=r"data 16 rows \w+ → 15 rows"):
        other.train(resume_from_checkpoint="auto")
    with pytest.raises(ConfigError, match="hidden_size 32 → 64"):
        make_trainer(run, model=tiny_llama(hidden_size=64)).train("auto")
    # Micro-batches, logging and saving may change.
    make_trainer(run, per_device_train_batch_size=1, gradient_accumulation_steps=2, logging_steps=2).train("auto")
    shutil.rmtree(run / "checkpoint-4")
    allowed = make_trainer(run, learning_rate=5e-3)
    allowed.allow_changed_settings = True
    allowed.train("auto")
    assert allowed.state.global_step == 4


def test_a_finished_run_takes_no_step(finished, run):
    before = {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))}
    trainer = make_trainer(run)
    trainer.add_callback(AtStep(5, lambda: pytest.fail("a fifth step")))
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    assert_ended_as(finished, trainer)
    assert {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))} == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_and_ends_with_the_status_of_a_stopped_run(finished, tmp_path, capsys, number):
    before = signal.getsignal(number)
    trainer = make_trainer(tmp_path / "run", save_strategy="no")
    trainer.add_callback(AtStep(2, lambda: os.kill(os.getpid(), number)))
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == EXIT_STOPPED
    assert f"saved checkpoint-2 after {number.name}; train(resume_from_checkpoint=True)" in capsys.readouterr().out
    assert read_manifest(tmp_path / "run" / "checkpoint-2").stopped_by == number.name
    assert signal.getsignal(number) is before
    again = make_trainer(tmp_path / "run", save_strategy="no")
    again.train(resume_from_checkpoint="auto")
    assert_ended_as(finished, again)


def test_a_second_interrupt_ends_at_once():
    child = os.fork()
    if child == 0:
        signals = StopSignals()
        signals.install()
        os.kill(os.getpid(), signal.SIGINT)
        remembered = signals.received == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(0 if remembered else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGINT


def test_a_launcher_that_dies_while_the_run_starts_counts_as_a_signal(monkeypatch):
    parents = iter((4711, 1))  # before the run asks to be told of its parent's death, and after
    monkeypatch.setattr("accel_scale.training.checkpoints.signals.is_launcher", lambda pid: pid == 4711)
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    signals = StopSignals()
    signals.install()
    signals.restore()
    assert signals.received == signal.SIGTERM


def test_a_signal_to_the_whole_group_leaves_the_workers_that_load_data():
    """Launchers and schedulers signal the whole group; a run whose workers are killed ends before it has saved."""
    (ready, say_ready), (sent, say_sent) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            end_with_launcher()  # as recipes do at their start
            signals = StopSignals()
            signals.install()
            batches = iter(DataLoader(range(200), num_workers=2))
            next(batches)
            os.write(say_ready, b"x")
            os.read(sent, 1)
            time.sleep(0.1)
            status = int(len(list(batches)) != 199 or signals.received not in STOP_SIGNALS)
        finally:
            os._exit(status)
    os.read(ready, 1)
    for number in STOP_SIGNALS:
        os.killpg(child, number)
    os.write(say_sent, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_save_that_fails_is_one_line_and_the_last_one_is_an_error(tmp_path, monkeypatch, capsys):
    trainer = make_trainer(tmp_path / "run", save_steps=1)
    good = trainer._save_scaler

    def full(folder):
        good(folder)
        if trainer.state.global_step in (2, 4):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "_save_scaler", full)
    with pytest.raises(CheckpointNotSaved, match=r"checkpoint-4 was not saved: .*No space left"):
        trainer.train()
    assert capsys.readouterr().out.count("warning: checkpoint-2 was not saved: [Errno 28] No space left") == 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-1", "checkpoint-3"]
    assert latest_complete_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-3")


class _Planted:
    """An object whose hostile pickle creates a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_planted_pickle_is_not_read(run, tmp_path, is_listed):
    """Neither if the attacker rewrote the manifest, nor if not."""
    folder, proof = run / "checkpoint-4", tmp_path / "executed"
    manifest = read_manifest(folder)
    torch.save({"state": _Planted(proof)}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save(_Planted(proof), folder / "optimizer.pt")
    if is_listed:
        rehash(folder, manifest)
    with pytest.raises(ConfigError, match=r"which only an unrestricted unpickler reads|optimizer.pt has"):
        make_trainer(run).train(resume_from_checkpoint=str(folder))
    assert not proof.exists()
    with open(folder / "optimizer.pt", "wb") as file:
        pickle.dump(_Planted(proof), file)
    (folder / "manifest.json").unlink()  # as if another program had saved it
    with pytest.raises(ConfigError, match=r"optimizer.pt"):
        make_trainer(run).train(resume_from_checkpoint=str(folder))
    assert not proof.exists()


def test_a_folder_of_another_program_is_taken_only_where_it_is_named(finished, run, capsys):
    for step in (2, 4):
        (run / f"checkpoint-{step}" / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"checkpoint-4 has no manifest.json"):
        make_trainer(run).train(resume_from_checkpoint="auto")
    trainer = make_trainer(run)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert "which has no manifest: its content cannot be verified" in capsys.readouterr().out
    assert_ended_as(finished, trainer)
    shutil.rmtree(run / "checkpoint-4")
    (run / "checkpoint-2" / "scheduler.pt").unlink()
    with pytest.raises(ConfigError, match=r"checkpoint-2 is not a good checkpoint: has no scheduler.pt"):
        make_trainer(run).train(resume_from_checkpoint=str(run / "checkpoint-2"))


def test_names_of_earlier_versions_and_of_examples_are_found(run, tmp_path):
    (run / "checkpoint-4").rename(run / "checkpoint_4")
    assert latest_complete_checkpoint(run) == str(run / "checkpoint_4")
    examples = tmp_path / "examples"
    for age, name in enumerate(("epoch_1", "step_40", "step_9", "step_100.partial")):
        (examples / name).mkdir(parents=True)
        (examples / name / "scheduler.bin").write_bytes((run / "checkpoint_4" / "scheduler.pt").read_bytes())
        os.utime(examples / name, ns=(age, age))
    assert latest_complete_checkpoint(examples) == str(examples / "step_40")
    (examples / "step_40" / "scheduler.bin").write_bytes(b"cut")
    assert latest_complete_checkpoint(examples) == str(examples / "step_9")


def test_fingerprints(tmp_path):
    from datasets import Dataset

    data = Dataset.from_dict({"text": [str(number) for number in range(3000)]})
    same = Dataset.from_dict({"text": [str(number) for number in range(3000)]})
    assert rows_fingerprint(data) == rows_fingerprint(same)
    changed = [str(number) for number in range(3000)]
    changed[1717] = "x"
    assert rows_fingerprint(Dataset.from_dict({"text": changed})) != rows_fingerprint(data)
    assert rows_fingerprint(data.shuffle(seed=1)) != rows_fingerprint(data)
    assert rows_fingerprint(rows(4)) == rows_fingerprint(rows(4)) != rows_fingerprint(rows(5))
    (tmp_path / "a").write_text("1")
    before = files_fingerprint([tmp_path / "a"])
    (tmp_path / "a").write_text("2")
    assert files_fingerprint([tmp_path / "a"]) != before


def test_what_only_one_record_knows_is_not_a_difference():
    assert differences({"seed": 1, "gone": 2, "model": {"type": "llama"}}, {"seed": 1, "new": 3}) == []
    assert differences({"model": {"layers": 2}}, {"model": {"layers": 3}}) == ["model.layers 2 → 3"]
    assert model_record(tiny_llama().config, "hub/name")["weights"] == "hub/name"


def test_a_recipes_course(run, tmp_path):
    settings = {"seed": 1, "learning_rate": 1e-3}
    (run / "config.json").write_text("{}")
    course = Course(tmp_path / "new", "auto", settings, "4 steps", False, "--resume")
    assert course.look_ahead() is None
    for how, match in (("no", "holds checkpoints of an earlier run, the last of step 4"), (str(tmp_path), "missing")):
        with pytest.raises(ConfigError, match=match):
            replace(course, output_dir=run, how=how).look_ahead()
    here = replace(course, output_dir=run, settings={"learning_rate": 1e-3})
    with pytest.raises(ConfigError, match=r"learning_rate 0\.01 → 0\.001.*--allow_changed_settings"):
        here.look_ahead()
    assert replace(here, allow_changed_settings=True).look_ahead() is None
    (run / "run_summary.json").write_text(json.dumps({"steps": 4, "finished": here.record()}))
    assert here.look_ahead()["steps"] == 4
    for step in (2, 4):
        shutil.rmtree(run / f"checkpoint-{step}")
    with pytest.raises(ConfigError, match=r"learning_rate 0\.001 → 0\.002"):
        replace(here, settings={"learning_rate": 2e-3}).look_ahead()
    with pytest.raises(ConfigError, match="4 steps → 9 steps"):
        replace(here, goal="9 steps").look_ahead()
    with pytest.raises(ConfigError, match="holds the result of an earlier run"):
        replace(here, how="no").look_ahead()
    assert [resume_choice(word) for word in ("true", "False", "auto", "None", "a/b")] == [
        "auto", "no", "auto", "no", "a/b",
    ]  # fmt: skip
