"""An output folder with anything that is not the run's own is refused by name, and its contents stay unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from accel_scale.errors import ConfigError
from accel_scale.flags.paths import named_inputs
from accel_scale.launching.folder_lock import held
from accel_scale.launching.run_folder import (
    RUN_FILE,
    OutputFolder,
    is_own,
    record_published,
    refuse_foreign_model,
)
from accel_scale.trainers.output_mixin import OutputFolderMixin
from accel_scale.training.checkpoints.staging import save_atomically


def model_in(folder: Path, weights: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / weights).write_bytes(b"weights of value")
    return folder


def taken(folder: Path, program: str = "sft.py", **options) -> OutputFolder:
    output = OutputFolder(folder, program, **options)
    with output.taken():
        pass
    return output


@pytest.mark.parametrize("how", ["same", "relative", "symlink", "checkpoint", "base of the adapter"])
def test_a_folder_that_is_read_is_not_written(tmp_path, monkeypatch, how):
    model = model_in(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    source, output = str(model), model
    if how == "relative":
        source, output = "./x/../m", Path("m")
        (tmp_path / "x").mkdir()
    elif how == "symlink":
        (tmp_path / "link").symlink_to(model)
        output = tmp_path / "link"
    elif how == "checkpoint":
        output = tmp_path / "run"
        taken(output)  # its own run: checkpoints still appear and disappear
        source = str(model_in(output / "checkpoint-100"))
    elif how == "base of the adapter":
        (tmp_path / "adapter").mkdir()
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model)}))
        source = str(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="overwritten") as refused:
        OutputFolder(output, "sft.py", {"--model_name_or_path": [source]}).check()
    assert refused.value.place == "--output_dir"
    assert refused.value.fix
    assert (model / "model.safetensors").read_bytes() == b"weights of value"


@pytest.mark.parametrize(
    "name",
    ["config.json", "adapter_config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin", "checkpoint-7",
     "checkpoint_7", "tokenizer.json", "README.md", "run_summary.json", "metrics.jsonl", "study.db", "_run.json"],
)  # fmt: skip
def test_what_a_run_would_overwrite_is_refused_by_name(tmp_path, name):
    (tmp_path / name).mkdir() if name.startswith("checkpoint") else (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        taken(tmp_path)
    assert os.listdir(tmp_path) == [name]


def test_other_files_and_an_own_run_are_no_obstacle(tmp_path):
    for name in ("nohup.out", "notes.txt", "rows.jsonl", ".gitignore"):
        (tmp_path / name).write_text("mine")
    taken(tmp_path)
    model_in(tmp_path)
    (tmp_path / "checkpoint-5").mkdir()
    taken(tmp_path)  # the same command again
    with pytest.raises(ConfigError, match=r"a run of sft\.py"):
        taken(tmp_path, program="pretrain.py")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        taken(tmp_path / "file")


def test_runs_of_earlier_versions_are_their_own(tmp_path):
    model_in(tmp_path / "sft")
    (tmp_path / "sft" / "run_summary.json").write_text(json.dumps({"recipe": "sft.py"}))
    taken(tmp_path / "sft")
    (tmp_path / "pre" / "checkpoint_5").mkdir(parents=True)
    for name in ("manifest.json", "state.json"):
        (tmp_path / "pre" / "checkpoint_5" / name).write_text("{}")
    with pytest.raises(ConfigError):
        taken(tmp_path / "pre")
    taken(tmp_path / "pre", program="pretrain.py")
    (tmp_path / "hf" / "checkpoint-5").mkdir(parents=True)
    with pytest.raises(ConfigError, match="checkpoint-5"):
        taken(tmp_path / "hf", resumes_from="auto")
    taken(tmp_path / "hf", resumes_from=str(tmp_path / "hf" / "checkpoint-5"))


@pytest.mark.parametrize(("program", "state"), [("pretrain.py", "state.json"), ("sft.py", "trainer_state.json")])
def test_a_checkpoint_that_was_copied_is_gone_on_from(tmp_path, program, state):
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="checkpoint-7"):
        taken(tmp_path, program=program)
    (tmp_path / "checkpoint-7" / state).write_text("{}")
    taken(tmp_path, program=program)


def test_a_model_is_replaced_only_by_who_wrote_it(tmp_path):
    folder = tmp_path / "out"
    for content in (b"one", b"two"):  # the second time it replaces its own model
        with save_atomically(folder) as staging:
            (staging / "config.json").write_text("{}")
            (staging / "model.safetensors").write_bytes(content)
            (staging / "README.md").write_text("generated")
    assert (folder / "model.safetensors").read_bytes() == b"two"
    (folder / "README.md").write_text("written by hand")
    with save_atomically(folder) as staging:
        (staging / "config.json").write_text("{}")
        (staging / "README.md").write_text("generated")
    assert (folder / "README.md").read_text() == "written by hand"

    foreign = model_in(tmp_path / "foreign")
    before = {path.name: path.read_bytes() for path in foreign.iterdir()}
    with pytest.raises(ConfigError, match=r"config\.json"), save_atomically(foreign) as staging:
        (staging / "config.json").write_text("{}")
    assert {path.name: path.read_bytes() for path in foreign.iterdir()} == before

    model_in(folder, weights="model-00001-of-00001.safetensors")  # somebody copies a model over it
    with pytest.raises(ConfigError):
        refuse_foreign_model(folder)


def test_a_record_follows_the_files(tmp_path):
    taken(tmp_path / "run")
    staged = tmp_path / "staged"
    staged.mkdir()
    (staged / "README.md").write_text("ours")
    record_published(staged, tmp_path / "run")
    assert json.loads((staged / RUN_FILE).read_text())["program"] == "sft.py"
    for path in staged.iterdir():
        path.replace(tmp_path / "run" / path.name)
    assert is_own(tmp_path / "run" / "README.md")
    assert is_own(tmp_path / "run" / "absent")


HOLD = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from accel_scale.launching.folder_lock import held
with held(Path(sys.argv[1])):
    import os
    if os.fork() == 0:
        time.sleep(30)  # a data loader's worker that outlives its run
        os._exit(0)
    print("held", flush=True)
    time.sleep(30)
"""


