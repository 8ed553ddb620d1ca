"""`accel-scale import`: configurations modelled on the examples of axolotl, LLaMA-Factory and TRL."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from accel_scale.cli.main import main
from accel_scale.errors import ConfigError
from accel_scale.facts.exit_statuses import CONFIG_STATUS, INCOMPLETE_STATUS
from accel_scale.flags.parsing import parse_flags
from accel_scale.importing import axolotl_keys, llama_factory
from accel_scale.importing.convert import import_config
from accel_scale.importing.draft import CHECK, LOST
from accel_scale.recipe_specs.finding import load_recipe
from accel_scale.shipped import launch_names, recipe_script

FOLDER = Path(__file__).parent / "imported"
EXPECTED = yaml.safe_load((FOLDER / "expected.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a copy of all the examples."""
    shutil.copytree(FOLDER, tmp_path / "imported")
    monkeypatch.chdir(tmp_path / "imported")
    return tmp_path / "imported"


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_is_mapped_or_refused_by_name(here, name, capsys):
    expected = EXPECTED[name]
    if "refused" in expected:
        with pytest.raises(SystemExit) as end:
            main(["import", name])
        assert end.value.code == CONFIG_STATUS
        assert capsys.readouterr().err == f"accel-scale import: error: {expected['refused']}\n"
        return
    status = main(["import", name, "-o", "out.yaml"])
    assert status == (INCOMPLETE_STATUS if expected["lost"] else 0)
    told = capsys.readouterr().err
    launch = f" --launch {expected['launch']}" if expected["launch"] else ""
    assert told.splitlines()[0].startswith(f"{expected['project']} → {expected['recipe']}, ")
    assert told.splitlines()[-1] == f"run it: accel-scale {expected['recipe']}{launch} --config_file out.yaml"
    assert expected["launch"] is None or expected["launch"] in launch_names()
    # Every key of the file has its own line, or is listed among those that are off or empty.
    for key in yaml.safe_load((here / name).read_text(encoding="utf-8")):
        assert (
            any(line.split(":")[0].split()[-1:] == [key] for line in told.splitlines()[1:])
            or f"{key}" in (told.partition("off or empty there: ")[2])
        ), key
    # The recipe's own strict reader accepts the result and reads these values.
    recipe = load_recipe(recipe_script(expected["recipe"]))
    written = parse_flags(recipe.classes, ["--config_file", "out.yaml"], program=recipe.program)
    words = [word for flag, value in expected["flags"].items() for word in _words(flag, value)]
    assert written.explicit == parse_flags(recipe.classes, words, program=recipe.program).explicit


def _words(flag: str, value: object) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [f"--{flag}", *map(str, values)]


@pytest.mark.parametrize("name", [name for name in EXPECTED if "refused" not in EXPECTED[name]])
def test_what_did_not_come_across_is_named(here, name):
    draft = import_config(Path(name)).draft
    assert sorted({note.key for note in draft.lost}) == EXPECTED[name]["lost"]
    assert sorted({note.key for note in draft.notes if note.kind == CHECK}) == EXPECTED[name]["check"]
    assert all(note.text for note in draft.notes if note.kind in (LOST, CHECK))


def test_the_examples_are_what_people_have():
    assert len(EXPECTED) >= 15
    assert sum("refused" in entry for entry in EXPECTED.values()) == 2
    assert {entry["recipe"] for entry in EXPECTED.values() if "recipe" in entry} == {
        "sft",
        "dpo",
        "kto",
        "reward",
        "pretrain",
    }


def test_unknown_keys_are_named_and_not_dropped(tmp_path):
    path = tmp_path / "new.yml"
    path.write_text("base_model: a/b\nlearning_rate: 1e-4\nwarp_factor: 9\nother: false\n")
    draft = import_config(path).draft
    assert [(note.key, note.place) for note in draft.lost] == [("warp_factor", f"{path}:3")]
    assert "warp_factor" not in draft.flags


def test_a_value_that_the_recipe_refuses_is_named(tmp_path):
    path = tmp_path / "bad.yml"
    path.write_text("base_model: a/b\nlearning_rate: fast\nlr_scheduler: one_cycle\noptimizer: muon\n")
    draft = import_config(path).draft
    assert {note.key for note in draft.lost} == {"learning_rate", "lr_scheduler", "optimizer"}
    assert not {"learning_rate", "lr_scheduler_type", "optim"} & draft.flags.keys()


@pytest.mark.parametrize(
    ("stage", "name"),
    [('{"stage": 2}', "zero2"), ('{"stage": 3, "offload_param": {"device": "cpu"}}', "zero3_offload"),
     ('{"stage": 3, "offload_optimizer": {"device": "nvme"}}', "zero_infinity"), ('{"stage": 1}', "zero1")],
)  # fmt: skip
def test_a_deepspeed_file_that_is_here_is_read(tmp_path, stage, name):
    (tmp_path / "ds.json").write_text('{"zero_optimization": ' + stage + "}")
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\ndeepspeed: ds.json\n")
    assert import_config(path).draft.launch == name


def test_comments_and_reports_stay_on_one_line(tmp_path, capsys):
    path = tmp_path / "odd.yml"
    path.write_text('base_model: a/b\nlearning_rate: 1e-4\n"evil\\nlearning_rate": 9\n')
    assert main(["import", str(path)]) == INCOMPLETE_STATUS
    out = capsys.readouterr().out
    assert float(yaml.safe_load(out)["learning_rate"]) == 1e-4
    assert sum(line.startswith("learning_rate:") for line in out.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [("a: 1\n", "no configuration of axolotl"), ("- a\n", "holds no flags"), ("stage: [\n", "not valid YAML"),
     ("stage: ppo\n", "no recipe of ours trains by ppo"),
     ("model: a/b\ntrain_dataset: c\nmicro_batch_size: 1\n", "next version")],
)  # fmt: skip
def test_what_is_no_configuration_is_refused(tmp_path, text, problem):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        import_config(path)


def test_a_file_is_not_overwritten(here, capsys):
    with pytest.raises(SystemExit):
        main(["import", "factory_lora.yaml", "-o", "axolotl_dpo.yml"])
    assert "axolotl_dpo.yml: exists already." in capsys.readouterr().err
    assert main(["import", "factory_lora.yaml", "--write", "made"]) == 0
    assert (here / "made" / "factory_lora.yaml").is_file()


@pytest.mark.parametrize("module", [axolotl_keys, llama_factory])
def test_a_table_has_a_key_once(module):
    keys = [row.key for row in module.ROWS]
    assert sorted({key for key in keys if keys.count(key) > 1}) == []
