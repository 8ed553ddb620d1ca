"""Which checkpoint is resumed, deleted or refused, by names, manifests and ranks, without a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from accel_scale.errors import ConfigError
from accel_scale.trainers import checkpoint_trainer as trainers
from accel_scale.training.checkpoints.atomic import staging_root
from accel_scale.training.checkpoints.folders import (
    changed_anywhere,
    checkpoint_folder,
    choose,
    delete_old,
    files_of_rank,
    latest_complete_checkpoint,
    list_checkpoints,
    list_foreign,
    read_checkpoint,
    resumed_line,
    run_of,
)
from accel_scale.training.checkpoints.manifest import Manifest, describe_files, read_manifest, write_manifest
from accel_scale.training.checkpoints.ranks import Meeting


def save(folder: Path, step: int, sequence: int, *, files: tuple[str, ...] = ("weights",), **more: Any) -> Path:
    """A small checkpoint with a manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in files:
        (folder / name).write_text(f"{name} of {step}")
    usual = {
        "step": step, "sequence": sequence, "world_size": 1, "strategy": "single", "layout": "whole", "seed": 7,
        "stopped_by": None, "versions": {}, "algorithm": "blake2b",
        "files": describe_files(folder, files, "blake2b", sync=False),
    }  # fmt: skip
    write_manifest(folder, Manifest(**{**usual, **more}))
    return folder


def foreign(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    return folder


def steps(output_dir: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in output_dir.iterdir() if path.name[0] == "c")


@pytest.fixture
def five(tmp_path: Path) -> Path:
    """Checkpoints of steps 2, 4, 6, 8, 10, saved in this order."""
    for index, step in enumerate((2, 4, 6, 8, 10)):
        save(checkpoint_folder(tmp_path, step), step, index + 1)
    return tmp_path


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({"keep_last": None}, [2, 4, 6, 8, 10]),
        ({"keep_last": 5}, [2, 4, 6, 8, 10]),
        ({"keep_last": 2}, [8, 10]),
        ({"keep_last": 1}, [10]),
        ({"keep_last": 1, "keep_every": 4}, [4, 8, 10]),
        ({"keep_last": 1, "keep_every": 3}, [6, 10]),
        ({"keep_last": 2, "best": 4}, [4, 10]),  # the best one is among the two kept
        ({"keep_last": 3, "best": 4}, [4, 8, 10]),
        ({"keep_last": 1, "best": 4}, [4, 10]),
        ({"keep_last": 1, "best": 10}, [10]),
        ({"keep_last": 1, "best": 4, "keep_every": 6}, [4, 6, 10]),
    ],
)
def test_what_is_deleted(five: Path, rule: dict[str, Any], kept: list[int]) -> None:
    if "best" in rule:
        rule = {**rule, "best": checkpoint_folder(five, rule["best"])}
    delete_old(five, **rule)
    assert steps(five) == kept
    assert not staging_root(five).exists()


def test_the_newest_is_the_one_saved_last_and_damaged_ones_are_named(five: Path) -> None:
    save(checkpoint_folder(five, 3), 3, 6)  # saved after going back to an earlier step
    os.truncate(five / "checkpoint-8" / "weights", 3)
    (five / "checkpoint-6" / "manifest.json").unlink()
    foreign(five / "checkpoint-12")
    (five / "checkpoint-99").write_text("a file")
    good, damaged = list_checkpoints(five)
    assert [found.manifest.step for found in good] == [3, 10, 4, 2]
    assert damaged == {
        five / "checkpoint-8": "weights has 3 bytes instead of 12",
        five / "checkpoint-6": "manifest.json is missing",
    }
    assert latest_complete_checkpoint(five) == str(five / "checkpoint-3")
    assert list_checkpoints(five / "nowhere") == ([], {})


