"""Where a recipe's run starts: the contents of its course, what counts as finished, and earlier choices."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from test_checkpoint_choices import checkpoint_folder, foreign, save
from transformers import LlamaConfig

from accel_scale.errors import ConfigError
from accel_scale.flags.paths import resume_choice
from accel_scale.training.checkpoints.going_on import (
    Course,
    chosen_before,
    course_of_pretraining,
    course_of_sft,
    refuse_leftovers,
)
from accel_scale.training.checkpoints.settings import files_fingerprint

CONFIG = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=96)


@dataclass
class Flags:
    """Some of the recipe's flags."""

    output_dir: str = "out"
    resume_from_checkpoint: str = "auto"
    max_steps: int = -1
    num_train_epochs: float = 3.0
    lr_scheduler_type: str = "cosine"
    learning_rate: float = 1e-4
    allow_changed_settings: bool = False
    columns: list[str] = field(default_factory=lambda: ["a"])


def of_sft(places: dict[str, str] | None = None, **given: Any) -> Course:
    return course_of_sft(
        given, places or {}, {"method": "lora", "precision": "bf16", "global_batch_size": 8}, [Flags],
        model_config=CONFIG, model_name="org/model", rows=Dataset.from_list([{"a": 1}] * 4),
    )  # fmt: skip


def test_a_course_of_fine_tuning_is_its_flags_its_model_and_its_rows() -> None:
    course = of_sft(learning_rate=0.5)
    settings = course.settings
    assert (course.output_dir, course.how, course.choice) == (Path("out"), "auto", "auto")
    assert (course.place, course.allow_changed_settings) == ("--resume_from_checkpoint", False)
    assert course.goal == settings["length"] == "3 epochs"
    assert (settings["learning_rate"], settings["columns"], settings["method"]) == (0.5, ["a"], "lora")
    assert (settings["precision"], settings["global_batch_size"]) == ("bf16", 8)
    assert (settings["model"]["hidden_size"], settings["model"]["weights"]) == (64, "org/model")
    assert settings["data"].startswith("4 rows ")
    assert course.record() == {"settings": settings, "goal": "3 epochs"}
    other = of_sft(
        {"resume_from_checkpoint": "run.yaml:3"}, resume_from_checkpoint="false", max_steps=30, output_dir="b",
        lr_scheduler_type="constant", allow_changed_settings=True,
    )  # fmt: skip
    assert (other.output_dir, other.how, other.choice, other.place) == (Path("b"), "no", None, "run.yaml:3")
    assert (other.goal, "length" in other.settings, other.allow_changed_settings) == ("30 steps", False, True)
    assert of_sft(max_steps=30).settings["length"] == "30 steps"


def of_pretraining(files: list[Path], places: dict[str, str] | None = None, **given: Any) -> Course:
    usual = {
        "output_dir": "out", "resume": "auto", "max_tokens": None, "decay_steps": None, "max_steps": 40,
        "lr_scheduler_type": "cosine", "max_train_time": None, "allow_changed_settings": False,
    }  # fmt: skip
    args: Any = SimpleNamespace(**{**usual, **given})
    values = {"data": given.get("data", ["a.txt=0.7", "b.txt=0.3"]), "model_name_or_path": None, "seed": 5}
    outcome = {"method": "full"}
    return course_of_pretraining(args, values, places or {}, outcome, model_config=CONFIG, files=files)