def test_one_run_at_a_time_and_death_lets_go(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=rf"in use by process {holder.pid} on "), held(tmp_path, wait_seconds=0):
            pass
        holder.kill()  # its child survives
        started = time.monotonic()
        with held(tmp_path), held(tmp_path):  # waits for the dying process; the same process may hold it twice
            pass
        assert time.monotonic() - started < 5
    finally:
        os.killpg(holder.pid, 9)
        holder.wait()


def test_inputs_are_named_without_their_weights():
    values = {"dataset_mixture": ["a.jsonl=0.7", "b=c.jsonl"], "model_name_or_path": ["m"], "data": []}
    assert named_inputs(lambda flag: values.get(flag, [])) == {
        "model_name_or_path": ["m"],
        "dataset_mixture": ["a.jsonl", "b=c.jsonl"],
    }


class CardWriter:
    """Writes a card as TRL's trainers do at every checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.args = SimpleNamespace(output_dir=str(folder))

    def is_world_process_zero(self) -> bool:
        return True

    def create_model_card(self) -> None:
        Path(self.args.output_dir, "README.md").write_text("generated")


class KeepsReadme(OutputFolderMixin, CardWriter):
    pass


def test_a_model_card_replaces_its_own_and_nobody_elses(tmp_path):
    taken(tmp_path)
    trainer = KeepsReadme(tmp_path)
    readme = tmp_path / "README.md"
    trainer.create_model_card()
    readme.write_text("by hand")  # the user has edited it
    trainer.create_model_card()
    assert readme.read_text() == "by hand"
    readme.unlink()
    trainer.create_model_card()
    trainer.create_model_card()
    assert readme.read_text() == "generated"