def test_the_highest_number_is_not_the_last_in_the_alphabet(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        foreign(tmp_path / f"checkpoint-{step}")
    assert [folder.name for folder in list_foreign(tmp_path)] == ["checkpoint-9", "checkpoint-20", "checkpoint-100"]
    with pytest.raises(ConfigError, match="checkpoint-100 has no manifest") as refused:
        choose(tmp_path, Meeting(), print, place="--resume")
    assert refused.value.place == "--resume"
    for name in ("checkpoint-9", "checkpoint_9", "step_9", "epoch_9"):
        assert run_of(tmp_path / name) == tmp_path
    for name in ("checkpoint-9.damaged", "final", "step-9", "checkpoint-"):
        assert run_of(tmp_path / name) == tmp_path / name
    with pytest.raises(ConfigError, match=r"holds checkpoints and is none.*name one, e\.g\. \S+checkpoint-100\."):
        read_checkpoint(tmp_path, place="resume")


def test_examples_folders_are_taken_by_time_and_empty_ones_are_not(tmp_path: Path) -> None:
    for age, name in enumerate(("step_20", "step_3", "epoch_0", "epoch_1")):
        (tmp_path / name).mkdir()
        if name != "epoch_1":
            (tmp_path / name / "state").touch()
        os.utime(tmp_path / name, ns=(age, age))
    assert latest_complete_checkpoint(tmp_path) == str(tmp_path / "epoch_0")
    os.utime(tmp_path / "step_20", ns=(9, 9))
    assert latest_complete_checkpoint(tmp_path) == str(tmp_path / "step_20")
    assert latest_complete_checkpoint(tmp_path / "step_20") is None


def test_every_file_has_one_rank(tmp_path: Path) -> None:
    names = {
        0: [
            "config.json",
            "__0_0.distcp",
            "random_states_0.pt",
            "rng_state_0.pth",
            "a/model-00001-of-00002.safetensors",
        ],
        1: ["__1_0.distcp", "random_states_1.pt", "ddp_hook_1.pt", "tensors/rank00001.safetensors"],
        10: ["a/zero_pp_rank_10_mp_rank_00_optim_states.pt", "__10_1.distcp", "rng_state_10.pth"],
    }
    for name in (name for of_rank in names.values() for name in of_rank):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for rank, expected in names.items():
        assert files_of_rank(tmp_path, rank) == sorted(expected)
    assert files_of_rank(tmp_path, 2) == []


class OneOf(Meeting):
    """One rank of three, whose peers find nothing."""

    rank, world_size = 1, 3  # type: ignore[assignment]


def test_ranks_share_the_reading(tmp_path: Path) -> None:
    folder = save(tmp_path / "checkpoint-1", 1, 1, files=("a", "b", "c", "d", "e"))
    (found,), _ = list_checkpoints(tmp_path)
    for name in "abcde":
        (folder / name).write_text(f"{name} OF 1")
    assert changed_anywhere(found, OneOf()) == ["b was changed", "e was changed"]
    assert [line[0] for line in changed_anywhere(found, Meeting())] == list("abcde")


def test_what_is_damaged_steps_aside_under_a_name_that_is_free(five: Path) -> None:
    said: list[str] = []
    (five / "checkpoint-10.damaged").mkdir()
    (five / "checkpoint-10.damaged-1").mkdir()
    (five / "checkpoint-10" / "weights").write_text("weights OF 10")
    found = choose(five, Meeting(), said.append)
    assert found is not None
    assert found.manifest.step == 8
    assert said == [
        "warning: checkpoint-10 is damaged (weights was changed): left as checkpoint-10.damaged-2, not used."
    ]
    assert choose(five / "empty", Meeting(), said.append) is None
    assert len(said) == 1, "a new run has nothing to say"


def test_what_a_run_that_goes_on_says(five: Path) -> None:
    (*_, found), _ = list_checkpoints(five)
    assert resumed_line(found, 1) == f"resumed from {five / 'checkpoint-2'} (step 2)"
    assert resumed_line(found, 4).endswith("(step 2, written by 1 ranks and now on 4)")


# ── A trainer's ──────────────────────────────────────────────────────────────────────────────────────────────────────

TRAINERS = ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth")


def test_a_trainer_takes_what_a_trainer_wrote_under_its_strategy(tmp_path: Path) -> None:
    def check(strategy: str, written: str, layout: str = "trainer") -> None:
        folder = save(tmp_path / "checkpoint-1", 1, 1, files=TRAINERS, strategy=written, layout=layout)
        trainers.check_trainer_fit(list_checkpoints(tmp_path)[0][0], strategy, place=str(folder))

    for same in (("single", "ddp"), ("ddp", "single"), ("ddp", "ddp"), ("zero2", "zero2")):
        check(*same)
    check("fsdp2", "fsdp2", "trainer/SHARDED_STATE_DICT")
    for strategy, written in (("zero2", "zero3"), ("fsdp2", "ddp"), ("single", "zero1")):
        with pytest.raises(ConfigError, match=f"was written under {written}, this run is {strategy}"):
            check(strategy, written)
    with pytest.raises(ConfigError, match="was not written by a Trainer"):
        check("single", "single", "whole")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (TRAINERS, None),
        (("trainer_state.json", "optimizer.bin", "scheduler.pt", "random_states_0.pt"), None),
        (("trainer_state.json", "optimizer_0", "scheduler.pt", "rng_state_0.pth"), None),
        (("trainer_state.json", "latest", "rng_state_3.pth"), None),  # DeepSpeed keeps the schedule in its engine
        (TRAINERS[1:], "has no trainer_state.json"),
        (("trainer_state.json", "scheduler.pt", "rng_state.pth"), "has no optimizer state"),
        (("trainer_state.json", "optimizer.pt", "rng_state.pth"), "has no scheduler.pt"),
        (("trainer_state.json", "optimizer.pt", "scheduler.pt"), "has no random states"),
        (("trainer_state.json", "optimizer.pt", "scheduler.pt", "random_states_1.pt"), "has no random states"),
    ],
)
def test_a_state_that_a_trainer_would_miss_in_silence_is_named(
    tmp_path: Path, files: Any, problem: str | None
) -> None:
    folder = save(tmp_path / "checkpoint-1", 1, 1, files=files, layout="trainer")
    found = trainers.Found(folder, read_manifest(folder))
    if problem is None:
        trainers.check_trainer_fit(found, "single", place="resume")
        return
    with pytest.raises(ConfigError, match=problem):
        trainers.check_trainer_fit(found, "single", place="resume")


