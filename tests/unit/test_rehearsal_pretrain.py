"""Launches in a rehearsal of the pretraining recipe: each way of sharing the model in two, and small steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_scale.errors import ConfigError
from accel_scale.flags.command_line import RecipeCommand
from accel_scale.launching.launch_file import read_launch_file
from accel_scale.rehearsing.plan import DataChoice, Rehearsal
from accel_scale.rehearsing.pretraining import choose_text, min_layers, plan_pretraining_rehearsal

CONFIGS = Path(__file__).resolve().parents[2] / "accelerate_configs"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "pretrain.py"
    path.write_text("")
    return str(path)


def planned(name: str, script: str, *words: str, data: DataChoice | None = None) -> Rehearsal:
    work = Path(script).parent
    recipe = RecipeCommand.parse(script, words)
    launch = read_launch_file(CONFIGS / f"{name}.yaml")
    data = data or DataChoice(None)
    return plan_pretraining_rehearsal(launch, recipe, model_folder=work / "tiny", data=data, work=work)


def flag(words: list[str] | tuple[str, ...], name: str) -> str | None:
    """The value that argparse would take, which is the last one."""
    return ([words[i + 1] for i, word in enumerate(words) if word == f"--{name}"] or [None])[-1]


@pytest.mark.parametrize(
    ("name", "words", "num_processes"),
    [
        ("cpu", [], 1),
        ("ddp", [], 2),
        ("fsdp2_hybrid", [], 4),
        ("tp", [], 2),
        ("pp", ["--pp_size", "2"], 2),
        ("fsdp2_tp", [], 4),
        ("fsdp2_sp", [], 4),
        ("3d", ["--pp_size", "2"], 8),
        ("fsdp2_multinode", ["--tp_size", "8"], 4),
        ("ddp_multinode", ["--pp_size", "4", "--sp_size", "2"], 8),
        ("ddp_multinode", ["--pp_size", "16"], 2),
    ],
)
def test_every_way_that_ranks_are_divided_becomes_two(
    name: str, words: list[str], num_processes: int, script: str
) -> None:
    plan = planned(name, script, *words)
    assert plan.num_processes == num_processes
    for given, size in zip(words[::2], words[1::2], strict=True):
        assert f"{given} {size} → 2" in plan.notes[0]
    assert flag(plan.launcher, "num_processes") == str(num_processes)
    # The rehearsal passes as flags what the real command passes as flags, and to the launcher what its file sets.
    for given in words[::2]:
        assert flag(plan.recipe.words, given[2:]) == "2"
    launch = read_launch_file(CONFIGS / f"{name}.yaml")
    mesh = launch.values.get("parallelism_config") or {}
    for size in (size for size in mesh if size.endswith("_size") and mesh[size] > 1):
        assert flag(plan.launcher, size) == "2"
    batch, micro = (
        int(flag(plan.recipe.words, f"{kind}_size") or 0) for kind in ("global_batch", "per_device_train_batch")
    )
    shared = set(words[::2]) | {size for size in mesh if "dp" not in size and (mesh[size] or 1) == 2}
    readers = num_processes / 2 ** len(shared)
    accumulation = batch / micro / readers
    assert accumulation == (4 if "--pp_size" in words else 1), "as many micro-batches as a pipeline of two ranks needs"


def test_sizes_are_cut_and_the_rest_is_kept(script: str, tmp_path: Path) -> None:
    words = [
        "--num_params",
        "7B",
        "--train_tokenizer",
        "--vocab_size",
        "64000",
        "--max_tokens",
        "2T",
        "--optim",
        "sgd",
    ]
    words += ["--lr_scheduler_type", "wsd", "--warmup_steps", "2000", "--global_batch_size", "512", "--report_to"]
    words += ["wandb", "--max_length", "8192", "--data", "web=0.7", "law=0.3", "--text_column", "body"]
    words += ["--attn_implementation", "flash_attention_3", "--decay_from", "x/checkpoint-9", "--decay_steps", "900"]
    plan = planned("fsdp2", script, *words, data=DataChoice(tmp_path / "text.jsonl", replaced="web, law"))
    command = plan.command(tmp_path / "out", resume_from=tmp_path / "checkpoint-2")
    kept = command[command.index(script) :]
    assert (flag(kept, "optim"), flag(kept, "lr_scheduler_type")) == ("sgd", "wsd")
    assert (flag(kept, "max_steps"), flag(kept, "save_steps"), flag(kept, "max_length")) == ("4", "2", "256")
    assert flag(kept, "global_batch_size") == "8", "2 rows × 2 ranks × 2, since the real run accumulates"
    assert flag(kept, "data") == str(tmp_path / "text.jsonl")
    assert flag(kept, "resume") == str(tmp_path / "checkpoint-2")
    assert flag(kept, "model_config") == str(tmp_path / "tiny"), "random weights stay random weights"
    assert plan.start is None
    gone = "num_params train_tokenizer vocab_size max_tokens warmup_steps report_to text_column decay_from decay_steps"
    assert not {f"--{name}" for name in gone.split()} & set(kept)
    assert [note.split(":")[0] for note in plan.notes] == ["attention", "--decay_from"]


def test_a_model_that_is_trained_on_is_trained_on(script: str, tmp_path: Path) -> None:
    plan = planned("zero2", script, "--model_name_or_path", "meta-llama/Llama-3.1-8B", "--method", "lora")
    assert flag(plan.recipe.words, "model_name_or_path") == str(tmp_path / "tiny")
    assert plan.start == tmp_path / "tiny"
    assert (plan.spec.rehearsal.checkpoint, plan.spec.rehearsal.complete_file) == ("checkpoint-2", "manifest.json")


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ([], 2),
        (["--pp_size", "8"], 2),
        (["--pp_size", "8", "--pp_schedule", "interleaved"], 4),
        (["--pp_size", "4", "--pp_schedule", "interleaved", "--pp_stages_per_rank", "3"], 6),
    ],
)
def test_every_stage_has_a_layer(words: list[str], layers: int, script: str) -> None:
    launch = read_launch_file(CONFIGS / "pp.yaml")
    assert min_layers(launch, RecipeCommand.parse(script, words)) == layers


def test_text_that_is_here_is_kept_and_other_text_replaced(script: str, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("words")

    def choice(*words: str, own_tokenizer: bool = True) -> DataChoice:
        recipe = RecipeCommand.parse(script, words)
        return choose_text(recipe, fallback=lambda: "embedded", own_tokenizer=own_tokenizer)

    assert choice("--data", f"{text}=0.7", f"{tmp_path}/*.txt=0.3") == DataChoice(None)
    assert choice() == DataChoice(Path("embedded"), replaced=""), "the recipe's default is the embedded text itself"
    mixed = choice("--data", f"{text}=0.7", "nobody/has-this=0.3")
    assert (mixed.path, mixed.replaced) == (Path("embedded"), "nobody/has-this")
    assert choice("--data", str(text), "--validation_data", "gone.txt").replaced == "gone.txt"
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / "manifest.json").write_text("{}")
    prepared = ["--data", str(tmp_path / "prepared")]
    assert choice(*prepared) == DataChoice(None)
    assert choice(*prepared, own_tokenizer=False).replaced == str(tmp_path / "prepared"), "tokens of another tokenizer"


def test_a_size_that_is_no_number_is_named(script: str) -> None:
    with pytest.raises(ConfigError, match="'two' is not a whole number"):
        planned("ddp", script, "--tp_size", "two")
