"""Flags are strict: every mistake in a file or on the command line names its place and the nearest valid choice."""

from __future__ import annotations

from pathlib import Path

import pytest
from trl import ModelConfig, ScriptArguments, SFTConfig

from accel_scale.errors import ConfigError
from accel_scale.flags.common import ScaleArguments
from accel_scale.flags.parsing import ParsedFlags, parse_flags

CLASSES = (ScriptArguments, SFTConfig, ModelConfig, ScaleArguments)


def parse(tmp_path: Path, text: str | None, *args: str) -> ParsedFlags:
    argv = list(args)
    if text is not None:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        argv = ["--config_file", str(path), *argv]
    return parse_flags(CLASSES, argv, program="sft.py")


def test_command_line_wins_over_file_and_both_are_remembered(tmp_path: Path) -> None:
    parsed = parse(tmp_path, "learning_rate: 2e-4\nmax_steps: 3\n", "--max_steps", "7")
    assert parsed.explicit == {"learning_rate": 2e-4, "max_steps": 7}
    assert parsed.place("learning_rate") == f"{tmp_path}/recipe.yaml:1"
    assert parsed.place("max_steps") == "--max_steps"
    assert parsed.place("seed") == "--seed"


def test_only_what_was_given_is_explicit(tmp_path: Path) -> None:
    parsed = parse(tmp_path, None, "--method", "lora")
    assert parsed.explicit == {"method": "lora"}
    assert parsed.for_class(SFTConfig) == {}
    assert parsed.for_class(ScaleArguments) == {"method": "lora"}


@pytest.mark.parametrize("flag", ["--config_file", "--config"])
@pytest.mark.parametrize("joined", [True, False])
def test_config_file_by_either_name_and_either_spelling(tmp_path: Path, flag: str, joined: bool) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("seed: 11\n")
    argv = [f"{flag}={path}"] if joined else [flag, str(path)]
    assert parse_flags(CLASSES, argv, program="sft.py").explicit == {"seed": 11}


def test_yaml_values_keep_their_text_and_structure(tmp_path: Path) -> None:
    parsed = parse(
        tmp_path,
        "eval_strategy: no\nlora_target_modules: [q_proj, v_proj]\nmodel_init_kwargs: {use_cache: false}\n"
        "max_length: null\nuse_peft: yes\nmax_steps: -1\ncolumns:\n- prompt=question\n",
    )
    assert parsed.explicit == {
        "eval_strategy": "no",
        "lora_target_modules": ["q_proj", "v_proj"],
        "model_init_kwargs": '{"use_cache": false}',
        "max_length": None,
        "use_peft": True,
        "max_steps": -1,
        "columns": ["prompt=question"],
    }


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("seed: 1\nlearning_rte: 3\n", 2, "learning_rate"),
        ("\n\npacking_strategy: bdf\n", 3, "did you mean bfd?"),
        ("per_device_train_batch_size: 2.5\n", 1, "2.5"),
        ("bf16: maybe\n", 1, "bf16"),
        ("method: qlorra\n", 1, "did you mean qlora?"),
        ("seed: [1, 2]\n", 1, "one value"),
        ("seed:\n", 1, "cannot be empty"),
        ("seed: 1\nseed: 2\n", 2, "given twice"),
        ("a: [1\nb: 2\n", 2, "not valid YAML"),
        ("- seed\n", 1, "holds no flags"),
        ("output_dir: !!python/object/apply:os.system [x]\n", 1, "!!python/object/apply:os.system is not read"),
        ("seed: 1\nlora_target_modules: [q_proj, !own k_proj]\n", 2, "the tag !own is not read"),
    ],
)
def test_mistakes_in_the_file_name_line_and_remedy(tmp_path: Path, text: str, line: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path}/recipe.yaml:{line}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_launch_file_given_as_the_recipes_file_is_explained(repository: Path) -> None:
    with pytest.raises(ConfigError, match="accelerate launch --config_file") as caught:
        parse_flags(CLASSES, ["--config_file", str(repository / "accelerate_configs/ddp.yaml")], program="sft.py")
    assert "ddp.yaml:" in str(caught.value)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--learning_rat", "1"], "did you mean --learning_rate?"),
        (["--method", "lorra"], "lorra"),
        (["--config_file", "/nowhere/r.yaml"], "/nowhere/r.yaml"),
    ],
)
def test_mistakes_on_the_command_line(args: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_flags(CLASSES, args, program="sft.py")
    assert says in str(caught.value)


def test_every_trl_flag_comes_through_with_its_default_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_flags(CLASSES, ["--help"], program="sft.py")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for cls in CLASSES:
        for name in cls.__dataclass_fields__:
            assert f"--{name}" in text, name
