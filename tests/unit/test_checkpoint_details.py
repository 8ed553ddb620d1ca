"""What a checkpoint guarantees beyond its bytes: synced to disk before it appears, and unaffected by later steps."""

from __future__ import annotations

import os
import shutil
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch import nn

from accel_scale import CheckpointManager, ConfigError
from accel_scale.training.checkpoints import atomic
from accel_scale.training.checkpoints.atomic import publish, publish_into, recover, staging_root
from accel_scale.training.checkpoints.contents import host_copy, numbered
from accel_scale.training.checkpoints.manifest import (
    MANIFEST,
    Damaged,
    changed_files,
    describe_files,
    library_versions,
    read_manifest,
    write_manifest,
)
from accel_scale.training.checkpoints.random_states import derive_random_states, put_random_states, take_random_states
from accel_scale.training.checkpoints.ranks import Meeting
from accel_scale.training.checkpoints.writing import Writer


class Small:
    """A model, its optimizer and a manager, in one process."""

    def __init__(self, folder: Path, *, accumulation: int = 1, **settings: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.manager = CheckpointManager(self.accelerator, folder, **settings)

    def micro_batches(self, count: int) -> list[bool]:
        """For each micro-batch, whether it ended with a step."""
        stepped = []
        for _ in range(count):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(torch.ones(2, 8)).square().mean())
                self.optimizer.step()
                self.optimizer.zero_grad()
            stepped.append(self.accelerator.sync_gradients)
        return stepped


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Any]:
    made: list[Small] = []

    def make(name: str = "run", **settings: Any) -> Small:
        made.append(Small(tmp_path / name, **settings))
        return made[-1]

    yield make
    for one in made:
        one.manager._signals.restore()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_training_on_does_not_reach_what_is_still_being_written(small: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The writing thread is held until three more steps have changed weights and moments in place."""
    import safetensors.torch

    run, plain = small("late", asynchronous=True), small("plain")
    for one in (run, plain):
        one.micro_batches(2)
    plain.manager.save(2)
    may_write, save_file = threading.Event(), safetensors.torch.save_file

    def late(*args: Any, **kwargs: Any) -> None:
        assert may_write.wait(30)
        save_file(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(safetensors.torch, "save_file", late)
        run.manager.save(2)
        before = run.model.weight.detach().clone()
        run.micro_batches(3)
        assert not torch.equal(run.model.weight, before)
        may_write.set()
        run.manager.finish()
    for name in ("model.safetensors", "optimizer.bin"):
        written = (tmp_path / "late" / "checkpoint-2" / name).read_bytes()
        assert written == (tmp_path / "plain" / "checkpoint-2" / name).read_bytes(), name
    assert torch.equal(load_file(tmp_path / "late" / "checkpoint-2" / "model.safetensors")["weight"], before)


def test_a_run_that_goes_back_waits_for_what_is_being_written(small: Any, monkeypatch: Any) -> None:
    import time

    import safetensors.torch

    run, save_file = small(asynchronous=True), safetensors.torch.save_file
    run.micro_batches(1)
    with monkeypatch.context() as patched:
        patched.setattr(safetensors.torch, "save_file", lambda *a, **more: time.sleep(0.3) or save_file(*a, **more))
        run.manager.save(1)
        assert run.manager.resume("auto").step == 1


def test_accumulation_goes_on_in_the_middle(small: Any) -> None:
    """With two micro-batches per step, three leave one open: the next one must end a step, not begin a new one."""
    run = small(accumulation=2)
    assert run.micro_batches(3) == [False, True, False]
    run.manager.save(1)
    assert run.micro_batches(3) == [True, False, True]
    again = small(accumulation=2)
    assert again.manager.resume("auto").step == 1
    assert again.micro_batches(3) == [True, False, True]


# ── On the disk before it appears ────────────────────────────────────────────────────────────────────────────────────


class Disk:
    """Records the order of syncs and renames, by path."""

    def __init__(self, monkeypatch: Any) -> None:
        self.events: list[tuple[str, Path]] = []
        sync, rename, replace = os.fsync, os.rename, os.replace

        def fsync(descriptor: int) -> None:
            sync(descriptor)
            self.events.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

        def renamed(old: Any, new: Any) -> None:
            rename(old, new)
            self.events.append(("rename", Path(new)))

        def replaced(old: Any, new: Any) -> None:
            replace(old, new)
            self.events.append(("rename", Path(new)))

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", renamed)
        monkeypatch.setattr(os, "replace", replaced)

    def before(self, folder: Path) -> set[Path]:
        """Paths that were synced before `folder` got its name."""
        at = self.events.index(("rename", folder))
        return {path for kind, path in self.events[:at] if kind == "sync"}

    def after(self, folder: Path) -> set[Path]:
        at = len(self.events) - self.events[::-1].index(("rename", folder))
        return {path for kind, path in self.events[at:] if kind == "sync"}


@pytest.fixture
def disk(monkeypatch: Any) -> Disk:
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    return Disk(monkeypatch)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_byte_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    small: Any, disk: Disk, tmp_path: Path, asynchronous: bool
) -> None:
    """After a power cut every visible checkpoint is whole: files, their folder, then the rename, then its folder."""
    run = small(asynchronous=asynchronous)
    run.micro_batches(1)
    run.manager.save(1)
    run.manager.finish()
    folder = tmp_path / "run" / "checkpoint-1"
    staged = staging_root(tmp_path / "run") / "checkpoint-1"
    wanted = {staged, *(staged / path.relative_to(folder) for path in folder.rglob("*"))}
    assert len(wanted) >= 5
    assert wanted <= disk.before(folder)
    assert folder.parent in disk.after(folder)
    first = {path: index for index, (_, path) in reversed(list(enumerate(disk.events)))}
    files = {path for path in wanted if path != staged and path.name != MANIFEST}
    late = [path.name for path in files if first[path] > first[staged / MANIFEST]]
    assert not late, "the manifest vouches for files that are on the disk: other nodes sync their own before it"


def test_files_are_synced_where_that_is_asked_for(disk: Disk, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    describe_files(tmp_path, ["a", "b"], "blake2b", sync=False)
    assert disk.events == []
    describe_files(tmp_path, ["a", "b"], "blake2b", sync=True)
    assert {path.name for _, path in disk.events} == {"a", "b"}


def tree(root: Path) -> Path:
    """A staged folder with a subfolder."""
    staged = staging_root(root) / "model"
    (staged / "inner").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "inner/shard.bin"):
        (staged / name).write_text(name)
    return staged


def test_published_folders_are_on_the_disk_first(disk: Disk, tmp_path: Path) -> None:
    staged = tree(tmp_path)
    wanted = {staged, *staged.rglob("*")}
    publish(staged, tmp_path / "model")
    assert wanted <= disk.before(tmp_path / "model")
    assert tmp_path in disk.after(tmp_path / "model")
    assert not staging_root(tmp_path).exists()


def test_a_final_folder_is_on_the_disk_before_it_can_be_loaded(disk: Disk, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    staged = tree(target)
    wanted = {staged, *staged.rglob("*")}
    (target / "config.json").write_text("old")
    publish_into(staged, target)
    gate = target / "config.json"
    assert wanted | {target} <= disk.before(gate), "weights have their names on the disk before the gate has"
    assert target in disk.after(gate)
    assert gate.read_text() == "config.json"


def test_replacing_a_folder_keeps_one_of_the_two(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    staged, rename, calls = tree(tmp_path), os.rename, []

    def killed_at_the_second(old: Any, new: Any) -> None:
        calls.append(new)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(old, new)

    with monkeypatch.context() as patched:
        patched.setattr(atomic.os, "rename", killed_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            publish(staged, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    lines = recover(tmp_path)
    assert sorted(lines) == ["put back model, which was being replaced", "removed unfinished model"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["old"]
    assert not staging_root(tmp_path).exists()


# ── Manifests ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def saved(small: Any, tmp_path: Path) -> Path:
    run = small()
    run.micro_batches(1)
    run.manager.save(1)
    return tmp_path / "run" / "checkpoint-1"


def test_a_manifest_names_every_other_file_with_its_size(saved: Path) -> None:
    manifest = read_manifest(saved)
    files = {path.name: path.stat().st_size for path in saved.iterdir() if path.name != MANIFEST}
    assert {name: size for name, (size, _) in manifest.files.items()} == files
    assert (manifest.step, manifest.world_size, manifest.seed, manifest.format) == (1, 1, 0, 1)
    assert manifest.stopped_by is None
    assert {"torch", "accelerate", "transformers", "numpy", "accel-scale"} <= set(library_versions())
    assert manifest.versions == library_versions()
    assert changed_files(saved, manifest, manifest.files) == []


@pytest.mark.parametrize("algorithm", ["xxh3_128", "blake2b"])
def test_checksums_are_of_the_whole_file_whatever_its_size(tmp_path: Path, algorithm: str) -> None:
    import hashlib

    import xxhash

    content = os.urandom(8 * 2**20 + 5)  # more than one chunk
    (tmp_path / "large").write_bytes(content)
    (tmp_path / "empty").touch()
    found = describe_files(tmp_path, ["large", "empty"], algorithm, sync=False)
    make: Any = xxhash.xxh3_128 if algorithm == "xxh3_128" else lambda data: hashlib.blake2b(data, digest_size=16)
    assert found == {"large": (len(content), make(content).hexdigest()), "empty": (0, make(b"").hexdigest())}
    with pytest.raises(Damaged, match="unknown kind"):
        describe_files(tmp_path, ["empty"], "crc", sync=False)


def test_what_was_changed_after_it_was_written_is_named(saved: Path) -> None:
    manifest = read_manifest(saved)
    other = saved.parent / "other"
    shutil.copytree(saved, other)
    content = bytearray((other / "optimizer.bin").read_bytes())
    content[-1] ^= 1
    (other / "optimizer.bin").write_bytes(content)
    assert changed_files(other, manifest, manifest.files) == ["optimizer.bin was changed"]
    (other / "state.json").unlink()
    with pytest.raises(Damaged, match=r"state\.json is missing"):
        read_manifest(other)
    missing = f"{other / 'state.json'} cannot be read (No such file or directory)"
    assert changed_files(other, manifest, ["state.json"]) == [missing]


def test_a_manifest_of_another_format_is_refused(saved: Path) -> None:
    import dataclasses

    for number in (0, 2):
        write_manifest(saved, dataclasses.replace(read_manifest_as_one(saved), format=number))
        with pytest.raises(Damaged, match=f"its format is {number}, this version reads 1"):
            read_manifest(saved)


def read_manifest_as_one(folder: Path) -> Any:
    """The manifest as an object, whatever its format version."""
    import json

    from accel_scale.training.checkpoints.manifest import Manifest

    content = json.loads((folder / MANIFEST).read_text())
    content.pop("checksum")
    return Manifest(**content)


def test_manifests_that_were_written_before_are_read(tmp_path: Path) -> None:
    """The manifest's checksum is of sorted JSON, 16 bytes long; another one would refuse every existing checkpoint."""
    import json

    content = {
        "settings": {"seed": 7}, "format": 1, "files": {}, "algorithm": "blake2b", "versions": {"torch": "2.13.0"},
        "stopped_by": None, "seed": 7, "layout": "whole", "strategy": "single", "world_size": 1, "sequence": 2,
        "step": 3, "checksum": "a24f26889275d9179f14e1669dd8d042",
    }  # fmt: skip
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    assert read_manifest(tmp_path).settings == {"seed": 7}
    (tmp_path / MANIFEST).write_text(json.dumps({**content, "step": 4}))
    with pytest.raises(Damaged, match="was changed"):
        read_manifest(tmp_path)


def test_new_ranks_are_seeded_as_they_were_before() -> None:
    """A run resumed twice from one checkpoint, by two versions of the package, draws the same numbers."""
    import random

    import numpy as np

    cpu = torch.device("cpu")
    before = take_random_states(cpu)
    try:
        assert derive_random_states(1, 3, 2) == 4847164307455262873
        drawn = (random.random(), float(np.random.rand()), torch.rand(()).item())
        assert drawn == (0.2553333077858788, 0.22335513673425633, 0.17891478538513184)
    finally:
        put_random_states(before, cpu)


def test_random_states_of_an_accelerator_are_this_ranks(monkeypatch: Any) -> None:
    device, held = torch.device("cuda", 1), {"state": torch.tensor([1, 2])}
    module = type("Module", (), {
        "get_rng_state": staticmethod(lambda where: held["state"] if where == device else None),
        "set_rng_state": staticmethod(lambda state, where: held.update(state=state, where=where)),
    })  # fmt: skip
    monkeypatch.setattr(torch, "get_device_module", lambda where: module)
    taken = take_random_states(device)
    assert taken["cuda"].tolist() == [1, 2]
    held["state"] = torch.tensor([9, 9])
    put_random_states(taken, torch.device("cpu"))
    assert held["state"].tolist() == [9, 9]
    put_random_states(take_random_states(torch.device("cpu")), device)  # saved without its state, which is kept
    assert held["state"].tolist() == [9, 9]
    put_random_states(taken, device)
    assert (held["state"].tolist(), held["where"]) == ([1, 2], device)


def test_what_is_written_has_the_layout_that_was_asked_for_whatever_lay_in_memory() -> None:
    turned = torch.arange(6.0).view(2, 3).t()
    for copy in (True, False):
        pair = namedtuple("pair", "a b")(1, 2)
        assert host_copy({"pair": pair, "list": [pair]}, copy=copy) == {"pair": (1, 2), "list": [(1, 2)]}
        found = host_copy(turned, copy=copy)
        assert found.is_contiguous()
        assert torch.equal(found, turned)
    assert [numbered("optimizer.bin", index) for index in (0, 1, 12)] == [
        "optimizer.bin", "optimizer_1.bin", "optimizer_12.bin",
    ]  # fmt: skip


def test_registered_states_must_be_json(small: Any) -> None:
    run = small()
    bad = type("Bad", (), {"state_dict": lambda self: {"a": {1}}, "load_state_dict": lambda self, state: None})()
    run.manager.register("bad", bad)
    with pytest.raises(ConfigError, match=r"registered object 'bad'\['a'\] is a set"):
        run.manager.save(1)


def test_what_the_writing_thread_raises_is_raised_where_it_is_waited_for() -> None:
    def fails() -> None:
        raise ConfigError("pickled.", place="save", fix="leave it out.")

    writer = Writer(Meeting())
    for outcome in (None, "the disk is full"):
        writer.start(SimpleNamespace(run=lambda outcome=outcome: outcome))
        assert writer.wait() == outcome
        assert writer.job is None
    writer.start(SimpleNamespace(run=fails))
    with pytest.raises(ConfigError, match="pickled"):
        writer.wait()
    writer.start(SimpleNamespace(run=lambda: None))
    assert writer.wait() is None
