"""Checkpoints line by line: folders that are replaced, ranks that are new, and disks and nodes that misbehave."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import on_ranks
from safetensors.torch import save_file
from test_checkpoint_choices import checkpoint_folder, save, steps
from test_checkpoint_details import Disk

from accel_scale.errors import ConfigError
from accel_scale.training.checkpoints import writing
from accel_scale.training.checkpoints.atomic import checkpoint_problems, publish, publish_into, recover, staging_root
from accel_scale.training.checkpoints.contents import load_random_states, load_scaler, write_tensors
from accel_scale.training.checkpoints.folders import choose, delete_old, open_checkpoint
from accel_scale.training.checkpoints.manifest import Manifest, changed_files, library_versions, read_manifest
from accel_scale.training.checkpoints.random_states import derive_random_states, take_random_states
from accel_scale.training.checkpoints.ranks import FailedSomewhere, Meeting
from accel_scale.training.checkpoints.staging import save_atomically
from accel_scale.training.checkpoints.writing import Job


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    return Disk(monkeypatch)


@pytest.fixture
def five(tmp_path: Path) -> Path:
    """Checkpoints of steps 2, 4, 6, 8, 10, saved in this order."""
    for index, step in enumerate((2, 4, 6, 8, 10)):
        save(checkpoint_folder(tmp_path, step), step, index + 1)
    return tmp_path


def test_a_folder_in_a_published_model_replaces_the_one_that_was_there(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for folder, name in ((target, "old"), (staging_root(target) / "out", "new")):
        (folder / "assets").mkdir(parents=True)
        (folder / "assets" / name).touch()
        (folder / "config.json").write_text(name)
    for name in ("model-00007-of-00009.safetensors", "pytorch_model.bin", "adapter_model.safetensors",
                 "model.safetensors.index.json", "notes.txt", "models.csv"):  # fmt: skip
        (target / name).touch()
    (target / "model_weights.bin").mkdir()
    publish_into(staging_root(target) / "out", target)
    assert sorted(path.name for path in target.iterdir()) == [
        "assets", "config.json", "model_weights.bin", "models.csv", "notes.txt",
    ]  # fmt: skip
    assert [path.name for path in (target / "assets").iterdir()] == ["new"]
    assert (target / "config.json").read_text() == "new"


def test_a_final_folder_cannot_be_loaded_on_the_disk_before_anything_in_it_changes(
    disk: Disk,
    tmp_path: Path,
) -> None:
    target = tmp_path / "out"
    staged = staging_root(target) / "out"
    staged.mkdir(parents=True)
    for folder in (target, staged):
        (folder / "config.json").touch()
        (folder / "model.safetensors").touch()
    publish_into(staged, target)
    assert target in disk.before(target / "model.safetensors"), "the old gate is gone on the disk, too"
    assert not staged.parent.exists()


def test_what_was_replaced_is_removed_and_what_is_staged_beside_it_stays(tmp_path: Path) -> None:
    for name in ("checkpoint-1", ".partial/checkpoint-1", ".partial/checkpoint-2"):
        (tmp_path / name).mkdir(parents=True)
    publish(tmp_path / ".partial" / "checkpoint-1", tmp_path / "checkpoint-1")
    assert [path.name for path in (tmp_path / ".partial").iterdir()] == ["checkpoint-2"]
    (tmp_path / ".partial" / "replaced-checkpoint-1").mkdir()  # the new folder is already in place
    (tmp_path / ".partial" / "file").touch()
    assert recover(tmp_path) == [
        "removed unfinished checkpoint-2", "removed unfinished file", "removed unfinished replaced-checkpoint-1"
    ]  # fmt: skip
    assert not (tmp_path / ".partial").exists()
    assert recover(tmp_path / "nowhere") == []


def test_folders_of_deepspeed_of_shards_and_of_nothing_have_a_structure_too(tmp_path: Path) -> None:
    empty = b"{}"
    (tmp_path / "model.safetensors").write_bytes(len(empty).to_bytes(8, "little") + empty)
    assert checkpoint_problems(tmp_path) == []
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])  # cuts into the last bytes of the header
    assert checkpoint_problems(tmp_path) == ["model.safetensors is cut off"]
    (tmp_path / "model.safetensors").write_bytes(whole)
    (tmp_path / "latest").write_text("global_step4\n")
    assert checkpoint_problems(tmp_path) == ["the DeepSpeed folder named in `latest` is missing"]
    (tmp_path / "global_step4").mkdir()
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    (tmp_path / "pytorch_model_fsdp_1").touch()  # a file, not a folder
    assert checkpoint_problems(tmp_path) == ["pytorch_model_fsdp_0/.metadata is missing"]
    (tmp_path / "pytorch_model_fsdp_0" / ".metadata").touch()
    assert checkpoint_problems(tmp_path) == []
    trainers = tmp_path / "checkpoint-12"
    trainers.mkdir()
    assert checkpoint_problems(trainers) == ["trainer_state.json is missing"]
    (trainers / "trainer_state.json").write_text("{}")
    for suffix in (".pt", ".pth", ".bin"):
        (trainers / f"a{suffix}").write_bytes(b"cut")
    assert checkpoint_problems(trainers) == ["a.bin is cut off", "a.pt is cut off", "a.pth is cut off"]
    save_file({"a": torch.ones(2)}, tmp_path / "inner.safetensors", metadata={"b": "c"})
    index = {"weight_map": {"a": "inner.safetensors", "b": "y.safetensors", "c": "x.safetensors"}}
    (tmp_path / "m.index.json").write_text(json.dumps(index))
    assert "m.index.json names x.safetensors, which is missing" in checkpoint_problems(tmp_path)
    (tmp_path / "m.index.json").write_text("{}")
    assert not [problem for problem in checkpoint_problems(tmp_path) if "index" in problem]


def test_states_that_only_an_unrestricted_unpickler_reads_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.bin holds .*SimpleNamespace"):
        write_tensors({"state": SimpleNamespace()}, tmp_path / "optimizer.bin")


def test_a_rank_that_the_checkpoint_does_not_know_gets_numbers_of_its_own(tmp_path: Path) -> None:
    manifest: Any = SimpleNamespace(seed=11, step=5, world_size=2)

    def drawn(rank: int) -> float:
        torch.manual_seed(4)
        load_random_states(SimpleNamespace(process_index=rank, device=torch.device("cpu")), tmp_path, manifest)
        return torch.rand(()).item()

    torch.manual_seed(3)
    torch.save(take_random_states(torch.device("cpu")), tmp_path / "random_states_1.pt")
    expected = torch.rand(()).item()
    assert drawn(1) == expected
    derive_random_states(11, 5, 2)
    expected = torch.rand(()).item()
    assert drawn(2) == expected != drawn(3)


def test_the_scaler_of_fsdp2_has_its_scale_before_its_first_step() -> None:
    state = torch.amp.GradScaler("cpu", init_scale=32.0).state_dict()
    for is_fsdp2 in (True, False):
        accelerator: Any = SimpleNamespace(scaler=torch.amp.GradScaler("cpu"), is_fsdp2=is_fsdp2)
        load_scaler(accelerator, {"scaler": state})
        assert accelerator.scaler.get_scale() == 32.0
        assert (accelerator.scaler._scale is not None) == is_fsdp2
        load_scaler(accelerator, {"scaler": None})
        assert accelerator.scaler.get_scale() == 32.0
        load_scaler(SimpleNamespace(scaler=None), {"scaler": state})


def test_only_damaged_ones_are_said_to_be_no_start(five: Path) -> None:
    said: list[str] = []
    for step in (2, 4, 6, 8, 10):
        (checkpoint_folder(five, step) / "manifest.json").unlink()
    assert choose(five, Meeting(), said.append) is None
    assert len(said) == 6
    assert said[-1] == f"warning: no good checkpoint is left in {five}: training starts from the beginning."
    with pytest.raises(ConfigError, match=r"is not a good checkpoint: manifest\.json is missing") as refused:
        open_checkpoint(five / "checkpoint-2.damaged", Meeting(), place="--resume")
    assert refused.value.place == "--resume"


def test_old_ones_are_deleted_while_something_else_is_staged(five: Path) -> None:
    (staging_root(five) / "checkpoint-12").mkdir(parents=True)
    delete_old(five, keep_last=1)
    assert steps(five) == [10]
    assert [path.name for path in staging_root(five).iterdir()] == ["checkpoint-12"]


def test_a_flipped_byte_of_a_named_checkpoint_is_refused(five: Path) -> None:
    assert open_checkpoint(five / "checkpoint-4", Meeting()).manifest.step == 4
    (five / "checkpoint-4" / "weights").write_text("weights OF 4")
    with pytest.raises(ConfigError, match=r"checkpoint-4 is damaged: weights was changed") as refused:
        open_checkpoint(five / "checkpoint-4", Meeting())
    assert refused.value.place == "resume"


def test_verifying_writes_nothing_to_the_disk(five: Path, disk: Disk) -> None:
    manifest = read_manifest(five / "checkpoint-4")
    assert changed_files(five / "checkpoint-4", manifest, manifest.files) == []
    assert disk.events == []


def test_a_library_that_is_not_there_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = importlib.metadata.version

    def version(name: str) -> str:
        if name == "accelerate":
            raise importlib.metadata.PackageNotFoundError(name)
        return usual(name)

    everything = library_versions()
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert library_versions() == {name: text for name, text in everything.items() if name != "accelerate"}


# ── A job ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def job(folder: Path, *writes: Any, **more: Any) -> Job:
    manifest = Manifest.of_run(3, world_size=1, strategy="single", layout="whole", stopped_by=None, settings={})
    usual = {"manifest": manifest, "meeting": Meeting(), "clean_up": lambda: None}
    return Job(output_dir=folder, writes=writes, **{**usual, **more})


def write(name: str, text: str = "x") -> Any:
    return lambda folder: (folder / name).write_text(text)


def test_a_job_writes_in_order_checks_numbers_publishes_and_cleans_up(tmp_path: Path) -> None:
    done: list[str] = []
    save(checkpoint_folder(tmp_path, 2), 2, sequence=7)

    def check(staged: Path) -> None:
        assert sorted(path.name for path in staged.iterdir()) == ["a", "b"], "nothing of an earlier attempt"
        done.append("checked")

    (staging_root(tmp_path) / "checkpoint-3" / "left").mkdir(parents=True)
    made = job(tmp_path, write("b"), write("a", "yy"), check=check, clean_up=lambda: done.append("cleaned"))
    assert made.run() is None
    assert done == ["checked", "cleaned"]
    manifest = read_manifest(tmp_path / "checkpoint-3")
    assert (manifest.sequence, list(manifest.files)) == (8, ["a", "b"])
    assert [size for size, _ in manifest.files.values()] == [2, 1]
    assert not staging_root(tmp_path).exists()

    def cannot() -> None:
        raise OSError("busy")

    assert job(tmp_path, write("a"), clean_up=cannot).run() is None, "what is old can wait"


def test_a_job_that_fails_leaves_nothing_and_says_when_the_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("the writer's own words")

    for free, said in (
        (2**20 + 1, "the writer's own words"),
        (2**20 - 1, "the disk is full (the writer's own words)"),
    ):
        monkeypatch.setattr(writing.shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        assert job(tmp_path, fails).run() == said
        assert list(tmp_path.iterdir()) == []

    def gone(folder: Path) -> Any:
        raise OSError("no such folder")

    monkeypatch.setattr(writing.shutil, "disk_usage", gone)
    assert str(job(tmp_path, fails).run()).startswith("the disk is full")

    def refuses(folder: Path) -> None:
        raise ConfigError("cannot be read back.", place="save", fix="leave it out.")

    (staging_root(tmp_path) / "other").mkdir(parents=True)
    for refused in (job(tmp_path, refuses), job(tmp_path, write("a"), check=refuses)):
        with pytest.raises(ConfigError, match="cannot be read back"):
            refused.run()
        assert [path.name for path in staging_root(tmp_path).iterdir()] == ["other"]
    writing._remove(tmp_path / "nowhere" / "checkpoint-1")
    monkeypatch.setattr(writing, "_make_empty", lambda staged: None)  # as on another node with a disk of its own
    with pytest.raises(ConfigError, match="is not one folder for all nodes") as error:
        job(tmp_path, write("a")).run()
    assert error.value.place == "CheckpointManager(output_dir=)"


def test_what_ranks_do_together_fails_as_it_failed() -> None:
    meeting = Meeting()
    assert (meeting.rank, meeting.world_size, meeting.is_distributed, meeting.group) == (0, 1, False, None)
    assert (meeting.gather(3), meeting.from_main(4), meeting.largest(5)) == ([3], 4, 5)
    assert meeting.together(lambda: 6) == [6]
    assert meeting.on_main(lambda: 7) == 7

    def other() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(FailedSomewhere, match=r"^\[Errno 28\] No space left on device$") as failed:
        meeting.together(other)
    assert isinstance(failed.value.__cause__, OSError)

    def refuse() -> None:
        raise ConfigError("this.", place="there", fix="that.")

    with pytest.raises(ConfigError) as refused:
        meeting.on_main(refuse)
    assert (refused.value.problem, refused.value.place, refused.value.fix) == ("this.", "there", "that.")


def test_the_names_of_a_run_are_its_own(tmp_path: Path) -> None:
    made = job(tmp_path, write("a"))
    assert made.folder == tmp_path / "checkpoint-3"
    assert made.manifest.seed == torch.initial_seed()


@pytest.mark.parametrize(("local_ranks", "published"), [(("0", "0"), [True, True]), (("0", "1"), [True, False])])
def test_the_first_process_of_each_node_publishes_on_its_own_disk(
    tmp_path: Path, local_ranks: tuple[str, str], published: list[bool]
) -> None:
    def rank() -> bool:
        index = dist.get_rank()
        os.environ["LOCAL_RANK"] = local_ranks[index]
        folder = tmp_path / f"node {index}" / "checkpoint-1"
        with save_atomically(folder) as staging:
            (staging / "file").write_text("x")
        return (folder / "file").is_file()

    assert on_ranks(2, rank, tmp_path) == published