def test_another_programs_folder_is_looked_through(tmp_path: Path) -> None:
    folder = foreign(tmp_path / "checkpoint-1")
    for name, problem in (("optimizer.pt", "has no optimizer state"), ("scheduler.pt", "has no scheduler.pt")):
        with pytest.raises(ConfigError, match=f"not a good checkpoint: {problem}"):
            trainers.check_foreign(folder, place="resume")
        torch.save({}, folder / name)
    torch.save({}, folder / "rng_state.pth")
    for name in ("adapter/adapter_model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp_0/__0_0.distcp"):
        with pytest.raises(ConfigError, match="not a good checkpoint: has no weights"):
            trainers.check_foreign(folder, place="resume")
        weights = folder / name
        weights.parent.mkdir(exist_ok=True)
        save_file({}, weights) if weights.suffix == ".safetensors" else torch.save({}, weights)
        if weights.suffix == ".distcp":
            (weights.parent / ".metadata").touch()
        trainers.check_foreign(folder, place="resume")
        weights.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    os.truncate(folder / "optimizer.pt", 10)
    with pytest.raises(ConfigError, match=r"not a good checkpoint: optimizer\.pt"):
        trainers.check_foreign(folder, place="resume")


def test_optimizer_states_on_nvme_are_in_no_checkpoint(tmp_path: Path) -> None:
    def check(device: str | None, *, is_deepspeed: bool = True, with_zero: bool = True) -> None:
        offload = {"offload_optimizer": {"device": device}} if device else {}
        config = {"zero_optimization": offload} if with_zero else {}
        state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config))
        trainer = SimpleNamespace(is_deepspeed_enabled=is_deepspeed, accelerator=SimpleNamespace(state=state))
        trainers.refuse_nvme(trainer, tmp_path, place="resume")

    with pytest.raises(ConfigError, match="on NVMe"):
        check("nvme")
    for allowed in ({"device": "cpu"}, {"device": None}, {"device": None, "with_zero": False}):
        check(**allowed)
    check("nvme", is_deepspeed=False)


