"""The changes that a rehearsal makes to a launch and a recipe, and the parts that it leaves unchanged."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from accel_scale.errors import ConfigError
from accel_scale.flags.command_line import RecipeCommand
from accel_scale.launching.launch_file import read_launch_file
from accel_scale.recipe_specs.trl import DPO
from accel_scale.rehearsing.plan import (
    DataChoice,
    choose_data,
    for_the_cpu,
    plan_rehearsal,
    rehearsed_processes,
)
from accel_scale.rehearsing.rehearse import Check, RehearsalReport, error_lines, furthest

CONFIGS = Path(__file__).resolve().parents[2] / "accelerate_configs"
ROWS = [
    {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": str(i)}]} for i in range(9)
]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "recipe.py"
    path.write_text("")
    return str(path)


def flag(words: list[str] | tuple[str, ...], name: str) -> str:
    """The value that argparse would take, which is the last one."""
    return [words[i + 1] for i, word in enumerate(words) if word == f"--{name}"][-1]


def test_the_command_line_wins_over_the_file(tmp_path: Path, script: str) -> None:
    config = tmp_path / "flags.yaml"
    config.write_text("max_length: 4096\ncolumns: [prompt=a, completion=b]\noptim: sgd\n")
    command = RecipeCommand.parse(script, ["--config_file", str(config), "--max_length", "64", "--bf16"])
    assert command.value("max_length") == "64"
    assert command.value("optim") == "sgd"
    assert command.values("columns") == ["prompt=a", "completion=b"]
    assert command.value("bf16") == "true"
    assert command.value("seed", 7) == 7


def test_flags_are_taken_out_of_words_and_of_a_copy_of_the_file(tmp_path: Path, script: str) -> None:
    config = tmp_path / "flags.yaml"
    config.write_text("# comment\ncolumns:\n  - prompt=a\n  - completion=b\noptim: sgd\n")
    work = tmp_path / "work"
    work.mkdir()
    command = RecipeCommand.parse(script, [f"--config_file={config}", "--dataset-name=x", "--seed", "1"])
    cut = command.without(["columns", "dataset_name"], work)
    assert cut.words == ("--config_file", str(work / "flags.yaml"), "--seed", "1")
    copy = (work / "flags.yaml").read_text().splitlines()
    assert copy == ["# comment", "", "", "", "optim: sgd"], "what is left keeps its line"
    assert config.read_text().startswith("# comment\ncolumns"), "the user's file is not touched"
    again = cut.without(["optim"], work)
    assert (work / "flags.yaml").read_text().splitlines() == ["# comment", "", "", "", ""]
    assert again.value("optim") is None


def test_a_missing_recipe_or_file_is_named(tmp_path: Path, script: str) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.py"):
        RecipeCommand.parse("nowhere.py", [])
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        RecipeCommand.parse(script, ["--config_file", "gone.yaml"])


@pytest.mark.parametrize(
    ("name", "num_processes"),
    [("cpu", 1), ("single_gpu", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp2_hybrid", 4), ("zero3_multinode", 2)],
)
def test_processes_of_every_kind_of_launch(name: str, num_processes: int) -> None:
    assert rehearsed_processes(read_launch_file(CONFIGS / f"{name}.yaml"))[0] == num_processes


def test_ranks_that_share_rows_become_two_and_groups_of_them_too() -> None:
    ddp, hybrid = (read_launch_file(CONFIGS / f"{name}.yaml") for name in ("ddp_multinode", "fsdp2_hybrid"))
    assert rehearsed_processes(ddp, 16)[0] == 2, "one group of all 16"
    assert rehearsed_processes(ddp, 4)[0] == 4
    assert rehearsed_processes(hybrid, 2)[0] == 8
    assert rehearsed_processes(read_launch_file(CONFIGS / "fsdp2_sp.yaml"), 2)[0] == 4, "the file says so itself"


def test_a_large_mesh_is_cut_along_every_dimension(tmp_path: Path) -> None:
    text = (CONFIGS / "fsdp2_hybrid.yaml").read_text()
    text = text.replace("num_processes: 4", "num_processes: 64").replace("shard_size: 2", "shard_size: 8")
    path = tmp_path / "hybrid.yaml"
    path.write_text(text.replace("replicate_size: 2", "replicate_size: 8"))
    num_processes, words = rehearsed_processes(read_launch_file(path))
    assert num_processes == 4
    assert words == [
        *("--parallelism_config_dp_replicate_size", "2"),
        *("--parallelism_config_dp_shard_size", "2"),
    ]


def test_sizes_are_cut_and_the_rest_is_kept(tmp_path: Path, script: str) -> None:
    words = ["--method", "lora", "--lora_r", "64", "--optim", "adamw_bnb_8bit", "--max_length", "8192"]
    words += ["--attn_implementation", "flash_attention_2", "--push_to_hub", "true", "--global_batch_size", "512"]
    recipe = RecipeCommand.parse(script, words)
    launch = read_launch_file(CONFIGS / "ddp_multinode.yaml")
    data = DataChoice(tmp_path / "rows.jsonl", replaced="some/data")
    plan = plan_rehearsal(launch, recipe, model_folder=tmp_path / "tiny", data=data, work=tmp_path)
    command = plan.command(tmp_path / "out", resume_from=tmp_path / "checkpoint-2")
    launcher, kept = command[: command.index(script)], command[command.index(script) :]
    assert (flag(launcher, "num_machines"), flag(launcher, "num_processes")) == ("1", "2")
    assert flag(launcher, "config_file") == str(CONFIGS / "ddp_multinode.yaml"), "the very file, not a copy"
    assert (flag(kept, "method"), flag(kept, "lora_r"), flag(kept, "optim")) == ("lora", "64", "adamw_bnb_8bit")
    assert (flag(kept, "max_length"), flag(kept, "per_device_train_batch_size")) == ("256", "2")
    assert flag(kept, "gradient_accumulation_steps") == "2", "512 = 8 × 4 × 16: the real run accumulates"
    assert flag(kept, "resume_from_checkpoint") == str(tmp_path / "checkpoint-2")
    for gone in ("--attn_implementation", "--push_to_hub", "--global_batch_size"):
        assert gone not in kept
    assert any("flash_attention_2" in note for note in plan.notes)


def test_nvme_files_stay_in_the_rehearsal(tmp_path: Path, script: str) -> None:
    launch = read_launch_file(CONFIGS / "zero_infinity.yaml")
    data = DataChoice(None)
    plan = plan_rehearsal(
        launch, RecipeCommand.parse(script, []), model_folder=tmp_path / "tiny", data=data, work=tmp_path
    )
    copy = json.loads(Path(flag(plan.launcher, "deepspeed_config_file")).read_text())
    real = json.loads((CONFIGS / "deepspeed" / "zero_infinity.json").read_text())
    paths = [copy["zero_optimization"][name].pop("nvme_path") for name in ("offload_param", "offload_optimizer")]
    assert paths == [str(tmp_path / "nvme")] * 2
    assert copy["aio"] == real["aio"], "everything else is as the user wrote it"
    assert copy["zero_optimization"]["stage"] == 3


def test_local_data_is_cut_and_remote_data_replaced(tmp_path: Path, script: str) -> None:
    lines = tmp_path / "real.jsonl"
    lines.write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(1000)))
    work = tmp_path / "work"
    work.mkdir()
    local = RecipeCommand.parse(script, ["--dataset_name", str(lines)])
    choice = choose_data(local, work, fallback=ROWS, has_chat_template=True)
    assert choice.replaced is None
    assert choice.path is not None
    assert len(choice.path.read_text().splitlines()) == 256
    remote = RecipeCommand.parse(script, ["--dataset_name", "nobody/has-this"])
    choice = choose_data(remote, work, fallback=ROWS, has_chat_template=False)
    assert choice.replaced == "nobody/has-this"
    assert choice.path is not None
    assert json.loads(choice.path.read_text().splitlines()[1]) == {"prompt": "1?\n", "completion": "1"}


@pytest.mark.parametrize("turns", [True, False])
def test_a_recipe_for_pairs_gets_pairs(tmp_path: Path, script: str, turns: bool) -> None:
    rows = [{**row, "task": "sums"} for row in ROWS]
    remote = RecipeCommand.parse(script, ["--dataset_name", "nobody/has-this"])
    choice = choose_data(remote, tmp_path, fallback=rows, has_chat_template=turns, spec=DPO)
    assert choice.path is not None
    first = json.loads(choice.path.read_text().splitlines()[0])
    question, better, worse = (first[name] for name in ("prompt", "chosen", "rejected"))
    if turns:
        question, better, worse = (turns[-1]["content"] for turns in (question, better, worse))
    assert (question.strip(), better, worse) == ("1?", "1", "0")


def test_what_goes_on_is_compared_where_the_loss_is_zero_too() -> None:
    assert furthest([0.0, 2.0], [0.0, 2.0]) == 0
    assert furthest([0.0, 2.2], [0.0, 2.0]) == pytest.approx(0.1)
    assert furthest([0.5], [0.0]) == 0.5


def test_what_a_cpu_has_not_is_left_out_and_noted(tmp_path: Path, script: str) -> None:
    config = tmp_path / "flags.yaml"
    config.write_text("activation_offloading: true\nattn_implementation: flash_attention_2\n")
    (tmp_path / "work").mkdir()
    launch = read_launch_file(CONFIGS / "ddp.yaml")
    cut, notes = for_the_cpu(RecipeCommand.parse(script, ["--config_file", str(config)]), launch, tmp_path / "work")
    assert cut.names() == ["config_file"]
    assert [note.partition(":")[0] for note in notes] == ["attention", "activations"]
    on = RecipeCommand.parse(script, ["--activation_offloading"])
    assert not for_the_cpu(on, launch, tmp_path / "work")[0].words
    off = RecipeCommand.parse(script, ["--activation_offloading", "false"])
    assert for_the_cpu(off, launch, tmp_path / "work") == (off, [])


def test_no_data_is_the_recipes_own_business(tmp_path: Path, script: str) -> None:
    """Without model and data the recipe uses its defaults; with only a model it refuses, and a rehearsal must too."""
    default = choose_data(RecipeCommand.parse(script, []), tmp_path, fallback=ROWS, has_chat_template=True)
    assert default.replaced is None
    assert default.path is not None
    assert len(default.path.read_text().splitlines()) == len(ROWS)
    alone = RecipeCommand.parse(script, ["--model_name_or_path", "some/model"])
    assert choose_data(alone, tmp_path, fallback=ROWS, has_chat_template=True).path is None


def test_the_error_is_found_in_the_wall() -> None:
    wall = """[rank1]: Traceback (most recent call last):
[rank1]:   File "x.py", line 3, in f
[rank1]: ValueError: the shapes do not match
[rank0]: ValueError: the shapes do not match
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
    assert error_lines(wall) == ["ValueError: the shapes do not match"]
    assert error_lines("sft.py: error: --optim: no. Fix: yes.\n") == ["sft.py: error: --optim: no. Fix: yes."]
    assert error_lines("Killed\n\n") == ["Killed"]


def test_a_report_with_something_not_reached_has_not_passed() -> None:
    assert RehearsalReport([Check("a", "passed"), Check("b", "passed")]).passed
    assert RehearsalReport([Check("a", "passed"), Check("b", "not offered"), Check("c", "passed")]).passed
    assert not RehearsalReport([Check("a", "passed"), Check("b")]).passed
    assert not RehearsalReport([Check("a", "failed"), Check("b")]).passed


def test_deepspeed_still_forgets_optimizer_states_on_nvme() -> None:
    """If this fails, resuming from NVMe may be fixed: see `NVME_REASON`."""
    engine = pytest.importorskip("deepspeed.runtime.engine")
    source = inspect.getsource(engine.DeepSpeedEngine)
    assert "if load_zero_checkpoint and not self.zero_nvme_offload_optimizer():" in source