def test_a_course_of_pretraining_is_its_files_and_its_end(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    for path in files:
        path.write_text(path.name)
    course = of_pretraining(files)
    settings = course.settings
    assert (course.output_dir, course.how, course.place) == (Path("out"), "auto", "--resume")
    assert course.goal == settings["length"] == "40 steps"
    assert settings["data"] == f"2 files {files_fingerprint(files)} 0.3,0.7"
    assert (settings["seed"], settings["method"], settings["model"]["type"]) == (5, "full", "llama")
    assert "weights" not in settings["model"], "from nothing"
    for given, goal in (
        ({"max_tokens": 640}, "640 tokens"),
        ({"decay_steps": 7}, "7 steps"),
        ({"max_tokens": 640, "decay_steps": 7}, "640 tokens"),
    ):
        assert of_pretraining(files, **given).goal == of_pretraining(files, **given).settings["length"] == goal
    for given in ({"lr_scheduler_type": "constant"}, {"max_train_time": "1h"}):
        free = of_pretraining(files, **given)
        assert (free.goal, "length" in free.settings) == ("40 steps", False)
    plain = of_pretraining(files[:1], {"resume": "ACCEL"}, data=["a.txt"], resume="no", allow_changed_settings=True)
    assert plain.settings["data"] == f"1 files {files_fingerprint(files[:1])}"
    assert (plain.how, plain.place, plain.allow_changed_settings) == ("no", "ACCEL", True)


@pytest.mark.parametrize(
    ("words", "choice"),
    [
        (("auto", "True", "YES", "", True), "auto"),
        (("no", "False", "none", "NEVER", False, None), "no"),
        (("runs/No", "autos"), None),
    ],
)
def test_choices_in_words(words: tuple[Any, ...], choice: str | None) -> None:
    assert [resume_choice(word) for word in words] == [choice or word for word in words]


def test_what_a_run_chose_before_is_asked_of_the_checkpoint_it_goes_on_from(tmp_path: Path) -> None:
    for step, policy in ((2, "full"), (4, "every_2")):
        save(checkpoint_folder(tmp_path, step), step, step, settings={"checkpointing_policy": policy})

    def chosen(resume: object, name: str = "checkpointing_policy", folder: object = tmp_path) -> object:
        return chosen_before(name, folder, resume)

    assert [chosen(how) for how in (None, "auto", True)] == ["every_2"] * 3
    assert chosen(str(tmp_path / "checkpoint-2")) == "full"
    for nothing in (
        chosen("no"), chosen(None, folder=None), chosen(None, "fused_kernels"), chosen("auto", folder=tmp_path / "n"),
        chosen(str(tmp_path / "checkpoint-9")),
    ):  # fmt: skip
        assert nothing is None


class Finished:
    """A folder with the result of a finished run of four steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.course = Course(folder, "auto", {"seed": 1}, "4 steps", False, "--resume")
        self.summary: dict[str, Any] = {"steps": 4, "finished": self.course.record()}
        self.write()
        (folder / "config.json").write_text("{}")

    def write(self, **changes: Any) -> None:
        (self.folder / "run_summary.json").write_text(json.dumps({**self.summary, **changes}))


def test_a_run_is_finished_where_its_summary_says_so_and_its_model_is_there(tmp_path: Path) -> None:
    run = Finished(tmp_path / "run")
    assert run.course.look_ahead() == run.summary
    (run.folder / "config.json").rename(run.folder / "adapter_config.json")
    assert run.course.look_ahead() == run.summary
    for changes in (
        {"steps": "4"},
        {"finished": {"goal": "4 steps"}},
        {"finished": {"settings": {}}},
        {"finished": []},
    ):
        run.write(**changes)
        assert run.course.look_ahead() is None, changes
        refuse_leftovers(run.folder, place="--resume")
    run.write()
    with pytest.raises(ConfigError, match="holds the result of an earlier run") as refused:
        refuse_leftovers(run.folder, place="--resume")
    assert (refused.value.place, "--resume auto" in str(refused.value.fix)) == ("--resume", True)
    (run.folder / "adapter_config.json").unlink()
    assert run.course.look_ahead() is None
    refuse_leftovers(run.folder, place="--resume")


def test_another_run_than_the_finished_one_is_refused_unless_it_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    run = Finished(tmp_path / "run")
    longer = Course(run.folder, "auto", {"seed": 1}, "9 steps", False, "--resume")
    other = Course(run.folder, "auto", {"seed": 2}, "4 steps", False, "--resume")
    for course, said in ((longer, "length 4 steps → 9 steps"), (other, "seed 1 → 2")):
        with pytest.raises(ConfigError, match=said) as refused:
            course.look_ahead()
        assert refused.value.place == "--resume"
    allowed = Course(run.folder, "auto", {"seed": 2}, "4 steps", True, "--resume")
    assert allowed.look_ahead() is None
    folder = save(checkpoint_folder(run.folder, 2), 2, 1, settings={"seed": 1})
    assert longer.look_ahead() is None, "from its checkpoint"
    with pytest.raises(ConfigError, match=r"checkpoint-2 was saved with other settings: seed 1 → 2"):
        other.look_ahead()
    assert run.course.look_ahead() == run.summary
    (folder / "weights").unlink()
    assert run.course.look_ahead() is None, "a damaged checkpoint is looked at"


def test_leftovers_are_named_by_the_last_of_them(tmp_path: Path) -> None:
    course = Course(tmp_path, "auto", {}, "4 steps", False, "--resume")
    for step in (9, 100):
        foreign(tmp_path / f"checkpoint-{step}")
    with pytest.raises(ConfigError, match="checkpoint-100 has no manifest") as refused:
        course.look_ahead()
    assert refused.value.place == "--resume"
    with pytest.raises(ConfigError, match="holds checkpoint-100 of an earlier run"):
        refuse_leftovers(tmp_path, place="--resume")
    save(checkpoint_folder(tmp_path, 2000), 2000, 1)
    with pytest.raises(ConfigError, match=r"holds checkpoints of an earlier run, the last of step 2,000\."):
        refuse_leftovers(tmp_path, place="--resume")
    named = Course(tmp_path, str(tmp_path / "checkpoint-9"), {}, "4 steps", False, "--resume")
    assert named.look_ahead() is None, "another program's, which the user names"


def test_a_trainer_follows_its_course(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Finished(tmp_path / "run")
    trainer = SimpleNamespace()
    run.course.follow(trainer, 12.5)
    assert vars(trainer) == {
        "run_settings": {"seed": 1}, "allow_changed_settings": False, "started": 12.5,
        "resume_words": ("--resume", "--allow_changed_settings", "the same command continues from there"),
    }  # fmt: skip
    run.course.keep({"a": 1, "b": 2, "c": 3}, "a", "b")
    assert run.course.record()["settings"] == {"seed": 1, "a": 1, "b": 2}
    assert run.course.say_finished(run.summary, is_main=False) is run.summary
    assert capsys.readouterr().out == ""
    figures = {
        "losses": [4.0, 2.0], "tokens_per_second": 1000.0, "data_wait_ratio": None, "peak_device_bytes": None,
        "verified": None, "peak_host_bytes": 2**30, "eval_loss": None, "seconds": 60.0,
    }  # fmt: skip
    run.course.say_finished({**run.summary, **figures, "steps": 4000}, is_main=True)
    out = capsys.readouterr().out
    assert "done before" in out
    assert f"{run.folder} holds this run, finished after 4,000 steps: nothing is left to do." in out
