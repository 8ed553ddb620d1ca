"""Plans in which ranks share the model: the files written, the doctor's verdict, and a run of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from accel_scale.cli.main import main
from accel_scale.data.default import default_model_path
from accel_scale.launching.launch_file import read_launch_file
from accel_scale.planning.cost.rank_share import rank_shares
from accel_scale.planning.models.model_config import facts_from_config
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup
from accel_scale.planning.search.requests import build_request
from accel_scale.planning.search.wish import Wish
from accel_scale.reporting.plan_tables import _other_recipe

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--gpu", "H100", "--recipe", "pretrain", "--global_batch_size", "8", "--per_device_train_batch_size", "1"]


def plan(folder: Path, *words: str) -> tuple[dict, dict]:
    """The launch file and the flags of a written plan."""
    assert main(["plan", *words, "--recipe", "pretrain", "--write", str(folder)]) == 0
    return tuple(yaml.safe_load((folder / name).read_text()) for name in ("launch.yaml", "recipe.yaml"))


def doctor(capsys, launch: Path | str, *flags: str) -> tuple[int, list[str]]:
    """The doctor's exit status and its error lines."""
    capsys.readouterr()
    status = main(["doctor", "--config_file", str(launch), "recipes/pretrain.py", *flags])
    return status, [line for line in capsys.readouterr().out.splitlines() if line.startswith("error")]


BIG = ["Llama-3.1-70B", "--gpu", "H100", "--num_gpus", "64", "--network", "infiniband-8xndr", "--tp_size", "4"]


@pytest.mark.parametrize(
    ("words", "kind", "sizes", "flags"),
    [
        (
            [*BIG, "--pp_size", "4", "--global_batch_size", "256", "--max_length", "4096"],
            "FSDP",
            {"dp_shard": 4, "tp": 4},
            {"pp_size": 4, "pp_schedule": "1f1b", "global_batch_size": 256},
        ),
        (
            ["Llama-3.1-8B", "--gpu", "H100", "--num_gpus", "8", "--max_length", "131072", "--global_batch_size", "8"],
            "FSDP",
            {"dp_shard": 2, "sp": 4},
            {"max_length": 131072},
        ),
        (["Llama-3.2-1B", "--gpu", "H100", "--num_gpus", "2", "--tp_size", "2"], "MULTI_GPU", {}, {"tp_size": 2}),
        (
            ["Llama-3.2-1B", "--gpu", "H100", "--num_gpus", "4", "--pp_size", "2", "--strategy", "DDP x PP2"],
            "MULTI_GPU",
            {},
            {"pp_size": 2},
        ),
        (["Llama-3.2-1B", "--gpu", "H100", "--num_gpus", "8"], None, {}, {}),
    ],
)
def test_written_files_pass_the_doctor(words, kind, sizes, flags, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    launch, recipe = plan(tmp_path, *words)
    assert kind is None or launch["distributed_type"] == kind
    found = launch.get("parallelism_config", {})
    assert {name: found[f"parallelism_config_{name}_size"] for name in sizes} == sizes
    assert flags.items() <= recipe.items()
    assert not {"tp_size", "sp_size", "pp_size"} - set(flags) & set(recipe)
    status, errors = doctor(capsys, tmp_path / "launch.yaml", "--config_file", str(tmp_path / "recipe.yaml"))
    assert (status, errors) == (0, [])


@pytest.mark.parametrize(
    ("name", "flags", "error"),
    [
        ("tp", [], None),
        ("fsdp2_tp", [], None),
        ("fsdp2_sp", ["--max_length", "1024"], None),
        ("pp", ["--pp_size", "2", "--global_batch_size", "64"], None),
        ("3d", ["--pp_size", "2"], None),
        ("3d", [], "2 shards × 2 ranks that share the model are not 8 processes"),
        ("3d", ["--pp_size", "4"], "2 shards × 8 ranks that share the model are not 8 processes"),
        ("pp", ["--pp_size", "3"], "the 2 launched cannot be divided by --pp_size 3"),
        ("fsdp2_tp", ["--tp_size", "4"], "--tp_size is 4, and the launch file says 2"),
        ("zero3", ["--tp_size", "2"], "shards by itself and does not go with --tp_size 2"),
    ],
)
def test_the_doctor_knows_the_flags_of_model_parallelism(name, flags, error, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    launch = ROOT / "accelerate_configs" / f"{name}.yaml"
    status, errors = doctor(capsys, launch, *flags)
    assert status == (1 if error else 0), errors
    assert error is None or any(error in line for line in errors), errors


def test_a_recipe_that_cannot_share_is_told_which_can():
    wish = Wish("Llama-3.1-405B", gpu="A100-40GB", num_gpus="512", max_length="4096", global_batch_size="64")
    (hint,) = _other_recipe(build_request(wish))
    assert hint.startswith("--recipe pretrain (FSDP2 × TP4 × SP2, ")


def test_long_rows_are_shared_by_the_fine_tuning_recipe(capsys, tmp_path):
    words = ["plan", "Llama-3.1-8B", "--gpu", "H100", "--num_gpus", "8", "--max_length", "131072"]
    assert main([*words, "--global_batch_size", "8", "--write", str(tmp_path / "plan")]) == 0
    said = capsys.readouterr().out
    assert "FSDP2 × SP2" in said
    assert "builds the whole model" not in said, "Accelerate loads on one rank and sends shards"
    assert "sp_size: 2" in (tmp_path / "plan" / "recipe.yaml").read_text()
    assert "parallelism_config" not in (tmp_path / "plan" / "launch.yaml").read_text()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("num_gpus", "flags", "label"), [(2, ["--pp_size", "2"], "PP 2")])
def test_a_written_plan_runs(num_gpus, flags, label, tmp_path):
    """The files as written, on CPU processes; the start table shows the memory of a stage."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join((ROOT / "README.md").read_text().split("\n\n")) * 2)
    words = [str(default_model_path()), *SMALL, "--num_gpus", str(num_gpus), "--max_length", "64"]
    _, recipe = plan(tmp_path, *words, "--dataset_name", str(text), *flags)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "launch.yaml")]
    run = [*launch, "--main_process_port", "0", "recipes/pretrain.py", "--config_file", str(tmp_path / "recipe.yaml")]
    run += ["--output_dir", str(tmp_path / "out"), "--max_steps", "2", "--plan", "check", "--eval_rows", "8"]
    done = subprocess.run(
        run, cwd=ROOT, capture_output=True, text=True, timeout=380, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert label in done.stdout
    summary = json.loads((tmp_path / "out" / "run_summary.json").read_text())
    assert summary["steps"] == 2
    config = json.loads((Path(default_model_path()) / "config.json").read_text())
    setup = TrainingSetup(
        accumulation=8,
        sequence_length=64,
        parallel=ParallelSetup("single", 2, pipeline_parallel=2),
    )
    facts = facts_from_config(config, name="small")
    stages = [share.facts.num_params for share in rank_shares(facts, setup)]
    predicted = summary["plan"]["predicted"]["phases"]["optimizer step"]
    # The rank with the highest peak is shown: the first stage keeps more micro-batches, the last has more weights.
    assert predicted["weights"] in [4 * stage for stage in stages]
    assert max(stages) < 0.7 * facts.num_params
    assert read_launch_file(tmp_path / "launch.yaml").num_processes == num_gpus
    assert recipe["pp_size"] == 2