def test_random_states_of_old_and_new_ranks(tmp_path: Path) -> None:
    def rank(index: int) -> Any:
        return SimpleNamespace(process_index=index, device=torch.device("cpu"))

    def drawn() -> float:
        return torch.rand(()).item()

    torch.manual_seed(3)
    trainers.write_random_states(tmp_path, rank(1))
    expected = drawn()
    manifest: Any = SimpleNamespace(seed=11, step=5, world_size=2)
    torch.manual_seed(4)
    assert trainers.load_random_states(tmp_path, manifest, rank(1))
    assert drawn() == expected
    seen = set()
    for new in (2, 3):
        torch.manual_seed(4)
        assert trainers.load_random_states(tmp_path, manifest, rank(new))
        seen.add(drawn())
        assert trainers.load_random_states(tmp_path, manifest, rank(new))
        assert drawn() in seen, "the same whenever it is resumed"
    assert len(seen | {expected}) == 3
    # A rank known to the checkpoint but without a file of ours uses the Trainer's own.
    assert not trainers.load_random_states(tmp_path, manifest, rank(0))
    assert not trainers.load_random_states(tmp_path, None, rank(2))


def test_counters_go_round_and_others_have_none(tmp_path: Path) -> None:
    assert trainers.read_counters(tmp_path) == {}
    trainers.write_counters(tmp_path, {"tokens": 7, "seconds": 1.5})
    assert trainers.read_counters(tmp_path) == {"tokens": 7, "seconds": 1.5}
    assert json.loads((tmp_path / "state.json").read_text()) == {"state": {"tokens": 7, "seconds": 1.5}}


def test_weights_that_only_one_side_has_are_refused_and_tied_ones_are_there() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight

    def check(*missing: str, unexpected: tuple[str, ...] = ()) -> None:
        result = SimpleNamespace(missing_keys=list(missing), unexpected_keys=list(unexpected))
        trainers.refuse_partial(model, result, place="resume")

    check()
    check("1.weight")
    check("0.weight")
    with pytest.raises(ConfigError, match=r"0\.weight is not in the checkpoint, nor are 1 others"):
        check("0.weight", "1.weight")
    with pytest.raises(ConfigError, match=r"2\.bias is not in the checkpoint\."):
        check("2.bias")
    with pytest.raises(ConfigError, match=r"9\.bias is not in the checkpoint\."):
        check("9.bias")
    with pytest.raises(ConfigError, match=r"3\.bias is not in this model, nor are 2 others"):
        check(unexpected=("3.bias", "4.bias", "5.bias"))
    model._keys_to_ignore_on_save = ["2.bias"]
    check("2.bias")


@pytest.mark.parametrize("error", [OSError(28, "full"), RuntimeError("x")])
def test_errors_of_writing_are_kept_only_where_somebody_asks_later(error: Exception) -> None:
    kept: list[Exception] = []
    with trainers.errors_kept(kept):
        raise error
    assert kept == [error]
    with pytest.raises(type(error)), trainers.errors_kept(None):
        raise error
    with pytest.raises(TypeError), trainers.errors_kept(kept):
        raise TypeError


def test_what_does_not_fit_is_one_line_and_no_memory_is_something_else(tmp_path: Path) -> None:
    for error in (RuntimeError("size mismatch"), ValueError("groups"), KeyError("state")):
        with (
            pytest.raises(ConfigError, match="does not fit this model and optimizer"),
            trainers.fits(tmp_path, place="resume"),
        ):
            raise error
    for other in (torch.OutOfMemoryError("out"), ConfigError("said", place="there", fix="that"), TypeError("bug")):
        with pytest.raises(type(other)) as raised, trainers.fits(tmp_path, place="resume"):
            raise other
        assert raised.value is other
