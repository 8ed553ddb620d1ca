"""A recipe is recognised by its `RECIPE`, wherever its file is and whatever its name."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest
import yaml

from accel_scale.cli.main import main
from accel_scale.errors import ConfigError
from accel_scale.launching.launch_file import read_launch_file
from accel_scale.planning.search.recipe_choices import PRETRAIN_PLAN, SFT_PLAN, PlannedRecipe
from accel_scale.recipe_specs.finding import declares_recipe, find_recipe, load_recipe
from accel_scale.rehearsing.plan import RUNNER

ROOT = Path(__file__).resolve().parents[2]
DDP = str(ROOT / "accelerate_configs" / "ddp.yaml")


@pytest.fixture
def third(tmp_path: Path) -> Path:
    """A recipe outside the project."""
    path = tmp_path / "elsewhere" / "dpo.py"
    path.parent.mkdir()
    shutil.copyfile(ROOT / "tests" / "recipes" / "third_recipe.py", path)
    assert len(path.read_text().splitlines()) <= 60
    return path


@pytest.mark.parametrize(
    ("text", "declares"),
    [
        ("RECIPE = f()", True),
        ("RECIPE: object = f()", True),
        ("from package import DPO as RECIPE", True),
        ("def main():\n    RECIPE = 1", False),
        ("import sys; sys.exit(3)", False),
        ("print('RECIPE = 1')", False),
        ("RECIPE = (", False),
    ],
)
def test_a_declaration_is_found_without_running_the_script(tmp_path: Path, text: str, declares: bool) -> None:
    path = tmp_path / "script.py"
    path.write_text(f"{text}\n")
    assert declares_recipe(path) is declares
    if not declares:
        assert find_recipe(path) is None  # running the file would end this process, or fail


def test_a_recipe_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("RECIPE = {}\n")
    with pytest.raises(ConfigError, match="RECIPE is a dict"):
        find_recipe(tmp_path / "wrong.py")
    (tmp_path / "empty.py").write_text("from accel_scale import RecipeSpec\nRECIPE = RecipeSpec()\n")
    with pytest.raises(ConfigError, match="no flags"):
        load_recipe(tmp_path / "empty.py")


@pytest.mark.parametrize(("name", "plan"), [("sft", SFT_PLAN), ("pretrain", PRETRAIN_PLAN)])
def test_every_flag_that_a_plan_writes_is_one_of_the_recipes(name: str, plan: PlannedRecipe) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.py")
    assert recipe.spec.plan is plan
    assert {flag for flag in plan.flags if not recipe.has(flag)} == set()


def test_a_copy_under_another_name_is_what_it_declares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "my_run.py"
    shutil.copyfile(ROOT / "recipes" / "pretrain.py", copy)
    pipeline = str(ROOT / "accelerate_configs" / "pp.yaml")
    main(["doctor", "--config_file", pipeline, str(copy), "--pp_size", "2", "--global_batch_size", "16"])
    assert "error: " not in capsys.readouterr().out


def test_doctor_checks_the_flags_of_a_third_recipe(third: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--config_file", DDP, str(third), "--beta", "0.3"]) == 0
    assert main(["doctor", "--config_file", DDP, str(third), "--beta", "0"]) == 1
    assert "--beta: must be above 0" in capsys.readouterr().out
    assert main(["doctor", "--config_file", DDP, str(third), "--bata", "1"]) == 1
    assert "did you mean --beta?" in capsys.readouterr().out


def test_doctor_says_what_it_cannot_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)\n")
    assert main(["doctor", "--config_file", DDP, str(script), "--whatever", "1"]) == 0
    printed = capsys.readouterr().out
    assert "does not say which flags it has" in printed
    assert "RecipeSpec" in printed


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    capsys.readouterr()
    assert main(["plan", "Qwen/Qwen3-0.6B", "--gpu", "H100", "--strategy", "DDP", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_counts_and_writes_what_a_third_recipe_declares(
    third: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = ["--num_gpus", "2", "--global_batch_size", "16", "--max_length", "1024", "--checkpointing_policy", "full"]
    fixed += ["--optim", "adamw_torch_fused", "--no_packing"]
    rows, pairs = ["--per_device_train_batch_size", "4"], ["--per_device_train_batch_size", "2"]
    sft = planned(capsys, *fixed, *rows)["candidates"][0]
    written = planned(capsys, *fixed, *pairs, "--recipe", str(third), "--write", str(tmp_path / "plan"))
    dpo = written["candidates"][0]
    assert dpo["setup"]["micro_batch_size"] == sft["setup"]["micro_batch_size"] == 4, "two pairs are four rows"
    assert dpo["setup"]["accumulation"] == 2 * sft["setup"]["accumulation"]
    weights = {name: found["memory"]["phases"]["forward and loss"]["weights"] for name, found in
               (("sft", sft), ("dpo", dpo))}  # fmt: skip
    assert weights["dpo"] == 2 * weights["sft"], "with a frozen reference"
    assert any("reference model" in note for note in written["notes"])
    flags = yaml.safe_load((tmp_path / "plan" / "recipe.yaml").read_text())
    assert (flags["per_device_train_batch_size"], flags["gradient_accumulation_steps"]) == (2, 4)
    assert (flags["bf16"], flags["gradient_checkpointing"], flags["max_length"]) == (True, True, 1024)
    load_recipe(third).parse(["--config_file", str(tmp_path / "plan" / "recipe.yaml")])  # it has all of these flags
    launch = tmp_path / "run.sh"
    assert main(["launch-script", "slurm", "--config_file", str(tmp_path / "plan"), "--output", str(launch)]) == 0
    assert f"{third} --config_file {tmp_path}/plan/recipe.yaml" in launch.read_text()


def test_a_plan_is_refused_what_a_third_recipe_does_not_have(third: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "Qwen/Qwen3-0.6B", "--gpu", "H100", "--recipe", str(third), "--method", "qlora"])
    assert "dpo.py does not train by qlora" in capsys.readouterr().err
    assert main(["plan", "Qwen/Qwen3-0.6B", "--gpu", "H100", "--recipe", str(third), "--checkpointing_policy",
                 "selective"]) == 1  # fmt: skip
    assert "no --checkpointing_policy" in " ".join(capsys.readouterr().out.split())


def test_a_scaling_test_sets_the_flags_that_a_third_recipe_has(third: Path, tmp_path: Path) -> None:
    from accel_scale.flags.command_line import RecipeCommand
    from accel_scale.rehearsing.scaling_runs import ScalingRun, command_of

    recipe = RecipeCommand.parse(str(third), ["--save_steps", "5"])
    command = command_of(ScalingRun("strong", 2, 4, 32), read_launch_file(DDP), recipe, tmp_path / "out", 20)
    text = " ".join(command)
    assert "--gradient_accumulation_steps 4" in text
    assert "--global_batch_size" not in text
    assert "--plan" not in text
    assert RUNNER not in text


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.py")), ids=lambda path: path.stem)
def test_examples_of_a_recipe_keep_their_lines(path: Path) -> None:
    """`--help` prints the module's docstring, where a lone backslash would join two lines of a command."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert "accelerate launch" in text
    assert [line for line in text.splitlines() if len(line) > 119] == []
